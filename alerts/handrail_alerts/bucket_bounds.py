"""A threshold as a bound of our histograms: the share above a bound is exact, above anything else it is a guess (case H13)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from handrail.config.types import Duration
from handrail.metrics.histogram import LATENCY_SECONDS
from handrail_alerts.slo import SloFile


@dataclass(frozen=True, slots=True)
class BucketBound:
    """``le``: the label's text, as Python and Go write the number. ``moved``: it is not quite what was asked for."""

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
        """``2s``."""
        return str(Duration(round(self.seconds * 1e9)))

    @property
    def describe(self) -> str:
        """``2s``, or ``3.25s (the bucket bound nearest to 3.3s)``, for the words of a rule."""
        return f"{self.text} (the bucket bound nearest to {self.wanted})" if self.moved else self.text


def nearest_bound(threshold: Duration, bounds: Sequence[float] = LATENCY_SECONDS) -> BucketBound:
    """The bound at the smallest ratio to ``threshold``; at most 5 % off between the first and the last."""
    return BucketBound(min(bounds, key=lambda bound: abs(math.log(bound * 1e9 / threshold))), threshold)


def moved(slo: SloFile) -> Iterator[str]:
    """What became of the thresholds that are no bounds, in words."""
    for objective in slo.objectives:
        for key in ("threshold", "p99"):
            query = getattr(objective, key)
            if query is not None and (bound := nearest_bound(query)).moved:
                yield f"{objective.name}: {key} {query} is judged at {bound.text}, the nearest bound of the histogram's buckets"
