"""Choose the requests that become exemplars of buckets, at a bounded rate.

An exemplar whose trace was sampled away is a dead link.
So a request that becomes one has ``handrail.exemplar`` on its span and is kept.
The rate is capped since each forced trace is stored.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from handrail.metrics.histogram import Exemplar, Histogram

EVERY_NS: Final = 10**9
"""At most one new exemplar per second and process."""

FRESH_NS: Final = 60 * 10**9
"""Time for which a bucket keeps its exemplar.

A slow request usually falls into a bucket of its own, so it is rarely refused.
"""


class Exemplars:
    """Chooses exemplars.

    ``wall`` is the wall clock that paces them and that the page shows.
    """

    def __init__(self, wall: Callable[[], int]) -> None:
        self._wall = wall
        self._last_ns = 0

    def offer(self, histogram: Histogram, at: int, trace_id: str, value: int) -> bool:
        """Offer a request; return True when it became the exemplar of bucket ``at``."""
        if not trace_id:
            return False
        now = self._wall()
        held = histogram.exemplars.get(at)
        if (held is not None and 0 <= now - held.unix_ns < FRESH_NS) or 0 <= now - self._last_ns < EVERY_NS:
            return False
        self._last_ns = now
        histogram.exemplars[at] = Exemplar(trace_id, value, now)
        return True
