"""Network interfaces in sysfs, with missing and unusual files."""

from __future__ import annotations

from pathlib import Path

import pytest

from doubles.sysfs import FakeSysfs, Refuses
from handrail.device_counters import link as names
from handrail.device_counters.link import Nature
from handrail.records.devices import DeviceKind
from handrail_sidecar.links import nic
from handrail_sidecar.links.nic import NicReader
from handrail_sidecar.links.sysfs import Why
from harness.skips import skip_unable

SENT, RECEIVED = (names.BYTES, names.TRANSMIT), (names.BYTES, names.RECEIVE)


@pytest.fixture
def sysfs(tmp_path: Path) -> FakeSysfs:
    return FakeSysfs(tmp_path)


def reader(sysfs: FakeSysfs, name: str = "eth0") -> NicReader:
    found = nic.interfaces(str(sysfs.root))
    assert not isinstance(found, Why)
    return next(each for each in found if each.key == name)


def test_bytes_as_they_are(sysfs: FakeSysfs) -> None:
    sysfs.add_nic(sent=470_000_000, received=12)
    assert reader(sysfs).bytes_moved().values == {SENT: 470_000_000, RECEIVED: 12}


def test_an_adapter_and_its_speed(sysfs: FakeSysfs) -> None:
    sysfs.add_nic(speed=25_000, mtu=9000)
    device = reader(sysfs).device()
    assert (device.kind, device.key, device.pci) == (DeviceKind.NIC, "eth0", "0000:5e:00.1")
    assert (device.product, device.line_rate_bytes) == ("adapter, mlx5_core", 3_125_000_000)
    values = reader(sysfs).rest().values
    assert (values[names.UP, ""], values[names.LINE_RATE, ""], values[names.MTU, ""]) == (1, 3_125_000_000, 9000)


@pytest.mark.parametrize(
    "speed",
    [-1, 0, 65535, 4294967295, Refuses(), "", "fast"],
    ids=["minus", "zero", "16 bits", "32 bits", "EINVAL", "empty", "word"],
)
def test_a_speed_that_is_not_known_is_no_line_rate(sysfs: FakeSysfs, speed: object) -> None:
    sysfs.add_nic(speed=speed, state="down")
    found = reader(sysfs)
    assert found.line_rate_bytes() is None
    assert (names.LINE_RATE, "") not in found.rest().values
    assert found.rest().values[names.UP, ""] == 0


def test_the_nominal_speed_of_a_virtual_interface_is_no_line_rate(sysfs: FakeSysfs) -> None:
    """A veth reports 10000 Mb/s whatever it is connected to, a tun 10."""
    sysfs.add_nic("veth1", speed=10_000, real=False)
    assert reader(sysfs, "veth1").nature() is Nature.VIRTUAL
    assert reader(sysfs, "veth1").line_rate_bytes() is None


def test_the_loopback_is_up_though_its_state_is_unknown(sysfs: FakeSysfs) -> None:
    sysfs.add_loopback(moved=99)
    found = reader(sysfs, "lo")
    assert (found.nature(), found.up(), found.line_rate_bytes()) == (Nature.LOOPBACK, True, None)
    assert found.bytes_moved().values == {SENT: 99, RECEIVED: 99}


def test_bond_members_vlan_and_virtual_function(sysfs: FakeSysfs) -> None:
    (sysfs.root / "class/net").mkdir(parents=True)
    (sysfs.root / "class/net/bonding_masters").write_text("bond0\n")  # a file among the folders
    sysfs.add_nic("bond0", speed=200_000, real=False, bond=True)
    sysfs.add_nic("eth0", speed=100_000, master="bond0")
    sysfs.add_nic("eth0.7", speed=100_000, real=False, uevent="DEVTYPE=vlan\nINTERFACE=eth0.7")
    sysfs.add_nic("eth0v2", speed=100_000, function=True)
    found = nic.interfaces(str(sysfs.root))
    assert not isinstance(found, Why)
    natures = {each.key: each.nature() for each in found}
    assert natures == {
        "bond0": Nature.BOND,
        "eth0": Nature.ADAPTER,
        "eth0.7": Nature.VLAN,
        "eth0v2": Nature.FUNCTION,
    }
    assert reader(sysfs, "eth0").device().parent == "bond0"
    assert reader(sysfs, "bond0").line_rate_bytes() == 25_000_000_000


def test_errors_keep_the_names_of_their_files(sysfs: FakeSysfs) -> None:
    folder = sysfs.add_nic()
    (folder / "statistics/rx_missed_errors").write_text("17\n")
    values = reader(sysfs).rest().values
    assert values[names.ERRORS, "rx_missed_errors"] == 17
    assert (names.ERRORS, "rx_crc_errors") not in values  # this driver has no such file
    assert reader(sysfs).rest().missing["rx_crc_errors"] is Why.ABSENT


def test_an_interface_that_was_taken_away_is_gone(sysfs: FakeSysfs) -> None:
    folder = sysfs.add_nic()
    found = reader(sysfs)
    sysfs.take_away(folder)
    assert found.bytes_moved().gone


def test_one_that_counts_nothing_is_not_gone(sysfs: FakeSysfs) -> None:
    folder = sysfs.add_nic()
    sysfs.take_away(folder / "statistics")
    assert not reader(sysfs).bytes_moved().gone


def test_made_anew_under_the_same_name_it_is_another(sysfs: FakeSysfs) -> None:
    sysfs.add_nic(index=2)
    before = reader(sysfs).identity()
    sysfs.add_nic(index=14)
    assert reader(sysfs).identity() != before


def test_the_real_interfaces_of_this_host_can_be_read() -> None:
    found = nic.interfaces("/sys")
    if isinstance(found, Why):
        skip_unable(f"/sys/class/net: {found.value}")
    for each in found:
        reading = each.bytes_moved()
        assert set(reading.values) == {SENT, RECEIVED}
        assert each.device().kind is DeviceKind.NIC
    assert Nature.LOOPBACK in {each.nature() for each in found}
