"""What a histogram can say of a quantile or of a limit, and what it cannot (cases D01, D02, D25).

Interpolating inside the first bucket invents 297 ms for requests that took 4; a quantile above the last finite bound is not that
bound. So a quantile comes with the interval that the buckets prove, and says on which side it is open.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from handrail.records import EngineHistogram


class LimitSide(str, Enum):
    """What the buckets prove of a quantile."""

    BETWEEN = "between"  # two bounds; ``value`` is interpolated
    AT_MOST = "at_most"  # in the lowest bucket
    ABOVE = "above"  # beyond the last finite bound


@dataclass(frozen=True, slots=True)
class Quantile:
    """``value`` is None where interpolation would be an invention."""

    side: LimitSide
    low: float
    high: float | None
    value: float | None


def quantile(histogram: EngineHistogram, share: float) -> Quantile | None:
    """The ``share`` quantile; None of an empty histogram."""
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
    """The smallest and largest share that can lie above ``limit``: equal where it is a bucket's bound; None of an empty one."""
    total = sum(histogram.counts)
    if not total:
        return None
    under = sum(count for bound, count in zip(histogram.bounds, histogram.counts, strict=False) if bound <= limit)
    at = next((place for place, bound in enumerate(histogram.bounds) if bound > limit), len(histogram.bounds))
    inside = 0 if limit in histogram.bounds else histogram.counts[at]
    return (total - under - inside) / total, (total - under) / total


def saturated_share(histogram: EngineHistogram) -> float:
    """The share of samples above the last finite bound; 0 of an empty histogram."""
    total = sum(histogram.counts)
    return histogram.counts[-1] / total if total else 0.0


def mean(histogram: EngineHistogram) -> float | None:
    """The mean; None where there is no sample or the engine's sum makes no sense."""
    return histogram.total / histogram.count if histogram.count and histogram.total is not None else None
