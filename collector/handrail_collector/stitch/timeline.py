"""Find what was going on at a given time among intervals sorted by their begin.

Bounded; the oldest go first.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar


class Lasting(Protocol):
    """An interval by the wall clock of its host."""

    @property
    def begin_unix_ns(self) -> int: ...
    @property
    def end_unix_ns(self) -> int: ...


T = TypeVar("T", bound=Lasting)


class Timeline(Generic[T]):
    """The latest items: at least ``limit``, at most twice as many."""

    __slots__ = ("_begins", "_items", "_limit", "_longest_ns")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._items: list[T] = []
        self._begins: list[int] = []
        self._longest_ns = 0

    def put(self, item: T) -> None:
        """Add one item; items mostly come in order."""
        begin = item.begin_unix_ns
        self._longest_ns = max(self._longest_ns, item.end_unix_ns - begin)
        if not self._begins or begin >= self._begins[-1]:
            self._begins.append(begin)
            self._items.append(item)
        else:
            place = bisect_right(self._begins, begin)
            self._begins.insert(place, begin)
            self._items.insert(place, item)
        if len(self._items) > 2 * self._limit:
            del self._items[: self._limit], self._begins[: self._limit]

    def during(self, begin_unix_ns: int, end_unix_ns: int) -> Iterator[T]:
        """Yield the items that overlap this time."""
        first = bisect_left(self._begins, begin_unix_ns - self._longest_ns)
        for item in self._items[first : bisect_right(self._begins, end_unix_ns)]:
            if item.end_unix_ns >= begin_unix_ns:
                yield item

    def __contains__(self, item: T) -> bool:
        first, last = bisect_left(self._begins, item.begin_unix_ns), bisect_right(self._begins, item.begin_unix_ns)
        return item in self._items[first:last]

    def __len__(self) -> int:
        return len(self._items)
