"""One piece of evidence about one request: a record, what it can be joined by, and when it happened on its own host's clock."""

from __future__ import annotations

from dataclasses import dataclass

from handrail.identity import IdOrigin, JoinKind, joinable, request_key
from handrail.records import EngineRequest, Exchange, Record, Role, RouterCall


@dataclass(slots=True)
class Evidence:
    """A record inside the stitcher. ``span`` and ``parent`` are trace id + span id, the form every index uses."""

    record: Record
    offset: int  # journal offset of the batch it came in
    received_unix_ns: int
    span: str
    parent: str  # '' for a root
    role: Role
    keys: tuple[str, ...]  # request keys it may be joined by
    connector_in: tuple[str, ...]  # keys of KV it was told to read (D)
    connector_out: tuple[str, ...]  # keys of KV it published (P)
    how: JoinKind = JoinKind.OPENED

    @property
    def label(self) -> str:
        """E.g. ``prefill:proxy``; part of every join and phase that rests on it."""
        return f"{self.role.value}:{self.record.source.value}"

    @property
    def start_unix_ns(self) -> int:
        """When it began, on its host's wall clock; 0 when that is not usable."""
        record = self.record
        return record.arrival_unix_ns if isinstance(record, Exchange) else record.start_unix_ns

    @property
    def end_unix_ns(self) -> int | None:
        """When it ended, on the same clock."""
        record = self.record
        if isinstance(record, Exchange):
            return record.arrival_unix_ns + record.duration_ns
        if isinstance(record, EngineRequest) and record.end_unix_ns is None and record.e2e_ns is not None:
            return record.start_unix_ns + record.e2e_ns
        return record.end_unix_ns

    @property
    def interval(self) -> tuple[int, int] | None:
        """Start and end, or None where either is not usable."""
        start, end = self.start_unix_ns, self.end_unix_ns
        return (start, end) if start and end is not None else None


def evidence_of(record: Record, offset: int, received_unix_ns: int) -> Evidence:
    """Wrap a record with everything it can be joined by."""
    ids = record.ids
    connector_in: tuple[str, ...] = ()
    connector_out: tuple[str, ...] = ()
    if isinstance(record, Exchange):
        if record.kv_in is not None and not record.kv_in.do_remote_decode:
            connector_in = record.kv_in.keys()
        if record.kv_out is not None:
            connector_out = record.kv_out.keys()
    return Evidence(
        record=record,
        offset=offset,
        received_unix_ns=received_unix_ns,
        span=ids.trace_id + ids.span_id,
        parent=ids.trace_id + ids.parent_span_id if ids.parent_span_id else "",
        role=role_of(record),
        keys=_keys(record),
        connector_in=connector_in,
        connector_out=connector_out,
    )


def role_of(record: Record) -> Role:
    """The role the sidecar was given; a router's spans are a router's whatever sidecar's tap they came through.

    An engine that reports to us directly, past every sidecar, stays ``unknown``: names of services and pods are no evidence.
    """
    return Role.ROUTER if isinstance(record, RouterCall) else record.process.role


def _keys(record: Record) -> tuple[str, ...]:
    keys: dict[str, None] = {}
    if isinstance(record, Exchange):
        if record.request_id is not None and record.request_id_hash is None:
            keys[request_key(record.request_id, IdOrigin.CLIENT).key] = None
        if record.request_id_hash is not None:
            keys[f"hash:{record.request_id_hash}"] = None
        if record.response_id is not None:
            keys[request_key(record.response_id, IdOrigin.VLLM_RESPONSE).key] = None
    elif isinstance(record, EngineRequest):
        origin = IdOrigin.VLLM_EXTERNAL if record.engine == "vllm" else IdOrigin.OTHER
        keys[request_key(record.request_id, origin).key] = None
    elif record.request_id is not None:
        keys[request_key(record.request_id, IdOrigin.CLIENT).key] = None
    return tuple(k for k in keys if joinable(k))
