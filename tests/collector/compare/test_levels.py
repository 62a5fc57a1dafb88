"""Where the request rate changes, and how long bootstrap blocks are."""

from __future__ import annotations

import numpy as np
import pytest

from builders.compare_samples import MS, S, queued, sample
from handrail_collector.compare.rate_levels import FEWEST_BLOCKS, MEMORIES, MOST_BLOCKS, block_of_slice, levels_of
from handrail_collector.compare.sample import Floats, Sample


def arriving(started_ns: Floats, ttft_ns: Floats | None = None) -> Sample:
    return sample(started_ns, np.full(len(started_ns), 200 * MS) if ttft_ns is None else ttft_ns)


def poisson(rng: np.random.Generator, *parts: tuple[float, float]) -> Floats:
    """Draw arrivals at each (rate per second) for (seconds), one after the other."""
    begin, times = 0.0, []
    for rate, seconds in parts:
        times.append(begin + np.sort(rng.uniform(0, seconds, rng.poisson(rate * seconds))))
        begin += seconds
    return np.concatenate(times) * S


@pytest.mark.parametrize("seed", range(20))
def test_a_steady_rate_is_one_level(seed: int) -> None:
    (level,) = levels_of(arriving(poisson(np.random.default_rng(seed), (2, 900))))
    assert level.rate == pytest.approx(2, rel=0.1)
    assert (level.first, level.end) == (0, 512)


@pytest.mark.parametrize("seed", range(10))
def test_bursts_are_no_level(seed: int) -> None:
    rng = np.random.default_rng(seed)
    bursts = np.repeat(np.sort(rng.uniform(0, 900, 200)), rng.geometric(1 / 6, 200))
    assert len(levels_of(arriving(np.sort(bursts) * S))) <= 2


@pytest.mark.parametrize("seed", range(10))
def test_rates_one_after_the_other_are_levels(seed: int) -> None:
    levels = levels_of(arriving(poisson(np.random.default_rng(seed), (1, 400), (4, 200), (2, 300))))
    assert [round(level.rate, 0) for level in levels] == [1, 4, 2]
    assert levels[0].seconds == pytest.approx(400, rel=0.05)
    assert [level.first for level in levels[1:]] == [level.end for level in levels[:-1]]


def test_blocks_cover_every_slice_in_order_and_stay_in_their_level() -> None:
    levels = levels_of(arriving(poisson(np.random.default_rng(1), (1, 400), (4, 300))))
    block, owner = block_of_slice(levels)
    assert len(block) == 512
    assert (np.diff(block) >= 0).all()
    assert len(owner) == sum(level.blocks for level in levels) == block.max() + 1
    for index, level in enumerate(levels):
        assert set(owner[block[level.first : level.end]].tolist()) == {index}


def test_a_block_outlasts_the_memory_of_the_queue() -> None:
    rng = np.random.default_rng(3)
    calm, busy = (levels_of(sample(*queued(3000, rng, load=load)))[0] for load in (0.3, 0.85))
    assert calm.blocks == MOST_BLOCKS
    assert FEWEST_BLOCKS <= busy.blocks < MOST_BLOCKS
    assert busy.block_seconds > MEMORIES * calm.block_seconds / 4
    assert not calm.drifts


def test_a_queue_that_only_grows_is_reported_as_drift() -> None:
    started = np.arange(1000).astype(np.float64) * S
    (level,) = levels_of(arriving(started, np.array([S * (1 + 0.6 * at) for at in range(1000)])))
    assert level.drifts
    assert level.blocks == FEWEST_BLOCKS


def test_one_request_is_no_trouble() -> None:
    (level,) = levels_of(arriving(np.array([5.0 * S])))
    assert level.rate == 0
