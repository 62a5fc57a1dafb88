"""Keep the rollups of a store consistent with its rows.

Rollups are made for hours that are over, and taken out when they cannot be read.
A file gets a rollup once no request counts twice between it and the other files with rollups.
Rows that another file replaces leave the file first. Rows that it replaces leave the files with a rollup too.
Rows that are published later have no rollup yet, and readers read them directly (``rolled.py``).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from handrail_collector.store import compaction
from handrail_collector.store.layout import hour_of
from handrail_collector.store.manifest import StoredFile
from handrail_collector.store.partitions import PartitionFile
from handrail_collector.store.publish import StorePublisher
from handrail_collector.store.quarantine import READ_ERRORS, DamagedFiles, Stamp, checked, of_machine, stamp_of
from handrail_collector.store.rolling import covered, due
from handrail_collector.store.schema import ROLLUP_COLUMNS, Table
from handrail_collector.store.superseded import ReplacedRows, near

log = logging.getLogger(__name__)

Guarded = Callable[[str, Callable[[], None]], None]
"""Run a named step; exceptions are counted, logged and not raised."""


@dataclass(slots=True)
class RollupStats:
    """Counts since start."""

    made: int = 0
    made_ns: int = 0
    damaged: int = 0  # unreadable rollups, which left the store to be made again
    rows_replaced: int = 0  # earlier versions in other hours that left their files


class Rollups:
    """Make and check rollups, in the one thread that folds and retires."""

    def __init__(self, publisher: StorePublisher, damaged: DamagedFiles) -> None:
        self.stats = RollupStats()
        self._publisher = publisher
        self._damaged = damaged
        self._replaced = ReplacedRows(publisher, damaged)
        self._sound: dict[str, Stamp] = {}

    def take_out_damaged(self) -> None:
        """Retire unreadable rollups; their rows are still in the store.

        Each rollup is read once, and again when its file changes.
        """
        sound: dict[str, Stamp] = {}
        damaged = []
        for file in self._files(Table.ROLLUPS):
            stamp = stamp_of(self._publisher.path(file))
            if stamp is not None and self._sound.get(file.path) == stamp:
                sound[file.path] = stamp
            elif why := self._unreadable(file):
                damaged.append(file.path)
                log.warning("%s cannot be read: %s; the collector removes it and makes it again", self._publisher.path(file), why)
            else:
                sound[file.path] = stamp
        self._sound = sound
        if damaged:
            self._publisher.retire(damaged)
            self.stats.damaged += len(damaged)

    def make(self, now_unix_ns: int, closed_after_ns: int, guarded: Guarded, stopping: Callable[[], bool]) -> None:
        """Make all rollups that are due, including those of files written meanwhile."""
        tried: set[str] = set()
        while True:
            wanted = due(self._publisher.publishes(), self._publisher.shard, now_unix_ns, closed_after_ns)
            if wanted.stale:
                self._publisher.retire(wanted.stale)
            missing = [each for each in wanted.missing if each[2].path not in tried and not self._damaged.knows(each[2])]
            if not missing:
                return
            for first, end, file in missing:
                if stopping():
                    return
                tried.add(file.path)
                guarded(f"rollup of {file.path}", lambda args=(first, end, file): self._make(*args))  # type: ignore[misc]

    def _make(self, first_offset: int, end_offset: int, file: StoredFile) -> None:
        from handrail_collector.store.rollup import COLUMNS, roll_up  # loads Ibis, which is only needed once an hour is over

        began = time.monotonic_ns()
        if not self._settled(file):
            return
        known = self._damaged.columns(file)
        rows = None if known is None else self._damaged.read(file, [name for name in COLUMNS if name in known])
        if rows is None:
            return
        hour = hour_of(file.path)
        part = PartitionFile(Table.ROLLUPS, hour, roll_up(rows, hour), ROLLUP_COLUMNS, file.written_unix_ns, file.path)
        self._publisher.replace((), part, first_offset, end_offset)
        self.stats.made += 1
        self.stats.made_ns += time.monotonic_ns() - began

    def _settled(self, file: StoredFile) -> bool:
        """Check whether a file may have a rollup as it is.

        If not, it is no longer listed, or a damaged file prevents the check.
        """
        requests = self._files(Table.REQUESTS)
        if file not in requests:
            return False
        keys = self._damaged.read(file, compaction.KEYS)
        if keys is None:
            return False
        others = near([other for other in requests if other is not file and other != file], [file])
        found = self._replacing(keys, others)
        if found is None:
            return False
        if dropped := self._replaced.drop(file, found) if found else 0:
            self.stats.rows_replaced += dropped
            return False
        if own := compaction.superseding(keys):
            rolled = covered(self._files(Table.ROLLUPS))
            for other in others:
                if other.path in rolled:
                    self._drop(other, own, rolled[other.path])
        return True

    def _replacing(self, keys: pa.Table, others: list[StoredFile]) -> dict[bytes, dict[bytes, int]] | None:
        """Find rows in ``others`` that replace requests with ``keys``.

        Returns None when one of the files cannot be read.
        """
        own = keys["request_id"].combine_chunks()
        found = [keys[:0]]
        for other in others:
            if other.max_version > 1:
                theirs = self._damaged.read(other, compaction.KEYS)
                if theirs is None:
                    return None
                theirs = theirs.filter(pc.greater(theirs["version"], 1))
                found.append(theirs.filter(pc.is_in(theirs["request_id"], value_set=own)))
        return compaction.superseding(pa.concat_tables(found))

    def _drop(self, other: StoredFile, own: dict[bytes, dict[bytes, int]], rollup: StoredFile) -> None:
        self.stats.rows_replaced += self._replaced.drop(other, own)
        if self._damaged.knows(other):  # its content is unknown, so its rollup cannot be kept correct
            self._publisher.retire([rollup.path])

    def _files(self, table: Table) -> list[StoredFile]:
        return [file for publish in self._publisher.publishes() for file in publish.files if file.table is table]

    def _unreadable(self, file: StoredFile) -> str:
        try:
            checked(file, self._publisher.path(file).read_bytes())
        except READ_ERRORS as error:
            if of_machine(error):
                raise
            return str(error)
        return ""
