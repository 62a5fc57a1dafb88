"""Keep a store small with periodic passes.

A pass applies retention and the disk quota, compacts, makes rollups, and removes the files that left the store.
Readers in any process see each change whole or not at all. They have the grace time to finish with files that left.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone

import pyarrow as pa
import pyarrow.compute as pc
from opentelemetry.trace import Tracer

from handrail.conventions import OWN_FOLDER, OWN_STORE_STEP, OWN_UPKEEP
from handrail.telemetry.tracing import NO_TRACES
from handrail_collector.store import compaction
from handrail_collector.store.compaction import Fold, ReplacedRows, near
from handrail_collector.store.layout import DAY_NS, hour_folder
from handrail_collector.store.manifest import StoredFile
from handrail_collector.store.publish import StorePublisher
from handrail_collector.store.quarantine import DamagedFiles
from handrail_collector.store.retention import Day, expired, over_quota
from handrail_collector.store.rollups import Rollups, RollupStats
from handrail_collector.store.schema import REQUEST_COLUMNS, Table
from handrail_collector.store.tables.append_only import FLAT
from handrail_collector.store.tables.samples import SAMPLED

log = logging.getLogger(__name__)

MINUTE_NS = 60 * 1_000_000_000
_KEY_TYPES = {column.name: column.type for column in REQUEST_COLUMNS if column.name in compaction.KEYS}


@dataclass(frozen=True, slots=True, kw_only=True)
class UpkeepSettings:
    """Settings of the passes over a store.

    ``closed_after_ns``: how long after its end an hour is folded. ``retention_ns``, ``max_bytes``: None keeps everything.
    ``samples_retention_ns``: retention of samples, if shorter. ``rollups``: whether folded hours get a rollup.
    """

    closed_after_ns: int = 15 * MINUTE_NS
    grace_ns: int = 10 * MINUTE_NS
    retention_ns: int | None = None
    samples_retention_ns: int | None = None
    max_bytes: int | None = None
    rollups: bool = False


@dataclass(slots=True)
class UpkeepStats:
    """Counts since start.

    ``bytes`` and ``files`` describe the store as the last pass left it.
    """

    passes: int = 0
    failures: int = 0
    files_folded: int = 0
    rows_folded: int = 0  # replaced row versions, withdrawn rows, and spans that were sent again
    fold_ns: int = 0
    rollups: RollupStats = field(default_factory=RollupStats)
    files_expired: int = 0
    quota_days: int = 0
    quota_bytes: int = 0
    files_removed: int = 0
    files_set_aside: int = 0  # left the store because someone set them aside as damaged
    files_unlisted: int = 0  # set aside at start because no line of the manifest names them
    files_damaged: int = 0  # listed and unreadable, as of the last pass
    bytes: int = 0
    files: int = 0


def _named(day: Day, whole: Sequence[Day]) -> str:
    date = f"{datetime.fromtimestamp(day.day * DAY_NS // 10**9, timezone.utc):%Y-%m-%d}"
    return date if day in whole else f"the samples of {date}"


class ClockStepGuard:
    """Check whether the wall clock is steady enough to judge ages.

    It is not for an hour after a step of more than a minute, so that a clock that is wrong for a while deletes no data.
    ``now_ns``: monotonic.
    """

    def __init__(self, now_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._now_ns = now_ns
        self._ahead_ns: int | None = None  # wall clock minus monotonic clock, at the last call
        self._stepped_ns: int | None = None

    def holds(self, now_unix_ns: int) -> bool:
        now_ns = self._now_ns()
        step_ns = 0 if self._ahead_ns is None else now_unix_ns - now_ns - self._ahead_ns
        self._ahead_ns = now_unix_ns - now_ns
        if abs(step_ns) > MINUTE_NS:
            self._stepped_ns = now_ns
            log.warning("the wall clock stepped by %.0f s: retention by age pauses for an hour", step_ns / 1e9)
        return self._stepped_ns is None or now_ns - self._stepped_ns >= 60 * MINUTE_NS


class Upkeep:
    """Run one pass at a time over a store, in a thread that may block.

    Any other thread may call ``stop``. ``steady``: suspends retention after a step of the wall clock.
    """

    def __init__(
        self,
        publisher: StorePublisher,
        settings: UpkeepSettings,
        now_unix_ns: Callable[[], int] = time.time_ns,
        steady: ClockStepGuard | None = None,
        tracer: Tracer = NO_TRACES,
    ) -> None:
        self._tracer = tracer
        self.stats = UpkeepStats()
        self._steady = steady
        self._publisher = publisher
        self._settings = settings
        self._now_unix_ns = now_unix_ns
        self._stopping = threading.Event()
        self._open_day_reported = False
        self._damaged = DamagedFiles(publisher.path)
        self._replaced = ReplacedRows(publisher, self._damaged)
        self._rollups = Rollups(publisher, self._damaged)
        self.stats.files_unlisted = publisher.unlisted_set_aside
        self.stats.rollups = self._rollups.stats

    def stop(self) -> None:
        """End a running pass after its current fold."""
        self._stopping.set()

    def run_pass(self) -> None:
        """Run every step that is due.

        A step that fails is counted, logged, and tried again at the next pass.
        """
        steps = {
            "damaged files": self._look_after_damaged,
            "damaged rollups": self._rollups.take_out_damaged,
            "retention": self._expire,
            "quota": self._keep_quota,
            "compaction": self._fold_all,
            "rollups": self._roll_up_all,
            "removal": self._remove,
        }
        with self._tracer.start_as_current_span(OWN_UPKEEP):
            for name, step in steps.items():
                if self._stopping.is_set():
                    return
                self._guarded(name, step)
        self.stats.passes += 1
        files = self._files()
        self.stats.files, self.stats.bytes = len(files), sum(file.bytes for file in files)
        self.stats.files_damaged = len(self._damaged)

    def _guarded(self, name: str, step: Callable[[], None]) -> None:
        what, _, folder = name.partition(" of ")
        span_name = f"{OWN_STORE_STEP}{what.replace(' ', '_')}"
        about = {OWN_FOLDER: folder} if folder else {}
        try:
            with self._tracer.start_as_current_span(span_name, attributes=about):
                step()
        except Exception as error:
            self.stats.failures += 1
            log.error("%s failed, the collector retries: %s", name, error, exc_info=not isinstance(error, OSError))

    def _files(self) -> list[StoredFile]:
        return [file for publish in self._publisher.publishes() for file in publish.files]

    def _look_after_damaged(self) -> None:
        aside = self._damaged.look(file for file in self._files() if file.table is not Table.ROLLUPS)
        if aside:
            self._publisher.retire({file.path for file in aside})
            self.stats.files_set_aside += len(aside)
            rows = sum(file.rows for file in aside)
            log.warning("%d damaged files left the store, with %d rows", len(aside), rows)

    def _expire(self) -> None:
        of = self._settings
        if self._steady is not None and not self._steady.holds(self._now_unix_ns()):
            return
        gone = self._leave(expired(self._files(), self._now_unix_ns(), of.retention_ns, of.samples_retention_ns))
        if gone:
            self.stats.files_expired += len(gone)
            log.info("retention: %d files left the store", len(gone))

    def _keep_quota(self) -> None:
        limit = self._settings.max_bytes
        if limit is None:
            return
        days = over_quota(self._files(), self._now_unix_ns(), limit)
        gone = self._leave([file for day in days for file in day.files])
        if gone:
            whole = [day for day in days if any(file.table not in SAMPLED for file in day.files)]
            self.stats.quota_days += len(whole)
            self.stats.quota_bytes += sum(file.bytes for file in gone)
            named = ", ".join(_named(day, whole) for day in days)
            log.warning("the store exceeded its bound of %d bytes: %s left it before their retention time", limit, named)
        over = sum(file.bytes for file in self._files()) > limit
        if over and not self._open_day_reported:
            log.warning("the current day alone exceeds the store's bound of %d bytes; it stays", limit)
        self._open_day_reported = over

    def _leave(self, going: list[StoredFile]) -> list[StoredFile]:
        """Retire files that are too old or too many, and return those that were retired.

        Rows that they replaced or withdrew do not come back: earlier versions in files that stay are dropped first.
        An unreadable file, whose replaced rows are unknown, waits until no file near it stays.
        """
        paths = {file.path for file in going}
        staying = [file for file in self._files() if file.table is Table.REQUESTS and file.path not in paths]
        gone, later = [], [pa.table({name: pa.array([], type=_KEY_TYPES[name]) for name in compaction.KEYS})]
        for file in going:
            if file.table is Table.REQUESTS and file.max_version > 1 and near(staying, [file]):
                keys = self._damaged.read(file, compaction.KEYS)
                if keys is None:
                    continue
                later.append(keys.filter(pc.greater(keys["version"], 1)))
            gone.append(file)
        replaced = compaction.superseding(pa.concat_tables(later))
        if replaced:
            for file in near(staying, gone):
                self.stats.rows_folded += self._replaced.drop(file, replaced)
        if gone:
            self._publisher.retire({file.path for file in gone})
        return gone

    def _fold_all(self) -> None:
        settings, publisher = self._settings, self._publisher
        for fold in compaction.plan(publisher.publishes(), publisher.shard, self._now_unix_ns(), settings.closed_after_ns):
            for part in self._alike(fold):
                if self._stopping.is_set():
                    return
                folder = f"compaction of {hour_folder(part.table, part.hour)}"
                self._guarded(folder, lambda part=part: self._fold(part))  # type: ignore[misc]  # mypy takes it for an argument

    def _alike(self, fold: Fold) -> Iterator[Fold]:
        """Split ``fold`` into parts that fit into one file each.

        Unreadable files are left out. A part's own columns (attributes or series) do not exceed what a file may have.
        """
        readable = tuple(each for each in fold.ranged if not self._damaged.knows(each[2]))
        fold = replace(fold, ranged=readable)
        if fold.table is not Table.SPANS and fold.table not in SAMPLED:
            if compaction.worthwhile(readable):
                yield fold
            return
        columns = [self._damaged.columns(file) for file in fold.files]
        fold = replace(fold, ranged=tuple(each for each, names in zip(readable, columns, strict=True) if names is not None))
        at = 0
        for length in compaction.alike(fold.table, [names for names in columns if names is not None]):
            if length > 1:
                yield fold.part(at, at + length)
            at += length

    def _fold(self, fold: Fold) -> None:
        began = time.monotonic_ns()
        read = [(each, self._damaged.read(each[2])) for each in fold.ranged]
        tables = [table for _, table in read if table is not None]
        fold = replace(fold, ranged=tuple(each for each, table in read if table is not None))
        if not compaction.worthwhile(fold.ranged):
            return
        if fold.table is Table.SPANS:
            table, columns = compaction.fold_spans(tables)
        elif fold.table in SAMPLED:
            table, columns = compaction.fold_samples(fold.table, tables)
        elif fold.table in FLAT:
            table, columns = compaction.fold_flat(fold.table, tables)
        else:
            elsewhere, all_known = self._elsewhere(fold, tables)
            table, columns = compaction.fold_requests(tables, elsewhere, all_known)
        self._replaced.put(fold.table, fold.hour, table, columns, fold.files, fold.first_offset, fold.end_offset)
        self.stats.files_folded += len(fold.files)
        self.stats.rows_folded += sum(file.rows for file in fold.files) - table.num_rows
        self.stats.fold_ns += time.monotonic_ns() - began

    def _roll_up_all(self) -> None:
        if not self._settings.rollups:
            return
        self._rollups.make(self._now_unix_ns(), self._settings.closed_after_ns, self._guarded, self._stopping.is_set)

    def _elsewhere(self, fold: Fold, tables: list[pa.Table]) -> tuple[pa.Table, bool]:
        """Find rows of the same requests in files outside of ``fold``.

        Returns their keys, and whether all of these files could be read.
        """
        own = {file.path for file in fold.files}
        others = [file for file in self._files() if file.table is Table.REQUESTS and file.path not in own]
        wanted = pa.chunked_array([chunk for table in tables for chunk in table["request_id"].chunks]).combine_chunks()
        found = [pa.table({name: tables[0][name][:0] for name in compaction.KEYS})]
        all_known = True
        for file in near(others, fold.files):
            keys = self._damaged.read(file, compaction.KEYS)
            if keys is None:
                all_known = False
            else:
                found.append(keys.filter(pc.is_in(keys["request_id"], value_set=wanted)))
        return pa.concat_tables(found), all_known

    def _remove(self) -> None:
        self.stats.files_removed += self._publisher.remove_retired(self._settings.grace_ns)
