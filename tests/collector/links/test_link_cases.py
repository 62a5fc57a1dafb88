"""Reported cases about links, from the evidence to the finding."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from random import Random

import pytest

from builders.links import ETH, LO, P0_D0, RDMA, Host, S, by, devices, hand_off
from builders.records import process
from handrail.records import LogFact, Role, Source
from handrail.records.devices import Device, DeviceKind
from handrail_collector.links.devices import DeviceCounts
from handrail_collector.links.facts import link_fact_row, posts, queues
from handrail_collector.links.findings import SLOW, LinkFindingKind
from handrail_collector.links.handoffs import EngineLink, HandOff
from handrail_collector.links.report import LinkLine, link_lines
from handrail_collector.links.transport import Transport
from handrail_collector.rows import LinkFactRow
from handrail_sidecar.engine_logs.aggregate import Folder
from handrail_sidecar.engine_logs.line_header import read_head
from handrail_sidecar.engine_logs.lines import recognise

REPLAY = Path(__file__).parents[2] / "data/replay"
ONE_HOST = EngineLink("h:8100", "h:8200", "h", "h")
UNTIL_S = 120.0
MAY_2025 = round(datetime(2025, 5, 18, 12, tzinfo=timezone.utc).timestamp()) * S


def facts(name: str, instance: str = "d0:8000") -> list[LogFact]:
    """Return the facts of a log file, as the log source makes them."""
    folder = Folder(replace(process(Role.DECODE), instance=instance, host="d0", host_name="d0"), Source.LOG)
    for text in (REPLAY / "logs" / name).read_text().splitlines():
        head = read_head(text, MAY_2025, timezone.utc)
        line = recognise(head.message)
        if line is not None:
            folder.add(head, line, MAY_2025)
    return list(folder.take(MAY_2025, all_of_them=True))


def rows(name: str, instance: str = "d0:8000") -> list[LinkFactRow]:
    made = [link_fact_row(fact, offset) for offset, fact in enumerate(facts(name, instance))]
    return list({row.key: row for row in made if row is not None}.values())


def run(took_s: float = 1.3, size: int = 470_000_000, link: EngineLink = P0_D0, every_s: float = 4.0) -> list[HandOff]:
    return [hand_off(2.0 + every_s * n, took_s, size, link=link) for n in range(28)]


def line(
    hand_offs: Sequence[HandOff], devices: Sequence[DeviceCounts] = (), link_fact_rows: Sequence[LinkFactRow] = ()
) -> LinkLine:
    (found,) = link_lines(hand_offs, devices, link_fact_rows)
    return found


def kinds(found: LinkLine) -> set[LinkFindingKind]:
    return {finding.kind for finding in found.findings}


def texts(found: LinkLine) -> str:
    return "\n".join(f"{finding.seen} | {finding.advice}" for finding in found.findings)


def test_B01_the_lane_of_the_data_path_counts_not_the_list_of_what_is_built_in() -> None:
    link_fact_rows = rows("B01_ucx_lanes.log", "h:8200")
    found = line(run(link=ONE_HOST), link_fact_rows=link_fact_rows)
    assert found.transport.transport is Transport.TCP
    assert "tcp on eth1" in found.transport.evidence[0]
    assert {LinkFindingKind.TCP, LinkFindingKind.NO_PEER_TO_PEER, LinkFindingKind.SLOW_PATH} <= kinds(found)
    assert "the hand-off is on TCP, at 0.36 GB/s" in texts(found)
    assert not any(word in " ".join(found.transport.evidence) for word in ("NVLink", "cuda_ipc"))


def test_B01_a_lane_within_a_host_says_nothing_of_a_link_between_hosts() -> None:
    found = line(run(), link_fact_rows=rows("B01_ucx_lanes.log"))
    assert found.transport.transport is Transport.UNKNOWN


def test_B05_time_that_goes_into_submission_is_not_the_wire() -> None:
    (reported_posts,) = posts(rows("B05_kv_line_descriptors.log"))
    assert (reported_posts.transfers, reported_posts.descriptors, reported_posts.bytes) == (1, 112_000, round(4806.6 * 2**20))
    assert reported_posts.share == pytest.approx(0.726, abs=0.001)
    found = line(run(took_s=0.84, size=round(4806.6 * 2**20)), link_fact_rows=rows("B05_kv_line_descriptors.log"))
    (finding,) = (each for each in found.findings if each.kind is LinkFindingKind.SUBMISSION_BOUND)
    assert "73 % of a transfer's time" in finding.seen
    assert "112,000 descriptors" in finding.seen
    assert "block-size" in finding.advice
    assert LinkFindingKind.SLOW_PATH not in kinds(found)
    # 5722 MB/s of one rank is compared with nothing: it is not the link's rate
    assert "5.7" not in texts(found)
    assert "5.9" not in texts(found)


def test_B08_cold_start_and_time_limit_are_kept_apart_from_the_link() -> None:
    warm = [hand_off(40.0 + n, 0.06) for n in range(49)]
    assert kinds(line([hand_off(0.0, 38.1, handshake_ns=38 * S), *warm])) == {LinkFindingKind.COLD_START}
    hung = [hand_off(n, 300.0, outcome="timed_out", moved=False) for n in range(10)]
    found = line(hung)
    assert kinds(found) == {LinkFindingKind.TIME_LIMIT}
    assert "UCX_NET_DEVICES" in texts(found)
    assert not found.slow


@pytest.mark.parametrize(("connector", "took_s", "slow"), [("NixlConnector", 0.94, True), ("NixlPushConnector", 0.0096, False)])
def test_B10_pull_and_push_on_one_host(connector: str, took_s: float, slow: bool) -> None:
    """The finding needs no history.

    Half a gigabyte a second is no path between two GPUs of one host.
    """
    mode = "push" if "Push" in connector else "pull"
    run_of = [hand_off(4.0 * n, took_s, link=ONE_HOST, connector=connector, mode=mode) for n in range(20)]
    found = line(run_of)
    assert found.slow is slow
    assert (found.figures.connectors, found.figures.modes) == ((connector,), (mode,))
    assert ("pull over cuda_ipc: GET uses TCP" in texts(found)) is slow
    assert found.figures.rate == pytest.approx(470e6 / took_s)


def test_B19_a_rate_above_the_line_is_refused() -> None:
    """160 GB/s on a NIC of 50: all bytes over the time of the last chunk."""
    wrong = run(took_s=0.025, size=4_000_000_000)
    carriers = [
        Host(host="d0", device=RDMA, received=by(wrong)),
        Host(host="p0", device=RDMA, sent=by(wrong)),
    ]
    found = line(wrong, devices(carriers, UNTIL_S))
    assert found.transport.transport is Transport.RDMA
    assert kinds(found) == {LinkFindingKind.ABOVE_LINE}
    assert "160 GB/s while transferring is more than the line rate of 50.0 GB/s" in texts(found)


def test_B22_a_queue_at_bootstrap_is_not_a_slow_wire() -> None:
    expected = json.loads((REPLAY / "logs/B22_bootstrap_queue_expected.json").read_text())
    (queue,) = queues(rows("B22_bootstrap_queue.log", "p0:8000"))
    assert queue.ranks == expected["ranks"]
    assert (queue.bootstrapping, queue.transferring, queue.queued) == (
        expected["unbootstrapped"],
        expected["transferring"],
        expected["queue"],
    )
    assert queue.rate is not None
    assert queue.rate / 1e6 == pytest.approx(expected["node_throughput_mb_s"], abs=0.01)
    found = line(run(took_s=0.05), link_fact_rows=rows("B22_bootstrap_queue.log", "p0:8000"))
    (finding,) = found.findings
    assert finding.kind is LinkFindingKind.BOOTSTRAP_QUEUE
    assert "5,454 requests of 16 ranks at p0:8000 wait at bootstrap" in finding.seen
    assert "therefore its ranks together move only 77.7 MB/s" in finding.seen
    assert "decode" in finding.advice


def test_B18_the_peak_is_beside_the_mean() -> None:
    """The page and the answer show both figures of a device.

    test_carried and test_watch check how each is made.
    """
    fetched = run(took_s=0.1)
    found = line(fetched, devices([Host(host="d0", received=by(fetched))], UNTIL_S, every_s=0.1))
    (device,) = found.devices
    mean, peak = device.peak("receive") or (0.0, 0.0)
    assert peak > 3 * mean


def pair(hand_offs: Sequence[HandOff], device: Device, times: float = 1.03) -> list[Host]:
    link = hand_offs[0].link
    moved = by(hand_offs, times=times)
    return [
        Host(host=link.producer_host, device=device, sent=moved),
        Host(host=link.consumer_host, device=device, received=moved),
    ]


def test_tcp_though_both_hosts_have_rdma() -> None:
    fetched = run()
    idle = [Host(host=host, device=RDMA) for host in ("p0", "d0")]
    found = line(fetched, devices([*pair(fetched, ETH), *idle], UNTIL_S))
    assert found.transport.transport is Transport.TCP
    assert LinkFindingKind.TCP_THOUGH_RDMA in kinds(found)
    assert "mlx5_0/1 at d0, mlx5_0/1 at p0 are up" in texts(found)
    assert found.share_of_line == pytest.approx(0.1157, abs=0.001)


def test_tcp_where_the_port_of_one_host_is_down_is_no_fault_of_the_engine() -> None:
    fetched = run()
    idle = [Host(host="p0", device=RDMA), Host(host="d0", device=RDMA, up=False)]
    assert LinkFindingKind.TCP_THOUGH_RDMA not in kinds(line(fetched, devices([*pair(fetched, ETH), *idle], UNTIL_S)))


def test_rdma_at_its_line_rate_is_well() -> None:
    fetched = run(took_s=0.066, size=3_276_800_000)
    found = line(fetched, devices(pair(fetched, RDMA), UNTIL_S))
    assert (found.transport.transport, found.findings) == (Transport.RDMA, ())
    assert found.share_of_line == pytest.approx(0.993, abs=0.01)
    assert [device.name for device in found.transport.devices] == ["mlx5_0/1 at p0", "mlx5_0/1 at d0"]


def test_ip_over_infiniband_is_tcp_though_the_adapter_moves_too() -> None:
    fetched = run()
    ib0 = Device(kind=DeviceKind.NIC, key="ib0", product="adapter, mlx5_core")
    hosts = [*pair(fetched, ib0), *pair(fetched, RDMA)]
    assert line(fetched, devices(hosts, UNTIL_S)).transport.transport is Transport.TCP


def test_on_one_host_the_loopback_is_tcp() -> None:
    fetched = run(link=ONE_HOST)
    moved = by(fetched)
    found = line(fetched, devices([Host(host="h", device=LO, sent=moved, received=moved)], UNTIL_S))
    assert found.transport.transport is Transport.TCP
    assert "lo at h" in found.transport.evidence[0]


def test_the_only_port_of_several_at_its_limit() -> None:
    fetched = run(took_s=0.5, size=23_000_000_000)
    spare = replace(RDMA, key="mlx5_1/1")
    hosts = [*pair(fetched, RDMA), Host(host="p0", device=spare), Host(host="d0", device=spare)]
    found = line(fetched, devices(hosts, UNTIL_S))
    assert kinds(found) == {LinkFindingKind.ONE_OF_SEVERAL}
    assert "idle: mlx5_1/1 at p0, mlx5_1/1 at d0" in texts(found)


def test_the_only_port_of_several_far_from_its_limit_is_no_finding() -> None:
    fetched = run(took_s=0.5, size=10_000_000_000)
    spare = replace(RDMA, key="mlx5_1/1")
    hosts = [*pair(fetched, RDMA), Host(host="p0", device=spare), Host(host="d0", device=spare)]
    assert kinds(line(fetched, devices(hosts, UNTIL_S))) == set()


def test_without_samples_and_lines_it_is_unknown_and_says_what_would_tell() -> None:
    found = line(run())
    assert found.transport.transport is Transport.UNKNOWN
    assert "sidecars beside the engines" in found.transport.examined[0]


def test_where_nothing_moved_it_is_unknown_and_says_what_was_looked_at() -> None:
    fetched = run(link=ONE_HOST)
    hosts = [Host(host="h", device=LO), Host(host="h", device=ETH)]
    found = line(fetched, devices(hosts, UNTIL_S))
    assert found.transport.transport is Transport.UNKNOWN
    assert any(
        "the loopback of h received 0.00 bytes for each byte fetched: not by them" in each for each in found.transport.examined
    )


def test_counters_win_over_the_log_and_the_contradiction_is_reported() -> None:
    fetched = run(link=ONE_HOST)
    moved = by(fetched)
    carriers = devices([Host(host="h", device=RDMA, sent=moved, received=moved)], UNTIL_S)
    found = line(fetched, carriers, rows("B01_ucx_lanes.log", "h:8200"))
    assert found.transport.transport is Transport.RDMA
    assert LinkFindingKind.CONTRADICTION in kinds(found)


def test_one_end_that_says_not_me_is_believed() -> None:
    """A device that did not carry the bytes is not blamed.

    P's interface sent them and D's did not receive them. So they took another way, or they are another program's.
    """
    fetched = run()
    hosts = [Host(host="p0", sent=by(fetched)), Host(host="d0")]
    assert line(fetched, devices(hosts, UNTIL_S)).transport.transport is Transport.UNKNOWN


def test_errors_of_the_ports_that_carried_it() -> None:
    fetched = run(took_s=0.066, size=3_276_800_000)
    sent, received = pair(fetched, RDMA)
    hosts = [sent, replace(received, errors=(("out_of_sequence", 1234), ("duplicate_request", 9)))]
    found = line(fetched, devices(hosts, UNTIL_S))
    assert kinds(found) == {LinkFindingKind.LINK_ERRORS}
    assert "mlx5_0/1 at d0 counted 1,234 out_of_sequence meanwhile" in texts(found)


def test_links_of_one_host_share_its_devices() -> None:
    """Two P feed one D; D's port received the sum of both links."""
    one, two = run(), [replace(h, link=EngineLink("p1:8000", "d0:8000", "p1", "d0")) for h in run(every_s=4.1)]
    both = [*one, *two]
    hosts = [
        Host(host="p0", device=RDMA, sent=by(one)),
        Host(host="p1", device=RDMA, sent=by(two)),
        Host(host="d0", device=RDMA, received=by(both)),
    ]
    found = link_lines(both, devices(hosts, UNTIL_S))
    assert {each.transport.transport for each in found} == {Transport.RDMA}


def test_clocks_of_two_hosts_apart_by_a_known_bound() -> None:
    random = Random(3)
    fetched = [hand_off(2.0 + 4.0 * n + 2.0 * random.random(), 1.3) for n in range(28)]
    moved = by(fetched)
    hosts = [Host(host="p0", sent=moved, ahead_s=37.0), Host(host="d0", received=moved)]
    seen = devices(hosts, UNTIL_S)
    offsets = {("p0", "d0"): (-37_100_000_000, -36_900_000_000)}
    (known,) = link_lines(fetched, seen, offsets=offsets)
    (unknown,) = link_lines(fetched, seen)
    assert (known.transport.transport, unknown.transport.transport) == (Transport.TCP, Transport.UNKNOWN)


def test_tcp_at_the_speed_of_its_network_is_reported_and_not_called_slow() -> None:
    fetched = run(took_s=0.05)
    fast = replace(ETH, line_rate_bytes=12_500_000_000)
    found = line(fetched, devices(pair(fetched, fast), UNTIL_S))
    assert kinds(found) == {LinkFindingKind.TCP}
    assert not found.slow
    assert LinkFindingKind.TCP not in SLOW
