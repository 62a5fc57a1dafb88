"""Read ports of RDMA adapters from ``/sys/class/infiniband``.

Source: Documentation/ABI/stable/sysfs-class-infiniband of the kernel.
``port_xmit_data`` and ``port_rcv_data`` count words of 4 bytes, whatever the width of the link.
Old adapters keep them in 32 bits that stop at the top (InfiniBand Architecture 16.1.3.5); OFED adds 64-bit counters for these in
``counters_ext``. EFA, bnxt_re and other Ethernet adapters have bytes in ``hw_counters`` instead.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from handrail.device_counters import link as names
from handrail.records import Source
from handrail.records.devices import Device, DeviceKind
from handrail_sidecar.links import sysfs
from handrail_sidecar.links.reading import DeviceReading, Key
from handrail_sidecar.links.sysfs import Why

CLASS: Final = "class/infiniband"
WORD_BYTES: Final = 4
STUCK: Final = 2**32 - 1
ACTIVE: Final = "ACTIVE"

_PORT: Final = re.compile(r"\d{1,3}")
_RATE: Final = re.compile(r"(\d{1,6}(?:\.\d{1,3})?) Gb/sec\b(?: \((\d{1,2})X)?")

_WORDS: Final = "words"
_PLAIN: Final = "plain"
_BYTES: Final = {
    names.TRANSMIT: (
        ("counters_ext/port_xmit_data_64", _WORDS),
        ("counters/port_xmit_data", _WORDS),
        ("hw_counters/tx_bytes", _PLAIN),
    ),
    names.RECEIVE: (
        ("counters_ext/port_rcv_data_64", _WORDS),
        ("counters/port_rcv_data", _WORDS),
        ("hw_counters/rx_bytes", _PLAIN),
    ),
}
"""Files in the order of preference, and their unit."""

_PACKETS: Final = {
    names.TRANSMIT: ("counters/port_xmit_packets", "hw_counters/tx_pkts"),
    names.RECEIVE: ("counters/port_rcv_packets", "hw_counters/rx_pkts"),
}

ERRORS: Final = (
    "counters/symbol_error",
    "counters/link_error_recovery",
    "counters/link_downed",
    "counters/port_rcv_errors",
    "counters/port_rcv_remote_physical_errors",
    "counters/port_xmit_discards",
    "counters/local_link_integrity_errors",
    "counters/excessive_buffer_overrun_errors",
    "counters/VL15_dropped",
    "hw_counters/out_of_sequence",
    "hw_counters/packet_seq_err",
    "hw_counters/local_ack_timeout_err",
    "hw_counters/rnr_nak_retry_err",
    "hw_counters/duplicate_request",
    "hw_counters/roce_adp_retrans_to",
    "hw_counters/rx_icrc_encapsulated",
    "hw_counters/retrans_pkts",
    "hw_counters/retrans_timeout_events",
    "hw_counters/rx_drops",
)
CONGESTION: Final = (
    "counters/port_xmit_wait",
    "hw_counters/np_ecn_marked_roce_packets",
    "hw_counters/np_cnp_sent",
    "hw_counters/rp_cnp_handled",
)


def ports(root: str) -> list[PortReader] | Why:
    """Return a reader for each port, or why the class cannot be listed.

    ``root``: sysfs.
    """
    adapters = sysfs.entries(f"{root}/{CLASS}")
    if isinstance(adapters, Why):
        return adapters
    found = []
    for adapter in adapters:
        numbers = sysfs.entries(f"{root}/{CLASS}/{adapter}/ports") if sysfs.NAME.fullmatch(adapter) else Why.GARBAGE
        if not isinstance(numbers, Why):
            found += [PortReader(f"{root}/{CLASS}/{adapter}", adapter, number) for number in numbers if _PORT.fullmatch(number)]
    return found


@dataclass(frozen=True, slots=True)
class PortReader:
    """Reader of one port of one adapter."""

    folder: str  # of the adapter
    adapter: str
    port: str
    # the file that provides a direction, and its unit
    _known: dict[str, tuple[str, str]] = field(default_factory=dict, init=False, compare=False, repr=False)

    @property
    def key(self) -> str:
        return f"{self.adapter}/{self.port}"

    @property
    def source(self) -> Source:
        return Source.RDMA

    @property
    def folder_of_port(self) -> str:
        """Folder of the port's files."""
        return f"{self.folder}/ports/{self.port}"

    def bytes_moved(self) -> DeviceReading:
        values: dict[Key, float] = {}
        missing: dict[str, Why] = {}
        for direction, files in _BYTES.items():
            found = self._first(files, missing, direction)
            if found is not None:
                values[names.BYTES, direction] = found
        return DeviceReading(values=values, missing=missing, gone=not values and self._is_gone(missing))

    def rest(self) -> DeviceReading:
        values: dict[Key, float] = {}
        missing: dict[str, Why] = {}
        self._known.clear()  # a better file may exist now
        for direction, files in _PACKETS.items():
            found = self._first(tuple((file, _PLAIN) for file in files), missing)
            if found is not None:
                values[names.PACKETS, direction] = found
        for name, paths in ((names.ERRORS, ERRORS), (names.CONGESTION, CONGESTION)):
            for path in paths:
                found = self._first(((path, _PLAIN),), missing)
                if found is not None:
                    values[name, path.rpartition("/")[2]] = found
        values[names.UP, ""] = float(self.up())
        rate = self.line_rate_bytes()
        if rate is not None:
            values[names.LINE_RATE, ""] = rate
        return DeviceReading(values=values, missing=missing)

    def device(self) -> Device:
        product = sysfs.text(f"{self.folder}/hca_type")
        words = [each[:64] for each in (product, self.describe("link_layer")) if not isinstance(each, Why) and each]
        return Device(
            kind=DeviceKind.RDMA,
            key=self.key,
            product=", ".join(words),
            pci=sysfs.pci(f"{self.folder}/device"),
            line_rate_bytes=self.line_rate_bytes(),
        )

    def identity(self) -> str:
        """Return the adapter's GUID and the inode of its folder.

        The inode changes when the driver is loaded again.
        """
        guid = sysfs.text(f"{self.folder}/node_guid")
        try:
            made = os.stat(self.folder).st_ino
        except OSError:
            made = 0
        return f"{guid if not isinstance(guid, Why) else ''} {made}"

    def up(self) -> bool:
        """Return whether the port carries data."""
        return self.state() == ACTIVE

    def state(self) -> str:
        """Return the port's state, ``ACTIVE`` of ``4: ACTIVE``; '' if unreadable."""
        return _word(self.describe("state"))

    def physical_state(self) -> str:
        """Return the physical state, ``LinkUp`` of ``5: LinkUp``; '' if unreadable."""
        return _word(self.describe("phys_state"))

    def line_rate_bytes(self) -> int | None:
        """Return the bytes per second and direction of a port that is up.

        None when it is down: such a port reports 10 Gb/sec or 2.5, which means nothing.
        """
        return rate_bytes(self.describe("rate")) if self.up() else None

    def lanes(self) -> int | None:
        """Return the lanes with which the port came up: 4 for ``400 Gb/sec (4X NDR)``."""
        found = _RATE.match(self.describe("rate"))
        return int(found[2]) if found is not None and found[2] else None

    def describe(self, file: str) -> str:
        """Return the content of a file of the port; '' when it cannot be read."""
        text = sysfs.text(f"{self.folder_of_port}/{file}")
        return "" if isinstance(text, Why) else text

    def _first(self, files: tuple[tuple[str, str], ...], missing: dict[str, Why], direction: str = "") -> int | None:
        """Return the value of the first file that has one.

        ``direction``: of bytes; the file is remembered for it and tried first.
        """
        tried: dict[str, Why] = {}
        known = self._known.get(direction)
        for file, unit in (known, *files) if known is not None else files:
            if file in tried:
                continue
            found = self._value(file, unit)
            if not isinstance(found, Why):
                if direction:
                    self._known[direction] = (file, unit)
                return found
            tried[file] = found
        missing.update(tried)
        return None

    def _value(self, file: str, unit: str) -> int | Why:
        """Return the value of a file; words are converted to bytes.

        A counter that is stuck in one file may go on in the next.
        """
        raw = sysfs.count(f"{self.folder_of_port}/{file}")
        if unit != _WORDS or isinstance(raw, Why):
            return raw
        return Why.STUCK if raw == STUCK else raw * WORD_BYTES

    def _is_gone(self, missing: Mapping[str, Why]) -> bool:
        return Why.GONE in missing.values() or not os.path.isdir(self.folder_of_port)


def _word(text: str) -> str:
    number, colon, word = text.partition(":")
    return word.strip() if colon and number.isdecimal() else text


def rate_bytes(text: str) -> int | None:
    """Parse ``400 Gb/sec (4X NDR)`` as bytes per second; None for any other form.

    Decimals count, as in ``2.5 Gb/sec (1X SDR)``.
    """
    found = _RATE.match(text)
    rate = round(float(found[1]) * 1e9 / 8) if found is not None else 0
    return rate or None
