"""Every group of rules, in the order of their files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from handrail_alerts import burn, decode, engines, handoff, latency, self_monitoring
from handrail_alerts.alert import Alert, RuleGroup
from handrail_alerts.context import Context
from handrail_alerts.slo import SloFile

FILES: Final[dict[str, Callable[[Context], Iterator[RuleGroup]]]] = {
    "slo": burn.groups,
    "latency": latency.groups,
    "handoff": handoff.groups,
    "decode": decode.groups,
    "engines": engines.groups,
    "itself": self_monitoring.groups,
}
"""The name of each rule file and the function that makes its groups."""


def files(slo: SloFile) -> dict[str, tuple[RuleGroup, ...]]:
    """Build the groups of each file; a file without rules is left out."""
    context = Context(slo)
    made = {name: tuple(make(context)) for name, make in FILES.items()}
    return {name: groups for name, groups in made.items() if groups}


def alerts(slo: SloFile) -> tuple[Alert, ...]:
    """Return every alert rule; an objective's alert is there once for each window."""
    return tuple(alert for groups in files(slo).values() for group in groups for alert in group.alerts)
