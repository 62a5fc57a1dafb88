"""What the devices of the hosts moved, over time: samples as curves that only grow, whatever restarts their counters. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from typing import Any, Final

import numpy as np

from handrail.conventions import GPU_NVLINK_BYTES, GPU_NVLINK_LINE, GPU_PCIE_BYTES, GPU_PCIE_LINE
from handrail.device_counters.link import BYTES, ERRORS, RECEIVE, TRANSMIT, UP, Nature
from handrail.records.devices import Device, DeviceKind, DeviceSample

SECOND: Final = 10**9


class Medium(str, Enum):
    """What kind of thing a device counts."""

    NVLINK = "nvlink"
    PCIE = "pcie"
    RDMA = "rdma"
    NIC = "nic"
    LOOPBACK = "loopback"


@dataclass(frozen=True, slots=True)
class DeviceBytes:
    """Bytes that one device moved in one direction. ``at_ns``: wall clock of its host, growing; ``moved``: since the first.

    ``anew``: where the counter had begun again since the reading before, so that what it shows is the least that was moved.
    """

    at_ns: Any  # int64
    moved: Any  # float64
    anew: Any  # bool

    def windows(self, window_ns: int, first_ns: int, last_ns: int) -> tuple[Any, Any]:
        """Edges of windows at least so long, each at a reading of [first, last], and the bytes between them.

        No window ends with a counter that began again within it: that window, and all before it, are left out.
        """
        inside = np.flatnonzero((self.at_ns >= first_ns) & (self.at_ns <= last_ns))
        begun = inside[self.anew[inside]]
        if len(begun):
            longest = max(np.split(inside, np.searchsorted(inside, begun)), key=len)
            inside = longest
        chosen, due = [], None
        for place in inside.tolist():
            if due is None or self.at_ns[place] >= due:
                chosen.append(place)
                due = self.at_ns[place] + window_ns
        return self.at_ns[chosen], np.diff(self.moved[chosen])


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceCounts:
    """One device of one host. ``errors``: by how much each error counter grew; those that did not are left out.

    ``line_rate``: bytes a second that it can carry each way, None where nothing says.
    """

    host: str
    device: Device
    medium: Medium
    curves: Mapping[str, DeviceBytes]  # by direction
    up: bool
    errors: Mapping[str, int]
    line_rate: int | None = None

    @property
    def name(self) -> str:
        """For a person."""
        return f"{self.device.key} at {self.host}"

    def peak(self, direction: str) -> tuple[float, float] | None:
        """Mean and highest rate in bytes a second: of all the time, and of any second (or of the time between two readings, where
        that is longer). None of less than two seconds."""
        curve = self.curves.get(direction)
        if curve is None or len(curve.at_ns) < 2 or curve.at_ns[-1] - curve.at_ns[0] < 2 * SECOND:
            return None
        edges, moved = curve.windows(SECOND, int(curve.at_ns[0]), int(curve.at_ns[-1]))
        if len(moved) < 1:
            return None
        lengths = np.diff(edges) / SECOND
        return float(moved.sum() / lengths.sum()), float((moved / lengths).max())


def counted(samples: Iterable[DeviceSample]) -> list[DeviceCounts]:
    """A device that several sidecars of a host read counts once: by the one that read it most often."""
    by_device: dict[tuple[str, str], dict[str, list[DeviceSample]]] = defaultdict(lambda: defaultdict(list))
    for sample in samples:
        process = sample.process
        by_device[process.host_name or process.host, sample.device.key][process.sender or process.instance].append(sample)
    found = []
    for (host, _), by_sender in sorted(by_device.items()):
        longest = max(by_sender.values(), key=len)
        read = sorted(longest, key=lambda sample: sample.at_unix_ns)
        found += [_counted(host, medium, name, read) for medium, name in _media(read[-1].device)]
    return [each for each in found if each.curves]


_GPU_LINES: Final = {Medium.PCIE: GPU_PCIE_LINE, Medium.NVLINK: GPU_NVLINK_LINE}
"""Gauges of ``handrail.device_counters.gpu``; a port's or an interface's line rate stands in its description."""


def _media(device: Device) -> tuple[tuple[Medium, str], ...]:
    """What a device counts, and under which name of a value."""
    if device.kind is DeviceKind.RDMA:
        return ((Medium.RDMA, BYTES),)
    if device.kind is DeviceKind.NIC:
        return ((Medium.LOOPBACK if device.product.startswith(Nature.LOOPBACK.value) else Medium.NIC, BYTES),)
    return (Medium.NVLINK, GPU_NVLINK_BYTES), (Medium.PCIE, GPU_PCIE_BYTES)


def _counted(host: str, medium: Medium, name: str, samples: Sequence[DeviceSample]) -> DeviceCounts:
    points: dict[str, list[tuple[int, float, int]]] = defaultdict(list)
    errors: dict[str, list[tuple[int, float, int]]] = defaultdict(list)
    up, line_rate = True, samples[-1].device.line_rate_bytes
    for sample in samples:
        for value in sample.values:
            if value.name == name and value.label in (RECEIVE, TRANSMIT):
                points[value.label].append((sample.at_unix_ns, value.value, value.start_unix_ns))
            elif value.name == ERRORS:
                errors[value.label].append((sample.at_unix_ns, value.value, value.start_unix_ns))
            elif value.name == UP:
                up = bool(value.value)
            elif value.name == _GPU_LINES.get(medium):
                line_rate = round(value.value)
    grown = {error: int(curve_of(found).moved[-1]) for error, found in errors.items()}
    return DeviceCounts(
        host=host,
        device=samples[-1].device,
        medium=medium,
        curves={direction: curve_of(found) for direction, found in points.items()},
        up=up,
        errors={error: count for error, count in grown.items() if count},
        line_rate=line_rate,
    )


def curve_of(points: Sequence[tuple[int, float, int]]) -> DeviceBytes:
    """``points``: time, value, since when it counts. Where it began again, what it shows was moved since: at least that much."""
    at, moved, anew, total = [points[0][0]], [0.0], [False], 0.0
    for (_, before, since), (time, value, start) in pairwise(points):
        again = start != since or value < before
        total += value if again else value - before
        if time > at[-1]:
            at.append(time)
            moved.append(total)
            anew.append(again)
    return DeviceBytes(np.array(at, np.int64), np.array(moved), np.array(anew))


def alone(devices: Iterable[DeviceCounts]) -> list[DeviceCounts]:
    """Without those whose bytes another one counts too: a bond's members are told, not the bond; where there is an adapter,
    what is virtual on top of it is not told."""
    listed = list(devices)
    members = {(each.host, each.device.parent) for each in listed if each.device.parent}
    real = {each.host for each in listed if each.medium is Medium.NIC and _real(each.device)}
    return [
        each
        for each in listed
        if each.medium is not Medium.NIC
        or ((each.host, each.device.key) not in members and (_real(each.device) or each.host not in real))
    ]


def _real(device: Device) -> bool:
    return device.product.partition(",")[0] in (Nature.ADAPTER.value, Nature.FUNCTION.value)
