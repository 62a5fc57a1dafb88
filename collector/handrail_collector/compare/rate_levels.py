"""Stretches of steady request rate, and the blocks of time that the bootstrap draws.

A goodput is a property of a rate that is held for a while, so an arm whose rate changes is cut where it changes: binary
segmentation by the Poisson likelihood of arrivals per slice, with the likelihood divided by the dispersion that the arrivals
show from one slice to the next, so that bursts alone are no change of rate.

Neighbours share queues and batches: requests within a block of time depend on each other, blocks hardly do when they are
several times as long as that memory. A block is at least ``MEMORIES`` times as long as the integrated autocorrelation time of
the TTFT and of the streams' p99 gap, and at least as long as nine of ten requests take; of what that allows, ``MOST_BLOCKS``
are made, at least ``FEWEST_BLOCKS``.
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
"""A rate that is less than this many times another is the same level."""

_LEAST_SLICES: Final = 16  # of a level
_LEAST_REQUESTS: Final = 50  # of a level
_PER_POINT: Final = 4.0  # requests in a point of the series whose autocorrelation is taken


@dataclass(frozen=True, slots=True)
class Level:
    """Slices [first, end) with one rate, and how they are cut into blocks; ``drifts``: the memory is as long as the level."""

    first: int
    end: int
    requests: int
    seconds: float
    blocks: int
    block_seconds: float
    drifts: bool

    @property
    def rate(self) -> float:
        """Requests a second: the first slice of a run begins with an arrival, which counts for none."""
        return max(0, self.requests - 1) / self.seconds if self.seconds > 0 else 0.0


def levels_of(sample: Sample) -> tuple[Level, ...]:
    """The levels of every stretch, in order. They cover all slices."""
    arrivals = sample.arrivals
    found = []
    for span in sample.spans:
        for first, end in _segments(arrivals[span.first : span.first + span.count].astype(np.float64)):
            at = slice(span.first + first, span.first + end)
            found.append(_level(sample, at, int(arrivals[at].sum()), (end - first) * span.slice_ns / 1e9))
    return tuple(found)


def block_of_slice(levels: tuple[Level, ...]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The block of each slice, and the level of each block."""
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
    """Where the rate changes most surely; None where it does not, or by too little to matter."""
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
    """Integrated autocorrelation time, in slices, of the logarithm's mean per point; at least one point.

    Points are so many slices together that they hold ``_PER_POINT`` requests. The sum of autocorrelations ends with the first
    pair that is not positive (Geyer 1992, initial positive sequence), where noise begins.
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
    if np.ptp(logs) == 0:  # nothing varies, so nothing lasts
        return slices / points
    spread = float((series**2).mean())
    spectrum = np.fft.rfft(series, 2 * points)
    correlation = np.fft.irfft(np.abs(spectrum) ** 2)[:points] / (points * spread)
    pairs = correlation[1 : 1 + (points - 1) // 2 * 2].reshape(-1, 2).sum(axis=1)
    ends = np.flatnonzero(pairs <= 0)
    summed = pairs[: ends[0]] if len(ends) else pairs
    return float(max(1.0, 1 + 2 * summed.sum()) * slices / points)
