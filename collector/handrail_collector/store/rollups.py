"""Keep the rollups of a store consistent with its rows.

Rollups are made for hours that are over, and taken out when they cannot be read.
A file gets a rollup once no request counts twice between it and the other files with rollups.
Rows that another file replaces leave the file first. Rows that it replaces leave the files with a rollup too.
Rows that are published later have no rollup yet, and readers read them directly (``queries/period.py``).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

import duckdb
import pyarrow as pa
import pyarrow.compute as pc

from handrail.phases import Phase
from handrail_collector.rows import MERGED
from handrail_collector.store import compaction
from handrail_collector.store.compaction import ReplacedRows, near
from handrail_collector.store.layout import HOUR_NS, hour_of
from handrail_collector.store.manifest import PublishRecord, StoredFile
from handrail_collector.store.publish import PartitionFile, StorePublisher
from handrail_collector.store.quarantine import READ_ERRORS, DamagedFiles, Stamp, checked, of_machine, stamp_of
from handrail_collector.store.schema import (
    REQUEST_COLUMNS,
    ROLLUP_COLUMNS,
    UNATTRIBUTED_DECODE,
    UNATTRIBUTED_PREFILL,
    Table,
    phase_column,
)
from handrail_collector.store.snapshot import covered, run
from handrail_collector.store.upgrade import is_outdated

log = logging.getLogger(__name__)

BINS_PER_E: Final = 51
"""Bins of a time within a factor of e.

Each bin is 2 % wide, so its middle is within ``BIN_ERROR`` of every value in it.
"""

BIN_ERROR: Final = 0.01
GAPS: Final = "gaps"
"""Value of ``measure`` of the rows with the histogram of all gaps of a scope and model."""

Guarded = Callable[[str, Callable[[], None]], None]
"""Run a named step; exceptions are counted, logged and not raised."""


ROLLED_COLUMNS: Final = (
    *compaction.KEYS,
    *("started_unix_ns", "scope", "model", "outcome", "kv_outcome", "complete", "phase_of", "ttft_token_ns"),
    *("prefill_host", "prefill_instance", "decode_host", "decode_instance"),
    *("gap_max_ns", "gap_sum_ns", "gap_min_ns", "gap_buckets", "gap_counts"),
    *(phase_column(phase.value) for phase in Phase),
    UNATTRIBUTED_PREFILL,
    UNATTRIBUTED_DECODE,
)
"""Columns of ``requests`` that a rollup is made from; old files may lack some."""

NO_ROLLUPS: Final = pa.schema([(column.name, column.type) for column in ROLLUP_COLUMNS]).empty_table()


def roll_up(requests: pa.Table, hour: int, threads: int = 1) -> pa.Table:
    """Make the rollup of one hour's file of requests.

    Its queries are ``queries/aggregates.sql`` and ``gap_histograms.sql``.
    ``requests``: its ``ROLLED_COLUMNS``. ``hour``: counted since 1970. Of a request with two versions the newest counts.
    """
    requests = compaction.without(requests, compaction.superseding(requests))
    columns = [column for column in REQUEST_COLUMNS if column.name in ROLLED_COLUMNS]
    requests = compaction.in_order(requests, columns).filter(pc.not_equal(requests["scope"], MERGED))
    everything = dict.fromkeys(("since_unix_ns", "until_unix_ns", "scope", "model"))
    with duckdb.connect(":memory:", config={"threads": threads, "autoinstall_known_extensions": False}) as connection:
        connection.register("requests", requests)
        connection.register("rollups", NO_ROLLUPS)
        counted = run(connection, "aggregates", bins_per_e=BINS_PER_E, **everything)
        gaps = run(connection, "gap_histograms", **everything)
    gaps = gaps.rename_columns(["requests" if name == "gaps" else name for name in gaps.column_names])
    # Without any row there is one without gaps, so that a file with nothing but withdrawing rows is covered too.
    rows = counted.num_rows + gaps.num_rows
    if not rows:
        gaps = pa.table({"scope": pa.array([""])})
    gaps = gaps.append_column("measure", pa.array([GAPS] * gaps.num_rows, pa.string()))
    table = pa.concat_tables([counted, gaps], promote_options="permissive")
    table = table.append_column("hour_unix_ns", pa.array([hour * HOUR_NS] * table.num_rows, pa.int64()))
    return compaction.in_order(table.combine_chunks(), ROLLUP_COLUMNS)


@dataclass(frozen=True, slots=True)
class Due:
    """Rollups that are due.

    ``missing``: files of requests that need a rollup, with their journal ranges. ``stale``: paths of rollups to take out.
    """

    missing: tuple[compaction.Ranged, ...]
    stale: tuple[str, ...]


def due(publishes: Iterable[PublishRecord], shard: int, now_unix_ns: int, closed_after_ns: int) -> Due:
    """Find the rollups to make now, and the stale ones.

    Rollups are made for hours that are over (``compaction.closed``), of files of this schema version.
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
            and not is_outdated(file.table, file.schema)
            and compaction.closed(hour_of(file.path), file.written_unix_ns, now_unix_ns, closed_after_ns)
        ),
        stale=tuple(
            file.path
            for _, _, file in listed
            if file.table is Table.ROLLUPS and (file.covers not in requests or is_outdated(file.table, file.schema))
        ),
    )


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
        began = time.monotonic_ns()
        if not self._settled(file):
            return
        known = self._damaged.columns(file)
        rows = None if known is None else self._damaged.read(file, [name for name in ROLLED_COLUMNS if name in known])
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
