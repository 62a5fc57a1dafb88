"""Traces of Handrail's own work: the SDK samples, batches and exports the spans."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, ParentBased, Sampler, SamplingResult, TraceIdRatioBased
from opentelemetry.trace import Tracer

import handrail
from handrail import conventions as names
from handrail.config.telemetry import OwnTracesConfig
from handrail.metrics.registry import MetricDef, by_label
from handrail.otlp.endpoint import parse_endpoint
from handrail.otlp.security import ClientSecurity
from handrail.otlp.signals import Signal
from handrail.runtime.threads import in_daemon_thread
from handrail.telemetry.exporters import Outlet, ignore_environment, span_exporter

log = logging.getLogger(__name__)

MAX_QUEUE: Final = 2048
"""Most ended spans that wait for the exporter; further ones are dropped and counted."""

_BATCH: Final = 256
_DELAY_S: Final = 5.0


class SpanOutlet(Protocol):
    """What sends: ``handrail.telemetry.exporters.Outlet``."""

    endpoint: str

    @property
    def current(self) -> SpanExporter: ...

    def close(self) -> None: ...

    async def why(self) -> str: ...


@dataclass(slots=True)
class OwnTracesStats:
    """Counts of own spans since start."""

    sent: int = 0
    failed: int = 0  # the backend took them not even after the exporter's retries
    dropped: int = 0  # the queue was full, or the process had stopped
    waiting: int = 0


class OwnTraces:
    """Spans of this process's own work, made by ``tracer`` and sent in batches.

    It never blocks or fails the work: ended spans wait in a bounded queue for a thread. ``start`` and ``shutdown`` belong to the
    event loop. ``shutdown`` sends what waits for up to ``drain_seconds``; it works without ``start`` and twice.
    """

    def __init__(
        self,
        resource: Resource,
        sample_ratio: float,
        make_outlet: Callable[[], SpanOutlet],
        *,
        max_queue: int = MAX_QUEUE,
        delay_s: float = _DELAY_S,
    ) -> None:
        ignore_environment()
        self.stats = OwnTracesStats()
        self._make_outlet = make_outlet
        self._max_queue = max_queue
        self._delay_s = delay_s
        self._provider = TracerProvider(ParentBased(OperationSampler(sample_ratio)), resource, shutdown_on_exit=False)
        self.tracer: Tracer = self._provider.get_tracer(names.SCOPE_OWN, handrail.__version__)
        self._outlet: SpanOutlet | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._in_trouble = False
        self._explaining: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to send.

        A backend that is not there yet is a state, not an error. Raises the errors of ``make_outlet``.
        """
        self._loop = asyncio.get_running_loop()
        self._outlet = self._make_outlet()
        self._provider.add_span_processor(_Bounded(self._outlet, self.stats, self._max_queue, self._delay_s, self._report))

    async def shutdown(self, drain_seconds: float) -> None:
        outlet, self._outlet = self._outlet, None
        if outlet is None:
            return
        try:
            await asyncio.wait_for(in_daemon_thread(self._provider.shutdown, "handrail-own-traces"), drain_seconds)
        except asyncio.TimeoutError:
            log.warning("stopped with %d own spans that %s has not accepted", self.stats.waiting, outlet.endpoint)
            outlet.close()
        if self._explaining is not None:
            self._explaining.cancel()
            await asyncio.gather(self._explaining, return_exceptions=True)

    def _report(self, taken: bool) -> None:
        """Note the fate of a batch; called in the exporter's thread."""
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._note, taken)

    def _note(self, taken: bool) -> None:
        if taken == (not self._in_trouble) or self._outlet is None:
            return
        self._in_trouble = not taken
        if taken:
            log.info("%s accepts own traces again", self._outlet.endpoint)
        else:
            self._explaining = asyncio.create_task(self._explain(self._outlet))

    async def _explain(self, outlet: SpanOutlet) -> None:
        log.warning("the backend does not accept own traces, which are lost meanwhile: %s", await outlet.why())


def own_traces(config: OwnTracesConfig, resource: Resource) -> tuple[OwnTraces | None, ClientSecurity | None]:
    """Make what ``config`` enables, and the watcher of its backend's certificates.

    Both are None where nothing is sent.
    """
    if config.endpoint is None:
        return None, None
    client = config.client(config.endpoint)
    security = ClientSecurity(parse_endpoint(client.endpoint), client, use="own_traces")
    traces = OwnTraces(resource, config.sample_ratio, lambda: Outlet(span_exporter, client, security, Signal.TRACES))
    return traces, security


class OperationSampler(Sampler):
    """Sample every trace of a rare operation, and a share of those of frequent ones.

    One ratio for all would lose the daily retention pass among the journal's commits.
    """

    def __init__(self, ratio: float) -> None:
        self._frequent = TraceIdRatioBased(ratio)

    def should_sample(
        self, parent_context: Context | None, trace_id: int, name: str, *args: Any, **kwargs: Any
    ) -> SamplingResult:
        sampler = self._frequent if name in names.OWN_FREQUENT else ALWAYS_ON
        return sampler.should_sample(parent_context, trace_id, name, *args, **kwargs)

    def get_description(self) -> str:
        return f"OperationSampler{{{self._frequent.rate}}}"


class _Bounded(SpanProcessor):
    """The SDK's batches behind a queue that counts what it drops.

    The SDK's own queue does not count.
    """

    def __init__(
        self, outlet: SpanOutlet, stats: OwnTracesStats, max_queue: int, delay_s: float, report: Callable[[bool], None]
    ) -> None:
        self._stats = stats
        self._max_queue = max_queue
        self._lock = threading.Lock()  # guards the counts: spans end in any thread
        self._closed = False
        self._batches = BatchSpanProcessor(
            _Sender(outlet, stats, self._lock, report),
            max_queue_size=max_queue,
            schedule_delay_millis=delay_s * 1e3,
            max_export_batch_size=min(_BATCH, max_queue),
        )

    def on_end(self, span: ReadableSpan) -> None:
        with self._lock:
            if self._closed or self._stats.waiting >= self._max_queue:
                self._stats.dropped += 1
                return
            self._stats.waiting += 1
        self._batches.on_end(span)

    def shutdown(self) -> None:
        with self._lock:
            self._closed = True
        self._batches.shutdown()  # type: ignore[no-untyped-call]

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return self._batches.force_flush(timeout_millis)


class _Sender(SpanExporter):
    """The exporter of a batch's thread, which counts what became of the spans."""

    def __init__(self, outlet: SpanOutlet, stats: OwnTracesStats, lock: threading.Lock, report: Callable[[bool], None]) -> None:
        self._outlet = outlet
        self._stats = stats
        self._lock = lock
        self._report = report

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        try:
            result = self._outlet.current.export(spans)
        except Exception:  # an error of the exporter is a batch that is lost, not the end of the thread
            result = SpanExportResult.FAILURE
        taken = result is SpanExportResult.SUCCESS
        with self._lock:
            self._stats.waiting -= len(spans)
            if taken:
                self._stats.sent += len(spans)
            else:
                self._stats.failed += len(spans)
        self._report(taken)
        return result

    def shutdown(self) -> None:
        self._outlet.close()


def own_traces_rows(stats: OwnTracesStats, prefix: str) -> list[MetricDef]:
    """Rows of /metrics about own traces."""
    return [
        MetricDef(
            f"{prefix}_own_spans",
            "counter",
            "Spans of this process's own work, by fate: sent; failed: the backend did not accept them; "
            "dropped: the queue was full",
            lambda: by_label({"sent": stats.sent, "failed": stats.failed, "dropped": stats.dropped}),
            ("outcome",),
        )
    ]
