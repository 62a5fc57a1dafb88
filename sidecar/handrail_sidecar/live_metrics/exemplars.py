"""Which requests stand for a bucket: traces that are kept, at a bounded rate.

An exemplar whose trace was sampled away is a dead link, so a request that becomes one says so on its span
(``handrail.exemplar``) and is kept; the rate is capped since what it forces is stored.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from handrail.metrics.histogram import Exemplar, Histogram

EVERY_NS: Final = 10**9
"""At most one new exemplar a second of one process."""

FRESH_NS: Final = 60 * 10**9
"""A bucket keeps its exemplar for so long. A slow request falls into a bucket of its own, so it is hardly ever turned away."""


class Exemplars:
    """Chooses. ``wall`` is the wall clock, which the page shows and which paces."""

    def __init__(self, wall: Callable[[], int]) -> None:
        self._wall = wall
        self._last_ns = 0

    def offer(self, histogram: Histogram, at: int, trace_id: str, value: int) -> bool:
        """True where the request became the exemplar of bucket ``at``."""
        if not trace_id:
            return False
        now = self._wall()
        held = histogram.exemplars.get(at)
        if (held is not None and 0 <= now - held.unix_ns < FRESH_NS) or 0 <= now - self._last_ns < EVERY_NS:
            return False
        self._last_ns = now
        histogram.exemplars[at] = Exemplar(trace_id, value, now)
        return True
