"""Derive quantiles and shares that a histogram's buckets prove.

Cases D01, D02, D25. Interpolation in the first bucket invents 297 ms for requests that took 4 ms.
A quantile above the last finite bound is not that bound.
So a quantile comes with the interval that the buckets prove, and with the side on which it is open.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from handrail.records import EngineHistogram


class LimitSide(str, Enum):
    """What the buckets prove about a quantile."""

    BETWEEN = "between"  # between two bounds; ``value`` is interpolated
    AT_MOST = "at_most"  # in the lowest bucket
    ABOVE = "above"  # beyond the last finite bound


@dataclass(frozen=True, slots=True)
class Quantile:
    """A quantile with its interval.

    ``value`` is None when interpolation would invent it.
    """

    side: LimitSide
    low: float
    high: float | None
    value: float | None


def quantile(histogram: EngineHistogram, share: float) -> Quantile | None:
    """Return the ``share`` quantile; None for an empty histogram."""
    total = sum(histogram.counts)
    if not total:
        return None
    rank, before = share * total, 0
    for place, count in enumerate(histogram.counts):
        if before + count >= rank and count:
            if place == len(histogram.bounds):
                break
            high = histogram.bounds[place]
            if place == 0:
                return Quantile(LimitSide.AT_MOST, 0.0, high, None)
            low = histogram.bounds[place - 1]
            return Quantile(LimitSide.BETWEEN, low, high, low + (high - low) * (rank - before) / count)
        before += count
    return Quantile(LimitSide.ABOVE, histogram.bounds[-1] if histogram.bounds else 0.0, None, None)


def share_above(histogram: EngineHistogram, limit: float) -> tuple[float, float] | None:
    """Return the smallest and largest share that can lie above ``limit``.

    They are equal when ``limit`` is a bucket's bound. None for an empty histogram.
    """
    total = sum(histogram.counts)
    if not total:
        return None
    under = sum(count for bound, count in zip(histogram.bounds, histogram.counts, strict=False) if bound <= limit)
    at = next((place for place, bound in enumerate(histogram.bounds) if bound > limit), len(histogram.bounds))
    inside = 0 if limit in histogram.bounds else histogram.counts[at]
    return (total - under - inside) / total, (total - under) / total


def saturated_share(histogram: EngineHistogram) -> float:
    """Return the share of samples above the last finite bound; 0 if there are none."""
    total = sum(histogram.counts)
    return histogram.counts[-1] / total if total else 0.0


def mean(histogram: EngineHistogram) -> float | None:
    """Return the mean; None without a sample or when the engine's sum makes no sense."""
    return histogram.total / histogram.count if histogram.count and histogram.total is not None else None
