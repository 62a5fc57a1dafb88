"""Which files are too old to keep, and which days have to go because the disk is bounded. Pure.

A host with a wrong clock writes into days that are long past or to come; such files are as old as their writing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from handrail_collector.store.folders import DAY_NS, day_of
from handrail_collector.store.manifest import StoredFile


@dataclass(frozen=True, slots=True)
class Day:
    """The files of one day, counted since 1970."""

    day: int
    files: tuple[StoredFile, ...]

    @property
    def bytes(self) -> int:
        """Of all its files."""
        return sum(file.bytes for file in self.files)


def expired(files: Iterable[StoredFile], now_unix_ns: int, retention_ns: int) -> list[StoredFile]:
    """Files of days that ended ``retention_ns`` ago or more, or that lie ahead, which were also written that long ago."""
    until = now_unix_ns - retention_ns
    return [
        file
        for file in files
        if file.written_unix_ns <= until
        and ((day_of(file.path) + 1) * DAY_NS <= until or day_of(file.path) * DAY_NS > now_unix_ns)
    ]


def over_quota(files: Iterable[StoredFile], now_unix_ns: int, max_bytes: int) -> list[Day]:
    """The oldest days, as few as bring the store to ``max_bytes``; never the open day, even where it alone is more."""
    days: defaultdict[int, list[StoredFile]] = defaultdict(list)
    for file in files:
        days[day_of(file.path)].append(file)
    left = sum(file.bytes for each in days.values() for file in each)
    gone: list[Day] = []
    for number, each in sorted(days.items()):
        if left <= max_bytes:
            break
        if number != now_unix_ns // DAY_NS:
            gone.append(Day(number, tuple(each)))
            left -= gone[-1].bytes
    return gone
