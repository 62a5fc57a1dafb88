"""List the selectors of the rules, to check that each matches a series.

A rule whose selector matches no series of a Prometheus looks healthy for ever (case H15).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from handrail_alerts.alert import Alert, Recording
from handrail_alerts.groups import files
from handrail_alerts.slo import SloFile

_TEXT: Final = r'"(?:[^"\\]|\\.)*"'
_SELECTOR: Final = re.compile(rf'{_TEXT}|\b((?:handrail_[a-z0-9_]+|up)\b(?:\{{(?:[^}}"]|{_TEXT})*\}})?)')


@dataclass(frozen=True, slots=True)
class Read:
    """One selector, and the alerts, objectives and recordings that read it."""

    selector: str
    readers: tuple[str, ...]

    @property
    def query(self) -> str:
        """Return a query that has a result where the selector matched in the last hour."""
        return f"count(last_over_time({self.selector}[1h]))"


def selectors(expr: str) -> Iterator[str]:
    """Yield the selectors of scraped series in one of our own expressions.

    Each is as the expression writes it.
    """
    yield from filter(None, _SELECTOR.findall(expr))


def read_selectors(slo: SloFile) -> tuple[Read, ...]:
    """Return every selector that the rules read, in the order of the rules."""
    readers: dict[str, dict[str, None]] = {}
    for groups in files(slo).values():
        for rule in (rule for group in groups for rule in group.rules):
            for selector in selectors(rule.expr):
                readers.setdefault(selector, {})[_name(rule)] = None
    return tuple(Read(selector, tuple(names)) for selector, names in readers.items())


def _name(rule: Alert | Recording) -> str:
    """Return the name of an alert, or the objective of a recording.

    An objective has many recordings, and they read the same selectors.
    """
    if isinstance(rule, Alert):
        return rule.name
    return f"objective {rule.labels['slo']}" if "slo" in rule.labels else rule.record
