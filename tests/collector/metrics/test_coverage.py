"""Coverage: joined requests over those that another process counted.

It is absent where nobody counted.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from handrail_collector.metrics.coverage import MEMORY_NS, MOST_PROCESSES, SECOND, WINDOW_NS, By, Coverage

SETTLE = 20 * SECOND
T0 = 1_700_000_000 * SECOND
SKEW = -3600 * SECOND
"""The observed process's clock is an hour behind; only its own times are compared."""


def read(
    coverage: Coverage, at_s: float, value: float, *, by: By = By.EDGE, of: str = "e", since_s: float = 0, again: bool = False
) -> int:
    at = T0 + round(at_s * SECOND)
    start = T0 + SKEW + round(since_s * SECOND)
    return coverage.read(by, of, start, value, at + SKEW, at, again=again)


def join(coverage: Coverage, ends_s: Iterable[float], by: By = By.EDGE, of: str = "e") -> None:
    for end in ends_s:
        coverage.joined(by, of, T0 + SKEW + round(end * SECOND))


def at(seconds: float) -> int:
    return T0 + round(seconds * SECOND)


def test_joined_over_counted() -> None:
    coverage = Coverage(SETTLE)
    assert [read(coverage, t, n) for t, n in ((0, 0), (10, 4), (20, 10))] == [0, 4, 6]
    join(coverage, [1, 2, 3, 11, 12])
    assert coverage.ratio(at(41)) == 5 / 10


def test_what_is_not_settled_does_not_count_yet() -> None:
    coverage = Coverage(SETTLE)
    for t, n in ((0, 0), (10, 4), (20, 10)):
        read(coverage, t, n)
    join(coverage, [1, 2, 3, 4])
    assert coverage.ratio(at(31)) == 1.0
    assert coverage.ratio(at(10)) is None


def test_a_request_decided_before_its_count_came_is_of_the_next_interval() -> None:
    coverage = Coverage(SETTLE)
    read(coverage, 0, 0)
    join(coverage, [1, 2, 9.9])
    read(coverage, 10, 4)
    assert coverage.ratio(at(31)) == 3 / 4


def test_nothing_counted_is_not_known() -> None:
    coverage = Coverage(SETTLE)
    assert coverage.ratio(at(100)) is None
    read(coverage, 0, 0)
    read(coverage, 10, 0)
    assert coverage.ratio(at(40)) is None
    read(coverage, 20, 5)
    assert coverage.ratio(at(60)) == 0.0
    assert coverage.ratio(at(60) + WINDOW_NS) is None


def test_a_counter_met_late_counts_from_its_first_reading() -> None:
    coverage = Coverage(SETTLE)
    assert read(coverage, 7200, 100_000) == 0
    assert read(coverage, 7210, 100_007) == 7
    join(coverage, [7150, 7201])
    assert coverage.ratio(at(7240)) == 1 / 7


def test_a_young_counter_counts_from_its_start_though_what_was_joined_before_is_not_known() -> None:
    coverage = Coverage(SETTLE)
    join(coverage, [1, 2])
    assert read(coverage, 10, 2) == 2
    assert coverage.ratio(at(40)) is None
    read(coverage, 20, 3)
    join(coverage, [15])
    assert coverage.ratio(at(50)) == 1.0


def test_a_restart_of_who_counts_counts_anew() -> None:
    coverage = Coverage(SETTLE)
    read(coverage, 0, 0)
    read(coverage, 10, 50)
    assert read(coverage, 20, 3, since_s=12) == 3
    assert read(coverage, 30, 2, since_s=12) == 2, "a value that fell is a restart, too"


def test_readings_delivered_late_or_twice_count_once() -> None:
    coverage = Coverage(SETTLE)
    read(coverage, 0, 0)
    assert [read(coverage, 20, 10), read(coverage, 20, 10), read(coverage, 10, 5)] == [10, 0, 0]


def test_a_replay_counts_nothing_and_its_last_interval_is_not_whole() -> None:
    coverage = Coverage(SETTLE)
    assert [read(coverage, t, n, again=True) for t, n in ((0, 3), (10, 8))] == [0, 0]
    assert read(coverage, 20, 18) == 10
    assert coverage.ratio(at(60)) is None, "an earlier life may have joined of it what this one does not know of"
    read(coverage, 30, 20)
    join(coverage, [21, 22])
    assert coverage.ratio(at(60)) == 1.0


def test_engines_count_where_no_edge_does() -> None:
    coverage = Coverage(SETTLE)
    for t, n in ((0, 0), (10, 4)):
        read(coverage, t, n, by=By.ENGINE, of="d")
    join(coverage, [1, 2], By.ENGINE, "d")
    assert coverage.by(at(40)) is By.ENGINE
    assert coverage.ratio(at(40)) == 0.5
    read(coverage, 41, 0)
    assert coverage.by(at(42)) is By.EDGE
    assert coverage.ratio(at(42)) is None
    assert coverage.by(at(41) + MEMORY_NS) is By.ENGINE


def test_a_request_that_ends_while_its_counter_is_read_makes_no_coverage_above_one() -> None:
    coverage = Coverage(SETTLE)
    for t, n in ((0, 0), (10, 1), (20, 1)):
        read(coverage, t, n)
    join(coverage, [9, 10])
    assert coverage.ratio(at(50)) == 1.0


def test_the_processes_remembered_are_bounded() -> None:
    coverage = Coverage(SETTLE)
    for n in range(MOST_PROCESSES + 100):
        read(coverage, 0, 0, of=f"e{n}")
    assert len(coverage._processes) == MOST_PROCESSES


@given(
    ends=st.lists(st.tuples(st.floats(0.001, 99.9), st.booleans(), st.floats(0, 15)), max_size=60),
    readings=st.lists(st.floats(1, 99), max_size=12, unique=True),
)
@pytest.mark.filterwarnings("error")
def test_over_a_window_it_is_exact_whenever_readings_and_decisions_come(
    ends: list[tuple[float, bool, float]], readings: list[float]
) -> None:
    coverage = Coverage(SETTLE)
    read(coverage, 0, 0)
    happens: list[tuple[float, int, float]] = [(t, 0, t) for t in [*readings, 100.0]]
    happens += [(end + took, 1, end) for end, joined, took in ends if joined]
    for when, kind, moment in sorted(happens):
        if kind:
            join(coverage, [moment])
        else:
            read(coverage, when, sum(end <= when for end, _, _ in ends))
    expected = sum(joined for _, joined, _ in ends) / len(ends) if ends else None
    assert coverage.ratio(at(125)) == expected
