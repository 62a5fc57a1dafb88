"""Encode samples of an engine's metrics page as OTLP metrics and decode them.

Format: docs/wire.md, "Samples of a metrics page". ``read_samples(sample_metrics(x), ...)`` restores ``x``, values in the order of
the schema.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.metrics.v1.metrics_pb2 import AggregationTemporality, Metric
from opentelemetry.proto.resource.v1.resource_pb2 import Resource

from handrail import conventions as names
from handrail.otlp.values import LATEST_UNIX_NS, attributes_of
from handrail.records import EngineHistogram, EngineSample, EngineValue, Process, Source
from handrail.records.quantities import QUANTITIES, Quantity, QuantityKind
from handrail.wire.codec import add_text, read_text

_CUMULATIVE: Final = AggregationTemporality.AGGREGATION_TEMPORALITY_CUMULATIVE
_BY_METRIC: Final = {f"{names.METRIC_ENGINE}_{quantity.name}": quantity for quantity in QUANTITIES}


def metrics_request(resource: Resource, samples: Sequence[EngineSample]) -> bytes:
    """Encode an ``ExportMetricsServiceRequest``; the exporter adds its batch number."""
    request = ExportMetricsServiceRequest()
    entry = request.resource_metrics.add()
    entry.resource.CopyFrom(resource)
    scope = entry.scope_metrics.add()
    scope.scope.name = names.SCOPE_SAMPLES
    for sample in samples:
        scope.metrics.extend(sample_metrics(sample))
    return request.SerializeToString()


def sample_metrics(sample: EngineSample) -> list[Metric]:
    """One metric for each quantity that the sample has."""
    values: dict[str, list[EngineValue]] = {}
    for value in sample.values:
        values.setdefault(value.name, []).append(value)
    histograms: dict[str, list[EngineHistogram]] = {}
    for histogram in sample.histograms:
        histograms.setdefault(histogram.name, []).append(histogram)
    made = []
    for name, quantity in _BY_METRIC.items():
        if quantity.name not in values and quantity.name not in histograms:
            continue
        metric = Metric(name=name, unit=quantity.unit, description=quantity.help)
        if quantity.kind is QuantityKind.HISTOGRAM:
            metric.histogram.aggregation_temporality = _CUMULATIVE
            _add_histograms(metric, quantity, sample, histograms[quantity.name])
        else:
            if quantity.kind is QuantityKind.COUNTER:
                metric.sum.aggregation_temporality, metric.sum.is_monotonic = _CUMULATIVE, True
            points = metric.sum.data_points if quantity.kind is QuantityKind.COUNTER else metric.gauge.data_points
            for value in values[quantity.name]:
                point = points.add()
                point.time_unix_nano, point.start_time_unix_nano = sample.at_unix_ns, value.start_unix_ns
                point.as_double = value.value
                _label(point.attributes, quantity, sample, value.engine, value.label)
        made.append(metric)
    return made


def read_samples(metrics: Iterable[Metric], process: Process) -> list[EngineSample]:
    """Read the samples in metrics of scope ``handrail.samples``, oldest first.

    Metrics outside the schema are skipped.
    """
    values: dict[int, list[EngineValue]] = {}
    histograms: dict[int, list[EngineHistogram]] = {}
    models: dict[int, str] = {}
    for metric in metrics:
        quantity = _BY_METRIC.get(metric.name)
        if quantity is None:
            continue
        for point in (*metric.gauge.data_points, *metric.sum.data_points):
            engine, label, model = _labels(point, quantity)
            at = min(point.time_unix_nano, LATEST_UNIX_NS)
            models.setdefault(at, model)
            values.setdefault(at, []).append(
                EngineValue(
                    name=quantity.name,
                    value=point.as_double,
                    engine=engine,
                    label=label,
                    start_unix_ns=min(point.start_time_unix_nano, LATEST_UNIX_NS),
                )
            )
        for each in metric.histogram.data_points:
            engine, label, model = _labels(each, quantity)
            at = min(each.time_unix_nano, LATEST_UNIX_NS)
            models.setdefault(at, model)
            histograms.setdefault(at, []).append(
                EngineHistogram(
                    name=quantity.name,
                    bounds=tuple(each.explicit_bounds),
                    counts=tuple(each.bucket_counts),
                    count=each.count,
                    total=each.sum if each.HasField("sum") else None,
                    engine=engine,
                    label=label,
                    start_unix_ns=min(each.start_time_unix_nano, LATEST_UNIX_NS),
                )
            )
    return [
        EngineSample(
            process=process,
            source=Source.METRICS,
            at_unix_ns=at,
            model=models[at],
            values=tuple(values.get(at, ())),
            histograms=tuple(histograms.get(at, ())),
        )
        for at in sorted(models)
    ]


def _add_histograms(metric: Metric, quantity: Quantity, sample: EngineSample, found: Sequence[EngineHistogram]) -> None:
    for histogram in found:
        point = metric.histogram.data_points.add()
        point.time_unix_nano, point.start_time_unix_nano = sample.at_unix_ns, histogram.start_unix_ns
        point.count = histogram.count
        if histogram.total is not None:
            point.sum = histogram.total
        point.explicit_bounds.extend(histogram.bounds)
        point.bucket_counts.extend(histogram.counts)
        _label(point.attributes, quantity, sample, histogram.engine, histogram.label)


def _label(entries: Any, quantity: Quantity, sample: EngineSample, engine: str, label: str) -> None:
    if engine:
        add_text(entries, names.ENGINE_LABEL, engine)
    if sample.model:
        add_text(entries, names.MODEL_LABEL, sample.model)
    if quantity.label and label:
        add_text(entries, quantity.label, label)


def _labels(point: Any, quantity: Quantity) -> tuple[str, str, str]:
    """Labels (engine, label, model) of a data point."""
    found = attributes_of(point.attributes)
    label = read_text(found.get(quantity.label)) if quantity.label else None
    return read_text(found.get(names.ENGINE_LABEL)) or "", label or "", read_text(found.get(names.MODEL_LABEL)) or ""
