"""Filter samples.

The filter means the same in Python (here, with ``thinned``) and in SQL (``sample_sql.py``).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import fsum
from typing import Any

from handrail.records import EngineSample
from handrail.records.devices import DeviceSample, DeviceValue


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleFilter:
    """A filter that matches samples of [since, until).

    ``hosts``: ids or names. ``names``: counters to keep, others are left out. None: any.
    ``every_ns``: above 0, one sample of each device per interval of this length, from ``since`` on.
    An interval has the mean of gauges and the last value of counters; values without a column of their own (``series.py``:
    ``more``) are left out. Only for devices.
    """

    since_unix_ns: int
    until_unix_ns: int
    hosts: frozenset[str] | None = None
    names: frozenset[str] | None = None
    every_ns: int = 0

    def matches(self, sample: DeviceSample | EngineSample) -> bool:
        """Check whether the sample matches."""
        process = sample.process
        return self.since_unix_ns <= sample.at_unix_ns < self.until_unix_ns and (
            self.hosts is None or process.host in self.hosts or process.host_name in self.hosts
        )

    def reduced(self, sample: Any) -> Any:
        """Keep only the values of the sample that the filter names."""
        if self.names is None:
            return sample
        kept = {"values": tuple(value for value in sample.values if value.name in self.names)}
        if isinstance(sample, EngineSample):
            kept["histograms"] = tuple(each for each in sample.histograms if each.name in self.names)
        return replace(sample, **kept)


def thinned(samples: Iterable[DeviceSample], since_unix_ns: int, every_ns: int) -> list[DeviceSample]:
    """Reduce samples to one per device and interval.

    It has the time of the interval's last sample and the longest ``took_ns``.
    Counters that restart within an interval give two samples. ``samples``: oldest first.
    """
    parts: dict[Any, list[DeviceSample]] = {}
    for sample in samples:
        starts = frozenset(value.start_unix_ns for value in sample.values)
        part = (sample.at_unix_ns - since_unix_ns) // every_ns
        parts.setdefault((part, sample.process, sample.source, sample.device, starts), []).append(sample)
    return [
        replace(of[-1], values=tuple(_together(of)), took_ns=max(sample.took_ns for sample in of))
        for of in sorted(parts.values(), key=lambda of: of[-1].at_unix_ns)
    ]


def _together(samples: list[DeviceSample]) -> Iterable[DeviceValue]:
    values: dict[tuple[str, str, int], list[float]] = {}
    for sample in samples:
        for value in sample.values:
            values.setdefault((value.name, value.label, value.start_unix_ns), []).append(value.value)
    for (name, label, start), found in sorted(values.items()):
        number = found[-1] if start else fsum(found) / len(found)
        yield DeviceValue(name=name, value=number, label=label, start_unix_ns=start)
