"""The components of a sidecar: one list, in the order in which they start.

A new source is one more ``ComponentSpec``: how it is made from the config, its metrics, and the addresses that it binds.
``app.py`` starts the list from its beginning and shuts it down from its end. What several components need is in ``Sidecar``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Generic, TypeVar

from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.sdk.resources import Resource as SdkResource
from opentelemetry.trace import Tracer

from handrail import conventions as names
from handrail.config.listeners import ListenerSecurity, bound
from handrail.device_counters.gpu import ALL as GPU_COUNTERS
from handrail.device_counters.link import COUNTERS as LINK_COUNTERS
from handrail.metrics.histogram import ExponentialHistogram, Histogram
from handrail.metrics.registry import AnyMetricDef, Registry
from handrail.otlp.client import OtlpClient
from handrail.otlp.endpoint import parse_endpoint
from handrail.otlp.receiver import grpc_front
from handrail.otlp.receiver.server import OtlpServer
from handrail.otlp.security import ClientSecurity
from handrail.otlp.signals import Signal
from handrail.otlp.values import attributes_of
from handrail.records import Process, Role
from handrail.runtime.admin_http import AdminServer
from handrail.runtime.connections import Gates, connection_rows
from handrail.runtime.descriptors import DescriptorBudget
from handrail.runtime.process import Component
from handrail.security.file_reload import ReloadingFile, Watcher
from handrail.security.metrics import security_rows
from handrail.telemetry.exporters import Outlet, metric_exporter
from handrail.telemetry.metrics import OtlpMetrics, otlp_metrics_rows
from handrail.telemetry.resource import process_resource
from handrail.telemetry.traces import OwnTraces, own_traces, own_traces_rows
from handrail.telemetry.tracing import NO_TRACES
from handrail.wire.device_samples import named
from handrail_sidecar.engine_metrics.liveness import ProgressSettings
from handrail_sidecar.export.device_batches import DeviceBatches, device_rows
from handrail_sidecar.export.evidence import CountsExport, EvidenceExport
from handrail_sidecar.export.exporter import Exporter, ExportSettings
from handrail_sidecar.export.resource import new_sender_id, own_process, own_resource, tap_attributes
from handrail_sidecar.gpu.sampler import Sampler
from handrail_sidecar.gpu.state import SamplerSettings
from handrail_sidecar.links.sampler import LinkSamplerSettings
from handrail_sidecar.live_metrics.engine_metrics import EventCounts, engine_rows, log_rows
from handrail_sidecar.live_metrics.gpu_metrics import dcgm_rows, gpu_rows
from handrail_sidecar.live_metrics.link_metrics import link_rows
from handrail_sidecar.live_metrics.plugin_metrics import plugin_rows
from handrail_sidecar.live_metrics.request_metrics import live_rows
from handrail_sidecar.live_metrics.requests import LiveRequests
from handrail_sidecar.live_metrics.sidecar_metrics import identity_rows, own_rows, proxy_rows, tap_rows
from handrail_sidecar.live_metrics.slo import RequestObjectives
from handrail_sidecar.proxy.settings import ProxySettings
from handrail_sidecar.proxy.stats import ProxyStats
from handrail_sidecar.self_checks import CollectorCheck, SpanWatch
from handrail_sidecar.settings import LogStart, NewTraces, RequestIdMode, SidecarConfig
from handrail_sidecar.sources.dcgm import DcgmSource
from handrail_sidecar.sources.engine_log import LogSettings, LogSource
from handrail_sidecar.sources.engine_metrics import MetricsSettings, MetricsSource
from handrail_sidecar.sources.gpu import NvmlSource
from handrail_sidecar.sources.links import LinkSource
from handrail_sidecar.sources.log_tail import TailSettings
from handrail_sidecar.sources.otlp_tap import OtlpTap
from handrail_sidecar.sources.plugin_socket import PluginSource
from handrail_sidecar.sources.proxy import ProxySource
from handrail_sidecar.sources.self_pauses import OwnPauses, pause_rows

SAMPLES_SHARE: Final = 4
"""Part of the spool, as a divisor, that may wait before samples are dropped.

The part is a quarter. The rest of the spool is for the records of requests.
"""

RESERVED_DESCRIPTORS: Final = 128
"""Descriptors kept for the spool, the log files, the samplers and the exporter."""

LISTENER_SHARES: Final = {"otlp_grpc": (1 / 4, grpc_front.DESCRIPTORS), "otlp_http": (1 / 8, 1), "admin": (1 / 8, 1)}
"""Each listener's share of the other descriptors, and descriptors per connection.

The proxy gets the remaining half.
"""

TAP_IN_FLIGHT_BYTES: Final = 128 << 20

C = TypeVar("C", bound=Component)


def _no_rows(_sidecar: Sidecar, _component: Any) -> Sequence[AnyMetricDef]:
    return ()


def _no_addresses(_component: Any) -> Mapping[str, str]:
    return {}


@dataclass(frozen=True, slots=True)
class ComponentSpec(Generic[C]):
    """One component of the list.

    ``make``: None where the config does not want it; it may look at the components before it (``Sidecar.find``).
    ``most_drain_s``: longest time that its shutdown gets, of the config's ``drain``.
    """

    name: str
    make: Callable[[Sidecar], C | None]
    metrics: Callable[[Sidecar, C], Sequence[AnyMetricDef]] = _no_rows
    addresses: Callable[[C], Mapping[str, str]] = _no_addresses
    most_drain_s: float = 5.0


@dataclass(slots=True, kw_only=True)
class Sidecar:
    """One sidecar: its components, and what they share.

    ``components``: those that the config asks for. ``metrics``: of all of them, in the order of the page. ``not_ready``: why the
    process does no work now; '' while it does.
    """

    config: SidecarConfig
    process: Process
    resource: Resource
    protection: ListenerSecurity  # of everything that listens here
    gates: Gates  # of the same, except the proxy
    peers: Mapping[str, ClientSecurity]  # towards the collector and backends, by the section of the settings
    traces: OwnTraces | None
    exporter: Exporter
    evidence: EvidenceExport
    devices: DeviceBatches
    live: LiveRequests
    proxied: ProxyStats
    events: EventCounts
    histogram: type[Histogram]
    components: list[tuple[ComponentSpec[Any], Component]] = field(default_factory=list)
    metrics: list[AnyMetricDef] = field(default_factory=list)
    not_ready: str = "starting"

    def find(self, kind: type[C]) -> C | None:
        """The component of this class; None where the config does not want it."""
        return next((component for _, component in self.components if isinstance(component, kind)), None)

    @property
    def tracer(self) -> Tracer:
        """Maker of spans of this process's own work."""
        return self.traces.tracer if self.traces is not None else NO_TRACES

    @property
    def watched(self) -> list[ReloadingFile[Any]]:
        """Certificates and tokens that may change."""
        return [*self.protection.watched, *(file for peer in self.peers.values() for file in peer.watched)]

    def problem(self) -> str:
        """Why no more work should come here, for /readyz; '' while there is room."""
        proxy = self.find(ProxySource)
        return self.not_ready or (proxy.problem() if proxy is not None else "") or self.gates.problem()


def make_sidecar(config: SidecarConfig, entries: Sequence[ComponentSpec[Any]] | None = None) -> Sidecar:
    """Build the components of ``entries`` that ``config`` wants; start none of them.

    ``entries``: by default ``COMPONENTS``.
    """
    process = own_process(config.role, config.instance, sender=new_sender_id(), service_name=config.service_name)
    resource = own_resource(process, cluster=config.cluster)
    clients = {"collector": config.collector.client}
    if config.otlp_metrics.endpoint is not None:
        clients["otlp_metrics"] = config.otlp_metrics.client(config.otlp_metrics.endpoint)
    peers = {section: ClientSecurity(parse_endpoint(each.endpoint), each, use=section) for section, each in clients.items()}
    about = {names.ROLE: process.role.value, names.INSTANCE: process.instance, names.CLUSTER: config.cluster}
    traces, tracing = own_traces(config.own_traces, process_resource("handrail-sidecar", process.sender, about))
    if tracing is not None:
        peers["own_traces"] = tracing
    exporter = Exporter(
        ExportSettings(folder=config.spool.dir, max_bytes=config.spool.max_bytes),
        resource,
        lambda: OtlpClient(clients["collector"], peers["collector"]),
        tracer=traces.tracer if traces is not None else NO_TRACES,
    )

    def room() -> bool:
        return exporter.waiting_bytes * SAMPLES_SHARE <= config.spool.max_bytes

    kind = Histogram if config.otlp_metrics.endpoint is None else ExponentialHistogram
    objectives = RequestObjectives(ttft_ns=config.slo.ttft.ns, itl_ns=config.slo.itl.ns)
    sidecar = Sidecar(
        config=config,
        process=process,
        resource=resource,
        protection=ListenerSecurity(config.tls, config.auth, [each.value for each in config.plaintext]),
        gates=Gates(config.connections, DescriptorBudget.of_process(RESERVED_DESCRIPTORS), LISTENER_SHARES),
        peers=peers,
        traces=traces,
        exporter=exporter,
        evidence=EvidenceExport(resource, exporter.take),
        devices=DeviceBatches(resource, named(gpu=GPU_COUNTERS, link=LINK_COUNTERS), exporter.take, room),
        live=LiveRequests(config.role, objectives, wall=time.time_ns, make=kind),
        proxied=ProxyStats(),
        events=EventCounts(exporter.sink),
        histogram=kind,
    )
    for entry in COMPONENTS if entries is None else entries:
        component = entry.make(sidecar)
        if component is not None:
            sidecar.components.append((entry, component))
    sidecar.metrics += identity_rows(config, process)
    sidecar.metrics += security_rows(sidecar.watched, sidecar.protection.guards)
    sidecar.metrics += connection_rows(sidecar.gates)
    for entry, component in sidecar.components:
        sidecar.metrics += entry.metrics(sidecar, component)
    sidecar.metrics += live_rows(
        sidecar.live,
        config.role,
        sidecar.events,
        sidecar.find(ProxySource),
        sidecar.find(PluginSource),
        sidecar.find(MetricsSource),
    )
    return sidecar


def _admin(sidecar: Sidecar) -> AdminServer | None:
    address = sidecar.config.admin
    if address is None:
        return None
    return AdminServer(
        address.host,
        address.port,
        Registry(sidecar.metrics),
        sidecar.problem,
        degraded=lambda: sidecar.exporter.degraded,
        tls=sidecar.protection.context("admin", ask_only=True),
        guard=sidecar.protection.guard("admin", certificates=True),
        gate=sidecar.gates.gate("admin"),
    )


def _otlp_metrics(sidecar: Sidecar) -> OtlpMetrics | None:
    config = sidecar.config.otlp_metrics
    if config.endpoint is None:
        return None
    client, peer = config.client(config.endpoint), sidecar.peers["otlp_metrics"]
    resource = SdkResource(attributes_of(sidecar.resource.attributes))
    outlet = partial(Outlet, metric_exporter, client, peer, Signal.METRICS)
    return OtlpMetrics(sidecar.metrics, resource, outlet, config.interval.seconds)


def _tap(sidecar: Sidecar) -> OtlpTap | None:
    config, protection, gates = sidecar.config, sidecar.protection, sidecar.gates
    grpc, http = config.otlp_grpc, config.otlp_http
    if grpc is None and http is None:
        return None
    tls, guard = protection.tls("tap"), protection.guard("tap")
    serve = partial(
        OtlpServer,
        grpc=(grpc.host, grpc.port) if grpc else None,
        http=(http.host, http.port) if http else None,
        max_in_flight_bytes=TAP_IN_FLIGHT_BYTES,
        loopback_only=False,  # the check of the configuration made sure of it
        grpc_tls=tls,
        http_tls=tls,
        grpc_guard=guard,
        http_guard=guard,
        grpc_gate=gates.gate("otlp_grpc") if grpc else None,
        http_gate=gates.gate("otlp_http") if http else None,
    )
    cluster = {names.CLUSTER: config.cluster} if config.cluster else {}
    return OtlpTap(sidecar.exporter.take, {**tap_attributes(sidecar.process), **cluster}, serve)


def _log(sidecar: Sidecar) -> LogSource | None:
    """Build the log tap for files and for the lines that the plugin's handler sends."""
    config = sidecar.config
    if not config.log.files and config.plugin_socket is None:
        return None
    settings = LogSettings(
        paths=config.log.files,
        tail=TailSettings(from_start=config.log.start is LogStart.START),
        positions=config.spool.dir / "positions" if config.spool.dir is not None else None,
    )
    return LogSource(settings, sidecar.process, sidecar.evidence.facts)


def _engine_metrics(sidecar: Sidecar) -> MetricsSource | None:
    config = sidecar.config.metrics
    if config.url is None:
        return None
    settings = MetricsSettings(
        url=config.url,
        interval_s=config.interval.seconds,
        timeout_s=config.timeout.seconds,
        headers=config.headers,
        progress=ProgressSettings(hung_after_ns=config.hung_after.ns),
    )
    open_requests = sidecar.proxied.open_requests if sidecar.config.proxies else None
    return MetricsSource(settings, sidecar.process, sidecar.evidence.sample, sidecar.events, open_requests=open_requests)


def _links(sidecar: Sidecar) -> LinkSource | None:
    links = sidecar.config.links
    if not sidecar.config.samples_links:
        return None
    settings = LinkSamplerSettings(root=links.sysfs, wanted=links.devices, interval_ns=links.interval.ns)
    return LinkSource(settings, sidecar.process, sidecar.devices.samples, tracer=sidecar.tracer)


def _nvml(sidecar: Sidecar) -> NvmlSource | None:
    gpu = sidecar.config.gpu
    if not sidecar.config.samples_gpus or gpu.dcgm_url is not None:
        return None
    settings = SamplerSettings(period_ns=gpu.interval.ns, devices=gpu.devices, without=frozenset(gpu.without))
    sampler = partial(Sampler, tracer=sidecar.tracer)
    return NvmlSource(settings, sidecar.process, sidecar.exporter.sink, sidecar.devices.sample, sampler=sampler)


def _dcgm(sidecar: Sidecar) -> DcgmSource | None:
    url = sidecar.config.gpu.dcgm_url
    if not sidecar.config.samples_gpus or url is None:
        return None
    return DcgmSource(MetricsSettings(url=url), sidecar.process, sidecar.exporter.sink, sidecar.devices.sample)


def _plugin(sidecar: Sidecar) -> PluginSource | None:
    path, logs = sidecar.config.plugin_socket, sidecar.find(LogSource)
    if path is None:
        return None
    return PluginSource(
        path,
        sidecar.process,
        sidecar.exporter.sink,
        line=logs.say if logs is not None else None,
        live=sidecar.live,
        count_exchanges=not sidecar.config.proxies,
        make=sidecar.histogram,
    )


def _own_pauses(sidecar: Sidecar) -> OwnPauses | None:
    return OwnPauses(sidecar.process, sidecar.exporter.sink) if sidecar.config.proxies else None


def _counts(sidecar: Sidecar) -> CountsExport | None:
    if not sidecar.config.proxies or sidecar.config.role is not Role.EDGE:
        return None
    return CountsExport(sidecar.resource, sidecar.proxied.outcomes, sidecar.exporter.take)


def _proxy(sidecar: Sidecar) -> ProxySource | None:
    config = sidecar.config
    if config.listen is None or config.upstream is None:
        return None
    tapped = sidecar.find(OtlpTap) is not None
    settings = ProxySettings(
        listen_host=config.listen.host,
        listen_port=config.listen.port,
        upstream_host=config.upstream.host,
        upstream_port=config.upstream.port,
        role=config.role,
        process=sidecar.process,
        trace_context=config.trace_context.value,
        request_id="add" if config.request_id is RequestIdMode.ADD else "pass",
        engine_exports_to_us=tapped if config.new_traces is NewTraces.AUTO else config.new_traces is NewTraces.SAMPLED,
        head_timeout_s=config.proxy.head_timeout.seconds,
        idle_timeout_s=config.proxy.idle_timeout.seconds,
        max_streams=config.proxy.max_streams,
        tls=sidecar.protection.context("proxy"),
    )
    return ProxySource(settings, sidecar.exporter.sink, stats=sidecar.proxied, live=sidecar.live, budget=sidecar.gates.budget)


def _collector_check(sidecar: Sidecar) -> CollectorCheck:
    return CollectorCheck(OtlpClient(sidecar.config.collector.client, sidecar.peers["collector"]))


def _span_watch(sidecar: Sidecar) -> SpanWatch | None:
    tap = sidecar.find(OtlpTap)
    return SpanWatch(sidecar.proxied, tap) if tap is not None else None


COMPONENTS: Final[tuple[ComponentSpec[Any], ...]] = (
    # the first to start and the last to stop, so that a drain can be watched
    ComponentSpec("admin", _admin, addresses=lambda admin: bound(admin=admin.address)),
    # last to stop but for that, since it takes the spans of the others' ends
    ComponentSpec(
        "own_traces",
        lambda sidecar: sidecar.traces,
        lambda _, traces: own_traces_rows(traces.stats, names.METRIC_SIDECAR),
    ),
    ComponentSpec("certificates", lambda sidecar: Watcher(sidecar.watched)),
    ComponentSpec("exporter", lambda sidecar: sidecar.exporter, lambda _, exporter: own_rows(exporter)),
    ComponentSpec("otlp_metrics", _otlp_metrics, lambda _, pushed: otlp_metrics_rows(pushed.stats, names.METRIC_SIDECAR)),
    ComponentSpec("devices", lambda sidecar: sidecar.devices, lambda _, devices: device_rows(devices)),
    ComponentSpec(
        "tap",
        _tap,
        lambda _, tap: tap_rows(tap),
        lambda tap: bound(otlp_grpc=tap.grpc_address, otlp_http=tap.http_address),
    ),
    ComponentSpec("log", _log, lambda _, source: log_rows(source)),
    ComponentSpec("metrics", _engine_metrics, lambda sidecar, source: engine_rows(source, sidecar.events)),
    ComponentSpec("links", _links, lambda _, source: link_rows(source)),
    ComponentSpec("gpus", _nvml, lambda _, source: gpu_rows(source.sampler)),
    ComponentSpec("dcgm", _dcgm, lambda _, source: dcgm_rows(source)),
    ComponentSpec(
        "plugin",
        _plugin,
        lambda sidecar, plugin: plugin_rows(plugin, sidecar.config.kv_hung_after.ns),
        lambda plugin: {"plugin": str(plugin.path)},
    ),
    ComponentSpec("pauses", _own_pauses, lambda _, pauses: pause_rows(pauses)),
    ComponentSpec("counts", _counts),  # before the proxy: the first reading says 0
    ComponentSpec(
        "proxy",
        _proxy,
        lambda _, proxy: proxy_rows(proxy),
        lambda proxy: bound(proxy=proxy.address),
        most_drain_s=float("inf"),
    ),
    ComponentSpec("collector_check", _collector_check),
    ComponentSpec("span_watch", _span_watch, lambda _, watch: watch.rows()),
)
