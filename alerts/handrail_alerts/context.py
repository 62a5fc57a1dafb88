"""What every expression is made with: the fleet's selector, its labels, windows that hold enough scrapes, common idioms."""

from __future__ import annotations

from dataclasses import dataclass

from handrail.config.types import Duration
from handrail_alerts.alert import minutes, prometheus
from handrail_alerts.limits import AlertLimits
from handrail_alerts.slo import SloFile

SCRAPES = 4
"""So many scrapes a window holds at least: one may be late and one may fail (case H06)."""


LATELY = minutes(10)
"""An event is told for so long. Shorter, and a scrape that is late forgets it; longer, and it is told when it is over."""


@dataclass(frozen=True, slots=True)
class Context:
    """Made of a ``SloFile``."""

    slo: SloFile

    @property
    def limits(self) -> AlertLimits:
        return self.slo.limits

    @property
    def target(self) -> tuple[str, ...]:
        """Labels that name one scraped process."""
        return (*self.slo.prometheus.group_by, "job", "instance")

    def series(self, name: str, *matchers: str) -> str:
        """A selector with the fleet's own matchers."""
        every = [each for each in (self.slo.prometheus.selector, *matchers) if each]
        return f"{name}{{{','.join(every)}}}" if every else name

    def window(self, duration: Duration) -> str:
        """The window as Prometheus writes it, widened where it would hold too few scrapes."""
        return prometheus(max(duration, SCRAPES * self.slo.prometheus.scrape_interval))

    def fleet(self, *labels: str) -> str:
        """``(cluster, role)``: the labels of one fleet and these."""
        return f"({', '.join((*self.slo.prometheus.group_by, *labels))})"

    def of_target(self, *labels: str) -> str:
        """``(cluster, job, instance, reason)``."""
        return f"({', '.join((*self.target, *labels))})"

    def grew(self, name: str, *matchers: str) -> str:
        """By how much a counter grew lately, where it did: also one that was born with its first count, and one that began again.

        ``increase`` sees no growth in a series that begins at 1 (case H01), so what was not there a window ago counts in full.
        """
        series, window = self.series(name, *matchers), self.window(LATELY)
        return f"(increase({series}[{window}]) > 0 or ({series} unless {series} offset {window}) > 0)"

    def rose(self, name: str, *matchers: str) -> str:
        """As ``grew`` for counters of the collector, which are there at 0 from the first and keep their value over restarts:

        at a new address such a series begins with what was counted long ago, and that is no news.
        """
        return f"increase({self.series(name, *matchers)}[{self.window(LATELY)}]) > 0"

    def known(self, name: str, duration: Duration, *matchers: str) -> str:
        """The series that have been there within ``duration``: a target that went away has none now, and its increase goes on."""
        return f"last_over_time({self.series(name, *matchers)}[{self.window(duration)}])"

    def with_role(self, expr: str, name: str, *matchers: str) -> str:
        """The expression, one series a target, times 1, with the label ``role`` of that process."""
        return f"{expr} * on {self.of_target()} group_left (role) {self.processes(name, *matchers)}"

    def processes(self, name: str, *matchers: str) -> str:
        """One series for each process that has been there in the last hour: an upgrade leaves two versions of its info."""
        return f"max by {self.of_target('role')} (last_over_time({self.series(name, *matchers)}[1h]))"

    def processes_of(self, name: str) -> str:
        """As ``processes``, without a role."""
        return f"max by {self.of_target()} (last_over_time({self.series(name)}[1h]))"


def any_of(*exprs: str) -> str:
    """The expressions joined with ``or``, a line each."""
    return "\nor\n".join(exprs)
