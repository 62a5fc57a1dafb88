"""Running totals and windows cut out of time, against slow sums."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from handrail_collector.explain.stalls.cumulative import curve_of, stretches

_times = st.integers(0, 120)
_intervals = st.lists(st.tuples(_times, _times).map(lambda pair: (min(pair), max(pair))), max_size=8)
_amounts = st.lists(st.tuples(_times, st.integers(1, 60), st.integers(0, 50)), max_size=8)


def spread(amounts: list[tuple[int, int, int]], begin: float, end: float) -> float:
    """Return the total of the amounts within a window, one interval after the other."""
    found = 0.0
    for first, length, amount in amounts:
        common = min(end, first + length) - max(begin, first)
        found += amount * max(0.0, common) / length
    return found


@given(_amounts, _times, _times)
def test_what_lies_within_is_the_sum_of_the_parts(amounts: list[tuple[int, int, int]], one: int, two: int) -> None:
    curve = curve_of([(first, first + length, amount) for first, length, amount in amounts])
    begin, end = min(one, two), max(one, two)
    assert curve.within(begin, end) == pytest.approx(spread(amounts, begin, end), abs=1e-6)


def test_a_moment_counts_where_it_is() -> None:
    curve = curve_of([(500, 500, 3.0)], 100)
    assert [curve.within(0, end) for end in (400, 401, 900)] == [0.0, 3.0, 3.0]


def test_of_nothing_there_is_nothing() -> None:
    assert curve_of([]).within(0, 10) == 0.0
    assert stretches([], []).amounts(curve_of([(0, 10, 1.0)]), np.array([0.0]), 5.0).tolist() == [0.0]


def member(intervals: list[tuple[int, int]], at: float) -> bool:
    return any(begin <= at < end for begin, end in intervals)


@given(_intervals, _intervals)
def test_what_is_left_is_in_the_one_and_not_in_the_other(wanted: list[tuple[int, int]], without: list[tuple[int, int]]) -> None:
    left = stretches(wanted, without)
    expected = sum(member(wanted, at + 0.5) and not member(without, at + 0.5) for at in range(120))
    assert left.total_ns == expected
    if expected:
        places = np.arange(expected, dtype=np.float64) + np.float64(0.5)
        _, times = left.at(places)
        assert all(member(wanted, at) and not member(without, at) for at in times)


@settings(deadline=None)
@given(_amounts, _intervals, _intervals, st.integers(1, 30))
def test_windows_over_parts_of_time_hold_what_those_parts_hold(
    amounts: list[tuple[int, int, int]], wanted: list[tuple[int, int]], without: list[tuple[int, int]], length: int
) -> None:
    curve = curve_of([(first, first + lasts, amount) for first, lasts, amount in amounts])
    parts = stretches(wanted, without)
    if parts.total_ns < length:
        return
    kept = [at for at in range(120) if member(wanted, at + 0.5) and not member(without, at + 0.5)]
    each = [spread(amounts, at, at + 1) for at in kept]
    starts = np.arange(0, int(parts.total_ns) - length + 1, dtype=np.float64)
    found = parts.amounts(curve, starts, float(length))
    assert found == pytest.approx([sum(each[start : start + length]) for start in range(len(starts))], abs=1e-6)
