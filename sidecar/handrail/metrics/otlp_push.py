"""Push the metrics of /metrics as OTLP to a backend, at a fixed interval.

It reads the same rows when it sends, so nothing is counted twice. It is built from opentelemetry-proto and uses Handrail's own
OTLP client. The SDK would need a call for each value (10 us for a gap between chunks that is passed on in 20), and would send
from a thread of its own, with a second set of settings (docs/decisions/0010-otlp-metrics-without-the-sdk.md).
Names: ``gen_ai.server.*`` where OpenTelemetry has one (semantic conventions for generative AI, "Model server metrics"), else
``handrail.`` and the part after ``handrail_`` on /metrics, unit included, so that Prometheus makes the same name of it again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.metrics.v1.metrics_pb2 import AggregationTemporality, Metric
from opentelemetry.proto.resource.v1.resource_pb2 import Resource

from handrail import conventions as names
from handrail.metrics.histogram import SCALE, ExponentialHistogram, Histogram
from handrail.metrics.registry import AnyMetricDef, HistogramDef, MetricDef, by_label, finite, unit_of
from handrail.otlp.signals import Accepted, Rejected, Retryable, Signal
from handrail.printable import printable_series
from handrail.wire.codec import add_text

log = logging.getLogger(__name__)

_CUMULATIVE: Final = AggregationTemporality.AGGREGATION_TEMPORALITY_CUMULATIVE
_CONVENTIONAL: Final = {
    names.METRIC_TTFT: "gen_ai.server.time_to_first_token",
    names.METRIC_TPOT: "gen_ai.server.time_per_output_token",
    names.METRIC_E2E: "gen_ai.server.request.duration",
}
_ATTRIBUTES: Final = {"model_name": names.GEN_AI_MODEL, "role": names.ROLE, "scope": "handrail.scope"}
"""Attribute names of the labels of metrics that have a conventional name."""

_OURS: Final = "handrail_"


class MetricsClient(Protocol):
    """Client that sends: ``handrail.otlp.client.OtlpClient``."""

    async def send(self, signal: Signal, payload: bytes) -> Accepted: ...

    async def close(self) -> None: ...


@dataclass(slots=True)
class OtlpMetricsStats:
    """Counts since start."""

    sent: int = 0
    failed: int = 0  # refused or timed out; the next one carries the same counts, since all are cumulative
    faults: int = 0


class OtlpMetrics:
    """Send ``rows`` every ``interval_s`` and once more at the end.

    Rows that are added before ``start`` are sent too.
    ``shutdown`` works without ``start`` and twice.
    """

    def __init__(
        self,
        rows: Sequence[AnyMetricDef],
        resource: Resource,
        client_factory: Callable[[], MetricsClient],
        interval_s: float,
        *,
        now_unix_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self.stats = OtlpMetricsStats()
        self._rows = rows
        self._resource = resource
        self._client_factory = client_factory
        self._interval_s = interval_s
        self._now = now_unix_ns
        self._started_unix_ns = now_unix_ns()
        self._client: MetricsClient | None = None
        self._task: asyncio.Task[None] | None = None
        self._stop = asyncio.Event()

    async def start(self) -> None:
        """Begin to send.

        A backend that is not there yet is a state, not an error. Raises the errors of ``client_factory``.
        """
        self._client = self._client_factory()
        self._task = asyncio.create_task(self._run(self._client))

    async def shutdown(self, drain_seconds: float) -> None:
        task, self._task = self._task, None
        if task is None or self._client is None:
            return
        self._stop.set()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(task, drain_seconds)
        await self._client.close()

    async def _run(self, client: MetricsClient) -> None:
        last = False
        while not last:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._stop.wait(), self._interval_s)
            last = self._stop.is_set()
            await self._send(client)

    async def _send(self, client: MetricsClient) -> None:
        try:
            await client.send(Signal.METRICS, self.request().SerializeToString())
        except (Retryable, Rejected) as refusal:
            self.stats.failed += 1
            if self.stats.failed == 1:
                log.warning("metrics were not taken: %s (tried again every %g s)", refusal.reason, self._interval_s)
        except Exception:  # an error in one row must not stop all sending
            self.stats.faults += 1
            if self.stats.faults == 1:
                log.exception("metrics could not be sent")
        else:
            self.stats.sent += 1

    def request(self) -> ExportMetricsServiceRequest:
        """Export request with all metrics as they are now."""
        request = ExportMetricsServiceRequest()
        entry = request.resource_metrics.add()
        entry.resource.CopyFrom(self._resource)
        scope = entry.scope_metrics.add()
        scope.scope.name = names.SCOPE_METRICS
        at = self._now()
        for row in self._rows:
            name = _CONVENTIONAL.get(row.name, f"handrail.{row.name.removeprefix(_OURS)}")
            metric = Metric(name=name, unit=unit_of(row.name), description=row.help)
            if isinstance(row, HistogramDef):
                self._histogram(metric, row, at)
            else:
                self._numbers(metric, row, at)
            scope.metrics.append(metric)
        return request

    def _numbers(self, metric: Metric, row: MetricDef, at: int) -> None:
        if row.kind == "counter":
            metric.sum.aggregation_temporality, metric.sum.is_monotonic = _CUMULATIVE, True
        points = metric.sum.data_points if row.kind == "counter" else metric.gauge.data_points
        value = row.read()
        for labels, number in printable_series(value).items() if isinstance(value, Mapping) else (((), value),):
            point = points.add()
            point.time_unix_nano, point.as_double = at, finite(number)
            if row.kind == "counter":
                point.start_time_unix_nano = self._started_unix_ns
            _label(point.attributes, row, labels)

    def _histogram(self, metric: Metric, row: HistogramDef, at: int) -> None:
        metric.exponential_histogram.aggregation_temporality = _CUMULATIVE
        for labels, histogram in printable_series(row.read()).items():
            point = metric.exponential_histogram.data_points.add()
            point.start_time_unix_nano, point.time_unix_nano = self._started_unix_ns, at
            point.count, point.sum = histogram.count, finite(histogram.total) / row.layout.per_unit
            _label(point.attributes, row, labels)
            _exponential(point, histogram)
            for exemplar in histogram.exemplars.values():
                shown = point.exemplars.add()
                shown.trace_id, shown.time_unix_nano = bytes.fromhex(exemplar.trace_id), exemplar.unix_ns
                shown.as_double = exemplar.value / row.layout.per_unit


def otlp_metrics_rows(stats: OtlpMetricsStats) -> list[MetricDef]:
    """Rows of /metrics about the sending itself."""
    return [
        MetricDef(
            f"{names.METRIC_SIDECAR}_otlp_metrics_exports",
            "counter",
            "Exports of these metrics by OTLP, by result",
            lambda: by_label({"taken": stats.sent, "failed": stats.failed, "fault": stats.faults}),
            ("outcome",),
        )
    ]


def _label(attributes: Any, row: AnyMetricDef, values: Sequence[str]) -> None:
    conventional = row.name in _CONVENTIONAL
    for key, value in zip(row.labels, values, strict=True):
        add_text(attributes, _ATTRIBUTES.get(key, key) if conventional else key, value)


def _exponential(point: Any, histogram: Histogram) -> None:
    assert isinstance(histogram, ExponentialHistogram)
    point.scale, point.zero_count = SCALE, histogram.zero
    if histogram.positive:
        first, last = min(histogram.positive), max(histogram.positive)
        point.positive.offset = first
        point.positive.bucket_counts.extend(histogram.positive.get(at, 0) for at in range(first, last + 1))
