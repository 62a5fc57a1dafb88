"""GapSketch against exact order statistics."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from handrail.metrics.exponential_histogram import MAX_BUCKETS, GapSketch

HOUR_NS = 3_600_000_000_000
values_ns = st.one_of(
    st.integers(0, 3000),
    st.integers(0, 24 * HOUR_NS),
    st.floats(0, math.log(1 << 50) - 1e-9).map(lambda x: int(math.exp(x))),
)
quantiles = st.one_of(st.floats(0, 1), st.sampled_from([0.0, 0.07, 0.5, 0.9, 0.99, 0.999, 1.0]))


def sketch_of(values: list[int]) -> GapSketch:
    sketch = GapSketch()
    sketch.extend(values)
    return sketch


def exact(values: list[int], q: float) -> int:
    rank = max(1, math.ceil(q * len(values) - 1e-9))
    return sorted(values)[rank - 1]


@given(st.lists(values_ns, min_size=1, max_size=300), quantiles)
def test_quantile_is_within_one_percent(values: list[int], q: float) -> None:
    want, got = exact(values, q), sketch_of(values).quantile(q)
    assert got is not None
    assert abs(got - want) <= 0.01 * want


@pytest.mark.parametrize("start", [1, 900, 1000, 1024, 5000, 10**6, 10**9, HOUR_NS, 99 * HOUR_NS], ids=str)
def test_every_value_of_a_range_is_within_one_percent(start: int) -> None:
    step = max(1, start // 40_000)
    for value in range(start, start + 600 * step, step):
        sketch = sketch_of([0, value, value, 1 << 49])  # the ends are exact, so look at the middle
        got = sketch.quantile(0.6)
        assert got is not None
        assert abs(got - value) <= 0.01 * value


@given(st.lists(values_ns, max_size=100), st.lists(values_ns, max_size=100))
def test_merge_equals_the_sketch_of_both(left: list[int], right: list[int]) -> None:
    merged = sketch_of(left)
    other = sketch_of(right)
    before = other.encode()
    merged.merge(other)
    assert merged == sketch_of(left + right)
    assert other.encode() == before


def test_merge_with_itself_doubles() -> None:
    sketch = sketch_of([5, 7, 9000])
    sketch.merge(sketch)
    assert sketch == sketch_of([5, 7, 9000] * 2)


@given(st.lists(st.tuples(values_ns, st.integers(1, 9)), max_size=100))
def test_weight_counts_a_value_that_many_times(pairs: list[tuple[int, int]]) -> None:
    weighted = GapSketch()
    for value, weight in pairs:
        weighted.add(value, weight)
    assert weighted == sketch_of([value for value, weight in pairs for _ in range(weight)])


@given(st.lists(st.tuples(st.integers(0, 2**63 - 1), st.integers(1, 10**12)), max_size=200))
def test_encode_decode_round_trip(pairs: list[tuple[int, int]]) -> None:
    sketch = GapSketch()
    for value, weight in pairs:
        sketch.add(value, weight)
    data = sketch.encode()
    assert GapSketch.decode(data) == sketch
    for cut in range(len(data)):
        with pytest.raises(ValueError, match=r".+"):
            GapSketch.decode(data[:cut])
    with pytest.raises(ValueError, match="after the sketch"):
        GapSketch.decode(data + b"\0")


@given(st.binary(max_size=400))
def test_garbage_is_a_sketch_or_a_value_error(data: bytes) -> None:
    for candidate in (data, b"\x01" + data):
        try:
            sketch = GapSketch.decode(candidate)
        except ValueError:
            continue
        assert GapSketch.decode(sketch.encode()) == sketch
        assert sketch.quantile(0.5) is None or sketch.count > 0


def test_totals_and_ends_are_exact() -> None:
    sketch = sketch_of([24_000_001, 3, 0, 999_999_999])
    assert (sketch.count, sketch.sum_ns, sketch.min_ns, sketch.max_ns) == (4, 1_024_000_003, 0, 999_999_999)
    assert (sketch.quantile(0), sketch.quantile(1)) == (0, 999_999_999)
    assert "count=4" in repr(sketch)


def test_empty() -> None:
    sketch = GapSketch()
    assert (sketch.count, sketch.sum_ns, sketch.min_ns, sketch.max_ns, sketch.quantile(0.5)) == (0, 0, None, None, None)
    assert GapSketch.decode(sketch.encode()) == sketch
    assert sketch != object()


def test_beyond_thirteen_days_the_largest_value_answers() -> None:
    sketch = sketch_of([1 << 51, 1 << 52, 1 << 53])
    assert sketch.quantile(0.5) == 1 << 53


@pytest.mark.parametrize(("value", "weight"), [(-1, 1), (1 << 63, 1), (1, 0), (1, -3)])
def test_out_of_range_is_refused(value: int, weight: int) -> None:
    with pytest.raises(ValueError, match="out of range"):
        GapSketch().add(value, weight)
    if weight == 1:
        with pytest.raises(ValueError, match="out of range"):
            GapSketch().extend([1, value])


@pytest.mark.parametrize("q", [-0.1, 1.1, math.nan])
def test_a_quantile_outside_its_range_is_refused(q: float) -> None:
    with pytest.raises(ValueError, match="quantile"):
        sketch_of([1]).quantile(q)


@settings(max_examples=5)
@given(st.integers(0, 2**32))
def test_buckets_are_bounded_and_streams_encode_small(seed: int) -> None:
    rng = random.Random(seed)
    endless = sketch_of([int(math.exp(rng.uniform(0, 43.6))) for _ in range(20_000)])
    assert len(endless._buckets) <= MAX_BUCKETS < 4000
    steady = sketch_of([int(rng.gauss(24e6, 3e6)) for _ in range(200)])
    assert len(steady.encode()) < 90
    wide = sketch_of([int(rng.lognormvariate(17, 0.4)) for _ in range(200)])
    assert len(wide.encode()) < 150
