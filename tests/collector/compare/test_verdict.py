"""Verdicts on two arms side by side, on arms whose truth is known."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from builders.compare_samples import MS, queued, sample, stretch
from handrail_collector.compare.comparison import Arm, side_by_side
from handrail_collector.compare.goodput import goodput
from handrail_collector.compare.report import Comparison, Estimate, RateLevel, SloTargets
from handrail_collector.compare.sample import Sample
from handrail_collector.compare.ttft_breakdown import NOTHING_KNOWN
from handrail_collector.compare.verdict import split_against

GOAL = SloTargets(ttft_ns=1_000_000_000, itl_ns=50_000_000)


def arm(seed: int, *, longer_ms: float = 0.0, stutter: float = 0.0, requests: int = 1200, **changes: Any) -> Sample:
    """Return a queue whose TTFT is ``longer_ms`` longer.

    A share ``stutter`` of its streams has gaps of 200 ms.
    """
    rng = np.random.default_rng((61, seed))
    started, ttft = queued(requests, rng, load=0.4)
    gaps = np.where(rng.random(requests) < stutter, 200.0, 20.0)
    return sample(started, ttft + longer_ms * MS, gap_ms=gaps, **changes)


def compared(samples: Sequence[Sample], names: str = "ABC", goal: SloTargets = GOAL, gpus: int = 0) -> Comparison:
    return side_by_side(
        [Arm(name=n, stretches=(stretch(),), gpus=gpus) for n, _ in zip(names, samples, strict=False)], samples, goal
    )


def test_a_tail_fixed_within_the_ttft_objective_pays() -> None:
    found = compared([arm(1, stutter=0.4), arm(2, longer_ms=200, split=True)])
    assert found.word == "split pays"
    assert found.headline == "split pays: ITL tail fixed, TTFT longer but within its objective"
    assert re.match(r"goodput per GPU: A below [\d.]+/s, B at least [\d.]+/s", found.pairs[0].reasons[0])
    plain, split = found.arms
    assert plain.goodput.below is not None
    assert split.goodput.at_least is not None


def test_a_ttft_lost_beyond_its_objective_does_not_pay() -> None:
    found = compared([arm(1, stutter=0.02), arm(2, longer_ms=1500, split=True)])
    assert found.word == "split does not pay"
    assert found.arms[0].goodput.at_least is not None
    assert found.arms[1].goodput.below is not None


def test_where_neither_reaches_the_goal_the_higher_share_wins_at_that_rate() -> None:
    found = compared([arm(1, stutter=0.6), arm(2, longer_ms=1500, split=True)])
    assert found.word == "split does not pay"
    assert any("neither reaches the goal at this rate" in reason for reason in found.pairs[0].reasons)


@pytest.mark.parametrize("stutter", [0.9, 0.6, 0.3, 0.12, 0.1, 0.08, 0.06, 0.04, 0.0])
def test_a_better_baseline_gives_no_weaker_verdict(stutter: float) -> None:
    """The other arm meets no objective.

    The baseline itself reaches the goal, misses it, or may do either.
    """
    found = compared([arm(1, stutter=stutter, requests=700), arm(2, longer_ms=1500, split=True, requests=700)])
    assert found.word == "split does not pay"


def test_a_baseline_that_may_reach_the_goal_beats_one_that_misses_it() -> None:
    """The split arm's interval holds the goal; the baseline's lies far below it.

    This is the previous test with the arms' parts exchanged.
    """
    found = compared([arm(1, stutter=0.6, requests=700), arm(2, stutter=0.1, split=True, requests=700)])
    met = found.arms[1].goodput.levels[0].met
    assert met.low is not None
    assert met.high is not None
    assert met.low < GOAL.attain < met.high
    assert found.word == "split pays"
    assert "B may reach the goal of 90% at this rate, A misses it" in found.pairs[0].reasons


def test_a_worse_arm_that_may_reach_the_goal_too_is_no_loser() -> None:
    found = compared([arm(1, stutter=0.07, requests=700), arm(2, split=True, requests=700)])
    assert found.word == "cannot tell"
    assert found.headline.startswith("cannot tell: A may reach the goal too at ")


def level(rate: float, low: float, high: float) -> RateLevel:
    met = Estimate((low + high) / 2, low, high)
    return RateLevel(rate=rate, requests=500, judged=500, seconds=500 / rate, met=met, met_ttft=met, met_itl=met)


@pytest.mark.parametrize(
    ("plain", "split", "word"),
    [
        pytest.param([(1, 0.88, 0.97), (2, 0.0, 0.01)], [(1, 0.0, 0.02), (2, 0.0, 0.01)], "split does not pay", id="the-lower"),
        pytest.param([(1, 0.88, 0.97), (2, 0.1, 0.2)], [(1, 0.2, 0.3), (2, 0.5, 0.6)], "cannot tell", id="opposed"),
    ],
)
def test_every_rate_that_both_had_is_looked_at(
    plain: list[tuple[float, float, float]], split: list[tuple[float, float, float]], word: str
) -> None:
    made = compared([arm(1), arm(2, split=True)])
    sides = []
    for report, levels in zip(made.arms, (plain, split), strict=True):
        seen = goodput([level(*each) for each in levels], GOAL, gpus=2)
        sides.append(replace(report, goodput=seen, goodput_tpot=seen))
    assert split_against(sides[0], sides[1], made.pairs[0].changes, (), GOAL, NOTHING_KNOWN).word == word


def test_distserves_goodput_stands_beside_the_one_by_gaps() -> None:
    """Streams with long gaps and a short mean.

    By the paper's measure both arms serve that rate. By the gaps only one does.
    """
    stutters = arm(1, stutter=0.4)
    found = compared([replace(stutters, per_token_ns=np.full(1200, 21 * MS)), arm(2, split=True)])
    (pair,) = found.pairs
    assert (pair.word, pair.word_tpot) == ("split pays", "cannot tell")
    assert found.arms[0].goodput.below == found.arms[0].goodput_tpot.at_least
    assert any(reason.startswith("by DistServe's goodput") for reason in pair.reasons)
    by_paper = compared(
        [replace(stutters, per_token_ns=np.full(1200, 21 * MS)), arm(2, split=True)], goal=replace(GOAL, itl_of="mean")
    )
    assert by_paper.word == by_paper.pairs[0].word_tpot == "cannot tell"
    assert by_paper.arms[0].goodput == by_paper.arms[0].goodput_tpot == found.arms[0].goodput_tpot


def test_where_both_reach_it_only_a_higher_rate_would_tell() -> None:
    found = compared([arm(1), arm(2, split=True)])
    assert found.headline == "cannot tell: both meet the objectives at the rates in the data"
    assert any("only higher rates would show a difference" in reason for reason in found.pairs[0].reasons)


def test_other_work_cannot_be_compared_whatever_the_figures() -> None:
    found = compared([arm(1, stutter=0.4), arm(2, split=True, prompt_tokens=np.full(1200, 99.0))])
    assert found.word == "cannot tell"
    assert found.pairs[0].reasons[0].startswith("the work differed: other prompt lengths")


def test_few_requests_cannot_tell() -> None:
    found = compared([arm(1, stutter=0.4, requests=60), arm(2, split=True, requests=60)])
    assert found.word == "cannot tell"
    assert "too few requests of A can be judged" in found.pairs[0].reasons[0]


def test_gpus_are_the_engines_seen_unless_they_are_given() -> None:
    samples = [arm(1, engines=1), arm(2, split=True, engines=4)]
    assert [each.goodput.gpus for each in compared(samples).arms] == [1, 4]
    assert [(each.gpus, each.gpus_source) for each in compared(samples, gpus=2).arms] == [(2, "--gpus")] * 2


def test_more_gpus_for_the_same_work_lower_the_goodput() -> None:
    """The tail is fixed with four times the GPUs at the same rate.

    One GPU of each arm cannot be compared side by side.
    """
    found = compared([arm(1, stutter=0.4, engines=1), arm(2, split=True, engines=4)])
    assert found.word == "cannot tell"


def test_a_split_arm_is_set_against_each_of_the_others() -> None:
    found = compared([arm(1, stutter=0.4), arm(3, stutter=0.01), arm(2, longer_ms=1500, split=True)])
    assert [(pair.of, pair.to) for pair in found.pairs] == [("A", "B"), ("A", "C"), ("B", "C")]
    assert [pair.word for pair in found.pairs] == ["better", "split does not pay", "split does not pay"]
    assert found.word == "split does not pay"


def test_a_split_baseline_still_reads_as_what_splitting_changes() -> None:
    found = compared([arm(2, split=True), arm(1, stutter=0.4)])
    assert [(pair.of, pair.to, pair.word) for pair in found.pairs] == [("B", "A", "split pays")]


def test_before_and_after_are_compared_figure_by_figure() -> None:
    found = compared([arm(1, stutter=0.3), arm(2, longer_ms=100)])
    says = {change.figure: change.says for change in found.pairs[0].changes}
    assert (says["ttft_p50_ns"], says["gap_p99_ns"], says["failed_share"]) == ("worse", "better", "no difference")
    assert found.word == "mixed"
    assert found.headline == "B is better in some and worse in other figures than A"


def test_another_load_is_no_before_and_after() -> None:
    found = compared([arm(1), arm(2, longer_ms=300, engines=1)])
    assert found.word == "cannot tell"
    assert found.pairs[0].reasons[0].startswith("the load differed")


def test_failures_are_a_figure() -> None:
    failed = np.arange(1200) % 10 == 0
    (pair,) = compared([arm(1), arm(2, failed=failed)]).pairs
    assert pair.word == "worse"
    assert pair.changes[-1].says == "worse"
    assert pair.changes[-1].difference.value == pytest.approx(0.1)


def test_gaps_between_tokens_are_not_set_against_gaps_between_chunks() -> None:
    (pair,) = compared([arm(1), arm(2, gap_unit="token")]).pairs
    gaps = [change for change in pair.changes if change.figure.startswith("gap")]
    assert [change.says for change in gaps] == ["cannot tell", "cannot tell"]


@pytest.mark.parametrize(
    ("name", "changes", "layout", "output"),
    [
        pytest.param("x", {"split": True}, "split", "1,200 of 1,200 requests show a hand-off", id="rows"),
        pytest.param("split", {}, "collocated", "0 of 1,200 requests show a hand-off", id="rows-over-name"),
        pytest.param("split", {"engines": 0}, "split", "known only by its name", id="name"),
        pytest.param("x", {"engines": 0}, "unknown", "the rows name neither P nor D", id="nothing"),
    ],
)
def test_layout_comes_from_rows_then_from_name(name: str, changes: dict[str, Any], layout: str, output: str) -> None:
    made = side_by_side([Arm(name=each, stretches=(stretch(),)) for each in (name, "other")], [arm(1, **changes), arm(2)], GOAL)
    assert made.arms[0].layout == layout
    assert made.arms[0].layout_source.startswith(output)
    assert (made.arms[0].notes != ()) == (name == "split" and layout == "collocated")


some_or_many = pytest.mark.parametrize("draws", [20, pytest.param(60, marks=pytest.mark.eval)])


def winners(draws: int, *, split: bool) -> list[str]:
    """Return the verdicts on two arms that do not differ, drawn ``draws`` times.

    The objectives are such that about nine of ten requests meet them.
    """
    goal = replace(GOAL, ttft_ns=430_000_000)
    found = []
    for seed in range(draws):
        samples = [arm(200 + 2 * seed + of, stutter=0.05, requests=700, split=split and of == 1) for of in (0, 1)]
        found.append(compared(samples, goal=goal).word)
    return found


@some_or_many
def test_arms_that_do_not_differ_have_no_winner(draws: int) -> None:
    words = winners(draws, split=True)
    assert words.count("cannot tell") >= 0.95 * draws, words


@some_or_many
def test_periods_that_do_not_differ_are_no_different(draws: int) -> None:
    words = winners(draws, split=False)
    assert words.count("no difference") + words.count("cannot tell") >= 0.95 * draws, words
    assert words.count("no difference") >= 0.7 * draws, words
