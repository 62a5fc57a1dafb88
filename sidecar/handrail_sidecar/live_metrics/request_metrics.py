"""Define the live metrics of requests and of the engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from handrail import conventions as names
from handrail.metrics.histogram import LATENCY, LATENCY_BOUND, Exemplar, Histogram
from handrail.metrics.registry import AnyMetricDef, HistogramDef, MetricDef
from handrail.records import ProcessEventKind, Role
from handrail_sidecar.live_metrics.engine_metrics import EventCounts
from handrail_sidecar.live_metrics.requests import LiveRequests
from handrail_sidecar.live_metrics.slo import ITL, TTFT
from handrail_sidecar.sources.engine_metrics import MetricsSource
from handrail_sidecar.sources.plugin_socket import PluginSource
from handrail_sidecar.sources.proxy import ProxySource

_SECONDS: Final = 1e-9
_BY_ROLE: Final = ("model_name", "role")

OpenSince = Callable[[], Iterable[int]]
"""Arrival times of the requests that have not ended, on the monotonic clock."""


def live_rows(
    live: LiveRequests,
    role: Role,
    events: EventCounts,
    proxy: ProxySource | None,
    plugin: PluginSource | None,
    page: MetricsSource | None,
) -> list[AnyMetricDef]:
    """Return the metrics of requests and of the engine's process.

    Each group needs a source that observes it.
    """
    rows: list[AnyMetricDef] = []

    def open_since() -> Iterable[int]:
        if proxy is not None:
            return proxy.open_since()
        return plugin.open_since() if plugin is not None else ()

    def served() -> Iterable[str]:
        return page.reading.models if page is not None and page.reading is not None else ()

    def hung() -> bool:
        return (page is not None and page.progress.hung) or (plugin is not None and plugin.merge.processes.hung)

    def restarts() -> int:
        report = events.counts[ProcessEventKind.RESTARTED]
        return max(report, plugin.restarts.count if plugin is not None else 0)  # both report the same restarts

    if proxy is not None or plugin is not None:
        rows += request_rows(live, role, open_since, served, time.monotonic_ns)
    if page is not None or plugin is not None:
        rows += health_rows(hung, restarts)
    return rows


def request_rows(
    live: LiveRequests, role: Role, open_since: OpenSince, served: Callable[[], Iterable[str]], monotonic_ns: Callable[[], int]
) -> list[AnyMetricDef]:
    """Return the metrics of requests. ``served``: models on the engine's own page."""

    def outcomes() -> Mapping[tuple[str, ...], float]:
        live.know(served())
        return {(model, role.value, outcome.value): float(count) for (model, outcome), count in live.outcomes.items()}

    def failed() -> Mapping[tuple[str, ...], Exemplar]:
        return {(model, role.value, outcome.value): last for (model, outcome), last in live.failed.items()}

    def judged() -> Mapping[tuple[str, ...], float]:
        return {
            (model, role.value, objective, str(met).lower()): float(count)
            for (model, objective, met), count in live.judged.items()
        }

    objectives = live.objectives
    return [
        _histogram(
            names.METRIC_TTFT,
            "Time from arrival to first token, counted when the token comes; scope engine: from queued to first token, by "
            "the engine's scheduler",
            (*_BY_ROLE, "scope"),
            live.ttft,
        ),
        _histogram(
            names.METRIC_STREAM_GAP,
            "Time between chunks with content of one choice, counted as they come; counted at the stream's end if the number "
            "of choices in the request is unknown",
            _BY_ROLE,
            live.gaps,
        ),
        _histogram(
            names.METRIC_ITL,
            "Time between tokens, if the tokens of every chunk are known; counted as they come if the client requested "
            "running totals, otherwise at the stream's end",
            _BY_ROLE,
            live.itl,
        ),
        _histogram(
            names.METRIC_TPOT,
            "Mean time per output token after the first, of each answered request, if it can be known",
            _BY_ROLE,
            live.tpot,
        ),
        _histogram(names.METRIC_E2E, "Time from arrival to the end of the answer, of answered requests", _BY_ROLE, live.e2e),
        MetricDef(names.METRIC_REQUESTS, "counter", "Requests, by outcome", outcomes, (*_BY_ROLE, "outcome"), failed),
        MetricDef(
            names.METRIC_REQUESTS_OPEN,
            "gauge",
            "Open requests",
            lambda: {(role.value,): float(sum(1 for _ in open_since()))},
            ("role",),
        ),
        MetricDef(
            names.METRIC_REQUEST_OLDEST_AGE,
            "gauge",
            "Age of the oldest open request; 0 if none is open",
            lambda: {(role.value,): max((monotonic_ns() - since for since in open_since()), default=0) * _SECONDS},
            ("role",),
        ),
        MetricDef(
            f"{names.METRIC_SLO}_requests",
            "counter",
            "Judged requests, by objective and whether they met it: slo.ttft (when the first token comes), slo.itl (99 % of "
            "the gaps), success; all: both times and success, which is goodput",
            judged,
            (*_BY_ROLE, "slo", "met"),
        ),
        MetricDef(
            f"{names.METRIC_SLO}_threshold_seconds",
            "gauge",
            "The settings slo.ttft and slo.itl",
            lambda: {(TTFT,): objectives.ttft_ns * _SECONDS, (ITL,): objectives.itl_ns * _SECONDS},
            ("slo",),
        ),
    ]


def health_rows(hung: Callable[[], bool], restarts: Callable[[], int]) -> list[MetricDef]:
    """Return the metrics of the engine's process, when a source can report them."""
    return [
        MetricDef(
            f"{names.METRIC_ENGINE}_hung",
            "gauge",
            "1 while work waits and the engine makes no progress, or its process sends nothing, although its endpoint answers",
            lambda: float(hung()),
        ),
        MetricDef(f"{names.METRIC_ENGINE}_restarts", "counter", "Restarts of the engine", restarts),
    ]


def _histogram(name: str, text: str, labels: tuple[str, ...], series: Mapping[tuple[str, ...], Histogram]) -> HistogramDef:
    return HistogramDef(name, f"{text}. {LATENCY_BOUND}", lambda: series, LATENCY, labels)
