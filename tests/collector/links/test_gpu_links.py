"""Links between GPUs of one host, from NVML's counters: NVLink and PCIe.

The tests also cover what these counters cannot show.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from builders.links import BEGAN, LO, Host, Moved, S, by, devices, hand_off, nothing, process
from handrail.conventions import GPU_NVLINK_BYTES, GPU_PCIE_BYTES, RECEIVE, TRANSMIT
from handrail.records import Source
from handrail.records.devices import Device, DeviceKind, DeviceSample, DeviceValue, runs
from handrail_collector.links.answer import devices as stored_devices
from handrail_collector.links.devices import DeviceCounts, Medium, counted
from handrail_collector.links.findings import LinkFindingKind
from handrail_collector.links.handoffs import EngineLink, HandOff
from handrail_collector.links.report import LinkLine, link_lines
from handrail_collector.links.transport import Transport
from handrail_collector.rows import LinkFactRow
from handrail_collector.store.publish import StorePublisher
from handrail_collector.store.read import StoreReader
from handrail_collector.store.schema import Table

ONE_HOST = EngineLink("h:8100", "h:8200", "h", "h")
UNTIL_S = 120.0


def run(took_s: float = 0.02, size: int = 470_000_000) -> list[HandOff]:
    return [hand_off(2.0 + 4.0 * n + 0.37 * (n % 5), took_s, size, link=ONE_HOST) for n in range(27)]


def gpu(index: int, *, nvlink: tuple[Moved, Moved] | None = None, pcie: tuple[Moved, Moved] | None = None) -> list[DeviceSample]:
    """Return one GPU's counters; ``nvlink`` and ``pcie``: bytes sent and received."""
    found = []
    for step in range(round(UNTIL_S / 0.5) + 1):
        at_s = step * 0.5
        values = [
            DeviceValue(name=name, value=int(moved(at_s)), label=label, start_unix_ns=BEGAN)
            for name, both in ((GPU_NVLINK_BYTES, nvlink), (GPU_PCIE_BYTES, pcie))
            if both is not None
            for label, moved in zip((TRANSMIT, RECEIVE), both, strict=True)
        ]
        values.append(DeviceValue(name="pcie_line_bytes_per_second", value=31.5e9))
        values.append(DeviceValue(name="nvlink_line_bytes_per_second", value=450e9))
        found.append(
            DeviceSample(
                process=process("h"),
                source=Source.NVML,
                device=Device(kind=DeviceKind.GPU, key=f"GPU-{index}", index=index),
                at_unix_ns=BEGAN + round(at_s * S),
                values=tuple(values),
            )
        )
    return found


def seen(*samples: Sequence[DeviceSample]) -> list[DeviceCounts]:
    loopback = devices([Host(host="h", device=LO)], UNTIL_S)
    return [*loopback, *counted(sample for of in samples for sample in of)]


def line(fetched: Sequence[HandOff], read: Sequence[DeviceCounts], *lanes: str) -> LinkLine:
    rows = [
        LinkFactRow(
            at_unix_ns=BEGAN,
            key=f"{n:016x}",
            offset=n,
            instance="h:8200",
            host="h",
            recogniser="ucx.lanes",
            rank="",
            lane=lane,
            nic="",
            reach="intra-node",
        )
        for n, lane in enumerate(lanes)
    ]
    (found,) = link_lines(fetched, read, rows)
    return found


def test_over_NVLink_with_the_line_rate_of_the_GPU() -> None:
    fetched = run()
    moved = by(fetched)
    hum = by((), background=3e9)  # traffic among the ranks of one engine
    found = line(
        fetched, seen(gpu(0, nvlink=(moved, hum), pcie=(nothing, nothing)), gpu(1, nvlink=(hum, moved), pcie=(nothing, nothing)))
    )
    assert found.transport.transport is Transport.NVLINK
    assert found.transport.line_rate == 450_000_000_000
    assert found.share_of_line == pytest.approx(23.5 / 450, rel=0.01)
    assert "GPU-0 at h sent" in found.transport.evidence[0]


@pytest.mark.parametrize(
    ("lane", "transport", "output"),
    [
        ("cuda_ipc", Transport.PCIE, None),
        ("sysv", Transport.HOST_STAGED, None),
        (None, Transport.PCIE, "these counters do not show whether from GPU to GPU or through host memory"),
    ],
)
def test_over_PCIe_the_log_tells_peer_to_peer_from_host_memory(
    lane: str | None, transport: Transport, output: str | None
) -> None:
    fetched = run(took_s=0.04)
    moved = by(fetched, times=1.1)
    read = seen(gpu(0, pcie=(moved, nothing)), gpu(1, pcie=(nothing, moved)))
    found = line(fetched, read, *([lane] if lane else []))
    assert found.transport.transport is transport
    assert output is None or output in found.transport.evidence
    assert (LinkFindingKind.HOST_STAGED in {finding.kind for finding in found.findings}) is (transport is Transport.HOST_STAGED)


def test_PCIe_that_moved_beside_the_loopback_is_a_copy_to_host_memory_on_the_way_to_TCP() -> None:
    fetched = run(took_s=0.9)
    moved = by(fetched)
    loopback = devices([Host(host="h", device=LO, sent=moved, received=moved)], UNTIL_S)
    gpus = counted([*gpu(0, pcie=(moved, nothing)), *gpu(1, pcie=(nothing, moved))])
    assert line(fetched, [*loopback, *gpus]).transport.transport is Transport.TCP


def test_PCIe_between_hosts_tells_nothing_of_what_lies_between_them() -> None:
    link = EngineLink("p0:8000", "h:8000", "p0", "h")
    fetched = [hand_off(2.0 + 4.0 * n, 0.04, link=link) for n in range(27)]
    (found,) = link_lines(fetched, counted(gpu(1, pcie=(nothing, by(fetched)))))
    assert found.transport.transport is Transport.UNKNOWN
    assert any("GPU-1 at h received" in each for each in found.transport.examined)


def test_shared_memory_by_the_log_alone() -> None:
    found = line(run(), seen(), "posix")
    assert found.transport.transport is Transport.HOST_STAGED


def test_two_lanes_of_different_kinds_are_no_answer() -> None:
    found = line(run(), seen(), "posix", "tcp")
    assert found.transport.transport is Transport.UNKNOWN


def test_the_line_rate_of_nvlink_and_pcie_comes_back_from_the_store(tmp_path: Path) -> None:
    publisher = StorePublisher(tmp_path / "store")
    publisher.open()
    publisher.publish(
        0, 10, 10, (), (), flat={Table.GPU_SAMPLES: runs(gpu(0, nvlink=(nothing, nothing), pcie=(nothing, nothing)))}
    )
    publisher.close()
    reader = StoreReader(tmp_path / "store", threads=1)
    found = stored_devices(reader, 0, 1 << 62, run(), 10, 60_000)
    reader.close()
    assert {each.medium: each.line_rate for each in found} == {Medium.NVLINK: 450_000_000_000, Medium.PCIE: 31_500_000_000}
