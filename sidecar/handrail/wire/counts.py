"""Encode a proxy's request counts as OTLP metrics and decode them.

Format: docs/wire.md, "Counts of requests". The collector's coverage is over these counts.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Final

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.metrics.v1.metrics_pb2 import AggregationTemporality, Metric
from opentelemetry.proto.resource.v1.resource_pb2 import Resource

from handrail import conventions as names
from handrail.otlp.signals import Rejected, Retryable, Signal
from handrail.otlp.values import LATEST_UNIX_NS, attributes_of
from handrail.records import Outcome, Process, RequestCounts
from handrail.wire.codec import add_text, read_text

EVERY_S: Final = 10.0

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


class CountsExport:
    """Export the counts at the start, every ten seconds, and at the end.

    ``take`` is ``Exporter.take``. A refused export is left out: the next carries the same counts. ``shutdown`` works without
    ``start`` and twice.
    """

    def __init__(
        self,
        resource: Resource,
        finished: Mapping[Outcome, int],
        take: Callable[[Signal, bytes], Awaitable[None]],
        *,
        every_s: float = EVERY_S,
        now_unix_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self.not_taken = 0
        self._resource = resource
        self._finished = finished
        self._take = take
        self._every_s = every_s
        self._now_unix_ns = now_unix_ns
        self._start_unix_ns = now_unix_ns()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to export. Start it before the proxy, so that its first reading says 0."""
        await self.tell()
        self._task = asyncio.create_task(self._run())

    async def shutdown(self, drain_seconds: float = 0.0) -> None:
        """Export a last time."""
        task, self._task = self._task, None
        if task is None:
            return
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await self.tell()

    async def tell(self) -> None:
        """Export once, now. Never raises."""
        payload = counts_request(self._resource, self._finished, self._start_unix_ns, self._now_unix_ns())
        try:
            await self._take(Signal.METRICS, payload)
        except (Retryable, Rejected):
            self.not_taken += 1

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._every_s)
            await self.tell()
