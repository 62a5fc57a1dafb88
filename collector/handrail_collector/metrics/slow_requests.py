"""Select slow requests: at or above the 99th percentile of time to first token.

The percentile is that of the requests just before.
The summed phases of the slow requests show where their time went. Percentiles of single phases do not, since they do not
add up.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Final

WINDOW: Final = 2000
"""Number of earlier requests that a request is compared with; 20 of them are slow."""

LEAST: Final = 200
"""Fewest earlier requests for a 99th percentile."""

SHARE: Final = 0.99
MOST_WINDOWS: Final = 128


@dataclass(slots=True)
class _Window:
    newest: deque[int] = field(default_factory=deque)
    ordered: list[int] = field(default_factory=list)


class SlowRequests:
    """Keep recent times to first token, bounded. One owner; it starts empty."""

    def __init__(self) -> None:
        self._windows: OrderedDict[tuple[str, str], _Window] = OrderedDict()

    def slow(self, model: str, scope: str, ttft_ns: int) -> bool:
        """Check whether a request is slow among those of its model and scope before it.

        Takes 3 us (bench_joined).
        """
        key = model, scope
        window = self._windows.get(key)
        if window is None:
            window = self._windows[key] = _Window()
            if len(self._windows) > MOST_WINDOWS:
                self._windows.popitem(last=False)
        ordered = window.ordered
        found = len(ordered) >= LEAST and ttft_ns >= ordered[int(SHARE * len(ordered))]
        if len(ordered) >= WINDOW:
            del ordered[bisect_left(ordered, window.newest.popleft())]
        window.newest.append(ttft_ns)
        insort(ordered, ttft_ns)
        return found
