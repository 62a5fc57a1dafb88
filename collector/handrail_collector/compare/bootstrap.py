"""Figures of an arm with their uncertainty: a block bootstrap over time, stratified by level of rate.

Every figure is a function of sums per block, so a draw is a vector of weights (how often each block was drawn) and all draws
are one matrix product. Values given by themselves are exact; within draws a quantile is read at ``RANKS`` ranks of the arm's
own values, half of them in the upper 5 %. Intervals are the percentile bootstrap's with its levels widened for the number of
blocks as a t interval's would be (Hesterberg 2015, "What teachers should know about the bootstrap", expanded percentile
interval). Seeded: the same rows give the same intervals.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, sqrt
from statistics import NormalDist
from typing import Final

import numpy as np
from numpy.typing import NDArray

from handrail_collector.compare.sample import Floats

DRAWS: Final = 4000
RANKS: Final = 2048
CONFIDENCE: Final = 0.95
_TAIL: Final = 0.95
_CHUNK: Final = 500  # draws at once, which bounds memory
_NORMAL: Final = NormalDist()


@dataclass(frozen=True, slots=True)
class Figure:
    """A value and what it was in each draw. ``df``: blocks less levels."""

    value: float
    draws: Floats
    df: int

    def interval(self, confidence: float = CONFIDENCE) -> tuple[float, float]:
        """(low, high), which holds the value; (nan, nan) where too few draws know one."""
        return _interval(self.value, self.draws, self.df, confidence)


def difference(of: Figure, to: Figure) -> Figure:
    """``to`` less ``of``, of two arms drawn independently."""
    return Figure(to.value - of.value, to.draws - of.draws, min(of.df, to.df))


class Bootstrap:
    """The draws of one arm."""

    def __init__(self, level_of_block: NDArray[np.int64], seed: Sequence[int], draws: int = DRAWS) -> None:
        self.blocks = len(level_of_block)
        rng = np.random.default_rng(seed)
        self._weights = np.zeros((draws, self.blocks))
        levels = np.unique(level_of_block)
        for level in levels:
            mine = np.flatnonzero(level_of_block == level)
            self._weights[:, mine] = rng.multinomial(len(mine), np.full(len(mine), 1 / len(mine)), size=draws)
        self.df = max(1, self.blocks - len(levels))

    def ratio(self, numerator: Floats, denominator: Floats) -> Figure:
        """Sum over blocks of one divided by that of the other; nan where nothing is counted."""
        with np.errstate(divide="ignore", invalid="ignore"):
            draws = (self._weights @ numerator) / (self._weights @ denominator)
            return Figure(float(np.divide(numerator.sum(), denominator.sum())), draws, self.df)

    def quantiles(self, values: Floats, block: NDArray[np.int64], shares: Sequence[float]) -> list[Figure]:
        """Nearest-rank quantiles of ``values``, each in ``block``. Point values are exact."""
        if not len(values):
            return [Figure(float("nan"), np.full(len(self._weights), np.nan), self.df) for _ in shares]
        ordered = np.sort(values)
        edges = np.unique(ordered[_ranks(len(ordered))])
        cells = np.searchsorted(edges, values, side="left")
        counts = np.bincount(block * len(edges) + cells, minlength=self.blocks * len(edges)).reshape(self.blocks, len(edges))
        exact = [float(ordered[max(1, ceil(share * len(ordered) - 1e-9)) - 1]) for share in shares]
        return [Figure(value, draws, self.df) for value, draws in zip(exact, self._read(counts, edges, shares), strict=True)]

    def counted_quantiles(self, counts: NDArray[np.int64], middles: Floats, shares: Sequence[float]) -> list[Figure]:
        """Quantiles of what was counted in buckets (blocks x buckets), each as the middle of its bucket."""
        used = np.flatnonzero(counts.sum(axis=0))
        if not len(used):
            return [Figure(float("nan"), np.full(len(self._weights), np.nan), self.df) for _ in shares]
        kept, values = counts[:, used], middles[used]
        below = np.cumsum(kept.sum(axis=0))
        points = [float(values[np.searchsorted(below, max(1, ceil(share * below[-1] - 1e-9)))]) for share in shares]
        return [Figure(value, draws, self.df) for value, draws in zip(points, self._read(kept, values, shares), strict=True)]

    def _read(self, counts: NDArray[np.int64], values: Floats, shares: Sequence[float]) -> list[Floats]:
        found = [np.full(len(self._weights), np.nan) for _ in shares]
        for begin in range(0, len(self._weights), _CHUNK):
            chunk = slice(begin, begin + _CHUNK)
            below = np.cumsum(self._weights[chunk] @ counts, axis=1)
            total = below[:, -1]
            for draws, share in zip(found, shares, strict=True):
                rank = np.maximum(1, np.ceil(share * total - 1e-6))
                read = values[np.argmax(below >= rank[:, None] - 1e-6, axis=1)]
                draws[chunk] = np.where(total > 0, read, np.nan)
        return found


def _ranks(count: int) -> NDArray[np.int64]:
    """Ranks (from 0) at which quantiles are read in draws: all, or evenly below and above the upper 5 %, largest included."""
    if count <= RANKS:
        return np.arange(count)
    body, tail = np.linspace(0, _TAIL, RANKS // 2, endpoint=False), np.linspace(_TAIL, 1, RANKS // 2)
    return np.minimum(np.ceil(np.concatenate((body, tail)) * count).astype(np.int64), count - 1)


def _interval(value: float, draws: Floats, df: int, confidence: float) -> tuple[float, float]:
    known = draws[~np.isnan(draws)]
    if np.isnan(value) or len(known) < 0.99 * len(draws):
        return float("nan"), float("nan")
    share = _NORMAL.cdf(-sqrt((df + 1) / df) * t_quantile((1 + confidence) / 2, df))
    low, high = np.quantile(known, (share, 1 - share))
    return min(value, float(low)), max(value, float(high))


def t_quantile(share: float, df: int) -> float:
    """Student's t by its expansion in 1/df (Abramowitz and Stegun 26.7.5): within 0.5 % from 9 degrees of freedom on."""
    z = _NORMAL.inv_cdf(share)
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return float(sum(term / df**power for power, term in enumerate(terms)))
