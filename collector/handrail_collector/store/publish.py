"""Puts rows into the store so that each publish is there whole or not at all, and says at start what is there already.

A publish writes Parquet files under temporary names, makes them durable, renames them, makes their folders durable, and last
appends one line to the manifest. What a crash leaves behind before that line is removed at the next start.
"""

from __future__ import annotations

import contextlib
import io
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from handrail.files import Files, OsFiles
from handrail_collector.rows import MERGED, RequestRow
from handrail_collector.store.manifest import MANIFEST, Publish, StoredFile, encode_line, files_of, parse
from handrail_collector.store.request_columns import request_row, requests_table
from handrail_collector.store.schema import REQUEST_COLUMNS, Column, Table, encode
from handrail_collector.store.span import SpanRow
from handrail_collector.store.span_columns import spans_table

TEMPORARY = ".tmp"
HOUR_NS = 3_600_000_000_000
MAX_HOURS_A_PUBLISH = 24
"""Hours that get files of their own; rows of others (clocks gone wild) lie with the fullest. The manifest has their times."""

TIME_COLUMN = {Table.REQUESTS: "started_unix_ns", Table.SPANS: "start_unix_ns"}

RowId = tuple[str, str, int]
"""trace_id, request_id, version of a request row."""


class StoreLockedError(Exception):
    """Another process writes to this store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered:
    """What a store held when it was opened.

    ``end_offset``: journal entries before it have their spans in the store. ``low_water_offset``: where the replay starts.
    ``evidence``: span id to the newest request row that rests on it, of those that the replay may make again: they are in the
    store and must not be published twice, though a replay may open the same request by another span.
    """

    end_offset: int
    low_water_offset: int
    evidence: Mapping[str, RowId]


class Publisher:
    """The single writer of one shard's files in a store. Not thread-safe: one caller at a time, any thread."""

    def __init__(self, root: Path, shard: int = 0, files: Files | None = None) -> None:
        self._root = root
        self._manifest = str(root / MANIFEST)
        self._shard = shard
        self._files: Files = files or OsFiles()
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
    ) -> None:
        """Store what came of the journal range [first_offset, end_offset); durable and visible when this returns.

        Ranges follow one another: ``first_offset`` is not before the last end. Raises ``ValueError`` for a range out of order and
        ``OSError`` when the disk does; after an error this publish is not in the store, and may be tried again as it is.
        """
        if not self.is_open:
            raise ValueError("the store is not open")
        if not self._end_offset <= first_offset <= end_offset or not self._low_water_offset <= low_water_offset <= end_offset:
            raise ValueError(
                f"offsets out of order: first {first_offset}, end {end_offset}, low water {low_water_offset} "
                f"after end {self._end_offset}, low water {self._low_water_offset}"
            )
        if self._manifest_torn:
            self._cut_manifest()
        stem = _stem(self._shard, first_offset, end_offset)
        if stem != self._stem:
            self._stem, self._stem_files = stem, 0
        parts = enumerate(_parts(spans, requests), start=self._stem_files)
        stored = [self._write(part, stem, index) for index, part in parts]
        for folder in sorted({(self._root / file.path).parent for file in stored}):
            self._files.fsync_dir(str(folder))
        self._append(
            Publish(
                shard=self._shard,
                first_offset=first_offset,
                end_offset=end_offset,
                low_water_offset=low_water_offset,
                files=tuple(stored),
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
        publishes = [publish for publish in parsed.publishes if publish.shard == self._shard]
        self._end_offset = publishes[-1].end_offset if publishes else 0
        self._low_water_offset = publishes[-1].low_water_offset if publishes else 0
        if publishes:
            self._stem = _stem(self._shard, publishes[-1].first_offset, publishes[-1].end_offset)
            self._stem_files = sum(self._stem in file.path for publish in publishes for file in publish.files)
        self._remove_unlisted({file.path for publish in parsed.publishes for file in publish.files})
        recent = [publish for publish in publishes if publish.end_offset > self._low_water_offset]
        files = files_of(recent, Table.REQUESTS)
        newest: dict[tuple[str, str], RequestRow] = {}
        for file in files:
            for row in _rows(self._read(str(self._root / file.path))):
                known = newest.get((row.trace_id, row.request_id))
                if known is None or row.version > known.version:
                    newest[row.trace_id, row.request_id] = row
        return Recovered(
            end_offset=self._end_offset,
            low_water_offset=self._low_water_offset,
            evidence={
                span_id: (row.trace_id, row.request_id, row.version)
                for row in sorted(newest.values(), key=lambda row: row.version)
                if row.scope != MERGED
                for span_id in row.span_ids
            },
        )

    def _cut_manifest(self) -> None:
        """Leave only whole lines, durable: what the last process wrote may not be on disk yet, and is about to be relied on."""
        with self._opened(self._manifest) as handle:
            if self._files.size(handle) > self._manifest_bytes:
                self._files.truncate(handle, self._manifest_bytes)
            self._files.fdatasync(handle)
        self._manifest_torn = False

    def _remove_unlisted(self, listed: set[str]) -> None:
        for table in Table:
            for path in sorted((self._root / table.value).glob("day=*/hour=*/*.parquet*")):
                if path.relative_to(self._root).as_posix() not in listed:
                    self._files.unlink(str(path))

    def _write(self, part: _Part, stem: str, index: int) -> StoredFile:
        path = self._folder(part) / f"{part.name.value}-{stem}-{index:03d}.parquet"
        temporary = f"{path}{TEMPORARY}"
        data = encode(part.table, part.name, part.columns)
        with self._opened(temporary) as handle:
            self._files.truncate(handle, 0)  # an earlier try may have left something
            self._write_all(handle, data)
            self._files.fdatasync(handle)
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
        )

    def _folder(self, part: _Part) -> Path:
        at = datetime.fromtimestamp(part.hour * HOUR_NS // 1_000_000_000, timezone.utc)
        folder = self._root
        for step in (part.name.value, f"day={at:%Y-%m-%d}", f"hour={at:%H}"):
            folder = folder / step
            self._make_folder(folder)
        return folder

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

    @contextlib.contextmanager
    def _opened(self, path: str) -> Iterator[int]:
        handle = self._files.open_append(path)
        try:
            yield handle
        finally:
            self._files.close(handle)

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


@dataclass(frozen=True, slots=True)
class _Part:
    """The rows of one table and one hour (hours since 1970)."""

    name: Table
    hour: int
    table: pa.Table
    columns: tuple[Column, ...]


def _stem(shard: int, first_offset: int, end_offset: int) -> str:
    return f"{shard:03d}-{first_offset:020d}-{end_offset:020d}"


def _parts(spans: Sequence[SpanRow], requests: Sequence[RequestRow] | pa.Table) -> Iterator[_Part]:
    for hour, places in by_hour([span.start_unix_ns for span in spans]).items():
        table, columns = spans_table([spans[at] for at in places])
        yield _Part(Table.SPANS, hour, table, columns)
    table = requests if isinstance(requests, pa.Table) else requests_table(requests)
    for hour, places in by_hour(table[TIME_COLUMN[Table.REQUESTS]].to_pylist()).items():
        yield _Part(Table.REQUESTS, hour, table.take(places) if len(places) < len(table) else table, REQUEST_COLUMNS)


def by_hour(starts_unix_ns: Sequence[int]) -> dict[int, list[int]]:
    """Places of the rows of each hour; hours beyond the ``MAX_HOURS_A_PUBLISH`` fullest go with the fullest."""
    hours: dict[int, list[int]] = {}
    for at, start in enumerate(starts_unix_ns):
        hours.setdefault(start // HOUR_NS, []).append(at)
    fullest = sorted(hours, key=lambda hour: -len(hours[hour]))
    for hour in fullest[MAX_HOURS_A_PUBLISH:]:
        hours[fullest[0]].extend(hours.pop(hour))
    return hours


def _rows(data: bytes) -> Iterator[RequestRow]:
    """The rows of one file."""
    return map(request_row, pq.read_table(io.BytesIO(data)).to_pylist())
