"""Turn samples of devices into curves of bytes moved over time. Pure.

The curves only grow, even where a counter restarts.
"""

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
    """Kind of traffic that a device counts."""

    NVLINK = "nvlink"
    PCIE = "pcie"
    RDMA = "rdma"
    NIC = "nic"
    LOOPBACK = "loopback"


@dataclass(frozen=True, slots=True)
class DeviceBytes:
    """Bytes that one device moved in one direction.

    ``at_ns``: wall clock of its host, increasing.
    ``moved``: bytes since the first reading.
    ``anew``: True where the counter was reset since the reading before; there the growth is a lower bound.
    """

    at_ns: Any  # int64
    moved: Any  # float64
    anew: Any  # bool

    def windows(self, window_ns: int, first_ns: int, last_ns: int) -> tuple[Any, Any]:
        """Return window edges, and the bytes between them.

        Each window is at least ``window_ns`` long. Each edge is at a reading of [first, last].
        A window in which a counter was reset is left out, with all windows before it.
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
    """Counters of one device of one host.

    ``errors``: growth of each error counter; counters that did not grow are left out.
    ``line_rate``: bytes a second that it can carry each way; None where it is not known.
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
        """Name of the device for people."""
        return f"{self.device.key} at {self.host}"

    def peak(self, direction: str) -> tuple[float, float] | None:
        """Return the mean and the highest rate, in bytes a second.

        The mean is over all the time. The highest is over any second, or over the time between two readings where that
        is longer.
        None for less than two seconds.
        """
        curve = self.curves.get(direction)
        if curve is None or len(curve.at_ns) < 2 or curve.at_ns[-1] - curve.at_ns[0] < 2 * SECOND:
            return None
        edges, moved = curve.windows(SECOND, int(curve.at_ns[0]), int(curve.at_ns[-1]))
        if len(moved) < 1:
            return None
        lengths = np.diff(edges) / SECOND
        return float(moved.sum() / lengths.sum()), float((moved / lengths).max())


def counted(samples: Iterable[DeviceSample]) -> list[DeviceCounts]:
    """Return the counters of each device once.

    Where several sidecars of a host read a device, the one with the most readings counts.
    """
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
"""Gauges of ``handrail.device_counters.gpu`` that hold a GPU's line rates.

The line rate of a port or an interface is in its description.
"""


def _media(device: Device) -> tuple[tuple[Medium, str], ...]:
    """Return the media that a device counts, and the name of each value."""
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
    """Build a curve from counter readings.

    ``points``: time, value, start of the count.
    After a reset, the value that the counter shows is a lower bound of the bytes moved since.
    """
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
    """Leave out devices whose bytes another device counts too.

    The members of a bond stay and the bond goes. An adapter stays and what is virtual on top of it goes.
    """
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
