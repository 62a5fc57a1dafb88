"""The sidecar process: build, start and stop the parts that the settings ask for.

The parts are an inline proxy, taps for spans, logs and metrics, the plugin's socket, and the exporter that they feed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

from handrail import conventions as names
from handrail.config.addresses import bound, write_ready
from handrail.config.listeners import ListenerSecurity
from handrail.device_counters.gpu import ALL as GPU_COUNTERS
from handrail.device_counters.link import COUNTERS as LINK_COUNTERS
from handrail.metrics.histogram import Histogram
from handrail.metrics.otlp_histogram import ExponentialHistogram
from handrail.metrics.otlp_push import OtlpMetrics, OtlpMetricsStats
from handrail.metrics.registry import AnyMetricDef, Registry
from handrail.otlp.client import OtlpClient
from handrail.otlp.endpoint import parse_endpoint
from handrail.otlp.receiver import grpc_front
from handrail.otlp.security import ClientSecurity
from handrail.otlp.settings import ClientSettings
from handrail.records import Process, Role
from handrail.runtime.admin_http import AdminServer
from handrail.runtime.connections import Gates
from handrail.runtime.descriptors import DescriptorBudget, raise_limit
from handrail.runtime.process import Parts, Stop, freeze_gc
from handrail.runtime.process import run as run_process
from handrail.security.file_reload import Watcher
from handrail.wire.counts import CountsExport
from handrail.wire.device_samples import named
from handrail_sidecar.engine_metrics.liveness import ProgressSettings
from handrail_sidecar.export.device_batches import DeviceBatches
from handrail_sidecar.export.evidence import EvidenceExport
from handrail_sidecar.export.exporter import Exporter, ExportSettings
from handrail_sidecar.export.resource import new_sender_id, own_process, own_resource, tap_attributes
from handrail_sidecar.gpu.state import SamplerSettings
from handrail_sidecar.links.sampler import LinkSamplerSettings
from handrail_sidecar.live_metrics.engine_metrics import EventCounts
from handrail_sidecar.live_metrics.requests import LiveRequests
from handrail_sidecar.live_metrics.sidecar_metrics import Made, SpanWatch, sidecar_rows
from handrail_sidecar.live_metrics.slo import RequestObjectives
from handrail_sidecar.proxy.settings import ProxySettings
from handrail_sidecar.settings import LogStart, NewTraces, RequestIdMode, SidecarConfig
from handrail_sidecar.sources.dcgm import DcgmSource
from handrail_sidecar.sources.engine_log import LogSettings, LogSource
from handrail_sidecar.sources.engine_metrics import MetricsSettings, MetricsSource
from handrail_sidecar.sources.gpu import NvmlSource
from handrail_sidecar.sources.links import LinkSource
from handrail_sidecar.sources.log_tail import TailSettings
from handrail_sidecar.sources.otlp_tap import OtlpTap, TapSettings
from handrail_sidecar.sources.plugin_socket import PluginSource
from handrail_sidecar.sources.proxy import ProxySource
from handrail_sidecar.sources.self_pauses import OwnPauses

log = logging.getLogger(__name__)

CHECK_WINDOW_S = 30.0
"""Length of one window of the check that the engine exports spans.

Requests in two of these windows and no span from the engine mean that its exporter is not set up (case C05).
"""

SAMPLES_SHARE = 4
"""Part of the spool, as a divisor, that may wait before samples are dropped.

The part is a quarter.

The rest of the spool is for the records of requests.
"""

RESERVED_DESCRIPTORS = 128
"""Descriptors kept for the spool, the log files, the samplers and the exporter."""

LISTENER_SHARES = {"otlp_grpc": (1 / 4, grpc_front.DESCRIPTORS), "otlp_http": (1 / 8, 1), "admin": (1 / 8, 1)}
"""Each listener's share of the other descriptors, and descriptors per connection.

The proxy gets the remaining half.
"""


def run(config: SidecarConfig) -> int:
    """Run until SIGTERM or Ctrl-C; return the exit code."""
    return run_process(_main(config.resolved()))


def make(config: SidecarConfig) -> Made:
    """Build the parts that ``config`` enables; start none of them."""
    process = own_process(config.role, config.instance, sender=new_sender_id(), service_name=config.service_name)
    protection = ListenerSecurity(config.tls, config.auth, [each.value for each in config.plaintext])
    gates = Gates(config.connections, DescriptorBudget.of_process(RESERVED_DESCRIPTORS), LISTENER_SHARES)
    client = config.collector.client
    security = _security(client, "collector")
    backend = config.otlp_metrics.endpoint
    exporter = Exporter(
        ExportSettings(folder=config.spool.dir, max_bytes=config.spool.max_bytes),
        own_resource(process, cluster=config.cluster),
        lambda: OtlpClient(client, security),
    )
    tap = _tap(config, process, exporter, protection, gates)
    kind = ExponentialHistogram if backend is not None else Histogram
    objectives = RequestObjectives(ttft_ns=config.slo.ttft.ns, itl_ns=config.slo.itl.ns)
    live = LiveRequests(config.role, objectives, wall=time.time_ns, make=kind)
    proxy = _proxy(config, process, exporter, live, protection, gates.budget, tapped=tap is not None)
    counts = None
    if proxy is not None and config.role is Role.EDGE:
        counts = CountsExport(own_resource(process, cluster=config.cluster), proxy.stats.outcomes, exporter.take)
    evidence = EvidenceExport(own_resource(process, cluster=config.cluster), exporter.take)
    logs = _logs(config, process, evidence)
    events = EventCounts(exporter.sink)
    scraper = _scraper(config, process, evidence, events, proxy)
    plugin = None
    if config.plugin_socket is not None:
        line = logs.say if logs is not None else None
        plugin = PluginSource(
            config.plugin_socket, process, exporter.sink, line=line, live=live, count_exchanges=proxy is None, make=kind
        )
    devices = _devices(config, process, exporter)
    links = _links(config, process, devices)
    gpus = _gpus(config, process, exporter, devices)
    own = OwnPauses(process, exporter.sink) if proxy is not None else None
    return Made(
        config=config,
        process=process,
        client=client,
        protection=protection,
        gates=gates,
        security=security,
        exporter=exporter,
        live=live,
        proxy=proxy,
        counts=counts,
        tap=tap,
        plugin=plugin,
        logs=logs,
        scraper=scraper,
        events=events,
        devices=devices,
        links=links,
        gpus=gpus,
        own=own,
        watch=SpanWatch(),
        resource=own_resource(process, cluster=config.cluster),
        pushed=OtlpMetricsStats() if backend is not None else None,
        pushing=_security(config.otlp_metrics.client(backend), "otlp_metrics") if backend is not None else None,
    )


async def _main(config: SidecarConfig) -> int:
    stop = Stop()
    limit = raise_limit()
    made = make(config)
    protection = made.protection
    protection.warn_of_open(config.listeners)
    exporter, proxy, tap, plugin, logs, scraper = made.exporter, made.proxy, made.tap, made.plugin, made.logs, made.scraper
    devices, links, gpus, own, watch, client = made.devices, made.links, made.gpus, made.own, made.watch, made.client
    admin_guard = protection.guard("admin", certificates=True)
    rows = sidecar_rows(made)
    metrics, pushed = Registry(rows), _pushed(made, rows)
    drain_s = config.drain.seconds
    parts = Parts()
    addresses: dict[str, str] = {}
    state = {"not_ready": "starting"}
    if config.admin is not None:  # first to start and last to stop, so that a drain can be watched
        admin = AdminServer(
            config.admin.host,
            config.admin.port,
            metrics,
            lambda: state["not_ready"] or (proxy.problem() if proxy is not None else "") or made.gates.problem(),
            degraded=lambda: exporter.degraded,
            tls=protection.context("admin", ask_only=True),
            guard=admin_guard,
            gate=made.gates.gate("admin"),
        )
        await parts.start("admin", admin.start(), admin.shutdown)
        addresses.update(bound(admin=admin.address))
    watcher = Watcher(made.watched)
    await parts.start("certificates", watcher.start(), watcher.shutdown)
    await parts.start("exporter", exporter.start(), lambda: exporter.shutdown(min(drain_s, 5.0)))
    if pushed is not None:
        await parts.start("otlp_metrics", pushed.start(), lambda: pushed.shutdown(min(drain_s, 5.0)))
    await parts.start("devices", devices.start(), devices.shutdown)
    if tap is not None:
        await parts.start("tap", tap.start(), lambda: tap.shutdown(min(drain_s, 5.0)))
        addresses.update(bound(otlp_grpc=tap.grpc_address, otlp_http=tap.http_address))
    if logs is not None:
        await parts.start("log", logs.start(), lambda: logs.shutdown(min(drain_s, 5.0)))
    if scraper is not None:
        await parts.start("metrics", scraper.start(), lambda: scraper.shutdown(min(drain_s, 5.0)))
    if links is not None:
        await parts.start("links", links.start(), lambda: links.shutdown(min(drain_s, 5.0)))
    if gpus is not None:
        await parts.start("gpus", gpus.start(), lambda: gpus.shutdown(min(drain_s, 5.0)))
    if plugin is not None:
        await parts.start("plugin", plugin.start(), lambda: plugin.shutdown(min(drain_s, 5.0)))
        addresses["plugin"] = str(plugin.path)
    if own is not None:
        await parts.start("pauses", own.start(), own.shutdown)
    if made.counts is not None:
        await parts.start("counts", made.counts.start(), made.counts.shutdown)
    if proxy is not None:
        await parts.start("proxy", proxy.start(), lambda: proxy.shutdown(drain_s))
        addresses.update(bound(proxy=proxy.address))
    seen = {**addresses, **({"metrics": str(config.metrics.url)} if scraper is not None else {})}
    seen |= {"log": " ".join(config.log.files)} if config.log.files else {}
    what = protection.describe(seen, config.listeners)
    log.info("observing %s %s: %s; %s", config.role.value, config.instance, what, limit)
    freeze_gc(young=5_000)
    state["not_ready"] = ""
    if config.ready_file is not None:
        write_ready(config.ready_file, addresses)
    background = [asyncio.create_task(_check_collector(client, made.security))]
    if tap is not None and proxy is not None:
        background.append(asyncio.create_task(_watch_spans(watch, proxy, tap)))
    await stop.wait()
    state["not_ready"] = "stopping: draining running requests"
    for task in background:
        task.cancel()
    await asyncio.gather(*background, return_exceptions=True)
    await parts.end()
    return 0


def _security(client: ClientSettings, section: str) -> ClientSecurity:
    """TLS, token and endpoint of a connection that the sidecar opens.

    ``section``: the section of the settings; metrics name the peer by it.
    """
    return ClientSecurity(parse_endpoint(client.endpoint), client, use=section)


def _pushed(made: Made, rows: Sequence[AnyMetricDef]) -> OtlpMetrics | None:
    config = made.config.otlp_metrics
    if config.endpoint is None:
        return None
    client = config.client(config.endpoint)
    return OtlpMetrics(rows, made.resource, lambda: OtlpClient(client, made.pushing), config.interval.seconds, stats=made.pushed)


def _tap(
    config: SidecarConfig, process: Process, exporter: Exporter, protection: ListenerSecurity, gates: Gates
) -> OtlpTap | None:
    if config.otlp_grpc is None and config.otlp_http is None:
        return None
    grpc, http = config.otlp_grpc, config.otlp_http
    return OtlpTap(
        TapSettings(
            grpc_host=grpc.host if grpc else "127.0.0.1",
            grpc_port=grpc.port if grpc else None,
            http_host=http.host if http else "127.0.0.1",
            http_port=http.port if http else None,
            resource={**tap_attributes(process), **({names.CLUSTER: config.cluster} if config.cluster else {})},
            loopback_only=False,  # the check of the configuration made sure of it
            tls=protection.tls("tap"),
            guard=protection.guard("tap"),
            grpc_gate=gates.gate("otlp_grpc") if grpc else None,
            http_gate=gates.gate("otlp_http") if http else None,
        ),
        exporter.take,
    )


def _proxy(
    config: SidecarConfig,
    process: Process,
    exporter: Exporter,
    live: LiveRequests,
    protection: ListenerSecurity,
    budget: DescriptorBudget,
    *,
    tapped: bool,
) -> ProxySource | None:
    if config.listen is None or config.upstream is None:
        return None
    settings = ProxySettings(
        listen_host=config.listen.host,
        listen_port=config.listen.port,
        upstream_host=config.upstream.host,
        upstream_port=config.upstream.port,
        role=config.role,
        process=process,
        trace_context=config.trace_context.value,
        request_id="add" if config.request_id is RequestIdMode.ADD else "pass",
        engine_exports_to_us=tapped if config.new_traces is NewTraces.AUTO else config.new_traces is NewTraces.SAMPLED,
        drain_seconds=config.drain.seconds,
        head_timeout_s=config.proxy.head_timeout.seconds,
        idle_timeout_s=config.proxy.idle_timeout.seconds,
        max_streams=config.proxy.max_streams,
        tls=protection.context("proxy"),
    )
    return ProxySource(settings, exporter.sink, live=live, budget=budget)


def _logs(config: SidecarConfig, process: Process, evidence: EvidenceExport) -> LogSource | None:
    """Build the log tap for files and for the lines that the plugin's handler sends."""
    if not config.log.files and config.plugin_socket is None:
        return None
    settings = LogSettings(
        paths=config.log.files,
        tail=TailSettings(from_start=config.log.start is LogStart.START),
        positions=config.spool.dir / "positions" if config.spool.dir is not None else None,
    )
    return LogSource(settings, process, evidence.facts)


def _scraper(
    config: SidecarConfig, process: Process, evidence: EvidenceExport, events: EventCounts, proxy: ProxySource | None
) -> MetricsSource | None:
    if config.metrics.url is None:
        return None
    settings = MetricsSettings(
        url=config.metrics.url,
        interval_s=config.metrics.interval.seconds,
        timeout_s=config.metrics.timeout.seconds,
        headers=config.metrics.headers,
        progress=ProgressSettings(hung_after_ns=config.metrics.hung_after.ns),
    )
    stats = proxy.stats if proxy is not None else None
    open_requests = None if stats is None else lambda: stats.requests - stats.passed - sum(stats.outcomes.values())
    return MetricsSource(settings, process, evidence.sample, events, open_requests=open_requests)


def _devices(config: SidecarConfig, process: Process, exporter: Exporter) -> DeviceBatches:
    """Gather the samples of GPUs and links; takes them from any thread."""

    def room() -> bool:
        return exporter.waiting_bytes * SAMPLES_SHARE <= config.spool.max_bytes

    return DeviceBatches(
        own_resource(process, cluster=config.cluster), named(gpu=GPU_COUNTERS, link=LINK_COUNTERS), exporter.take, room
    )


def _links(config: SidecarConfig, process: Process, devices: DeviceBatches) -> LinkSource | None:
    if not config.samples_links:
        return None
    settings = LinkSamplerSettings(root=config.links.sysfs, wanted=config.links.devices, interval_ns=config.links.interval.ns)
    return LinkSource(settings, process, devices.samples)


def _gpus(config: SidecarConfig, process: Process, exporter: Exporter, devices: DeviceBatches) -> NvmlSource | DcgmSource | None:
    gpu = config.gpu
    if not config.samples_gpus:
        return None
    if gpu.dcgm_url is not None:
        return DcgmSource(MetricsSettings(url=gpu.dcgm_url), process, exporter.sink, devices.sample)
    settings = SamplerSettings(period_ns=gpu.interval.ns, devices=gpu.devices, without=frozenset(gpu.without))
    return NvmlSource(settings, process, exporter.sink, devices.sample)


async def _check_collector(client: ClientSettings, security: ClientSecurity) -> None:
    """Log once at start why the collector cannot be reached.

    The message is one line. The exporter goes on trying.
    """
    checker = OtlpClient(client, security)
    try:
        problem = await checker.check()
    finally:
        await checker.close()
    if problem:
        log.warning("collector %s: %s (spans wait in the spool)", client.endpoint, problem)


async def _watch_spans(watch: SpanWatch, proxy: ProxySource, tap: OtlpTap) -> None:
    while True:
        await asyncio.sleep(CHECK_WINDOW_S)
        if watch.look(proxy.stats.requests - proxy.stats.passed, tap.spans_seen):
            log.warning(
                "the engine sends no spans: requests pass and the tap gets nothing; start vLLM with --otlp-traces-endpoint "
                "(grpc://%s) and the packages that it needs for tracing; where clients send no traceparent, give the edge's "
                "sidecar --new-traces sampled",
                tap.grpc_address or tap.http_address,
            )
