"""Threads that read devices in turn, on a clock that the test moves.

The tests cover which thread reads which device when one hangs, and when it answers again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from builders.records import process
from handrail.records import Role
from handrail_sidecar.links.device_state import SECOND, DeviceState
from handrail_sidecar.links.nic import NicReader
from handrail_sidecar.links.workers import WELL_AGAIN_NS, LinkWorkers

SOON_S = 60.0
INTERVAL_NS = 1_000_000


class Bench:
    """Devices that answer, or hang until the test releases them."""

    def __init__(self) -> None:
        self.now_ns = 0
        self.reads: dict[str, int] = {}
        self.readers: dict[str, set[int]] = {}
        self.at_once: dict[str, int] = {}
        self.worst: dict[str, int] = {}
        self.hangs: dict[str, threading.Event] = {}
        self.gone: set[str] = set()
        self.stop = threading.Event()
        self.lanes = LinkWorkers(self.read, INTERVAL_NS, lambda: self.now_ns, self.stop)
        self.watches = {name: DeviceState(NicReader("/nowhere", name), process(Role.DECODE)) for name in ("a", "b", "c")}

    def read(self, watch: DeviceState) -> bool:
        name = watch.reader.key
        self.at_once[name] = self.at_once.get(name, 0) + 1
        self.worst[name] = max(self.worst.get(name, 0), self.at_once[name])
        hang = self.hangs.get(name)
        if hang is not None:
            hang.wait(SOON_S)
        self.reads[name] = self.reads.get(name, 0) + 1
        self.at_once[name] -= 1
        return name not in self.gone

    def hang(self, name: str) -> None:
        self.hangs[name] = threading.Event()
        self.until(lambda: self.at_once.get(name, 0) == 1)

    def let_go(self, name: str) -> None:
        self.hangs.pop(name).set()

    def pass_time(self, ns: int) -> None:
        self.now_ns += ns
        self.lanes.look()

    def until(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + SOON_S
        while not condition():
            assert time.monotonic() < end, "it did not come"
            threading.Event().wait(0.0005)

    def again(self, *names: str) -> None:
        """Wait until each device is read at least once more."""
        before = {name: self.reads.get(name, 0) for name in names}
        self.until(lambda: all(self.reads.get(name, 0) > before[name] for name in names))

    def end(self) -> None:
        for hang in self.hangs.values():
            hang.set()
        self.stop.set()
        for thread in self.lanes.threads():
            thread.join(SOON_S)


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    for watch in made.watches.values():
        made.lanes.add(watch)
    made.again("a", "b", "c")
    yield made
    made.end()
    assert max(made.worst.values()) == 1, "two threads read one device at once"


def test_one_thread_reads_all(bench: Bench) -> None:
    assert len(bench.lanes.threads()) == 1


def test_added_twice_it_is_read_by_one(bench: Bench) -> None:
    bench.lanes.add(bench.watches["a"])
    bench.again("a", "b", "c")
    assert len(bench.lanes.threads()) == 1


def test_what_is_behind_a_read_that_hangs_goes_on_after_one_period(bench: Bench) -> None:
    bench.hang("a")
    bench.pass_time(SECOND)
    bench.again("b", "c")
    assert len(bench.lanes.threads()) == 2
    bench.pass_time(SECOND)
    bench.again("b", "c")
    assert len(bench.lanes.threads()) == 2


def test_a_read_that_is_merely_slow_changes_nothing(bench: Bench) -> None:
    bench.hang("a")
    bench.pass_time(10_000_000)
    assert len(bench.lanes.threads()) == 1


def test_once_it_has_answered_for_a_while_it_is_read_with_the_others(bench: Bench) -> None:
    bench.hang("a")
    bench.pass_time(SECOND)
    bench.again("b")
    bench.let_go("a")
    bench.again("a", "b", "c")
    bench.pass_time(SECOND)
    assert len(bench.lanes.threads()) == 2
    bench.pass_time(WELL_AGAIN_NS)
    for _ in range(1000):  # it returns between two of its reads
        bench.pass_time(1)
        if len(bench.lanes.threads()) == 1:
            break
        bench.again("a")
    bench.again("a", "b", "c")
    assert len(bench.lanes.threads()) == 1


def test_where_every_device_hangs_each_has_a_thread(bench: Bench) -> None:
    for name in ("a", "b", "c"):
        bench.hang(name)
        bench.pass_time(SECOND)
    assert len(bench.lanes.threads()) == 3
    for name in ("a", "b", "c"):
        bench.let_go(name)
    bench.again("a", "b", "c")


def test_one_that_is_gone_is_read_no_more_and_may_come_back(bench: Bench) -> None:
    bench.gone.add("b")
    bench.until(lambda: all(bench.watches["b"] not in lane.watches for lane in bench.lanes._lanes))
    before = bench.reads["b"]
    bench.again("a", "c")
    assert bench.reads["b"] == before
    bench.gone.clear()
    bench.lanes.add(bench.watches["b"])
    bench.again("b")


def test_with_nothing_left_the_thread_ends(bench: Bench) -> None:
    bench.gone.update(("a", "b", "c"))
    bench.until(lambda: not bench.lanes.threads())
