"""List log lines of vLLM's NIXL connectors, scheduler and engine core.

Its other connectors are in ``lines_vllm_connectors``.
The wordings of 0.32.0 are from its installed source. A test reads that source again: each KV warning and error there must be in
this table or in the committed list of those that say nothing about a hand-off.
Older wordings are from public logs and sources, each with the versions where it was seen. Standard library only.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Final

from handrail.records import LogKind
from handrail_sidecar.engine_logs.fields import clipped, reason_of
from handrail_sidecar.engine_logs.line_pattern import EACH, ONCE, PEER_ENGINE, REQUEST, Fold, Line, Reader, Recogniser
from handrail_sidecar.engine_logs.literal import NotALiteralError, Scalar, flat_dict

_CONTEXT_TEXTS: Final = {
    "engine_id": "engine_id",
    "remote_engine_id": "peer_engine_id",
    "dst_engine_id": "peer_engine_id",
    "remote_request_id": "peer_request_id",
}
_CONTEXT_NUMBERS: Final = {
    "num_local_blocks": "blocks",
    "num_remote_blocks": "peer_blocks",
    "remote_rank": "peer_rank",
    "remote_port": "peer_port",
}
_KIND_OF_FAILURE: Final = (
    ("handshake", LogKind.HANDSHAKE_FAILED),
    ("notification", LogKind.NOTIFICATION_FAILED),
    ("push_reg", LogKind.REGISTRATION_FAILED),
    ("release", LogKind.LINK_ERROR),  # the handle is kept and the release retried: the blocks themselves arrived or failed before
)


_CLEAN_UP_ID: Final = re.compile(r"[0-9a-f]{16}")


def _nixl_failure(line: Line, rest: str) -> Line:
    """Read ``NIXL transfer failure: TYPE[. advice] | Context: {dict}``.

    The context's known keys are parsed without ``eval``.
    After a failed load vLLM sends its own request, with a bare id and no block, by which P frees the blocks (measured).
    When that request fails too, P was not notified; it is not another failed fetch.
    """
    failure = line.texts["failure"]
    kind = next((kind for part, kind in _KIND_OF_FAILURE if part in failure), LogKind.FETCH_FAILED)
    try:
        context = flat_dict(rest)
    except NotALiteralError:
        return replace(line, kind=kind)
    texts = {"failure": failure, **_texts(context)}
    numbers = {to: float(value) for key, to in _CONTEXT_NUMBERS.items() if isinstance(value := context.get(key), int)}
    request = context.get("request_id")
    ids = (clipped(request),) if isinstance(request, str) and request else ()
    if ids and numbers.get("blocks") == 0 and _CLEAN_UP_ID.fullmatch(ids[0]):
        kind = LogKind.NOTIFICATION_FAILED
    state = context.get("xfer_state")
    reason = reason_of(state) if isinstance(state, str) else None
    return replace(line, kind=kind, texts=texts, numbers=numbers, request_ids=ids, reason=reason)


def _texts(context: dict[str, Scalar]) -> dict[str, str]:
    found = {to: clipped(value) for key, to in _CONTEXT_TEXTS.items() if isinstance(value := context.get(key), str) and value}
    host, port = context.get("remote_host"), context.get("remote_port")
    if isinstance(host, str) and host and isinstance(port, int):
        found["peer"] = clipped(f"{host}:{port}")
    return found


_STATS: Final = {
    "Num successful transfers": ("transfers", 1.0),
    "Avg xfer time (ms)": ("avg_transfer_s", 1e-3),
    "P90 xfer time (ms)": ("p90_transfer_s", 1e-3),
    "Avg post time (ms)": ("avg_post_s", 1e-3),
    "P90 post time (ms)": ("p90_post_s", 1e-3),
    "Avg MB per transfer": ("avg_bytes", 2.0**20),  # vLLM divides by 2^20 (case B05)
    "Throughput (MB/s)": (
        "busy_bytes_per_s",
        2.0**20,
    ),  # one rank's rate, not the link's: its times overlap
    "Avg number of descriptors": ("avg_descriptors", 1.0),
    "Num failed transfers": ("failed_transfers", 1.0),
    "Num failed notifications": ("failed_notifications", 1.0),
    "Num KV expired reqs": ("expired_requests", 1.0),
    "Num notifs after expiry": ("late_notifications", 1.0),
}
_ONLY_WITH_TRANSFERS: Final = frozenset(
    {"avg_transfer_s", "p90_transfer_s", "avg_post_s", "p90_post_s", "avg_bytes", "busy_bytes_per_s", "avg_descriptors"}
)


def _stats(line: Line, rest: str) -> Line:
    """Read ``KV Transfer metrics: key=number, ...``, with known keys in base units.

    Unknown keys are kept unchanged when their values are numbers. A missing key stays absent.
    When no transfer succeeded, vLLM prints the averages as 0, which means nothing; they are left out (case D20).
    """
    numbers: dict[str, float] = {}
    for part in rest.split(", ")[:64]:
        key, _, value = part.rpartition("=")
        try:
            number = float(value)
        except ValueError:
            continue
        name, scale = _STATS.get(key, (_plain(key), 1.0))
        if name:
            numbers[name] = number * scale
    if numbers.get("transfers") == 0:
        numbers = {name: number for name, number in numbers.items() if name not in _ONLY_WITH_TRANSFERS}
    return replace(line, numbers=numbers, reason=None)


def _plain(key: str) -> str:
    return "".join(char if char.isalnum() else "_" for char in key.lower()).strip("_")[:64]


def _params(line: Line, rest: str) -> Line:
    """Read a hand-off that could not be used: the peer's ids only."""
    try:
        given = flat_dict(rest)
    except NotALiteralError:
        given = {}
    return replace(line, texts=_texts(given), reason=None)


def read_reason(line: Line, rest: str) -> Line:
    """Read the reason from the rest of the message."""
    return replace(line, reason=reason_of(rest) or line.reason)


def row(
    name: str,
    kind: LogKind,
    template: str,
    versions: str = "0.32",
    *,
    level: str = "ERROR",
    fold: Fold = REQUEST,
    reader: Reader | None = None,
) -> Recogniser:
    return Recogniser(
        name=f"vllm.{name}", kind=kind, template=template, versions=f"vLLM {versions}", level=level, fold=fold, reader=reader
    )


_K = LogKind

NIXL: Final = (
    row(
        "nixl.failure",
        _K.FETCH_FAILED,
        "NIXL transfer failure: {failure}{_} | Context: {rest}",
        "0.14-0.33",
        reader=_nixl_failure,
        fold=("request_id", "failure", "peer_engine_id"),
    ),
    row(
        "nixl.setup_failed_old",
        _K.FETCH_FAILED,
        "NIXL transfer setup/initiation failed for request {request_id}. Marking blocks as invalid",
        "0.11-0.13",
    ),
    row("nixl.state_failed_old", _K.FETCH_FAILED, "NIXL transfer failed for request {request_id} with state", "0.11-0.13"),
    row("nixl.handshake_failed_old", _K.HANDSHAKE_FAILED, "NIXL handshake failed for request {request_id}", "0.11-0.13"),
    row(
        "nixl.expired",
        _K.EXPIRED,
        "Releasing expired KV blocks for request {request_id} which were retrieved by {readers} remote worker(s) "
        "before lease expired",
        "0.15-0.33",
        level="WARNING",
    ),
    row(
        "nixl.expired_old",
        _K.EXPIRED,
        "Releasing expired KV blocks for request {request_id} which were retrieved by {readers} decode worker(s) "
        "within {timeout_s} seconds",
        "0.10-0.14",
        level="WARNING",
    ),
    row(
        "nixl.stale_read",
        _K.STALE_READ,
        "Potentially invalid KV blocks for unrecognized request {request_id} were retrieved by a decode worker",
        "0.10-0.33",
    ),
    row("nixl.unrecognised_push", _K.STALE_READ, "Unrecognized request {request_id} notif (may have expired)"),
    row(
        "nixl.declined",
        _K.READ_DECLINED,
        "Declining expired remote read for {request_id} from engine {peer_engine_id}",
        level="WARNING",
    ),
    row(
        "nixl.metadata_invalidated",
        _K.PEER_REPLACED,
        "Local NIXL metadata for remote engine {peer_engine_id} was invalidated; re-handshaking",
        level="WARNING",
        fold=PEER_ENGINE,
    ),
    row(
        "nixl.metadata_unchecked",
        _K.LINK_ERROR,
        "Could not check local NIXL metadata for engine {peer_engine_id}",
        level="WARNING",
        fold=PEER_ENGINE,
    ),
    row("nixl.post_skipped", _K.FETCH_FAILED, "Skipping KV post-processing for failed request {request_id}", level="WARNING"),
    row("nixl.unavailable", _K.ENGINE_ERROR, "NIXL is not available", fold=ONCE),
    row("nixl.memory", _K.ENGINE_ERROR, "NIXLConnectorWorker gets {rest}", reader=read_reason, fold=ONCE),
    row("nixl.push_undecodable", _K.REGISTRATION_FAILED, "Failed to decode PUSH_REG notification payload", fold=ONCE),
    row(
        "nixl.push_without_id", _K.REGISTRATION_FAILED, "PUSH_REG notif missing request_id; dropping", level="WARNING", fold=ONCE
    ),
    row(
        "nixl.push_no_agents",
        _K.REGISTRATION_FAILED,
        "No remote agents for engine {peer_engine_id}; cannot send registration for {request_id}",
    ),
    row(
        "nixl.push_timeout",
        _K.FETCH_FAILED,
        "NixlPushConnector: registration for request {request_id} timed out after {timeout_s}s without a push completion",
        level="WARNING",
    ),
    row("nixl.push_nothing", _K.BAD_HANDOFF, "No local blocks to push for request {request_id}", level="WARNING"),
    row("nixl.push_nothing_left", _K.BAD_HANDOFF, "No blocks to push for request {request_id}", level="WARNING"),
    row(
        "nixl.push_slow",
        _K.SLOW_SUBMISSION,
        "_do_start_push_kv for {request_id} took {elapsed_ms}ms (slow NIXL submission)",
        level="WARNING",
    ),
    row("nixl.push_writer", _K.ENGINE_ERROR, "nixl-push-writer error; continuing", fold=ONCE),
)

SCHEDULER: Final = (
    row(
        "kv_load_failed",
        _K.REQUEST_FAILED_BY_KV,
        "Failing {requests} request(s) due to KV load failure (failure_policy={policy}, {tokens} tokens affected). "
        "Request IDs: {request_ids}",
        "0.14-0.33",
    ),
    row(
        "kv_load_recovered",
        _K.RECOMPUTED,
        "Recovered from KV load failure: {requests} request(s) rescheduled ({tokens} tokens affected)",
        "0.11-0.33",
        level="WARNING",
        fold=EACH,
    ),
    row(
        "kv_load_recovered_short",
        _K.RECOMPUTED,
        "Recovered from KV load failure: {requests} request(s) rescheduled",
        "0.11-0.13",
        level="WARNING",
        fold=EACH,
    ),
    row(
        "bad_params",
        _K.BAD_HANDOFF,
        "Got invalid KVTransferParams: {rest}",
        "0.9-0.33",
        level="WARNING",
        fold=EACH,
        reader=_params,
    ),
    row(
        "params_without_connector",
        _K.BAD_HANDOFF,
        "Got kv_transfer_params, but no KVConnector found. Disabling KVTransfer for this request",
        "0.9-0.33",
        level="WARNING",
        fold=EACH,
    ),
    row("stats", _K.TRANSFER_STATS, "KV Transfer metrics: {rest}", "0.11-0.33", level="INFO", fold=EACH, reader=_stats),
)


ENGINE: Final = (
    row("core_fatal", _K.ENGINE_DEAD, "EngineCore encountered a fatal error", "0.8-0.33", fold=ONCE),
    row("core_start", _K.ENGINE_DEAD, "EngineCore failed to start", "0.8-0.33", fold=ONCE),
    row(
        "core_exited",
        _K.ENGINE_DEAD,
        "[shutdown] MPClient: engine core exited unexpectedly; starting cleanup",
        "0.30-0.33",
        level="WARNING",
        fold=ONCE,
    ),
    row("core_died", _K.ENGINE_DEAD, "Engine core proc {process} died unexpectedly, shutting down client", "0.8-0.29", fold=ONCE),
    row("output_handler", _K.ENGINE_DEAD, "AsyncLLM output_handler failed", "0.8-0.33", fold=ONCE),
    row(
        "worker_died", _K.ENGINE_DEAD, "Worker proc {process} died unexpectedly (exit code: {exit_code})", "0.30-0.33", fold=ONCE
    ),
    row(
        "worker_died_old",
        _K.ENGINE_DEAD,
        "Worker proc {process} died unexpectedly, shutting down executor",
        "0.9-0.29",
        fold=ONCE,
    ),
    row("worker_failed", _K.ENGINE_DEAD, "WorkerProc failed to start", "0.9-0.33", fold=ONCE),
    row("worker_ended", _K.ENGINE_DEAD, "WorkerProc failed.", "0.9-0.33", fold=ONCE),
    row("worker_exception", _K.ENGINE_ERROR, "WorkerProc hit an exception.", "0.9-0.33", fold=ONCE),
    row("preprocessing", _K.ENGINE_ERROR, "Unexpected error pre-processing request {request_id}", "0.10-0.33"),
    row(
        "rejected_unnotified",
        _K.NOTIFICATION_FAILED,
        "Failed to notify KV connector about rejected request {request_id}",
        level="WARNING",
    ),
    row("core_key_error", _K.ENGINE_ERROR, "KeyError: '{request_id}'", "0.10-0.33"),
    row(
        "request_failed",
        _K.ENGINE_ERROR,
        "Request {request_id} failed with an internal error during generation",
        "0.14-0.33",
    ),
)

ROWS: Final = (*NIXL, *SCHEDULER, *ENGINE)
