"""Choose the devices of a host to read."""

from __future__ import annotations

from pathlib import Path

import pytest

from doubles.sysfs import FakeSysfs
from handrail_sidecar.links.selection import MOST_DEVICES, choose
from handrail_sidecar.links.sysfs import Why


@pytest.fixture
def sysfs(tmp_path: Path) -> FakeSysfs:
    return FakeSysfs(tmp_path)


def keys(sysfs: FakeSysfs, *wanted: str) -> list[str]:
    return [reader.key for reader in choose(sysfs.root, wanted).readers]


def test_on_a_host_its_adapters_and_not_the_veths_of_its_containers(sysfs: FakeSysfs) -> None:
    sysfs.add_port()
    sysfs.add_loopback()
    sysfs.add_nic("eth0")
    sysfs.add_nic("bond0", real=False, bond=True)
    for number in range(3):
        sysfs.add_nic(f"veth{number}", real=False)
    assert keys(sysfs) == ["mlx5_0/1", "bond0", "eth0", "lo"]
    assert choose(sysfs.root).left_out == ("veth0", "veth1", "veth2")


def test_in_a_pod_its_virtual_interface(sysfs: FakeSysfs) -> None:
    sysfs.add_loopback()
    sysfs.add_nic("eth0", real=False)
    assert keys(sysfs) == ["eth0", "lo"]


def test_only_devices_named_or_matched_are_chosen(sysfs: FakeSysfs) -> None:
    for number in range(3):
        sysfs.add_port(f"mlx5_{number}")
    sysfs.add_nic("eth0")
    sysfs.add_nic("veth1", real=False)
    assert keys(sysfs, "mlx5_[01]/*", "veth1") == ["mlx5_0/1", "mlx5_1/1", "veth1"]
    assert choose(sysfs.root, ("nothing",)).left_out == ("eth0", "mlx5_0/1", "mlx5_1/1", "mlx5_2/1", "veth1")


def test_there_is_a_bound_and_what_is_above_it_is_named(sysfs: FakeSysfs) -> None:
    for number in range(MOST_DEVICES + 2):
        sysfs.add_nic(f"eth{number:03d}")
    chosen = choose(sysfs.root)
    assert len(chosen.readers) == MOST_DEVICES
    assert chosen.left_out == ("eth064", "eth065")


def test_without_sysfs(tmp_path: Path) -> None:
    chosen = choose(tmp_path / "nowhere")
    assert (chosen.readers, chosen.rdma, chosen.nics) == ((), Why.ABSENT, Why.ABSENT)
