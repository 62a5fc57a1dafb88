"""Figures and their confidence intervals.

Exact values are compared. On queues with a known truth, the intervals cover it as often as promised.
"""

from __future__ import annotations

from math import ceil, isnan

import numpy as np
import pytest

from builders.compare_samples import queued, sample
from handrail.metrics.exponential_histogram import MAX_BUCKETS
from handrail_collector.compare.bootstrap import Bootstrap, difference, t_quantile
from handrail_collector.compare.rate_levels import block_of_slice, levels_of
from handrail_collector.compare.sample import Floats

SHARES = (0.5, 0.9, 0.99)


def blocks(count: int) -> Bootstrap:
    return Bootstrap(np.zeros(count, np.int64), (1,), draws=500)


def test_quantiles_are_the_nearest_ranks_of_the_values() -> None:
    rng = np.random.default_rng(7)
    values = rng.lognormal(size=4321)
    figures = blocks(20).quantiles(values, rng.integers(0, 20, 4321), SHARES)
    assert [figure.value for figure in figures] == [np.sort(values)[ceil(share * 4321) - 1] for share in SHARES]


def test_the_interval_holds_the_value_and_widens_with_confidence() -> None:
    rng = np.random.default_rng(8)
    for figure in blocks(20).quantiles(rng.lognormal(size=3000), rng.integers(0, 20, 3000), (0.5, 0.9)):
        low, high = figure.interval(0.95)
        wider = figure.interval(0.99)
        assert wider[0] <= low < figure.value < high <= wider[1]


def test_the_same_rows_give_the_same_intervals_and_other_seeds_others() -> None:
    rng = np.random.default_rng(9)
    values, block = rng.lognormal(size=2000), rng.integers(0, 20, 2000)
    one, same, other = (
        Bootstrap(np.zeros(20, np.int64), seed, draws=500).quantiles(values, block, (0.5,))[0].interval()
        for seed in ((1, 2), (1, 2), (1, 3))
    )
    assert one == same != other


def test_equal_values_have_an_interval_of_no_width() -> None:
    figures = blocks(10).quantiles(np.full(500, 7.0), np.arange(500) % 10, SHARES)
    assert [figure.interval() for figure in figures] == [(7.0, 7.0)] * 3


def test_a_tail_of_few_waves_has_no_interval() -> None:
    values, block = np.arange(3000).astype(np.float64), np.arange(3000) * 20 // 3000  # everything slow is in the last block
    middle, _, tail = blocks(20).quantiles(values, block, SHARES)
    assert not isnan(middle.interval()[0])
    assert isnan(tail.interval()[0])
    assert tail.value == 2969


def test_nothing_gives_nothing() -> None:
    figure = blocks(10).quantiles(np.zeros(0), np.zeros(0, np.int64), (0.5,))[0]
    counted = blocks(10).counted_quantiles(np.zeros((10, MAX_BUCKETS), np.int64), np.zeros(MAX_BUCKETS), (0.5,))[0]
    assert isnan(figure.value)
    assert isnan(counted.value)
    assert isnan(counted.interval()[1])


def test_counted_values_give_the_quantiles_of_their_buckets() -> None:
    rng = np.random.default_rng(10)
    values, block = rng.integers(0, 50, 5000), rng.integers(0, 20, 5000)
    counts = np.zeros((20, 50), np.int64)
    np.add.at(counts, (block, values), 1)
    one = blocks(20).counted_quantiles(counts, np.arange(50).astype(np.float64), SHARES)
    other = blocks(20).quantiles(values.astype(np.float64), block, SHARES)
    assert [figure.value for figure in one] == [figure.value for figure in other]
    assert [figure.interval() for figure in one] == [figure.interval() for figure in other]


def test_a_ratio_is_that_of_the_sums() -> None:
    figure = blocks(4).ratio(np.array([1.0, 2, 3, 4]), np.array([10.0, 10, 10, 10]))
    assert figure.value == 0.25
    assert figure.interval()[0] < 0.25 < figure.interval()[1]
    assert isnan(blocks(4).ratio(np.zeros(4), np.zeros(4)).value)


@pytest.mark.parametrize(("df", "t"), [(9, 2.262), (20, 2.086), (63, 1.998)])
def test_t_is_the_tables(df: int, t: float) -> None:
    assert t_quantile(0.975, df) == pytest.approx(t, rel=0.003)


def intervals(load: float, requests: int, seed: int) -> list[tuple[float, float]]:
    started, ttft = queued(requests, np.random.default_rng((31, seed)), load=load)
    arm = sample(started, ttft)
    of_slice, owner = block_of_slice(levels_of(arm))
    bootstrap, block = Bootstrap(owner, (seed,), draws=600), of_slice[arm.slice_of]
    count = np.bincount(block, minlength=bootstrap.blocks).astype(np.float64)
    mean = bootstrap.ratio(np.bincount(block, weights=ttft, minlength=bootstrap.blocks).astype(np.float64), count)
    return [figure.interval() for figure in (*bootstrap.quantiles(ttft, block, SHARES), mean)]


def truth(load: float) -> list[float]:
    runs: list[Floats] = [queued(200_000, np.random.default_rng((77, seed)), load=load)[1] for seed in range(12)]
    ttft = np.concatenate(runs)
    return [*(float(np.quantile(ttft, share)) for share in SHARES), float(ttft.mean())]


@pytest.mark.parametrize("load", [0.5, 0.7])
def test_intervals_hold_the_truth_about_as_often_as_they_say(load: float) -> None:
    """Neighbouring requests in a queue wait for each other.

    Intervals that assume independent requests cover the truth far less often (next test).
    """
    expected, draws = truth(load), 120
    given, held = np.zeros(4), np.zeros(4)
    for seed in range(draws):
        for at, (low, high) in enumerate(intervals(load, 4000, seed)):
            given[at] += not isnan(low)
            held[at] += low <= expected[at] <= high
    wrong = (given - held) / draws
    assert given[[0, 1, 3]].tolist() == [draws] * 3
    assert wrong.max() <= 0.13, wrong
    assert 0.01 <= wrong[0] <= 0.1, wrong


def test_blocks_are_what_makes_them_hold() -> None:
    expected, held = truth(0.7), 0
    for seed in range(120):
        _, ttft = queued(4000, np.random.default_rng((31, seed)), load=0.7)
        half = 1.96 * ttft.std() / np.sqrt(len(ttft))  # as if requests were independent
        held += ttft.mean() - half <= expected[3] <= ttft.mean() + half
    assert held / 120 < 0.7


def test_a_difference_holds_nothing_where_there_is_none() -> None:
    held = 0
    for seed in range(120):
        figures = []
        for arm in (0, 1):
            started, ttft = queued(1500, np.random.default_rng((41, seed, arm)), load=0.5)
            made = sample(started, ttft)
            of_slice, owner = block_of_slice(levels_of(made))
            figures += Bootstrap(owner, (seed, arm), draws=600).quantiles(ttft, of_slice[made.slice_of], (0.5,))
        low, high = difference(*figures).interval()
        held += low <= 0 <= high
    assert held / 120 >= 0.9
