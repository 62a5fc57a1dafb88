"""The common parts of all expressions: selector, labels, windows and idioms.

The selector is the fleet's; windows hold enough scrapes.
"""

from __future__ import annotations

from dataclasses import dataclass

from handrail.config.types import Duration
from handrail_alerts.alert import minutes, prometheus
from handrail_alerts.limits import AlertLimits
from handrail_alerts.slo import SloFile

SCRAPES = 4
"""The least number of scrapes in a window.

One may be late and one may fail (case H06).
"""


LATELY = minutes(10)
"""How long an event keeps its alert.

In a shorter time, a late scrape would forget it. In a longer time, the alert would go on after the event is over.
"""


@dataclass(frozen=True, slots=True)
class Context:
    """The settings of a ``SloFile`` as parts of expressions."""

    slo: SloFile

    @property
    def limits(self) -> AlertLimits:
        return self.slo.limits

    @property
    def target(self) -> tuple[str, ...]:
        """Return the labels that name one scraped process."""
        return (*self.slo.prometheus.group_by, "job", "instance")

    def series(self, name: str, *matchers: str) -> str:
        """Build a selector with the fleet's own matchers."""
        every = [each for each in (self.slo.prometheus.selector, *matchers) if each]
        return f"{name}{{{','.join(every)}}}" if every else name

    def window(self, duration: Duration) -> str:
        """Format a window for Prometheus, widened where it would hold too few scrapes."""
        return prometheus(max(duration, SCRAPES * self.slo.prometheus.scrape_interval))

    def fleet(self, *labels: str) -> str:
        """Return the labels of one fleet and ``labels``, such as ``(cluster, role)``."""
        return f"({', '.join((*self.slo.prometheus.group_by, *labels))})"

    def of_target(self, *labels: str) -> str:
        """Return the labels of one process and ``labels``.

        Example: ``(cluster, job, instance, reason)``.
        """
        return f"({', '.join((*self.target, *labels))})"

    def grew(self, name: str, *matchers: str) -> str:
        """Return how much a sidecar's counter grew lately, where it grew.

        It includes a counter that appeared with its first count, and one that began again.
        ``increase`` sees no growth in a series that begins at 1 (case H01), so a series that was absent a window ago counts in
        full.
        """
        series, window = self.series(name, *matchers), self.window(LATELY)
        return f"(increase({series}[{window}]) > 0 or ({series} unless {series} offset {window}) > 0)"

    def rose(self, name: str, *matchers: str) -> str:
        """Return how much a collector's counter grew lately, where it grew.

        These counters exist at 0 from the start and keep their value over restarts. At a new address such a series begins with
        old counts, which are no growth, so unlike in ``grew`` a new series does not count in full.
        """
        return f"increase({self.series(name, *matchers)}[{self.window(LATELY)}]) > 0"

    def known(self, name: str, duration: Duration, *matchers: str) -> str:
        """Return the series that existed within ``duration``.

        A target that went away has no series now, but its increase goes on.
        """
        return f"last_over_time({self.series(name, *matchers)}[{self.window(duration)}])"

    def with_role(self, expr: str, name: str, *matchers: str) -> str:
        """Add the label ``role`` of the process to an expression of one series a target.

        The value is multiplied by 1.
        """
        return f"{expr} * on {self.of_target()} group_left (role) {self.processes(name, *matchers)}"

    def processes(self, name: str, *matchers: str) -> str:
        """Return one series for each process that existed in the last hour.

        An upgrade leaves two versions of a process's info.
        """
        return f"max by {self.of_target('role')} (last_over_time({self.series(name, *matchers)}[1h]))"

    def processes_of(self, name: str) -> str:
        """Return ``processes`` without the label ``role``."""
        return f"max by {self.of_target()} (last_over_time({self.series(name)}[1h]))"


def any_of(*exprs: str) -> str:
    """Join the expressions with ``or``, one a line."""
    return "\nor\n".join(exprs)
