"""Many lives of one collector, killed at any moment, with joins that come late.

In the end each request has one complete row.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from builders.records import split_request
from handrail.metrics.model_labels import UNKNOWN
from handrail.otlp.signals import Retryable, Signal
from handrail.phases import Phase
from handrail.records import Exchange, Role, SpanIds
from handrail_collector.counters import CounterKey, Timed
from handrail_collector.journal.journal import Journal, JournalSettings
from handrail_collector.pipeline import Pipeline, PipelineSettings, SteadyClock
from handrail_collector.rows import MERGED, RequestRow
from handrail_collector.stitch.stitcher import SECOND, StitchSettings
from handrail_collector.store.manifest import ManifestReader, files_of
from handrail_collector.store.publish import StorePublisher
from handrail_collector.store.schema import Table
from handrail_collector.store.tables.requests import request_row
from harness.pipelines import START, Clock, batch, send, stored, sweep, taken

REQUESTS = 20
STITCH = StitchSettings(
    engine_wait_ns=3 * SECOND,
    settle_ns=SECOND,
    late_window_ns=60 * SECOND,
    max_open_ns=20 * SECOND,
    source_memory_ns=600 * SECOND,
)


@dataclass(slots=True)
class Life:
    """One process of the collector."""

    journal: Journal
    pipeline: Pipeline
    publisher: StorePublisher
    running: asyncio.Task[None]

    @classmethod
    async def begin(cls, root: Path, clock: Clock) -> Life:
        publisher = StorePublisher(root / "store")
        recovered = publisher.open()
        journal = Journal(JournalSettings(folder=root / "journal").open_log(floor=recovered.end_offset), now_unix_ns=clock)
        settings = PipelineSettings(flush_interval_ns=3600 * SECOND, stitch=STITCH)
        pipeline = Pipeline(journal, publisher, recovered, settings, now_unix_ns=clock)
        await journal.start()
        life = cls(journal, pipeline, publisher, asyncio.create_task(pipeline.run()))
        await taken(pipeline, journal)
        return life

    async def kill(self) -> None:
        """Stop without a flush."""
        self.running.cancel()
        await asyncio.gather(self.running, return_exceptions=True)
        await self.journal.shutdown()
        self.publisher.close()

    async def stop(self) -> None:
        await self.journal.shutdown()
        await self.running
        self.publisher.close()


def foreign_span(span_id: str, parent: Exchange) -> bytes:
    """Return a router's span with no evidence of its own.

    It links the spans below it to ``parent``.
    """
    request = ExportTraceServiceRequest()
    request.resource_spans.add().scope_spans.add().spans.append(
        Span(
            trace_id=bytes.fromhex(parent.ids.trace_id),
            span_id=bytes.fromhex(span_id),
            parent_span_id=bytes.fromhex(parent.ids.span_id),
            name="router",
            start_time_unix_nano=START,
        )
    )
    return request.SerializeToString()


def events(rng: random.Random) -> Iterator[tuple[float, Exchange | bytes]]:
    """Yield what arrives, and when.

    These are whole requests, P without context, and D linked by a span that comes up to 30 s late.
    """
    for n in range(REQUESTS):
        at = rng.uniform(0, 60)
        edge, p, d = (r for r in split_request(f"r{n}", f"t{n}", at_ms=n * 3000).values() if isinstance(r, Exchange))
        kind = rng.choice(("whole", "lost", "linked", "linked by nothing else"))
        if kind == "lost":
            p = replace(p, ids=SpanIds(trace_id=f"{n + 1:032x}", span_id=p.ids.span_id))
        elif kind != "whole":
            link = f"{n + 1:016x}"
            rid = None if kind == "linked" else f"other-{n}"
            d = replace(d, request_id=rid, kv_in=None, ids=replace(d.ids, parent_span_id=link))
            yield at + rng.choice((0, 1, 6, 12, 30)), foreign_span(link, edge)
        for record in (edge, p, d):
            yield at + rng.choice((0, 0, 0, 0.5, 1, 8)), record


@pytest.mark.parametrize("seed", range(8))
async def test_each_request_has_one_whole_row_whatever_the_moments_of_death(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    clock = Clock()
    life = await Life.begin(tmp_path, clock)
    everything = sorted(events(rng), key=lambda event: event[0])
    scraped: dict[str, int] = {}
    for number, (at, what) in enumerate(everything, 1):
        while clock.now + SECOND < START + at * SECOND:
            clock.now += SECOND
            sweep(life.pipeline, clock.now)
            if rng.random() < 0.3:
                await life.pipeline.flush()
        clock.now = max(clock.now, START + round(at * SECOND))
        payload = what if isinstance(what, bytes) else batch([what], number, what.process.role.value)
        await life.journal.consume(Signal.TRACES, payload)
        await taken(life.pipeline, life.journal)
        if rng.random() < 0.15:
            await life.pipeline.flush()
        if rng.random() < 0.12:
            scraped = dict(life.pipeline.observed.published)
            await life.kill()
            life = await Life.begin(tmp_path, clock)
            assert life.pipeline.observed.published == scraped
    for _ in range(90):
        clock.now += SECOND
        sweep(life.pipeline, clock.now)
    await life.stop()
    rows = stored(tmp_path)
    resting = Counter(span_id for row in rows for span_id in row.span_ids)
    sent = {what.ids.span_id for _, what in everything if isinstance(what, Exchange)}
    assert len(rows) == REQUESTS
    assert set(resting) == sent
    assert set(resting.values()) == {1}
    assert {row.scope for row in rows} == {"edge"}
    assert life.pipeline.stats.faults == 0
    _check_counts(tmp_path, life.pipeline, len(everything), len(sent))


def _check_counts(root: Path, pipeline: Pipeline, spans: int, records: int) -> None:
    """Check that the counters over all lives equal those of one life.

    Each thing counts once.
    """
    seen = pipeline.observed
    assert seen[CounterKey.SPANS] == seen[CounterKey.SPANS_STORED] == spans
    assert seen[CounterKey.DUPLICATE_BATCHES] == seen[CounterKey.DUPLICATE_SPANS] == 0
    assert (seen[CounterKey.EDGE_REQUESTS], seen[CounterKey.EDGE_JOINED]) == (REQUESTS, REQUESTS)
    written = [row for row in every_version(root) if row.scope != MERGED]
    assert seen[CounterKey.ROWS] == sum(seen.by_word(CounterKey.DECISIONS).values()) == len(written)
    assert sum(seen.by_word(CounterKey.JOINS).values()) <= records
    # phases and outcomes: each request counts once, but once a part where it was decided in parts before they were joined
    assert sum(seen.by_words(CounterKey.JOINED, 2).values()) == REQUESTS
    unattributed = seen.durations(Timed.PHASES, 2)[Phase.UNATTRIBUTED.value, UNKNOWN].histogram().count
    reported_apart = sum(row.scope == MERGED for row in every_version(root))
    assert REQUESTS <= unattributed <= REQUESTS + reported_apart
    assert seen[CounterKey.WITHDRAWN_ROWS] == reported_apart
    assert sum(row.version == 1 for row in written) >= REQUESTS


def every_version(root: Path) -> list[RequestRow]:
    publishes = ManifestReader(root / "store").publishes()
    tables = [pq.ParquetFile(root / "store" / file.path).read() for file in files_of(publishes, Table.REQUESTS)]
    return [request_row(row) for table in tables for row in table.to_pylist()]


async def test_a_stop_in_the_middle_of_a_publish_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing may run beside the writing thread, which cannot be called back."""
    clock = Clock()
    life = await Life.begin(tmp_path, clock)
    publish, inside = life.publisher.publish, 0

    def watched(*arguments: object) -> None:
        nonlocal inside
        inside += 1
        assert inside == 1, "two publishes at once"
        publish(*arguments)  # type: ignore[arg-type]
        inside -= 1

    monkeypatch.setattr(life.publisher, "publish", watched)
    for n in range(5):
        await send(life.journal, [r for r in split_request(f"r{n}", f"t{n}").values() if isinstance(r, Exchange)], 1 + 3 * n)
        await taken(life.pipeline, life.journal)
        task = asyncio.create_task(life.pipeline.flush())
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    await life.stop()
    assert life.pipeline.stats.spans_stored == 15
    assert life.pipeline.stats.failing == 0


async def test_a_full_journal_empties_by_itself(tmp_path: Path) -> None:
    clock = Clock()
    publisher = StorePublisher(tmp_path / "store")
    recovered = publisher.open()
    bound = 16 << 20
    journal = Journal(JournalSettings(folder=tmp_path / "journal", max_bytes=bound).open_log(), now_unix_ns=clock)
    pipeline = Pipeline(
        journal, publisher, recovered, PipelineSettings(stitch=STITCH), journal_max_bytes=bound, now_unix_ns=clock
    )
    await journal.start()
    running = asyncio.create_task(pipeline.run())
    records = [r for r in split_request("r", "t").values() if isinstance(r, Exchange) and r.process.role is Role.EDGE]
    padded = [replace(r, client_parent="x" * 900_000) for r in records]
    number = 0
    with contextlib.suppress(Retryable):
        while number < 200:
            await journal.consume(Signal.TRACES, batch(padded, number, "s"))
            number += 1
    assert number < 200, "the journal took more than its bound"
    for _ in range(40):
        await taken(pipeline, journal)
        clock.now += 5 * SECOND
        sweep(pipeline, clock.now)
        await pipeline.flush()
        with contextlib.suppress(Retryable):
            await journal.consume(Signal.TRACES, batch(records, 999, "s"))
            break
    else:
        pytest.fail("still full")
    await journal.shutdown()
    await running
    publisher.close()


def test_a_clock_that_was_set_back_goes_on_at_its_own_pace() -> None:
    clock = SteadyClock()
    assert [clock(1000 * SECOND), clock(999 * SECOND), clock(1001 * SECOND)] == [1000 * SECOND, 999 * SECOND, 1001 * SECOND]
    assert clock(401 * SECOND) == 1001 * SECOND
    assert clock(411 * SECOND) == 1011 * SECOND
