"""Which counters moved with the fetches, among all that a host reports."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from builders.links import BEGAN, ETH, LO, RDMA, Host, Moved, S, by, devices, hand_off
from handrail.device_counters.link import RECEIVE, TRANSMIT
from handrail.records.devices import Device, DeviceKind, DeviceValue
from handrail_collector.links.device_attribution import Carried, LinkFetches, MediumVerdict, carried
from handrail_collector.links.devices import DeviceCounts, Medium, alone, counted, curve_of
from handrail_collector.links.handoffs import Flow, HandOff, Piece

UNTIL_S = 120.0
NOTHING = Flow.of(())


def run(seed: int = 1, took_s: float = 1.3, size: int = 470_000_000) -> list[HandOff]:
    random = Random(seed)
    at, found = 2.0, []
    while at < UNTIL_S - 5:
        found.append(hand_off(at, took_s, size))
        at += took_s + random.expovariate(1 / 3.0)
    return found


def one(hand_offs: list[HandOff], *hosts: Host, doubt_ns: int = 0, direction: str = RECEIVE) -> Carried:
    pieces = [piece for each in hand_offs for piece in each.pieces]
    (found,) = carried(LinkFetches(Flow.of(pieces), NOTHING, doubt_ns), devices(hosts, UNTIL_S), "d0", direction)
    return found


def test_the_interface_that_moved_by_the_fetched_bytes_carried_them() -> None:
    fetched = run()
    found = one(fetched, Host(host="d0", received=by(fetched, times=1.05)))
    assert (found.medium, found.verdict) == (Medium.NIC, MediumVerdict.CARRIED)
    assert found.share == pytest.approx(1.05, abs=0.02)
    assert [device.device.key for device, _ in found.devices] == ["eth0"]


def test_one_that_only_hums_along_did_not() -> None:
    found = one(run(), Host(host="d0", received=lambda at: 80e6 * at))
    assert (found.verdict, found.devices) == (MediumVerdict.NOT, ())
    assert found.share == pytest.approx(0.0, abs=0.02)


def test_one_that_is_busy_with_other_things_at_other_times_did_not() -> None:
    other = run(seed=7)
    found = one(run(seed=1), Host(host="d0", received=by(other, times=3.0)))
    assert found.verdict is not MediumVerdict.CARRIED


def test_among_steady_traffic_ten_times_as_large_the_fetches_are_found() -> None:
    fetched = run()
    found = one(fetched, Host(host="d0", received=by(fetched, times=1.02, background=1.5e9)))
    assert found.verdict is MediumVerdict.CARRIED


def test_fetches_far_shorter_than_a_sample_are_found_over_many_windows() -> None:
    """A fetch of 3.3 GB in 66 ms is too short for a rate at 2 Hz; its sum is not."""
    fetched = run(took_s=0.066, size=3_276_800_000)
    found = one(fetched, Host(host="d0", device=RDMA, received=by(fetched, times=1.01)))
    assert (found.medium, found.verdict) == (Medium.RDMA, MediumVerdict.CARRIED)


def test_several_ports_that_share_it_are_shown_together() -> None:
    fetched = run()
    second = replace(RDMA, key="mlx5_1/1")
    idle = replace(RDMA, key="mlx5_2/1")
    found = one(
        fetched,
        Host(host="d0", device=RDMA, received=by(fetched, times=0.5)),
        Host(host="d0", device=second, received=by(fetched, times=0.5)),
        Host(host="d0", device=idle),
    )
    assert found.verdict is MediumVerdict.CARRIED
    assert sorted(device.device.key for device, _ in found.devices) == ["mlx5_0/1", "mlx5_1/1"]
    assert [device.device.key for device in found.others] == ["mlx5_2/1"]


def test_half_of_the_bytes_is_a_part_and_no_answer() -> None:
    fetched = run()
    assert one(fetched, Host(host="d0", received=by(fetched, times=0.5))).verdict is MediumVerdict.PART


def test_too_few_bytes_tell_nothing() -> None:
    fetched = run(size=1000)
    assert one(fetched, Host(host="d0", received=by(fetched))).verdict is MediumVerdict.CANNOT_TELL


def test_too_short_a_time_tells_nothing() -> None:
    fetched = [hand_off(60.0, 0.2)]
    assert one(fetched, Host(host="d0", received=by(fetched))).verdict is MediumVerdict.CANNOT_TELL


def test_fetches_at_one_steady_pace_are_reported_by_the_sums_or_not_at_all() -> None:
    steady = [hand_off(float(at), 1.0) for at in range(-3, int(UNTIL_S) + 3)]
    quiet, busy = (one(steady, Host(host="d0", received=by(steady, background=hum))) for hum in (20_000.0, 1e9))
    assert quiet.verdict is MediumVerdict.CARRIED
    assert busy.verdict is MediumVerdict.CANNOT_TELL
    assert one(steady, Host(host="d0", received=lambda at: 1000 * at)).verdict is MediumVerdict.NOT


@pytest.mark.parametrize("ahead_s", [-0.9, -0.3, 0.4, 1.0])
def test_where_clocks_may_be_off_what_fits_within_that_is_found(ahead_s: float) -> None:
    fetched = run()
    ahead = Host(host="d0", received=by(fetched), ahead_s=ahead_s)
    assert one(fetched, ahead, doubt_ns=S).verdict is MediumVerdict.CARRIED


def test_while_nobody_looked_nothing_is_counted() -> None:
    """The sidecar was away for half a minute; traffic in that time is in no window."""
    fetched = run()
    host = Host(host="d0", received=by(fetched))
    seen = [s for s in host.samples(UNTIL_S) if not 40 * S <= s.at_unix_ns - BEGAN <= 70 * S]
    pieces = [piece for each in fetched for piece in each.pieces]
    (found,) = carried(LinkFetches(Flow.of(pieces), NOTHING), counted(seen), "d0", RECEIVE)
    assert found.verdict is MediumVerdict.CARRIED
    assert found.windows < 95


def test_one_device_that_hung_does_not_hide_the_others() -> None:
    fetched = run()
    hung = Host(host="d0", device=replace(ETH, key="eth1")).samples(20.0)
    seen = [*Host(host="d0", received=by(fetched)).samples(UNTIL_S), *hung]
    pieces = [piece for each in fetched for piece in each.pieces]
    (found,) = carried(LinkFetches(Flow.of(pieces), NOTHING), counted(seen), "d0", RECEIVE)
    assert found.verdict is MediumVerdict.CARRIED
    assert found.windows > 20


def test_a_counter_that_began_again_goes_on() -> None:
    fetched = run()
    samples = Host(host="d0", received=by(fetched)).samples(UNTIL_S)
    restart_s = 60.0
    lost = by(fetched)(restart_s)
    again = []
    for sample in samples:
        later = sample.at_unix_ns - BEGAN > restart_s * S
        values = tuple(
            DeviceValue(name=v.name, value=v.value - int(lost), label=v.label, start_unix_ns=BEGAN + int(restart_s * S) + 1)
            if later and v.label == RECEIVE
            else v
            for v in sample.values
        )
        again.append(replace(sample, values=values))
    pieces = [piece for each in fetched for piece in each.pieces]
    (found,) = carried(LinkFetches(Flow.of(pieces), NOTHING), counted(again), "d0", RECEIVE)
    assert found.verdict is MediumVerdict.CARRIED


def test_two_sidecars_of_one_host_count_its_devices_once() -> None:
    fetched = run()
    twice = [Host(host="d0", received=by(fetched), sender=sender) for sender in ("one", "two")]
    assert one(fetched, *twice).share == pytest.approx(1.0, abs=0.02)


def test_a_bond_and_what_is_virtual_are_not_counted_beside_what_carries_them() -> None:
    fetched = run()
    bond = Device(kind=DeviceKind.NIC, key="bond0", product="bond", line_rate_bytes=6_250_000_000)
    member = replace(ETH, parent="bond0")
    vlan = Device(kind=DeviceKind.NIC, key="bond0.7", product="vlan")
    hosts = [Host(host="d0", device=device, received=by(fetched)) for device in (bond, member, vlan)]
    left = alone(devices(hosts, UNTIL_S))
    assert [each.device.key for each in left] == ["eth0"]


def test_where_there_is_no_adapter_the_virtual_interface_counts() -> None:
    veth = Device(kind=DeviceKind.NIC, key="eth0", product="virtual")
    assert [each.device.key for each in alone(devices([Host(host="d0", device=veth)], UNTIL_S))] == ["eth0"]


def test_B18_peak_beside_mean() -> None:
    """The peak is shown beside the mean.

    Decode carries 400 MB/s for 70 s, prefill has bursts of 4.5 GB/s. A mean over both describes neither.
    """

    def moved(at: float) -> float:
        bursts = sum(min(max(at - begin, 0.0), 1.0) for begin in (72.0, 80.0, 95.0))
        return 0.4e9 * min(at, 70.0) + 6.5e9 * bursts

    (device,) = devices([Host(host="d0", device=LO, received=moved)], UNTIL_S, every_s=0.1)
    mean, peak = device.peak(RECEIVE) or (0.0, 0.0)
    assert peak == pytest.approx(6.5e9, rel=0.01)
    assert mean == pytest.approx(moved(UNTIL_S) / UNTIL_S, rel=0.02)


def test_errors_are_what_they_grew_by() -> None:
    (device,) = devices([Host(host="d0", errors=(("symbol_error", 3), ("tx_dropped", 0)))], UNTIL_S)
    assert device.errors == {"symbol_error": 3}


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 50), st.floats(0.002, 20), st.integers(1, 10**10)), min_size=1, max_size=20))
def test_no_byte_of_a_fetch_is_lost_or_counted_twice(parts: list[tuple[float, float, int]]) -> None:
    pieces = [Piece(BEGAN + int(at * S), BEGAN + int((at + took) * S), size) for at, took, size in parts]
    edges = np.arange(BEGAN - S, BEGAN + 90 * S, S, dtype=np.int64)
    between = Flow.of(pieces).between(edges)
    assert between.sum() == pytest.approx(sum(piece.bytes for piece in pieces), rel=1e-6)
    assert between.min() >= -1.0


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 10**12), st.booleans()), min_size=1, max_size=30))
def test_a_curve_never_goes_down(readings: list[tuple[int, bool]]) -> None:
    start, points = 0, []
    for number, (value, restarted) in enumerate(readings):
        start = number if restarted else start
        points.append((number * S, float(value), start))
    moved = curve_of(points).moved
    assert (np.diff(moved) >= 0).all()


def busy_with_other_things(seed: int) -> Moved:
    random = Random(seed)
    bursts = [(random.uniform(0, UNTIL_S), random.uniform(0.2, 4.0), random.uniform(1e7, 2e9)) for _ in range(30)]
    return lambda at: sum(rate * min(max(at - begin, 0.0), took) for begin, took, rate in bursts)


@pytest.mark.parametrize("seed", range(40))
def test_coincidence_is_hardly_ever_taken_for_the_carrier(seed: int) -> None:
    """Bursts of other traffic are as large as the fetches.

    In 40 runs none is taken for the carrier.
    """
    other = Host(host="d0", received=busy_with_other_things(seed))
    assert one(run(seed), other).verdict is not MediumVerdict.CARRIED
    assert one(run(seed), other, doubt_ns=S).verdict is not MediumVerdict.CARRIED


@pytest.mark.parametrize("seed", range(40))
def test_beside_such_bursts_the_carrier_is_found_or_left_open(seed: int) -> None:
    fetched = run(seed)
    mine, others = by(fetched, times=1.03), busy_with_other_things(seed)
    found = one(fetched, Host(host="d0", received=lambda at: mine(at) + others(at)))
    assert found.verdict in (MediumVerdict.CARRIED, MediumVerdict.CANNOT_TELL, MediumVerdict.PART)


def test_only_devices_of_the_given_host_are_judged() -> None:
    fetched = run()
    hosts = [Host(host="d0", received=by(fetched)), Host(host="p0", sent=by(fetched))]
    pieces = [piece for each in fetched for piece in each.pieces]
    both: list[DeviceCounts] = devices(hosts, UNTIL_S)
    assert [found.verdict for found in carried(LinkFetches(Flow.of(pieces), NOTHING), both, "p0", TRANSMIT)] == [
        MediumVerdict.CARRIED
    ]
    assert [found.verdict for found in carried(LinkFetches(Flow.of(pieces), NOTHING), both, "p0", RECEIVE)] == [MediumVerdict.NOT]
    assert carried(LinkFetches(Flow.of(pieces), NOTHING), both, "p9", TRANSMIT) == []
