"""How likely each of several growths is the largest, where each is known but for noise and may be no growth at all. Pure.

A growth is what a phase took beyond what it is expected to have taken otherwise, and that expectation has noise; or the phase was
not touched at all, and took what it would have taken anyway. The chance of being touched is the attributable fraction
(``period/base_rate.py``). Of independent growths the chance that one is the largest is an integral, taken at a few quantiles.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

CANDIDATES: Final = 4
"""The largest growths, weighed, that are compared; the rest are too small to matter."""

_QUANTILES: Final = 15
_SCALE: Final = 0.86  # of a normal distribution's deviation, so that both have their middle three fifths alike


def _below(value: Floats) -> Floats:
    """Student's distribution of three degrees: noise has longer tails than a normal one (a prompt shared its step, or not)."""
    scaled = value / (3**0.5 * _SCALE)
    found: Floats = 0.5 + (scaled / (1 + scaled**2) + np.arctan(scaled)) / np.pi
    return found


_GRID: Final = np.linspace(-20.0, 20.0, 8001, dtype=np.float64)
_POINTS: Final = np.interp((np.arange(_QUANTILES) + 0.5) / _QUANTILES, _below(_GRID), _GRID)  # middles of parts equally likely


def noise_scale(differences: Floats, reach: float = 0.3) -> Floats:
    """The noise of growths (times x anything) whose expectation times ordinarily differ from by these: anything x 2.

    By how much a growth may be less than it seems, and by how much more: as deviations, told by the quantiles ``reach`` above and
    below the middle. Queues are short as a rule and now and then very long, so the two are not alike.
    """
    low, middle, high = np.quantile(differences, (0.5 - reach, 0.5, 0.5 + reach), axis=0)
    found: Floats = np.stack([high - middle, middle - low], axis=-1) / np.interp(0.5 + reach, _below(_GRID), _GRID)
    return found


def probability_of_largest(growth_ns: Floats, noise_ns: Floats, touched: Floats) -> tuple[Ints, Floats, Floats]:
    """Requests x phases, ``noise_ns`` x 2 (``noise_scale``). The phases that may be the largest and each one's chance, requests x
    candidates, likeliest first: they sum to 1, or are 0 where nothing grew. Last the chance that anything grew at all."""
    phases = np.argsort(-np.maximum(growth_ns, 0.0) * touched, axis=1, kind="stable")[:, :CANDIDATES]
    growth, touch = (np.take_along_axis(values, phases, axis=1) for values in (growth_ns, touched))
    noise = np.take_along_axis(noise_ns, phases[:, :, None], axis=1)
    chance = np.zeros(phases.shape)
    for one in range(phases.shape[1]):
        reached = growth[:, [one]] + np.where(_POINTS < 0, noise[:, one, :1], noise[:, one, 1:]) * _POINTS
        beaten = (reached > 0).astype(np.float64)
        for other in range(phases.shape[1]):
            if other != one:
                beyond = reached - growth[:, [other]]
                below = _below(beyond / np.where(beyond < 0, noise[:, other, :1], noise[:, other, 1:]))
                beaten *= 1 - touch[:, [other]] + touch[:, [other]] * below
        chance[:, one] = np.where(growth[:, one] > 0, touch[:, one] * beaten.mean(axis=1), 0.0)
    whole = chance.sum(axis=1, keepdims=True)
    chance = np.divide(chance, whole, out=np.zeros_like(chance), where=whole > 0)
    order = np.argsort(-chance, axis=1, kind="stable")
    return np.take_along_axis(phases, order, axis=1), np.take_along_axis(chance, order, axis=1), whole[:, 0]
