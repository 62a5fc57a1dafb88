"""Burn-rate alerts: how many times too fast an objective uses its error budget.

Each looks at a long and a short window at once. Google's SRE workbook, chapter 5 ("multiwindow, multi-burn-rate alerts"), has
this form: the long window shows that it matters, the short one that it goes on.
A ratio over no requests is NaN and a ratio of no series is absent. Neither is 0, and neither fires.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from handrail.config.types import Duration
from handrail.kv_outcomes import FAILURES, FetchOutcome
from handrail.records import Role
from handrail_alerts.alert import Alert, Recording, RuleGroup, minutes, prometheus
from handrail_alerts.bucket_bounds import BucketBound, nearest_bound
from handrail_alerts.burn_windows import BURNS, Burn
from handrail_alerts.context import Context
from handrail_alerts.objective import ObjectiveSignal, ServiceObjective

HOLD: Final = minutes(10)
"""How long a page goes on firing.

A short window with a handful of requests comes and goes, but its page does not.
"""

RATIO: Final = "handrail:slo_errors:ratio_rate"
"""Recording of the share of requests that broke the objective; the window follows."""

REQUESTS: Final = "handrail:slo_requests:increase"
"""Recording of the number of requests; the window follows."""

SCOPES: Final[Mapping[Role, str]] = {
    Role.EDGE: "edge",
    Role.ROUTER: "edge",
    Role.DECODE: "decode",
    Role.COLLOCATED: "decode",
    Role.PREFILL: "engine",
}
"""The scope of each pool's time to first token.

Figures of different scopes are never comparable.
"""


@dataclass(frozen=True, slots=True)
class Words:
    """The texts of one signal's alerts. ``{over}`` is the bound."""

    alert: str
    title: str
    unit: str
    broken: str
    command: str


WORDS: Final[Mapping[ObjectiveSignal, Words]] = {
    ObjectiveSignal.TTFT: Words(
        "TtftBudgetBurning",
        "time to first token",
        "requests",
        "waited longer than {over} for their first token",
        "handrail explain --since -1h",
    ),
    ObjectiveSignal.STREAM_GAP: Words(
        "ItlBudgetBurning",
        "gaps between chunks",
        "gaps between chunks",
        "were longer than {over}",
        "handrail explain --since -1h",
    ),
    ObjectiveSignal.ITL: Words(
        "ItlBudgetBurning",
        "time per token",
        "tokens",
        "came later than {over} after the one before",
        "handrail explain --since -1h",
    ),
    ObjectiveSignal.SUCCESS: Words(
        "RequestBudgetBurning", "success", "requests", "failed", "handrail requests --since -1h --outcome stream_error"
    ),
    ObjectiveSignal.KV_FETCH: Words(
        "KvFetchBudgetBurning", "KV fetches", "KV fetches", "failed", "handrail fetches --failed --since -1h"
    ),
}
FAILED_FETCHES: Final = f'outcome=~"{"|".join(sorted(outcome.value for outcome in FAILURES))}"'
_FETCHES: Final = f'outcome=~"{"|".join(sorted({FetchOutcome.OK.value, *(outcome.value for outcome in FAILURES)}))}"'
_META: Final = re.compile(r"([.+*?()|\[\]{}^$\\])")


def groups(context: Context) -> Iterator[RuleGroup]:
    """Yield one group an objective."""
    for objective in context.slo.objectives:
        rules: tuple[Alert | Recording, ...] = (
            *_recordings(context, objective),
            *(_alert(context, objective, burn) for burn in BURNS),
        )
        yield RuleGroup(name=f"handrail-slo-{objective.name}", rules=rules)


@dataclass(frozen=True, slots=True)
class ObjectiveCounts:
    """The counters of an objective, as selectors: all, and those that broke it."""

    name_all: str
    all: tuple[str, ...]
    name_part: str
    part: tuple[str, ...]
    part_is_good: bool
    labels: tuple[str, ...]


def counted(context: Context, objective: ServiceObjective, threshold: Duration | None = None) -> ObjectiveCounts:
    """Build the counts of an objective. ``threshold`` replaces the objective's own."""
    pool = matchers_of(context, objective)
    if objective.signal.timed:
        bound = nearest_bound(threshold or objective.threshold or Duration(1))
        name = {ObjectiveSignal.TTFT: "ttft", ObjectiveSignal.STREAM_GAP: "stream_gap", ObjectiveSignal.ITL: "itl"}[
            objective.signal
        ]
        if objective.signal is ObjectiveSignal.TTFT and objective.role is not None:
            pool = (*pool, f'scope="{SCOPES[objective.role]}"')
        name = f"handrail_{name}_seconds"
        return ObjectiveCounts(f"{name}_count", pool, f"{name}_bucket", (*pool, f'le="{bound.le}"'), True, ("model_name", "role"))
    if objective.signal is ObjectiveSignal.SUCCESS:
        name, pool = "handrail_slo_requests_total", (*pool, 'slo="success"')
        return ObjectiveCounts(name, pool, name, (*pool, 'met="false"'), False, ("model_name", "role"))
    name = "handrail_kv_fetches_total"
    return ObjectiveCounts(name, (_FETCHES,), name, (FAILED_FETCHES,), False, ())


def matchers_of(context: Context, objective: ServiceObjective) -> tuple[str, ...]:
    """Return the matchers of the objective's pool and models."""
    found = [f'role="{objective.role.value}"'] if objective.role else []
    for models, equal, like in ((objective.models, "=", "=~"), (context.slo.others(objective), "!=", "!~")):
        if len(models) == 1:
            found.append(f'model_name{equal}"{_quoted(models[0])}"')
        elif models:
            found.append(f'model_name{like}"{_quoted("|".join(map(_literal, models)))}"')
    return tuple(found)


def _literal(text: str) -> str:
    """Escape a text for a regular expression of RE2."""
    return _META.sub(r"\\\1", text)


def _quoted(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def ratio(context: Context, objective: ServiceObjective, window: str, threshold: Duration | None = None) -> str:
    """Return the share that broke the objective; NaN where nothing was counted."""
    of = counted(context, objective, threshold)
    by = context.fleet(*of.labels)
    part = f"sum by {by} (rate({context.series(of.name_part, *of.part)}[{window}]))"
    every = f"sum by {by} (rate({context.series(of.name_all, *of.all)}[{window}]))"
    return f"{'1 - ' if of.part_is_good else ''}{part}\n/\n{every}"


def total(context: Context, objective: ServiceObjective, window: str) -> str:
    """Return the expression of the number counted."""
    of = counted(context, objective)
    return f"sum by {context.fleet(*of.labels)} (increase({context.series(of.name_all, *of.all)}[{window}]))"


def _recordings(context: Context, objective: ServiceObjective) -> Iterator[Recording]:
    labels = {"slo": objective.name}
    for duration in sorted({window for burn in BURNS for window in (burn.long, burn.short)}):
        window = context.window(duration)
        yield Recording(record=f"{RATIO}{prometheus(duration)}", expr=ratio(context, objective, window), labels=labels)
    for burn in BURNS:
        window = context.window(burn.long)
        yield Recording(record=f"{REQUESTS}{prometheus(burn.long)}", expr=total(context, objective, window), labels=labels)


def _alert(context: Context, objective: ServiceObjective, burn: Burn) -> Alert:
    words, slo, file = WORDS[objective.signal], f'{{slo="{objective.name}"}}', context.slo
    long, short = prometheus(burn.long), prometheus(burn.short)
    factor, budget = burn.factor(file.window), (100 - objective.target_percent) / 100
    limit = f"{factor * budget:.6g}"
    expr = (
        f"{RATIO}{long}{slo} > {limit}\n"
        f"and {RATIO}{short}{slo} > {limit}\n"
        f"and {REQUESTS}{long}{slo} >= {file.min_requests}\n"
        f"and {RATIO}{long}{slo} * {REQUESTS}{long}{slo} >= {file.min_failures}"
    )
    broken = words.broken.format(over=bound_of(objective).describe) if objective.threshold else words.broken
    gone = prometheus(max(minutes(1), Duration(round(file.window / factor / minutes(60))) * minutes(60)))
    faster = f"more than {factor:.3g} times what is allowed" if factor > 1 else "more than is allowed"
    return Alert(
        name=words.alert,
        expr=expr,
        severity=burn.severity,
        wait=burn.wait,
        hold=HOLD,
        labels={"slo": objective.name, "window": long},
        summary=f"{{{{ $value | humanizePercentage }}}} of {words.unit} {broken}, {where(objective)} ({long})",
        description=(
            f"{{{{ $value | humanizePercentage }}}} of {words.unit} in the last {long} {broken}; objective {objective.name} "
            f"allows {budget * 100:.4g}%. That is {faster}, and the last {short} are no better. At this rate "
            f"the budget of {prometheus(file.window)} is gone within {gone}."
        ),
        command=words.command,
    )


def where(objective: ServiceObjective) -> str:
    """Return the pool's name for a summary."""
    if objective.signal is ObjectiveSignal.KV_FETCH:
        return "{{ with $labels.cluster }}in {{ . }}{{ else }}in this fleet{{ end }}"
    return "{{ $labels.model_name }} at {{ $labels.role }}{{ with $labels.cluster }} in {{ . }}{{ end }}"


def bound_of(objective: ServiceObjective, threshold: Duration | None = None) -> BucketBound:
    return nearest_bound(threshold or objective.threshold or Duration(1))
