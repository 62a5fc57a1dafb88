"""How much of the traffic was joined with evidence from every process on its path, over what somebody else counted.

Rows say nothing of what never came, so the requests are counted where they are served: by the edge's proxies, or, where none
counts, by the engines that decode. Such a counter is told from time to time; the requests that ended between two readings of it,
by the same process's clock, are an interval. Those joined of an interval over those counted is its coverage.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

SECOND: Final = 10**9
WINDOW_NS: Final = 300 * SECOND
MEMORY_NS: Final = 600 * SECOND
"""So long after the last edge counted, engines are not believed instead."""

NEW_NS: Final = 60 * SECOND
"""A counter that began so shortly before its first reading is counted from its beginning."""

MOST_PROCESSES: Final = 2048
MOST_INTERVALS: Final = 256
"""Of one process: more than a window and what is not settled yet at a reading every two seconds."""


class By(str, Enum):
    """Who counts. Closed."""

    EDGE = "edge"
    ENGINE = "engine"


@dataclass(slots=True)
class _Interval:
    since_unix_ns: int
    until_unix_ns: int  # both by the process's clock
    received_unix_ns: int  # by ours
    counted: float
    joined: int


@dataclass(slots=True)
class _ProcessCounter:
    """What is known of one process's counter."""

    start_unix_ns: int
    value: float
    whole: bool  # what was joined since that reading is known, too
    since_unix_ns: int
    joined: int = 0  # of what ended since
    intervals: deque[_Interval] = field(default_factory=lambda: deque(maxlen=MOST_INTERVALS))


class Coverage:
    """One owner; times are passed in. ``settle_ns``: so long after its end a request may still be decided and joined."""

    def __init__(self, settle_ns: int) -> None:
        self._settle_ns = settle_ns
        self._processes: OrderedDict[tuple[By, str], _ProcessCounter] = OrderedDict()
        self._edge_unix_ns: int | None = None

    def by(self, now_unix_ns: int) -> By:
        """Whose count holds now."""
        edge = self._edge_unix_ns
        return By.EDGE if edge is not None and now_unix_ns - edge < MEMORY_NS else By.ENGINE

    def read(
        self, by: By, instance: str, start_unix_ns: int, value: float, at_unix_ns: int, received_unix_ns: int, *, again: bool
    ) -> int:
        """Take a reading of a counter; how many requests it counted since the one before, 0 where there was none.

        ``start_unix_ns``: since when it counts; another one is another counter. ``again``: of a replay, so that what ended before
        it may have been joined by an earlier life: it is what later readings count from, and nothing more.
        """
        if by is By.EDGE:
            self._edge_unix_ns = max(self._edge_unix_ns or 0, received_unix_ns)
        key = by, instance
        known = self._processes.pop(key, None)
        if known is not None and at_unix_ns <= known.since_unix_ns:
            self._processes[key] = known  # delivered late
            return 0
        found = _ProcessCounter(start_unix_ns, value, not again, at_unix_ns)
        if known is None:
            counted = value if abs(at_unix_ns - start_unix_ns) < NEW_NS else 0.0
        else:
            anew = start_unix_ns != known.start_unix_ns or value < known.value
            counted = value if anew else value - known.value
            found.intervals = known.intervals
            if known.whole and not again:
                since = known.since_unix_ns
                found.intervals.append(_Interval(since, at_unix_ns, received_unix_ns, counted, known.joined))
                while found.intervals[0].received_unix_ns < received_unix_ns - WINDOW_NS - 2 * self._settle_ns:
                    found.intervals.popleft()
        self._processes[key] = found
        if len(self._processes) > MOST_PROCESSES:
            self._processes.popitem(last=False)
        return 0 if again else round(counted)

    def joined(self, by: By, instance: str, ended_unix_ns: int) -> None:
        """One request, counted at ``instance`` when it ended by that process's clock, is joined."""
        known = self._processes.get((by, instance))
        if known is None:
            return
        if ended_unix_ns > known.since_unix_ns:
            known.joined += 1
            return
        place = bisect_left(known.intervals, ended_unix_ns, key=lambda interval: interval.until_unix_ns)
        if place < len(known.intervals) and known.intervals[place].since_unix_ns < ended_unix_ns:
            known.intervals[place].joined += 1

    def ratio(self, now_unix_ns: int) -> float | None:
        """Of the requests counted in the last five minutes that are settled; None: nothing was counted, so nothing is known."""
        by, until = self.by(now_unix_ns), now_unix_ns - self._settle_ns
        counted, joined = 0.0, 0
        for (whose, _), known in self._processes.items():
            for interval in known.intervals if whose is by else ():
                if until - WINDOW_NS < interval.received_unix_ns <= until:
                    counted += interval.counted
                    joined += interval.joined
        # a request that ends while its counter is read may fall into the interval before
        return min(1.0, joined / counted) if counted > 0 else None
