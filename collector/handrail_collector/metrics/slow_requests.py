"""Which requests are the slow ones: at or above the 99th percentile of time to first token of those just before them.

The phases of the slow ones, summed, say what their time went into; percentiles of single phases do not, since they do not add up.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Final

WINDOW: Final = 2000
"""Requests that the next one is compared with: twenty of them are slow."""

LEAST: Final = 200
"""Fewer say nothing of one in a hundred."""

SHARE: Final = 0.99
MOST_WINDOWS: Final = 128


@dataclass(slots=True)
class _Window:
    newest: deque[int] = field(default_factory=deque)
    ordered: list[int] = field(default_factory=list)


class SlowRequests:
    """Bounded; one owner. It begins anew with the process."""

    def __init__(self) -> None:
        self._windows: OrderedDict[tuple[str, str], _Window] = OrderedDict()

    def slow(self, model: str, scope: str, ttft_ns: int) -> bool:
        """Whether a request is among the slow ones, by those of its model and scope before it. 3 us (bench_joined)."""
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
