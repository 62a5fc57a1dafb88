"""Gap sketches of many streams, merged by columns.

The result equals merging them one by one.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from handrail.metrics.exponential_histogram import GapSketch
from handrail_collector.store.gap_counts import GapCounts

WEIGHTED = st.tuples(st.integers(0, 2**63 - 1), st.one_of(st.integers(1, 9), st.integers(1, 2**40)))


def sketch(values: list[tuple[int, int]]) -> GapSketch:
    made = GapSketch()
    for value, weight in values:
        made.add(value, weight)
    return made


@given(st.lists(st.tuples(st.integers(0, 2), st.lists(WEIGHTED, max_size=12)), max_size=12))
def test_merged_by_columns_they_are_what_they_are_one_by_one(streams: list[tuple[int, list[tuple[int, int]]]]) -> None:
    expected = [GapSketch() for _ in range(3)]
    for group, values in streams:
        expected[group].merge(sketch(values))
    counts = GapCounts(3)
    encoded = pa.chunked_array([pa.array([sketch(values).encode() for _, values in streams], pa.binary())])
    counts.add(encoded, np.array([group for group, _ in streams], np.int64))
    assert counts.merged == expected
    assert counts.unreadable == 0


@pytest.mark.parametrize(
    "damaged", [b"", b"\x01", b"\x02\x00", b"\x01\x01\x05\x00", sketch([(70, 1)]).encode() + b"\x00", b"\xff" * 30]
)
def test_what_is_no_sketch_is_left_out_and_counted(damaged: bytes) -> None:
    whole = sketch([(10, 5), (10**7, 2)])
    counts = GapCounts(1)
    counts.add(pa.chunked_array([pa.array([whole.encode(), damaged, None, whole.encode()], pa.binary())]), np.zeros(4, np.int64))
    assert counts.unreadable == 1
    assert counts.merged[0].count == 14


def test_a_sum_of_sums_beyond_63_bits_is_exact() -> None:
    long = sketch([(2**62, 1)])
    counts = GapCounts(1)
    counts.add(pa.chunked_array([pa.array([long.encode()] * 7, pa.binary())]), np.zeros(7, np.int64))
    assert counts.merged[0].sum_ns == 7 * 2**62
