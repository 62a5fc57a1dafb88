"""The pairs of windows that a budget is watched over, and how fast each may burn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from handrail.config.types import Duration
from handrail_alerts.alert import Severity, minutes


@dataclass(frozen=True, slots=True)
class Burn:
    """One pair of windows. ``share``: of the whole budget, what the long window may use up before this fires."""

    long: Duration
    short: Duration
    share: float
    severity: Severity
    wait: Duration

    def factor(self, window: Duration) -> float:
        """How many times faster than allowed: 14.4, 6 and 1 for a budget of 30 days."""
        return self.share * window / self.long


BURNS: Final = (
    Burn(minutes(60), minutes(5), 0.02, Severity.PAGE, minutes(2)),
    Burn(minutes(6 * 60), minutes(30), 0.05, Severity.PAGE, minutes(5)),
    Burn(minutes(3 * 24 * 60), minutes(6 * 60), 0.10, Severity.TICKET, minutes(30)),
)


def unreachable_target(window: Duration) -> float:
    """The target in percent up to which the fastest burn cannot happen: more than every request would have to fail."""
    return 100 * (1 - 1 / max(burn.factor(window) for burn in BURNS))
