"""Round a threshold to a bucket bound of our histograms.

The share of observations above a bound is exact; above any other value it is an estimate (case H13).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from handrail.config.types import Duration
from handrail.metrics.histogram import LATENCY_SECONDS
from handrail_alerts.slo import SloFile


@dataclass(frozen=True, slots=True)
class BucketBound:
    """A bucket bound.

    ``le``: the label's text, as Python and Go write the number. ``moved``: it is not quite the requested threshold.
    """

    seconds: float
    wanted: Duration

    @property
    def le(self) -> str:
        return repr(self.seconds)

    @property
    def moved(self) -> bool:
        return round(self.seconds * 1e9) != self.wanted

    @property
    def text(self) -> str:
        """Return the bound as a duration, such as ``2s``."""
        return str(Duration(round(self.seconds * 1e9)))

    @property
    def describe(self) -> str:
        """Describe the bound for the text of a rule.

        Examples: ``2s``, or ``3.25s (the bucket bound nearest to 3.3s)``.
        """
        return f"{self.text} (the bucket bound nearest to {self.wanted})" if self.moved else self.text


def nearest_bound(threshold: Duration, bounds: Sequence[float] = LATENCY_SECONDS) -> BucketBound:
    """Find the bound with the smallest ratio to ``threshold``.

    It is at most 5 % off between the first and the last bound.
    """
    return BucketBound(min(bounds, key=lambda bound: abs(math.log(bound * 1e9 / threshold))), threshold)


def moved(slo: SloFile) -> Iterator[str]:
    """Yield a line for each threshold that is no bound, with the bound used instead."""
    for objective in slo.objectives:
        for key in ("threshold", "p99"):
            query = getattr(objective, key)
            if query is not None and (bound := nearest_bound(query)).moved:
                yield f"{objective.name}: {key} {query} is judged at {bound.text}, the nearest bound of the histogram's buckets"
