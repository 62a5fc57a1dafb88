"""Decode the buckets of many gap sketches at once.

It works by columns (``store/sketch_columns.py``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from handrail.metrics.exponential_histogram import GapSketch
from handrail_collector.store.sketch_columns import BUCKETS, SUM, Integers, Numbers, bytes_of


@dataclass(frozen=True, slots=True)
class SketchBuckets:
    """Buckets in use, by columns ``row``, ``bucket`` and ``weight``.

    ``sum_ns`` and ``count`` are by row, 0 where there is no sketch.
    """

    row: NDArray[np.int64]
    bucket: NDArray[np.int64]
    weight: NDArray[np.int64]
    sum_ns: NDArray[np.float64]
    count: NDArray[np.int64]


def decode(sketches: pa.Array) -> SketchBuckets:
    """Decode ``sketches``, a binary array; nulls have no gaps.

    Raises ``ValueError`` for bytes that ``GapSketch.encode`` does not write.
    """
    length: Any = pc.binary_length(sketches).fill_null(0).to_numpy(zero_copy_only=False)
    known = np.flatnonzero(length > 0)
    sums: NDArray[np.float64] = np.zeros(len(sketches))
    if not len(known):
        nothing: Integers = np.zeros(0, np.int64)
        return SketchBuckets(nothing, nothing, nothing, sums, np.zeros(len(sketches), np.int64))
    data, ends = bytes_of(sketches.take(pa.array(known)))
    numbers = Numbers.read(data, ends)
    whole = numbers.whole()
    filled = whole & (numbers.header(BUCKETS) > 0)
    step = numbers.step & filled[numbers.row]
    sums[known[filled]] = numbers.header(SUM)[filled]
    used = [np.stack((known[numbers.row[step]], numbers.bucket[step], numbers.weight[step].astype(np.int64)))]
    for at in np.flatnonzero(~whole):  # a damaged sketch, or one that counts days of gaps
        sketch = _alone(sketches[int(known[at])].as_py())
        sums[known[at]] = sketch.sum_ns
        pairs = np.array(list(sketch.buckets().items()), np.int64).reshape(-1, 2).T
        used.append(np.stack((np.full(pairs.shape[1], known[at]), *pairs)))
    row, bucket, weight = np.concatenate(used, axis=1)
    count = np.bincount(row, weights=weight, minlength=len(sketches)).astype(np.int64)
    return SketchBuckets(row, bucket, weight, sums, count)


def _alone(encoded: bytes) -> GapSketch:
    try:
        return GapSketch.decode(encoded)
    except ValueError as error:
        raise ValueError(f"a gap sketch cannot be read: {error}") from None
