"""Define the contract of a device reader, and one reading of a device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from handrail.records import Source
from handrail.records.devices import Device
from handrail_sidecar.links.sysfs import Why

Key = tuple[str, str]
"""A counter of ``device_counters.link`` and the value of its label."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceReading:
    """One reading of a device.

    ``missing``: why a file gave no value, by its name; only files that were looked for. ``gone``: the device is no longer there.
    """

    values: Mapping[Key, float] = field(default_factory=dict)
    missing: Mapping[str, Why] = field(default_factory=dict)
    gone: bool = False


class LinkReader(Protocol):
    """Reads one port or interface.

    Every method may block for as long as the driver does; none raises.
    """

    @property
    def key(self) -> str:
        """Key of the device, as in ``records.devices.Device.key``."""

    @property
    def source(self) -> Source:
        """Source of the record."""

    def bytes_moved(self) -> DeviceReading:
        """Read the bytes alone, which is done many times a second."""

    def rest(self) -> DeviceReading:
        """Read all counters of the table except the bytes."""

    def device(self) -> Device:
        """Return the device as it describes itself now."""

    def identity(self) -> str:
        """Return a text that changes when another device takes this name.

        It also changes when the same device is created again.
        """
