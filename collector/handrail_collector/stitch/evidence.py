"""Wrap a record as evidence of one request: its join keys and its times.

Times are by the clock of the record's own host.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from handrail.identity import IdOrigin, JoinKind, joinable, request_key
from handrail.records import (
    Direction,
    EngineRequest,
    EngineTimes,
    Exchange,
    KvFetch,
    KvPublish,
    LogFact,
    PluginSpan,
    Record,
    Role,
    RouterCall,
)
from handrail_collector.stitch.arrival import AHEAD_NS

Item = Record | PluginSpan | LogFact
"""Every record that is evidence of one request."""

CLEAN_UP = re.compile(r"[0-9a-f]{16}\Z")
"""The id of a request that vLLM makes to let a peer free its blocks.

It carries another request's peer id.
"""


@dataclass(slots=True)
class Evidence:
    """A record inside the stitcher.

    ``span`` and ``parent`` are trace id + span id, the form that every index uses.
    """

    record: Item
    offset: int  # journal offset of the batch it came in
    received_unix_ns: int
    trace_id: str  # '' for a log fact
    span_id: str  # of a log fact: its fact id
    parent: str  # '' for a root
    role: Role
    keys: tuple[str, ...]  # request keys it may be joined by
    connector_in: tuple[str, ...]  # keys of the KV that it was to read (D)
    connector_out: tuple[str, ...]  # keys of KV it published (P)
    engine_keys: tuple[str, ...]  # what names this request inside its own engine
    how: JoinKind = JoinKind.OPENED

    @property
    def span(self) -> str:
        """The key of this evidence in every index."""
        return self.trace_id + self.span_id

    @property
    def label(self) -> str:
        """Role and source, such as ``prefill:proxy``.

        Every join and phase that rests on this evidence names it.
        """
        return f"{self.role.value}:{self.record.source.value}"

    @property
    def start_unix_ns(self) -> int:
        """When it began, on its host's wall clock; 0 when that is unusable."""
        return _start(self.record)

    @property
    def end_unix_ns(self) -> int | None:
        """When it ended, on the same clock; None where it is unknown."""
        return _end(self.record)

    @property
    def interval(self) -> tuple[int, int] | None:
        """Start and end, or None where either is unusable."""
        start, end = self.start_unix_ns, self.end_unix_ns
        return (start, end) if start and end is not None else None

    @property
    def ahead(self) -> bool:
        """Whether its times lie after its arrival, so that its clock is no evidence."""
        return max(self.start_unix_ns, self.end_unix_ns or 0) > self.received_unix_ns + AHEAD_NS

    @property
    def within_request(self) -> bool:
        """Whether it happens while its request runs.

        KV that P publishes, and log facts about a request, may outlive the request.
        """
        return not isinstance(self.record, KvPublish | LogFact)

    @property
    def provisional(self) -> bool:
        """Whether it reports an intermediate state, not an end."""
        return isinstance(self.record, EngineTimes | KvFetch | KvPublish) and self.record.provisional

    @property
    def stalled(self) -> bool:
        """Whether it saw a stalled stream."""
        return isinstance(self.record, Exchange) and self.record.stalls is not None

    @property
    def tells_end(self) -> bool:
        """Whether it is the last that its source reports about this request."""
        return not isinstance(self.record, KvFetch | KvPublish | LogFact) and not self.provisional


def evidence_of(record: Item, offset: int, received_unix_ns: int) -> Evidence:
    """Wrap a record with every key that it may be joined by."""
    ids = None if isinstance(record, LogFact) else record.ids
    connector_in, connector_out = _connector_keys(record)
    keys = _keys(record)
    return Evidence(
        record=record,
        offset=offset,
        received_unix_ns=received_unix_ns,
        trace_id=ids.trace_id if ids is not None else "",
        span_id=ids.span_id if ids is not None else _fact_id(record),
        parent=_parent(record),
        role=role_of(record),
        keys=keys,
        connector_in=connector_in,
        connector_out=connector_out,
        engine_keys=_engine_keys(record, keys),
    )


def clean_up(record: Item) -> bool:
    """Whether the record is of a request that the engine made for itself."""
    return isinstance(record, EngineTimes | KvFetch) and bool(CLEAN_UP.match(record.request_id))


def role_of(record: Item) -> Role:
    """Return the role of the sidecar that the record came through.

    A router's spans have the role ``router``, whatever sidecar's tap they came through.
    An engine that reports to the collector directly, past every sidecar, stays ``unknown``: names of services and pods are no
    evidence.
    """
    return Role.ROUTER if isinstance(record, RouterCall) else record.process.role


def connector_key(engine_id: str | None, request_id: str | None) -> tuple[str, ...]:
    """Return the key of the KV, in the form of ``KvParams.keys``.

    It names the KV that vLLM's connectors hand over. Empty where either id is missing.
    """
    return (f"vllm:{engine_id}:{request_id}",) if engine_id and request_id else ()


def _connector_keys(record: Item) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the keys of the KV that it read and of the KV that it published.

    KV of an earlier turn belongs to another request and gives no key.
    """
    if isinstance(record, Exchange):
        kv_in, kv_out = record.kv_in, record.kv_out
        return (
            kv_in.keys() if kv_in is not None and not kv_in.do_remote_decode else (),
            kv_out.keys() if kv_out is not None else (),
        )
    if isinstance(record, KvFetch) and record.direction is not Direction.D_TO_P:
        return connector_key(record.peer_engine_id, record.peer_request_id), ()
    if isinstance(record, KvPublish) and record.direction is not Direction.D_TO_P:
        return (), connector_key(record.engine_id, record.request_id)
    return (), ()


def _engine_keys(record: Item, keys: tuple[str, ...]) -> tuple[str, ...]:
    """Return the keys that name the request inside its own engine.

    ``instance|id``: the engine's own form of the id. ``instance|key:K``: its form at the front end.
    """
    instance = record.process.instance
    if not instance or isinstance(record, RouterCall) or record.process.role is Role.EDGE:
        return ()
    found = tuple(f"{instance}|key:{key}" for key in keys)
    if isinstance(record, EngineTimes | KvFetch | KvPublish | LogFact) and record.request_id:
        return (f"{instance}|{record.request_id}", *found)
    return found


def _parent(record: Item) -> str:
    """Return the trace id + span id of the parent; '' for a root.

    A KV fetch names the peer's publish as its parent only for drawing. The decode's span is used instead, because the published
    KV may be another request's.
    """
    if isinstance(record, LogFact):
        return ""
    parent = record.ids.parent_span_id
    if isinstance(record, KvFetch) and parent == record.publish_span_id:
        parent = record.decode_span_id
    return record.ids.trace_id + parent if parent else ""


def _fact_id(record: Item) -> str:
    assert isinstance(record, LogFact)
    return record.fact_id


def _start(record: Item) -> int:
    if isinstance(record, Exchange):
        return record.arrival_unix_ns
    if isinstance(record, EngineTimes):
        return record.queued_unix_ns
    if isinstance(record, KvFetch):
        return record.known_unix_ns
    if isinstance(record, KvPublish):
        return record.published_unix_ns
    return record.at_unix_ns if isinstance(record, LogFact) else record.start_unix_ns


def _end(record: Item) -> int | None:
    if isinstance(record, Exchange):
        return record.arrival_unix_ns + record.duration_ns
    if isinstance(record, EngineTimes):
        return _later(record.queued_unix_ns, record.finished_ns, record.seen_ns)
    if isinstance(record, KvFetch):
        return _later(record.known_unix_ns, record.ended_ns, record.noticed_ns, record.done_ns, record.seen_ns)
    if isinstance(record, KvPublish):
        return _later(record.published_unix_ns, record.freed_ns, record.expired_ns, record.read_ns, record.seen_ns)
    if isinstance(record, LogFact):
        return record.last_unix_ns
    if isinstance(record, EngineRequest) and record.end_unix_ns is None and record.e2e_ns is not None:
        return record.start_unix_ns + record.e2e_ns
    return record.end_unix_ns


def _later(origin: int, *offsets: int | None) -> int:
    return origin + next((offset for offset in offsets if offset is not None), 0)


def _keys(record: Item) -> tuple[str, ...]:
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
    elif isinstance(record, RouterCall):
        if record.request_id is not None:
            keys[request_key(record.request_id, IdOrigin.CLIENT).key] = None
    elif record.request_id:
        other = record.recogniser.startswith("sglang.") if isinstance(record, LogFact) else record.engine != "vllm"
        keys[request_key(record.request_id, IdOrigin.OTHER if other else IdOrigin.VLLM_ENGINE).key] = None
    return tuple(k for k in keys if joinable(k))
