"""The types of an alert rule, a recording rule and a group of rules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from handrail.config.types import Duration

SECOND_NS = 10**9
NOW = Duration(0)


class Severity(str, Enum):
    """The receiver of an alert."""

    PAGE = "page"  # a person, now: users suffer, or answers cannot be trusted
    TICKET = "ticket"  # a person, in working hours


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """One alert rule.

    ``summary`` and ``description`` are Prometheus templates. They say what is wrong, where and since when, with value and unit.
    ``command`` is the first command line to run. ``hold``: how long it goes on firing after its expression has ended.
    """

    name: str
    expr: str
    severity: Severity
    summary: str
    description: str
    command: str
    wait: Duration = NOW
    hold: Duration = NOW
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """One recording rule."""

    record: str
    expr: str
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleGroup:
    """Rules that are evaluated together, in order."""

    name: str
    rules: tuple[Alert | Recording, ...]

    @property
    def alerts(self) -> tuple[Alert, ...]:
        return tuple(rule for rule in self.rules if isinstance(rule, Alert))


def minutes(count: float) -> Duration:
    """Return ``count`` minutes as a duration."""
    return Duration(round(count * 60 * SECOND_NS))


def prometheus(duration: int) -> str:
    """Format ns as Prometheus writes a duration: ``1d``, ``6h``, ``90s``."""
    seconds = -(-duration // SECOND_NS)
    for size, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if seconds and seconds % size == 0:
            return f"{seconds // size}{unit}"
    return f"{seconds}s"
