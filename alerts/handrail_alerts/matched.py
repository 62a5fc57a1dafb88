"""Which selectors of the rules match no series of a Prometheus: such a rule looks healthy for ever (case H15)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from handrail_alerts.alert import Alert, Recording
from handrail_alerts.groups import files
from handrail_alerts.slo import SloFile

_TEXT: Final = r'"(?:[^"\\]|\\.)*"'
_SELECTOR: Final = re.compile(rf'{_TEXT}|\b((?:handrail_[a-z0-9_]+|up)\b(?:\{{(?:[^}}"]|{_TEXT})*\}})?)')


@dataclass(frozen=True, slots=True)
class Unmatched:
    """One selector, and the alerts, objectives and recordings that read it."""

    selector: str
    readers: tuple[str, ...]


def selectors(expr: str) -> Iterator[str]:
    """The selectors of scraped series in one of our own expressions, each as it stands there."""
    yield from filter(None, _SELECTOR.findall(expr))


def unmatched(slo: SloFile, has_result: Callable[[str], bool]) -> tuple[Unmatched, ...]:
    """In the order of the rules. ``has_result``: whether a query has any result; each selector is asked of the last hour."""
    readers: dict[str, dict[str, None]] = {}
    for groups in files(slo).values():
        for rule in (rule for group in groups for rule in group.rules):
            for selector in selectors(rule.expr):
                readers.setdefault(selector, {})[_name(rule)] = None
    return tuple(
        Unmatched(selector, tuple(names))
        for selector, names in readers.items()
        if not has_result(f"count(last_over_time({selector}[1h]))")
    )


def _name(rule: Alert | Recording) -> str:
    """An alert; of recordings the objective, since it has many and they read the same."""
    if isinstance(rule, Alert):
        return rule.name
    return f"objective {rule.labels['slo']}" if "slo" in rule.labels else rule.record
