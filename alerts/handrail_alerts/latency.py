"""Alerts on the 99th percentile over its limit, as a share above a bucket bound.

The share is exact, an interpolated quantile is not (case H13).
p99 over L is the same as more than 1 % above L. A handful of requests has no 99th percentile, so too few of them fire nothing
(B08).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from handrail_alerts.alert import Alert, RuleGroup, Severity, minutes
from handrail_alerts.burn import WORDS, bound_of, ratio, total, where
from handrail_alerts.context import Context
from handrail_alerts.objective import ObjectiveSignal, ServiceObjective

LEAST: Final = 100
"""The least number of requests: one of a hundred is one percent."""

_NAMES: Final = {ObjectiveSignal.TTFT: "TtftP99High", ObjectiveSignal.STREAM_GAP: "ItlP99High", ObjectiveSignal.ITL: "ItlP99High"}
_WINDOW: Final = minutes(5)


def groups(context: Context) -> Iterator[RuleGroup]:
    """Yield one alert for each objective that has a ``p99``."""
    alerts = tuple(_alert(context, objective) for objective in context.slo.objectives if objective.p99 is not None)
    if alerts:
        yield RuleGroup(name="handrail-latency", rules=alerts)


def _alert(context: Context, objective: ServiceObjective) -> Alert:
    words, limit, window = WORDS[objective.signal], objective.p99, context.window(_WINDOW)
    assert limit is not None  # groups() checks that there is one
    share, count, bound = ratio(context, objective, window, limit), total(context, objective, window), bound_of(objective, limit)
    expr = f"{share}\n> 0.01\nand {count} >= {LEAST}"
    return Alert(
        name=_NAMES[objective.signal],
        expr=expr,
        severity=Severity.TICKET,
        wait=minutes(5),
        labels={"slo": objective.name},
        summary=f"p99 of the {words.title} is over {bound.text}, {where(objective)}",
        description=(
            f"{{{{ $value | humanizePercentage }}}} of {words.unit} in the last {window} "
            f"{words.broken.format(over=bound.describe)}. A 99th percentile below this limit allows at most 1%."
        ),
        command="handrail explain --since -30m",
    )
