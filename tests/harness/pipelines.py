"""A collector without sockets, for tests.

Journal, pipeline and store are in one folder; the test moves the clock.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.trace import Tracer

from builders.plugin import fetch, publish, times
from builders.records import EPOCH, split_request
from handrail.conventions import BATCH_SEQ, SCOPE_EVENTS, SCOPE_PLUGIN, SCOPE_PROXY
from handrail.otlp.payload import with_batch_seq
from handrail.otlp.signals import Signal
from handrail.records import Exchange, LogFact, Record, Role
from handrail.records.devices import DeviceSample
from handrail.telemetry.tracing import NO_TRACES
from handrail.wal.filesystem import Filesystem
from handrail.wire.device_samples import DeviceMetrics, devices_request
from handrail.wire.exchange import resource_of, to_span
from handrail.wire.log_events import fact_log
from handrail.wire.plugin import plugin_log, plugin_spans
from handrail_collector.journal.journal import Journal, JournalSettings
from handrail_collector.pipeline import Pipeline, PipelineSettings
from handrail_collector.rows import RequestRow
from handrail_collector.stitch.stitcher import SECOND
from handrail_collector.store.filters import RequestFilter
from handrail_collector.store.publish import StorePublisher
from handrail_collector.store.read import StoreReader

START = EPOCH + 100 * SECOND
WAIT_S = 60.0


class Clock:
    """The collector's wall clock, moved by hand."""

    def __init__(self) -> None:
        self.now = START

    def __call__(self) -> int:
        return self.now

    @classmethod
    def at(cls, unix_ns: int) -> Clock:
        """Return a clock that shows this time."""
        clock = cls()
        clock.now = unix_ns
        return clock


@asynccontextmanager
async def running(
    root: Path,
    clock: Clock,
    *,
    files: Filesystem | None = None,
    forward: Callable[[Signal, bytes], None] | None = None,
    tracer: Tracer = NO_TRACES,
    **settings: Any,
) -> Any:
    """Run a collector without sockets; leaving the context stops it cleanly."""
    publisher = StorePublisher(root / "store", files=files)
    recovered = publisher.open()
    log = JournalSettings(folder=root / "journal").open_log(floor=recovered.end_offset, files=files)
    journal = Journal(log, now_unix_ns=clock, tracer=tracer)
    pipeline = Pipeline(
        journal,
        publisher,
        recovered,
        PipelineSettings(flush_interval_ns=3600 * SECOND, **settings),
        forward=forward,
        now_unix_ns=clock,
        tracer=tracer,
    )
    await journal.start()
    task = asyncio.create_task(pipeline.run())
    try:
        yield journal, pipeline
    finally:
        await journal.shutdown()
        try:
            await task
        finally:
            publisher.close()


def batch(records: Sequence[Record], seq: int | None = 1, sender: str = "s1") -> bytes:
    """Build one sender's batch of proxy spans."""
    request = ExportTraceServiceRequest()
    scoped = request.resource_spans.add(resource=resource_of(replace(records[0].process, sender=sender))).scope_spans.add()
    scoped.scope.name = SCOPE_PROXY
    if seq is not None:
        scoped.scope.attributes.add(key=BATCH_SEQ).value.int_value = seq
    scoped.spans.extend(to_span(r) for r in records if isinstance(r, Exchange))
    return request.SerializeToString()


def plugin_batch(records: Sequence[Any], seq: int) -> bytes:
    """Build a batch of the plugin's spans, from one sidecar."""
    request = ExportTraceServiceRequest()
    resource = resource_of(replace(records[0].process, sender="plugin"))
    scoped = request.resource_spans.add(resource=resource).scope_spans.add()
    scoped.scope.name = SCOPE_PLUGIN
    scoped.scope.attributes.add(key=BATCH_SEQ).value.int_value = seq
    for record in records:
        scoped.spans.extend(plugin_spans(record))
    return request.SerializeToString()


def log_batch(records: Sequence[Any], seq: int) -> bytes:
    """Build a batch of log records from one sidecar."""
    request = ExportLogsServiceRequest()
    for index, record in enumerate(records):
        resource = resource_of(replace(record.process, sender=f"plugin-{index}"))
        scoped = request.resource_logs.add(resource=resource).scope_logs.add()
        scoped.scope.name = SCOPE_EVENTS
        scoped.scope.attributes.add(key=BATCH_SEQ).value.int_value = seq
        scoped.log_records.append(fact_log(record) if isinstance(record, LogFact) else plugin_log(record))
    return request.SerializeToString()


def device_batch(samples: Sequence[DeviceSample], seq: int) -> bytes:
    """Build a batch of device samples from one sidecar."""
    metrics = DeviceMetrics({})
    for sample in samples:
        metrics.add(sample)
    resource = resource_of(samples[0].process)
    return with_batch_seq(devices_request(resource, metrics), seq)


async def taken(pipeline: Pipeline, journal: Journal) -> None:
    """Wait until the pipeline has everything that the journal has.

    This includes replayed entries.
    """
    await until(lambda: pipeline._position >= journal.end)


def sweep(pipeline: Pipeline, now: int) -> None:
    """Decide everything that is due at `now` (Unix ns): all slices, one after another."""
    pipeline._sweep(now)
    while pipeline.stitcher.sweeping:
        pipeline._sweep(now)


async def until(done: Callable[[], bool]) -> None:
    async def turn() -> None:
        while not done():  # noqa: ASYNC110 - the pipeline has nothing to wait on; every turn of the loop moves it on
            await asyncio.sleep(0)

    await asyncio.wait_for(turn(), WAIT_S)


def stored(root: Path) -> list[RequestRow]:
    reader = StoreReader(root / "store")
    try:
        return reader.requests(RequestFilter(limit=10_000))
    finally:
        reader.close()


def proxies(rid: str, trace: str, at_ms: float = 0) -> list[Exchange]:
    return [r for r in split_request(rid, trace, at_ms).values() if isinstance(r, Exchange)]


async def send(journal: Journal, records: Iterable[Exchange], first_seq: int = 1) -> None:
    """Send each record in a batch of its own, with one sender per role."""
    for number, record in enumerate(records, first_seq):
        await journal.consume(Signal.TRACES, batch([record], number, record.process.role.value))


def a_request(rid: str = "req-a", trace: str = "t1", at_ms: float = 0) -> tuple[list[Any], list[Any]]:
    """Build one request's records: its proxies, and the plugin's spans of P and D."""
    edge, p, d = proxies(rid, trace, at_ms)
    raw_p, raw_d = f"cmpl-{rid}-0-0000aaaa", f"cmpl-{rid}-0-0000dddd"
    at_p = [
        times(Role.PREFILL, at_ms + 12, 20, 92, 93, rid=raw_p, parent=p, trace=trace),
        publish(at_ms + 105, rid=raw_p, parent=p),
    ]
    at_d = [
        times(Role.DECODE, at_ms + 133, 110, 150, 850, rid=raw_d, parent=d, trace=trace),
        fetch(at_ms + 134, rid=raw_d, peer=raw_p, parent=d, trace=trace),
    ]
    return [edge, p, d], [at_p, at_d]
