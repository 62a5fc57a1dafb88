"""Gather all metrics of the sidecar, and define those of its own cost and loss."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from opentelemetry.proto.resource.v1.resource_pb2 import Resource

import handrail
from handrail import conventions as names
from handrail.config.listeners import ListenerSecurity
from handrail.metrics.otlp_push import OtlpMetricsStats, otlp_metrics_rows
from handrail.metrics.registry import AnyMetricDef, MetricDef, by_label
from handrail.otlp.receiver.intake import REPAIRED
from handrail.otlp.security import ClientSecurity
from handrail.otlp.settings import ClientSettings
from handrail.records import Process, ProcessEventKind
from handrail.runtime.connection_metrics import connection_rows
from handrail.runtime.connections import Gates
from handrail.security.file_reload import ReloadingFile
from handrail.security.metrics import security_rows
from handrail.wire.counts import CountsExport
from handrail_sidecar.export.device_batches import DeviceBatches
from handrail_sidecar.export.exporter import Exporter
from handrail_sidecar.live_metrics.device_metrics import device_rows
from handrail_sidecar.live_metrics.engine_metrics import EventCounts, engine_rows, log_rows
from handrail_sidecar.live_metrics.gpu_metrics import dcgm_rows, gpu_rows
from handrail_sidecar.live_metrics.link_metrics import link_rows
from handrail_sidecar.live_metrics.plugin_metrics import plugin_rows
from handrail_sidecar.live_metrics.request_metrics import health_rows, request_rows
from handrail_sidecar.live_metrics.requests import LiveRequests
from handrail_sidecar.settings import SidecarConfig
from handrail_sidecar.sources.dcgm import DcgmSource
from handrail_sidecar.sources.engine_log import LogSource
from handrail_sidecar.sources.engine_metrics import MetricsSource
from handrail_sidecar.sources.gpu import NvmlSource
from handrail_sidecar.sources.links import LinkSource
from handrail_sidecar.sources.otlp_tap import OtlpTap
from handrail_sidecar.sources.plugin_socket import PluginSource
from handrail_sidecar.sources.proxy import ProxySource
from handrail_sidecar.sources.self_pauses import OwnPauses, pause_rows


@dataclass(slots=True)
class SpanWatch:
    """Notices an engine that serves requests but sends no spans to a waiting tap."""

    silent_windows: int = 0
    _requests: int = 0
    _spans: int = 0

    def look(self, requests: int, spans: int) -> bool:
        """Take the running totals once a window.

        Returns True when the second silent window in a row has just ended.
        """
        silent = requests > self._requests and spans == self._spans
        self._requests, self._spans = requests, spans
        self.silent_windows = self.silent_windows + 1 if silent else 0
        return self.silent_windows == 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """The parts of one sidecar; None for parts that its config does not want."""

    config: SidecarConfig
    process: Process
    client: ClientSettings
    protection: ListenerSecurity  # of everything that listens here
    gates: Gates  # of the same, except the proxy
    security: ClientSecurity  # towards the collector
    exporter: Exporter
    live: LiveRequests
    proxy: ProxySource | None
    counts: CountsExport | None
    tap: OtlpTap | None
    plugin: PluginSource | None
    logs: LogSource | None
    scraper: MetricsSource | None
    events: EventCounts
    devices: DeviceBatches
    links: LinkSource | None
    gpus: NvmlSource | DcgmSource | None
    own: OwnPauses | None
    watch: SpanWatch
    resource: Resource
    pushed: OtlpMetricsStats | None
    pushing: ClientSecurity | None  # towards the receiver of OTLP metrics

    @property
    def watched(self) -> list[ReloadingFile[Any]]:
        """Certificates and tokens that may change."""
        pushing = self.pushing.watched if self.pushing is not None else ()
        return [*self.protection.watched, *self.security.watched, *pushing]


def sidecar_rows(made: Made) -> list[AnyMetricDef]:
    """Return every metric of the page."""
    config, plugin, logs, scraper, links, gpus = made.config, made.plugin, made.logs, made.scraper, made.links, made.gpus
    return [
        *_own_rows(made),
        *_live_rows(made),
        *security_rows(made.watched, made.protection.guards),
        *connection_rows(made.gates),
        *device_rows(made.devices),
        *(otlp_metrics_rows(made.pushed) if made.pushed is not None else ()),
        *(pause_rows(made.own) if made.own is not None else ()),
        *(plugin_rows(plugin, config.kv_hung_after.ns) if plugin is not None else ()),
        *(log_rows(logs) if logs is not None else ()),
        *(engine_rows(scraper, made.events) if scraper is not None else ()),
        *(link_rows(links) if links is not None else ()),
        *(gpu_rows(gpus.sampler) if isinstance(gpus, NvmlSource) else ()),
        *(dcgm_rows(gpus) if isinstance(gpus, DcgmSource) else ()),
    ]


def _live_rows(made: Made) -> list[AnyMetricDef]:
    """Return the metrics of requests and of the engine's process.

    Each group needs a source that observes it.
    """
    proxy, plugin, scraper = made.proxy, made.plugin, made.scraper
    rows: list[AnyMetricDef] = []

    def open_since() -> Iterable[int]:
        if proxy is not None:
            return proxy.open_since()
        return plugin.open_since() if plugin is not None else ()

    def served() -> Iterable[str]:
        return scraper.reading.models if scraper is not None and scraper.reading is not None else ()

    def hung() -> bool:
        return (scraper is not None and scraper.progress.hung) or (plugin is not None and plugin.merge.processes.hung)

    def restarts() -> int:
        report = made.events.counts[ProcessEventKind.RESTARTED]
        return max(report, plugin.restarts.count if plugin is not None else 0)  # both report the same restarts

    if proxy is not None or plugin is not None:
        rows += request_rows(made.live, made.config.role, open_since, served, time.monotonic_ns)
    if scraper is not None or plugin is not None:
        rows += health_rows(hung, restarts)
    return rows


def _own_rows(made: Made) -> list[MetricDef]:
    """Return the metrics of the sidecar's own work: cost and loss."""
    exporter, proxy, tap, watch, config = made.exporter, made.proxy, made.tap, made.watch, made.config
    prefix, out, sent = names.METRIC_SIDECAR, exporter.stats, exporter.delivery
    who = (handrail.__version__, config.role.value, config.instance, made.process.service, config.cluster)
    rows = [
        MetricDef(
            f"{prefix}_info",
            "gauge",
            "1, with the sidecar's identity; name: host:port of the observed process",
            lambda: {who: 1.0},
            ("version", "role", "name", "service_name", "cluster"),
        ),
        MetricDef(f"{prefix}_spans", "counter", "Spans made from observed requests", lambda: out.spans_taken),
        MetricDef(
            f"{prefix}_spans_dropped",
            "counter",
            "Own spans that the sidecar did not send, by reason",
            lambda: by_label(out.dropped),
            ("reason",),
        ),
        MetricDef(
            f"{prefix}_spool_bytes",
            "gauge",
            "Bytes in the spool that the collector has not acknowledged",
            lambda: exporter.waiting_bytes,
        ),
        MetricDef(
            f"{prefix}_spool_lost_bytes",
            "counter",
            "Bytes in the spool that the sidecar could not read back",
            lambda: exporter.damaged_bytes,
        ),
        MetricDef(f"{prefix}_spool_errors", "counter", "Failed calls to the spool's disk", lambda: exporter.spool_errors),
        MetricDef(
            f"{prefix}_spool_degraded",
            "gauge",
            "1 while the spool's disk fails and the sidecar sends evidence from memory",
            lambda: float(bool(exporter.degraded)),
        ),
        MetricDef(
            f"{prefix}_spool_memory_bytes",
            "gauge",
            "The part of spool_bytes that is in memory because the disk fails; a restart of the sidecar loses it",
            lambda: exporter.held_bytes,
        ),
        MetricDef(f"{prefix}_export_batches", "counter", "Batches that the collector acknowledged", lambda: sent.batches_sent),
        MetricDef(f"{prefix}_export_retries", "counter", "Export attempts that the sidecar repeats", lambda: sent.retries),
        MetricDef(
            f"{prefix}_export_rejected_items", "counter", "Spans that the collector refused finally", lambda: sent.items_rejected
        ),
        MetricDef(
            f"{prefix}_export_up",
            "gauge",
            "1 if the last export attempt succeeded; 0 before the first one",
            lambda: float(bool(sent.up)),
        ),
        MetricDef(
            f"{prefix}_export_lag_seconds",
            "gauge",
            "Age of the oldest batch that the collector has not acknowledged; 0 if none waits",
            lambda: exporter.lag_ns * 1e-9,
        ),
        MetricDef(f"{prefix}_cpu_seconds", "counter", "Processor time of this process", time.process_time),
        MetricDef(f"{prefix}_resident_memory_bytes", "gauge", "Memory of this process that is in RAM", _resident_bytes),
    ]
    if tap is not None:
        seen = tap.stats
        rows += [
            MetricDef(f"{prefix}_tap_items", "counter", "Items that the tap accepted", lambda: by_label(seen.items), ("signal",)),
            MetricDef(f"{prefix}_tap_refused", "counter", "Tap requests refused, to retry later", lambda: seen.requests_refused),
            MetricDef(f"{prefix}_tap_rejected", "counter", "Tap requests refused finally", lambda: seen.requests_rejected),
            MetricDef(f"{prefix}_tap_repaired_values", "counter", REPAIRED, lambda: seen.values_repaired),
            MetricDef(
                f"{prefix}_engine_silent",
                "gauge",
                "1 while requests pass and the engine's exporter sends no spans",
                lambda: float(watch.silent_windows >= 2),
            ),
        ]
    if proxy is not None:
        rows += _proxy_rows(f"{prefix}_proxy", proxy)
    return rows


def _proxy_rows(prefix: str, proxy: ProxySource) -> list[MetricDef]:
    stats = proxy.stats
    counters: tuple[tuple[str, str, Callable[[], float]], ...] = (
        ("connections", "Client connections accepted", lambda: stats.connections),
        ("requests", "Requests that the proxy parsed", lambda: stats.requests),
        ("passed_requests", "Requests that passed without a record", lambda: stats.passed),
        ("protocol_errors", "Connections refused before they became a request", lambda: stats.protocol_errors),
        ("connect_failures", "Failed connections to the upstream", lambda: stats.connect_failures),
        ("client_bytes", "Bytes read from clients", lambda: stats.client_bytes),
        ("upstream_bytes", "Bytes read from the upstream", lambda: stats.upstream_bytes),
        ("reads_paused", "Times that the upstream waited for a slow client", lambda: stats.reads_paused),
        ("observer_errors", "Faults of the observer; the bytes were forwarded all the same", lambda: stats.observer_errors),
    )
    rows = [MetricDef(f"{prefix}_{name}", "counter", text, read) for name, text, read in counters]
    rows.append(MetricDef(f"{prefix}_open_connections", "gauge", "Open client connections", lambda: stats.open_connections))
    outcomes = "Observed requests, by outcome"
    rows += _admission_rows(prefix, proxy)
    rows.append(MetricDef(f"{prefix}_outcomes", "counter", outcomes, lambda: by_label(stats.outcomes), ("outcome",)))
    return rows


def _admission_rows(prefix: str, proxy: ProxySource) -> list[MetricDef]:
    """Return the metrics of client connections: streams, and all others."""
    stats, admission = proxy.stats, proxy.admission
    return [
        MetricDef(
            f"{prefix}_streams", "gauge", "Open client connections that are admitted as streams", lambda: admission.streams
        ),
        MetricDef(
            f"{prefix}_stream_capacity",
            "gauge",
            "Most streams, by descriptors and proxy.max_streams",
            lambda: float("inf") if admission.capacity is None else admission.capacity,
        ),
        MetricDef(
            f"{prefix}_refused_streams",
            "counter",
            "Requests that got 503: no more streams fit (streams), or no descriptor, memory or port was left for the "
            "upstream connection (descriptors)",
            lambda: by_label(stats.refused_streams),
            ("reason",),
        ),
        MetricDef(
            f"{prefix}_expired_connections",
            "counter",
            "Client connections that a time limit ended: on a request's head, between requests, or in a body",
            lambda: by_label(stats.timeouts),
            ("reason",),
        ),
        MetricDef(
            f"{prefix}_displaced_connections",
            "counter",
            "Idle client connections that the proxy closed because no more streams fit",
            lambda: stats.displaced,
        ),
        MetricDef(f"{prefix}_failed_handshakes", "counter", "Failed TLS handshakes", lambda: stats.handshakes_failed),
        MetricDef(
            f"{prefix}_accept_pauses",
            "counter",
            "Times that accepting paused because descriptors ran short",
            lambda: admission.pauses,
        ),
    ]


def _resident_bytes() -> float:
    """Return the resident memory now when /proc shows it, otherwise the peak so far."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return float(int(file.read().split()[1]) * resource.getpagesize())
    except (OSError, ValueError, IndexError):
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return float(most if sys.platform == "darwin" else most * 1024)
