"""List log lines of the libraries below an engine: NIXL, UCX, Mooncake, LMCache.

Mooncake means its transfer engine. The wordings are from public sources and logs. Standard library only.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Final

from handrail.records import LogKind
from handrail_sidecar.engine_logs.line_pattern import EACH, ONCE, PEER, REQUEST, Fold, Line, Reader, Recogniser

_K = LogKind
_REACH: Final = re.compile(r"(?:intra|inter)-node\b")
_NIC: Final = re.compile(r"[A-Za-z0-9][\w.:-]{0,63}")
_RMA: Final = re.compile(r"\brma(?:_am)?\(([^)]*)\)")


def _ucx_lanes(line: Line, rest: str) -> Line:
    """Read the lane of the data path and its device.

    They are the first entry of ``rma_am(...)``.
    ``am(...)`` lists what messages may use, which is not where the blocks go (case B01).
    Lanes within a host and between hosts are distinguished.
    """
    found, reach = _RMA.search(rest), _REACH.match(rest)
    transport, _, nic = found[1].split()[0].partition("/") if found and found[1].strip() else ("", "", "")
    texts = {"transport": transport, "nic": nic if _NIC.fullmatch(nic) else "", "reach": reach[0] if reach else ""}
    return replace(line, texts={name: text for name, text in texts.items() if text and transport}, reason=None)


def _row(
    name: str,
    kind: LogKind,
    template: str,
    versions: str,
    *,
    level: str = "ERROR",
    fold: Fold = REQUEST,
    reader: Reader | None = None,
) -> Recogniser:
    return Recogniser(name=name, kind=kind, template=template, versions=versions, level=level, fold=fold, reader=reader)


NIXL: Final = (
    _row(
        "nixl.telemetry_off",
        _K.TELEMETRY_OFF,
        "NIXL telemetry is disabled; ignoring telemetry",
        "NIXL 1.x",
        level="WARNING",
        fold=ONCE,
    ),
    _row("nixl.exporter", _K.TELEMETRY_OFF, "Failed to create exporter", "NIXL 0.9-1.3", fold=ONCE),
    _row("nixl.disconnect", _K.PEER_LOST, "nixlRemoteDisconnectError: NIXL_ERR_REMOTE_DISCONNECT", "NIXL 0.7-1.3", fold=ONCE),
    _row(
        "nixl.no_notification",
        _K.LINK_ERROR,
        "genNotif: no specified or potential backend could send the inter-agent notifications",
        "NIXL 0.7-1.3",
        fold=ONCE,
    ),
    _row("ucx.send_failed", _K.LINK_ERROR, "UCX AM send failed with status", "UCX 1.19", fold=ONCE),
    _row(
        "ucx.lanes",
        _K.TRANSPORT,
        "ucp_context_{_} {rest}",
        "UCX 1.15-1.19",
        level="INFO",
        fold=("transport", "nic", "reach"),
        reader=_ucx_lanes,
    ),
    _row(
        "ucx.no_nvlink", _K.TRANSPORT, "cuda-ipc get zcopy disabled as no nvlinks detected", "UCX 1.18", level="DEBUG", fold=ONCE
    ),
)

MOONCAKE: Final = (
    _row(
        "mooncake.slice",
        _K.LINK_ERROR,
        "Worker: Process failed for slice (opcode: {_}, local_nic: {nic}, peer_nic: {peer}@{peer_nic}, "
        "dest_rkey: {_}, retry_cnt: {retries})",
        "Mooncake 0.3",
        fold=("nic", "peer", "peer_nic"),
    ),
    _row("mooncake.sync_timeout", _K.LINK_ERROR, "Sync batch data transfer timeout", "Mooncake 0.3", level="INFO", fold=ONCE),
    _row("mooncake.sync_timeout_one", _K.LINK_ERROR, "Sync data transfer timeout", "Mooncake 0.3", level="INFO", fold=ONCE),
    _row("mooncake.session", _K.PEER_LOST, "Session {peer} failed", "SGLang 0.4-0.5", fold=PEER),
    _row("mooncake.task", _K.LINK_ERROR, "Transfer failed for task{rank}", "Mooncake 0.3", fold=ONCE),
    _row(
        "mooncake.retry",
        _K.TRANSFER_RETRIED,
        "Transfer incomplete, retrying... (attempt {attempt}/{attempts})",
        "Mooncake 0.3",
        level="WARNING",
        fold=ONCE,
    ),
    _row(
        "mooncake.throughput",
        _K.QUEUE_STATS,
        "[Metrics] Transfer Engine Throughput: {rate_mb_s} MB/s",
        "Mooncake 0.3",
        level="INFO",
        fold=EACH,
    ),
)

LMCACHE: Final = (
    _row(
        "lmcache.lookup",
        _K.CACHE_LOOKUP,
        "Reqid: {request_id}, Total tokens {tokens}, LMCache hit tokens: {hit_tokens}, need to load: {load_tokens}",
        "LMCache 0.3-0.4",
        level="INFO",
    ),
    _row(
        "lmcache.lookup_computed",
        _K.CACHE_LOOKUP,
        "Reqid: {request_id}, Total tokens {tokens}, {_}LMCache hit tokens: {hit_tokens}, need to load: {load_tokens}",
        "LMCache 0.3.7-0.5",
        level="INFO",
    ),
    _row(
        "lmcache.short",
        _K.CACHE_SHORT,
        "Request {request_id}The number of retrieved tokens is less than the expected number of tokens",
        "LMCache 0.3",
    ),
    _row(
        "lmcache.unretrievable",
        _K.CACHE_SHORT,
        "The cache block is in the storage, but it can't be retrieved",
        "LMCache 0.3",
        level="WARNING",
        fold=ONCE,
    ),
    _row(
        "lmcache.no_memory",
        _K.CACHE_SHORT,
        "Failed to allocate memory for the KV cache",
        "LMCache 0.3",
        level="WARNING",
        fold=ONCE,
    ),
)

ROWS: Final = (*NIXL, *MOONCAKE, *LMCACHE)
