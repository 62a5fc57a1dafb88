"""Publish rows into the store atomically, and recover its state at start.

A publish writes Parquet files under temporary names, syncs and renames them, syncs their folders, and last appends one
line to the manifest. The next start removes what a crash left before that line (``recovery.py``).

Files leave the store when a new manifest without them replaces the old one.
They stay on disk for a grace time, so that earlier readers can finish.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import threading
import time
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from handrail.wal.filesystem import Filesystem, OsFiles
from handrail.wal.log import FolderGoneError
from handrail_collector.rows import RequestRow
from handrail_collector.store.layout import HOUR_NS, SUFFIX, TEMPORARY, DurableDir, files_below, hour_folder
from handrail_collector.store.manifest import MANIFEST, Added, ManifestWriter, PublishRecord, Retired, StoredFile, locate
from handrail_collector.store.quarantine import READ_ERRORS, columns_crc, of_machine
from handrail_collector.store.recovery import UNLISTED, Recovered, recover, sorted_out
from handrail_collector.store.schema import REQUEST_COLUMNS, SCHEMA_VERSION, StoreColumn, Table, encode
from handrail_collector.store.tables.append_only import APPEND_ONLY, FlatRows
from handrail_collector.store.tables.requests import requests_table
from handrail_collector.store.tables.spans import SpanRow, spans_table

MAX_HOURS_A_PUBLISH = 24
"""Most hours of a publish that get files of their own.

Rows of further hours (from clocks that are far off) go into the fullest hour. The manifest has their times.
"""

TIME_COLUMN = {
    Table.REQUESTS: "started_unix_ns",
    Table.SPANS: "start_unix_ns",
    Table.ROLLUPS: "hour_unix_ns",
    **{table: kind.time for table, kind in APPEND_ONLY.items()},
}


@dataclass(frozen=True, slots=True)
class PartitionFile:
    """The rows of one table and one hour (counted since 1970).

    ``written_unix_ns``: when the newest rows were first written. ``covers``: the file that a rollup was made from.
    """

    name: Table
    hour: int
    table: pa.Table
    columns: tuple[StoreColumn, ...]
    written_unix_ns: int
    covers: str = ""

    def path(self, name: str) -> PurePosixPath:
        """Return the path of a file of this name, relative to the store's root."""
        return hour_folder(self.name, self.hour) / f"{self.name.value}-{name}{SUFFIX}"

    def times(self) -> tuple[int, int]:
        """Return the first and last time of the rows."""
        times = pc.min_max(self.table[TIME_COLUMN[self.name]]).as_py()
        return times["min"], times["max"]

    def versions(self) -> tuple[int, int]:
        """Return the lowest and highest version of the rows; 0 when they have none."""
        if self.name is not Table.REQUESTS:
            return 0, 0
        versions = pc.min_max(self.table["version"]).as_py()
        return versions["min"], versions["max"]


def partition(
    spans: Sequence[SpanRow], requests: Sequence[RequestRow] | pa.Table, flat: FlatRows, now_unix_ns: int
) -> Iterator[PartitionFile]:
    """Divide spans, then requests, then rows of other tables, by hour."""
    for hour, places in by_hour([span.start_unix_ns for span in spans]).items():
        table, columns = spans_table([spans[at] for at in places])
        yield PartitionFile(Table.SPANS, hour, table, columns, now_unix_ns)
    table = requests if isinstance(requests, pa.Table) else requests_table(requests)
    for hour, places in by_hour(table[TIME_COLUMN[Table.REQUESTS]].to_pylist()).items():
        rows = table.take(places) if len(places) < len(table) else table
        yield PartitionFile(Table.REQUESTS, hour, rows, REQUEST_COLUMNS, now_unix_ns)
    for name, of_table in flat.items():
        kind = APPEND_ONLY[name]
        for hour, places in by_hour([getattr(row, kind.time) for row in of_table]).items():
            table = kind.encode([of_table[at] for at in places])
            yield PartitionFile(name, hour, table, kind.columns_of(table), now_unix_ns)


def by_hour(starts_unix_ns: Sequence[int]) -> dict[int, list[int]]:
    """Group row indices by hour.

    Hours beyond the ``MAX_HOURS_A_PUBLISH`` fullest join the fullest hour.
    """
    hours: dict[int, list[int]] = {}
    for at, start in enumerate(starts_unix_ns):
        hours.setdefault(start // HOUR_NS, []).append(at)
    fullest = sorted(hours, key=lambda hour: -len(hours[hour]))
    for hour in fullest[MAX_HOURS_A_PUBLISH:]:
        hours[fullest[0]].extend(hours.pop(hour))
    return hours


log = logging.getLogger(__name__)


class StoreLockedError(Exception):
    """Another process writes to this store."""


class StorePublisher:
    """The single writer of one shard's files in a store; any thread may call it.

    One caller at a time publishes, and one at a time folds and retires. These two may overlap.
    """

    def __init__(
        self, root: Path, shard: int = 0, files: Filesystem | None = None, now_unix_ns: Callable[[], int] = time.time_ns
    ) -> None:
        self._root = root
        self.shard = shard
        self.unlisted_set_aside = 0  # files that a start found and no line of the manifest names
        self._files: Filesystem = files or OsFiles()
        self._now_unix_ns = now_unix_ns
        self._guard = threading.Lock()  # guards the manifest, its copy in memory, and that no folder goes while a file comes
        self._folder = DurableDir(root, self._files)
        self._manifest = ManifestWriter(self._folder)
        self._lock: int | None = None
        self._end_offset = 0
        self._low_water_offset = 0
        self._stem = ""
        self._stem_files = 0  # files published with this stem: rows decided while no entries come share one empty range

    def open(self) -> Recovered:
        """Take the store, remove what a crash left unfinished, and return what it holds.

        Raises ``StoreLockedError`` when another process has the store, ``StoreDamagedError`` when the manifest cannot be trusted,
        and ``OSError``.
        """
        self._folder.make_root()
        self._take_lock()
        try:
            return self._recover()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Release the store. Idempotent; works without ``open``."""
        if self._lock is not None:
            self._files.close(self._lock)
            self._lock = None

    @property
    def is_open(self) -> bool:
        """Whether this process holds the store."""
        return self._lock is not None

    def publish(
        self,
        first_offset: int,
        end_offset: int,
        low_water_offset: int,
        spans: Sequence[SpanRow],
        requests: Sequence[RequestRow] | pa.Table,
        observed: Mapping[str, int] | None = None,
        flat: FlatRows | None = None,
        added: Added | None = None,
    ) -> None:
        """Store the results of a journal range, durable and visible on return.

        The range is [first_offset, end_offset). Ranges follow one another: ``first_offset`` is not before the last end.
        Raises ``ValueError`` for a range out of order, ``FolderGoneError`` when the store was deleted or replaced, and
        ``OSError`` when the disk fails. After an error this publish is not in the store and may be tried again as it is.
        ``observed``: total counts so far; a start restores those of the last publish only.
        ``flat``: rows of other tables. ``added``: increments; a start restores the sum over all publishes.
        """
        with self._guard:
            self._publish(first_offset, end_offset, low_water_offset, spans, requests, observed or {}, flat or {}, added or {})

    def publishes(self) -> tuple[PublishRecord, ...]:
        """List everything published so far."""
        with self._guard:
            return tuple(self._manifest.publishes)

    def retired(self) -> tuple[Retired, ...]:
        """List files that left the store and are not removed yet."""
        with self._guard:
            return tuple(self._manifest.retired)

    def path(self, file: StoredFile) -> Path:
        """Return the path of a file.

        Raises ``StoreDamagedError`` when a link leads there.
        """
        return locate(self._root, [file.path])[0]

    def replace(self, gone: Collection[str], part: PartitionFile, first_offset: int, end_offset: int) -> None:
        """Replace the files at the paths ``gone`` by one file with the rows of a range.

        The range is [first_offset, end_offset). Readers see the old files or the new one. Raises as ``retire`` does.
        """
        self._require_open()
        stem = _stem(self.shard, first_offset, end_offset)
        with self._guard:
            name = f"{stem}-c{self._next_index(part.name, f'{stem}-c'):03d}"
            self._make_folders(part)
        try:
            file = self._write(part, name)  # slow, so it runs outside of the guard and publishing goes on
            self._files.fsync_dir(str(self.path(file).parent))
            self.retire(
                gone,
                PublishRecord(
                    shard=self.shard, first_offset=first_offset, end_offset=end_offset, low_water_offset=0, files=(file,)
                ),
            )
        except OSError:
            self._discard(part, name)
            raise

    def retire(self, gone: Collection[str], *added: PublishRecord) -> None:
        """Take the files at the paths ``gone`` out of the store, and add ``added``.

        Raises ``ValueError`` when one of them is not in the store, and ``OSError``.
        After an error the store is in one of the two states, and ``publishes`` shows which.
        """
        self._require_open()
        with self._guard:
            listed = _paths(self._manifest.publishes)
            if not listed.issuperset(gone):
                raise ValueError(f"not in the store: {', '.join(sorted(set(gone) - listed))}")
            now = self._now_unix_ns()
            self._manifest.rewrite(gone, added, [*self._manifest.retired, *(Retired(path, now) for path in sorted(gone))])

    def remove_retired(self, grace_ns: int) -> int:
        """Remove files that were retired at least ``grace_ns`` ago, and empty folders.

        Returns the number of files.
        """
        self._require_open()
        with self._guard:
            until = self._now_unix_ns() - grace_ns
            due = [retired for retired in self._manifest.retired if retired.since_unix_ns <= until]
            for path in locate(self._root, [retired.path for retired in due]):
                with contextlib.suppress(FileNotFoundError):  # removed before a crash, and the manifest was not updated
                    self._files.unlink(str(path))
            for hour in sorted({PurePosixPath(retired.path).parent for retired in due}):
                if (self._root / hour).is_dir():  # otherwise a removed file would come back and be in no list
                    self._files.fsync_dir(str(self._root / hour))
            for folder in sorted({folder for retired in due for folder in PurePosixPath(retired.path).parents[:2]}, reverse=True):
                self._folder.remove_if_empty(str(folder))
            if due:
                self._manifest.rewrite((), (), [retired for retired in self._manifest.retired if retired not in due])
            return len(due)

    def _require_open(self) -> None:
        """Raise an error when the store is not open or was replaced.

        Raises ``ValueError`` when it is not open, ``FolderGoneError`` when its folder is no longer the one that was opened.
        """
        if self._lock is None:
            raise ValueError("the store is not open")
        if not self._files.is_at(self._lock, str(self._root)):
            raise FolderGoneError(errno.ENOENT, "deleted or replaced while in use", str(self._root))

    def _publish(
        self,
        first_offset: int,
        end_offset: int,
        low_water_offset: int,
        spans: Sequence[SpanRow],
        requests: Sequence[RequestRow] | pa.Table,
        observed: Mapping[str, int],
        flat: FlatRows,
        added: Added,
    ) -> None:
        self._require_open()
        if not self._end_offset <= first_offset <= end_offset or not self._low_water_offset <= low_water_offset <= end_offset:
            raise ValueError(
                f"offsets out of order: first {first_offset}, end {end_offset}, low water {low_water_offset} "
                f"after end {self._end_offset}, low water {self._low_water_offset}"
            )
        self._manifest.repair()
        stem = _stem(self.shard, first_offset, end_offset)
        if stem != self._stem:
            again = first_offset == end_offset  # only an empty range can repeat
            self._stem, self._stem_files = stem, max(self._next_index(table, f"{stem}-") for table in Table) if again else 0
        stored = []
        for index, part in enumerate(partition(spans, requests, flat, self._now_unix_ns()), start=self._stem_files):
            self._make_folders(part)
            stored.append(self._write(part, f"{stem}-{index:03d}"))
        for folder in sorted({(self._root / file.path).parent for file in stored}):
            self._files.fsync_dir(str(folder))
        self._manifest.append(
            PublishRecord(
                shard=self.shard,
                first_offset=first_offset,
                end_offset=end_offset,
                low_water_offset=low_water_offset,
                files=tuple(stored),
                observed=observed,
                added=added,
            )
        )
        self._require_open()  # otherwise the journal would be released for a line that nobody can read
        self._end_offset, self._low_water_offset = end_offset, low_water_offset
        self._stem_files += len(stored)

    def _take_lock(self) -> None:
        try:
            self._lock = self._files.lock_dir(str(self._root))
        except BlockingIOError as error:
            raise StoreLockedError(
                f"{self._root}: another collector writes to this store; stop it, or give this one its own folder"
            ) from error

    def _recover(self) -> Recovered:
        self._manifest.load()
        publishes = self._manifest.publishes
        listed = _paths(publishes) | {retired.path for retired in self._manifest.retired}
        locate(self._root, listed)
        self._sort_out_unlisted(listed)
        recovered = recover(publishes, self.shard, lambda file: (self.path(file), self._folder.read(self.path(file))))
        self._end_offset, self._low_water_offset, self._stem = recovered.end_offset, recovered.low_water_offset, ""
        return recovered

    def _next_index(self, table: Table, beginning: str) -> int:
        """Return the first number that no file of this stem has, retired files included.

        The caller holds ``_guard``.
        """
        name = f"/{table.value}-{beginning}"
        paths = [*_paths(self._manifest.publishes), *(retired.path for retired in self._manifest.retired)]
        numbers = (path.partition(name)[2][: -len(SUFFIX)] for path in paths)
        return 1 + max((int(number) for number in numbers if number.isdigit()), default=-1)

    def _sort_out_unlisted(self, listed: set[str]) -> None:
        unlisted = [path for path in files_below(self._root) if path not in listed]
        found = sorted_out(unlisted, self._manifest.publishes, self._rows_of, str(self._root / MANIFEST))
        self._manifest.settle()  # only now: a start that fails changes nothing
        for path in found.remove:
            self._files.unlink(str(self._root / path))
        for path in found.aside:
            free = next(to for to in _names_aside(self._root / path) if not to.exists())
            self._files.rename(str(self._root / path), str(free))
            log.warning("%s: no line of the manifest names it, and it may be the only copy of its rows; now %s", path, free.name)
        for folder in sorted({(self._root / path).parent for path in found.aside}):
            self._files.fsync_dir(str(folder))
        self.unlisted_set_aside += len(found.aside)
        self._manifest.remove_temporary()

    def _rows_of(self, path: str) -> int | None:
        """Return the number of rows of a file; None when it cannot be read."""
        try:
            return int(pq.read_metadata(self._root / path).num_rows)
        except READ_ERRORS as error:
            if of_machine(error):
                raise
            return None

    def _discard(self, part: PartitionFile, name: str) -> None:
        """Remove what a failed ``replace`` left on a disk that may be full.

        Files that cannot be removed now go at the next start.
        """
        below = part.path(name)
        path = self._root / below
        with self._guard:
            if below.as_posix() in _paths(self._manifest.publishes):
                return  # only the folder's sync failed; it is repeated before anything relies on it
            for left in (f"{path}{TEMPORARY}", str(path)):
                with contextlib.suppress(OSError):
                    self._files.unlink(left)

    def _write(self, part: PartitionFile, name: str) -> StoredFile:
        path = part.path(name)
        data = encode(part.table, part.name, part.columns)
        self._folder.put(self._root / path, data)
        first_unix_ns, last_unix_ns = part.times()
        min_version, max_version = part.versions()
        return StoredFile(
            table=part.name,
            path=path.as_posix(),
            rows=part.table.num_rows,
            bytes=len(data),
            min_unix_ns=first_unix_ns,
            max_unix_ns=last_unix_ns,
            min_version=min_version,
            max_version=max_version,
            columns_crc=columns_crc(part.table.column_names),
            written_unix_ns=part.written_unix_ns,
            crc=zlib.crc32(data),
            schema=SCHEMA_VERSION,
            covers=part.covers,
        )

    def _make_folders(self, part: PartitionFile) -> None:
        self._folder.make(str(part.path("").parent))


def _stem(shard: int, first_offset: int, end_offset: int) -> str:
    return f"{shard:03d}-{first_offset:020d}-{end_offset:020d}"


def _paths(publishes: Iterable[PublishRecord]) -> set[str]:
    return {file.path for publish in publishes for file in publish.files}


def _names_aside(path: Path) -> Iterator[Path]:
    """Generate names for a file that is set aside.

    There is more than one name, so that no file overwrites another.
    """
    for number in itertools.count():
        yield path.with_name(f"{path.name}{f'.{number}' if number else ''}{UNLISTED}")
