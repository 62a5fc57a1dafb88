"""What was counted and published counts once, whatever a restart replays.

DESIGN section 7 has the rule.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from builders.records import exchange
from handrail.otlp.signals import Signal
from handrail.records import Exchange, Hint, Role
from handrail_collector.counters import CounterKey, DurableCounters
from handrail_collector.stitch.stitcher import SECOND, StitchSettings
from handrail_collector.store.maintenance import Upkeep, UpkeepSettings
from handrail_collector.store.publish import StorePublisher
from harness.pipelines import START, Clock, batch, proxies, running, send, sweep, taken

QUICK = StitchSettings(engine_wait_ns=SECOND, settle_ns=SECOND // 2)


async def test_a_request_that_is_completed_after_a_restart_was_counted_before(tmp_path: Path) -> None:
    clock = Clock()
    edge, p, d = proxies("req-a", "t1")
    async with running(tmp_path, clock, stitch=QUICK) as (journal, pipeline):
        await send(journal, [edge, p])
        await taken(pipeline, journal)
        clock.now += 5 * SECOND
        sweep(pipeline, clock.now)
        await pipeline.flush()
        seen = pipeline.observed
        assert (seen[CounterKey.EDGE_REQUESTS], seen[CounterKey.EDGE_JOINED], seen.by_word(CounterKey.JOINS)) == (
            1,
            0,
            {"ancestor": 1},
        )
    async with running(tmp_path, clock, stitch=QUICK) as (journal, pipeline):
        await taken(pipeline, journal)
        assert pipeline.observed.published == seen.published
        await send(journal, [d], 9)
        await taken(pipeline, journal)
        clock.now += 5 * SECOND
        sweep(pipeline, clock.now)
        await pipeline.flush()
        seen = pipeline.observed
        assert (seen[CounterKey.EDGE_REQUESTS], seen[CounterKey.EDGE_JOINED], seen.by_word(CounterKey.JOINS)) == (
            1,
            1,
            {"ancestor": 2},
        )
        assert (seen[CounterKey.ROWS], seen.by_word(CounterKey.DECISIONS)) == (2, {"waited": 1, "late": 1})
        assert pipeline.stats.edge_rows == 0, "this process saw no new request"


async def test_what_is_delivered_again_is_counted_once_though_it_is_replayed_twice(tmp_path: Path) -> None:
    clock = Clock()
    for life in range(3):
        async with running(tmp_path, clock, stitch=QUICK) as (journal, pipeline):
            await taken(pipeline, journal)
            if not life:
                for _ in range(3):
                    await journal.consume(Signal.TRACES, batch(proxies("req-a", "t1")))
                await taken(pipeline, journal)
        seen = pipeline.observed
        assert (seen[CounterKey.SPANS], seen[CounterKey.SPANS_STORED], seen[CounterKey.DUPLICATE_BATCHES]) == (3, 3, 2)


async def test_nothing_is_shown_before_it_is_published_and_a_failed_publish_loses_no_count(tmp_path: Path) -> None:
    clock = Clock()
    async with running(tmp_path, clock, stitch=QUICK) as (journal, pipeline):
        await send(journal, proxies("req-a", "t1"))
        await taken(pipeline, journal)
        assert pipeline.observed.published == {}
        pipeline._publisher.close()
        await pipeline.flush()
        assert (pipeline.stats.failing, pipeline.observed.published) == (1, {})
        pipeline._publisher.open()
        await pipeline.flush()
        assert pipeline.observed[CounterKey.SPANS] == 3


def test_the_counts_outlive_compaction_and_are_those_of_the_last_publish(tmp_path: Path) -> None:
    publisher = StorePublisher(tmp_path, now_unix_ns=lambda: START)
    publisher.open()
    for index in range(3):
        publisher.publish(index, index + 1, 0, [], [], {"rows": 5 + index})
    publisher.publish(3, 3, 1, [], [])
    publisher.retire(())
    publisher.publish(3, 4, 1, [], [], {"rows": 9, "spans": 1})
    for _ in range(2):
        publisher.close()
        assert publisher.open().observed == {"rows": 9, "spans": 1}
        Upkeep(publisher, UpkeepSettings(), lambda: START).run_pass()
        publisher.retire(())
    publisher.close()


def test_a_fact_that_is_taken_back_takes_its_count_back() -> None:
    seen = DurableCounters({"edge_joined": 4})
    seen.add(CounterKey.EDGE_JOINED, -1)
    taken = seen.take()
    seen.add(CounterKey.JOINS, word="ancestor")
    assert seen.with_added(taken) == {"edge_joined": 3}
    seen.put_back(taken)
    assert seen.with_added(seen.take()) == {"edge_joined": 3, "joins.ancestor": 1}


def same_id_twice() -> list[Exchange]:
    """Return two requests with one id at once, and prefills that may be of either."""
    hints = (Hint.DUPLICATE_REQUEST_ID,)
    edges = [exchange(Role.EDGE, at, 1000, rid="same", trace=f"e{at}", ttft_ms=300, hints=hints) for at in (0, 20)]
    return [*edges, *(exchange(Role.PREFILL, at + 10, 90, rid="same", trace=f"p{at}") for at in (0, 20))]


def of_a_stepped_clock() -> list[Exchange]:
    """Return two calls whose callees contradict each other's clock bounds.

    The callees are on one host and differ by more than the calls can be apart.
    """
    made = []
    for at, off in ((0, 0), (2000, 400)):
        edge = exchange(Role.EDGE, at, 100, rid=f"r{at}", host="h-e", ttft_ms=90)
        made += [edge, exchange(Role.PREFILL, at + 10 + off, 50, rid=f"r{at}", parent=edge, host="h-p")]
    return made


@pytest.mark.parametrize(
    ("seen", "made"),
    [(CounterKey.AMBIGUOUS_JOINS, same_id_twice), (CounterKey.CLOCK_CONTRADICTIONS, of_a_stepped_clock)],
    ids=["ambiguous", "stepped"],
)
async def test_what_does_not_fit_is_counted_once_over_restarts(
    tmp_path: Path, seen: CounterKey, made: Callable[[], list[Exchange]]
) -> None:
    clock = Clock()
    counts = []
    for life in range(3):
        async with running(tmp_path, clock, stitch=QUICK) as (journal, pipeline):
            if not life:
                await send(journal, made())
            await taken(pipeline, journal)
            clock.now += 5 * SECOND
            sweep(pipeline, clock.now)
            await pipeline.flush()
            counts.append(pipeline.observed[seen])
    assert counts[0] > 0
    assert counts == [counts[0]] * 3
