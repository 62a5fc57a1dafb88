"""List log lines of SGLang's prefill/decode disaggregation.

The wordings are from its public source (0.4.6 to 0.5.23) and logs. Standard library only.
F-strings with ``=`` print the request ids: ``req.rid='...'``, ``decode_req.req.rid='...'``, in older builds ``rid=...``.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Final

from handrail.records import LogKind
from handrail_sidecar.engine_logs.fields import clipped, reason_of
from handrail_sidecar.engine_logs.line_pattern import ONCE, PEER, PROCESS, REQUEST, Fold, Line, Reader, Recogniser

_K = LogKind
_RID: Final = re.compile(r"\brid='?([^\s',]{1,256})")
_ROOM: Final = re.compile(r"\bbootstrap_room=(\d{1,20})")
_RANK: Final = re.compile(r"\brank=(\d{1,5})")
_SESSION: Final = re.compile(r"mooncake session (\S{1,128}?:\d{1,5})\b")
_TARGET: Final = re.compile(r"kv chunk of \d{1,20} to (\S{1,128}?:\d{1,5})")
_COUNT: Final = re.compile(r"#([a-z][a-z-]{0,40}): (\d{1,12})\b")


def _request(line: Line, rest: str) -> Line:
    """Read request, room, rank, peer and reason of a failed transfer.

    Form: ``rank=R ...rid='ID' ...bootstrap_room=N [with exception KVTransferError(...): why]``.
    """
    rid, room, rank = _RID.search(rest), _ROOM.search(rest), _RANK.search(rest)
    peer = _SESSION.search(rest) or _TARGET.search(rest)
    texts = {**({"room": room[1]} if room else {}), **({"peer": peer[1]} if peer else {})}
    return replace(
        line,
        texts=texts,
        numbers={"rank": float(rank[1])} if rank else {},
        request_ids=(clipped(rid[1]),) if rid else (),
        reason=reason_of(rest.partition("with exception")[2] or rest),
    )


def _queues(line: Line, rest: str) -> Line:
    """Read each ``#name: number``; the rest of the line is ignored (case B22)."""
    return replace(
        line,
        numbers={f"{name.replace('-', '_')}s": float(number) for name, number in _COUNT.findall(rest)[:32]},
        reason=None,
    )


def _row(
    name: str,
    kind: LogKind,
    template: str,
    versions: str = "0.4.6-0.5.23",
    *,
    level: str = "ERROR",
    fold: Fold = REQUEST,
    reader: Reader | None = None,
) -> Recogniser:
    return Recogniser(
        name=f"sglang.{name}", kind=kind, template=template, versions=f"SGLang {versions}", level=level, fold=fold, reader=reader
    )


ROWS: Final = (
    _row("prefill_transfer", _K.FETCH_FAILED, "Prefill transfer failed for request {rest}", reader=_request),
    _row("decode_transfer", _K.FETCH_FAILED, "Decode transfer failed for request {rest}", reader=_request),
    _row("prefill_bootstrap", _K.HANDSHAKE_FAILED, "Prefill bootstrap failed for request {rest}", reader=_request),
    _row("decode_handshake", _K.HANDSHAKE_FAILED, "Decode handshake failed for request {rest}", reader=_request),
    _row(
        "prefill_lost",
        _K.PEER_LOST,
        "Lost connection with prefill instance (bootstrap_addr: {peer}), {requests} ",
        fold=PEER,
    ),
    _row("session_dead", _K.PEER_LOST, "Decode instance could be dead, remote mooncake session {peer} is not alive", fold=PEER),
    _row("metadata_room", _K.COMPAT_MISMATCH, "Metadata corruption detected", "0.5.10-0.5.23", fold=ONCE),
    _row(
        "metadata_not_ready", _K.FETCH_FAILED, "Metadata unexpectedly not ready after readiness gate", "0.5.10-0.5.23", fold=ONCE
    ),
    _row("page_size", _K.COMPAT_MISMATCH, "Page size mismatch", fold=ONCE),
    _row("dtype", _K.COMPAT_MISMATCH, "KV cache dtype mismatch", fold=ONCE),
    _row("transfer_thread", _K.ENGINE_DEAD, "Transfer thread failed", fold=ONCE),
    _row("prefill_batch", _K.QUEUE_STATS, "Prefill batch{rest}", level="INFO", fold=PROCESS, reader=_queues),
    _row("decode_batch", _K.QUEUE_STATS, "Decode batch{rest}", level="INFO", fold=PROCESS, reader=_queues),
)
