"""Gather all metrics of the sidecar, and define those of its own cost and loss."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable

import handrail
from handrail import conventions as names
from handrail.metrics.registry import MetricDef, by_label
from handrail.otlp.receiver.intake import REPAIRED
from handrail.records import Process
from handrail_sidecar.export.exporter import Exporter
from handrail_sidecar.settings import SidecarConfig
from handrail_sidecar.sources.otlp_tap import OtlpTap
from handrail_sidecar.sources.proxy import ProxySource


def identity_rows(config: SidecarConfig, process: Process) -> list[MetricDef]:
    """Return the metrics of the process itself."""
    prefix = names.METRIC_SIDECAR
    who = (handrail.__version__, config.role.value, config.instance, process.service, config.cluster)
    return [
        MetricDef(
            f"{prefix}_info",
            "gauge",
            "1, with the sidecar's identity; name: host:port of the observed process",
            lambda: {who: 1.0},
            ("version", "role", "name", "service_name", "cluster"),
        ),
        MetricDef(f"{prefix}_cpu_seconds", "counter", "Processor time of this process", time.process_time),
        MetricDef(f"{prefix}_resident_memory_bytes", "gauge", "Memory of this process that is in RAM", _resident_bytes),
    ]


def own_rows(exporter: Exporter) -> list[MetricDef]:
    """Return the metrics of what the sidecar sends, keeps and loses."""
    prefix, out, sent = names.METRIC_SIDECAR, exporter.stats, exporter.delivery
    return [
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
    ]


def tap_rows(tap: OtlpTap) -> list[MetricDef]:
    """Return the metrics of the OTLP tap."""
    prefix = f"{names.METRIC_SIDECAR}_tap"
    return [
        MetricDef(f"{prefix}_items", "counter", "Items that the tap accepted", lambda: by_label(tap.stats.items), ("signal",)),
        MetricDef(f"{prefix}_refused", "counter", "Tap requests refused, to retry later", lambda: tap.stats.requests_refused),
        MetricDef(f"{prefix}_rejected", "counter", "Tap requests refused finally", lambda: tap.stats.requests_rejected),
        MetricDef(f"{prefix}_repaired_values", "counter", REPAIRED, lambda: tap.stats.values_repaired),
    ]


def proxy_rows(proxy: ProxySource) -> list[MetricDef]:
    """Return the metrics of the inline proxy."""
    prefix, stats = f"{names.METRIC_SIDECAR}_proxy", proxy.stats
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
