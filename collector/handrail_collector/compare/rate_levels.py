"""Find periods of steady request rate, and cut them into bootstrap blocks.

Goodput is a property of a rate that holds for a while, so an arm is cut where its rate changes.
The method is binary segmentation by the Poisson likelihood of arrivals per slice.
The likelihood is divided by the dispersion of arrivals from slice to slice, so that bursts alone are no change of rate.

Neighbours share queues and batches, so requests within a block of time depend on each other.
Blocks hardly do when they are several times as long as that memory.
A block is at least ``MEMORIES`` times as long as the integrated autocorrelation time of the TTFT and of the streams' p99 gap.
It is also at least as long as nine of ten requests take.
Within these limits there are at most ``MOST_BLOCKS`` blocks, and at least ``FEWEST_BLOCKS``.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log
from typing import Final

import numpy as np
from numpy.typing import NDArray

from handrail_collector.compare.sample import Floats, Sample

MOST_BLOCKS: Final = 64
FEWEST_BLOCKS: Final = 10
MEMORIES: Final = 4.0
LEAST_CHANGE: Final = 1.25
"""Least factor between the rates of two levels."""

_LEAST_SLICES: Final = 16  # least length of a level
_LEAST_REQUESTS: Final = 50  # least size of a level
_PER_POINT: Final = 4.0  # requests in a point of the series whose autocorrelation is taken


@dataclass(frozen=True, slots=True)
class Level:
    """Slices [first, end) with one rate, cut into blocks.

    ``drifts``: the memory is as long as the level.
    """

    first: int
    end: int
    requests: int
    seconds: float
    blocks: int
    block_seconds: float
    drifts: bool

    @property
    def rate(self) -> float:
        """Requests a second.

        The first slice of a run begins with an arrival, which does not count.
        """
        return max(0, self.requests - 1) / self.seconds if self.seconds > 0 else 0.0


def levels_of(sample: Sample) -> tuple[Level, ...]:
    """Return the levels of every period, in order; they cover all slices."""
    arrivals = sample.arrivals
    found = []
    for span in sample.spans:
        for first, end in _segments(arrivals[span.first : span.first + span.count].astype(np.float64)):
            at = slice(span.first + first, span.first + end)
            found.append(_level(sample, at, int(arrivals[at].sum()), (end - first) * span.slice_ns / 1e9))
    return tuple(found)


def block_of_slice(levels: tuple[Level, ...]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the block of each slice, and the level of each block."""
    blocks: list[NDArray[np.int64]] = []
    owners: list[NDArray[np.int64]] = []
    made = 0
    for index, level in enumerate(levels):
        slices = level.end - level.first
        blocks.append(made + np.arange(slices) * level.blocks // slices)
        owners.append(np.full(level.blocks, index))
        made += level.blocks
    return np.concatenate(blocks), np.concatenate(owners)


def _segments(counts: Floats) -> list[tuple[int, int]]:
    slices = len(counts)
    mean = counts.mean()
    steps = np.diff(counts)
    dispersion = max(1.0, float((steps**2).mean() / (2 * mean))) if slices > 1 and mean > 0 else 1.0
    penalty = (3 * log(slices) + 6) * dispersion
    cuts: list[tuple[int, int]] = []

    def cut(first: int, end: int) -> None:
        at = _best_cut(counts[first:end], penalty)
        if at is None:
            cuts.append((first, end))
        else:
            cut(first, first + at)
            cut(first + at, end)

    cut(0, slices)
    return cuts


def _best_cut(counts: Floats, penalty: float) -> int | None:
    """Return the most certain change of the rate.

    None where the rate does not change, or changes too little to matter.
    """
    slices = len(counts)
    left_slices = np.arange(_LEAST_SLICES, slices - _LEAST_SLICES + 1)
    if not len(left_slices):
        return None
    total, left = counts.sum(), np.cumsum(counts)[left_slices - 1]
    right, right_slices = total - left, slices - left_slices
    gain = (
        _likelihood(left, left_slices) + _likelihood(right, right_slices) - _likelihood(np.array([total]), np.array([slices]))[0]
    )
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = (left / left_slices) / (right / right_slices)
    enough = (np.minimum(left, right) >= _LEAST_REQUESTS) & (np.maximum(ratio, 1 / np.maximum(ratio, 1e-12)) >= LEAST_CHANGE)
    gain = np.where(enough, gain, -1.0)
    best = int(np.argmax(gain))
    return int(left_slices[best]) if gain[best] > penalty else None


def _likelihood(events: Floats, slices: NDArray[np.int64]) -> Floats:
    return np.asarray(events * np.log(np.maximum(events, 1e-300) / slices))


def _level(sample: Sample, at: slice, requests: int, seconds: float) -> Level:
    slices = at.stop - at.start
    slice_seconds = seconds / slices
    mine = (sample.slice_of >= at.start) & (sample.slice_of < at.stop)
    within = sample.slice_of[mine] - at.start
    memory_seconds = slice_seconds * max(
        _memory(within, sample.ttft_ns[mine], slices), _memory(within, sample.gap_p99_ns[mine], slices)
    )
    lasting = sample.duration_ns[mine]
    lasting_seconds = float(np.nanquantile(lasting, 0.9)) / 1e9 if len(lasting) else 0.0
    least_seconds = max(MEMORIES * memory_seconds, lasting_seconds)
    allowed = int(seconds / least_seconds) if least_seconds > 0 else MOST_BLOCKS
    blocks = min(max(allowed, FEWEST_BLOCKS), MOST_BLOCKS, slices)
    return Level(at.start, at.stop, requests, seconds, blocks, seconds / blocks, allowed < FEWEST_BLOCKS)


def _memory(within: NDArray[np.int64], values_ns: Floats, slices: int) -> float:
    """Return the integrated autocorrelation time in slices; at least one point.

    The series is the mean logarithm of the values per point. A point is enough slices to hold ``_PER_POINT`` requests.
    The sum of autocorrelations ends with the first pair that is not positive, where noise begins
    (Geyer 1992, initial positive sequence).
    """
    known = values_ns > 0
    points = int(min(slices, known.sum() / _PER_POINT))
    if points < 8:
        return 1.0
    point = within[known] * points // slices
    counts = np.bincount(point, minlength=points)
    logs = np.log(values_ns[known])
    sums = np.bincount(point, weights=logs, minlength=points)
    series = np.where(counts > 0, sums / np.maximum(counts, 1), logs.mean())
    series -= series.mean()
    if np.ptp(logs) == 0:  # constant values have no memory
        return slices / points
    spread = float((series**2).mean())
    spectrum = np.fft.rfft(series, 2 * points)
    correlation = np.fft.irfft(np.abs(spectrum) ** 2)[:points] / (points * spread)
    pairs = correlation[1 : 1 + (points - 1) // 2 * 2].reshape(-1, 2).sum(axis=1)
    ends = np.flatnonzero(pairs <= 0)
    summed = pairs[: ends[0]] if len(ends) else pairs
    return float(max(1.0, 1 + 2 * summed.sum()) * slices / points)
