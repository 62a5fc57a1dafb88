"""Puts rows into the store so that each publish is there whole or not at all, and says at start what is there already.

A publish writes Parquet files under temporary names, makes them durable, renames them, makes their folders durable, and last
appends one line to the manifest. What a crash leaves behind before that line is removed at the next start.

Files are taken out of the store by a manifest that no longer names them, which is put in the old one's place; they lie there for
a grace time, so that readers who began before can end.
"""

from __future__ import annotations

import contextlib
import io
import logging
import threading
import time
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from handrail.files import Files, OsFiles
from handrail_collector.rows import RequestRow
from handrail_collector.store.damaged import ADVICE, ASIDE
from handrail_collector.store.folders import HOUR_NS, hour_folder
from handrail_collector.store.manifest import MANIFEST, Publish, Retired, StoredFile, encode_line, observed_by, parse, rewritten
from handrail_collector.store.request_columns import request_row, requests_table
from handrail_collector.store.schema import REQUEST_COLUMNS, Column, Table, encode
from handrail_collector.store.span import SpanRow
from handrail_collector.store.span_columns import spans_table

log = logging.getLogger(__name__)

TEMPORARY = ".tmp"
SUFFIX = ".parquet"
MAX_HOURS_A_PUBLISH = 24
"""Hours that get files of their own; rows of others (clocks gone wild) lie with the fullest. The manifest has their times."""

TIME_COLUMN = {Table.REQUESTS: "started_unix_ns", Table.SPANS: "start_unix_ns", Table.ROLLUPS: "hour_unix_ns"}

RowId = tuple[str, str, int]
"""trace_id, request_id, version of a request row."""


class StoreLockedError(Exception):
    """Another process writes to this store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered:
    """What a store held when it was opened.

    ``end_offset``: journal entries before it have their spans in the store. ``low_water_offset``: where the replay starts.
    ``evidence``: span id to the newest request row that rests on it, of those that the replay may make again: they are in the
    store and must not be published twice, though a replay may open the same request by another span. ``edges``: of these, the
    rows of an edge, by trace_id and request_id, and whether they were complete. ``observed``: counts as of the last publish.
    """

    end_offset: int
    low_water_offset: int
    evidence: Mapping[str, RowId]
    edges: Mapping[tuple[str, str], bool] = field(default_factory=dict)
    observed: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Part:
    """The rows of one table and one hour (hours since 1970). ``written_unix_ns``: when the newest were first written.

    ``covers``: of a rollup, the file that it was made from.
    """

    name: Table
    hour: int
    table: pa.Table
    columns: tuple[Column, ...]
    written_unix_ns: int
    covers: str = ""


class Publisher:
    """The single writer of one shard's files in a store, called from any thread.

    One caller at a time publishes, and one at a time folds and retires; these two may do so at once.
    """

    def __init__(
        self, root: Path, shard: int = 0, files: Files | None = None, now_unix_ns: Callable[[], int] = time.time_ns
    ) -> None:
        self._root = root
        self._manifest = str(root / MANIFEST)
        self.shard = shard
        self._files: Files = files or OsFiles()
        self._now_unix_ns = now_unix_ns
        self._guard = threading.Lock()  # guards the manifest, what is known of it, and that no folder goes while a file comes
        self._publishes: list[Publish] = []
        self._retired: list[Retired] = []
        self._lock: int | None = None
        self._end_offset = 0
        self._low_water_offset = 0
        self._manifest_bytes = 0
        self._manifest_torn = False
        self._stem = ""
        self._stem_files = 0  # of the stem, published: rows decided while no entries come share one empty range
        self._durable: set[Path] = set()

    def open(self) -> Recovered:
        """Take the store, remove what no publish names, and say what is there.

        Raises ``StoreLockedError`` where another process has it, ``StoreDamagedError`` where the manifest cannot be trusted, and
        ``OSError``.
        """
        self._make_root()
        self._take_lock()
        try:
            return self._recover()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let go of the store. Works without ``open`` and twice."""
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
    ) -> None:
        """Store what came of the journal range [first_offset, end_offset); durable and visible when this returns.

        Ranges follow one another: ``first_offset`` is not before the last end. Raises ``ValueError`` for a range out of order and
        ``OSError`` when the disk does; after an error this publish is not in the store, and may be tried again as it is.
        ``observed``: what was counted by now, in total; a start gets the counts of the last publish back, those and no others.
        """
        with self._guard:
            self._publish(first_offset, end_offset, low_water_offset, spans, requests, observed or {})

    def publishes(self) -> tuple[Publish, ...]:
        """Everything published by now."""
        with self._guard:
            return tuple(self._publishes)

    def retired(self) -> tuple[Retired, ...]:
        """Files that are no longer part of the store and not removed yet."""
        with self._guard:
            return tuple(self._retired)

    def path(self, file: StoredFile) -> Path:
        """Where a file lies."""
        return self._root / file.path

    def replace(self, gone: Collection[str], part: Part, first_offset: int, end_offset: int) -> None:
        """Put one file of the rows of [first_offset, end_offset) in the place of the files at the paths ``gone``.

        Readers see the one or the others. Raises as ``retire`` does.
        """
        self._require_open()
        stem = _stem(self.shard, first_offset, end_offset)
        with self._guard:
            name = f"{stem}-c{self._next_index(part.name, f'{stem}-c'):03d}"
            self._make_folders(part)
        try:
            file = self._write(part, name)  # takes long, so publishing goes on meanwhile
            self._files.fsync_dir(str(self.path(file).parent))
            self.retire(
                gone,
                Publish(shard=self.shard, first_offset=first_offset, end_offset=end_offset, low_water_offset=0, files=(file,)),
            )
        except OSError:
            self._discard(part, name)
            raise

    def retire(self, gone: Collection[str], *added: Publish) -> None:
        """Take the files at the paths ``gone`` out of the store, and put what is ``added`` in.

        Raises ``ValueError`` where one of them is not in the store and ``OSError``; after an error the store is in one of the two
        states, and ``publishes`` says which.
        """
        self._require_open()
        with self._guard:
            listed = {file.path for publish in self._publishes for file in publish.files}
            if not listed.issuperset(gone):
                raise ValueError(f"not in the store: {', '.join(sorted(set(gone) - listed))}")
            now = self._now_unix_ns()
            self._rewrite(gone, added, [*self._retired, *(Retired(path, now) for path in sorted(gone))])

    def remove_retired(self, grace_ns: int) -> int:
        """Remove the files that were retired at least ``grace_ns`` ago, and folders that are empty then; how many files."""
        self._require_open()
        with self._guard:
            until = self._now_unix_ns() - grace_ns
            due = [retired for retired in self._retired if retired.since_unix_ns <= until]
            for retired in due:
                with contextlib.suppress(FileNotFoundError):  # removed before a crash that came before the manifest said so
                    self._files.unlink(str(self._root / retired.path))
            for folder in sorted({folder for retired in due for folder in PurePosixPath(retired.path).parents[:2]}, reverse=True):
                self._remove_if_empty(self._root / folder)
            if due:
                self._rewrite((), (), [retired for retired in self._retired if retired not in due])
            return len(due)

    def _require_open(self) -> None:
        if not self.is_open:
            raise ValueError("the store is not open")

    def _publish(
        self,
        first_offset: int,
        end_offset: int,
        low_water_offset: int,
        spans: Sequence[SpanRow],
        requests: Sequence[RequestRow] | pa.Table,
        observed: Mapping[str, int],
    ) -> None:
        self._require_open()
        if not self._end_offset <= first_offset <= end_offset or not self._low_water_offset <= low_water_offset <= end_offset:
            raise ValueError(
                f"offsets out of order: first {first_offset}, end {end_offset}, low water {low_water_offset} "
                f"after end {self._end_offset}, low water {self._low_water_offset}"
            )
        if self._manifest_torn:
            self._cut_manifest()
        stem = _stem(self.shard, first_offset, end_offset)
        if stem != self._stem:
            again = first_offset == end_offset  # only an empty range comes twice
            self._stem, self._stem_files = stem, max(self._next_index(table, f"{stem}-") for table in Table) if again else 0
        stored = []
        for index, part in enumerate(_parts(spans, requests, self._now_unix_ns()), start=self._stem_files):
            self._make_folders(part)
            stored.append(self._write(part, f"{stem}-{index:03d}"))
        for folder in sorted({(self._root / file.path).parent for file in stored}):
            self._files.fsync_dir(str(folder))
        self._append(
            Publish(
                shard=self.shard,
                first_offset=first_offset,
                end_offset=end_offset,
                low_water_offset=low_water_offset,
                files=tuple(stored),
                observed=observed,
            )
        )
        self._end_offset, self._low_water_offset = end_offset, low_water_offset
        self._stem_files += len(stored)

    def _make_root(self) -> None:
        missing = [folder for folder in self._root.parents if not folder.exists()]
        for folder in (*reversed(missing), self._root):
            self._make_folder(folder)

    def _take_lock(self) -> None:
        try:
            self._lock = self._files.lock_dir(str(self._root))
        except BlockingIOError as error:
            raise StoreLockedError(
                f"{self._root}: another collector writes to this store; stop it, or give this one a folder of its own"
            ) from error

    def _recover(self) -> Recovered:
        data = self._read(self._manifest)
        parsed = parse(data, self._manifest)
        self._manifest_bytes = parsed.whole_bytes
        if data:
            self._cut_manifest()
        self._publishes = list(parsed.publishes)
        self._retired = [retired for publish in parsed.publishes for retired in publish.retired]
        publishes = [publish for publish in parsed.publishes if publish.shard == self.shard]
        self._end_offset = max((publish.end_offset for publish in publishes), default=0)
        self._low_water_offset = max((publish.low_water_offset for publish in publishes), default=0)
        self._stem = ""
        listed = {file.path for publish in parsed.publishes for file in publish.files}
        self._remove_unlisted(listed | {retired.path for retired in self._retired})
        recent = [
            row
            for publish in publishes
            if publish.end_offset > self._low_water_offset
            for file in publish.files
            if file.table is Table.REQUESTS
            for row in self._rows(file, self._resting_on(publish))
        ]
        told = _newest(recent)
        return Recovered(
            end_offset=self._end_offset,
            low_water_offset=self._low_water_offset,
            evidence={span_id: (row.trace_id, row.request_id, row.version) for row in told for span_id in row.span_ids},
            edges={(row.trace_id, row.request_id): row.complete for row in told if row.scope == "edge"},
            observed=observed_by(parsed.publishes, self.shard),
        )

    def _rows(self, file: StoredFile, resting_on: int) -> list[RequestRow]:
        """The rows of one file that rest on an entry at ``resting_on`` or later; a replay makes those of a damaged one again."""
        try:
            data = io.BytesIO(self._read(str(self.path(file))))
            table = pq.ParquetFile(data, page_checksum_verification=True).read()
        except (pa.ArrowException, OSError) as error:
            if isinstance(error, OSError) and error.errno:
                raise
            log.error("%s (%d rows) cannot be read: %s; %s", self.path(file), file.rows, error, ADVICE)
            return []
        return list(map(request_row, table.filter(pc.greater_equal(table["last_offset"], resting_on)).to_pylist()))

    def _resting_on(self, publish: Publish) -> int:
        """Rows of ``publish`` that rest on nothing at or after this offset cannot be made again by the replay.

        A compacted hour may hold a million rows and, of those that came late, a few that can.
        """
        return self._low_water_offset if publish.first_offset < self._low_water_offset else 0

    def _cut_manifest(self) -> None:
        """Leave only whole lines, durable: what the last process wrote may not be on disk yet, and is about to be relied on."""
        with self._opened(self._manifest) as handle:
            if self._files.size(handle) > self._manifest_bytes:
                self._files.truncate(handle, self._manifest_bytes)
            self._files.fdatasync(handle)
        self._files.fsync_dir(str(self._root))  # the name of a new generation
        self._manifest_torn = False

    def _rewrite(self, gone: Collection[str], added: Sequence[Publish], retired: list[Retired]) -> None:
        """Put the next generation of the manifest in the place of this one. Held: ``_guard``."""
        if self._manifest_torn:
            self._cut_manifest()
        publishes = rewritten(self._publishes, gone, added, retired)
        data = b"".join(map(encode_line, publishes))
        temporary = f"{self._manifest}{TEMPORARY}"
        self._write_whole(temporary, data)
        self._files.rename(temporary, self._manifest)
        self._manifest_torn = True  # until its name is durable nothing may be appended: the old one might come back
        self._manifest_bytes, self._publishes, self._retired = len(data), list(publishes), retired
        self._files.fsync_dir(str(self._root))
        self._manifest_torn = False

    def _next_index(self, table: Table, beginning: str) -> int:
        """The first number that no file of this stem has, retired ones included. Held: ``_guard``."""
        name = f"/{table.value}-{beginning}"
        paths = [file.path for publish in self._publishes for file in publish.files] + [retired.path for retired in self._retired]
        numbers = (path.partition(name)[2][: -len(SUFFIX)] for path in paths)
        return 1 + max((int(number) for number in numbers if number.isdigit()), default=-1)

    def _remove_unlisted(self, listed: set[str]) -> None:
        for table in Table:
            for path in sorted((self._root / table.value).glob("day=*/hour=*/*.parquet*")):
                if path.relative_to(self._root).as_posix() not in listed and path.suffix != ASIDE:
                    self._files.unlink(str(path))
        temporary = Path(f"{self._manifest}{TEMPORARY}")
        if temporary.exists():
            self._files.unlink(str(temporary))

    def _path(self, part: Part, name: str) -> Path:
        return self._root / hour_folder(part.name, part.hour) / f"{part.name.value}-{name}{SUFFIX}"

    def _discard(self, part: Part, name: str) -> None:
        """Remove what a failed ``replace`` left on what may be a full disk; what cannot be removed now goes at the next start."""
        path = self._path(part, name)
        with self._guard:
            if any(file.path == path.relative_to(self._root).as_posix() for p in self._publishes for file in p.files):
                return  # only its folder's sync failed, and is made up for before anything relies on it
            for left in (f"{path}{TEMPORARY}", str(path)):
                with contextlib.suppress(OSError):
                    self._files.unlink(left)

    def _write(self, part: Part, name: str) -> StoredFile:
        path = self._path(part, name)
        temporary = f"{path}{TEMPORARY}"
        data = encode(part.table, part.name, part.columns)
        self._write_whole(temporary, data)
        self._files.rename(temporary, str(path))
        times = pc.min_max(part.table[TIME_COLUMN[part.name]]).as_py()
        versions = pc.min_max(part.table["version"]).as_py() if part.name is Table.REQUESTS else {"min": 0, "max": 0}
        return StoredFile(
            table=part.name,
            path=path.relative_to(self._root).as_posix(),
            rows=part.table.num_rows,
            bytes=len(data),
            min_unix_ns=times["min"],
            max_unix_ns=times["max"],
            min_version=versions["min"],
            max_version=versions["max"],
            columns_crc=zlib.crc32(",".join(part.table.column_names).encode()),
            written_unix_ns=part.written_unix_ns,
            covers=part.covers,
        )

    def _make_folders(self, part: Part) -> None:
        folder = self._root
        for step in hour_folder(part.name, part.hour).parts:
            folder = folder / step
            self._make_folder(folder)

    def _remove_if_empty(self, folder: Path) -> None:
        """Held: ``_guard``, so that nobody is about to write there."""
        if folder.is_dir() and not any(folder.iterdir()):
            self._durable.discard(folder)
            self._files.remove_dir(str(folder))

    def _make_folder(self, folder: Path) -> None:
        """Make it and its name durable, once a process: a folder found here may be what a crash left without its sync."""
        if folder not in self._durable:
            self._files.make_dir(str(folder))
            self._files.fsync_dir(str(folder.parent))
            self._durable.add(folder)

    def _append(self, publish: Publish) -> None:
        line = encode_line(publish)
        self._manifest_torn = True
        try:
            with self._opened(self._manifest) as handle:
                self._write_all(handle, line)
                self._files.fdatasync(handle)
            if Path(self._manifest) not in self._durable:
                self._files.fsync_dir(str(self._root))
                self._durable.add(Path(self._manifest))
        except OSError:
            with contextlib.suppress(OSError):  # else at the next publish or start
                self._cut_manifest()
            raise
        self._manifest_bytes += len(line)
        self._manifest_torn = False
        self._publishes.append(publish)

    @contextlib.contextmanager
    def _opened(self, path: str) -> Iterator[int]:
        handle = self._files.open_append(path)
        try:
            yield handle
        finally:
            self._files.close(handle)

    def _write_whole(self, path: str, data: bytes) -> None:
        with self._opened(path) as handle:
            self._files.truncate(handle, 0)  # an earlier try may have left something
            self._write_all(handle, data)
            self._files.fdatasync(handle)

    def _write_all(self, handle: int, data: bytes) -> None:
        left = memoryview(data)
        while left:
            left = left[self._files.write(handle, (bytes(left),)) :]

    def _read(self, path: str) -> bytes:
        try:
            handle = self._files.open_read(path)
        except FileNotFoundError:
            return b""
        try:
            return self._files.read_at(handle, self._files.size(handle), 0)
        finally:
            self._files.close(handle)


def _stem(shard: int, first_offset: int, end_offset: int) -> str:
    return f"{shard:03d}-{first_offset:020d}-{end_offset:020d}"


def _parts(spans: Sequence[SpanRow], requests: Sequence[RequestRow] | pa.Table, now_unix_ns: int) -> Iterator[Part]:
    for hour, places in by_hour([span.start_unix_ns for span in spans]).items():
        table, columns = spans_table([spans[at] for at in places])
        yield Part(Table.SPANS, hour, table, columns, now_unix_ns)
    table = requests if isinstance(requests, pa.Table) else requests_table(requests)
    for hour, places in by_hour(table[TIME_COLUMN[Table.REQUESTS]].to_pylist()).items():
        rows = table.take(places) if len(places) < len(table) else table
        yield Part(Table.REQUESTS, hour, rows, REQUEST_COLUMNS, now_unix_ns)


def by_hour(starts_unix_ns: Sequence[int]) -> dict[int, list[int]]:
    """Places of the rows of each hour; hours beyond the ``MAX_HOURS_A_PUBLISH`` fullest go with the fullest."""
    hours: dict[int, list[int]] = {}
    for at, start in enumerate(starts_unix_ns):
        hours.setdefault(start // HOUR_NS, []).append(at)
    fullest = sorted(hours, key=lambda hour: -len(hours[hour]))
    for hour in fullest[MAX_HOURS_A_PUBLISH:]:
        hours[fullest[0]].extend(hours.pop(hour))
    return hours


def _newest(rows: Sequence[RequestRow]) -> list[RequestRow]:
    """Those that no other replaces. A version that has a later one says nothing: what withdrew it has no evidence, and the
    request that took its place has the same."""
    newest: dict[tuple[str, str], RequestRow] = {}
    for row in rows:
        key = row.trace_id, row.request_id
        if key not in newest or newest[key].version < row.version:
            newest[key] = row
    return sorted(newest.values(), key=lambda row: row.version)
