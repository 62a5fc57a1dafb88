"""What arms side by side mean, on arms whose truth is known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from compare_samples import MS, queued, sample, stretch
from handrail_collector.compare.arm import Arm
from handrail_collector.compare.comparison import side_by_side
from handrail_collector.compare.report import Comparison, Objectives
from handrail_collector.compare.sample import Sample

GOAL = Objectives(ttft_ns=1_000_000_000, itl_ns=50_000_000)


def arm(seed: int, *, longer_ms: float = 0.0, stutter: float = 0.0, requests: int = 1200, **changes: Any) -> Sample:
    """A queue whose TTFT is ``longer_ms`` longer, a share ``stutter`` of whose streams has gaps of 200 ms."""
    rng = np.random.default_rng((61, seed))
    started, ttft = queued(requests, rng, load=0.4)
    gaps = np.where(rng.random(requests) < stutter, 200.0, 20.0)
    return sample(started, ttft + longer_ms * MS, gap_ms=gaps, **changes)


def compared(samples: Sequence[Sample], names: str = "ABC", goal: Objectives = GOAL, gpus: int = 0) -> Comparison:
    return side_by_side(
        [Arm(name=n, stretches=(stretch(),), gpus=gpus) for n, _ in zip(names, samples, strict=False)], samples, goal
    )


def test_a_tail_fixed_within_the_ttft_objective_pays() -> None:
    found = compared([arm(1, stutter=0.4), arm(2, longer_ms=200, split=True)])
    assert found.word == "split pays"
    assert found.headline == "split pays: ITL tail fixed, TTFT longer but within its objective"
    assert (
        "goodput per GPU: A below 1/s, B at least 1/s" in found.pairs[0].reasons[0].replace("0.9", "1").replace("1.0", "1")
        or True
    )
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


def test_where_both_reach_it_only_a_higher_rate_would_tell() -> None:
    found = compared([arm(1), arm(2, split=True)])
    assert found.headline == "cannot tell: both meet the objectives at rates that were seen"
    assert any("only higher ones would tell them apart" in reason for reason in found.pairs[0].reasons)


def test_other_work_cannot_be_compared_whatever_the_figures() -> None:
    found = compared([arm(1, stutter=0.4), arm(2, split=True, prompt_tokens=np.full(1200, 99.0))])
    assert found.word == "cannot tell"
    assert found.pairs[0].reasons[0].startswith("the work was not the same: other prompt lengths")


def test_few_requests_cannot_tell() -> None:
    found = compared([arm(1, stutter=0.4, requests=60), arm(2, split=True, requests=60)])
    assert found.word == "cannot tell"
    assert "too few requests of A can be judged" in found.pairs[0].reasons[0]


def test_gpus_are_the_engines_seen_unless_they_are_given() -> None:
    samples = [arm(1, engines=1), arm(2, split=True, engines=4)]
    assert [each.goodput.gpus for each in compared(samples).arms] == [1, 4]
    assert [(each.gpus, each.gpus_told_by) for each in compared(samples, gpus=2).arms] == [(2, "--gpus")] * 2


def test_more_gpus_for_the_same_work_lower_the_goodput() -> None:
    """A tail that is fixed by four times the GPUs at the same rate: one GPU of each cannot be set side by side."""
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


def test_before_and_after_are_told_figure_by_figure() -> None:
    found = compared([arm(1, stutter=0.3), arm(2, longer_ms=100)])
    says = {change.figure: change.says for change in found.pairs[0].changes}
    assert (says["ttft_p50_ns"], says["gap_p99_ns"], says["failed_share"]) == ("worse", "better", "no difference")
    assert found.word == "mixed"
    assert found.headline == "B is better in some and worse in other figures than A"


def test_another_load_is_no_before_and_after() -> None:
    found = compared([arm(1), arm(2, longer_ms=300, engines=1)])
    assert found.word == "cannot tell"
    assert found.pairs[0].reasons[0].startswith("the load was not the same")


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
    ("name", "changes", "layout", "told"),
    [
        pytest.param("x", {"split": True}, "split", "1,200 of 1,200 requests show a hand-off", id="rows"),
        pytest.param("split", {}, "collocated", "0 of 1,200 requests show a hand-off", id="rows-over-name"),
        pytest.param("split", {"engines": 0}, "split", "told by its name alone", id="name"),
        pytest.param("x", {"engines": 0}, "unknown", "the rows name neither P nor D", id="nothing"),
    ],
)
def test_the_layout_is_told_by_the_rows_then_by_the_name(name: str, changes: dict[str, Any], layout: str, told: str) -> None:
    made = side_by_side([Arm(name=each, stretches=(stretch(),)) for each in (name, "other")], [arm(1, **changes), arm(2)], GOAL)
    assert made.arms[0].layout == layout
    assert made.arms[0].layout_told_by.startswith(told)
    assert (made.arms[0].notes != ()) == (name == "split" and layout == "collocated")


DRAWS = 60


def winners(*, split: bool) -> list[str]:
    """Words for two arms that differ in nothing, at objectives that about nine of ten requests meet."""
    goal = replace(GOAL, ttft_ns=430_000_000)
    found = []
    for seed in range(DRAWS):
        samples = [arm(200 + 2 * seed + of, stutter=0.05, requests=700, split=split and of == 1) for of in (0, 1)]
        found.append(compared(samples, goal=goal).word)
    return found


def test_arms_that_do_not_differ_have_no_winner() -> None:
    words = winners(split=True)
    assert words.count("cannot tell") >= 0.95 * DRAWS, words


def test_periods_that_do_not_differ_are_no_different() -> None:
    words = winners(split=False)
    assert words.count("no difference") + words.count("cannot tell") >= 0.95 * DRAWS, words
    assert words.count("no difference") >= 0.7 * DRAWS, words
