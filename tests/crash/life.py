"""A collector's life from its first byte to its last removal, step by step.

The journal, the pipeline, the publisher and maintenance are the real ones.
It lasts six weeks and has nine requests with a span for each process. They are published as they come, joined late, withdrawn,
compacted twice, expired, and removed over the quota. Nothing runs by itself: each step is called, so every life is the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from builders.device_samples import gauge, gpu, sample
from builders.plugin import fetch, happened
from builders.records import EPOCH, split_request
from handrail.otlp.signals import Signal
from handrail.records import Exchange, ProcessEventKind, Role, SpanIds
from handrail.wal.filesystem import Filesystem
from handrail.wal.log import LogLimits, SegmentLog
from handrail_collector.journal.journal import Journal
from handrail_collector.pipeline import Pipeline, PipelineSettings
from handrail_collector.stitch.stitcher import SECOND, StitchSettings
from handrail_collector.store.layout import DAY_NS, HOUR_NS
from handrail_collector.store.maintenance import Upkeep, UpkeepSettings
from handrail_collector.store.manifest import files_of
from handrail_collector.store.publish import StorePublisher
from handrail_collector.store.schema import Table
from harness.pipelines import Clock, batch, device_batch, log_batch, plugin_batch, sweep, taken, until

DAY0 = (EPOCH // DAY_NS + 1) * DAY_NS + HOUR_NS
TODAY = DAY0 + 40 * DAY_NS
GRACE_NS = 60 * SECOND
LOAD = 9
"""The last digits of the span ids of loads."""
LIMITS = LogLimits(max_bytes=256 << 10, segment_bytes=2 << 10, max_record_bytes=64 << 10)
STITCH = StitchSettings(
    engine_wait_ns=3 * SECOND,
    settle_ns=SECOND,
    late_window_ns=60 * SECOND,
    max_open_ns=20 * SECOND,
    source_memory_ns=600 * SECOND,
)


class UpkeepFailedError(Exception):
    """A step of maintenance failed and is due again."""


@dataclass(frozen=True, slots=True)
class Sent:
    """One export request.

    ``spans``: ids. ``evidence``: those spans that a request row rests on. ``events``: of logs and metrics.
    """

    payload: bytes
    request: str
    spans: tuple[str, ...]
    evidence: tuple[str, ...]
    edge: bool = False
    events: tuple[str, ...] = ()
    signal: Signal = Signal.TRACES


@dataclass(frozen=True, slots=True)
class Step:
    """Export requests, or one action of the collector by name, at ``at_unix_ns``."""

    at_unix_ns: int
    sent: tuple[Sent, ...] = ()  # at once
    action: str = ""


@dataclass(slots=True)
class Script:
    """The steps, with ids and sequence numbers that are the same in every life."""

    steps: list[Step] = field(default_factory=list)
    _seq: int = 0

    def records(self, rid: str, at_unix_ns: int) -> tuple[Exchange, Exchange, Exchange]:
        """Return the proxies' records of one request."""
        every = split_request(rid, rid, at_ms=(at_unix_ns - EPOCH) / 1e6)
        edge, p, d = (record for record in every.values() if isinstance(record, Exchange))
        base = len(self.steps) + 1

        def fixed(record: Exchange, number: int, parent: str) -> Exchange:
            span_id = f"{base:08x}{number:08x}"
            return replace(record, ids=SpanIds(trace_id=record.ids.trace_id, span_id=span_id, parent_span_id=parent))

        edge = fixed(edge, 1, "")
        return edge, fixed(p, 2, edge.ids.span_id), fixed(d, 3, edge.ids.span_id)

    def send(self, at_unix_ns: int, rid: str, *records: Exchange) -> None:
        """Send each record in a batch of its own, one after the other."""
        self.steps += [Step(at_unix_ns, (self._sent(rid, record),)) for record in records]

    def send_at_once(self, at_unix_ns: int, rid: str, *records: Exchange) -> None:
        """Send each record in a batch of its own, all at once; they share a sync."""
        self.steps.append(Step(at_unix_ns, tuple(self._sent(rid, record) for record in records)))

    def _sent(self, rid: str, record: Exchange) -> Sent:
        self._seq += 1
        payload = batch([record], self._seq, record.process.role.value)
        ids = (record.ids.span_id,)
        return Sent(payload, rid, ids, ids, record.process.role.value == "edge")

    def load(self, at_unix_ns: int, rid: str, below: Exchange) -> None:
        """Send the record of the load by the plugin in D."""
        self._seq += 1
        span_id = f"{len(self.steps) + 1:08x}{LOAD:08x}"
        record = replace(
            fetch((at_unix_ns - EPOCH) / 1e6, rid=f"cmpl-{rid}-0-0000dddd", peer=None),
            ids=SpanIds(trace_id=below.ids.trace_id, span_id=span_id, parent_span_id=below.ids.span_id),
        )
        self.steps.append(Step(at_unix_ns, (Sent(plugin_batch([record], self._seq), rid, (span_id,), (span_id,)),)))

    def tell(self, at_unix_ns: int, detail: str) -> None:
        """Send a sidecar's event about an engine's process."""
        self._seq += 1
        event = happened(ProcessEventKind.HUNG, Role.DECODE, (at_unix_ns - EPOCH) / 1e6, detail=detail)
        self.steps.append(
            Step(at_unix_ns, (Sent(log_batch([event], self._seq), detail, (), (), events=(detail,), signal=Signal.LOGS),))
        )

    def sample(self, at_unix_ns: int, device: str) -> None:
        """Send a sidecar's sample of a GPU; its key tells the samples apart."""
        self._seq += 1
        payload = device_batch([sample(gpu(key=device), at_unix_ns, gauge("utilization_ratio", 0.5))], self._seq)
        self.steps.append(Step(at_unix_ns, (Sent(payload, device, (), (), events=(device,), signal=Signal.METRICS),)))

    def link(self, at_unix_ns: int, rid: str, span_id: str, parent: Exchange) -> None:
        """Send a router's span, which only shows what is below what."""
        span = Span(
            trace_id=bytes.fromhex(parent.ids.trace_id),
            span_id=bytes.fromhex(span_id),
            parent_span_id=bytes.fromhex(parent.ids.span_id),
            name="router",
            start_time_unix_nano=parent.arrival_unix_ns,
        )
        request = ExportTraceServiceRequest()
        request.resource_spans.add().scope_spans.add().spans.append(span)
        self.steps.append(Step(at_unix_ns, (Sent(request.SerializeToString(), rid, (span_id,), ()),)))

    def act(self, at_unix_ns: int, *actions: str) -> None:
        """Add the actions, one after the other."""
        self.steps += [Step(at_unix_ns, action=action) for action in actions]


def script() -> list[Step]:
    """Return the whole life."""
    s = Script()
    for day, rid in enumerate(("expires", "over-quota")):
        at = DAY0 + day * DAY_NS
        s.send(at + 2 * SECOND, rid, *s.records(rid, at))
        s.act(at + 20 * SECOND, "decide", "publish")
    for number in range(3):
        at = TODAY + number * 10 * SECOND
        whole = s.records(f"whole-{number}", at - SECOND)
        (s.send_at_once if number else s.send)(at, f"whole-{number}", *whole)
        s.load(at, f"whole-{number}", whole[2])
        s.tell(at, f"event-{number}")
        if number != 1:
            s.sample(at, f"gpu-{number}")
        s.act(at + 5 * SECOND, "decide", *(["publish"] if number % 2 else []))
    at = TODAY + 60 * SECOND
    edge, p, d = s.records("late", at - SECOND)
    s.send(at, "late", edge, p)
    s.act(at + 5 * SECOND, "decide", "publish")
    s.send(at + 6 * SECOND, "late", d)
    s.act(at + 12 * SECOND, "decide", "publish")
    at = TODAY + 100 * SECOND
    edge, p, d = s.records("linked", at - SECOND)
    lost = replace(d, request_id="other", kv_in=None, ids=replace(d.ids, parent_span_id="ab" * 8))
    s.send(at, "linked", edge, p, lost)
    s.act(at + 8 * SECOND, "decide", "publish")  # two rows
    s.link(at + 9 * SECOND, "linked", "ab" * 8, edge)
    s.act(at + 15 * SECOND, "decide", "publish")  # one of them withdrawn
    after = TODAY + 2 * HOUR_NS
    s.act(after, "publish", "compaction", "rollup")
    s.send(after + SECOND, "backlog", *s.records("backlog", TODAY + 120 * SECOND))
    s.act(after + 20 * SECOND, "decide", "publish", "compaction", "rollup")
    s.act(after + 30 * SECOND + GRACE_NS, "removal", "retention", "quota")
    s.send(after + 40 * SECOND + GRACE_NS, "last", *s.records("last", after + 30 * SECOND + GRACE_NS))
    s.act(after + 60 * SECOND + 2 * GRACE_NS, "decide", "publish", "removal")
    return s.steps


RETENTION_NS = TODAY - DAY0 - DAY_NS
"""A retention by which the first day is too old and the second is not."""


@dataclass(slots=True)
class Collector:
    """One process of a collector, without sockets."""

    publisher: StorePublisher
    journal: Journal
    pipeline: Pipeline
    clock: Clock
    running: asyncio.Task[None] | None = None

    @classmethod
    def open(cls, root: Path, files: Filesystem, clock: Clock) -> Collector:
        """Open journal and store as a start does; this repairs what a crash left."""
        publisher = StorePublisher(root / "store", files=files, now_unix_ns=clock)
        recovered = publisher.open()
        try:
            log = SegmentLog(root / "journal", LIMITS, files=files, floor=recovered.end_offset)
        except BaseException:
            publisher.close()
            raise
        journal = Journal(log, now_unix_ns=clock)
        settings = PipelineSettings(flush_interval_ns=3600 * SECOND, stitch=STITCH)
        return cls(publisher, journal, Pipeline(journal, publisher, recovered, settings, now_unix_ns=clock), clock)

    async def start(self) -> None:
        """Start and replay the journal."""
        await self.journal.start()
        last = max((record.next_offset for record in self.journal._log.read(0)), default=0)  # the end may be damaged
        self.running = asyncio.create_task(self.pipeline.run())
        await until(lambda: self.pipeline._position >= last)

    async def send(self, sent: Sequence[Sent]) -> None:
        """Send, and return when all of it is acknowledged and taken."""
        if sent:
            await asyncio.gather(*(self.journal.consume(each.signal, each.payload) for each in sent))
            await taken(self.pipeline, self.journal)

    async def settled(self) -> None:
        """Wait until the thread that owns the journal's files has nothing left to do."""
        await asyncio.get_running_loop().run_in_executor(self.journal._writer, lambda: None)

    async def do(self, step: Step) -> None:
        """Carry out one step of ``script``."""
        if step.sent:
            await self.send(step.sent)
        else:
            await self.act(step.action)

    async def act(self, action: str) -> None:
        """Carry out one action of ``script``."""
        if action == "decide":
            sweep(self.pipeline, self.clock.now)
        elif action == "publish":
            await self.pipeline.flush()
            await self.settled()
        else:
            self._upkeep(action)

    def _upkeep(self, action: str) -> None:
        size = sum(file.bytes for table in Table for file in files_of(self.publisher.publishes(), table))
        settings = UpkeepSettings(grace_ns=GRACE_NS, retention_ns=RETENTION_NS, max_bytes=size - 1, rollups=True)
        upkeep = Upkeep(self.publisher, settings, self.clock)
        steps: dict[str, Callable[[], None]] = {
            "compaction": upkeep._fold_all,
            "rollup": upkeep._roll_up_all,
            "retention": upkeep._expire,
            "quota": upkeep._keep_quota,
            "removal": upkeep._remove,
        }
        steps[action]()
        if upkeep.stats.failures:
            raise UpkeepFailedError(action)

    async def stop(self) -> None:
        """Stop cleanly, which publishes what is decided."""
        await self.journal.shutdown()
        if self.running is not None:
            await self.running
        self.publisher.close()

    def close_files(self) -> None:
        """Close a collector that was opened and never started."""
        self.journal._log.close()
        self.publisher.close()

    async def kill(self) -> None:
        """End at once; only this process lets go of files and threads."""
        if self.running is not None:
            self.running.cancel()
            await asyncio.gather(self.running, return_exceptions=True)
        await self.journal.shutdown()
        self.publisher.close()


def requests_of(sent: Sequence[Sent]) -> Iterator[frozenset[str]]:
    """Return the evidence of each request that must have one row.

    It assumes that exactly this was sent and that time has passed.
    """
    linked = any(not each.evidence and each.spans for each in sent)
    by_request: dict[str, set[str]] = {}
    for each in sent:
        alone = each.request == "linked" and not linked and not each.edge and each.spans[0].endswith("3")
        if each.evidence:
            by_request.setdefault(f"{each.request}{' alone' if alone else ''}", set()).update(each.evidence)
    return map(frozenset, by_request.values())
