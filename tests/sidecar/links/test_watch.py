"""Watch one device over time, on a clock that the test moves."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from builders.records import process
from doubles.sysfs import FakeSysfs
from handrail.device_counters import link as names
from handrail.records import Role, Source
from handrail.records.devices import DeviceSample
from handrail_sidecar.links import nic, rdma
from handrail_sidecar.links.device_state import MOST_WAITING, SECOND, DeviceState
from handrail_sidecar.links.nic import NicReader
from handrail_sidecar.links.rdma import PortReader
from handrail_sidecar.links.reading import LinkReader

BEGAN_UNIX = 1_700_000_000 * SECOND


class Watched:
    """A watch and its clock."""

    def __init__(self, reader: LinkReader) -> None:
        self.watch = DeviceState(reader, process(Role.DECODE))
        self.now_ns = 0

    def tick(self, after_s: float = 0.1, *, everything: bool = False) -> bool:
        self.now_ns += round(after_s * SECOND)
        return self.watch.tick(
            everything=everything, now_unix_ns=lambda: BEGAN_UNIX + self.now_ns, monotonic_ns=lambda: self.now_ns
        )

    def taken(self) -> list[DeviceSample]:
        return self.watch.take()


@pytest.fixture
def sysfs(tmp_path: Path) -> FakeSysfs:
    return FakeSysfs(tmp_path)


@pytest.fixture
def port(sysfs: FakeSysfs) -> Watched:
    sysfs.add_port(sent=400, received=800)
    return Watched(PortReader(f"{sysfs.root}/{rdma.CLASS}/mlx5_0", "mlx5_0", "1"))


def since(sample: DeviceSample, name: str, label: str) -> tuple[float, int]:
    return next((v.value, (v.start_unix_ns - BEGAN_UNIX) // 10**6) for v in sample.values if (v.name, v.label) == (name, label))


def test_a_sample_says_what_and_when_and_since_when(port: Watched) -> None:
    port.tick(everything=True)
    (sample,) = port.taken()
    assert (sample.source, sample.device.key, sample.at_unix_ns - BEGAN_UNIX) == (Source.RDMA, "mlx5_0/1", 10**8)
    assert since(sample, names.BYTES, names.TRANSMIT) == (400, 100)
    assert next(v.start_unix_ns for v in sample.values if v.name == names.UP) == 0


def test_between_full_readings_the_bytes_alone(port: Watched) -> None:
    port.tick(everything=True)
    port.tick()
    _, sample = port.taken()
    assert {value.name for value in sample.values} == {names.BYTES}


def test_a_counter_that_began_again_counts_since_the_last_reading_before(sysfs: FakeSysfs, port: Watched) -> None:
    port.tick(everything=True)
    sysfs.move_port(4000, 8000)
    port.tick()
    sysfs.move_port(40, 9000)
    port.tick()
    *_, before, after = port.taken()
    assert since(before, names.BYTES, names.TRANSMIT) == (4000, 100)
    assert since(after, names.BYTES, names.TRANSMIT) == (40, 200)
    assert since(after, names.BYTES, names.RECEIVE) == (9000, 100)
    assert port.watch.stats.resets == 1


def test_a_driver_that_was_loaded_again_begins_again_even_where_its_counters_are_higher(sysfs: FakeSysfs, port: Watched) -> None:
    port.tick(everything=True)
    (sysfs.root / "class/infiniband/mlx5_0/node_guid").write_text("0000:0000:0000:0001\n")
    sysfs.move_port(4_000_000, 8_000_000)
    port.tick(2.0, everything=True)
    first, second = port.taken()
    assert since(first, names.BYTES, names.TRANSMIT)[1] == 100
    assert since(second, names.BYTES, names.TRANSMIT) == (4_000_000, 2100)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(0, 2**40), min_size=2, max_size=10))
def test_what_grew_since_a_start_is_never_negative_whatever_the_counter_does(
    tmp_path_factory: pytest.TempPathFactory, counts: list[int]
) -> None:
    sysfs = FakeSysfs(tmp_path_factory.mktemp("sysfs"))
    sysfs.add_nic(index=3)
    watched = Watched(NicReader(f"{sysfs.root}/{nic.CLASS}/eth0", "eth0"))
    for number, count in enumerate(counts):
        sysfs.move_nic(count, count)
        watched.tick(everything=number == 0)
    received = [next(v for v in s.values if (v.name, v.label) == (names.BYTES, names.RECEIVE)) for s in watched.taken()]
    for before, after in pairwise(received):
        assert after.start_unix_ns > before.start_unix_ns or after.value >= before.value


def test_another_device_under_the_name_is_reported_though_its_first_readings_were_dropped(
    sysfs: FakeSysfs, port: Watched
) -> None:
    port.tick(everything=True)
    port.taken()
    (sysfs.root / "class/infiniband/mlx5_0/node_guid").write_text("0000:0000:0000:0001\n")
    sysfs.move_port(4_000_000, 8_000_000)
    port.tick(2.0, everything=True)
    for _ in range(MOST_WAITING):
        port.tick()
    first, *_ = port.taken()
    assert since(first, names.BYTES, names.TRANSMIT) == (4_000_000, 2200)
    assert port.watch.stats.resets == 1


def test_a_device_that_is_gone_says_so_and_gives_nothing(sysfs: FakeSysfs, port: Watched) -> None:
    assert port.tick(everything=True)
    sysfs.take_away(sysfs.root / "class/infiniband/mlx5_0")
    assert not port.tick()
    assert port.watch.gone
    assert len(port.taken()) == 1


def test_what_nobody_takes_is_bounded_and_counted(port: Watched) -> None:
    port.tick(everything=True)
    for _ in range(MOST_WAITING + 4):
        port.tick()
    assert (len(port.watch.waiting), port.watch.stats.dropped) == (MOST_WAITING, 5)


def test_B18_the_peak_is_that_of_a_second_not_of_the_whole_minute(sysfs: FakeSysfs, port: Watched) -> None:
    """Case B18: the peak is that of a second, not of the whole minute.

    Decode moves 400 MB/s steadily, prefill 4.5 GB/s in bursts: a mean shows neither.
    """
    sysfs.move_port(0, 0)
    port.tick(everything=True)
    received = 0
    for tenth in range(400):
        received += 450_000_000 if 300 <= tenth < 320 else 40_000_000
        sysfs.move_port(0, received)
        port.tick()
    peak = port.watch.peak_bytes_per_second()
    assert peak[names.RECEIVE] == pytest.approx(4.5e9, rel=0.01)
    assert received / 40 == pytest.approx(0.6e9, rel=0.02)
    assert peak[names.TRANSMIT] == 0


def test_B18_a_driver_that_updates_four_times_a_second_shows_no_bursts_that_are_none(sysfs: FakeSysfs, port: Watched) -> None:
    sysfs.move_port(0, 0)
    port.tick(everything=True)
    for tenth in range(100):
        sysfs.move_port(0, tenth // 3 * 3 * 100_000_000)  # 1 GB/s, seen in steps of 0.3 s
        port.tick()
    assert port.watch.peak_bytes_per_second()[names.RECEIVE] <= 1.3e9


def test_a_peak_needs_a_second(port: Watched) -> None:
    for _ in range(9):
        port.tick(everything=True)
    assert port.watch.peak_bytes_per_second() == {}
