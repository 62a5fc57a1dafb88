"""What the GPUs and links of P and D did while a request was there: samples as series on the request's own time. Pure.

A value of a series holds for the interval that ends with its sample: a gauge tells of the time since the sample before it, a
counter moved so much since then. Times are those of the host's own clock, moved by what is known of its offset from the clock
that the request's start was read on; how far that may be off is said beside them.
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
"""Counters that are told of a request."""

LINES: Final = frozenset({names.GPU_PCIE_LINE, names.GPU_NVLINK_LINE})
"""What a GPU's links can carry: told with them, though it is sampled only every 10 s."""

LONGEST_HOLD_NS: Final = 2_000_000_000
"""A gauge says nothing of more than so long before it."""


class DeviceChoice(str, Enum):
    """Why just these devices."""

    ENGINE = "engine"  # the devices say that this engine uses them
    SIDECAR = "sidecar"  # the engine's own sidecar sampled them: all of its host, perhaps more than the engine uses
    HOST = "host"  # another sidecar of that host did


@dataclass(frozen=True, slots=True)
class Offset:
    """The host's clock minus the one of the request's start. ``shift_ns`` was taken off the samples' times.

    ``bound_ns``: the times are right within this; None where nothing bounds it; ``same``: one clock.
    """

    same: bool
    shift_ns: int
    bound_ns: int | None


@dataclass(frozen=True, slots=True)
class Track:
    """One counter. ``from_ns``, ``to_ns``: from the request's start; ``values``: counters per second."""

    name: str
    label: str
    per_second: bool
    from_ns: tuple[int, ...]
    to_ns: tuple[int, ...]
    values: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class DeviceTracks:
    """One device."""

    device: Device
    tracks: tuple[Track, ...]


@dataclass(frozen=True, slots=True)
class PlaceDevices:
    """``place``: ``prefill`` or ``decode``. ``chosen``: of the GPUs, where there are any, else of the links; None: no samples.

    ``others``: devices of the host that were left out.
    """

    place: str
    instance: str
    host: str
    offset: Offset
    chosen: DeviceChoice | None
    devices: tuple[DeviceTracks, ...]
    others: int


def clock_offset(offset: OffsetInterval | None, same: bool) -> Offset:
    """What to do about a host's clock: ``offset`` is None where nothing is known of it."""
    if same:
        return Offset(same=True, shift_ns=0, bound_ns=0)
    if offset is None or offset.low_ns is None or offset.high_ns is None or offset.contradictory:
        return Offset(same=False, shift_ns=0, bound_ns=None)
    middle = (offset.low_ns + offset.high_ns) // 2
    return Offset(same=False, shift_ns=middle, bound_ns=offset.high_ns - middle)


def between(pairs: Mapping[tuple[str, str], OffsetInterval], a: str, b: str) -> OffsetInterval | None:
    """Clock of host ``b`` minus that of ``a`` from the pairs (host, peer) that are known, through one other host if need be."""
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
    """``samples``: of that host, oldest first. ``started_unix_ns``: of the request."""
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
    """The samples that tell of an engine, best reason first; None where there are none at all."""
    by_engine = [sample for sample in samples if instance and sample.device.engine == instance]
    by_sidecar = [sample for sample in samples if instance and sample.process.instance == instance]
    reasons = ((DeviceChoice.ENGINE, by_engine), (DeviceChoice.SIDECAR, by_sidecar), (DeviceChoice.HOST, samples))
    return next(((why, found) for why, found in reasons if found), (None, ()))


def _devices(samples: Iterable[DeviceSample], zero_unix_ns: int) -> list[DeviceTracks]:
    """By device; where several sidecars of a host sampled one, what the first of them said."""
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
    """Rates from each sample to the next of one count; what falls between two counts is not known."""
    return [
        (before, at, round((value - earlier) * 1e9 / (at - before), 3))
        for (before, earlier, began), (at, value, start) in pairwise(points)
        if at > before and start == began and value >= earlier
    ]


def _held(points: Sequence[tuple[int, float, int]]) -> list[tuple[int, int, float]]:
    """Each gauge for the time since the one before it; the first for as long as the next one."""
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
