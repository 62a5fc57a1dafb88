"""Compute the coverage: joined requests over the requests that others counted.

Stored rows cannot show requests that never arrived, so requests are counted where they are served:
by the edge's proxies or, when no edge counts, by the engines that decode. Such a counter is read from time to time.
The requests that ended between two readings, by the same process's clock, form an interval.
The coverage of an interval is the number of joined requests over the number of counted ones.
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
"""Time after the last edge counted until engines are counted instead, ns."""

NEW_NS: Final = 60 * SECOND
"""Largest age of a counter that is counted from its beginning, ns.

The age is taken at its first reading.
"""

MOST_PROCESSES: Final = 2048
MOST_INTERVALS: Final = 256
"""Most intervals of one process.

It covers a window and what is not settled yet, with a reading every two seconds.
"""


class By(str, Enum):
    """Who counts; a closed list."""

    EDGE = "edge"
    ENGINE = "engine"


@dataclass(slots=True)
class _Interval:
    since_unix_ns: int
    until_unix_ns: int  # both times by the process's clock
    received_unix_ns: int  # by our clock
    counted: float
    joined: int


@dataclass(slots=True)
class _ProcessCounter:
    """The state of one process's counter."""

    start_unix_ns: int
    value: float
    whole: bool  # all joins since that reading are known
    since_unix_ns: int
    joined: int = 0  # joined requests that ended since
    intervals: deque[_Interval] = field(default_factory=lambda: deque(maxlen=MOST_INTERVALS))


class Coverage:
    """Track counters of processes and joined requests. One owner; times are passed in.

    ``settle_ns``: how long after its end a request may still be decided and joined.
    """

    def __init__(self, settle_ns: int) -> None:
        self._settle_ns = settle_ns
        self._processes: OrderedDict[tuple[By, str], _ProcessCounter] = OrderedDict()
        self._edge_unix_ns: int | None = None

    def by(self, now_unix_ns: int) -> By:
        """Return whose counts apply now."""
        edge = self._edge_unix_ns
        return By.EDGE if edge is not None and now_unix_ns - edge < MEMORY_NS else By.ENGINE

    def read(
        self, by: By, instance: str, start_unix_ns: int, value: float, at_unix_ns: int, received_unix_ns: int, *, again: bool
    ) -> int:
        """Take a reading of a counter and return the requests counted since the last one.

        Returns 0 when there was no reading before. ``start_unix_ns``: when the counter started; another start is another counter.
        ``again``: the reading comes from a replay. What ended before it may have been joined by an earlier process, so it only
        serves as the base of later readings.
        """
        if by is By.EDGE:
            self._edge_unix_ns = max(self._edge_unix_ns or 0, received_unix_ns)
        key = by, instance
        known = self._processes.pop(key, None)
        if known is not None and at_unix_ns <= known.since_unix_ns:
            self._processes[key] = known  # a late delivery
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
        """Count one joined request that ended at this time, by the clock of ``instance``."""
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
        """Return the coverage of the last five minutes that are settled.

        Returns None when nothing was counted.
        """
        by, until = self.by(now_unix_ns), now_unix_ns - self._settle_ns
        counted, joined = 0.0, 0
        for (whose, _), known in self._processes.items():
            for interval in known.intervals if whose is by else ():
                if until - WINDOW_NS < interval.received_unix_ns <= until:
                    counted += interval.counted
                    joined += interval.joined
        # above 1 when a request ends during a reading and falls into the earlier interval
        return min(1.0, joined / counted) if counted > 0 else None
