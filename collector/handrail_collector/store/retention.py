"""Select the files that are too old, and the days that exceed the disk quota.

This module has no side effects. Samples lose their value fastest, and a host of GPUs writes more of them in a day than
most fleets write requests. Samples therefore have a shorter retention, and they go before any request when space is short.
A host with a wrong clock writes into days that are long past or to come; such files are as old as their writing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from handrail_collector.store.layout import DAY_NS, day_of
from handrail_collector.store.manifest import StoredFile
from handrail_collector.store.tables.samples import SAMPLED


@dataclass(frozen=True, slots=True)
class Day:
    """The files of one day, counted since 1970: its samples, or all others."""

    day: int
    files: tuple[StoredFile, ...]

    @property
    def bytes(self) -> int:
        """Total size of the files."""
        return sum(file.bytes for file in self.files)


def expired(
    files: Iterable[StoredFile], now_unix_ns: int, retention_ns: int | None, samples_ns: int | None = None
) -> list[StoredFile]:
    """Select files of days that ended, and that were written, ``retention_ns`` ago.

    Days that lie ahead count as ended. ``samples_ns``: retention of samples, if shorter. None keeps files for ever.
    """
    shorter = min((each for each in (retention_ns, samples_ns) if each is not None), default=None)
    gone = []
    for file in files:
        kept = shorter if file.table in SAMPLED else retention_ns
        if kept is None:
            continue
        until = now_unix_ns - kept
        over = (day_of(file.path) + 1) * DAY_NS <= until or day_of(file.path) * DAY_NS > now_unix_ns
        if over and file.written_unix_ns <= until:
            gone.append(file)
    return gone


def over_quota(files: Iterable[StoredFile], now_unix_ns: int, max_bytes: int) -> list[Day]:
    """Select the fewest days whose removal brings the store to ``max_bytes``.

    The samples of the oldest days go first, then the other files of the oldest days.
    The open day stays, even when it alone exceeds the quota.
    """
    samples: defaultdict[int, list[StoredFile]] = defaultdict(list)
    others: defaultdict[int, list[StoredFile]] = defaultdict(list)
    for file in files:
        (samples if file.table in SAMPLED else others)[day_of(file.path)].append(file)
    left = sum(file.bytes for days in (samples, others) for each in days.values() for file in each)
    gone: list[Day] = []
    for days in (samples, others):
        for number, each in sorted(days.items()):
            if left <= max_bytes:
                return gone
            if number != now_unix_ns // DAY_NS:
                gone.append(Day(number, tuple(each)))
                left -= gone[-1].bytes
    return gone
