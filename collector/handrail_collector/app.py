"""Run the collector's process.

Its parts are the receivers, journal, pipeline, store, forward sinks and the API, in the order of the data.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Sequence
from contextlib import AsyncExitStack
from functools import partial

from opentelemetry.sdk.resources import Resource

from handrail.config.listeners import ListenerSecurity, bound, write_ready
from handrail.config.schema import plain
from handrail.config.telemetry import OtlpMetricsConfig
from handrail.metrics.registry import AnyMetricDef, Registry
from handrail.otlp.endpoint import parse_endpoint
from handrail.otlp.receiver.server import OtlpServer
from handrail.otlp.security import ClientSecurity
from handrail.otlp.settings import NAMELESS, ClientSettings
from handrail.otlp.signals import Signal
from handrail.runtime.descriptors import raise_limit
from handrail.runtime.process import Component, Stop, freeze_gc, start
from handrail.runtime.process import run as run_process
from handrail.security.file_reload import Watcher
from handrail.telemetry.exporters import Outlet, metric_exporter
from handrail.telemetry.metrics import OtlpMetrics, OtlpMetricsStats
from handrail.telemetry.resource import process_resource
from handrail.telemetry.traces import own_traces
from handrail.telemetry.tracing import NO_TRACES
from handrail_collector.api.server import ApiServer
from handrail_collector.config import CollectorConfig
from handrail_collector.journal.journal import Journal, JournalSettings
from handrail_collector.metrics.registry import page_rows
from handrail_collector.metrics.slow_links import SlowLinks
from handrail_collector.pipeline import Pipeline, PipelineSettings
from handrail_collector.sinks.otlp import ForwardSettings, OtlpForward
from handrail_collector.status import Running, collector_gates
from handrail_collector.stitch.stitcher import StitchSettings
from handrail_collector.store.maintenance import ClockStepGuard, Upkeep, UpkeepSettings
from handrail_collector.store.manifest import StoreDamagedError
from handrail_collector.store.publish import StoreLockedError, StorePublisher
from handrail_collector.store.read import StoreReader

log = logging.getLogger(__name__)

DRAIN_S = 5.0
"""Time for running requests, queued forwards and open answers when the process stops."""


def run(config: CollectorConfig) -> int:
    """Run until SIGTERM or Ctrl-C and return the exit code."""
    return run_process(_main(config))


async def _main(config: CollectorConfig) -> int:
    stop = Stop()
    limit = raise_limit()
    gates = collector_gates(config)
    protection = ListenerSecurity(config.tls, config.auth, [each.value for each in config.plaintext])
    protection.warn_of_open(config.listeners)
    resource = process_resource("handrail-collector", uuid.uuid4().hex, {})
    traces, tracing = own_traces(config.own_traces, resource)
    tracer = traces.tracer if traces is not None else NO_TRACES
    publisher = StorePublisher(config.data / "store")
    try:
        recovered = await asyncio.to_thread(publisher.open)
    except (StoreLockedError, StoreDamagedError) as error:
        raise OSError(str(error)) from error
    settings = JournalSettings(folder=config.data / "journal", max_bytes=config.journal_max_bytes)
    log_file = await asyncio.to_thread(lambda: settings.open_log(floor=recovered.end_offset))
    journal = Journal(log_file, max_pending_bytes=settings.max_pending_bytes, retry_delay_s=settings.retry_delay_s, tracer=tracer)
    forwards = tuple(OtlpForward(ForwardSettings(client=ClientSettings(endpoint=url, names=NAMELESS))) for url in config.forward)

    def forward(signal: Signal, payload: bytes) -> None:
        for each in forwards:
            each.offer(signal, payload)

    pipeline = Pipeline(
        journal,
        publisher,
        recovered,
        _pipeline_settings(config),
        journal_max_bytes=config.journal_max_bytes,
        forward=forward if forwards else None,
        tracer=tracer,
    )
    grpc, http = config.otlp_grpc, config.otlp_http
    receiver = OtlpServer(
        journal,
        grpc=(grpc.host, grpc.port) if grpc else None,
        http=(http.host, http.port) if http else None,
        loopback_only=False,  # the configuration's check covers this
        grpc_tls=protection.tls("otlp_grpc"),
        http_tls=protection.tls("otlp_http"),
        grpc_guard=protection.guard("otlp_grpc"),
        http_guard=protection.guard("otlp_http"),
        grpc_gate=gates.gate("otlp_grpc"),
        http_gate=gates.gate("otlp_http"),
    )
    api_guard = protection.guard("api", certificates=True)
    upkeep = Upkeep(publisher, _upkeep_settings(config), steady=ClockStepGuard(), tracer=tracer)
    pushing = _pushing(config.otlp_metrics)
    pushed_stats = OtlpMetricsStats() if pushing is not None else None
    running = Running(journal, pipeline, receiver, forwards, upkeep, time.time_ns(), gates, pushed_stats, traces)
    reader = StoreReader(config.data / "store")
    links = SlowLinks(reader)
    watched = [*protection.watched, *(file for each in (pushing, tracing) if each is not None for file in each.watched)]
    rows = page_rows(running, links, watched, protection.guards)
    work = _Work(journal, pipeline, publisher)
    components: list[tuple[str, Component]] = []
    if traces is not None:  # the last to stop, since it takes the spans of the others' ends
        components.append(("own_traces", traces))
    if pushing is not None and pushed_stats is not None:
        components.append(("otlp_metrics", _pushed(config.otlp_metrics, rows, resource, pushing, pushed_stats)))
    components += [
        *(("forward", each) for each in forwards),
        ("pipeline", work),
        ("upkeep", _Maintenance(upkeep, config.store.upkeep_interval.seconds)),
        ("certificates", Watcher(watched)),
        ("receivers", receiver),
    ]
    api = None
    if config.api is not None:
        api = ApiServer(
            reader,
            pipeline,
            running.status,
            config.api.host,
            config.api.port,
            metrics=Registry(rows),
            not_ready=running.not_ready,
            tls=protection.context("api", ask_only=True),
            guard=api_guard,
            gate=gates.gate("api"),
            tracer=tracer,
        )
        components.append(("api", api))
    if api is not None or pushing is not None:
        components.append(("links", links))
    async with AsyncExitStack() as stack:
        for name, component in components:
            await start(stack, name, component, DRAIN_S, tracer)
        addresses = bound(
            otlp_grpc=receiver.grpc_address, otlp_http=receiver.http_address, api=api.address if api is not None else None
        )
        log.info("collecting into %s: %s; %s", config.data, protection.describe(addresses, config.listeners), limit)
        log.debug("configuration: %s", plain(config))
        # The collector holds thousands of requests and none of them is a cycle: the default thresholds cost 15 % of the pipeline
        # (tests/bench/bench_pipeline.py: 6.9k spans/s, 7.5k with these, 8.1k without a collector at all).
        freeze_gc(young=50_000)
        if config.ready_file is not None:
            write_ready(config.ready_file, addresses)
        failed = await work.until(stop)
    fault = work.fault
    if journal.lost:  # possibly found only by the last publish of a stop
        log.error("%s; this process ends; all that it acknowledged is in the removed folder", journal.lost)
    elif not failed and fault is not None:
        log.error("the pipeline failed while stopping", exc_info=fault)
    return 1 if failed or journal.lost or fault is not None else 0


def _pushing(config: OtlpMetricsConfig) -> ClientSecurity | None:
    """Certificates of the backend of this process's metrics; None where none are sent."""
    if config.endpoint is None:
        return None
    return ClientSecurity(parse_endpoint(config.endpoint), config.client(config.endpoint), use="otlp_metrics")


def _pushed(
    config: OtlpMetricsConfig, rows: Sequence[AnyMetricDef], resource: Resource, peer: ClientSecurity, stats: OtlpMetricsStats
) -> OtlpMetrics:
    assert config.endpoint is not None
    outlet = partial(Outlet, metric_exporter, config.client(config.endpoint), peer, Signal.METRICS)
    return OtlpMetrics(rows, resource, outlet, config.interval.seconds, stats=stats)


class _Work:
    """The journal and the pipeline that reads it, as one component.

    Neither ends without the other.
    """

    def __init__(self, journal: Journal, pipeline: Pipeline, publisher: StorePublisher) -> None:
        self._journal = journal
        self._pipeline = pipeline
        self._publisher = publisher
        self._task: asyncio.Task[None] | None = None

    @property
    def fault(self) -> BaseException | None:
        """The error that ended the pipeline; None while it runs, and after a clean end."""
        return self._task.exception() if self._task is not None and self._task.done() else None

    async def start(self) -> None:
        await self._journal.start()
        self._task = asyncio.create_task(self._pipeline.run())

    async def until(self, stop: Stop) -> bool:
        """Wait for a signal to stop.

        Returns True when the pipeline or the journal's folder ended first.
        """
        assert self._task is not None
        stopped, gone = asyncio.create_task(stop.wait()), asyncio.create_task(self._journal.gone())
        await asyncio.wait({stopped, self._task, gone}, return_when=asyncio.FIRST_COMPLETED)
        failed = not stopped.done()
        if failed and not self._journal.lost:
            log.error("the pipeline ended without a request to stop", exc_info=self._task.exception())
        stopped.cancel()
        gone.cancel()
        return failed

    async def shutdown(self, drain_seconds: float) -> None:
        # At the journal's end the pipeline reads the rest and publishes; only then may the store be released.
        await self._journal.shutdown()
        if self._task is not None:
            await asyncio.wait({self._task})
        self._publisher.close()


class _Maintenance:
    """Runs a maintenance pass at the start and after every interval, in a thread."""

    def __init__(self, upkeep: Upkeep, interval_s: float) -> None:
        self._upkeep = upkeep
        self._interval_s = interval_s
        self._ending = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def shutdown(self, drain_seconds: float) -> None:
        self._ending.set()
        self._upkeep.stop()
        task, self._task = self._task, None
        if task is not None:
            await task

    async def _run(self) -> None:
        while not self._ending.is_set():
            await asyncio.to_thread(self._upkeep.run_pass)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._ending.wait(), self._interval_s)


def _upkeep_settings(config: CollectorConfig) -> UpkeepSettings:
    store = config.store
    return UpkeepSettings(
        closed_after_ns=store.compact_after,
        grace_ns=store.grace,
        retention_ns=store.retention,
        samples_retention_ns=store.samples_retention,
        max_bytes=store.max_bytes,
        rollups=True,
    )


def _pipeline_settings(config: CollectorConfig) -> PipelineSettings:
    decision = config.decision
    return PipelineSettings(
        flush_interval_ns=config.flush_interval,
        hung_ns=decision.hung_after,
        stitch=StitchSettings(
            settle_ns=decision.settle,
            engine_wait_ns=decision.engine_wait,
            max_open_ns=decision.max_open,
            max_groups=decision.max_open_requests,
        ),
    )
