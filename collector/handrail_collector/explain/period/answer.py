"""Explain a period from a store, as JSON for the API and the command line."""

from __future__ import annotations

from dataclasses import asdict, replace
from difflib import get_close_matches
from typing import Any, Final

from handrail_collector.explain.devices.roofline import Pool, pools
from handrail_collector.explain.period.question import DEFAULT_NS, Question
from handrail_collector.explain.period.report import explain
from handrail_collector.explain.period.summary import to_json
from handrail_collector.links.answer import period
from handrail_collector.links.summary import of_period
from handrail_collector.store.filters import PeriodQuery
from handrail_collector.store.queries.period import latest_unix_ns, load_period, models
from handrail_collector.store.queries.utilization import gpu_uses, step_uses
from handrail_collector.store.read import StoreReader

_NEAREST: Final = 5
_MOST_LINKS: Final = 3
_MOST_HAND_OFFS: Final = 10_000
_MOST_SAMPLES: Final = 10_000


def answered(reader: StoreReader, question: Question, now_unix_ns: int) -> dict[str, Any]:
    """Return the explanation as JSON (docs/http-api.md).

    Raises ``StoreDamagedError``.
    """
    latest = latest_unix_ns(reader, now_unix_ns)
    until = question.until_unix_ns
    if until is None:
        stale = question.since_unix_ns is None and latest is not None and latest < now_unix_ns - DEFAULT_NS
        until = latest + 1 if stale and latest is not None else now_unix_ns
    since = question.since_unix_ns if question.since_unix_ns is not None else until - DEFAULT_NS
    of = PeriodQuery(since_unix_ns=since, until_unix_ns=max(until, since + 1), scope=question.scope, model=question.model)
    answer = to_json(explain(load_period(reader, of, fast=question.fast)))
    answer["pools"] = [asdict(pool) for pool in _pools(reader, since, of.until_unix_ns or until)]
    answer["links"] = [] if question.fast or question.scope or question.model else _links(reader, of, answer)
    return answer | {"latest_unix_ns": latest, "models": [] if answer["scopes"] else _nearest(reader, of)}


def _pools(reader: StoreReader, since_unix_ns: int, until_unix_ns: int) -> list[Pool]:
    """Return the pools of all GPUs in that time.

    They do not depend on the requests' scope and model.
    """
    return pools(gpu_uses(reader, since_unix_ns, until_unix_ns), step_uses(reader, since_unix_ns, until_unix_ns))


def _links(reader: StoreReader, of: PeriodQuery, answer: dict[str, Any]) -> list[str]:
    """Return sentences on slow links, and on links that take much of the edge's TTFT."""
    ttfts = [scope["ttft_ns"]["p50"] for scope in answer["scopes"] if "p50" in scope["ttft_ns"]]
    assert of.since_unix_ns is not None
    assert of.until_unix_ns is not None
    found = period(
        reader, of.since_unix_ns, of.until_unix_ns, most=_MOST_HAND_OFFS, most_links=_MOST_LINKS, most_samples=_MOST_SAMPLES
    )
    return of_period(found.lines, ttfts[0] if ttfts else None)[:_MOST_LINKS]


def _nearest(reader: StoreReader, of: PeriodQuery) -> list[str]:
    """Return model names of that time that resemble a model without requests.

    Where none is similar, the first ones.
    """
    if of.model is None:
        return []
    known = models(reader, replace(of, model=None))
    return get_close_matches(of.model, known, n=_NEAREST) or known[:_NEAREST]
