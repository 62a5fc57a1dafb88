"""Compare a store's first answer, from its rollups, with its rows."""

from __future__ import annotations

from handrail_collector.explain.period.report import PeriodAnswer, ScopeAnswer, explain
from handrail_collector.store.filters import PeriodQuery
from handrail_collector.store.queries.period import load_period
from handrail_collector.store.read import StoreReader
from handrail_collector.store.rollups import BIN_ERROR


def first_answer(reader: StoreReader, of: PeriodQuery) -> PeriodAnswer:
    """Return the answer that uses rollups."""
    return explain(load_period(reader, of, fast=True))


def exact_answer(reader: StoreReader, of: PeriodQuery) -> PeriodAnswer:
    """Return the answer from rows alone."""
    return explain(load_period(reader, of, fast=False))


def disagreement(first: PeriodAnswer, exact: PeriodAnswer) -> str:
    """Return how the first answer differs from the exact one beyond its bound.

    '' when it does not.
    """
    if [scope.scope for scope in first.scopes] != [scope.scope for scope in exact.scopes]:
        return f"scopes {[scope.scope for scope in first.scopes]}, not {[scope.scope for scope in exact.scopes]}"
    for quick, sure in zip(first.scopes, exact.scopes, strict=True):
        if counted(quick) != counted(sure):
            return f"{quick.scope}: {counted(quick)}, not {counted(sure)}"
        for name, value in sure.ttft_ns.items():
            if abs(quick.ttft_ns[name] - value) > BIN_ERROR * value:
                return f"{quick.scope} {name}: {quick.ttft_ns[name]} ns, not {value}"
    return ""


def requests_in(answer: PeriodAnswer) -> int:
    """Return the requests of all scopes."""
    return sum(scope.requests for scope in answer.scopes)


def counted(scope: ScopeAnswer) -> dict[str, object]:
    """Return what both answers count; the counts must be equal."""
    return {
        "requests": (scope.requests, scope.complete, scope.timed),
        "gaps": (scope.streams, scope.gaps, dict(scope.gap_ns)),
        "outcomes": (dict(scope.failures.by_outcome), dict(scope.failures.by_kv_outcome)),
    }
