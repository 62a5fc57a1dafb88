"""Define the data that ``handrail gpus`` shows.

It is the values of a period, and everything about the GPUs of this host.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from handrail.records.devices import Device, DeviceSample, DeviceValue
from handrail_sidecar.gpu.processes import GpuProcess
from handrail_sidecar.gpu.view import Absent
from handrail_sidecar.gpu.visible import Visible


@dataclass(slots=True)
class GpuWindow:
    """First and last value of every counter, with their times."""

    first: dict[tuple[str, str, str], tuple[int, DeviceValue]] = field(default_factory=dict)
    last: dict[tuple[str, str, str], tuple[int, DeviceValue]] = field(default_factory=dict)

    def take(self, sample: DeviceSample) -> None:
        for value in sample.values:
            key = (sample.device.key, value.name, value.label)
            self.last[key] = (sample.at_unix_ns, value)
            self.first.setdefault(key, self.last[key])

    def value(self, uuid: str, name: str, label: str = "") -> float | None:
        """Return the last value; None without any."""
        found = self.last.get((uuid, name, label))
        return found[1].value if found is not None else None

    def rate(self, uuid: str, name: str, label: str) -> float | None:
        """Return a counter's growth per second.

        None where it was read once or was reset.
        """
        first, last = self.first.get((uuid, name, label)), self.last.get((uuid, name, label))
        if first is None or last is None or last[0] <= first[0] or first[1].start_unix_ns != last[1].start_unix_ns:
            return None
        return (last[1].value - first[1].value) / (last[0] - first[0]) * 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuListing:
    """Everything that the command shows."""

    driver: str
    nvml: str
    devices: tuple[Device, ...]
    seen: GpuWindow
    absent: tuple[Absent, ...]
    lost: Mapping[int, int]
    stuck: tuple[tuple[str, str, float], ...]  # UUID, call, seconds
    processes: tuple[GpuProcess, ...]
    visible: Visible
    failures: Mapping[int, int]
