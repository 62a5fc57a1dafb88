"""Align samples of GPUs and links at P and D with one request's own time. Pure.

A value holds for the interval that ends with its sample: a gauge describes the time since the previous sample, a counter moved by
so much since then.
Times are by the host's own clock, shifted by the known offset from the clock of the request's start. The bound of that shift
stands beside them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from typing import Final

from handrail import conventions as names
from handrail.clock_offset import OffsetInterval
from handrail.records.devices import Device, DeviceKind, DeviceSample

TRACKED: Final = frozenset(
    {
        names.GPU_BUSY,
        names.GPU_SM_ACTIVE,
        names.GPU_TENSOR_ACTIVE,
        names.GPU_DRAM_ACTIVE,
        names.GPU_PCIE_BYTES,
        names.GPU_NVLINK_BYTES,
        names.LINK_BYTES,
        "power_watts",
        "clock_hertz",
        "throttled",
    }
)
"""Counters that are shown for a request."""

LINES: Final = frozenset({names.GPU_PCIE_LINE, names.GPU_NVLINK_LINE})
"""Line rates of a GPU's links, shown with the traffic.

They are sampled only every 10 s.
"""

LONGEST_HOLD_NS: Final = 2_000_000_000
"""Longest time before its sample that a gauge describes."""


class DeviceChoice(str, Enum):
    """Why these devices were chosen."""

    ENGINE = "engine"  # the devices' samples name this engine
    SIDECAR = "sidecar"  # the engine's own sidecar sampled them: all of its host, perhaps more than the engine uses
    HOST = "host"  # another sidecar of that host did


@dataclass(frozen=True, slots=True)
class Offset:
    """The host's clock minus the clock of the request's start.

    ``shift_ns`` was subtracted from the samples' times.
    ``bound_ns``: the bound of these times; None where nothing bounds them. ``same``: both share one clock.
    """

    same: bool
    shift_ns: int
    bound_ns: int | None


@dataclass(frozen=True, slots=True)
class Track:
    """One counter as a series.

    ``from_ns``, ``to_ns``: from the request's start; ``values``: counters as a rate per second.
    """

    name: str
    label: str
    per_second: bool
    from_ns: tuple[int, ...]
    to_ns: tuple[int, ...]
    values: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class DeviceTracks:
    """The series of one device."""

    device: Device
    tracks: tuple[Track, ...]


@dataclass(frozen=True, slots=True)
class PlaceDevices:
    """The devices at one place of the path.

    ``place``: ``prefill`` or ``decode``. ``chosen``: why these GPUs, or these links where there are no GPUs; None: no samples.
    ``others``: number of the host's devices that were left out.
    """

    place: str
    instance: str
    host: str
    offset: Offset
    chosen: DeviceChoice | None
    devices: tuple[DeviceTracks, ...]
    others: int


def clock_offset(offset: OffsetInterval | None, same: bool) -> Offset:
    """Return the shift for a host's clock; ``offset`` None: nothing is known of it."""
    if same:
        return Offset(same=True, shift_ns=0, bound_ns=0)
    if offset is None or offset.low_ns is None or offset.high_ns is None or offset.contradictory:
        return Offset(same=False, shift_ns=0, bound_ns=None)
    middle = (offset.low_ns + offset.high_ns) // 2
    return Offset(same=False, shift_ns=middle, bound_ns=offset.high_ns - middle)


def between(pairs: Mapping[tuple[str, str], OffsetInterval], a: str, b: str) -> OffsetInterval | None:
    """Return the clock of host ``b`` minus that of ``a``, from the known pairs.

    Pairs are (host, peer). Other hosts, one at a time, narrow the interval or supply it.
    """
    found = _direct(pairs, a, b)
    for through in sorted({host for pair in pairs for host in pair} - {a, b}):
        one, two = _direct(pairs, a, through), _direct(pairs, through, b)
        if one is None or two is None:
            continue
        both = OffsetInterval(_sum(one.low_ns, two.low_ns), _sum(one.high_ns, two.high_ns), one.at_unix_ns)
        narrowed = both if found is None else found.narrowed(both)
        found = found if narrowed.contradictory else narrowed
    return found


def place_of(
    place: str, instance: str, host: str, samples: Sequence[DeviceSample], started_unix_ns: int, offset: Offset
) -> PlaceDevices:
    """Return the devices and series of one place.

    ``samples``: of that host, oldest first. ``started_unix_ns``: of the request.
    """
    zero = started_unix_ns + offset.shift_ns
    devices: list[DeviceTracks] = []
    chosen: DeviceChoice | None = None
    for kind in DeviceKind:
        why, found = _chosen([sample for sample in samples if sample.device.kind is kind], instance)
        chosen = chosen or why
        devices += _devices(found, zero)
    everything = {(sample.device.kind, sample.device.key) for sample in samples}
    return PlaceDevices(
        place=place,
        instance=instance,
        host=host,
        offset=offset,
        chosen=chosen,
        devices=tuple(devices),
        others=len(everything) - len(devices),
    )


def _chosen(samples: Sequence[DeviceSample], instance: str) -> tuple[DeviceChoice | None, Sequence[DeviceSample]]:
    """Return the samples that belong to an engine, by the best reason there is.

    The reason is None where there are no samples.
    """
    by_engine = [sample for sample in samples if instance and sample.device.engine == instance]
    by_sidecar = [sample for sample in samples if instance and sample.process.instance == instance]
    reasons = ((DeviceChoice.ENGINE, by_engine), (DeviceChoice.SIDECAR, by_sidecar), (DeviceChoice.HOST, samples))
    return next(((why, found) for why, found in reasons if found), (None, ()))


def _devices(samples: Iterable[DeviceSample], zero_unix_ns: int) -> list[DeviceTracks]:
    """Return the series by device.

    Where several sidecars of a host sampled one device, the first sidecar's samples count.
    """
    by_key: dict[str, dict[str, list[DeviceSample]]] = {}
    for sample in samples:
        by_key.setdefault(sample.device.key, {}).setdefault(sample.process.instance, []).append(sample)
    found = []
    for by_sidecar in by_key.values():
        of = by_sidecar[min(by_sidecar)]
        found.append(DeviceTracks(of[-1].device, tuple(_tracks(of, zero_unix_ns))))
    return sorted(found, key=lambda each: (each.device.index is None, each.device.index or 0, each.device.key))


def _tracks(samples: Sequence[DeviceSample], zero_unix_ns: int) -> Iterable[Track]:
    series: dict[tuple[str, str], list[tuple[int, float, int]]] = {}
    for sample in samples:
        for value in sample.values:
            reports = series.setdefault((value.name, value.label), [])
            reports.append((sample.at_unix_ns - zero_unix_ns, value.value, value.start_unix_ns))
    for (name, label), points in sorted(series.items()):
        counter = any(start for _, _, start in points)
        held = _moved(points) if counter else _held(points)
        if held:
            begin, end, values = zip(*held, strict=True)
            yield Track(name=name, label=label, per_second=counter, from_ns=begin, to_ns=end, values=values)


def _moved(points: Sequence[tuple[int, float, int]]) -> list[tuple[int, int, float]]:
    """Return rates between successive samples of one counter.

    Across a reset of the counter the rate is unknown.
    """
    return [
        (before, at, round((value - earlier) * 1e9 / (at - before), 3))
        for (before, earlier, began), (at, value, start) in pairwise(points)
        if at > before and start == began and value >= earlier
    ]


def _held(points: Sequence[tuple[int, float, int]]) -> list[tuple[int, int, float]]:
    """Return each gauge with the time since the sample before it.

    The first one gets the shortest interval of the others.
    """
    steps = [at - before for (before, _, _), (at, _, _) in pairwise(points)]
    first = min([*steps, LONGEST_HOLD_NS])
    return [
        (at - min(step, LONGEST_HOLD_NS), at, value)
        for (at, value, _), step in zip(points, [first, *steps], strict=True)
        if step > 0
    ]


def _direct(pairs: Mapping[tuple[str, str], OffsetInterval], a: str, b: str) -> OffsetInterval | None:
    if (a, b) in pairs:
        return pairs[a, b]
    turned = pairs.get((b, a))
    if turned is None:
        return None
    low = None if turned.high_ns is None else -turned.high_ns
    return OffsetInterval(low, None if turned.low_ns is None else -turned.low_ns, turned.at_unix_ns)


def _sum(one: int | None, two: int | None) -> int | None:
    return None if one is None or two is None else one + two
