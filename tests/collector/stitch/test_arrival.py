"""Evidence stamped 1970 or 2099 is decided by its arrival time.

It is held no longer than other evidence, and clock bounds learn little from it.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest

from builders.plugin import altered, fact, facts_of, fetch, happened, publish, times
from builders.records import EPOCH, engine, process, router, split_request
from handrail.otlp.signals import Signal
from handrail.records import (
    EngineRequest,
    EngineTimes,
    Exchange,
    Iteration,
    LogFact,
    LogKind,
    Outcome,
    ProcessEventKind,
    RequestCounts,
    Role,
    RouterCall,
    Source,
)
from handrail_collector.metrics.counting import Counting
from handrail_collector.metrics.coverage import By, Coverage
from handrail_collector.stitch.arrival import AHEAD_NS, OLD_NS, as_of_arrival, reason_of
from handrail_collector.stitch.engines import EngineRegistry
from handrail_collector.stitch.evidence import Item
from handrail_collector.stitch.stitcher import SECOND, Stitcher, StitchSettings
from handrail_collector.store.recovery import Recovered
from harness.pipelines import START, Clock, batch, log_batch, plugin_batch, running, stored, sweep, taken

AGES: Final = {"1970": 3600 * SECOND, "now": START, "2099": 4_070_908_800 * SECOND, "most": 2**63 - 1 - 3600 * SECOND}
ages = pytest.mark.parametrize("at", list(AGES.values()), ids=list(AGES))
BEGINS: Final = ("arrival_unix_ns", "queued_unix_ns", "known_unix_ns", "published_unix_ns", "started_unix_ns", "at_unix_ns")


def at_time(record: Any, at_unix_ns: int) -> Any:
    """Return ``record`` as if it had begun then, by its host's clock."""
    begins: dict[str, int | None] = {
        name: at_unix_ns for name in BEGINS if hasattr(record, name) and getattr(record, name) is not None
    }
    if isinstance(record, EngineTimes):
        begins["arrival_unix_ns"] = None
    if isinstance(record, LogFact):
        begins["last_unix_ns"] = at_unix_ns
    if isinstance(record, EngineRequest | RouterCall):
        begins = {"start_unix_ns": at_unix_ns, "end_unix_ns": at_unix_ns + SECOND}
    return replace(record, **begins)


def exchanges(rid: str) -> list[Exchange]:
    return [record for record in split_request(rid).values() if isinstance(record, Exchange)]


def evidence() -> list[Item]:
    return [
        *exchanges("req-a"),
        engine(Role.DECODE, 0, 100, rid="cmpl-req-g-0", trace="t6"),
        router(0, 100),
        times(Role.PREFILL, 0, 1, 2, 3),
        times(Role.DECODE, 0, 1, 2, 3, rid="cmpl-req-b-0-0000bbbb", trace="t2"),
        fetch(0, trace="t3", rid="cmpl-req-c-0-0000cccc", peer=None),
        publish(0, trace="t4", rid="cmpl-req-d-0-0000dddd"),
        times(Role.DECODE, 0, 1, None, None, rid="cmpl-req-e-0-0000eeee", trace="t5", provisional=True, seen_ns=SECOND),
        fact(LogKind.EXPIRED, Role.PREFILL, 0, "cmpl-req-f-0-0000ffff"),
    ]


@ages
@pytest.mark.parametrize("number", range(len(evidence())))
def test_each_kind_is_decided_as_soon_as_one_of_now(at: int, number: int) -> None:
    def held_for(record: Item) -> int:
        stitcher = Stitcher()
        stitcher.add(record, 0, START)
        return next(second for second in range(4000) if stitcher.sweep(START + second * SECOND))

    record = evidence()[number]
    assert held_for(at_time(record, at)) == held_for(at_time(record, START)) <= StitchSettings().max_open_ns // SECOND


@ages
def test_all_is_forgotten_again(at: int) -> None:
    stitcher = Stitcher()
    for number, record in enumerate(evidence()):
        stitcher.add(at_time(record, at), number, START)
    for second in range(3600 + 300):
        stitcher.sweep(START + second * SECOND)
    assert (len(stitcher), stitcher.low_water()) == (0, None)


@ages
async def test_a_collector_publishes_what_is_of_another_age_and_counts_it(tmp_path: Path, at: int) -> None:
    clock = Clock()
    edge = exchanges("req-a")[0]
    if at == AGES["most"]:
        at = AGES["2099"]  # another test covers values that no column takes
    async with running(tmp_path, clock) as (journal, pipeline):
        await journal.consume(Signal.TRACES, batch([at_time(edge, at)], 1))
        await journal.consume(Signal.TRACES, plugin_batch([at_time(fetch(0, trace="t3"), at)], 1))
        events = [at_time(happened(ProcessEventKind.DEAD, Role.DECODE, 0), at), at_time(facts_of(Role.DECODE), at)]
        await journal.consume(Signal.LOGS, log_batch(events, 1))
        await taken(pipeline, journal)
        clock.now += 15 * SECOND
        sweep(pipeline, clock.now)
        assert not pipeline.stitcher.open_groups()
        reason = reason_of(at, START)
        assert pipeline.stats.displaced == {"future": 0, "old": 0, **({reason: 4} if reason else {})}
    assert [row.started_unix_ns for row in stored(tmp_path)] == [at]


@pytest.mark.parametrize(
    ("away", "reason"),
    [(0, None), (AHEAD_NS, None), (AHEAD_NS + 1, "future"), (-OLD_NS, None), (-OLD_NS - 1, "old"), (-START, "old")],
)
def test_what_may_be_a_time(away: int, reason: str | None) -> None:
    assert reason_of(START + away, START) == reason


def test_facts_from_ahead_are_not_the_newest_for_ever() -> None:
    book = EngineRegistry()
    ahead = altered(facts_of(Role.DECODE), at_unix_ns=AGES["2099"], tp_size=8)
    now = altered(facts_of(Role.DECODE), at_unix_ns=START + 2 * SECOND, tp_size=2)
    for answer, received in ((ahead, START), (now, START + 3 * SECOND)):
        book.take(as_of_arrival(answer, received))
    assert book.ranks(now.process.instance) == 2


@pytest.mark.parametrize("at", [0, AGES["2099"]], ids=["1970", "2099"])
def test_one_error_of_another_age_is_no_link_that_fails_since_then_or_until_then(at: int) -> None:
    book = EngineRegistry()
    log_fact = fact(LogKind.LINK_ERROR, Role.DECODE, 0, None)
    for report in (log_fact, altered(log_fact, at_unix_ns=at, last_unix_ns=at)):
        book.take(as_of_arrival(report, EPOCH + SECOND))
    instance = log_fact.process.instance
    assert book.link_fault(instance, EPOCH, EPOCH + SECOND) is not None
    assert book.link_fault(instance, EPOCH - 7200 * SECOND, EPOCH - 3600 * SECOND) is None
    assert book.link_fault(instance, EPOCH + 3600 * SECOND, EPOCH + 7200 * SECOND) is None


async def test_engine_activity_of_2099_is_not_learned(tmp_path: Path) -> None:
    clock = Clock()
    rolled = Iteration(
        process=process(Role.DECODE), source=Source.PLUGIN, started_unix_ns=START, duration_ns=SECOND, steps=3, full=False
    )
    async with running(tmp_path, clock) as (journal, pipeline):
        await journal.consume(Signal.LOGS, log_batch([at_time(rolled, AGES["2099"]), rolled], 1))
        await taken(pipeline, journal)
        doings = pipeline.stalling.activity.of(rolled.process.instance)
        assert doings is not None
        assert (len(doings.seconds), doings.newest_unix_ns) == (1, START + SECOND)


def test_clocks_are_not_set_by_what_lies_ahead() -> None:
    """A message of 2099 does not set the clock bounds.

    It would make all knowledge of the two hosts' clocks 73 years old.
    """
    stitcher = Stitcher()
    known = []
    for number, moved_ns in enumerate((0, AGES["2099"] - EPOCH)):
        for record in split_request(f"req-{number}", f"t{number}", host_d="h2").values():
            if isinstance(record, Exchange):
                stitcher.add(replace(record, arrival_unix_ns=record.arrival_unix_ns + moved_ns), number, START)
        for second in range(20):
            stitcher.sweep(START + second * SECOND)
        known.append(stitcher.clocks.between("h1", "h2", EPOCH))
    assert known[0] is not None
    assert known[0].width_ns is not None
    assert known[0] == known[1]


def test_a_reading_from_ahead_does_not_make_all_later_ones_late() -> None:
    counting = Counting(Recovered(end_offset=0, low_water_offset=0, evidence={}), 0)
    for number, at in enumerate((START, AGES["2099"], START + 20 * SECOND, START + 30 * SECOND)):
        counts = RequestCounts(
            process=process(Role.EDGE), at_unix_ns=at, start_unix_ns=START - SECOND, finished={Outcome.OK.value: 10 * number}
        )
        counting.requests(counts, START + number * 10 * SECOND, again=False)
    known = counting.coverage._processes[By.EDGE, process(Role.EDGE).instance]
    assert (known.value, known.since_unix_ns) == (30, START + 30 * SECOND)


def test_a_counter_that_began_ahead_is_not_counted_from_its_beginning() -> None:
    assert Coverage(0).read(By.EDGE, "e", AGES["2099"], 7, START, START, again=False) == 0


def test_records_of_now_are_left_as_they_are() -> None:
    for record in (
        facts_of(Role.DECODE),
        happened(ProcessEventKind.DEAD, Role.DECODE, 0),
        fact(LogKind.LINK_ERROR, Role.DECODE, 0, None),
    ):
        assert as_of_arrival(record, EPOCH) is record
