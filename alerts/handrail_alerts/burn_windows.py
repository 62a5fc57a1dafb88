"""The pairs of windows for burn-rate alerts, and how fast each pair may burn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from handrail.config.types import Duration
from handrail_alerts.alert import Severity, minutes


@dataclass(frozen=True, slots=True)
class Burn:
    """One pair of windows.

    ``share``: the share of the whole budget that the long window may use up before the alert fires.
    """

    long: Duration
    short: Duration
    share: float
    severity: Severity
    wait: Duration

    def factor(self, window: Duration) -> float:
        """Return the burn rate limit: 14.4, 6 and 1 for a budget of 30 days.

        It is how many times faster than allowed the budget goes.
        """
        return self.share * window / self.long


BURNS: Final = (
    Burn(minutes(60), minutes(5), 0.02, Severity.PAGE, minutes(2)),
    Burn(minutes(6 * 60), minutes(30), 0.05, Severity.PAGE, minutes(5)),
    Burn(minutes(3 * 24 * 60), minutes(6 * 60), 0.10, Severity.TICKET, minutes(30)),
)


def unreachable_target(window: Duration) -> float:
    """Return the target in percent up to which the fastest burn cannot happen.

    More than every request would have to fail.
    """
    return 100 * (1 - 1 / max(burn.factor(window) for burn in BURNS))
