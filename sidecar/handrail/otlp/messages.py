"""Names of each OTLP signal on the wire: messages, service, partial-success field.

The messages are protobuf's, the service is gRPC's.
Source: opentelemetry-proto 1.x, ``opentelemetry/proto/collector/*/v1/*_service.proto``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest, ExportLogsServiceResponse
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest, ExportMetricsServiceResponse
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest, ExportTraceServiceResponse

from handrail.otlp.signals import Signal

Request = ExportTraceServiceRequest | ExportMetricsServiceRequest | ExportLogsServiceRequest


@dataclass(frozen=True, slots=True)
class Shape:
    """Wire names of one signal.

    ``rejected_field`` counts spans, data points or log records that were refused for good.
    """

    request: type[Request]
    response: Any  # the response class; the three share no typed base
    service: str
    rejected_field: str
    rejected_json: str
    noun: str

    @property
    def method(self) -> str:
        return f"/{self.service}/Export"


_PREFIX = "opentelemetry.proto.collector"

SHAPES: Final[dict[Signal, Shape]] = {
    Signal.TRACES: Shape(
        ExportTraceServiceRequest,
        ExportTraceServiceResponse,
        f"{_PREFIX}.trace.v1.TraceService",
        "rejected_spans",
        "rejectedSpans",
        "span",
    ),
    Signal.METRICS: Shape(
        ExportMetricsServiceRequest,
        ExportMetricsServiceResponse,
        f"{_PREFIX}.metrics.v1.MetricsService",
        "rejected_data_points",
        "rejectedDataPoints",
        "data point",
    ),
    Signal.LOGS: Shape(
        ExportLogsServiceRequest,
        ExportLogsServiceResponse,
        f"{_PREFIX}.logs.v1.LogsService",
        "rejected_log_records",
        "rejectedLogRecords",
        "log record",
    ),
}
