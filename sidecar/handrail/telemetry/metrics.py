"""Send the metrics of /metrics as OTLP to a backend, at a fixed interval.

The SDK's data classes carry the rows as they are when they are sent, and the SDK's exporter sends them. The SDK's instruments are
not used: they cannot hold what was counted elsewhere in exponential buckets, and a gap between chunks would cost 8 us
(docs/decisions/0015-own-telemetry-by-the-sdk.md).
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

from opentelemetry.sdk.metrics import Exemplar
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Buckets,
    ExponentialHistogram,
    ExponentialHistogramDataPoint,
    Gauge,
    HistogramDataPoint,
    Metric,
    MetricExporter,
    MetricExportResult,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.metrics.export import Histogram as ExplicitHistogram
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from handrail import conventions as names
from handrail.metrics import histogram as counted
from handrail.metrics.registry import AnyMetricDef, HistogramDef, MetricDef, by_label, finite, unit_of
from handrail.printable import printable_series
from handrail.runtime.threads import in_daemon_thread

log = logging.getLogger(__name__)

_CUMULATIVE: Final = AggregationTemporality.CUMULATIVE
_CONVENTIONAL: Final = {
    names.METRIC_TTFT: "gen_ai.server.time_to_first_token",
    names.METRIC_TPOT: "gen_ai.server.time_per_output_token",
    names.METRIC_E2E: "gen_ai.server.request.duration",
}
_ATTRIBUTES: Final = {"model_name": names.GEN_AI_MODEL, "role": names.ROLE, "scope": "handrail.scope"}
"""Attribute names of the labels of metrics that have a conventional name."""

_OURS: Final = "handrail_"
_NOT_KEPT: Final[Any] = None
"""Least and largest value, which our histograms do not keep; the SDK's encoder leaves out what is None."""

EVER: Final = 1
"""Start time of a count that goes on over restarts. A start that changed would mean a reset: all of it would count again."""

_NO_SPAN: Final = 0
"""Span id of an exemplar, which names a trace only; without one the SDK's encoder drops the trace id too."""


class MetricsOutlet(Protocol):
    """What sends: ``handrail.telemetry.exporters.Outlet``."""

    @property
    def current(self) -> MetricExporter: ...

    def close(self) -> None: ...

    async def why(self) -> str: ...


@dataclass(slots=True)
class OtlpMetricsStats:
    """Counts since start."""

    sent: int = 0
    failed: int = 0  # refused or timed out; the next one carries the same counts, since all are cumulative
    faults: int = 0


class OtlpMetrics:
    """Send ``rows`` every ``interval_s`` and once more at the end.

    Rows that are added before ``start`` are sent too.
    The rows belong to the event loop and are read there; the SDK's exporter blocks, in a thread.
    ``shutdown`` works without ``start`` and twice.
    """

    def __init__(
        self,
        rows: Sequence[AnyMetricDef],
        resource: Resource,
        make_outlet: Callable[[], MetricsOutlet],
        interval_s: float,
        *,
        stats: OtlpMetricsStats | None = None,
        now_unix_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self.stats = stats or OtlpMetricsStats()
        self._rows = rows
        self._resource = resource
        self._make_outlet = make_outlet
        self._interval_s = interval_s
        self._now = now_unix_ns
        self._started_unix_ns = now_unix_ns()
        self._outlet: MetricsOutlet | None = None
        self._task: asyncio.Task[None] | None = None
        self._stop = asyncio.Event()

    async def start(self) -> None:
        """Begin to send.

        A backend that is not there yet is a state, not an error. Raises the errors of ``make_outlet``.
        """
        self._outlet = self._make_outlet()
        self._task = asyncio.create_task(self._run(self._outlet))

    async def shutdown(self, drain_seconds: float) -> None:
        task, self._task = self._task, None
        if task is None or self._outlet is None:
            return
        self._stop.set()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(task, drain_seconds)
        self._outlet.close()

    async def _run(self, outlet: MetricsOutlet) -> None:
        last = False
        while not last:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._stop.wait(), self._interval_s)
            last = self._stop.is_set()
            await self._send(outlet)

    async def _send(self, outlet: MetricsOutlet) -> None:
        try:
            data = self.data()
            result = await in_daemon_thread(lambda: outlet.current.export(data), "handrail-otlp-metrics")
        except Exception:  # an error in one row must not stop all sending
            self.stats.faults += 1
            if self.stats.faults == 1:
                log.exception("sending metrics failed")
            return
        if result is MetricExportResult.SUCCESS:
            self.stats.sent += 1
            return
        self.stats.failed += 1
        if self.stats.failed == 1:
            log.warning("the backend did not accept metrics: %s (retry every %g s)", await outlet.why(), self._interval_s)

    def data(self) -> MetricsData:
        """All metrics as they are now."""
        at = self._now()
        scope = ScopeMetrics(InstrumentationScope(names.SCOPE_METRICS), [self._metric(row, at) for row in self._rows], "")
        return MetricsData([ResourceMetrics(self._resource, [scope], "")])

    def _metric(self, row: AnyMetricDef, at: int) -> Metric:
        name = _CONVENTIONAL.get(row.name, f"handrail.{row.name.removeprefix(_OURS)}")
        data = self._histograms(row, at) if isinstance(row, HistogramDef) else self._numbers(row, at)
        return Metric(name, row.help, unit_of(row.name), data)

    def _numbers(self, row: MetricDef, at: int) -> Sum | Gauge:
        value = row.read()
        series = printable_series(value).items() if isinstance(value, Mapping) else (((), value),)
        since = self._since(row)
        points = [NumberDataPoint(_attributes(row, labels), since, at, finite(number)) for labels, number in series]
        return Sum(points, _CUMULATIVE, True) if row.kind == "counter" else Gauge(points)

    def _histograms(self, row: HistogramDef, at: int) -> ExponentialHistogram | ExplicitHistogram:
        series, since = printable_series(row.read()).items(), self._since(row)
        if all(isinstance(histogram, counted.ExponentialHistogram) for _, histogram in series):
            exponential = [_exponential(row, labels, histogram, since, at) for labels, histogram in series]
            return ExponentialHistogram(exponential, _CUMULATIVE)
        return ExplicitHistogram([_explicit(row, labels, histogram, since, at) for labels, histogram in series], _CUMULATIVE)

    def _since(self, row: AnyMetricDef) -> int:
        return EVER if row.kept else self._started_unix_ns


def otlp_metrics_rows(stats: OtlpMetricsStats, prefix: str) -> list[MetricDef]:
    """Rows of /metrics about the sending itself."""
    return [
        MetricDef(
            f"{prefix}_otlp_metrics_exports",
            "counter",
            "Exports of these metrics by OTLP, by result",
            lambda: by_label({"taken": stats.sent, "failed": stats.failed, "fault": stats.faults}),
            ("outcome",),
        )
    ]


def _attributes(row: AnyMetricDef, values: Sequence[str]) -> dict[str, str]:
    conventional = row.name in _CONVENTIONAL
    return {_ATTRIBUTES.get(key, key) if conventional else key: value for key, value in zip(row.labels, values, strict=True)}


def _exponential(
    row: HistogramDef, labels: Sequence[str], histogram: counted.Histogram, since: int, at: int
) -> ExponentialHistogramDataPoint:
    assert isinstance(histogram, counted.ExponentialHistogram)
    first, last = (min(histogram.positive), max(histogram.positive)) if histogram.positive else (0, -1)
    return ExponentialHistogramDataPoint(
        attributes=_attributes(row, labels),
        start_time_unix_nano=since,
        time_unix_nano=at,
        count=histogram.count,
        sum=finite(histogram.total) / row.layout.per_unit,
        scale=counted.SCALE,
        zero_count=histogram.zero,
        positive=Buckets(first, [histogram.positive.get(index, 0) for index in range(first, last + 1)]),
        negative=Buckets(0, []),
        flags=0,
        min=_NOT_KEPT,
        max=_NOT_KEPT,
        exemplars=_exemplars(row, histogram),
    )


def _explicit(row: HistogramDef, labels: Sequence[str], histogram: counted.Histogram, since: int, at: int) -> HistogramDataPoint:
    return HistogramDataPoint(
        attributes=_attributes(row, labels),
        start_time_unix_nano=since,
        time_unix_nano=at,
        count=histogram.count,
        sum=finite(histogram.total) / row.layout.per_unit,
        bucket_counts=histogram.counts,
        explicit_bounds=row.layout.bounds,
        min=_NOT_KEPT,
        max=_NOT_KEPT,
        exemplars=_exemplars(row, histogram),
    )


def _exemplars(row: HistogramDef, histogram: counted.Histogram) -> list[Exemplar]:
    return [
        Exemplar({}, each.value / row.layout.per_unit, each.unix_ns, _NO_SPAN, int(each.trace_id, 16))
        for each in histogram.exemplars.values()
    ]
