"""The threads that read links, on a clock that only the test moves.

A device that hangs, goes away and comes back delays no other.
The clock decides whether a read hangs; the test moves it only once a read really hangs.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from builders.records import process
from doubles.sysfs import FakeSysfs
from handrail.records import Role
from handrail_sidecar.links.sampler import LinkSampler, LinkSamplerSettings, ReadState

SOON_S = 60.0
MILLISECOND = 10**6
HUNG_NS = 50 * MILLISECOND


class Clock:
    """A clock that stands until the test moves it."""

    def __init__(self) -> None:
        self.now_ns = 10**12

    def __call__(self) -> int:
        return self.now_ns


@pytest.fixture
def sysfs(tmp_path: Path) -> Iterator[FakeSysfs]:
    made = FakeSysfs(tmp_path)
    yield made
    made.free()


@pytest.fixture
def clock() -> Clock:
    return Clock()


def sampler(sysfs: FakeSysfs, clock: Clock) -> LinkSampler:
    settings = LinkSamplerSettings(
        root=sysfs.root,
        interval_ns=5 * MILLISECOND,
        slow_ns=20 * MILLISECOND,
        look_ns=20 * MILLISECOND,
        hung_ns=HUNG_NS,
    )
    return LinkSampler(settings, process(Role.DECODE), monotonic_ns=clock)


def hang(sysfs: FakeSysfs, clock: Clock, running: LinkSampler, *adapters: str) -> None:
    """Make a counter of each port hang, until the sampler reports it.

    While one read hangs, no other read is in progress: they follow it.
    """
    paths = [sysfs.port(adapter) / "counters/port_xmit_data" for adapter in adapters]
    for path in paths:
        sysfs.hang(path)
    for count in range(1, len(paths) + 1):
        until(lambda count=count: sum(map(sysfs.caught, paths)) >= count)  # type: ignore[misc]
        clock.now_ns += HUNG_NS
    for adapter in adapters:
        assert running.state(running.watches[f"{adapter}/1"]) is ReadState.HUNG


@pytest.fixture
def running(sysfs: FakeSysfs, clock: Clock) -> Iterator[LinkSampler]:
    sysfs.add_port(sent=400)
    sysfs.add_nic(sent=100)
    made = sampler(sysfs, clock)
    made.start()
    yield made
    sysfs.free()
    assert made.stop(SOON_S)


def until(condition: Callable[[], bool]) -> None:
    """Wait for an event that is certain; the time limit only ends a test that fails."""
    end = time.monotonic() + SOON_S
    while not condition():
        assert time.monotonic() < end, "it did not come"
        threading.Event().wait(0.001)


def reads(sampler: LinkSampler, key: str) -> int:
    return sampler.watches[key].stats.reads if key in sampler.watches else 0


def test_every_device_is_read_again_and_again(running: LinkSampler) -> None:
    until(lambda: reads(running, "mlx5_0/1") > 5 and reads(running, "eth0") > 5)
    samples = running.take()
    assert {sample.device.key for sample in samples} == {"mlx5_0/1", "eth0"}
    for key in ("mlx5_0/1", "eth0"):
        times = [sample.at_unix_ns for sample in samples if sample.device.key == key]
        assert times == sorted(times)


def test_a_device_that_hangs_delays_no_other_and_is_reported(sysfs: FakeSysfs, clock: Clock, running: LinkSampler) -> None:
    until(lambda: reads(running, "mlx5_0/1") > 1 and reads(running, "eth0") > 1)
    hang(sysfs, clock, running, "mlx5_0")
    before, hung = reads(running, "eth0"), reads(running, "mlx5_0/1")
    until(lambda: reads(running, "eth0") > before + 10)
    assert reads(running, "mlx5_0/1") == hung
    assert running.state(running.watches["eth0"]) is ReadState.READ
    sysfs.let_go(sysfs.port() / "counters/port_xmit_data", 200)
    until(lambda: reads(running, "mlx5_0/1") > hung + 2)
    assert running.state(running.watches["mlx5_0/1"]) is ReadState.READ


def test_however_long_it_hangs_one_thread_waits_for_it_and_one_reads_the_others(
    sysfs: FakeSysfs, clock: Clock, running: LinkSampler
) -> None:
    until(lambda: reads(running, "mlx5_0/1") > 1)
    sysfs.add_nic("eth1")
    hang(sysfs, clock, running, "mlx5_0")
    before = reads(running, "eth0")
    until(lambda: reads(running, "eth0") > before + 20 and reads(running, "eth1") > 20)
    assert len(running.pool.workers()) == 2


def test_all_that_hang_have_a_thread_each(sysfs: FakeSysfs, clock: Clock, running: LinkSampler) -> None:
    for number in range(1, 4):
        sysfs.add_port(f"mlx5_{number}")
    until(lambda: all(reads(running, f"mlx5_{number}/1") > 1 for number in range(4)))
    hang(sysfs, clock, running, *(f"mlx5_{number}" for number in range(4)))
    before = reads(running, "eth0")
    until(lambda: reads(running, "eth0") > before + 5)
    assert len(running.pool.workers()) == 5


def test_a_thread_that_hangs_does_not_keep_the_sidecar_from_ending(sysfs: FakeSysfs, clock: Clock) -> None:
    sysfs.add_port()
    made = sampler(sysfs, clock)
    made.start()
    until(lambda: reads(made, "mlx5_0/1") > 0)
    hang(sysfs, clock, made, "mlx5_0")
    assert not made.stop(0.01)
    assert all(thread.daemon for thread in threading.enumerate() if thread.name.startswith("handrail-"))


def test_what_comes_later_is_found_and_what_goes_may_come_back(sysfs: FakeSysfs, running: LinkSampler) -> None:
    sysfs.add_port("mlx5_1", sent=40)
    until(lambda: reads(running, "mlx5_1/1") > 1)
    sysfs.take_away(sysfs.root / "class/infiniband/mlx5_1")
    until(lambda: running.state(running.watches["mlx5_1/1"]) is ReadState.GONE)
    before = reads(running, "mlx5_1/1")
    sysfs.add_port("mlx5_1", sent=4)
    until(lambda: reads(running, "mlx5_1/1") > before + 1)
    assert running.state(running.watches["mlx5_1/1"]) is ReadState.READ


def test_a_host_without_links_is_looked_at_again(sysfs: FakeSysfs, clock: Clock) -> None:
    made = sampler(sysfs, clock)
    made.start()
    until(lambda: made.chosen is not None)
    assert made.take() == []
    sysfs.add_nic()
    until(lambda: reads(made, "eth0") > 0)
    assert made.stop(SOON_S)


def test_it_leaves_no_thread_and_no_descriptor_behind(sysfs: FakeSysfs, clock: Clock) -> None:
    sysfs.add_port()
    sysfs.add_nic()

    def once() -> None:
        made = sampler(sysfs, clock)
        made.start()
        until(lambda: reads(made, "mlx5_0/1") > 0 and reads(made, "eth0") > 0)
        assert made.stop(SOON_S)

    once()
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(20):
        once()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("handrail-")]
    assert len(list(Path("/proc/self/fd").iterdir())) <= before


def test_ending_what_was_never_started(sysfs: FakeSysfs, clock: Clock) -> None:
    assert sampler(sysfs, clock).stop(0.0)
