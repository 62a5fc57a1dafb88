"""Series under a request.

The tests check what each sample measures, whose it is, and where on the request's time it lies.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from builders.device_samples import START_UNIX_NS, S, counter, gauge, gpu, port, process, sample
from builders.device_timeline import ROW, evidence, ordinary, pair, stored
from builders.request_rows import MS
from handrail import conventions as names
from handrail.clock_offset import OffsetInterval
from handrail.records.devices import DeviceSample
from handrail_collector.explain.devices.timeline import DeviceChoice, Offset, Track, between, clock_offset, place_of
from handrail_collector.explain.devices.timeline_samples import tracked
from handrail_collector.store.read import StoreReader

HERE = Offset(same=True, shift_ns=0, bound_ns=0)


def tracks(samples: list[DeviceSample], offset: Offset = HERE) -> list[Track]:
    """Return the tracks of the only device."""
    (device,) = place_of("prefill", "p0:8000", "p0", samples, START_UNIX_NS, offset).devices
    return list(device.tracks)


def test_a_gauge_holds_since_the_sample_before_it_and_a_counter_moved_since_then() -> None:
    device_samples = [
        sample(
            gpu(),
            START_UNIX_NS + at * MS,
            gauge("utilization_ratio", at / 1000),
            counter(names.GPU_NVLINK_BYTES, total, "receive"),
        )
        for at, total in ((-40, 100), (60, 100), (160, 400))
    ]
    nvlink, busy = tracks(device_samples)
    assert (nvlink.from_ns, nvlink.to_ns, nvlink.values) == ((-40 * MS, 60 * MS), (60 * MS, 160 * MS), (0, 3000))
    assert busy.from_ns == (-140 * MS, -40 * MS, 60 * MS)
    assert busy.values == (-0.04, 0.06, 0.16)


def test_F14_a_dip_of_utilization_stands_where_the_wait_was_to_one_sample() -> None:
    """D waited for KV from 1.9 to 4.0 s; the GPU is sampled once a second."""
    device_samples = [
        sample(gpu(), START_UNIX_NS + second * S, gauge(names.GPU_BUSY, share))
        for second, share in enumerate((0.98, 0.97, 0.03, 0.02, 0.98), 1)
    ]
    (track,) = tracks(device_samples)
    idle = [each for each in zip(track.from_ns, track.to_ns, track.values, strict=True) if each[2] < 0.5]
    assert abs(idle[0][0] - 1.9 * S) <= S
    assert abs(idle[-1][1] - 4.0 * S) <= S


def test_what_fell_between_two_counts_of_a_counter_is_not_known() -> None:
    device_samples = [
        sample(port(), START_UNIX_NS + at * S, counter("bytes", total, "receive", since=since))
        for at, total, since in ((0, 10**15, 5), (1, 10**15 + 7, 5), (2, 3, START_UNIX_NS + S), (3, 13, START_UNIX_NS + S))
    ]
    (track,) = tracks(device_samples)
    assert list(zip(track.from_ns, track.values, strict=True)) == [(0, 7), (2 * S, 10)]


def test_a_gauge_says_nothing_of_a_long_time_in_which_nobody_looked() -> None:
    device_samples = [sample(gpu(), START_UNIX_NS + at * S, gauge("utilization_ratio", 0.5)) for at in (0, 60)]
    (track,) = tracks(device_samples)
    assert track.from_ns == (-2 * S, 58 * S)


def test_a_value_that_is_read_rarely_is_its_own_series() -> None:
    device_samples = [
        sample(gpu(), START_UNIX_NS + at * S, *([gauge("power_watts", at)] if at % 2 else []), gauge("utilization_ratio", 1))
        for at in range(4)
    ]
    power, _ = tracks(device_samples)
    assert (power.from_ns, power.to_ns) == ((-S, S), (S, 3 * S))


@given(st.lists(st.tuples(st.integers(1, 10**10), st.integers(0, 10**12)), max_size=8))
def test_the_bytes_of_a_counter_are_those_that_its_rates_say(steps: list[tuple[int, int]]) -> None:
    at, total, device_samples = START_UNIX_NS, 0, [sample(port(), START_UNIX_NS, counter("bytes", 0, "receive"))]
    for length, moved in steps:
        at, total = at + length, total + moved
        device_samples.append(sample(port(), at, counter("bytes", total, "receive")))
    found = tracks(device_samples)
    moved_in_all = sum(
        (end - begin) * value / S
        for track in found
        for begin, end, value in zip(track.from_ns, track.to_ns, track.values, strict=True)
    )
    assert moved_in_all == pytest.approx(total, rel=1e-6, abs=0.01 * len(steps) + 1)


def test_the_devices_of_an_engine_are_those_that_name_it_else_its_sidecars_else_the_hosts() -> None:
    own, other = process("p0", instance="p0:8000"), process("p0", instance="p0:9000")
    one = [sample(gpu(index), START_UNIX_NS, gauge("x", 1), of=own) for index in range(2)]
    two = [sample(gpu(index), START_UNIX_NS, gauge("x", 2), of=other) for index in range(2)]
    named = [replace(each, device=replace(each.device, engine="p0:8000" if each.device.index else "p0:9000")) for each in one]

    def chosen(samples: list[DeviceSample], instance: str = "p0:8000") -> tuple[DeviceChoice | None, list[int | None], int]:
        place = place_of("prefill", instance, "p0", samples, START_UNIX_NS, HERE)
        return place.chosen, [each.device.index for each in place.devices], place.others

    assert chosen([*named, *two]) == (DeviceChoice.ENGINE, [1], 1)
    assert chosen([*one, *two]) == (DeviceChoice.SIDECAR, [0, 1], 0)
    assert chosen(two) == (DeviceChoice.HOST, [0, 1], 0)
    assert chosen([]) == (None, [], 0)
    assert chosen([*one, sample(port(), START_UNIX_NS, of=other)]) == (DeviceChoice.SIDECAR, [0, 1, None], 0)


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (-MS, 3 * MS, Offset(same=False, shift_ns=MS, bound_ns=2 * MS)),
        (None, 3 * MS, Offset(same=False, shift_ns=0, bound_ns=None)),
        (3, -3, Offset(same=False, shift_ns=0, bound_ns=None)),
    ],
    ids=["bounded", "open", "contradictory"],
)
def test_an_offset_is_used_as_far_as_it_is_known(low: int | None, high: int | None, expected: Offset) -> None:
    assert clock_offset(OffsetInterval(low, high, 0), same=False) == expected
    assert clock_offset(None, same=False) == Offset(same=False, shift_ns=0, bound_ns=None)
    assert clock_offset(OffsetInterval(low, high, 0), same=True) == HERE


def test_hosts_that_never_spoke_are_related_through_one_that_both_did() -> None:
    pairs = {("a", "r"): OffsetInterval(10, 20, 0), ("d", "r"): OffsetInterval(-5, 5, 0), ("a", "x"): OffsetInterval(0, 0, 0)}
    found = between(pairs, "a", "d")
    assert found is not None
    assert (found.low_ns, found.high_ns) == (5, 25)
    direct = between({**pairs, ("d", "a"): OffsetInterval(-14, -8, 0)}, "a", "d")
    assert direct is not None
    assert (direct.low_ns, direct.high_ns) == (8, 14)
    assert between(pairs, "a", "nobody") is None


def test_line_rates_are_shown_though_they_were_read_long_before(tmp_path: Path) -> None:
    device_samples = [
        sample(gpu(0, "host-p"), ROW.started_unix_ns + at * S, gauge(names.GPU_PCIE_LINE, rate), of=process("host-p"))
        for at, rate in ((-18, 31e9), (-8, 63e9), (15, 31e9))
    ]
    own = process("host-p")
    moved = [
        sample(gpu(0, "host-p"), ROW.started_unix_ns + at * S, counter(names.GPU_PCIE_BYTES, at, names.TRANSMIT), of=own)
        for at in range(4)
    ]
    gone = sample(gpu(1, "host-p"), ROW.started_unix_ns - 20 * S, gauge(names.GPU_PCIE_LINE, 63e9), of=process("host-p"))
    stored(tmp_path, sorted([*device_samples, *moved, gone], key=lambda each: each.at_unix_ns))
    reader = StoreReader(tmp_path / "store")
    hardware = tracked(reader, ROW, evidence())
    reader.close()
    (device,) = hardware["places"][0]["devices"]
    last = {track["name"]: track["values"][-1] for track in device["tracks"]}
    assert last == {names.GPU_PCIE_BYTES: 1, names.GPU_PCIE_LINE: 63e9}


def test_a_request_of_ten_minutes_is_shown_in_parts(tmp_path: Path) -> None:
    long = replace(ROW, duration_ns=600 * S)
    device_samples = [
        sample(port(), ROW.started_unix_ns + at * S // 2, counter("bytes", at * 100, "receive"), of=process("host-d"))
        for at in range(1210)
    ]
    stored(tmp_path, device_samples, row=long)
    reader = StoreReader(tmp_path / "store")
    hardware = tracked(reader, long, evidence())
    reader.close()
    (series,) = hardware["places"][1]["devices"][0]["tracks"]
    assert hardware["every_ns"] == S
    assert 599 <= len(series["values"]) <= 603
    assert set(series["values"]) == {200}


def test_a_collocated_engine_is_one_place(tmp_path: Path) -> None:
    one = replace(ROW, prefill_instance=ROW.decode_instance, prefill_host=ROW.decode_host)
    stored(tmp_path, ordinary(), [pair("id-d", "id-e", -MS, MS)], row=one)
    reader = StoreReader(tmp_path / "store")
    assert [place["host"] for place in tracked(reader, one, evidence())["places"]] == ["host-d"]
    nowhere = replace(ROW, prefill_host=None, decode_host=None)
    assert tracked(reader, nowhere, [])["places"] == []
    reader.close()
