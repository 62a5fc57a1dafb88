"""Read network interfaces from ``/sys/class/net``.

Source: Documentation/ABI/testing/sysfs-class-net and -statistics of the kernel.
The counters are those of the kernel's network stack: they do not include what an RDMA adapter moves by itself.
Bytes are 64 bits wide on every kernel that runs an inference engine.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from handrail.device_counters import link as names
from handrail.device_counters.link import Nature
from handrail.records import Source
from handrail.records.devices import Device, DeviceKind
from handrail_sidecar.links import sysfs
from handrail_sidecar.links.reading import DeviceReading, Key
from handrail_sidecar.links.sysfs import Why

CLASS: Final = "class/net"
LOOPBACK_TYPE: Final = 772  # ARPHRD_LOOPBACK
UNKNOWN_SPEEDS: Final = frozenset({0, 65535, 4294967295})  # -1 as older kernels and drivers print it

_BYTES: Final[Mapping[str, Key]] = {
    "tx_bytes": (names.BYTES, names.TRANSMIT),
    "rx_bytes": (names.BYTES, names.RECEIVE),
}
_REST: Final[Mapping[str, Key]] = {
    "tx_packets": (names.PACKETS, names.TRANSMIT),
    "rx_packets": (names.PACKETS, names.RECEIVE),
    **{
        name: (names.ERRORS, name)
        for name in (
            "rx_errors",
            "tx_errors",
            "rx_dropped",
            "tx_dropped",
            "rx_missed_errors",
            "rx_fifo_errors",
            "tx_fifo_errors",
            "rx_crc_errors",
        )
    },
}


def interfaces(root: str) -> list[NicReader] | Why:
    """Return a reader for each interface of this network namespace. ``root``: sysfs."""
    found = sysfs.entries(f"{root}/{CLASS}")
    if isinstance(found, Why):
        return found
    folders = {name: f"{root}/{CLASS}/{name}" for name in found if sysfs.NAME.fullmatch(name)}
    return [NicReader(folder, name) for name, folder in folders.items() if os.path.isdir(folder)]


@dataclass(frozen=True, slots=True)
class NicReader:
    """Reader of one network interface."""

    folder: str
    key: str

    @property
    def source(self) -> Source:
        return Source.NIC

    def nature(self) -> Nature:
        """Return the kind of interface, from files that need no driver call."""
        folder = self.folder
        if sysfs.count(f"{folder}/type") == LOOPBACK_TYPE:
            return Nature.LOOPBACK
        if os.path.exists(f"{folder}/device"):
            return Nature.FUNCTION if os.path.exists(f"{folder}/device/physfn") else Nature.ADAPTER
        if os.path.isdir(f"{folder}/bonding"):
            return Nature.BOND
        uevent = sysfs.text(f"{folder}/uevent")
        words = uevent.split() if not isinstance(uevent, Why) else ()
        return Nature.VLAN if "DEVTYPE=vlan" in words else Nature.VIRTUAL

    def bytes_moved(self) -> DeviceReading:
        reading = self._read(_BYTES)
        gone = not reading.values and (Why.GONE in reading.missing.values() or not os.path.isdir(self.folder))
        return DeviceReading(values=reading.values, missing=reading.missing, gone=gone)

    def rest(self) -> DeviceReading:
        reading = self._read(_REST)
        values = dict(reading.values)
        values[names.UP, ""] = float(self.up())
        for name, value in ((names.LINE_RATE, self.line_rate_bytes()), (names.MTU, self.mtu())):
            if value is not None:
                values[name, ""] = value
        return DeviceReading(values=values, missing=reading.missing)

    def device(self) -> Device:
        nature, driver = self.nature(), sysfs.target(f"{self.folder}/device/driver")
        return Device(
            kind=DeviceKind.NIC,
            key=self.key,
            product=f"{nature.value}, {driver[:64]}" if driver else nature.value,
            pci=sysfs.pci(f"{self.folder}/device"),
            line_rate_bytes=self.line_rate_bytes(),
            parent=sysfs.target(f"{self.folder}/master"),
        )

    def identity(self) -> str:
        """Return the interface's index, which changes when it is created again."""
        index = sysfs.text(f"{self.folder}/ifindex")
        return index if not isinstance(index, Why) else ""

    def up(self) -> bool:
        """Return whether the interface carries data, by ``operstate`` (RFC 2863).

        The loopback and tunnels report ``unknown`` and carry data all the same.
        """
        state = sysfs.text(f"{self.folder}/operstate")
        if state == "unknown":
            return sysfs.text(f"{self.folder}/carrier") != "0"
        return state == "up"

    def line_rate_bytes(self) -> int | None:
        """Return the line rate from ``speed``, which is in Mb/s.

        None when the interface is down (EINVAL, -1), or the speed is unknown or nominal.
        """
        if self.nature() in (Nature.LOOPBACK, Nature.VIRTUAL):
            return None
        speed = sysfs.count(f"{self.folder}/speed")  # -1 is no count
        if isinstance(speed, Why) or speed in UNKNOWN_SPEEDS:
            return None
        return speed * 1_000_000 // 8

    def mtu(self) -> int | None:
        """Return the largest packet, in bytes."""
        found = sysfs.count(f"{self.folder}/mtu")
        return None if isinstance(found, Why) else found

    def _read(self, files: Mapping[str, Key]) -> DeviceReading:
        values: dict[Key, float] = {}
        missing: dict[str, Why] = {}
        folder = f"{self.folder}/statistics"
        for name, key in files.items():
            found = sysfs.count(f"{folder}/{name}")
            if isinstance(found, Why):
                missing[name] = found
            else:
                values[key] = found
        return DeviceReading(values=values, missing=missing)
