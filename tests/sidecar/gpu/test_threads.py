"""The small parts that keep a call that hangs from holding up others, without NVML: who gets a call that returns just now."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from handrail.gpu.asking import Asker
from handrail.gpu.counters import Pace
from handrail.gpu.devices import Gpu
from handrail.gpu.failures import HANGS, NvmlFailed
from handrail.gpu.halt import Halt
from handrail.gpu.reader import DeviceReader
from handrail.gpu.state import SystemClock
from handrail.gpu.steps import GivenUp
from handrail.gpu.wave import MOST_UNTOLD, Guard, Round, Wave
from handrail.hardware import Device, DeviceKind
from handrail.records import Process, Role


def test_a_call_that_was_given_up_raises_whether_it_succeeds_or_fails() -> None:
    guard = Guard(SystemClock)
    with pytest.raises(GivenUp):
        guard(guard.give_up)  # the watch, in the middle of it

    def fails() -> None:
        guard.give_up()
        raise NvmlFailed(3)

    guard.renew()
    with pytest.raises(GivenUp):
        guard(fails)
    assert guard.inside  # until its thread goes on with it
    guard.renew()
    assert not guard.inside


def test_a_call_that_has_returned_cannot_be_given_up() -> None:
    guard = Guard(SystemClock)
    assert guard(lambda: 7) == 7
    assert not guard.give_up()
    with pytest.raises(NvmlFailed):
        guard(_fails)
    assert not guard.give_up()
    assert not guard.inside


def _fails() -> None:
    raise NvmlFailed(999)


def test_a_question_that_is_not_answered_is_not_asked_twice() -> None:
    asked, begun, let_go = [], threading.Event(), threading.Event()

    def hangs() -> str:
        asked.append(1)
        begun.set()
        let_go.wait(60)
        return "late"

    ask = Asker(0.01)
    for _ in range(3):
        with pytest.raises(NvmlFailed) as caught:
            ask("GPU 0", hangs)
        assert caught.value.code == HANGS
    assert begun.wait(60)
    assert (len(asked), ask.hanging) == (1, 1)
    patient = Asker(30.0)
    assert patient("GPU 1", lambda value: value + 1, 6) == 7
    with pytest.raises(NvmlFailed):
        patient("GPU 1", _fails)
    let_go.set()
    deadline = time.monotonic() + 30
    while ask.hanging and time.monotonic() < deadline:
        time.sleep(0.001)
    ask.within_s = 30.0
    assert ask("GPU 0", hangs) == "late"


def test_everybody_who_sleeps_is_woken_once_it_stops() -> None:
    halt = Halt()
    assert not halt.wait(0.0)
    woken: list[bool] = []
    threads = [threading.Thread(target=lambda: woken.append(halt.wait(30.0))) for _ in range(4)]
    for thread in threads:
        thread.start()
    halt.set()
    halt.set()
    for thread in threads:
        thread.join(30.0)
    assert woken == [True] * 4
    assert halt.wait(30.0)
    assert halt.is_set()


def reader(period_ms: int) -> DeviceReader:
    gpu = Gpu(device=Device(kind=DeviceKind.GPU, key="GPU-a", index=0), handle=None)
    nvml: Any = SimpleNamespace()
    return DeviceReader(nvml, gpu, SystemClock, Process(role=Role.UNKNOWN, instance="", host=""), period_ms * 1_000_000)


@pytest.mark.parametrize(("period_ms", "window_ms"), [(10, 110), (20, 120), (50, 150), (100, 200), (101, 101), (1000, 1000)])
def test_windows_end_with_a_tick_and_are_longer_than_100_ms(period_ms: int, window_ms: int) -> None:
    assert reader(period_ms).jobs[Pace.WINDOW].period_ns == window_ms * 1_000_000


@pytest.mark.parametrize(
    ("asked_ms", "next_ms", "soon", "told"),
    [
        ((0, 100, 200, 300), 400, False, False),
        ((0, 100, 200, 300, 400), 500, False, True),
        ((0,), 100, True, True),
        ((0,), 1000, False, True),
        ((), 1000, True, False),
        (tuple(range(MOST_UNTOLD)), MOST_UNTOLD, False, True),
    ],
    ids=["waits", "half-a-second", "something-new", "once-a-second", "nothing-asked", "enough"],
)
def test_answers_are_told_together(asked_ms: tuple[int, ...], next_ms: int, soon: bool, told: bool) -> None:
    rounds = [Round(reader(100).jobs[Pace.TICK])] * len(asked_ms)
    if rounds:
        rounds[0].began_ns = asked_ms[0] * 1_000_000
    assert Wave(rounds, len(rounds), soon).is_to_tell(next_ms * 1_000_000) is told


def test_periods_that_passed_are_counted_and_not_made_up_for() -> None:
    job = reader(100).jobs[Pace.TICK]
    job.begin_at(1_000_000_000)
    assert (job.plan_next(1_003_000_000), job.next_ns) == (0, 1_100_000_000)
    assert (job.plan_next(1_350_000_000), job.next_ns) == (2, 1_400_000_000)


def test_a_binding_without_any_function_makes_everything_absent() -> None:
    empty = reader(100)
    for job in empty.lane_jobs():
        for step in job.steps:
            if step.name.startswith("nvmlDevice"):
                assert step.read(lambda call: call()) == []
        empty.settle(job)
    assert empty.absent["utilization_ratio", ""] == -1
