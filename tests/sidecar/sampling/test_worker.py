"""Workers on a clock that the test moves.

The tests cover which thread makes which call when one hangs, and when it returns.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest

from handrail_sidecar.sampling.worker import WELL_NS, Reading, Task, TimedCalls, Worker, WorkerPool

SOON_S = 60.0
MS = 1_000_000
SECOND = 1000 * MS
LIMIT_NS = 50 * MS
MOST_A_DEVICE = 2


class Call(Task):
    """A call that answers with its name, or hangs until the test lets it go."""

    def __init__(self, name: str, device: str = "", group: str = "", action: Callable[[], Any] | None = None) -> None:
        super().__init__(device or name, MS, LIMIT_NS, group)
        self.name = name
        self.made = 0
        self.at_once = 0
        self.worst = 0
        self.hang: threading.Event | None = None
        self.action = action

    def call(self) -> Any:
        self.at_once += 1
        self.worst = max(self.worst, self.at_once)
        hang = self.hang
        try:
            if hang is not None:
                assert hang.wait(SOON_S)
            return self.action() if self.action is not None else self.name
        finally:
            self.made += 1
            self.at_once -= 1


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + SOON_S
    while not condition():
        assert time.monotonic() < end, "it did not come"
        threading.Event().wait(0.0005)


class Bench:
    """A pool without its monitor: the test checks."""

    def __init__(self) -> None:
        self.now_ns = SECOND
        self.readings: list[Reading] = []
        self.rejoined: list[Call] = []
        self.hanging: list[Call] = []
        self.calls: dict[str, Call] = {}
        self.pool = WorkerPool(
            "test",
            self.deliver,
            now_ns=lambda: self.now_ns,
            hangs=self.hanging.append,
            rejoined=self.rejoined.extend,
            most_hanging=4,
            most_hanging_a_device=MOST_A_DEVICE,
        )

    def deliver(self, readings: Sequence[Reading]) -> None:
        self.readings += readings

    def add(self, *calls: Call) -> None:
        self.calls |= {call.name: call for call in calls}
        self.pool.update(calls)

    def hang(self, *names: str) -> None:
        """Let calls hang; returns once a thread is inside the first of them."""
        for name in names:
            self.calls[name].hang = threading.Event()
        until(lambda: self.calls[names[0]].at_once == 1)

    def let_go(self, name: str) -> None:
        hang, self.calls[name].hang = self.calls[name].hang, None
        assert hang is not None
        hang.set()

    def pass_time(self, ns: int) -> int:
        self.now_ns += ns
        return self.pool.check()

    def again(self, *names: str) -> None:
        """Wait until each call is made at least once more."""
        before = {name: self.calls[name].made for name in names}
        until(lambda: all(self.calls[name].made > before[name] for name in names))

    def threads(self) -> int:
        return len(self.pool.workers())

    def end(self) -> None:
        for call in self.calls.values():
            if call.hang is not None:
                call.hang.set()
        until(lambda: self.pool.stop(SOON_S) and not self.pool.workers())


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    made.add(*(Call(name) for name in "abc"))
    made.again("a", "b", "c")
    yield made
    made.end()
    assert max(call.worst for call in made.calls.values()) == 1, "two threads made one call at once"


def test_one_thread_makes_all_calls_and_delivers_their_answers(bench: Bench) -> None:
    assert bench.threads() == 1
    until(lambda: {reading.answer for reading in bench.readings} == {"a", "b", "c"})


def test_added_twice_it_is_made_by_one(bench: Bench) -> None:
    bench.pool.update([bench.calls["a"]])
    bench.again("a", "b", "c")
    assert bench.threads() == 1


def test_what_is_behind_a_call_that_hangs_goes_on_in_the_same_round(bench: Bench) -> None:
    bench.hang("b")
    bench.pass_time(LIMIT_NS)
    bench.again("a", "c")
    assert bench.threads() == 2
    bench.pass_time(SECOND)
    bench.again("a", "c")
    assert bench.threads() == 2
    assert bench.pool.stats.given_up == 1
    assert [(task.name, ns) for task, ns in bench.pool.hanging()] == [("b", SECOND + LIMIT_NS)]
    assert bench.pool.hanging(2 * SECOND) == []


def test_what_was_read_before_a_call_hung_is_delivered_and_its_own_late_answer_is_not() -> None:
    bench = Bench()
    first, hangs, third = Call("a"), Call("b"), Call("c")
    hangs.hang = threading.Event()
    bench.add(first, hangs, third)
    until(lambda: hangs.at_once == 1)
    assert bench.readings == []
    bench.pass_time(LIMIT_NS)
    until(lambda: third.made > 0)
    assert [reading.answer for reading in bench.readings][:1] == ["a"]
    third.period_ns = first.period_ns = SECOND * 1000  # what is due stays quiet
    hangs.action = lambda: "late" if hangs.made == 0 else "fresh"
    bench.let_go("b")
    until(lambda: "fresh" in [reading.answer for reading in bench.readings])
    assert "late" not in [reading.answer for reading in bench.readings]
    bench.end()


def test_a_call_that_is_merely_slow_changes_nothing(bench: Bench) -> None:
    bench.hang("a")
    bench.pass_time(LIMIT_NS - 1)
    assert bench.threads() == 1
    assert bench.pool.hanging() == []


def test_once_it_has_returned_in_time_for_a_while_it_rejoins_the_others(bench: Bench) -> None:
    bench.hang("a")
    bench.pass_time(SECOND)
    bench.again("b")
    bench.let_go("a")
    bench.again("a", "b", "c")
    bench.pass_time(SECOND)
    bench.again("a", "b", "c")
    assert bench.threads() == 2
    bench.pass_time(WELL_NS)
    until(lambda: bench.threads() == 1)
    bench.again("a", "b", "c")
    assert bench.rejoined == [bench.calls["a"]]


def test_where_every_call_hangs_each_has_a_thread(bench: Bench) -> None:
    for name in "abc":
        bench.hang(name)
        bench.pass_time(SECOND)
    assert bench.threads() == 3
    for name in "abc":
        bench.let_go(name)
    bench.again("a", "b", "c")


def test_the_rest_of_a_device_leaves_the_other_devices() -> None:
    bench = Bench()
    bench.add(Call("1 hangs", "1"), Call("1 rest", "1"), Call("2", "2"))
    bench.again("1 rest", "2")
    bench.hang("1 hangs")
    bench.pass_time(LIMIT_NS)
    bench.again("1 rest", "2")
    assert bench.threads() == 3
    bench.hang("1 rest")  # delays no other device
    bench.again("2")
    bench.add(Call("1 new", "1"))
    bench.pass_time(LIMIT_NS)
    bench.again("1 new", "2")
    assert bench.threads() == 4
    bench.end()


def test_a_device_with_too_many_hanging_calls_waits_as_a_whole_and_no_other_does() -> None:
    bench = Bench()
    names = [f"1 {number}" for number in range(MOST_A_DEVICE + 2)]
    bench.add(*(Call(name, "1") for name in names), Call("2", "2"))
    bench.again(*names, "2")
    for name in names[: MOST_A_DEVICE + 1]:
        bench.hang(name)
        bench.pass_time(LIMIT_NS)
        bench.again("2")
    bench.pass_time(LIMIT_NS)
    assert (bench.pool.stats.given_up, bench.pool.stats.not_replaced) == (MOST_A_DEVICE, 1)
    waits = bench.calls[names[-1]].made
    bench.again("2")
    assert bench.calls[names[-1]].made == waits
    for name in names[: MOST_A_DEVICE + 1]:
        bench.let_go(name)
    bench.again(*names, "2")
    bench.end()


def test_a_call_that_goes_on_hanging_is_named_once_and_may_be_replaced(bench: Bench) -> None:
    bench.hang("a")
    bench.pass_time(LIMIT_NS)
    assert bench.hanging == []
    bench.pass_time(LIMIT_NS)
    bench.pass_time(LIMIT_NS)
    assert bench.hanging == [bench.calls["a"]]
    bench.add(Call("part", "a"))
    bench.pool.update(remove=[bench.calls["a"]])
    bench.again("part", "b")
    bench.let_go("a")
    until(lambda: bench.threads() == 1)  # nobody makes that call again


def test_groups_never_share_a_thread(bench: Bench) -> None:
    bench.add(Call("d", "a", group="blocks"))
    bench.again("a", "d")
    bench.pass_time(WELL_NS)
    bench.again("a", "d")
    assert sorted(worker.group for worker in bench.pool.workers()) == ["", "blocks"]


def test_devices_that_one_thread_cannot_read_in_time_get_their_own_and_come_together_again(bench: Bench) -> None:
    def slow() -> None:
        bench.now_ns += 10 * MS

    bench.calls["a"].action = slow  # nearly all of the time that passes
    until(lambda: bench.threads() == 3)
    bench.calls["a"].action = None
    bench.again("a", "b", "c")

    def rejoined() -> bool:
        bench.pass_time(WELL_NS)
        bench.again("a", "b", "c")
        return bench.threads() == 1

    until(rejoined)


def test_one_that_is_removed_is_made_no_more_and_may_come_back(bench: Bench) -> None:
    bench.pool.update(remove=[bench.calls["b"]])
    bench.again("a")
    before = bench.calls["b"].made
    bench.again("a", "c")
    assert bench.calls["b"].made == before
    bench.pool.update([bench.calls["b"]])
    bench.again("b")


def test_with_nothing_left_the_thread_ends_and_what_comes_later_begins_another(bench: Bench) -> None:
    bench.pool.update(remove=list(bench.calls.values()))
    until(lambda: not bench.pool.workers())
    bench.pool.update(list(bench.calls.values()))
    bench.again("a", "b", "c")


def test_what_a_call_raises_is_its_answer_and_hides_no_other(bench: Bench) -> None:
    def fails() -> None:
        raise ValueError("no")

    bench.calls["b"].action = fails
    bench.again("a", "b", "c")
    until(lambda: any(isinstance(reading.answer, ValueError) for reading in bench.readings))


def test_an_error_in_what_takes_the_readings_is_counted_and_ends_nothing(bench: Bench) -> None:
    def fails(readings: Sequence[Reading]) -> None:
        raise ZeroDivisionError

    bench.pool._deliver = fails
    until(lambda: bench.pool.stats.faults > 1)
    bench.again("a", "b", "c")


def test_everybody_who_sleeps_is_woken_once_it_stops() -> None:
    pool = WorkerPool("test", lambda readings: None)
    pool.start()
    calls = [Call("a"), Call("b", group="other")]
    for call in calls:
        call.period_ns = 1000 * SECOND
    pool.update(calls)
    until(lambda: all(call.made for call in calls))
    assert len(pool.threads()) == 3
    assert pool.stop(SOON_S)
    assert pool.threads() == []
    pool.update([Call("late")])
    assert pool.workers() == []
    assert pool.stop(0.0)


def test_stopping_waits_for_no_call_that_hangs(bench: Bench) -> None:
    bench.hang("a")
    bench.pass_time(LIMIT_NS + 1)
    began = time.monotonic()
    assert not bench.pool.stop(SOON_S)
    assert time.monotonic() - began < SOON_S / 2


@pytest.mark.parametrize(("passed_ms", "again_ms"), [(10, 40), (47, 3), (49, 2), (50, 50)])
def test_the_monitor_looks_again_when_a_call_has_had_its_time_and_not_a_time_later(passed_ms: int, again_ms: int) -> None:
    bench = Bench()
    call = Call("a")
    call.hang = threading.Event()
    bench.add(call)
    until(lambda: call.at_once == 1)
    assert bench.pass_time(passed_ms * MS) == again_ms * MS
    bench.end()


@pytest.mark.parametrize(("due_ms", "again_ms"), [(70, 120), (30, 80), (5, 75)])
def test_the_monitor_sleeps_until_a_call_that_is_due_later_may_hang(due_ms: int, again_ms: int) -> None:
    bench = Bench()
    now = bench.now_ns
    asleep = Worker("asleep", "", now, now, check_ns=now + due_ms * MS + LIMIT_NS, limit_ns=LIMIT_NS)
    bench.pool._workers = [asleep]
    assert bench.pass_time(0) == again_ms * MS


def test_the_monitor_gives_up_what_hangs_and_reports(bench: Bench) -> None:
    checks: list[int] = []
    bench.pool._checked = lambda: checks.append(1)
    bench.hang("a")
    bench.now_ns += LIMIT_NS
    bench.pool.start()
    bench.again("b", "c")
    until(lambda: bool(checks))


def test_every_call_is_made_by_one_thread_whenever_the_monitor_looks() -> None:
    """Another thread gives up whatever runs, again and again, at any possible moment."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(20):
            assert made_while_all_is_given_up(40) == Counter(range(40))
    finally:
        sys.setswitchinterval(before)


def made_while_all_is_given_up(count: int) -> Counter[int]:
    made: Counter[int] = Counter()
    pool = WorkerPool("test", lambda readings: None, most_hanging=count, most_hanging_a_device=count)
    calls = [Call(str(number), "1", action=partial(made.update, [number])) for number in range(count)]
    for call in calls:
        call.period_ns, call.limit_ns = 1000 * SECOND, 0
    pool.update(calls)
    until(lambda: pool.check() >= 0 and made.total() >= count)
    assert pool.stop(SOON_S)
    return made


def test_periods_that_passed_are_counted_and_not_made_up_for() -> None:
    call = Call("a")
    call.period_ns = 100 * MS
    assert (call.plan(1_003 * MS), call.next_ns) == (0, 1_100 * MS)
    assert (call.plan(1_100 * MS), call.next_ns) == (0, 1_200 * MS)
    assert (call.plan(1_450 * MS), call.next_ns) == (2, 1_500 * MS)


def test_a_timed_call_that_has_not_returned_is_not_made_twice() -> None:
    calls, begun, let_go = [], threading.Event(), threading.Event()

    def hangs() -> str:
        calls.append(1)
        begun.set()
        let_go.wait(SOON_S)
        return "late"

    def fails() -> None:
        raise ValueError("no")

    timed = TimedCalls("test", 0.01)
    for _ in range(3):
        with pytest.raises(TimeoutError):
            timed("GPU 0", hangs)
    assert begun.wait(SOON_S)
    assert (len(calls), timed.hanging) == (1, 1)
    patient = TimedCalls("test", 30.0)
    assert patient("GPU 1", lambda value: value + 1, 6) == 7
    with pytest.raises(ValueError, match="no"):
        patient("GPU 1", fails)
    let_go.set()
    until(lambda: not timed.hanging)
    timed.within_s = 30.0
    assert timed("GPU 0", hangs) == "late"
