"""Gap sketches read by columns: the same buckets as ``GapSketch.decode`` gives."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from handrail.metrics.exponential_histogram import GapSketch
from handrail_collector.compare.sketches import decode

VALUES = st.integers(0, 2000) | st.integers(0, 2**40) | st.integers(0, 2**50)
WEIGHTED = st.lists(st.tuples(VALUES, st.integers(1, 9) | st.integers(1, 2**30)), max_size=60)


def made(weighted: list[tuple[int, int]]) -> GapSketch:
    sketch = GapSketch()
    for value, weight in weighted:
        sketch.add(value, weight)
    return sketch


@settings(deadline=None)
@given(st.lists(st.none() | WEIGHTED, max_size=12), st.integers(0, 3))
def test_sketches_are_read_as_one_by_one(rows: list[list[tuple[int, int]] | None], skipped: int) -> None:
    sketches = [None if row is None else made(row) for row in rows]
    array = pa.array([None if sketch is None else sketch.encode() for sketch in sketches], pa.binary()).slice(skipped)
    buckets = decode(array)
    read: list[dict[int, int]] = [{} for _ in range(len(array))]
    for row, bucket, weight in zip(buckets.row.tolist(), buckets.bucket.tolist(), buckets.weight.tolist(), strict=True):
        read[row][bucket] = weight
    for at, sketch in enumerate(sketches[skipped:]):
        assert read[at] == ({} if sketch is None else sketch.buckets())
        assert buckets.count[at] == (0 if sketch is None else sketch.count)
        assert buckets.sum_ns[at] == pytest.approx(0 if sketch is None else sketch.sum_ns)


@settings(deadline=None)
@given(WEIGHTED, st.binary(max_size=40))
def test_what_decode_refuses_is_refused_or_read_alike(weighted: list[tuple[int, int]], tail: bytes) -> None:
    whole = made(weighted).encode()
    for data in (tail, whole + tail, whole[: len(whole) // 2]):
        try:
            expected = GapSketch.decode(data)
        except ValueError:
            continue
        if data:
            assert decode(pa.array([data], pa.binary())).count[0] == expected.count


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"\x02\x00", id="another-version"),
        pytest.param(b"\x01", id="nothing-after-the-version"),
        pytest.param(b"\x01\x01\x05\x00\x05", id="no-buckets"),
        pytest.param(b"\x01\x01\x05\x00\x05\x14\x14", id="one-bucket-too-many"),
        pytest.param(b"\x01\x01\x05\x00\x05\x17", id="weight-cut-off"),
        pytest.param(b"\x01\x01\x05\x00\x85", id="number-cut-off"),
        pytest.param(b"\x01\x01\x05\x00\x05" + b"\xff" * 10 + b"\x01", id="number-too-large"),
        pytest.param(b"\x01\x01\x05\x00\x05\xfc\xff\x7f", id="no-such-bucket"),
    ],
)
def test_damage_is_reported(data: bytes) -> None:
    good = made([(5, 1)]).encode()
    with pytest.raises(ValueError, match="gap sketch"):
        decode(pa.array([good, data, good], pa.binary()))
