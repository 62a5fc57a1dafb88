"""Samples of GPUs, RDMA ports and NICs: one record per device and instant.

Base units are as in ``records/quantities.py``: bytes, seconds, watts, joules, hertz, degrees Celsius, ratios from 0 to 1.
Counters are whole numbers that only grow: the reader of the device undoes wraps and the driver's own units. A value that a device
does not give is absent, never 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from handrail.records import Process, Source
from handrail.records.quantities import QuantityKind


class DeviceKind(str, Enum):
    """Kind of hardware that a sample describes."""

    GPU = "gpu"
    RDMA = "rdma"  # one port of one adapter
    NIC = "nic"


@dataclass(frozen=True, slots=True)
class CounterDef:
    """One row of the table of counters.

    Exposed as ``handrail_gpu_`` or ``handrail_link_`` + name, counters with ``_total``.
    ``label``: the one label its values have besides the device's (a direction, a throttle reason, a port), '' for none.
    ``absent``: when and why a device lacks it, and what would provide it, in words for a person.
    """

    name: str
    kind: QuantityKind
    unit: str  # UCUM, as OTLP has it
    help: str
    absent: str
    label: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One device.

    ``key``: GPU or MIG UUID, ``mlx5_0/1`` (adapter and port), ``eth0``; unique on its host.
    """

    kind: DeviceKind
    key: str
    index: int | None = None  # NVML's, which need not be CUDA's
    product: str = ""
    pci: str = ""  # domain:bus:device.function
    line_rate_bytes: int | None = None  # line rate per second and direction, as the device reports its current setting
    parent: str = ""  # MIG: the UUID of its GPU
    engine: str = ""  # instance of the engine that uses it, '' where it is unknown


class DeviceValue(NamedTuple):
    """One value of a device.

    ``start_unix_ns``: the known start of a counter; 0 for gauges.
    """

    name: str
    value: float  # int for counters, which stays exact
    label: str = ""
    start_unix_ns: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSample:
    """One device at one instant.

    ``took_ns``: from before the first call to after the last one that gave ``values``.
    """

    process: Process
    source: Source
    device: Device
    at_unix_ns: int
    values: tuple[DeviceValue, ...]
    took_ns: int = 0


@dataclass(frozen=True, slots=True)
class Series:
    """One counter of a ``DeviceRun``: a value, or None, at each of its instants.

    Either all values are whole numbers, or none are.
    """

    name: str
    label: str
    start_unix_ns: int
    values: Sequence[float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRun:
    """Consecutive samples of one device, by counter.

    They travel and are stored in this form, which costs a tenth of the work of single samples.
    """

    process: Process
    source: Source
    device: Device
    at: Sequence[int]  # unix ns, rising
    took_ns: Sequence[int]
    series: Sequence[Series]

    @property
    def at_unix_ns(self) -> int:
        """Time of the first sample."""
        return self.at[0]

    def samples(self) -> Iterator[DeviceSample]:
        """Samples one by one, oldest first; values by name and label."""
        ordered = sorted(self.series, key=lambda series: (series.name, series.label))
        for place, (at, took_ns) in enumerate(zip(self.at, self.took_ns, strict=True)):
            yield DeviceSample(
                process=self.process,
                source=self.source,
                device=self.device,
                at_unix_ns=at,
                values=tuple(
                    DeviceValue(name=series.name, value=value, label=series.label, start_unix_ns=series.start_unix_ns)
                    for series in ordered
                    if (value := series.values[place]) is not None
                ),
                took_ns=took_ns,
            )


def runs(samples: Iterable[DeviceSample]) -> list[DeviceRun]:
    """Group samples into runs; the inverse of ``DeviceRun.samples``.

    There is one run for each description of a device. ``samples``: oldest first for each device.
    """
    by_device: dict[tuple[Process, Source, Device], list[DeviceSample]] = {}
    for sample in samples:
        by_device.setdefault((sample.process, sample.source, sample.device), []).append(sample)
    return [
        DeviceRun(
            process=process,
            source=source,
            device=device,
            at=[sample.at_unix_ns for sample in of],
            took_ns=[sample.took_ns for sample in of],
            series=_series(of),
        )
        for (process, source, device), of in by_device.items()
    ]


def _series(samples: Sequence[DeviceSample]) -> list[Series]:
    found: dict[tuple[str, str, int, bool], list[float | None]] = {}
    for place, sample in enumerate(samples):
        for value in sample.values:
            key = value.name, value.label, value.start_unix_ns, isinstance(value.value, int)
            found.setdefault(key, [None] * len(samples))[place] = value.value
    return [Series(name, label, start, values) for (name, label, start, _), values in found.items()]
