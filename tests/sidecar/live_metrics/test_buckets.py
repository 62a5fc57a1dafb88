"""Dense buckets: their distance, and the error of a quantile read from them."""

from __future__ import annotations

from itertools import pairwise
from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from handrail.metrics.histogram import BYTES, LATENCY, LATENCY_SECONDS, SIZE, Histogram
from harness.promql import histogram_quantile

MS, S = 10**6, 10**9

# log-uniform over the covered range, and the bounds themselves with their neighbours
_NS = st.one_of(
    st.floats(6.0001, 11).map(lambda power: min(round(10**power), 100 * S)),
    st.sampled_from(LATENCY.edges[1:]).flatmap(lambda edge: st.sampled_from((edge - 1, edge, min(edge + 1, 100 * S)))),
)


def test_bounds_are_at_most_a_tenth_apart_from_1_ms_to_100_s() -> None:
    assert (LATENCY_SECONDS[0], LATENCY_SECONDS[-1]) == (0.001, 100.0)
    edges = LATENCY.edges
    assert all(low < high and high * 10 <= low * 11 for low, high in pairwise(edges))
    assert all(high == 2 * low for low, high in pairwise(BYTES))


@pytest.mark.parametrize(
    "threshold", [0.001, 0.02, 0.025, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.5, 0.75, 1, 1.5, 2, 2.5, 5, 10, 30, 60]
)
def test_H13_a_threshold_that_people_choose_is_a_bound(threshold: float) -> None:
    assert threshold in LATENCY_SECONDS


@given(st.lists(_NS, min_size=1, max_size=300), st.sampled_from((0.01, 0.5, 0.9, 0.99, 0.999, 1.0)))
def test_a_quantile_that_promql_reads_is_within_a_tenth(values: list[int], q: float) -> None:
    histogram = Histogram(LATENCY)
    histogram.extend(values)
    raw = sorted(values)[max(1, ceil(q * len(values) - 1e-9)) - 1] / S
    read = histogram_quantile(q, LATENCY_SECONDS, histogram.counts)
    assert raw / 1.1 * (1 - 1e-9) <= read <= raw * 1.1 * (1 + 1e-9)


@given(st.lists(st.integers(-(10**12), 10**15)))
def test_many_at_once_are_the_same_as_one_by_one(values: list[int]) -> None:
    one, many = Histogram(LATENCY), Histogram(LATENCY)
    for value in values:
        one.observe(value)
    many.extend(values)
    assert (one.counts, one.total) == (many.counts, many.total)
    assert one.count == len(values)
    assert one.total == sum(max(0, value) for value in values)


@pytest.mark.parametrize(
    ("value", "bound"),
    [(0, 0.001), (-5, 0.001), (MS, 0.001), (MS + 1, 0.0011), (S, 1.0), (S + 1, 1.1), (100 * S, 100.0), (100 * S + 1, None)],
)
def test_a_bound_is_inclusive(value: int, bound: float | None) -> None:
    at = Histogram(LATENCY).observe(value)
    assert (LATENCY_SECONDS[at] if at < len(LATENCY_SECONDS) else None) == bound


def test_weights_and_sizes() -> None:
    histogram = Histogram(SIZE)
    histogram.observe(1 << 30, 3)
    assert (histogram.count, histogram.total) == (3, 3 << 30)
    assert histogram.counts[20] == 3
