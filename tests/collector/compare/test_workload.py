"""Whether two arms got the same workload."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from builders.compare_samples import queued, sample
from handrail_collector.compare.sample import Sample
from handrail_collector.compare.workload import cached_share, distance, unknown, unlike


def arm(seed: int, **changes: Any) -> Sample:
    rng = np.random.default_rng(seed)
    lengths = {"prompt_tokens": rng.lognormal(7, 1, 600), "output_tokens": rng.lognormal(5, 1, 600)}
    return sample(*queued(600, rng), **(lengths | changes))


@pytest.mark.parametrize("seed", range(30))
def test_draws_of_one_workload_are_alike(seed: int) -> None:
    assert unlike(arm(seed), arm(1000 + seed)) == ()


@pytest.mark.parametrize(
    ("changes", "reported_output"),
    [
        pytest.param({"prompt_tokens": np.full(600, 8000.0)}, "other prompt lengths", id="prompts"),
        pytest.param({"output_tokens": np.full(600, 20.0)}, "other answer lengths", id="answers"),
        pytest.param({"models": {"other": 600}}, "other models: m and other", id="models"),
        pytest.param({"cached_tokens": np.full(600, 0.0)}, "prefix cache: ", id="caches"),
    ],
)
def test_different_workload_is_reported(changes: dict[str, Any], reported_output: str) -> None:
    one, other = arm(1), arm(2, **changes)
    one = replace(one, cached_tokens=one.prompt_tokens / 2)
    other = replace(other, cached_tokens=other.prompt_tokens / 2 if "cached_tokens" not in changes else other.cached_tokens)
    (why,) = unlike(one, other)
    assert reported_output in why


def test_answers_that_failed_do_not_count_as_shorter_work() -> None:
    failed = np.arange(600) < 300
    output = np.where(failed, 1.0, arm(2).output_tokens)
    assert unlike(arm(1), arm(2, failed=failed, output_tokens=output)) == ()


def test_unknown_facts_are_reported_and_not_compared() -> None:
    blind = arm(1, prompt_tokens=np.full(600, np.nan))
    assert unlike(blind, arm(2, prompt_tokens=np.full(600, 8000.0))) == ()
    assert unknown(blind) == ("the prompt lengths of most requests are unknown",)
    assert cached_share(blind) is None


def test_the_distance_of_distributions() -> None:
    assert distance(np.array([1.0, 2, 3]), np.array([1.0, 2, 3])) == 0
    assert distance(np.array([1.0, 2]), np.array([3.0, 4])) == 1
    assert distance(np.array([1.0, 2, 3, 4]), np.array([3.0, 4])) == 0.5
