"""What the sidecar says on /metrics of requests and of the engine, as it happens: DESIGN section 7, "live"."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final

from handrail import conventions as names
from handrail.buckets import LATENCY, LATENCY_BOUND, Exemplar, Histogram
from handrail.live.objectives import ITL, TTFT
from handrail.live.requests import LiveRequests
from handrail.records import Role
from handrail.selfmetrics import AnyRow, HistogramRow, Row

_SECONDS: Final = 1e-9
_BY_ROLE: Final = ("model_name", "role")

OpenSince = Callable[[], Iterable[int]]
"""When each request that has not ended arrived, on the monotonic clock."""


def request_rows(
    live: LiveRequests, role: Role, open_since: OpenSince, served: Callable[[], Iterable[str]], monotonic_ns: Callable[[], int]
) -> list[AnyRow]:
    """Rows of requests. ``served``: models that the engine's own page shows."""

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
            "Arrival to first token, as it comes; scope engine: queued to first token, by the engine's scheduler",
            (*_BY_ROLE, "scope"),
            live.ttft,
        ),
        _histogram(
            names.METRIC_STREAM_GAP,
            "Time between chunks with content of one choice, as they come; where it was not seen how many choices were asked "
            "for, when the stream ends",
            _BY_ROLE,
            live.gaps,
        ),
        _histogram(
            names.METRIC_ITL,
            "Time between tokens, where the tokens of every chunk are known: as they come where the client asked for running "
            "totals, else when the stream ends; without them nothing",
            _BY_ROLE,
            live.itl,
        ),
        _histogram(
            names.METRIC_TPOT,
            "Mean time per output token after the first, of each request that was answered, where it can be known",
            _BY_ROLE,
            live.tpot,
        ),
        _histogram(names.METRIC_E2E, "Arrival to the end of the answer, of requests that were answered", _BY_ROLE, live.e2e),
        Row(names.METRIC_REQUESTS, "counter", "Requests by how they ended", outcomes, (*_BY_ROLE, "outcome"), failed),
        Row(
            names.METRIC_REQUESTS_OPEN,
            "gauge",
            "Requests that have not ended",
            lambda: {(role.value,): float(sum(1 for _ in open_since()))},
            ("role",),
        ),
        Row(
            names.METRIC_REQUEST_OLDEST_AGE,
            "gauge",
            "Age of the oldest request that has not ended; 0 where none is open",
            lambda: {(role.value,): max((monotonic_ns() - since for since in open_since()), default=0) * _SECONDS},
            ("role",),
        ),
        Row(
            f"{names.METRIC_SLO}_requests",
            "counter",
            "Requests that could be judged by slo.ttft (when the first token comes), slo.itl (99 % of the gaps) and success, and "
            "whether they met it; all: both times and success, which is goodput",
            judged,
            (*_BY_ROLE, "slo", "met"),
        ),
        Row(
            f"{names.METRIC_SLO}_threshold_seconds",
            "gauge",
            "slo.ttft and slo.itl as set",
            lambda: {(TTFT,): objectives.ttft_ns * _SECONDS, (ITL,): objectives.itl_ns * _SECONDS},
            ("slo",),
        ),
    ]


def health_rows(hung: Callable[[], bool], restarts: Callable[[], int]) -> list[Row]:
    """Rows of the engine's process, where a source can tell."""
    return [
        Row(
            f"{names.METRIC_ENGINE}_hung",
            "gauge",
            "1 while work waits and the engine makes no progress, or its process says nothing, though its endpoint answers",
            lambda: float(hung()),
        ),
        Row(f"{names.METRIC_ENGINE}_restarts", "counter", "Times the engine began anew", restarts),
    ]


def _histogram(name: str, text: str, labels: tuple[str, ...], series: Mapping[tuple[str, ...], Histogram]) -> HistogramRow:
    return HistogramRow(name, f"{text}. {LATENCY_BOUND}", lambda: series, LATENCY, labels)
