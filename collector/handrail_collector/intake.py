"""Decode journal entries and give each record to the parts that use it.

What an entry adds to the store besides requests comes back as rows: its spans, events and samples.
A record that raises an exception is left out and counted; the rest of its entry is taken.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from handrail.conventions import SCOPE_OWN
from handrail.otlp.decode import PROTOBUF, decode, decode_repaired
from handrail.otlp.messages import Request
from handrail.otlp.signals import Rejected
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
from handrail_collector.counters import CounterKey
from handrail_collector.event_rows import iteration_row, process_event_row
from handrail_collector.explain.request.counter_attribution import CounterAttribution
from handrail_collector.journal.journal import Entry
from handrail_collector.links.facts import link_fact_row
from handrail_collector.metrics.counting import Counting
from handrail_collector.pipeline_stats import PipelineStats
from handrail_collector.row_buffer import RowBatch
from handrail_collector.stitch.arrival import AHEAD_NS, as_of_arrival, latest_of, reason_of, start_of
from handrail_collector.stitch.decode import Event, RecordDecoder, SpanBatch, batches, log_batches, metric_batches
from handrail_collector.stitch.duplicates import Duplicates
from handrail_collector.stitch.engine_activity import Activities, Activity
from handrail_collector.stitch.engines import EngineRegistry
from handrail_collector.stitch.stitcher import Stitcher
from handrail_collector.store.schema import Table
from handrail_collector.store.tables.samples import table_of
from handrail_collector.store.tables.spans import SpanPlace, SpanRow

SPANS_A_SLICE = 128
"""Spans handled before the loop may switch tasks: about 3 ms.

Senders are acknowledged between slices.
"""

BY_ENTRY = (CounterKey.SPANS, CounterKey.DUPLICATE_BATCHES, CounterKey.DUPLICATE_SPANS, CounterKey.UNREADABLE_SPANS)
"""Counts per entry; other ``CounterKey`` values count at a decision or publish."""


@dataclass(slots=True)
class SourceLiveness:
    """When each source last sent samples, by role and source.

    Its size is bounded: both are closed enums.
    The stitcher remembers the sources of requests.
    """

    last_unix_ns: dict[tuple[Role, str], int] = field(default_factory=dict)

    def sample(self, sample: DeviceRun | EngineSample, received_unix_ns: int) -> None:
        """Note the sender of a sample."""
        self.last_unix_ns[sample.process.role, sample.source.value] = received_unix_ns

    def since(self, oldest_unix_ns: int) -> set[tuple[Role, str]]:
        """List the (role, source) pairs that sent samples since then."""
        return {who for who, at in self.last_unix_ns.items() if at >= oldest_unix_ns}


class EntryReader:
    """What one shard learns from its journal. The pipeline's loop owns it."""

    def __init__(
        self,
        stats: PipelineStats,
        stitcher: Stitcher,
        engines: EngineRegistry,
        activity: Activity,
        counting: Counting,
        *,
        dedup_window_ns: int,
        replayed_to: int,
        now_unix_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        """Create an intake.

        ``dedup_window_ns``: how long a repeated batch or span is surely recognised.
        ``replayed_to``: entries before this offset were counted by an earlier publish.
        """
        self.duplicates = Duplicates(2 * dedup_window_ns)
        self.reader = RecordDecoder()
        self.source_liveness = SourceLiveness()
        self.counted = CounterAttribution(stitcher.settings.engine_wait_ns + stitcher.settings.settle_ns)
        self._stats = stats
        self._stitcher = stitcher
        self._engines = engines
        self._activity = activity
        self._counting = counting
        self._replayed_to = replayed_to
        self._now_unix_ns = now_unix_ns
        self.decoded_unix_ns = 0  # when the newest entry was decoded
        self._raw: tuple[int, ...] = (0,) * len(BY_ENTRY)

    async def take(self, entry: Entry, now: int) -> RowBatch:
        """Take one entry, received at ``now``, and return what it adds to the store."""
        self._stats.entries[entry.signal.value] += 1
        rows = RowBatch()
        request = await self._request(entry)
        self.decoded_unix_ns = self._now_unix_ns()
        if isinstance(request, ExportTraceServiceRequest):
            await self._take_spans(request, entry, now, rows)
        elif isinstance(request, ExportLogsServiceRequest):
            await self._take_logs(request, entry, now, rows)
        elif isinstance(request, ExportMetricsServiceRequest):
            await self._take_metrics(request, entry, now, rows)
        self._observe(entry)
        return rows

    async def _request(self, entry: Entry) -> Request | None:
        """Decode ``entry``; return None and count it when it cannot be decoded."""
        try:
            return decode(entry.signal, entry.payload, PROTOBUF)
        except Rejected:
            pass
        try:
            return (await asyncio.to_thread(decode_repaired, entry.signal, entry.payload))[0]
        except Rejected:  # the receiver checked it, so the disk is damaged
            self._stats.undecodable += 1
            return None

    def _observe(self, entry: Entry) -> None:
        """Count the whole of ``entry``, unless an earlier publish counted it."""
        raw = (self._stats.spans, self.duplicates.batches, self.duplicates.spans, self.reader.unreadable)
        if not self._again(entry):
            for seen, now, before in zip(BY_ENTRY, raw, self._raw, strict=True):
                self._counting.observed.add(seen, now - before)
        self._raw = raw

    def _again(self, entry: Entry) -> bool:
        """Whether a replay takes ``entry`` again."""
        return entry.offset < self._replayed_to

    # --- spans -----------------------------------------------------------------------------------------------------------

    async def _take_spans(self, request: ExportTraceServiceRequest, entry: Entry, now: int, rows: RowBatch) -> None:
        taken = 0
        for resource_spans in request.resource_spans:
            resource = attributes_of(resource_spans.resource.attributes)
            for batch in batches(resource_spans):
                if batch.scope == SCOPE_OWN:
                    self._stats.own_spans += len(batch.spans)
                    continue
                if self.duplicates.batch(batch.process.sender, batch.seq, batch.scope, now):
                    continue
                place = SpanPlace(entry.offset, batch.scope, resource)
                for span in batch.spans:
                    if self.duplicates.span(span.SerializeToString(), now):
                        continue
                    try:
                        rows.spans.append(self._take_span(span, batch, place, now))
                    except Exception:
                        self._stats.fault("a span was omitted")
                    taken += 1
                    if taken % SPANS_A_SLICE == 0:
                        await asyncio.sleep(0)
        self._stats.spans += taken

    def _take_span(self, span: Span, batch: SpanBatch, place: SpanPlace, now: int) -> SpanRow:
        """Feed one span to the stitcher and return its row for the store."""
        attributes = attributes_of(span.attributes)
        record = self.reader.read(span, batch.scope, batch.process, attributes)
        self._judge(span.start_time_unix_nano, place.offset, now)
        if record is not None:
            self._stitcher.add(record, place.offset, now)
            if isinstance(record, KvFetch):
                self._watch(record, now)
        elif span.parent_span_id:
            trace = span.trace_id.hex()
            self._stitcher.link(trace + span.span_id.hex(), trace + span.parent_span_id.hex(), now)
        return place.row(span, attributes)

    # --- log records -----------------------------------------------------------------------------------------------------

    async def _take_logs(self, request: ExportLogsServiceRequest, entry: Entry, now: int, rows: RowBatch) -> None:
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
                        self._stats.fault("a log record was omitted")
                    taken += 1
                    if taken % SPANS_A_SLICE == 0:
                        await asyncio.sleep(0)
        self._stats.log_records += taken

    def _take_event(self, event: Event, offset: int, now: int, rows: RowBatch) -> None:
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
            learned = self._engines.take(as_of_arrival(event, now))
            for happened in (learned, event if isinstance(event, ProcessEvent) else None):
                if happened is not None:
                    rows.add(Table.PROCESS_EVENTS, process_event_row(happened, offset))
                    self._stitcher.engine_gone(happened, now)
        if isinstance(event, LogFact) and (fact := link_fact_row(event, offset)) is not None:
            rows.add(Table.LINK_FACTS, fact)
        if isinstance(event, EngineTimes | KvFetch | KvPublish | LogFact) and event.request_id:
            self._stitcher.add(event, offset, now)

    # --- metrics ---------------------------------------------------------------------------------------------------------

    async def _take_metrics(self, request: ExportMetricsServiceRequest, entry: Entry, now: int, rows: RowBatch) -> None:
        for resource_metrics in request.resource_metrics:
            for batch in metric_batches(resource_metrics):
                if self.duplicates.batch(batch.process.sender, batch.seq, batch.scope, now):
                    continue
                try:
                    samples = batch.samples()
                except Exception:
                    self._stats.fault("a batch of samples was omitted")
                    continue
                for sample in samples:
                    self._take_sample(sample, entry, now, rows)
                await asyncio.sleep(0)

    def _take_sample(self, sample: DeviceRun | EngineSample | RequestCounts, entry: Entry, now: int, rows: RowBatch) -> None:
        again = self._again(entry)
        self._judge(sample.at_unix_ns, entry.offset, now)
        if isinstance(sample, RequestCounts):
            self._counting.requests(sample, now, again=again)
            return
        table = table_of(sample)
        rows.add(table, sample)
        number = 1
        if isinstance(sample, DeviceRun):
            self._watch(sample, now)
            number = len(sample.at)
        else:
            self._counting.sample(sample, now, again=again)
        self.source_liveness.sample(sample, now)
        self._stats.samples += number
        if not again:
            word = f"{table.value.removesuffix('_samples')}.{sample.source.value}"
            self._counting.observed.add(CounterKey.SAMPLES, number, word)

    # --- times -----------------------------------------------------------------------------------------------------------

    def _watch(self, record: Activities, now: int) -> None:
        """Learn an engine's activity from records about the time before ``now``."""
        if latest_of(record) <= now + AHEAD_NS:
            self._activity.take(record)

    def _judge(self, at_unix_ns: int, offset: int, now: int) -> None:
        """Count a record with an impossible time; it is processed like any other."""
        reason = reason_of(at_unix_ns, now)
        if reason is not None and offset >= self._replayed_to:
            self._stats.displaced[reason] += 1
