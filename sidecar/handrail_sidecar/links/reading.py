"""The contract of what reads one device, and one reading of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from handrail.records import Source
from handrail.records.devices import Device
from handrail_sidecar.links.sysfs import Why

Key = tuple[str, str]
"""A counter of ``counters.COUNTERS`` and the value of its label."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceReading:
    """``missing``: why a file gave nothing, by its name; only what was looked for. ``gone``: the device is not there any more."""

    values: Mapping[Key, float] = field(default_factory=dict)
    missing: Mapping[str, Why] = field(default_factory=dict)
    gone: bool = False


class LinkReader(Protocol):
    """Reads one port or interface. Every method may block for as long as the driver does; none raises."""

    @property
    def key(self) -> str:
        """As in ``hardware.Device.key``."""

    @property
    def source(self) -> Source:
        """What read it, for the record."""

    def bytes_moved(self) -> DeviceReading:
        """The bytes alone: what is read many times a second."""

    def rest(self) -> DeviceReading:
        """All of the table but the bytes."""

    def device(self) -> Device:
        """What the device says it is now."""

    def identity(self) -> str:
        """Changes when another device, or the same one made anew, stands under this name."""
