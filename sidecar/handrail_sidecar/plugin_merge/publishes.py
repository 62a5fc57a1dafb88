"""Merge the publishes of one engine: published, read, freed or expired KV.

It also covers reads that came too late.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from handrail.records import Direction, KvPublish, Source, SpanIds
from handrail.trace_context import TraceContext
from handrail_sidecar.plugin_merge.bounds import Bounded, MergeLimits
from handrail_sidecar.plugin_merge.engine import ENGINE, ObservedEngine, ids_of, read_context
from handrail_sidecar.plugin_merge.requests import since

_DIRECTIONS: Final = {direction.value: direction for direction in Direction}


@dataclass(slots=True)
class PendingPublish:
    """What is known of one publish.

    ``published_ns`` None: only workers have reported it yet.
    """

    request_id: str
    first_received_ns: int
    boot: str = ""
    published_ns: int | None = None
    published_unix_ns: int = 0
    fields: dict[str, Any] = field(default_factory=dict)
    ids: SpanIds | None = None
    origin: str = ""
    lease_ends_ns: int | None = None
    heartbeats: int = 0
    posted_ns: int | None = None
    done_ns: int | None = None
    done_bound_ns: int = 0
    moved: int | None = None
    descriptors: int | None = None
    read_ns: int | None = None
    read_bound_ns: int = 0
    readers: int = 0
    reader: str | None = None
    expired_ns: int | None = None
    freed_ns: int | None = None
    failure: str | None = None
    failure_error: str | None = None
    close_at_ns: int | None = None
    reported_ns: int | None = None


class Publishes:
    """Open publishes by request id, and the last records of closed ones.

    A read may come after the end of its publish.
    """

    def __init__(self, engine: ObservedEngine, limits: MergeLimits) -> None:
        self._engine = engine
        self._limits = limits
        self.open: Bounded[PendingPublish] = Bounded(limits.publishes)
        self.closed: Bounded[tuple[int, KvPublish]] = Bounded(limits.closed)
        self.orphans = 0
        self.late_reads_of_unknown = 0

    def published(
        self, boot: str, at_ns: int, unix_ns: int, reported_fields: Mapping[str, Any], context: TraceContext | None
    ) -> None:
        """Note a publish.

        ``reported_fields["traceparent"]`` is this publish's own span; ``context``: the engine's own trace context of the request.
        """
        publish = self._publish(reported_fields["request"], at_ns)
        if publish.published_ns is not None:  # another child of a composite connector keeps the same blocks
            return
        ids, publish.origin = ids_of(publish.request_id, context)
        own = read_context(reported_fields["traceparent"])
        if own is not None:
            parent = context.span_id if context is not None and context.trace_id == own.trace_id else ""
            ids = SpanIds(trace_id=own.trace_id, span_id=own.span_id, parent_span_id=parent, flags=own.flags)
        publish.ids = ids
        publish.boot, publish.published_ns, publish.published_unix_ns = boot, at_ns, unix_ns
        publish.fields.update(reported_fields)

    def lease(self, request_id: str, at_ns: int, left_ns: int) -> None:
        publish = self._publish(request_id, at_ns)
        publish.heartbeats += 1
        publish.lease_ends_ns = max(publish.lease_ends_ns or 0, at_ns + left_ns)

    def posted(self, request_id: str, at_ns: int) -> None:
        publish = self._publish(request_id, at_ns)
        publish.posted_ns = at_ns if publish.posted_ns is None else min(publish.posted_ns, at_ns)

    def done(self, request_id: str, at_ns: int, moved: int | None, descriptors: int | None, bound_ns: int) -> None:
        publish = self._publish(request_id, at_ns)
        publish.moved = (publish.moved or 0) + (moved or 0)
        publish.descriptors = (publish.descriptors or 0) + (descriptors or 0)
        if publish.done_ns is None or at_ns >= publish.done_ns:
            publish.done_ns, publish.done_bound_ns = at_ns, bound_ns

    def read(self, request_id: str, at_ns: int, reader: str | None, bound_ns: int) -> None:
        publish = self._publish(request_id, at_ns)
        publish.readers += 1
        if publish.read_ns is None or at_ns >= publish.read_ns:
            publish.read_ns, publish.read_bound_ns, publish.reader = at_ns, bound_ns, reader

    def read_late(self, request_id: str, at_ns: int, reader: str | None) -> KvPublish | None:
        """Note a read of blocks that were given up; return the record once more.

        It is returned once a request, however many ranks read.
        """
        if (publish := self.open.get(request_id)) is not None and publish.ids is not None and publish.published_ns is not None:
            record, origin = self._record(publish, None), publish.published_ns
        elif (found := self.closed.get(request_id)) is not None:
            origin, record = found
        else:
            self.late_reads_of_unknown += 1
            return None
        if record.late_read_ns is not None:
            return None
        self.open.pop(request_id, None)
        record = replace(record, late_read_ns=since(origin, at_ns), reader=reader or record.reader)
        self.closed.put(request_id, (origin, record))
        return record

    def expired(self, request_id: str, at_ns: int) -> None:
        publish = self._publish(request_id, at_ns)
        publish.expired_ns = at_ns if publish.expired_ns is None else min(publish.expired_ns, at_ns)

    def freed(self, request_id: str, at_ns: int) -> None:
        if (publish := self.open.get(request_id)) is not None:
            publish.freed_ns = at_ns
            publish.close_at_ns = at_ns + self._limits.settle_ns

    def failure(self, request_id: str, failure_type: str, error: str | None) -> None:
        publish = self.open.get(request_id)
        if publish is not None and publish.failure is None:
            publish.failure, publish.failure_error = failure_type, error

    def settled(self, now_ns: int, *, at_once: bool = False) -> Iterator[KvPublish]:
        """Take the publishes that were freed and of which no more events are expected.

        ``at_once``: also those of which this sidecar will receive no more.
        """
        for publish in list(self.open.values()):
            if publish.published_ns is None:
                if at_once or now_ns - publish.first_received_ns >= self._limits.orphan_ns:
                    del self.open[publish.request_id]
                    self.orphans += 1
            elif publish.close_at_ns is not None:
                explained = publish.read_ns is not None or publish.expired_ns is not None or publish.done_ns is not None
                if at_once or explained or now_ns >= publish.close_at_ns:
                    yield self._close(publish)

    def provisional(self, now_ns: int, *, at_once: bool = False) -> Iterator[KvPublish]:
        """Records of the kept publishes that were not reported lately.

        ``at_once``: of all kept ones.
        """
        limits = self._limits
        for publish in self.open.values():
            if publish.published_ns is None or publish.freed_ns is not None:
                continue
            due = now_ns - publish.published_ns >= limits.provisional_after_ns
            if at_once or (due and (publish.reported_ns is None or now_ns - publish.reported_ns >= limits.provisional_every_ns)):
                publish.reported_ns = now_ns
                yield self._record(publish, now_ns)

    def close_boot(self, boot: str, at_ns: int, word: str) -> Iterator[KvPublish]:
        """End the publishes of an engine that is gone; the blocks are gone too."""
        for publish in [p for p in self.open.values() if p.boot == boot]:
            publish.failure = publish.failure or word
            publish.freed_ns = publish.freed_ns or at_ns
            yield self._close(publish)

    def pinned(self, now_ns: int) -> tuple[int, int]:
        """Bytes kept for consumers, and the age of the oldest in ns."""
        open_ = [p for p in self.open.values() if p.published_ns is not None and p.freed_ns is None]
        kept = sum(p.fields.get("kv_bytes") or 0 for p in open_)
        return kept, max((now_ns - p.published_ns for p in open_ if p.published_ns is not None), default=0)

    def _close(self, publish: PendingPublish) -> KvPublish:
        assert publish.published_ns is not None
        del self.open[publish.request_id]
        record = self._record(publish, None)
        self.closed.put(publish.request_id, (publish.published_ns, record))
        return record

    def _publish(self, request_id: str, at_ns: int) -> PendingPublish:
        publish = self.open.get(request_id)
        if publish is None:
            publish = PendingPublish(request_id, at_ns)
            self.open.put(request_id, publish)
        return publish

    def _record(self, publish: PendingPublish, seen_at_ns: int | None) -> KvPublish:
        assert publish.ids is not None
        assert publish.published_ns is not None
        origin, reported_fields = publish.published_ns, publish.fields
        lease_ns = reported_fields.get("lease_ns")
        return KvPublish(
            process=self._engine.process,
            source=Source.PLUGIN,
            ids=publish.ids,
            engine=ENGINE,
            request_id=publish.request_id,
            published_unix_ns=publish.published_unix_ns,
            connector=reported_fields.get("connector"),
            engine_id=reported_fields.get("engine_id") or self._engine.engine_id,
            direction=_DIRECTIONS.get(reported_fields.get("direction") or ""),
            mode=reported_fields.get("mode"),
            trace_origin=publish.origin,
            tokens=reported_fields.get("tokens"),
            blocks=reported_fields.get("blocks"),
            block_bytes=self._engine.known.get("block_bytes"),
            kv_bytes=reported_fields.get("kv_bytes"),
            lease_ns=lease_ns,
            lease_end_ns=lease_ns if publish.lease_ends_ns is None else max(lease_ns or 0, publish.lease_ends_ns - origin),
            heartbeats=publish.heartbeats,
            posted_ns=since(origin, publish.posted_ns),
            done_ns=since(origin, publish.done_ns),
            done_bound_ns=publish.done_bound_ns,
            bytes_moved=publish.moved,
            descriptors=publish.descriptors,
            read_ns=since(origin, publish.read_ns),
            read_bound_ns=publish.read_bound_ns,
            readers=publish.readers,
            reader=publish.reader,
            freed_ns=since(origin, publish.freed_ns),
            expired_ns=since(origin, publish.expired_ns),
            failure=publish.failure,
            failure_error=publish.failure_error,
            seen_ns=since(origin, seen_at_ns),
            provisional=seen_at_ns is not None,
        )
