"""Stalls from their bytes to the table, the metric and the answers.

Each stall is reported once, whatever is killed or comes late in between.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from builders.records import kv
from builders.stalls import pause, seconds, step, stream
from handrail.otlp.signals import Signal
from handrail.records import Exchange, Role
from handrail_collector.counters import CounterKey
from handrail_collector.rows import StallRow
from handrail_collector.stitch.group import Closing
from handrail_collector.stitch.stitcher import SECOND
from handrail_collector.store.read import StoreReader
from handrail_collector.store.schema import Table
from harness.pipelines import Clock, log_batch, proxies, running, send, stored, sweep, taken

GAPS = [10.0] * 2000 + [130.0] + [10.0] * 2000
AT_MS = 160 + 20_000


def a_request(rid: str = "req-a", trace: str = "t1") -> list[Exchange]:
    """Return edge, P and D of one request whose stream stalled once."""
    _, p, _ = proxies(rid, trace)
    edge = stream(Role.EDGE, 0, 300, GAPS, rid=rid, trace=trace)
    d = stream(Role.DECODE, 130, 160, GAPS, rid=rid, trace=trace, parent=edge, kv_in=kv(f"cmpl-{rid}-0-0000aaaa"))
    return [edge, replace(p, ids=replace(p.ids, parent_span_id=edge.ids.span_id)), d]


def what_d_did() -> list[Any]:
    return [*seconds(0, 41_000), step(130 + AT_MS - 4, 131, prefill_tokens=2048), pause(5_000, 30)]


def stalls(root: Path) -> list[StallRow]:
    reader = StoreReader(root / "store", threads=1)
    try:
        return [stall for row in stored(root) for stall in reader.stalls_of(row)]
    finally:
        reader.close()


async def test_a_stall_is_a_row_with_its_cause_and_counted_once_over_restarts(tmp_path: Path) -> None:
    clock = Clock()
    for life in range(2):
        async with running(tmp_path, clock) as (journal, pipeline):
            if life == 0:
                await journal.consume(Signal.LOGS, log_batch(what_d_did(), 1))
                await send(journal, a_request())
            await taken(pipeline, journal)
            sweep(pipeline, clock.now + 20 * SECOND)
            if life == 0:
                assert [stall.cause for stall in pipeline.stalls()] == ["prefill_coscheduled"]
            await pipeline.flush()
            assert pipeline.observed.by_words(CounterKey.STALLS, 2) == {("prefill_coscheduled", "unknown"): 1}
    (row,) = stored(tmp_path)
    (stall,) = stalls(tmp_path)
    assert (stall.trace_id, stall.request_id, stall.version, stall.number) == (row.trace_id, row.request_id, row.version, 0)
    assert (stall.cause, stall.at, stall.index) == ("prefill_coscheduled", "decode", 2000)
    reader = StoreReader(tmp_path / "store", threads=1)
    assert reader.events(Table.PROCESS_EVENTS, 0, 1 << 62) == []  # pauses are evidence of stalls and nothing else
    reader.close()


async def test_a_late_span_makes_a_new_version_and_no_second_stall(tmp_path: Path) -> None:
    clock = Clock()
    edge, p, d = a_request()
    async with running(tmp_path, clock) as (journal, pipeline):
        await journal.consume(Signal.LOGS, log_batch(what_d_did(), 1))
        await send(journal, [edge, d])
        await taken(pipeline, journal)
        sweep(pipeline, clock.now + 20 * SECOND)
        await pipeline.flush()
        await send(journal, [p], 3)
        await taken(pipeline, journal)
        sweep(pipeline, clock.now + 40 * SECOND)
        await pipeline.flush()
        assert pipeline.observed.by_words(CounterKey.STALLS, 2) == {("prefill_coscheduled", "unknown"): 1}
    (row,) = stored(tmp_path)
    (stall,) = stalls(tmp_path)
    assert row.version == stall.version == 2


async def test_a_request_with_a_stall_waits_for_what_the_engine_tells_a_little_later(tmp_path: Path) -> None:
    clock = Clock()
    async with running(tmp_path, clock) as (journal, pipeline):
        await send(journal, a_request("req-0", "t0"))  # from now on it is known which processes report
        await taken(pipeline, journal)
        clock.now += 60 * SECOND
        sweep(pipeline, clock.now)
        await send(journal, a_request(), 10)
        await taken(pipeline, journal)
        sweep(pipeline, clock.now + SECOND)
        assert len(stored_and_waiting(pipeline)) == 1
        await journal.consume(Signal.LOGS, log_batch(what_d_did(), 1))
        await taken(pipeline, journal)
        sweep(pipeline, clock.now + 3 * SECOND)
        assert len(stored_and_waiting(pipeline)) == 2
        assert [stall.cause for stall in pipeline.stalls()] == ["unknown", "prefill_coscheduled"]
        await pipeline.flush()
        assert pipeline.observed.by_word(CounterKey.DECISIONS) == {
            Closing.COMPLETE.value: 2
        }  # it waited for no evidence of its own


def stored_and_waiting(pipeline: Any) -> list[Any]:
    return [row for row in pipeline.rows() if row.version]


async def test_a_fault_over_stalls_costs_the_stalls_alone(tmp_path: Path) -> None:
    clock = Clock()
    async with running(tmp_path, clock) as (journal, pipeline):
        pipeline.stalling.activity = None  # stands for any error in the stalls' code
        await send(journal, a_request())
        await taken(pipeline, journal)
        sweep(pipeline, clock.now + 20 * SECOND)
        assert pipeline.stats.faults == 2  # one for what paused it, one for what stalled it
    assert len(stored(tmp_path)) == 1
    assert stalls(tmp_path) == []
