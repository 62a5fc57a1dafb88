"""Compute the probability that each of several phases' growths is the largest.

A growth is a phase's time beyond its expectation, and that expectation has noise. The phase may also be untouched, with the time
that it would have taken anyway. The prior probability of being touched is the attributable fraction (``period/base_rate.py``).
For independent growths the probability that one is the largest is an integral, computed at a few quantiles.
Pure.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

CANDIDATES: Final = 4
"""Number of growths, the largest by weight, that are compared.

The rest are too small to matter.
"""

_QUANTILES: Final = 15
_SCALE: Final = 0.86  # scale to a normal distribution: both have the same middle three fifths


def _below(value: Floats) -> Floats:
    """Student's cumulative distribution with three degrees of freedom.

    Noise has longer tails than a normal distribution (a prompt shared its step, or not).
    """
    scaled = value / (3**0.5 * _SCALE)
    found: Floats = 0.5 + (scaled / (1 + scaled**2) + np.arctan(scaled)) / np.pi
    return found


_GRID: Final = np.linspace(-20.0, 20.0, 8001, dtype=np.float64)
_POINTS: Final = np.interp((np.arange(_QUANTILES) + 0.5) / _QUANTILES, _below(_GRID), _GRID)  # middles of equally likely parts


def noise_scale(differences: Floats, reach: float = 0.3) -> Floats:
    """Return the noise of growths from their usual differences to the expectation.

    ``differences``: times x anything. Returns anything x 2: by how much a growth may be smaller than it seems, and by how much
    larger.
    Both are standard deviations, from the quantiles ``reach`` above and below the median. Queues are mostly short and sometimes
    very long, so the two differ.
    """
    low, middle, high = np.quantile(differences, (0.5 - reach, 0.5, 0.5 + reach), axis=0)
    found: Floats = np.stack([high - middle, middle - low], axis=-1) / np.interp(0.5 + reach, _below(_GRID), _GRID)
    return found


def probability_of_largest(growth_ns: Floats, noise_ns: Floats, touched: Floats) -> tuple[Ints, Floats, Floats]:
    """Return the phases that may have grown most, and their probabilities.

    Inputs: requests x phases; ``noise_ns`` x 2 (``noise_scale``).
    Returns the phases and each one's probability, requests x candidates, likeliest first; the probabilities sum to 1, or are 0
    where
    nothing grew. The last value is the probability that anything grew at all.
    """
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
