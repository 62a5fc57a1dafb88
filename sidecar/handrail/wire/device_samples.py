"""Encode samples of devices as OTLP metrics and decode them.

Format: docs/wire.md, "Samples of devices". ``read_devices`` restores the samples given to ``DeviceMetrics`` by device, oldest
first. Labels are restored whatever their names in the tables.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any, Final

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.metrics.v1.metrics_pb2 import AggregationTemporality, Metric, NumberDataPoint
from opentelemetry.proto.resource.v1.resource_pb2 import Resource

from handrail import conventions as names
from handrail.otlp.values import LATEST_UNIX_NS, Attributes, attributes_of
from handrail.records import Process, Source
from handrail.records.devices import CounterDef, Device, DeviceKind, DeviceRun, DeviceSample, Series
from handrail.wire.codec import add_number, add_text, read_number, read_text

Tables = Mapping[str, CounterDef]
"""Counters by the name of their metric, as ``named`` makes it.

They hold units, texts and the names of labels.
"""

_CUMULATIVE: Final = AggregationTemporality.AGGREGATION_TEMPORALITY_CUMULATIVE
_PREFIX: Final = {
    DeviceKind.GPU: f"{names.METRIC_GPU}_",
    DeviceKind.RDMA: f"{names.METRIC_LINK}_",
    DeviceKind.NIC: f"{names.METRIC_LINK}_",
}
_HW_TYPE: Final = {f"{names.METRIC_GPU}_": "gpu", f"{names.METRIC_LINK}_": "network"}
_LARGEST: Final = 2**63 - 1
DIGITS: Final = {"ratio": 4, "watts": 1}
"""Digits of fractions that are kept, by the last word of the name.

They show more than a share of a tenth of a second, or a power meter that is off by watts, can mean. The digits behind them are
noise that costs 5 bytes a value on disk.
"""
_OF_POINT: Final = frozenset({names.HW_ID, names.HW_TYPE})


@dataclass(frozen=True, slots=True)
class Convention:
    """Name of a counter, and of its label, in the ``hw.*`` conventions."""

    metric: str
    label: str = ""


CONVENTIONS: Final[Mapping[str, Convention]] = {
    f"{names.METRIC_GPU}_{names.GPU_BUSY}": Convention("hw.gpu.utilization"),
    f"{names.METRIC_GPU}_memory_used_bytes": Convention("hw.gpu.memory.usage"),
    f"{names.METRIC_GPU}_memory_total_bytes": Convention("hw.gpu.memory.limit"),
    f"{names.METRIC_GPU}_power_watts": Convention("hw.power"),
    f"{names.METRIC_GPU}_energy_joules": Convention("hw.energy"),
    f"{names.METRIC_GPU}_temperature_celsius": Convention("hw.temperature", "hw.sensor_location"),
    f"{names.METRIC_LINK}_{names.LINK_BYTES}": Convention("hw.network.io", "network.io.direction"),
    f"{names.METRIC_LINK}_packets": Convention("hw.network.packets", "network.io.direction"),
    f"{names.METRIC_LINK}_line_rate_bytes_per_second": Convention("hw.network.bandwidth.limit"),
    f"{names.METRIC_LINK}_up": Convention("hw.network.up"),
}
"""Conventions by the name that the metric would have here.

Source: OpenTelemetry semantic conventions, hardware (status: development).
"""

_OURS: Final = {convention.metric: ours for ours, convention in CONVENTIONS.items()}


def named(gpu: Iterable[CounterDef] = (), link: Iterable[CounterDef] = ()) -> Tables:
    """Tables of a process by metric."""
    pairs = ((names.METRIC_GPU, gpu), (names.METRIC_LINK, link))
    return {f"{prefix}_{counter.name}": counter for prefix, counters in pairs for counter in counters}


class DeviceMetrics:
    """Builder of one request, sample by sample.

    Of each series the latest value is the point, and the earlier ones are its exemplars. ``add`` costs about a microsecond a
    value, so that finishing the request holds no thread. Values that are not finite or above 63 bits are left out. Not
    thread-safe.
    """

    def __init__(self, tables: Tables) -> None:
        self.samples = 0
        self._tables = tables
        self._metrics: dict[tuple[str, bool], Metric] = {}
        self._series: dict[_Of, _Filling] = {}
        self._read: dict[tuple[Source, Device], _Filling] = {}

    def add(self, sample: DeviceSample) -> None:
        """Add a sample; samples of one device come oldest first."""
        self.samples += 1
        at, device = sample.at_unix_ns, sample.device
        report = self._read.get((sample.source, device))
        if report is None:
            report = self._read[sample.source, device] = _Filling(self._read_point(sample.source, device))
        report.add(at, sample.took_ns)
        kind, key, series = device.kind, device.key, self._series
        for value in sample.values:
            number = value.value
            if not (number <= _LARGEST if isinstance(number, int) else isfinite(number)):
                continue
            of = (kind, value.name, key, value.label, value.start_unix_ns, type(number))
            known = series.get(of)
            if known is None:
                known = series[of] = _Filling(self._point(of), DIGITS.get(value.name.rpartition("_")[2]))
            known.add(at, number)

    def finished(self) -> list[Metric]:
        """Finish with one metric a counter. Nothing may be added after it."""
        for series in (*self._read.values(), *self._series.values()):
            series.finish()
        return list(self._metrics.values())

    def _read_point(self, source: Source, device: Device) -> NumberDataPoint:
        metric = self._metrics.get((names.METRIC_DEVICE_READ, False))
        if metric is None:
            metric = Metric(name=names.METRIC_DEVICE_READ, unit="ns", description="How long reading the device took")
            self._metrics[names.METRIC_DEVICE_READ, False] = metric
        point = metric.gauge.data_points.add()
        _describe(point.attributes, source, device)
        return point

    def _point(self, of: _Of) -> NumberDataPoint:
        kind, counter, key, label, start, _ = of
        name = _PREFIX[kind] + counter
        metric = self._metrics.get((name, bool(start)))
        if metric is None:
            metric = self._metrics[name, bool(start)] = _metric(name, start, self._tables)
        point = (metric.sum if start else metric.gauge).data_points.add()
        add_text(point.attributes, names.HW_ID, key)
        if start:
            point.start_time_unix_nano = start
        if label:
            add_text(point.attributes, _label_name(name, self._tables), label)
        if name in CONVENTIONS:
            add_text(point.attributes, names.HW_TYPE, _HW_TYPE[_PREFIX[kind]])
        return point


def devices_request(resource: Resource, metrics: DeviceMetrics) -> bytes:
    """Encode an ``ExportMetricsServiceRequest``; the exporter adds its batch number."""
    request = ExportMetricsServiceRequest()
    entry = request.resource_metrics.add()
    entry.resource.CopyFrom(resource)
    scope = entry.scope_metrics.add()
    scope.scope.name = names.SCOPE_DEVICES
    scope.metrics.extend(metrics.finished())
    return request.SerializeToString()


_Of = tuple[DeviceKind, str, str, str, int, type]
"""Key of a series.

Kind and name of the counter, key of the device, label, start, type of its numbers.
"""


class _Filling:
    """Point under construction; its latest value is not in it yet."""

    __slots__ = ("_at", "_digits", "_last", "_point")

    def __init__(self, point: NumberDataPoint, digits: int | None = None) -> None:
        self._point = point
        self._digits = digits
        self._at = 0
        self._last: float = 0

    def add(self, at_unix_ns: int, value: float) -> None:
        if self._at:
            exemplar = self._point.exemplars.add()  # with the values as arguments of add() it takes twice as long
            exemplar.time_unix_nano = self._at
            if isinstance(self._last, int):
                exemplar.as_int = self._last
            else:
                exemplar.as_double = self._last
        self._at, self._last = at_unix_ns, value if self._digits is None else round(value, self._digits)

    def finish(self) -> None:
        self._point.time_unix_nano = self._at
        if isinstance(self._last, int):
            self._point.as_int = self._last
        else:
            self._point.as_double = self._last


def read_devices(metrics: Iterable[Metric], process: Process) -> list[DeviceRun]:
    """Read the runs in metrics of scope ``handrail.devices``, by device.

    Metrics of another form are skipped.
    """
    took: dict[tuple[Source, Device], dict[int, int]] = {}
    report: dict[str, list[Series]] = {}
    instants: dict[str, list[Sequence[int]]] = {}
    for metric in metrics:
        if metric.name == names.METRIC_DEVICE_READ:
            for point in metric.gauge.data_points:
                described = _described(attributes_of(point.attributes))
                if described is not None:
                    found = took.setdefault(described, {})
                    for at, value in zip(*_values(point), strict=True):
                        found[at] = min(max(0, int(value or 0)), LATEST_UNIX_NS)
            continue
        name = _counter_name(metric.name)
        if name is None:
            continue
        for point in (*metric.gauge.data_points, *metric.sum.data_points):
            attributes = attributes_of(point.attributes)
            key = read_text(attributes.get(names.HW_ID))
            if key:
                times, values = _values(point)
                report.setdefault(key, []).append(
                    Series(name, _label(attributes), min(point.start_time_unix_nano, LATEST_UNIX_NS), values)
                )
                instants.setdefault(key, []).append(times)
    return [
        _run(process, *described, found, report.get(described[1].key, ()), instants.get(described[1].key, ()))
        for described, found in took.items()
    ]


def _run(
    process: Process,
    source: Source,
    device: Device,
    took: Mapping[int, int],
    reported_series: Sequence[Series],
    instants: Sequence[Sequence[int]],
) -> DeviceRun:
    """Build the run of a device from its series.

    Each series has its own times; the run has the times at which the device was read.
    """
    at = sorted(took)
    series = []
    for each, times in zip(reported_series, instants, strict=True):
        if times == at and None not in each.values:  # the usual case
            series.append(each)
            continue
        by_time = dict(zip(times, each.values, strict=True))
        values = [by_time.get(time) for time in at]
        if values.count(None) < len(values):
            series.append(Series(each.name, each.label, each.start_unix_ns, values))
    return DeviceRun(process=process, source=source, device=device, at=at, took_ns=[took[time] for time in at], series=series)


def _describe(entries: Any, source: Source, device: Device) -> None:
    add_text(entries, names.HW_ID, device.key)
    add_text(entries, names.SOURCE, source.value)
    add_text(entries, names.DEVICE_KIND, device.kind.value)
    texts = (
        (names.HW_MODEL, device.product),
        (names.HW_PARENT, device.parent),
        (names.DEVICE_PCI, device.pci),
        (names.DEVICE_ENGINE, device.engine),
    )
    for name, text in texts:
        if text:
            add_text(entries, name, text)
    for name, number in ((names.DEVICE_INDEX, device.index), (names.DEVICE_LINE_RATE, device.line_rate_bytes)):
        if number is not None:
            add_number(entries, name, number)


def _described(found: Attributes) -> tuple[Source, Device] | None:
    """Read source and device from attributes; the inverse of ``_describe``.

    None where they name no device, or a kind or source of a later version.
    """
    key = read_text(found.get(names.HW_ID))
    kind = _KINDS.get(read_text(found.get(names.DEVICE_KIND)))
    source = _SOURCES.get(read_text(found.get(names.SOURCE)))
    if not key or kind is None or source is None:
        return None
    return source, Device(
        kind=kind,
        key=key,
        index=read_number(found.get(names.DEVICE_INDEX)),
        product=read_text(found.get(names.HW_MODEL)) or "",
        pci=read_text(found.get(names.DEVICE_PCI)) or "",
        line_rate_bytes=read_number(found.get(names.DEVICE_LINE_RATE)),
        parent=read_text(found.get(names.HW_PARENT)) or "",
        engine=read_text(found.get(names.DEVICE_ENGINE)) or "",
    )


_KINDS: Final[Mapping[str | None, DeviceKind]] = {kind.value: kind for kind in DeviceKind}
_SOURCES: Final[Mapping[str | None, Source]] = {source.value: source for source in Source}


def _metric(name: str, start: int, tables: Tables) -> Metric:
    counter, convention = tables.get(name), CONVENTIONS.get(name)
    metric = Metric(name=convention.metric if convention is not None else name)
    if counter is not None:
        metric.unit, metric.description = counter.unit, counter.help
    if start:
        metric.sum.aggregation_temporality, metric.sum.is_monotonic = _CUMULATIVE, True
    return metric


def _values(point: NumberDataPoint) -> tuple[list[int], Sequence[float | None]]:
    """Times and values of a point, oldest first, of the type that the point has.

    Values that are not finite become None.
    """
    exemplars = list(point.exemplars)  # used twice, and each access to the message makes an object
    times = [each.time_unix_nano for each in exemplars]
    times.append(point.time_unix_nano)
    if max(times) > LATEST_UNIX_NS:
        times = [min(time, LATEST_UNIX_NS) for time in times]
    whole = point.HasField("as_int")
    values: list[float] = [each.as_int for each in exemplars] if whole else [each.as_double for each in exemplars]
    values.append(point.as_int if whole else point.as_double)
    if not whole and not isfinite(sum(values)):
        return times, [value if isfinite(value) else None for value in values]
    return times, values


def _label_name(name: str, tables: Tables) -> str:
    convention, counter = CONVENTIONS.get(name), tables.get(name)
    text = (convention.label if convention is not None else "") or (counter.label if counter is not None else "")
    return text or names.DEVICE_LABEL


def _label(found: Attributes) -> str:
    return next((text for name, text in found.items() if name not in _OF_POINT and isinstance(text, str)), "")


def _counter_name(metric: str) -> str | None:
    """Counter's name from the metric's; None for a metric that is not of a device."""
    ours = _OURS.get(metric, metric)
    return next((ours[len(prefix) :] for prefix in _HW_TYPE if ours.startswith(prefix)), None)
