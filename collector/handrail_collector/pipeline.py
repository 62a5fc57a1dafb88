"""Follow the journal, decide requests, and publish rows and spans.

The stages are journal → stitch → explain → store; a publish covers an offset range.
Everything in memory may be lost at any moment and is made again from the journal. A start replays from the low-water mark:
spans below the published end are stitched but not stored again, and rows in the store are not published twice.
Decisions use the receive time of the entries while there are any, so that a replay decides as the first run did.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from handrail.otlp.decode import PROTOBUF, decode, decode_repaired
from handrail.otlp.messages import Request
from handrail.otlp.signals import Rejected, Signal
from handrail.otlp.values import attributes_of
from handrail.records import (
    EngineFacts,
    EngineSample,
    EngineTimes,
    Iteration,
    KvFetch,
    KvPublish,
    LogFact,
    ProcessEvent,
    ProcessEventKind,
    RequestCounts,
    Role,
)
from handrail.records.devices import DeviceRun
from handrail.wal.log import FolderGoneError
from handrail_collector.counters import CounterDelta, CounterKey
from handrail_collector.explain.request.counter_attribution import CounterAttribution, UnattributedFailures, unexplained_detail
from handrail_collector.explain.request.kv_evidence import HUNG_NS
from handrail_collector.explain.request.request_row import Fleet, explain, explain_all
from handrail_collector.explain.stalls.stall_rows import StallDesk, no_stalls
from handrail_collector.journal.journal import Entry, Journal
from handrail_collector.links.facts import link_fact_row
from handrail_collector.metrics.counting import Counting
from handrail_collector.metrics.source_liveness import SourceLiveness
from handrail_collector.rows import MERGED, WITHDRAWN_FETCHES, FetchRow, RequestRow, StallRow
from handrail_collector.stitch.arrival import AHEAD_NS, REASONS, as_of_arrival, latest_of, reason_of, start_of
from handrail_collector.stitch.decode import Event, RecordDecoder, SpanBatch, batches, log_batches, metric_batches
from handrail_collector.stitch.duplicates import Duplicates
from handrail_collector.stitch.engine_activity import Activities
from handrail_collector.stitch.engines import EngineRegistry
from handrail_collector.stitch.events import (
    HOUR_NS,
    MINUTE_NS,
    EventRows,
    clock_rows,
    finding_row,
    iteration_row,
    key_of,
    process_event_row,
)
from handrail_collector.stitch.group import RequestGroup
from handrail_collector.stitch.stitcher import SECOND, Decision, Stitcher, StitchSettings
from handrail_collector.store.publish import StorePublisher
from handrail_collector.store.recovery import Recovered
from handrail_collector.store.schema import Table
from handrail_collector.store.tables.append_only import APPEND_ONLY, FlatRows
from handrail_collector.store.tables.requests import requests_table
from handrail_collector.store.tables.samples import table_of
from handrail_collector.store.tables.spans import SpanPlace, SpanRow, spans_table

log = logging.getLogger(__name__)

MAX_LOGGED_FAULTS = 20
STEP_NS = 5 * SECOND
"""Largest disorder of receive times; beyond it the clock was set back.

Entries are stamped before they are on disk, so their order may be slightly off.
"""

PRESSED_WINDOW_NS = 10 * SECOND
"""Deduplication window while the journal is nearly full.

It is short because accepting new data matters more then.
"""

BY_ENTRY = (CounterKey.SPANS, CounterKey.DUPLICATE_BATCHES, CounterKey.DUPLICATE_SPANS, CounterKey.UNREADABLE_SPANS)
"""Counts per entry; other ``CounterKey`` values count at a decision or publish."""

MAX_FOUND = 10_000
"""Most findings that are remembered to avoid repeating them."""

SLICE_S = 0.005
"""Time after which the loop may switch tasks between two entries."""

REQUESTS_A_SLICE = 32
"""Requests that a sweep decides and explains before the loop may switch tasks: about 8 ms."""

SPANS_A_SLICE = 128
"""Spans handled before the loop may switch tasks: about 3 ms.

Senders are acknowledged between slices.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSettings:
    """Settings of the pipeline.

    ``dedup_window_ns``: how far back a replay reaches, so that spans sent again after a restart are recognised.
    """

    flush_interval_ns: int = 5 * SECOND
    max_buffered_spans: int = 100_000
    dedup_window_ns: int = 120 * SECOND
    journal_high_ratio: float = 0.8
    hung_ns: int = HUNG_NS
    stitch: StitchSettings = field(default_factory=StitchSettings)


@dataclass(slots=True)
class PipelineStats:
    """Counts since start."""

    entries: dict[str, int] = field(default_factory=lambda: {signal.value: 0 for signal in Signal})
    spans: int = 0
    spans_stored: int = 0
    log_records: int = 0
    samples: int = 0
    rows: int = 0
    rows_skipped: int = 0  # made again by a replay and already in the store
    undecodable: int = 0
    displaced: dict[str, int] = field(default_factory=lambda: dict.fromkeys(REASONS, 0))  # records with impossible times
    faults: int = 0  # exceptions over one span, request or row, which is left out
    failing: int = 0  # consecutive publishes that failed
    publishes: int = 0
    publish_failures: int = 0
    edge_rows: int = 0
    edge_complete: int = 0
    published_offset: int = 0


class SteadyClock:
    """Correct a clock that was set back.

    Readings continue from where they were, at the clock's own pace, so that deadlines do not wait.
    """

    def __init__(self) -> None:
        self._last_ns = 0
        self._set_back_ns = 0

    def __call__(self, given_ns: int) -> int:
        now = given_ns + self._set_back_ns
        if self._last_ns - now > STEP_NS:
            self._set_back_ns += self._last_ns - now
            now = self._last_ns
        self._last_ns = max(self._last_ns, now)
        return now


class Pipeline:
    """Process the journal of one shard.

    ``run`` follows the journal until it shuts down. All methods belong to one event loop.
    """

    def __init__(
        self,
        journal: Journal,
        publisher: StorePublisher,
        recovered: Recovered,
        settings: PipelineSettings | None = None,
        *,
        journal_max_bytes: int = 4 << 30,
        forward: Callable[[Signal, bytes], None] | None = None,
        now_unix_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self.settings = settings or PipelineSettings()
        self.stats = PipelineStats(published_offset=recovered.end_offset)
        self.stitcher = Stitcher(self.settings.stitch)
        self.duplicates = Duplicates(2 * self.settings.dedup_window_ns)
        self.reader = RecordDecoder()
        self.engines = EngineRegistry()
        self.counted = CounterAttribution(self.settings.stitch.engine_wait_ns + self.settings.stitch.settle_ns)
        self.stalling = StallDesk()
        stitch = self.settings.stitch
        self.counting = Counting(recovered, stitch.engine_wait_ns + stitch.settle_ns + 2 * SECOND)
        self.observed = self.counting.observed
        self.source_liveness = SourceLiveness()
        self._raw: tuple[int, ...] = (0,) * len(BY_ENTRY)
        self._journal = journal
        self._journal_max_bytes = journal_max_bytes
        self._publisher = publisher
        self._published = recovered.evidence
        self._replayed_to = recovered.end_offset
        self._start_offset = recovered.low_water_offset
        self._stored_offset = recovered.end_offset  # spans of entries below this are in the store
        self._taken_offset = recovered.end_offset
        self._position = recovered.low_water_offset  # of the follower; behind the taken offset during a replay
        self._low_water = recovered.low_water_offset
        self._forward = forward
        self._now_unix_ns = now_unix_ns
        self._swept_unix_ns = 0
        # Two clocks: in a replay the entries are hours behind the wall clock, and neither was set back.
        self._entry_clock, self._wall_clock = SteadyClock(), SteadyClock()
        self._spans: list[SpanRow] = []
        self._rows: list[RequestRow] = []
        self._fetches: list[FetchRow] = []
        self._stalls: list[StallRow] = []
        self._events = EventRows()
        self._found: dict[str, None] = dict.fromkeys(recovered.found)
        self._minute = 0
        self._flushing_fetches: list[FetchRow] = []
        self._flushing_stalls: list[StallRow] = []
        self._flushing: list[RequestRow] = []
        self._recent: deque[tuple[int, int]] = deque()  # (received, offset) of entries inside the deduplication window
        self._publishing = asyncio.Lock()
        self._flushes: set[asyncio.Task[None]] = set()

    # --- running ---------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Follow the journal until it has shut down and all of it is taken, then publish.

        Raises ``FolderGoneError`` when the store was deleted or replaced; the journal then accepts nothing more.
        """
        ended = asyncio.Event()
        following, timer = asyncio.create_task(self._follow()), asyncio.create_task(self._tick(ended))
        try:
            await asyncio.wait({following, timer}, return_when=asyncio.FIRST_COMPLETED)
            if timer.done():
                timer.result()  # the timer ends first only by an exception, which must be raised
            await following
            ended.set()
            await timer
        finally:
            following.cancel()
            timer.cancel()
            await asyncio.gather(following, timer, return_exceptions=True)
        await self.flush()

    async def _follow(self) -> None:
        switched_s = time.monotonic()
        async for entry in self._journal.follow(self._start_offset):
            await self._take(entry)
            if time.monotonic() - switched_s >= SLICE_S:  # many small entries would hold the loop as one large one would
                await asyncio.sleep(0)
                switched_s = time.monotonic()
            if len(self._spans) + len(self._events) >= self.settings.max_buffered_spans:
                await self.flush()

    async def _tick(self, ended: asyncio.Event) -> None:
        """Sweep and publish what is due, once a second, even when no entries come."""
        interval_s = self.settings.flush_interval_ns / SECOND
        flushed = time.monotonic()
        while not ended.is_set():
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(ended.wait(), min(1.0, interval_s))
            if self._journal.lag_bytes == 0:
                self._sweep(self._wall_clock(self._now_unix_ns()))
                while self.stitcher.sweeping and not ended.is_set() and self._journal.lag_bytes == 0:
                    await asyncio.sleep(0)
                    self._sweep(self._wall_clock(self._now_unix_ns()))
            if time.monotonic() - flushed >= interval_s:
                flushed = time.monotonic()
                await self.flush()

    # --- intake ----------------------------------------------------------------------------------------------------------

    async def _take(self, entry: Entry) -> None:
        self.stats.entries[entry.signal.value] += 1
        now = self._entry_clock(entry.received_unix_ns)
        self._decided(self.stitcher.advance(now), now)
        if self.stitcher.sweeping or now - self._swept_unix_ns >= SECOND:
            self._sweep(now)
        if entry.signal is Signal.TRACES:
            await self._take_spans(entry, now)
        elif entry.signal is Signal.LOGS:
            await self._take_logs(entry, now)
        elif entry.signal is Signal.METRICS:
            await self._take_metrics(entry, now)
        if self._forward is not None and entry.offset >= self._stored_offset:
            self._forward(entry.signal, entry.payload)
        self._observe(entry)
        self._recent.append((now, entry.offset))
        self._position = entry.next_offset
        self._taken_offset = max(self._taken_offset, entry.next_offset)

    def _observe(self, entry: Entry) -> None:
        """Count the whole of ``entry``, unless an earlier publish counted it."""
        raw = (self.stats.spans, self.duplicates.batches, self.duplicates.spans, self.reader.unreadable)
        if entry.offset >= self._replayed_to:
            for seen, now, before in zip(BY_ENTRY, raw, self._raw, strict=True):
                self.observed.add(seen, now - before)
        self._raw = raw

    async def _request(self, entry: Entry) -> Request | None:
        """Decode ``entry``; return None and count it when it cannot be decoded."""
        try:
            return decode(entry.signal, entry.payload, PROTOBUF)
        except Rejected:
            pass
        try:
            return (await asyncio.to_thread(decode_repaired, entry.signal, entry.payload))[0]
        except Rejected:  # the receiver checked it, so the disk is damaged
            self.stats.undecodable += 1
            return None

    async def _take_spans(self, entry: Entry, now: int) -> None:
        request = await self._request(entry)
        if not isinstance(request, ExportTraceServiceRequest):
            return
        store = entry.offset >= self._stored_offset
        rows: list[SpanRow] = []  # added as a whole: a publish ends between two entries, never within one
        taken = 0
        for resource_spans in request.resource_spans:
            resource = attributes_of(resource_spans.resource.attributes)
            for batch in batches(resource_spans):
                if self.duplicates.batch(batch.process.sender, batch.seq, batch.scope, now):
                    continue
                place = SpanPlace(entry.offset, batch.scope, resource)
                for span in batch.spans:
                    if self.duplicates.span(span.SerializeToString(), now):
                        continue
                    try:
                        rows.append(self._take_span(span, batch, place, now))
                    except Exception:
                        self._fault("a span was left out")
                    taken += 1
                    if taken % SPANS_A_SLICE == 0:
                        await asyncio.sleep(0)
        self.stats.spans += taken
        if store:
            self._spans.extend(rows)

    def _take_span(self, span: Span, batch: SpanBatch, place: SpanPlace, now: int) -> SpanRow:
        """Feed one span to the stitcher and return its row for the store."""
        attributes = attributes_of(span.attributes)
        record = self.reader.read(span, batch.scope, batch.process, attributes)
        self._judge(span.start_time_unix_nano, place.offset, now)
        if record is not None:
            self.stitcher.add(record, place.offset, now)
            if isinstance(record, KvFetch):
                self._watch(record, now)
        elif span.parent_span_id:
            trace = span.trace_id.hex()
            self.stitcher.link(trace + span.span_id.hex(), trace + span.parent_span_id.hex(), now)
        return place.row(span, attributes)

    async def _take_logs(self, entry: Entry, now: int) -> None:
        request = await self._request(entry)
        if not isinstance(request, ExportLogsServiceRequest):
            return
        rows = EventRows()
        taken = 0
        for resource_logs in request.resource_logs:
            for batch in log_batches(resource_logs):
                if self.duplicates.batch(batch.process.sender, batch.seq, batch.scope, now):
                    continue
                for record in batch.logs:
                    try:
                        event = self.reader.read_log(record, batch.process)
                        if event is not None:
                            self._take_event(event, entry.offset, now, rows)
                    except Exception:
                        self._fault("a log record was left out")
                    taken += 1
                    if taken % SPANS_A_SLICE == 0:
                        await asyncio.sleep(0)
        self.stats.log_records += taken
        if entry.offset >= self._stored_offset:
            self._events.extend(rows)

    async def _take_metrics(self, entry: Entry, now: int) -> None:
        request = await self._request(entry)
        if not isinstance(request, ExportMetricsServiceRequest):
            return
        rows = EventRows()
        for resource_metrics in request.resource_metrics:
            for batch in metric_batches(resource_metrics):
                if self.duplicates.batch(batch.process.sender, batch.seq, batch.scope, now):
                    continue
                try:
                    samples = batch.samples()
                except Exception:
                    self._fault("a batch of samples was left out")
                    continue
                for sample in samples:
                    self._take_sample(sample, entry, now, rows)
                await asyncio.sleep(0)
        if entry.offset >= self._stored_offset:
            self._events.extend(rows)

    def _take_sample(self, sample: DeviceRun | EngineSample | RequestCounts, entry: Entry, now: int, rows: EventRows) -> None:
        again = entry.offset < self._replayed_to
        self._judge(sample.at_unix_ns, entry.offset, now)
        if isinstance(sample, RequestCounts):
            self.counting.requests(sample, now, again=again)
            return
        table = table_of(sample)
        rows.add(table, sample)
        number = 1
        if isinstance(sample, DeviceRun):
            self._watch(sample, now)
            number = len(sample.at)
        else:
            self.counting.sample(sample, now, again=again)
        self.source_liveness.sample(sample, now)
        self.stats.samples += number
        if not again:
            self.observed.add(CounterKey.SAMPLES, number, f"{table.value.removesuffix('_samples')}.{sample.source.value}")

    def _take_event(self, event: Event, offset: int, now: int, rows: EventRows) -> None:
        """Feed a decoded log record to every part that uses it."""
        self._judge(start_of(event), offset, now)
        if isinstance(event, Iteration):
            self._watch(event, now)
            rows.add(Table.ITERATIONS, iteration_row(event, offset))
            return
        if isinstance(event, ProcessEvent) and event.kind is ProcessEventKind.PAUSED:
            self._watch(event, now)  # too many to store; their effects are stored with the stalls
            return
        if isinstance(event, LogFact) and self.counted.take(event, offset, now):
            return
        if isinstance(event, ProcessEvent | EngineFacts | LogFact):
            learned = self.engines.take(as_of_arrival(event, now))
            for happened in (learned, event if isinstance(event, ProcessEvent) else None):
                if happened is not None:
                    rows.add(Table.PROCESS_EVENTS, process_event_row(happened, offset))
                    self.stitcher.engine_gone(happened, now)
        if isinstance(event, LogFact) and (fact := link_fact_row(event, offset)) is not None:
            rows.add(Table.LINK_FACTS, fact)
        if isinstance(event, EngineTimes | KvFetch | KvPublish | LogFact) and event.request_id:
            self.stitcher.add(event, offset, now)

    def _watch(self, record: Activities, now: int) -> None:
        """Learn an engine's activity from records about the time before ``now``."""
        if latest_of(record) <= now + AHEAD_NS:
            self.stalling.activity.take(record)

    def _judge(self, at_unix_ns: int, offset: int, now: int) -> None:
        """Count a record with an impossible time; it is processed like any other."""
        reason = reason_of(at_unix_ns, now)
        if reason is not None and offset >= self._replayed_to:
            self.stats.displaced[reason] += 1

    def _fault(self, what: str) -> None:
        """Count an exception over one piece of input, log the first ones, and go on."""
        self.stats.faults += 1
        if self.stats.faults <= MAX_LOGGED_FAULTS:
            log.exception("%s (fault %d; the first %d are told)", what, self.stats.faults, MAX_LOGGED_FAULTS)

    # --- decisions -------------------------------------------------------------------------------------------------------

    def _sweep(self, now: int) -> None:
        """Decide a slice of what is due; while ``stitcher.sweeping`` the next call goes on."""
        if not self.stitcher.sweeping:
            self._swept_unix_ns = now
            self._give_counted(now)
        self._decided(self.stitcher.sweep(now, REQUESTS_A_SLICE), now)
        if self.stitcher.sweeping:
            return
        self._tell_clocks(now)
        held = self.stitcher.low_water()
        if self._pressed() and held is not None and (not self._recent or held < self._recent[0][1]):
            # open requests keep journal segments: under pressure the oldest tenth is decided with the evidence at hand
            self._decided(self.stitcher.evict(max(1, len(self.stitcher) // 10), now), now)

    def _give_counted(self, now: int) -> None:
        """Attribute failures that engines counted to requests.

        A failure goes to a request when only one fits. Otherwise it becomes a finding, once an hour per engine.
        """
        for found in self.counted.settle(self.stitcher.groups, self.engines.ranks, now):
            if not isinstance(found, UnattributedFailures):
                self.stitcher.attach(*found, now)
                continue
            fact, kind = found.fact, "unexplained_failures"
            once = key_of(kind, fact.process.instance, fact.recogniser, fact.at_unix_ns // HOUR_NS)
            if once not in self._found:
                self._remember(once)
                row = finding_row(kind, unexplained_detail(found), fact.process.instance, "", fact.at_unix_ns, found.offset)
                self._events.add(Table.FINDINGS, replace(row, key=once))
                self.observed.add(CounterKey.FINDINGS, word=kind)

    def _remember(self, finding: str) -> None:
        self._found[finding] = None
        if len(self._found) > MAX_FOUND:
            self._found.pop(next(iter(self._found)))

    def _tell_clocks(self, now: int) -> None:
        """Store the clock bounds once a minute.

        A replay stores none, because the first run did.
        """
        if now // MINUTE_NS == self._minute or self._position < self._replayed_to:
            return
        self._minute = now // MINUTE_NS
        for row in clock_rows(self.stitcher.clocks.intervals(), now, self._position):
            self._events.add(Table.CLOCK_PAIRS, row)

    def _pressed(self) -> bool:
        """Check whether the journal is nearly full."""
        return self._journal.size_bytes > self.settings.journal_high_ratio * self._journal_max_bytes

    def _decided(self, decisions: Sequence[Decision], now: int) -> None:
        if not decisions:
            return
        for decision in decisions:
            group = decision.group
            fleet = self.fleet(min(now, group.deadline_unix_ns or now))  # as it was then: a replay may come hours later
            try:
                if group.only_facts:
                    continue
                explained = explain_all(group, fleet)
                if explained.row is None:  # no record of a request: only KV that was kept, or a load
                    self._fetches.extend(explained.fetches)
                    continue
                row, earlier = self._unless_published(group, explained.row)
            except Exception:
                self._fault("a request was left out")
                continue
            earlier.update({(t, r): version for t, r, version in group.superseded})
            group.superseded.clear()
            if row is None:
                self.stats.rows_skipped += 1
                continue
            self.stats.rows += 1
            try:
                self._count(group, row, decision, now)
            except Exception:
                self._fault("a request was not counted")
            row = self._with_standstills(group, row)
            self._rows.append(row)
            earlier.pop((row.trace_id, row.request_id), None)
            self.observed.add(CounterKey.WITHDRAWN_ROWS, len(earlier))
            self._rows.extend(withdrawn(row, *lines, version) for lines, version in sorted(earlier.items()))
            self._fetches.extend(numbered(explained.fetches, row))
            self._fetches.extend(withdrawn_fetches(row, *lines, version) for lines, version in sorted(earlier.items()))
            self._stalls.extend(self._stalls_of(group, row))
            self._stalls.extend(no_stalls(row, *lines, version + 1) for lines, version in sorted(earlier.items()))
            self._compare_engines(row)

    def _with_standstills(self, group: RequestGroup, row: RequestRow) -> RequestRow:
        try:
            return self.stalling.with_standstills(group, row)
        except Exception:
            self._fault("pauses of a request's engines were left out")
            return row

    def _stalls_of(self, group: RequestGroup, row: RequestRow) -> list[StallRow]:
        """Explain and count the stalls of a decided request."""
        try:
            stalls = self.stalling.explain(group, row)
        except Exception:
            self._fault("a request's stalls were left out")
            return []
        self.counting.stalls(group, row, stalls)
        group.stalls_reported = bool(stalls)
        return stalls

    def _compare_engines(self, row: RequestRow) -> None:
        """Report settings in which two engines with a hand-off differ.

        Each difference is a finding of its own, once an hour.
        """
        p, d = row.prefill_instance, row.decode_instance
        if not p or not d:
            return
        for what, at_p, at_d in self.engines.differences(p, d):
            detail = f"{what} is {at_p} at P and {at_d} at D"
            found = finding_row("kv_mismatch", detail, p, d, row.started_unix_ns, row.last_offset)
            if found.key not in self._found:
                self._remember(found.key)
                self._events.add(Table.FINDINGS, found)

    def _count(self, group: RequestGroup, row: RequestRow, decision: Decision, now: int) -> None:
        before = group.counted.edge
        self.counting.row(group, row, decision.closing, now)
        if row.scope == "edge":
            self.stats.edge_rows += before is None
            self.stats.edge_complete += row.complete - bool(before)

    def _unless_published(self, group: RequestGroup, row: RequestRow) -> tuple[RequestRow | None, dict[tuple[str, str], int]]:
        """Return the row to store, or None when the store has it already.

        Also returns other rows in the store that this row makes wrong, with their versions.
        A replay starts in the middle: it may open a request by another span than the first run did, and so under another id.
        Stored requests are therefore recognised by their evidence. A row that adds evidence becomes the next version of a
        stored row, preferably under its own id, so that the choice is deterministic.
        """
        reports = {self._published.get(span_id) for span_id in row.span_ids} if self._published else {None}
        known = {(trace_id, request_id): version for trace_id, request_id, version in filter(None, reports)}
        if not known:
            return row, {}
        group.counted.joins |= {span_id for span_id in row.span_ids if span_id in self._published}
        self.counting.published_before(group, known)
        if len(reports) == 1 and len(known) == 1:
            ((group.row_id, group.version),) = known.items()
            return None, {}
        own = (row.trace_id, row.request_id)
        if row.version > 1:  # an earlier version came from this process
            known[own] = max(row.version - 1, known.get(own, 0))
        chosen = own if own in known else min(known)
        version = max(row.version, known.pop(chosen) + 1)
        group.row_id, group.version = chosen, version
        return replace(row, trace_id=chosen[0], request_id=chosen[1], version=version), known

    def fleet(self, now: int | None = None) -> Fleet:
        """Return the fleet that was reporting at ``now``; in a replay that is long ago."""
        reporting = frozenset(self.stitcher.reporting(self._now_unix_ns() if now is None else now))
        return Fleet(reporting, self.engines, self.stitcher.clocks, self.settings.hung_ns)

    def unpublished(self) -> dict[tuple[str, ...], int]:
        """Return what waits in memory for the next publish, by kind."""
        report = len(self._rows) + len(self._fetches) + len(self._stalls)
        return {("row",): report, ("span",): len(self._spans), ("event",): len(self._events)}

    def reporting(self, now: int) -> set[tuple[Role, str]]:
        """List the (role, source) pairs that recently reported requests or samples."""
        return self.stitcher.reporting(now) | self.source_liveness.since(now - self.settings.stitch.source_memory_ns)

    # --- publishing ------------------------------------------------------------------------------------------------------

    async def flush(self) -> None:
        """Publish decided rows and received spans, durable on return.

        A publish that fails is tried again later. A publish that began always finishes, even when the caller is cancelled:
        its writing thread cannot be stopped, and a second one beside it would tear the manifest.
        """
        flushing = asyncio.create_task(self._flush())
        self._flushes.add(flushing)
        flushing.add_done_callback(self._flushes.discard)
        await asyncio.shield(flushing)

    async def _flush(self) -> None:
        async with self._publishing:
            first, end, low = self._stored_offset, self._taken_offset, self._low()
            if end == first and not self._rows and not self._fetches and not self._stalls and low <= self._low_water:
                return  # an empty range can still move the low-water mark, which frees the journal
            spans, self._spans = self._spans, []
            rows, self._rows = self._rows, []
            fetches, self._fetches = self._fetches, []
            stalls, self._stalls = self._stalls, []
            events, self._events = self._events, EventRows()
            self._flushing, self._flushing_fetches, self._flushing_stalls, self._stored_offset = rows, fetches, stalls, end
            counted = self.observed.take()
            before = self.observed[CounterKey.SPANS_STORED]
            try:
                flat = events.together_with(fetches, stalls)
                counts = self.observed.with_added(counted)
                totals = await asyncio.to_thread(self._publish, first, end, low, spans, rows, counts, counted, flat)
            except Exception as error:
                self.stats.publish_failures += 1
                self.stats.failing += 1
                gone = isinstance(error, FolderGoneError)
                if gone:
                    self._journal.refuse(f"the store is gone: {error}")
                else:
                    log.error("publishing failed, will be tried again: %s", error, exc_info=not isinstance(error, OSError))
                self._spans, self._rows, self._fetches = spans + self._spans, rows + self._rows, fetches + self._fetches
                self._stalls = stalls + self._stalls
                self._events = events.then(self._events)
                self._stored_offset = first
                self.observed.put_back(counted)
                if gone:
                    raise
                return
            finally:
                self._flushing, self._flushing_fetches, self._flushing_stalls = [], [], []
            self._low_water = low
            if low >= self._replayed_to:
                # nothing is left that a replay could publish twice
                self._published = {}
                self.counting.forget_published()
            self.stats.failing = 0
            self.stats.publishes += 1
            self.stats.spans_stored += totals[CounterKey.SPANS_STORED.value] - before
            self.observed.done(totals, counted)
            self.stats.published_offset = end
            self._journal.release(low)

    def _publish(
        self,
        first: int,
        end: int,
        low: int,
        spans: list[SpanRow],
        rows: list[RequestRow],
        counted: dict[str, int],
        taken: CounterDelta,
        flat: FlatRows,
    ) -> dict[str, int]:
        """Publish, and on a bad value publish again without what cannot be stored.

        A disk error is raised. Returns the stored totals.
        """
        stored = CounterKey.SPANS_STORED.value
        before = counted.get(stored, 0)
        try:
            counted[stored] = before + len(spans)
            self._publisher.publish(first, end, low, spans, rows, counted, flat, taken.added())
        except OSError:
            raise
        except Exception:
            fitting = [span for span in spans if self._storable(lambda span=span: spans_table([span]))]  # type: ignore[misc]
            telling = [row for row in rows if self._storable(lambda row=row: requests_table([row]))]  # type: ignore[misc]
            others = {
                name: [row for row in of_table if self._storable(lambda row=row, name=name: APPEND_ONLY[name].encode([row]))]  # type: ignore[misc]
                for name, of_table in flat.items()
            }
            if (fitting, telling, others) == (spans, rows, flat):
                raise
            counted[stored] = before + len(fitting)
            self._publisher.publish(first, end, low, fitting, telling, counted, others, taken.added())
        return counted

    def _storable(self, encode: Callable[[], object]) -> bool:
        try:
            encode()
        except Exception:
            self._fault("a row that no column takes was left out of the store")
            return False
        return True

    def _low(self) -> int:
        """Return the offset from which a replay would have to start.

        It is the oldest evidence still held, or the start of the deduplication window.
        """
        horizon = self._now_unix_ns() - (PRESSED_WINDOW_NS if self._pressed() else self.settings.dedup_window_ns)
        while self._recent and self._recent[0][0] < horizon:
            self._recent.popleft()
        held = self.stitcher.low_water()
        candidates = [self._position]
        if held is not None:
            candidates.append(held)
        if self._recent:
            candidates.append(self._recent[0][1])
        return max(self._low_water, min(candidates))

    # --- what is known and not in the store yet --------------------------------------------------------------------------

    def rows(self) -> Sequence[RequestRow]:
        """List decided rows that are not published yet, then rows of open requests.

        Open requests have version 0 and appear once they have an edge or a decode.
        """
        fleet = self.fleet()
        waiting = [*self._flushing, *self._rows]
        for group in self.stitcher.open_groups():
            if group.edge is not None or group.role(Role.DECODE, Role.COLLOCATED):
                try:
                    waiting.append(explain(group, fleet))
                except Exception:
                    self._fault("an open request was left out of an answer")
        return waiting

    def pinned(self) -> dict[str, tuple[int, int]]:
        """Return the KV that each instance keeps for peers that have not read it.

        By instance: bytes, and the age of the oldest in ns, as last reported.
        """
        found: dict[str, tuple[int, int]] = {}
        for evidence in self.stitcher.still_kept():
            kept = evidence.record
            if isinstance(kept, KvPublish):
                size, oldest = found.get(kept.process.instance, (0, 0))
                found[kept.process.instance] = size + (kept.kv_bytes or 0), max(oldest, kept.seen_ns or 0)
        return found

    def stalls(self) -> Sequence[StallRow]:
        """List stalls of decided requests that are not published yet.

        Open streams have none.
        """
        return [*self._flushing_stalls, *self._stalls]

    def fetches(self) -> Sequence[FetchRow]:
        """List decided hand-offs that are not published yet, then open ones (version 0)."""
        fleet = self.fleet()
        waiting = [*self._flushing_fetches, *self._fetches]
        for group in self.stitcher.open_groups():
            if not group.only_facts and any(isinstance(e.record, KvFetch | KvPublish) for e in group.evidence):
                try:
                    waiting.extend(explain_all(group, fleet).fetches)
                except Exception:
                    self._fault("an open hand-off was left out of an answer")
        return waiting


def numbered(fetches: Sequence[FetchRow], row: RequestRow) -> list[FetchRow]:
    """Give the hand-offs of ``row`` its ids and version."""
    return [replace(f, trace_id=row.trace_id, request_id=row.request_id, version=row.version) for f in fetches]


def withdrawn_fetches(row: RequestRow, trace_id: str, request_id: str, version: int) -> FetchRow:
    """Make the row that withdraws the hand-offs of an earlier row.

    The earlier row is about a part of ``row``'s request.
    """
    return FetchRow(
        started_unix_ns=row.started_unix_ns,
        trace_id=trace_id,
        request_id=request_id,
        version=version + 1,
        number=WITHDRAWN_FETCHES,
        span_id=request_id,
    )


def withdrawn(row: RequestRow, trace_id: str, request_id: str, version: int) -> RequestRow:
    """Make the row that withdraws an earlier row of a part of ``row``'s request.

    It is the earlier row's next version, without content.
    """
    return replace(
        row,
        trace_id=trace_id,
        request_id=request_id,
        version=version + 1,
        scope=MERGED,
        gap_sum_ns=None,
        gap_min_ns=None,
        gap_buckets=(),
        gap_counts=(),
        phases=(),
        joins=(),
        findings=(),
        span_ids=(),
    )
