"""Encode a proxy's request counts as OTLP metrics and decode them.

Format: docs/wire.md, "Counts of requests". The collector's coverage is over these counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.metrics.v1.metrics_pb2 import AggregationTemporality, Metric
from opentelemetry.proto.resource.v1.resource_pb2 import Resource

from handrail import conventions as names
from handrail.otlp.values import LATEST_UNIX_NS, attributes_of
from handrail.records import Outcome, Process, RequestCounts
from handrail.wire.codec import add_text, read_text

_MOST_POINTS: Final = 64


def counts_request(resource: Resource, finished: Mapping[Outcome, int], start_unix_ns: int, at_unix_ns: int) -> bytes:
    """Encode an ``ExportMetricsServiceRequest``; the exporter adds its batch number."""
    request = ExportMetricsServiceRequest()
    entry = request.resource_metrics.add()
    entry.resource.CopyFrom(resource)
    scope = entry.scope_metrics.add()
    scope.scope.name = names.SCOPE_COUNTS
    metric = scope.metrics.add(name=names.METRIC_FINISHED, unit="{request}", description="Requests that ended at this proxy")
    metric.sum.aggregation_temporality = AggregationTemporality.AGGREGATION_TEMPORALITY_CUMULATIVE
    metric.sum.is_monotonic = True
    for outcome, count in finished.items():
        point = metric.sum.data_points.add()
        point.time_unix_nano, point.start_time_unix_nano, point.as_int = at_unix_ns, start_unix_ns, count
        add_text(point.attributes, names.OUTCOME, outcome.value)
    return request.SerializeToString()


def read_counts(metrics: Iterable[Metric], process: Process) -> list[RequestCounts]:
    """Read the counts in metrics of scope ``handrail.counts``, oldest first.

    Other metrics are skipped.
    """
    found: dict[tuple[int, int], dict[str, int]] = {}
    for metric in metrics:
        for point in metric.sum.data_points[:_MOST_POINTS] if metric.name == names.METRIC_FINISHED else ():
            outcome = read_text(attributes_of(point.attributes).get(names.OUTCOME)) or Outcome.UNKNOWN.value
            if point.as_int >= 0:
                times = min(point.time_unix_nano, LATEST_UNIX_NS), min(point.start_time_unix_nano, LATEST_UNIX_NS)
                found.setdefault(times, {})[outcome] = point.as_int
    return [
        RequestCounts(process=process, at_unix_ns=at, start_unix_ns=start, finished=finished)
        for (at, start), finished in sorted(found.items(), key=lambda each: each[0])
    ]
