"""The limit of descriptors and how many are free."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys

import pytest

from handrail.runtime.descriptors import (
    MOST_DESCRIPTORS,
    DescriptorBudget,
    DescriptorLimit,
    open_descriptors,
    raise_limit,
    wanted_limit,
)

INFINITE = resource.RLIM_INFINITY


class Clock:
    """A clock in seconds that moves only when a test moves it."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("soft", "hard", "wanted"),
    [
        pytest.param(1024, 4096, 4096, id="raised to the hard limit"),
        pytest.param(1024, 1024, 1024, id="no room"),
        pytest.param(1024, INFINITE, MOST_DESCRIPTORS, id="no hard limit"),
        pytest.param(1024, 1 << 30, MOST_DESCRIPTORS, id="a huge hard limit"),
        pytest.param(1 << 30, 1 << 30, 1 << 30, id="never lowered"),
        pytest.param(INFINITE, INFINITE, INFINITE, id="no limit at all"),
    ],
)
def test_soft_limit_goes_to_the_hard_one(soft: int, hard: int, wanted: int) -> None:
    assert wanted_limit(soft, hard) == wanted


def in_process(code: str) -> str:
    """Return what a process of its own prints: limits apply to a whole process."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_process_has_the_raised_limit() -> None:
    output = in_process(
        "import json, resource\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, 200))\n"
        "from handrail.runtime.descriptors import raise_limit\n"
        "limit = raise_limit()\n"
        "print(json.dumps([limit.before, limit.soft, limit.hard, *resource.getrlimit(resource.RLIMIT_NOFILE), str(limit)]))"
    )
    assert json.loads(output) == [64, 200, 200, 200, 200, "descriptors 200 (raised from 64)"]


def test_refused_raise_leaves_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_kind: int, _limits: tuple[int, int]) -> None:
        raise ValueError("not allowed to raise maximum limit")

    monkeypatch.setattr(resource, "getrlimit", lambda _kind: (1024, INFINITE))
    monkeypatch.setattr(resource, "setrlimit", refuse)
    assert raise_limit() == DescriptorLimit(before=1024, soft=1024, hard=MOST_DESCRIPTORS)


def test_limit_that_stays_says_the_hard_one() -> None:
    assert str(DescriptorLimit(1024, 1024, 1024)) == "descriptors 1024 (unchanged; hard limit 1024)"


def test_open_descriptors_are_counted() -> None:
    before = open_descriptors()
    assert before is not None
    opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(7)]
    try:
        assert open_descriptors() == before + 7
    finally:
        for each in opened:
            os.close(each)


def test_counting_works_without_one_descriptor_left() -> None:
    """Newer kernels report the count even then.

    On older ones nothing can be read, and the budget counts as full.
    """
    output = in_process(
        "import os, resource\n"
        "from handrail.runtime.descriptors import DescriptorBudget\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))\n"
        "held = []\n"
        "try:\n"
        "    while True: held.append(os.open(os.devnull, os.O_RDONLY))\n"
        "except OSError: pass\n"
        "budget = DescriptorBudget(40, 10)\n"
        "print(budget.in_use(), budget.free(), budget.crowded)"
    )
    assert output.split() == ["40", "0", "True"]


def test_free_is_what_limit_reserve_and_use_leave() -> None:
    clock, used = Clock(), [50]
    budget = DescriptorBudget(200, 60, clock=clock, count=lambda: used[0])
    assert (budget.in_use(), budget.free()) == (50, 90)
    used[0] = 150
    assert budget.free() == 90  # not counted again yet
    clock.now += 0.25
    assert (budget.in_use(), budget.free()) == (150, 0)


@pytest.mark.parametrize(
    ("in_use", "reserved", "crowded"),
    [
        pytest.param(899, 100, False, id="room"),
        pytest.param(900, 50, True, id="nine tenths of the limit"),
        pytest.param(800, 200, True, id="no connection fits beside the reserve"),
    ],
)
def test_crowded(in_use: int, reserved: int, crowded: bool) -> None:
    budget = DescriptorBudget(1000, reserved, count=lambda: in_use)
    assert budget.crowded is crowded
    assert bool(budget.problem()) is crowded


def test_taken_since_the_count_is_added() -> None:
    clock, used = Clock(), [50]
    budget = DescriptorBudget(200, 60, clock=clock, count=lambda: used[0])
    assert budget.free() == 90
    budget.take(80)
    budget.take()
    budget.give_back()
    assert (budget.in_use(), budget.free()) == (130, 10)
    used[0] = 130  # the next count includes them
    clock.now += 1.0
    assert (budget.in_use(), budget.free()) == (130, 10)
    budget.give_back(80)
    assert budget.in_use() == 50


def test_count_that_cannot_be_had_is_the_whole_limit() -> None:
    budget = DescriptorBudget(200, 60, count=lambda: None)
    assert (budget.in_use(), budget.free(), budget.crowded) == (200, 0, True)


def test_reserve_is_at_most_half() -> None:
    assert DescriptorBudget(100, 128, count=lambda: 20).free() == 30


def test_problem_is_one_line_from_ninety_percent_on() -> None:
    assert DescriptorBudget(1000, 60, count=lambda: 899).problem() == ""
    problem = DescriptorBudget(1000, 60, count=lambda: 900).problem()
    assert problem.startswith("900 of 1000 descriptors are in use (60 are reserved for files): ")
    assert "\n" not in problem
