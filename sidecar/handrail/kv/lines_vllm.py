"""Lines of vLLM: NIXL connectors, scheduler, engine core, and its Mooncake, MoRIIO and LMCache connectors.

Wordings of 0.32.0 from its installed source (a test reads the source again and wants every KV warning and error there in this
table or in the committed list of those that say nothing about a hand-off); older ones from public logs and sources, each with
the versions it was seen in. Standard library only.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Final

from handrail.kv.fields import clipped, reason_of
from handrail.kv.literal import NotALiteralError, Scalar, flat_dict
from handrail.kv.recogniser import EACH, ONCE, PEER, PEER_ENGINE, REQUEST, Fold, Line, Reader, Recogniser
from handrail.records import LogKind

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
    ("release", LogKind.LINK_ERROR),  # the handle is kept and tried again: the blocks themselves arrived or failed before
)


_CLEAN_UP_ID: Final = re.compile(r"[0-9a-f]{16}")


def _nixl_failure(line: Line, rest: str) -> Line:
    """``NIXL transfer failure: TYPE[. advice] | Context: {dict}``: the context's known keys, parsed without ``eval``.

    After a failed load vLLM sends a request of its own, with a bare id and no block, that tells P to free the blocks (MEASURED
    section 4c). Where that one fails too, P was not told; it is not another failed fetch.
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
    "Throughput (MB/s)": ("busy_bytes_per_s", 2.0**20),  # bytes over the sum of overlapping times: of one rank, no link rate
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
    """``KV Transfer metrics: key=number, ...``: known keys in base units, unknown ones kept as they are when they are numbers.

    A key that is not there stays absent. Where no transfer succeeded, its averages are printed as 0 and mean nothing: left out
    (case D20).
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
    """A hand-off that could not be used: the peer's ids only."""
    try:
        given = flat_dict(rest)
    except NotALiteralError:
        given = {}
    return replace(line, texts=_texts(given), reason=None)


def _core(line: Line, rest: str) -> Line:
    return replace(line, reason=reason_of(rest) or line.reason)


def _row(
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
    _row(
        "nixl.failure",
        _K.FETCH_FAILED,
        "NIXL transfer failure: {failure}{_} | Context: {rest}",
        "0.14-0.33",
        reader=_nixl_failure,
        fold=("request_id", "failure", "peer_engine_id"),
    ),
    _row(
        "nixl.setup_failed_old",
        _K.FETCH_FAILED,
        "NIXL transfer setup/initiation failed for request {request_id}. Marking blocks as invalid",
        "0.11-0.13",
    ),
    _row("nixl.state_failed_old", _K.FETCH_FAILED, "NIXL transfer failed for request {request_id} with state", "0.11-0.13"),
    _row("nixl.handshake_failed_old", _K.HANDSHAKE_FAILED, "NIXL handshake failed for request {request_id}", "0.11-0.13"),
    _row(
        "nixl.expired",
        _K.EXPIRED,
        "Releasing expired KV blocks for request {request_id} which were retrieved by {readers} remote worker(s) "
        "before lease expired",
        "0.15-0.33",
        level="WARNING",
    ),
    _row(
        "nixl.expired_old",
        _K.EXPIRED,
        "Releasing expired KV blocks for request {request_id} which were retrieved by {readers} decode worker(s) "
        "within {timeout_s} seconds",
        "0.10-0.14",
        level="WARNING",
    ),
    _row(
        "nixl.stale_read",
        _K.STALE_READ,
        "Potentially invalid KV blocks for unrecognized request {request_id} were retrieved by a decode worker",
        "0.10-0.33",
    ),
    _row("nixl.unrecognised_push", _K.STALE_READ, "Unrecognized request {request_id} notif (may have expired)"),
    _row(
        "nixl.declined",
        _K.READ_DECLINED,
        "Declining expired remote read for {request_id} from engine {peer_engine_id}",
        level="WARNING",
    ),
    _row(
        "nixl.metadata_invalidated",
        _K.PEER_REPLACED,
        "Local NIXL metadata for remote engine {peer_engine_id} was invalidated; re-handshaking",
        level="WARNING",
        fold=PEER_ENGINE,
    ),
    _row(
        "nixl.metadata_unchecked",
        _K.LINK_ERROR,
        "Could not check local NIXL metadata for engine {peer_engine_id}",
        level="WARNING",
        fold=PEER_ENGINE,
    ),
    _row("nixl.post_skipped", _K.FETCH_FAILED, "Skipping KV post-processing for failed request {request_id}", level="WARNING"),
    _row("nixl.unavailable", _K.ENGINE_ERROR, "NIXL is not available", fold=ONCE),
    _row("nixl.memory", _K.ENGINE_ERROR, "NIXLConnectorWorker gets {rest}", reader=_core, fold=ONCE),
    _row("nixl.push_undecodable", _K.REGISTRATION_FAILED, "Failed to decode PUSH_REG notification payload", fold=ONCE),
    _row(
        "nixl.push_without_id", _K.REGISTRATION_FAILED, "PUSH_REG notif missing request_id; dropping", level="WARNING", fold=ONCE
    ),
    _row(
        "nixl.push_no_agents",
        _K.REGISTRATION_FAILED,
        "No remote agents for engine {peer_engine_id}; cannot send registration for {request_id}",
    ),
    _row(
        "nixl.push_timeout",
        _K.FETCH_FAILED,
        "NixlPushConnector: registration for request {request_id} timed out after {timeout_s}s without a push completion",
        level="WARNING",
    ),
    _row("nixl.push_nothing", _K.BAD_HANDOFF, "No local blocks to push for request {request_id}", level="WARNING"),
    _row("nixl.push_nothing_left", _K.BAD_HANDOFF, "No blocks to push for request {request_id}", level="WARNING"),
    _row(
        "nixl.push_slow",
        _K.SLOW_SUBMISSION,
        "_do_start_push_kv for {request_id} took {elapsed_ms}ms (slow NIXL submission)",
        level="WARNING",
    ),
    _row("nixl.push_writer", _K.ENGINE_ERROR, "nixl-push-writer error; continuing", fold=ONCE),
)

SCHEDULER: Final = (
    _row(
        "kv_load_failed",
        _K.REQUEST_FAILED_BY_KV,
        "Failing {requests} request(s) due to KV load failure (failure_policy={policy}, {tokens} tokens affected). "
        "Request IDs: {request_ids}",
        "0.14-0.33",
    ),
    _row(
        "kv_load_recovered",
        _K.RECOMPUTED,
        "Recovered from KV load failure: {requests} request(s) rescheduled ({tokens} tokens affected)",
        "0.11-0.33",
        level="WARNING",
        fold=EACH,
    ),
    _row(
        "kv_load_recovered_short",
        _K.RECOMPUTED,
        "Recovered from KV load failure: {requests} request(s) rescheduled",
        "0.11-0.13",
        level="WARNING",
        fold=EACH,
    ),
    _row(
        "bad_params",
        _K.BAD_HANDOFF,
        "Got invalid KVTransferParams: {rest}",
        "0.9-0.33",
        level="WARNING",
        fold=EACH,
        reader=_params,
    ),
    _row(
        "params_without_connector",
        _K.BAD_HANDOFF,
        "Got kv_transfer_params, but no KVConnector found. Disabling KVTransfer for this request",
        "0.9-0.33",
        level="WARNING",
        fold=EACH,
    ),
    _row("stats", _K.TRANSFER_STATS, "KV Transfer metrics: {rest}", "0.11-0.33", level="INFO", fold=EACH, reader=_stats),
)


ENGINE: Final = (
    _row("core_fatal", _K.ENGINE_DEAD, "EngineCore encountered a fatal error", "0.8-0.33", fold=ONCE),
    _row("core_start", _K.ENGINE_DEAD, "EngineCore failed to start", "0.8-0.33", fold=ONCE),
    _row(
        "core_exited",
        _K.ENGINE_DEAD,
        "[shutdown] MPClient: engine core exited unexpectedly; starting cleanup",
        "0.30-0.33",
        level="WARNING",
        fold=ONCE,
    ),
    _row(
        "core_died", _K.ENGINE_DEAD, "Engine core proc {process} died unexpectedly, shutting down client", "0.8-0.29", fold=ONCE
    ),
    _row("output_handler", _K.ENGINE_DEAD, "AsyncLLM output_handler failed", "0.8-0.33", fold=ONCE),
    _row(
        "worker_died", _K.ENGINE_DEAD, "Worker proc {process} died unexpectedly (exit code: {exit_code})", "0.30-0.33", fold=ONCE
    ),
    _row(
        "worker_died_old",
        _K.ENGINE_DEAD,
        "Worker proc {process} died unexpectedly, shutting down executor",
        "0.9-0.29",
        fold=ONCE,
    ),
    _row("worker_failed", _K.ENGINE_DEAD, "WorkerProc failed to start", "0.9-0.33", fold=ONCE),
    _row("worker_ended", _K.ENGINE_DEAD, "WorkerProc failed.", "0.9-0.33", fold=ONCE),
    _row("worker_exception", _K.ENGINE_ERROR, "WorkerProc hit an exception.", "0.9-0.33", fold=ONCE),
    _row("preprocessing", _K.ENGINE_ERROR, "Unexpected error pre-processing request {request_id}", "0.10-0.33"),
    _row(
        "rejected_unnotified",
        _K.NOTIFICATION_FAILED,
        "Failed to notify KV connector about rejected request {request_id}",
        level="WARNING",
    ),
    _row("core_key_error", _K.ENGINE_ERROR, "KeyError: '{request_id}'", "0.10-0.33"),
    _row(
        "request_failed",
        _K.ENGINE_ERROR,
        "Request {request_id} failed with an internal error during generation",
        "0.14-0.33",
    ),
)

MOONCAKE: Final = (
    _row(
        "mooncake.pull_failed",
        _K.FETCH_FAILED,
        "pulling kv_caches for {request_ids} failed: {rest}",
        "0.14-0.33",
        reader=_core,
    ),
    _row(
        "mooncake.send_failed",
        _K.LINK_ERROR,
        "Sending to {peer} failed (ret={_}) after {_} ({descriptors} descriptors, {bytes} bytes)",
        level="WARNING",
        fold=PEER,
    ),
    _row(
        "mooncake.expired",
        _K.EXPIRED,
        "Request {request_id} timed out after {timeout_s} seconds without being sent. Freeing its blocks on the producer side",
        "0.12-0.33",
        level="WARNING",
    ),
    _row("mooncake.expired_early", _K.EXPIRED, "Request {request_id} expired before sending on P side", level="WARNING"),
    _row("mooncake.peer_slow", _K.FETCH_FAILED, "Timeout waiting for P side ready: {request_ids}", level="WARNING"),
    _row(
        "mooncake.no_transfer_id",
        _K.BAD_HANDOFF,
        "Missing transfer_id in kv_transfer_params from router",
        level="WARNING",
        fold=ONCE,
    ),
    _row(
        "mooncake.groups", _K.COMPAT_MISMATCH, "req {request_id}: KV group count mismatch: local={blocks}, remote={peer_blocks}"
    ),
    _row("mooncake.blocks", _K.BAD_HANDOFF, "req {request_id}: local blocks({blocks}) < remote blocks({peer_blocks})"),
    _row("mooncake.rank", _K.COMPAT_MISMATCH, "This D tp_rank {peer_rank} is not paired with P tp_rank {rank}", fold=ONCE),
    _row(
        "mooncake.layers",
        _K.COMPAT_MISMATCH,
        "Mooncake non-page-contiguous packed regions keep only the first layer name",
        fold=ONCE,
    ),
    _row("mooncake.bootstrap", _K.HANDSHAKE_FAILED, "Failed to connect to bootstrap server {peer} (", fold=PEER),
    _row(
        "mooncake.bootstrap_retry",
        _K.TRANSFER_RETRIED,
        "Bootstrap query to {peer} failed on attempt {attempt}/{attempts}",
        level="WARNING",
        fold=PEER,
    ),
    _row(
        "mooncake.register_retry",
        _K.TRANSFER_RETRIED,
        "Bootstrap registration attempt {attempt}/{attempts} for ",
        level="WARNING",
        fold=ONCE,
    ),
    _row(
        "mooncake.register",
        _K.REGISTRATION_FAILED,
        "Error registering {_} with bootstrap server: {rest}",
        reader=_core,
        fold=ONCE,
    ),
    _row("mooncake.sender", _K.ENGINE_ERROR, "Error in Mooncake sender thread: {rest}", reader=_core, fold=ONCE),
    _row("mooncake.worker", _K.ENGINE_ERROR, "Error in _sender_worker: {rest}", reader=_core, fold=ONCE),
    _row("mooncake.processing", _K.ENGINE_ERROR, "Error processing Mooncake xfer request: {rest}", reader=_core, fold=ONCE),
    _row("mooncake.unavailable", _K.ENGINE_ERROR, "Mooncake is not available", fold=ONCE),
)

MORIIO: Final = (
    _row("moriio.read_failed", _K.FETCH_FAILED, "RDMA transfer failed for request {request_id}: {rest}", reader=_core),
    _row("moriio.read_timeout", _K.FETCH_FAILED, "RDMA read TIMED OUT for req {request_id} after {timeout_s}s"),
    _row("moriio.write_failed", _K.FETCH_FAILED, "Write task failed for request {request_id}, marking done"),
    _row("moriio.deferred_failed", _K.FETCH_FAILED, "Deferred write task failed for request {request_id}, marking done"),
    _row("moriio.deferred_expired", _K.EXPIRED, "Deferred write task for request {request_id} expired after {timeout_s}s"),
    _row("moriio.queue_full", _K.FETCH_FAILED, "MoRIIO READ send queue stayed full past transfer_timeout for req {request_id}"),
    _row("moriio.notify_failed", _K.NOTIFICATION_FAILED, "Failed to send notification to {rest}", reader=_core, fold=ONCE),
    _row("moriio.notify_error_failed", _K.NOTIFICATION_FAILED, "Failed to send error notification for request {request_id}"),
    _row(
        "moriio.notify_nowhere",
        _K.NOTIFICATION_FAILED,
        "Missing remote_ip or remote_port for notification",
        level="WARNING",
        fold=ONCE,
    ),
    _row("moriio.handshake_failed", _K.HANDSHAKE_FAILED, "Handshake with {peer_engine_id} failed", fold=PEER_ENGINE),
    _row("moriio.eager_handshake", _K.HANDSHAKE_FAILED, "Eager MoRIIO handshake failed for {peer_engine_id}", fold=PEER_ENGINE),
    _row(
        "moriio.lost_notifications",
        _K.NOTIFICATION_FAILED,
        "Reaped {requests} deferred sends with no finished_sending notification after {timeout_s}s",
        level="WARNING",
        fold=EACH,
    ),
    _row(
        "moriio.rank_unpinned",
        _K.BAD_HANDOFF,
        "MoRI-IO decode notify: remote_dp_size={_} but the router did not pin remote_dp_rank for request {request_id};",
        level="WARNING",
    ),
    _row("moriio.heartbeat", _K.LINK_ERROR, "MoRIIO discovery heartbeat send failed", level="WARNING", fold=ONCE),
    _row("moriio.unreleased", _K.BAD_HANDOFF, "Cannot release WRITE prefill blocks for request {request_id}:", level="WARNING"),
    _row("moriio.hybrid_layer", _K.ENGINE_ERROR, "MoRIIO hybrid READ failed before ", fold=ONCE),
    _row("moriio.reads_open", _K.ENGINE_ERROR, "MoRIIO reads did not complete before the forward", fold=ONCE),
    _row("moriio.barrier", _K.LINK_ERROR, "MoRIIO READ barrier did not complete for layer", level="WARNING", fold=ONCE),
    _row("moriio.wait_write", _K.LINK_ERROR, "Timed out waiting for write_ready_flags[", level="WARNING", fold=ONCE),
    _row("moriio.wait_load", _K.LINK_ERROR, "Timed out waiting for load_ready_flag[", level="WARNING", fold=ONCE),
    _row("moriio.unavailable", _K.ENGINE_ERROR, "MoRIIO is not available", fold=ONCE),
)

LMCACHE: Final = (
    _row(
        "lmcache.short",
        _K.CACHE_SHORT,
        "The number of retrieved tokens is less than the expected number of tokens",
        "0.10-0.33",
        fold=EACH,
    ),
    _row(
        "lmcache.short_counts",
        _K.CACHE_SHORT,
        "Num retrieved tokens: {got_tokens}, num expected tokens: {expected_tokens}",
        "0.10-0.33",
        fold=EACH,
    ),
    _row(
        "lmcache.retrieve",
        _K.FETCH_FAILED,
        "Something went wrong when processing the retrieve request for request_id={request_id},",
    ),
)

STORES: Final = (
    _row("store.keys", _K.CACHE_SHORT, "Failed to get {blocks} Mooncake keys from sub-batch", level="WARNING", fold=ONCE),
    _row("store.batch", _K.CACHE_SHORT, "Failed to get Mooncake sub-batch", level="WARNING", fold=ONCE),
    _row("store.too_large", _K.CACHE_SHORT, "Skipping Mooncake load for request {request_id} because key", level="WARNING"),
    _row("store.lookup", _K.CACHE_SHORT, "Async Mooncake lookup failed for {request_id}:"),
    _row("store.lookup_remote", _K.LINK_ERROR, "Remote connection failed in lookup:", fold=ONCE),
    _row("store.worker", _K.ENGINE_ERROR, "Error in {process} (req={request_id})"),
    _row("hf3fs.load", _K.CACHE_SHORT, "Load worker error:", fold=ONCE),
    _row("hf3fs.match", _K.CACHE_SHORT, "Error calculating matches for request {request_id}:"),
)

ROWS: Final = (*NIXL, *SCHEDULER, *ENGINE, *MOONCAKE, *MORIIO, *LMCACHE, *STORES)
