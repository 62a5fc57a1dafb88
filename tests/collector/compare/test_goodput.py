"""Which requests met the objectives, and the bounds of that share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from builders.compare_samples import MS, sample
from handrail_collector.compare.bootstrap import Bootstrap
from handrail_collector.compare.goodput import goodput, judge, share
from handrail_collector.compare.report import Estimate, RateLevel, SloTargets

GOAL = SloTargets(ttft_ns=500_000_000, itl_ns=50_000_000, attain=0.9)
NAN = float("nan")


@pytest.mark.parametrize(
    ("request_", "judged", "ttft", "gaps"),
    [
        pytest.param({"ttft_ns": 400 * MS, "gap_p99_ns": 40 * MS}, True, True, True, id="meets-both"),
        pytest.param({"ttft_ns": 500 * MS, "gap_p99_ns": 50 * MS}, True, True, True, id="at-the-objectives"),
        pytest.param({"ttft_ns": 501 * MS, "gap_p99_ns": 40 * MS}, True, False, True, id="late"),
        pytest.param({"ttft_ns": 400 * MS, "gap_p99_ns": 51 * MS}, True, True, False, id="stutters"),
        pytest.param({"ttft_ns": 400 * MS, "gap_p99_ns": NAN}, True, True, True, id="one-chunk"),
        pytest.param({"ttft_ns": 400 * MS, "failed": True}, True, False, False, id="failed-later"),
        pytest.param({"ttft_ns": NAN, "failed": True}, True, False, False, id="failed-before-a-token"),
        pytest.param({"ttft_ns": NAN, "refused": True}, False, False, False, id="the-request-was-wrong"),
        pytest.param({"ttft_ns": NAN, "streamed": False}, False, False, False, id="not-streamed"),
        pytest.param({"ttft_ns": NAN, "left": True, "duration_ns": 499 * MS}, False, False, False, id="left-early"),
        pytest.param({"ttft_ns": NAN, "left": True, "duration_ns": 501 * MS}, True, False, False, id="left-waiting"),
        pytest.param({"ttft_ns": 400 * MS, "left": True}, True, True, True, id="left-while-streaming"),
    ],
)
def test_a_request_is_judged(request_: dict[str, Any], judged: bool, ttft: bool, gaps: bool) -> None:
    two: Any = {name: np.array([value, value]) for name, value in request_.items()}
    found = judge(replace(sample(np.array([0.0, 1e9]), np.array([MS, MS])), **two), GOAL)
    assert (found.judged[0], found.ttft[0], found.gaps[0]) == (judged, ttft, gaps)
    assert found.both[0] == (ttft and gaps)


@pytest.mark.parametrize(("of", "met"), [("p99", False), ("max", False), ("mean", True)])
def test_the_gap_objective_judges_the_configured_figure(of: str, met: bool) -> None:
    two = np.array([0.0, 1e9])
    stutters = sample(
        two, two * 0 + 100 * MS, gap_p99_ns=two * 0 + 60 * MS, gap_max_ns=two * 0 + 90 * MS, per_token_ns=two * 0 + 21 * MS
    )
    assert judge(stutters, SloTargets(itl_of=of)).gaps.tolist() == [met, met]


def test_a_share_of_all_is_bounded_below_one() -> None:
    """The interval of a share of 1 is Wilson's.

    Resampled draws of requests that all met it say nothing about those that might not.
    """
    block = np.arange(200) % 20
    everyone = np.ones(200, bool)
    found = share(everyone, everyone, block, Bootstrap(np.zeros(20, np.int64), (1,)))
    assert found.value == found.high == 1
    assert found.low == pytest.approx(1 - 3.84 / 203.84, abs=0.001)
    assert share(everyone, ~everyone, block, Bootstrap(np.zeros(20, np.int64), (1,))) == Estimate(None, None, None)


def test_requests_that_fail_in_waves_widen_the_share() -> None:
    met = np.ones(2000, bool)
    met[:200] = False
    spread = np.arange(2000) % 20  # each block has a tenth of the misses
    waves = np.arange(2000) // 100  # two blocks have all the misses
    even, uneven = (share(met, np.ones(2000, bool), block, Bootstrap(np.zeros(20, np.int64), (1,))) for block in (spread, waves))
    assert even.value == uneven.value == 0.9
    assert even.low is not None
    assert uneven.low is not None
    assert 0.9 - uneven.low > 3 * (0.9 - even.low)


def level(rate: float, met: float, low: float, high: float, judged: int = 1000) -> RateLevel:
    both = Estimate(met, low, high)
    return RateLevel(rate=rate, requests=judged, judged=judged, seconds=judged / rate, met=both, met_ttft=both, met_itl=both)


def test_one_rate_bounds_the_goodput_from_one_side() -> None:
    reached = goodput([level(2, 0.95, 0.92, 0.97)], GOAL, gpus=2)
    assert (reached.at_least, reached.below, reached.estimate) == (2, None, None)
    missed = goodput([level(2, 0.5, 0.4, 0.6)], GOAL, gpus=2)
    assert (missed.at_least, missed.below, missed.estimate) == (None, 2, None)
    unsure = goodput([level(2, 0.9, 0.85, 0.93)], GOAL, gpus=2)
    assert (unsure.at_least, unsure.below) == (None, None)


def test_several_rates_enclose_it_and_give_a_value() -> None:
    found = goodput([level(1, 0.99, 0.98, 1), level(2, 0.95, 0.93, 0.97), level(4, 0.75, 0.7, 0.8)], GOAL, gpus=1)
    assert (found.at_least, found.below) == (2, 4)
    assert found.estimate == pytest.approx(2.5)
    assert not found.contradicts


def test_shares_that_rise_with_the_rate_by_chance_are_pooled() -> None:
    found = goodput([level(1, 0.91, 0.88, 0.94), level(2, 0.97, 0.95, 0.98), level(4, 0.5, 0.45, 0.55)], GOAL, gpus=1)
    assert found.estimate == pytest.approx(2 + 2 * (0.94 - 0.9) / (0.94 - 0.5))


def test_a_lower_rate_that_missed_a_goal_which_a_higher_one_met_is_reported() -> None:
    found = goodput([level(1, 0.5, 0.45, 0.55), level(2, 0.97, 0.95, 0.98)], GOAL, gpus=1)
    assert found.contradicts
    assert found.estimate is None
    assert (found.at_least, found.below) == (2, None)


def test_objectives_are_checked() -> None:
    assert SloTargets().validate() == []
    problems = SloTargets(ttft_ns=0, itl_ns=-1, itl_of="p98", attain=1.0).validate()
    assert [problem.partition(":")[0] for problem in problems] == ["ttft", "itl", "itl_of", "attain"]
