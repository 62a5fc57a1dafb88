"""PromQL's ``histogram_quantile`` on classic buckets, as Prometheus documents it."""

from __future__ import annotations

from collections.abc import Sequence
from math import nan


def histogram_quantile(q: float, bounds: Sequence[float], counts: Sequence[int]) -> float:
    """Return the quantile of a histogram.

    ``counts``: per bucket, not cumulative, one more than ``bounds``. Linear inside a bucket; the first bucket begins at 0.
    """
    total = sum(counts)
    if not total:
        return nan
    rank, running = q * total, 0
    for at, count in enumerate(counts):
        running += count
        if running >= rank and count:
            if at == len(bounds):
                return bounds[-1]
            low = bounds[at - 1] if at else 0.0
            return low + (bounds[at] - low) * (rank - (running - count)) / count
    return bounds[-1]
