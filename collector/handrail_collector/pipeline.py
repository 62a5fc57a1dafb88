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

from opentelemetry.trace import Tracer

from handrail import conventions as names
from handrail.otlp.signals import Signal
from handrail.records import KvFetch, KvPublish, Role
from handrail.telemetry.tracing import NO_TRACES, WORTH_NS, about_own_traces, record_span
from handrail.wal.log import FolderGoneError
from handrail_collector.counters import CounterDelta, CounterKey
from handrail_collector.decisions import DecidedRows, Decisions
from handrail_collector.event_rows import HOUR_NS, MINUTE_NS, clock_rows, finding_row, key_of
from handrail_collector.explain.request.counter_attribution import UnattributedFailures, unexplained_detail
from handrail_collector.explain.request.kv_handoff import HUNG_NS
from handrail_collector.explain.request.request_row import Fleet, explain, explain_all
from handrail_collector.explain.stalls.stall_rows import StallDesk
from handrail_collector.intake import EntryReader
from handrail_collector.journal.journal import Entry, Journal
from handrail_collector.metrics.counting import Counting
from handrail_collector.pipeline_stats import PipelineStats
from handrail_collector.row_buffer import RowBatch, RowBuffer
from handrail_collector.rows import FetchRow, RequestRow, StallRow
from handrail_collector.stitch.engines import EngineRegistry
from handrail_collector.stitch.stitcher import SECOND, Decision, Stitcher, StitchSettings
from handrail_collector.store.publish import StorePublisher
from handrail_collector.store.recovery import Recovered
from handrail_collector.store.schema import Table

log = logging.getLogger(__name__)

STEP_NS = 5 * SECOND
"""Largest disorder of receive times; beyond it the clock was set back.

Entries are stamped before they are on disk, so their order may be slightly off.
"""

PRESSED_WINDOW_NS = 10 * SECOND
"""Deduplication window while the journal is nearly full.

It is short because accepting new data matters more then.
"""

MAX_FOUND = 10_000
"""Most findings that are remembered to avoid repeating them."""

SLICE_S = 0.005
"""Time after which the loop may switch tasks between two entries."""

REQUESTS_A_SLICE = 32
"""Requests that a sweep decides and explains before the loop may switch tasks: about 8 ms."""


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
        tracer: Tracer = NO_TRACES,
    ) -> None:
        self._tracer = tracer
        self.settings = settings or PipelineSettings()
        self.stats = PipelineStats(published_offset=recovered.end_offset)
        stitch = self.settings.stitch
        self.stitcher = Stitcher(stitch)
        self.engines = EngineRegistry()
        self.stalling = StallDesk()
        self.counting = Counting(recovered, stitch.engine_wait_ns + stitch.settle_ns + 2 * SECOND)
        self.observed = self.counting.observed
        self.intake = EntryReader(
            self.stats,
            self.stitcher,
            self.engines,
            self.stalling.activity,
            self.counting,
            dedup_window_ns=self.settings.dedup_window_ns,
            replayed_to=recovered.end_offset,
            now_unix_ns=now_unix_ns,
        )
        self.buffer = RowBuffer()
        self._decisions = Decisions(self.stalling, recovered.evidence, self.stats.fault)
        self._journal = journal
        self._journal_max_bytes = journal_max_bytes
        self._publisher = publisher
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
        self._found: dict[str, None] = dict.fromkeys(recovered.found)
        self._minute = 0
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
            waiting = self.buffer.waiting
            if len(waiting.spans) + waiting.events >= self.settings.max_buffered_spans:
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

    async def _take(self, entry: Entry) -> None:
        now = self._entry_clock(entry.received_unix_ns)
        self._decided(self.stitcher.advance(now), now)
        if self.stitcher.sweeping or now - self._swept_unix_ns >= SECOND:
            self._sweep(now)
        began_unix_ns = self._now_unix_ns()
        rows = await self.intake.take(entry, now)
        self._trace_entry(entry, began_unix_ns, self._now_unix_ns())
        if entry.offset >= self._stored_offset:
            self.buffer.waiting.extend(rows)  # as a whole: a publish ends between two entries, never within one
            if self._forward is not None:
                self._forward(entry.signal, entry.payload)
        self._recent.append((now, entry.offset))
        self._position = entry.next_offset
        self._taken_offset = max(self._taken_offset, entry.next_offset)

    def _trace_entry(self, entry: Entry, began_unix_ns: int, ended_unix_ns: int) -> None:
        """Make the spans of an entry that is worth them."""
        if self._tracer is NO_TRACES or ended_unix_ns - began_unix_ns < WORTH_NS or about_own_traces(entry.payload):
            return
        decoded_unix_ns = self.intake.decoded_unix_ns
        about: dict[str, str | int] = {names.OWN_SIGNAL: entry.signal.value, names.OWN_BYTES: len(entry.payload)}
        whole = record_span(self._tracer, names.OWN_ENTRY, began_unix_ns, ended_unix_ns, about)
        record_span(self._tracer, names.OWN_DECODE, began_unix_ns, decoded_unix_ns, {}, parent=whole)
        record_span(self._tracer, names.OWN_STITCH, decoded_unix_ns, ended_unix_ns, {}, parent=whole)

    # --- decisions -------------------------------------------------------------------------------------------------------

    def _sweep(self, now: int) -> None:
        """Decide a slice of what is due.

        While ``stitcher.sweeping`` is true, the next call continues.
        """
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
        for found in self.intake.counted.settle(self.stitcher.groups, self.engines.ranks, now):
            if not isinstance(found, UnattributedFailures):
                self.stitcher.attach(*found, now)
                continue
            fact, kind = found.fact, "unexplained_failures"
            once = key_of(kind, fact.process.instance, fact.recogniser, fact.at_unix_ns // HOUR_NS)
            if once not in self._found:
                self._remember(once)
                row = finding_row(kind, unexplained_detail(found), fact.process.instance, "", fact.at_unix_ns, found.offset)
                self.buffer.waiting.add(Table.FINDINGS, replace(row, key=once))
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
            self.buffer.waiting.add(Table.CLOCK_PAIRS, row)

    def _pressed(self) -> bool:
        """Check whether the journal is nearly full."""
        return self._journal.size_bytes > self.settings.journal_high_ratio * self._journal_max_bytes

    def _decided(self, decisions: Sequence[Decision], now: int) -> None:
        if not decisions:
            return
        began_unix_ns = self._now_unix_ns()
        self._take_decisions(decisions, now)
        ended_unix_ns = self._now_unix_ns()
        if self._tracer is not NO_TRACES and ended_unix_ns - began_unix_ns >= WORTH_NS:
            record_span(self._tracer, names.OWN_DECIDE, began_unix_ns, ended_unix_ns, {names.OWN_DECIDED: len(decisions)})

    def _take_decisions(self, decisions: Sequence[Decision], now: int) -> None:
        """Explain decided requests, and keep and count what comes of them."""
        for decision in decisions:
            group = decision.group
            fleet = self.fleet(min(now, group.deadline_unix_ns or now))  # as it was then: a replay may come hours later
            try:
                decided = self._decisions.rows(group, fleet)
                self.counting.published_before(group, decided.known)
            except Exception:
                self.stats.fault("a request was omitted")
                continue
            waiting = self.buffer.waiting
            waiting.add(Table.KV_FETCHES, *decided.fetches)
            if decided.row is None:
                self.stats.rows_skipped += bool(decided.known)
                continue
            waiting.requests.extend((decided.row, *decided.withdrawn))
            waiting.add(Table.STALLS, *decided.stalls)
            self._count(decision, decided.row, decided, now)
            self._compare_engines(decided.row)

    def _count(self, decision: Decision, row: RequestRow, decided: DecidedRows, now: int) -> None:
        self.stats.rows += 1
        group, before = decision.group, decision.group.counted.edge
        try:
            self.counting.row(group, row, decision.closing, now)
            self.counting.stalls(group, row, decided.stalls)
        except Exception:
            self.stats.fault("a request is missing from the counters")
        if row.scope == "edge":
            self.stats.edge_rows += before is None
            self.stats.edge_complete += row.complete - bool(before)
        self.observed.add(CounterKey.WITHDRAWN_ROWS, len(decided.withdrawn))

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
                self.buffer.waiting.add(Table.FINDINGS, found)

    def fleet(self, now: int | None = None) -> Fleet:
        """Return the fleet that was reporting at ``now``; in a replay that is long ago."""
        reporting = frozenset(self.stitcher.reporting(self._now_unix_ns() if now is None else now))
        return Fleet(reporting, self.engines, self.stitcher.clocks, self.settings.hung_ns)

    def unpublished(self) -> dict[tuple[str, ...], int]:
        """Return what waits in memory for the next publish, by kind."""
        waiting = self.buffer.waiting
        return {("row",): waiting.decided, ("span",): len(waiting.spans), ("event",): waiting.events}

    def reporting(self, now: int) -> set[tuple[Role, str]]:
        """List the (role, source) pairs that recently reported requests or samples."""
        return self.stitcher.reporting(now) | self.intake.source_liveness.since(now - self.settings.stitch.source_memory_ns)

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
            if end == first and not self.buffer.waiting.decided and low <= self._low_water:
                return  # an empty range can still move the low-water mark, which frees the journal
            rows, counted = self.buffer.take(), self.observed.take()
            self._stored_offset = end
            totals = self.observed.with_added(counted)
            before = self.observed[CounterKey.SPANS_STORED]
            try:
                about = {names.OWN_SPANS: len(rows.spans), names.OWN_ROWS: rows.decided + rows.events}
                tracer = self._tracer if any(about.values()) else NO_TRACES
                with tracer.start_as_current_span(names.OWN_PUBLISH, attributes=about):
                    totals = await asyncio.to_thread(self._publish, (first, end, low), rows, totals, counted)
            except Exception as error:
                self.buffer.put_back()
                self.observed.put_back(counted)
                self._stored_offset = first
                self.stats.publish_failures += 1
                self.stats.failing += 1
                if isinstance(error, FolderGoneError):
                    self._journal.refuse(f"the store is gone: {error}")
                    raise
                log.error("publishing failed, the collector retries: %s", error, exc_info=not isinstance(error, OSError))
                return
            self.buffer.published()
            self.observed.done(totals, counted)
            self._low_water = low
            if low >= self._replayed_to:
                # nothing is left that a replay could publish twice
                self._decisions.forget_published()
                self.counting.forget_published()
            self.stats.failing = 0
            self.stats.publishes += 1
            self.stats.spans_stored += totals[CounterKey.SPANS_STORED.value] - before
            self.stats.published_offset = end
            self._journal.release(low)

    def _publish(
        self, offsets: tuple[int, int, int], rows: RowBatch, totals: dict[str, int], counted: CounterDelta
    ) -> dict[str, int]:
        """Publish, and on a bad value publish again without what cannot be stored.

        ``offsets``: first, end and low-water mark. A disk error is raised. Returns the stored totals.
        """
        try:
            return self._publish_all(offsets, rows, totals, counted)
        except OSError:
            raise
        except Exception:
            fitting = rows.storable(lambda: self.stats.fault("a row that no column can hold is not in the store"))
            if fitting is None:
                raise
        return self._publish_all(offsets, fitting, totals, counted)

    def _publish_all(
        self, offsets: tuple[int, int, int], rows: RowBatch, totals: dict[str, int], counted: CounterDelta
    ) -> dict[str, int]:
        stored = CounterKey.SPANS_STORED.value
        totals = totals | {stored: totals.get(stored, 0) + len(rows.spans)}
        self._publisher.publish(*offsets, rows.spans, rows.requests, totals, rows.flat, counted.added())
        return totals

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
        waiting = self.buffer.requests()
        for group in self.stitcher.open_groups():
            if group.edge is not None or group.role(Role.DECODE, Role.COLLOCATED):
                try:
                    waiting.append(explain(group, fleet))
                except Exception:
                    self.stats.fault("an open request is missing from an answer")
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
        return self.buffer.rows(Table.STALLS)

    def fetches(self) -> Sequence[FetchRow]:
        """List decided hand-offs that are not published yet, then open ones (version 0)."""
        fleet = self.fleet()
        waiting: list[FetchRow] = self.buffer.rows(Table.KV_FETCHES)
        for group in self.stitcher.open_groups():
            if not group.only_facts and any(isinstance(e.record, KvFetch | KvPublish) for e in group.evidence):
                try:
                    waiting.extend(explain_all(group, fleet).fetches)
                except Exception:
                    self.stats.fault("an open hand-off is missing from an answer")
        return waiting
