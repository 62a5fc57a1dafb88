"""Ports of RDMA adapters in sysfs, with missing and unusual files."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from doubles.sysfs import STUCK_32, FakeSysfs, Refuses
from handrail.device_counters import link as names
from handrail.records.devices import DeviceKind
from handrail_sidecar.links import rdma
from handrail_sidecar.links.rdma import PortReader, rate_bytes
from handrail_sidecar.links.sysfs import Why

SENT, RECEIVED = (names.BYTES, names.TRANSMIT), (names.BYTES, names.RECEIVE)


@pytest.fixture
def sysfs(tmp_path: Path) -> FakeSysfs:
    return FakeSysfs(tmp_path)


def the_port(sysfs: FakeSysfs) -> PortReader:
    found = rdma.ports(str(sysfs.root))
    assert not isinstance(found, Why)
    (port,) = found
    return port


def test_words_of_four_bytes_are_bytes(sysfs: FakeSysfs) -> None:
    sysfs.add_port(sent=3_276_800_000, received=40)
    reading = the_port(sysfs).bytes_moved()
    assert reading.values == {SENT: 3_276_800_000, RECEIVED: 40}
    assert all(isinstance(value, int) for value in reading.values.values())


def test_a_counter_of_64_bits_stays_exact(sysfs: FakeSysfs) -> None:
    sysfs.add_port(counters={"port_xmit_data": 2**64 - 1})
    assert the_port(sysfs).bytes_moved().values[SENT] == (2**64 - 1) * 4


def test_what_a_port_is(sysfs: FakeSysfs) -> None:
    sysfs.add_port("mlx5_3", 1, layer="Ethernet", rate="200 Gb/sec (4X HDR)", pci="0000:9a:00.1")
    device = the_port(sysfs).device()
    assert (device.kind, device.key, device.pci) == (DeviceKind.RDMA, "mlx5_3/1", "0000:9a:00.1")
    assert (device.product, device.line_rate_bytes) == ("MT4129, Ethernet", 25_000_000_000)


@pytest.mark.parametrize(
    ("text", "bytes_per_second"),
    [
        ("400 Gb/sec (4X NDR)", 50_000_000_000),
        ("100 Gb/sec (4X EDR)", 12_500_000_000),
        ("2.5 Gb/sec (1X SDR)", 312_500_000),
        ("10 Gb/sec (4X)", 1_250_000_000),
        ("800 Gb/sec (8X NDR)", 100_000_000_000),
        ("0 Gb/sec (4X)", None),
        ("", None),
        ("fast", None),
        ("400 Mb/sec", None),
        ("-400 Gb/sec", None),
    ],
)
def test_a_rate_in_words(text: str, bytes_per_second: int | None) -> None:
    assert rate_bytes(text) == bytes_per_second


def test_a_port_that_is_down_has_no_line_rate(sysfs: FakeSysfs) -> None:
    """Its ``rate`` file says 10 Gb/sec, which is no rate of a working port."""
    sysfs.add_port(state="1: DOWN", rate="10 Gb/sec (4X)")
    port = the_port(sysfs)
    values = port.rest().values
    assert values[names.UP, ""] == 0
    assert (names.LINE_RATE, "") not in values
    assert port.device().line_rate_bytes is None


def test_a_port_that_carries_data(sysfs: FakeSysfs) -> None:
    sysfs.add_port(counters={"symbol_error": 65535, "port_xmit_wait": 12}, hw_counters={"out_of_sequence": 3, "np_cnp_sent": 9})
    values = the_port(sysfs).rest().values
    assert values[names.UP, ""] == 1
    assert values[names.LINE_RATE, ""] == 50_000_000_000
    assert (values[names.ERRORS, "symbol_error"], values[names.ERRORS, "out_of_sequence"]) == (65535, 3)
    assert (values[names.CONGESTION, "port_xmit_wait"], values[names.CONGESTION, "np_cnp_sent"]) == (12, 9)
    assert (values[names.PACKETS, names.TRANSMIT], values[names.PACKETS, names.RECEIVE]) == (7, 9)


def test_a_32_bit_counter_that_stands_still_is_not_a_number_of_bytes(sysfs: FakeSysfs) -> None:
    """A saturated 32-bit counter is no byte count.

    InfiniBand's counters do not wrap: an old adapter's stops at 16 GiB, which would look like an idle link.
    """
    sysfs.add_port(counters={"port_xmit_data": STUCK_32})
    reading = the_port(sysfs).bytes_moved()
    assert SENT not in reading.values
    assert reading.missing["counters/port_xmit_data"] is Why.STUCK
    assert reading.values[RECEIVED] == 0


def test_beside_it_the_64_bit_counter_of_OFED_counts_on(sysfs: FakeSysfs) -> None:
    folder = sysfs.add_port(counters={"port_xmit_data": STUCK_32})
    (folder / "counters_ext").mkdir()
    (folder / "counters_ext/port_xmit_data_64").write_text("5000000000\n")
    assert the_port(sysfs).bytes_moved().values[SENT] == 20_000_000_000


def test_an_adapter_that_counts_bytes_among_its_hardware_counters(sysfs: FakeSysfs) -> None:
    """EFA and bnxt_re count bytes among their hardware counters.

    They have no InfiniBand port counters. Theirs count bytes, not words.
    """
    folder = sysfs.add_port("rdmap0s6", hw_counters={"tx_bytes": 470, "rx_bytes": 12})
    for name in ("port_xmit_data", "port_rcv_data"):
        (folder / "counters" / name).unlink()
    assert the_port(sysfs).bytes_moved().values == {SENT: 470, RECEIVED: 12}


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (Refuses(), Why.REFUSED),
        ("", Why.GARBAGE),
        ("-1", Why.GARBAGE),
        ("1e9", Why.GARBAGE),
        ("0x10", Why.GARBAGE),
        ("12 34", Why.GARBAGE),
        ("٣", Why.GARBAGE),
        (str(2**64), Why.GARBAGE),
        ("1" * 5000, Why.GARBAGE),
        (b"\xff\xfe\x00", Why.GARBAGE),
    ],
    ids=["refused", "empty", "negative", "float", "hex", "two", "arabic", "huge", "endless", "binary"],
)
def test_what_is_no_count_is_absent_and_says_why(sysfs: FakeSysfs, content: object, why: Why) -> None:
    sysfs.add_port(counters={"port_rcv_data": content})
    reading = the_port(sysfs).bytes_moved()
    assert reading.values == {SENT: 0}
    assert reading.missing["counters/port_rcv_data"] is why
    assert not reading.gone


def test_a_port_without_any_counter_is_there_all_the_same(sysfs: FakeSysfs) -> None:
    folder = sysfs.add_port()
    sysfs.take_away(folder / "counters")
    port = the_port(sysfs)
    reading = port.bytes_moved()
    assert (reading.values, reading.gone) == ({}, False)
    assert set(reading.missing.values()) == {Why.ABSENT}
    assert port.rest().values[names.UP, ""] == 1


def test_a_port_that_was_taken_away_is_gone(sysfs: FakeSysfs) -> None:
    sysfs.add_port()
    port = the_port(sysfs)
    sysfs.take_away(sysfs.root / "class/infiniband/mlx5_0")
    assert port.bytes_moved().gone


def test_no_rdma_at_all(sysfs: FakeSysfs) -> None:
    assert rdma.ports(str(sysfs.root)) is Why.ABSENT


def test_a_name_that_no_driver_gives_is_no_label(sysfs: FakeSysfs) -> None:
    sysfs.add_port()
    (sysfs.root / "class/infiniband/.hidden/ports/1").mkdir(parents=True)
    (sysfs.root / ("class/infiniband/" + "x" * 80) / "ports/1").mkdir(parents=True)
    (sysfs.root / "class/infiniband/mlx5_0/ports/gids").mkdir()
    assert the_port(sysfs).key == "mlx5_0/1"


def test_another_adapter_under_the_same_name_is_distinguished(sysfs: FakeSysfs) -> None:
    sysfs.add_port()
    port = the_port(sysfs)
    before = port.identity()
    assert port.identity() == before
    (sysfs.root / "class/infiniband/mlx5_0/node_guid").write_text("0000:0000:0000:0001\n")
    assert port.identity() != before


@settings(deadline=None, max_examples=50)
@given(st.binary(max_size=64))
def test_no_content_of_any_file_breaks_a_reader(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    sysfs = FakeSysfs(tmp_path_factory.mktemp("sysfs"))
    folder = sysfs.add_port()
    for name in ("rate", "state", "link_layer", "counters/port_xmit_data", "counters/symbol_error"):
        (folder / name).write_bytes(content)
    port = the_port(sysfs)
    for reading in (port.bytes_moved(), port.rest()):
        assert all(value >= 0 for value in reading.values.values())
    assert port.device().key == "mlx5_0/1"
