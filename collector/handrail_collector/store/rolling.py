"""Select the missing and the stale rollups, and those that answer for an hour.

This module has no side effects.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from handrail_collector.store.compaction import Ranged, closed
from handrail_collector.store.layout import hour_of
from handrail_collector.store.manifest import PublishRecord, StoredFile
from handrail_collector.store.schema import Table


@dataclass(frozen=True, slots=True)
class Due:
    """Rollups that are due.

    ``missing``: files of requests that need a rollup, with their journal ranges. ``stale``: paths of rollups to take out.
    """

    missing: tuple[Ranged, ...]
    stale: tuple[str, ...]


def due(publishes: Iterable[PublishRecord], shard: int, now_unix_ns: int, closed_after_ns: int) -> Due:
    """Find the rollups to make now, and the stale ones.

    Rollups are made for hours that are over (``compaction.closed``).
    """
    listed = [(p.first_offset, p.end_offset, file) for p in publishes if p.shard == shard for file in p.files]
    requests = {file.path for _, _, file in listed if file.table is Table.REQUESTS}
    rollups = covered(file for _, _, file in listed)
    return Due(
        missing=tuple(
            (first, end, file)
            for first, end, file in listed
            if file.table is Table.REQUESTS
            and file.path not in rollups
            and closed(hour_of(file.path), file.written_unix_ns, now_unix_ns, closed_after_ns)
        ),
        stale=tuple(file.path for path, file in rollups.items() if path not in requests),
    )


def covered(files: Iterable[StoredFile]) -> dict[str, StoredFile]:
    """Map the path of each covered file to its rollup."""
    return {file.covers: file for file in files if file.table is Table.ROLLUPS}


@dataclass(frozen=True, slots=True)
class Split:
    """The files that answer a period.

    ``rollups`` answer for whole hours, ``requests`` for the rest.
    """

    rollups: tuple[StoredFile, ...]
    requests: tuple[StoredFile, ...]


def split(files: Iterable[StoredFile], since_unix_ns: int, until_unix_ns: int, by_rows: Collection[str] = ()) -> Split:
    """Select the files that answer for [since, until).

    Rollups answer for an hour when each of its files has one and lies within the period.
    ``by_rows``: paths of files of requests whose rollups are ignored.
    """
    files = tuple(files)
    covers = {path: file for path, file in covered(files).items() if path not in by_rows}
    hours: dict[int, list[StoredFile]] = {}
    for file in files:
        if file.table is Table.REQUESTS and file.max_unix_ns >= since_unix_ns and file.min_unix_ns < until_unix_ns:
            hours.setdefault(hour_of(file.path), []).append(file)
    rollups: list[StoredFile] = []
    requests: list[StoredFile] = []
    for each in hours.values():
        whole = all(f.path in covers and f.min_unix_ns >= since_unix_ns and f.max_unix_ns < until_unix_ns for f in each)
        if whole:
            rollups.extend(covers[file.path] for file in each)
        else:
            requests.extend(each)
    return Split(tuple(rollups), tuple(requests))
