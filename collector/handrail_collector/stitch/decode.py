"""Decode OTLP spans, log records and metrics into records."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from opentelemetry.proto.common.v1.common_pb2 import InstrumentationScope
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord, ResourceLogs
from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric, ResourceMetrics
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, Span

from handrail.conventions import (
    BATCH_SEQ,
    SCOPE_COUNTS,
    SCOPE_DEVICES,
    SCOPE_EVENTS,
    SCOPE_PLUGIN,
    SCOPE_PROXY,
    SCOPE_SAMPLES,
)
from handrail.otlp.values import Attributes
from handrail.records import EngineFacts, EngineSample, Iteration, LogFact, PluginSpan, Process, ProcessEvent, RequestCounts
from handrail.records.devices import DeviceRun
from handrail.wire.counts import read_counts
from handrail.wire.device_samples import read_devices
from handrail.wire.engine_samples import read_samples
from handrail.wire.engines import load_all
from handrail.wire.exchange import process_of, read_exchange
from handrail.wire.log_events import read_fact
from handrail.wire.plugin import read_plugin_log, read_plugin_span
from handrail_collector.stitch.evidence import Item

Event = PluginSpan | Iteration | ProcessEvent | EngineFacts | LogFact
"""The records that a sidecar's log record may hold."""


@dataclass(frozen=True, slots=True)
class SpanBatch:
    """The spans of one scope and the process that sent them.

    ``seq`` is None for spans that no sidecar numbered.
    """

    process: Process
    scope: str
    seq: int | None
    spans: Sequence[Span]


@dataclass(frozen=True, slots=True)
class LogBatch:
    """The log records of one scope, as ``SpanBatch``."""

    process: Process
    scope: str
    seq: int | None
    logs: Sequence[LogRecord]


@dataclass(frozen=True, slots=True)
class MetricBatch:
    """The metrics of one scope, as ``SpanBatch``."""

    process: Process
    scope: str
    seq: int | None
    metrics: Sequence[Metric]

    def samples(self) -> Sequence[DeviceRun | EngineSample | RequestCounts]:
        """Return the samples in the batch; device samples grouped by device."""
        return _READERS[self.scope](self.metrics, self.process)


_READERS: Final[Mapping[str, Callable[[Iterable[Metric], Process], Sequence[DeviceRun | EngineSample | RequestCounts]]]] = {
    SCOPE_DEVICES: read_devices,
    SCOPE_SAMPLES: read_samples,
    SCOPE_COUNTS: read_counts,
}
"""The reader of metrics for each scope."""


def batches(resource_spans: ResourceSpans) -> Iterator[SpanBatch]:
    """Yield one batch per scope."""
    process = process_of(resource_spans.resource)
    for scoped in resource_spans.scope_spans:
        yield SpanBatch(process, scoped.scope.name, _seq(scoped.scope), scoped.spans)


def log_batches(resource_logs: ResourceLogs) -> Iterator[LogBatch]:
    """Yield one batch per scope that sidecars send."""
    process = process_of(resource_logs.resource)
    for scoped in resource_logs.scope_logs:
        if scoped.scope.name == SCOPE_EVENTS:
            yield LogBatch(process, scoped.scope.name, _seq(scoped.scope), scoped.log_records)


def metric_batches(resource_metrics: ResourceMetrics) -> Iterator[MetricBatch]:
    """Yield one batch per scope that sidecars send."""
    process = process_of(resource_metrics.resource)
    for scoped in resource_metrics.scope_metrics:
        if scoped.scope.name in _READERS:
            yield MetricBatch(process, scoped.scope.name, _seq(scoped.scope), scoped.metrics)


def _seq(scope: InstrumentationScope) -> int | None:
    return next((a.value.int_value for a in scope.attributes if a.key == BATCH_SEQ), None)


class RecordDecoder:
    """Decode spans with Handrail's own readers first, then with the engine adapters.

    Counts what looked like evidence and was unreadable (``unreadable``).
    """

    def __init__(self) -> None:
        self.unreadable = 0
        self._adapters = load_all()

    def read(self, span: Span, scope: str, process: Process, attributes: Attributes) -> Item | None:
        """Return the record of ``span``, or None.

        None: the span concerns no single request, or is unusable.
        """
        if scope in (SCOPE_PROXY, SCOPE_PLUGIN):
            reader = read_exchange if scope == SCOPE_PROXY else read_plugin_span
            try:
                return reader(span, process, attributes)
            except ValueError:
                self.unreadable += 1
                return None
        for adapter in self._adapters:
            if adapter.claims(span, scope):
                return adapter.read(span, process, attributes)
        return None

    def read_log(self, log: LogRecord, process: Process) -> Event | None:
        """Return the record of ``log``; None for another kind of event or an unusable one."""
        try:
            return read_plugin_log(log, process) or read_fact(log, process)
        except ValueError:
            self.unreadable += 1
            return None
