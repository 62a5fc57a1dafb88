"""Compute the attributable fraction of a phase's growth, by place and time.

It compares how often a phase grows by so much there and then with how often it does so anyway.
A period is cut into blocks of time; a cell is a place in a block. The ordinary rate of growths of a size is the mean over the
quieter part of all cells. So a fault that fills fewer cells than the louder part does not count as ordinary, although nothing
names the faulty cells.
In a cell with the rate ``r``, the share ``1 - ordinary / r`` of growths is more than ordinary (epidemiology's attributable
fraction among the exposed).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

LEVELS_NS: Final = 5e6 * 2.0 ** np.arange(12)
"""Sizes of growths that are counted: 5 ms to 10 s, each twice the one before."""

BURST_LEVEL: Final = 3  # 40 ms: larger ones are too rare in a cell to tell a burst from a fault
_QUIET: Final = 0.6  # share of cells, the quietest, whose mean rate is the ordinary one
_CELL: Final = 160  # requests a cell should hold
_BLOCKS: Final = (6, 60)
_PRIOR: Final = 4  # requests at the ordinary rate that are added to every cell
_TIMES: Final = 3.0
_HITS, _SIGMAS = 5, 6.0
_HITS_OF_LARGE, _SIGMAS_OF_LARGE = 10, 9.0  # above ``BURST_LEVEL`` growths come in clusters: a long queue delays all in it
_SIGMAS_20_TO_80: Final = 1.683  # of a normal distribution


@dataclass(frozen=True, slots=True)
class PhaseExcess:
    """Growths and the place of each: both requests x phases.

    ``places`` holds indices into ``names``.
    """

    growth_ns: Floats
    places: Ints
    names: Sequence[str]
    started_unix_ns: Ints


@dataclass(frozen=True, slots=True)
class BaseRates:
    """Rates of growths of at least each of ``LEVELS_NS``, per cell and ordinary.

    Cells: places x blocks x phases x levels.
    """

    names: dict[str, int]
    ends_unix_ns: Ints  # of the blocks but the last
    counts: Floats  # requests: places x blocks x phases
    hits: Floats  # of those, growths: x levels
    ordinary: Floats  # phases x levels
    spread: Floats  # phases x levels: standard deviation of the quiet cells' rates
    noise_ns: Floats  # per phase: ordinary standard deviation of its growths

    @classmethod
    def fit(cls, located: PhaseExcess, ends: Ints) -> BaseRates:
        """Learn the rates from requests, in any order of time.

        ``ends`` are the times from ``block_ends``.
        """
        phases, blocks = located.growth_ns.shape[1], len(ends) + 1
        block = np.searchsorted(ends, located.started_unix_ns, side="right")
        shape = len(located.names), blocks, phases
        counts, hits = np.zeros(shape), np.zeros((*shape, len(LEVELS_NS)))
        level = growth_level(located.growth_ns)
        for phase in range(phases):
            cell = located.places[:, phase] * blocks + block
            counts[:, :, phase] = np.bincount(cell, minlength=shape[0] * blocks).reshape(shape[:2])
            for size in range(level[:, phase].max() + 1):
                found = np.bincount(cell[level[:, phase] >= size], minlength=shape[0] * blocks)
                hits[:, :, phase, size] = found.reshape(shape[:2])
        quiet = [_quiet(counts[:, :, phase].ravel(), hits[:, :, phase].reshape(-1, len(LEVELS_NS))) for phase in range(phases)]
        names = {name: index for index, name in enumerate(located.names)}
        within = [np.quantile(located.growth_ns[block == one], (0.2, 0.8), axis=0) for one in np.unique(block)]
        noise = np.median([(high - low) / _SIGMAS_20_TO_80 for low, high in within], axis=0)
        means, spreads = np.array([mean for mean, _ in quiet]), np.array([spread for _, spread in quiet])
        return cls(names, ends, counts, hits, means, spreads, noise)

    def attributable_fraction(self, located: PhaseExcess) -> tuple[Floats, Bools]:
        """Return each growth's share beyond the ordinary, and whether it stands out.

        Both are requests x phases, for the growth's place and time.
        A growth that stands out is more than one burst. The cell's rate of growths of ``BURST_LEVEL``, or of a larger size that
        this growth reaches, is ``_TIMES`` the ordinary one and many times the quiet cells' spread above it.
        """
        level = growth_level(located.growth_ns)
        phase = np.broadcast_to(np.arange(level.shape[1]), level.shape)
        counts, hits = self._at(located, phase, np.maximum(level, 0))
        usual = self.ordinary[phase, np.maximum(level, 0)]
        rate = (hits + _PRIOR * usual) / (counts + _PRIOR)
        with np.errstate(invalid="ignore", divide="ignore"):
            share = np.where(rate > 0, 1 - usual / rate, 1.0)
        share = np.where(level < 0, 0.0, np.clip(share, 0.0, 1.0))
        standing = self._standing(located, phase, np.clip(level, 0, BURST_LEVEL), _HITS, _SIGMAS)
        for size in range(BURST_LEVEL + 1, len(LEVELS_NS)):
            answer = np.minimum(np.maximum(level, BURST_LEVEL), size)  # repeats the last level where the growth is smaller
            standing |= (answer > BURST_LEVEL) & self._standing(located, phase, answer, _HITS_OF_LARGE, _SIGMAS_OF_LARGE)
        return share, standing & (level >= 0)

    def _standing(self, located: PhaseExcess, phase: Ints, level: Ints, least_hits: int, sigmas: float) -> Bools:
        """Whether growths of ``level`` are frequent enough in the cell of each.

        ``level``: requests x phases.
        """
        counts, hits = self._at(located, phase, level)
        usual, spread = self.ordinary[phase, level], self.spread[phase, level]
        chance = np.sqrt(np.maximum(usual, 1e-3) / np.maximum(counts, 1))
        rate = hits / np.maximum(counts, 1)
        standing: Bools = (hits >= least_hits) & (rate >= _TIMES * usual) & (rate >= usual + sigmas * np.maximum(spread, chance))
        return standing

    def cells(self, names: NDArray[Any], started_unix_ns: Ints, phase: int, level: Ints) -> tuple[Floats, Floats]:
        """Return requests, and growths of one phase that reach ``level``, per cell.

        The cells are those of these places and times.
        """
        every, codes = np.unique(names.astype(str), return_inverse=True)
        return self._look([str(name) for name in every], codes, started_unix_ns, np.int64(phase), level)

    def _at(self, located: PhaseExcess, phase: Ints, level: Ints) -> tuple[Floats, Floats]:
        return self._look(located.names, located.places, located.started_unix_ns[:, None], phase, level)

    def _look(
        self, names: Sequence[str], codes: Ints, started_unix_ns: Ints, phase: Ints | np.int64, level: Ints
    ) -> tuple[Floats, Floats]:
        places = np.array([self.names.get(name, -1) for name in names], np.int64)[codes]
        block = np.searchsorted(self.ends_unix_ns, started_unix_ns, side="right")
        known = places >= 0  # nothing is known of a place that was absent when the rates were learned
        counts = np.where(known, self.counts[places, block, phase], 0.0)
        return counts, np.where(known, self.hits[places, block, phase, level], 0.0)


def block_ends(located: PhaseExcess) -> Ints:
    """Return the start of each block but the first.

    Blocks hold equally many requests, so that a cell holds about ``_CELL``.
    """
    requests = len(located.started_unix_ns)
    places = max(np.count_nonzero(np.bincount(column)) for column in located.places.T)
    blocks = int(np.clip(requests // (_CELL * places), *_BLOCKS))
    return np.sort(located.started_unix_ns)[[requests * block // blocks for block in range(1, blocks)]]


def growth_level(growth_ns: Floats) -> Ints:
    """Return the index of the largest level that each growth reaches; -1: none.

    The levels are ``LEVELS_NS``.
    """
    return np.searchsorted(LEVELS_NS, growth_ns, side="right") - 1


def _quiet(counts: Floats, hits: Floats) -> tuple[Floats, Floats]:
    """Return mean and spread, per level, of the rates of the quieter cells.

    0 where there are no cells.
    """
    rates = np.sort(hits[counts > 0] / counts[counts > 0, None], axis=0)
    if not len(rates):
        return np.zeros(hits.shape[1]), np.zeros(hits.shape[1])
    quiet = rates[: max(1, int(len(rates) * _QUIET))]
    return quiet.mean(axis=0), quiet.std(axis=0)
