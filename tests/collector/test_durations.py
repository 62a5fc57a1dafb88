"""Durations by bucket are exact sums, in whatever publishes they come.

They mean the same after a restart.
"""

from __future__ import annotations

from bisect import bisect_left

from hypothesis import given
from hypothesis import strategies as st

from handrail.metrics.histogram import LATENCY
from handrail_collector.counters import LAYOUT, CounterKey, DurableCounters, Durations, Timed
from handrail_collector.store.manifest import added_up

NS = st.integers(0, 200 * 10**9)


def of(values: list[int]) -> Durations:
    made = Durations()
    for value in values:
        made.add(value)
    return made


@given(st.lists(NS, max_size=200))
def test_each_duration_lies_in_its_bucket_bounds_included(values: list[int]) -> None:
    histogram = of(values).histogram()
    edges = [round(bound * 10**9) for bound in LATENCY.bounds]
    expected = [0] * (len(edges) + 1)
    for value in values:
        expected[bisect_left(edges, value)] += 1
    assert (histogram.counts, histogram.total, histogram.count) == (expected, sum(values), len(values))


@given(st.lists(st.lists(NS, max_size=20), max_size=10))
def test_what_publishes_add_is_the_whole_in_any_parts(parts: list[list[int]]) -> None:
    whole = of([value for part in parts for value in part])
    merged = Durations()
    for part in parts:
        merged.merge(of(part))
    stored = added_up([{"x": of(part).flat()} for part in parts])
    assert merged == whole
    assert Durations.of(stored.get("x", (0, 0))) == whole
    assert added_up([stored]) == stored


def test_durations_of_other_bounds_are_left_behind() -> None:
    kept = of([5, 10**9]).flat()
    seen = DurableCounters({}, {f"phases@{LAYOUT}.kv_wait.m": kept, "phases@0badc0de.kv_wait.m": kept})
    assert {words: found.histogram().count for words, found in seen.durations(Timed.PHASES, 2).items()} == {("kv_wait", "m"): 2}


def test_a_failed_publish_loses_no_duration_and_a_good_one_counts_once() -> None:
    seen = DurableCounters({})
    seen.time(Timed.PHASES, ("kv_wait", "a/b-1.5"), 7)
    taken = seen.take()
    seen.time(Timed.PHASES, ("kv_wait", "a/b-1.5"), 8)
    seen.put_back(taken)
    assert seen.durations(Timed.PHASES, 2) == {}
    taken = seen.take()
    assert set(taken.added()) == {f"phases@{LAYOUT}.kv_wait.a/b-1.5"}
    seen.done(seen.with_added(taken), taken)
    assert seen.durations(Timed.PHASES, 2) == {("kv_wait", "a/b-1.5"): of([7, 8])}
    assert seen.take().added() == {}


def test_counts_by_model_are_stored_as_additions_and_those_of_earlier_releases_still_count() -> None:
    """Counts by model are stored as differences.

    All totals of 32 models would take some 30 kB in each line of the manifest, every five seconds.
    The counts of earlier releases still count.
    """
    seen = DurableCounters({"stalls.kv_landing": 4, "rows": 7}, {"stalls.kv_landing.m": (0, 2), "joined.ok.a.b": (0, 5)})
    seen.add(CounterKey.STALLS, 3, "kv_landing.m")
    seen.add(CounterKey.JOINED, word="ok.c")
    seen.add(CounterKey.ROWS)
    taken = seen.take()
    assert taken.added() == {"stalls.kv_landing.m": (0, 3), "joined.ok.c": (0, 1)}
    totals = seen.with_added(taken)
    assert totals == {"stalls.kv_landing": 4, "rows": 8}
    seen.done(totals, taken)
    assert seen.by_words(CounterKey.STALLS, 2) == {("kv_landing", ""): 4, ("kv_landing", "m"): 5}
    assert seen.by_words(CounterKey.JOINED, 2) == {("ok", "a.b"): 5, ("ok", "c"): 1}
    again = DurableCounters(totals, added_up([{"stalls.kv_landing.m": (0, 2), "joined.ok.a.b": (0, 5)}, taken.added()]))
    assert again.by_words(CounterKey.STALLS, 2) == seen.by_words(CounterKey.STALLS, 2)
    assert again.by_words(CounterKey.JOINED, 2) == seen.by_words(CounterKey.JOINED, 2)
