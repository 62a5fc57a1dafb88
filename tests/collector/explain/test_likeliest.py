"""The phase with the largest growth, by hand and by random draws.

The draws come from the same distributions.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from handrail_collector.explain.period.largest_excess import CANDIDATES, Floats, noise_scale, probability_of_largest

MS = 1e6


def chances(growths: list[float], noises: list[float], touched: list[float]) -> list[float]:
    """Return the chance of each phase for one request.

    Times are in ms, with the same noise on both sides.
    """
    noise = np.array(noises) * MS
    phases, chance, _ = probability_of_largest(
        np.array([growths]) * MS, np.stack([noise, noise], axis=-1)[None], np.array([touched])
    )
    found = np.zeros(len(growths))
    found[phases[0]] = chance[0]
    return [float(each) for each in found]


CASES: dict[str, tuple[list[float], list[float], list[float], list[float]]] = {
    "far larger": ([300, 50], [10, 10], [1, 1], [1.0, 0.0]),
    "equal": ([100, 100], [10, 10], [1, 1], [0.5, 0.5]),
    "equal, but one may be as ordinary": ([100, 100], [10, 10], [1, 0.5], [0.75, 0.25]),
    "larger but as ordinary": ([300, 50], [1, 1], [0.0, 1], [0.0, 1.0]),
    "nothing grew": ([-5, 0], [1, 1], [1, 1], [0.0, 0.0]),
    "nothing more than ordinary": ([100, 50], [1, 1], [0, 0], [0.0, 0.0]),
    "one alone": ([100, -50, -50], [10, 10, 10], [0.2, 1, 1], [1.0, 0.0, 0.0]),
}


@pytest.mark.parametrize("name", CASES)
def test_chances(name: str) -> None:
    growths, noises, touched, expected = CASES[name]
    assert chances(growths, noises, touched) == pytest.approx(expected, abs=0.02)


def test_a_growth_that_may_be_much_less_is_less_likely_than_one_that_may_be_much_more() -> None:
    growth = np.array([[100.0, 100.0]]) * MS
    less, more = ([[[200.0, 1.0], [1.0, 1.0]]], [[[1.0, 200.0], [1.0, 1.0]]])
    for noise, first in ((less, 1), (more, 0)):
        assert probability_of_largest(growth, np.array(noise) * MS, np.ones((1, 2)))[0][0, 0] == first


def test_noise_is_measured_for_each_side() -> None:
    random = np.random.default_rng(5)
    short_or_long = np.where(random.random(4000) < 0.7, 0.0, random.random(4000) * 100)
    less, more = noise_scale(short_or_long[:, None])[0]
    assert less > 20
    assert more == 0


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.floats(-100, 300), st.floats(10, 100), st.floats(0, 1)), min_size=2, max_size=6))
def test_chances_are_those_of_drawing(phases: list[tuple[float, float, float]]) -> None:
    growths, noises, touched = (list(column) for column in zip(*phases, strict=True))
    found = chances(growths, noises, touched)
    assert sum(found) == pytest.approx(1.0, abs=1e-9) or sum(found) == 0.0
    assert sum(each > 0 for each in found) <= CANDIDATES
    drawn = _drawn(np.array(growths), np.array(noises), np.array(touched))
    if len(growths) <= CANDIDATES and drawn.sum() > 0.2:
        assert found == pytest.approx((drawn / drawn.sum()).tolist(), abs=0.15)


def _drawn(growths: Floats, noises: Floats, touched: Floats) -> Floats:
    """Return how often each phase grows the most in 5,000 draws.

    Only growths above 0 count.
    """
    random = np.random.default_rng(1)
    shape = 5_000, len(growths)
    drawn = np.where(random.random(shape) < touched, growths + 0.86 * noises * random.standard_t(3, shape), 0.0)
    drawn[:, growths <= 0] = np.minimum(drawn[:, growths <= 0], 0.0)  # what did not grow is no candidate
    best = drawn.argmax(axis=1)
    return np.bincount(best[drawn.max(axis=1) > 0], minlength=len(growths)) / len(drawn)
