"""Puts rows into the store so that each publish is there whole or not at all, and says at start what is there already.

A publish writes Parquet files under temporary names, makes them durable, renames them, makes their folders durable, and last
appends one line to the manifest. What a crash leaves behind before that line is removed at the next start (``orphan_files.py``).

Files are taken out of the store by a manifest that no longer names them, which is put in the old one's place; they lie there for
a grace time, so that readers who began before can end.
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
from pathlib import Path, PurePosixPath

import pyarrow as pa
import pyarrow.parquet as pq

from handrail.wal.filesystem import Filesystem, OsFiles
from handrail.wal.log import FolderGoneError
from handrail_collector.rows import RequestRow
from handrail_collector.store.counter_totals import Added
from handrail_collector.store.durable_dir import TEMPORARY, DurableDir
from handrail_collector.store.layout import SUFFIX, files_below
from handrail_collector.store.manifest import MANIFEST, PublishRecord, Retired, StoredFile, locate
from handrail_collector.store.manifest_writer import ManifestWriter
from handrail_collector.store.orphan_files import UNLISTED, sorted_out
from handrail_collector.store.partitions import PartitionFile, partition
from handrail_collector.store.quarantine import READ_ERRORS, columns_crc, of_machine
from handrail_collector.store.recovery import Recovered, recover
from handrail_collector.store.schema import Table, encode
from handrail_collector.store.span import SpanRow
from handrail_collector.store.tables.dataclass_table import FlatRows

log = logging.getLogger(__name__)


class StoreLockedError(Exception):
    """Another process writes to this store."""


class StorePublisher:
    """The single writer of one shard's files in a store, called from any thread.

    One caller at a time publishes, and one at a time folds and retires; these two may do so at once.
    """

    def __init__(
        self, root: Path, shard: int = 0, files: Filesystem | None = None, now_unix_ns: Callable[[], int] = time.time_ns
    ) -> None:
        self._root = root
        self.shard = shard
        self.unlisted_set_aside = 0  # files that a start found and no line named
        self._files: Filesystem = files or OsFiles()
        self._now_unix_ns = now_unix_ns
        self._guard = threading.Lock()  # guards the manifest, what is known of it, and that no folder goes while a file comes
        self._folder = DurableDir(root, self._files)
        self._manifest = ManifestWriter(self._folder)
        self._lock: int | None = None
        self._end_offset = 0
        self._low_water_offset = 0
        self._stem = ""
        self._stem_files = 0  # of the stem, published: rows decided while no entries come share one empty range

    def open(self) -> Recovered:
        """Take the store, remove what a crash left unfinished, and say what is there.

        Raises ``StoreLockedError`` where another process has it, ``StoreDamagedError`` where the manifest cannot be trusted, and
        ``OSError``.
        """
        self._folder.make_root()
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
        flat: FlatRows | None = None,
        added: Added | None = None,
    ) -> None:
        """Store what came of the journal range [first_offset, end_offset); durable and visible when this returns.

        Ranges follow one another: ``first_offset`` is not before the last end. Raises ``ValueError`` for a range out of order,
        ``FolderGoneError`` where the store was deleted or replaced, and ``OSError`` when the disk fails; after an error this
        publish is not in the store, and may be tried again as it is.
        ``observed``: what was counted by now, in total; a start gets the counts of the last publish back, those and no others.
        ``flat``: rows of other tables. ``added``: what is to be added to what earlier publishes added; a start gets the sums.
        """
        with self._guard:
            self._publish(first_offset, end_offset, low_water_offset, spans, requests, observed or {}, flat or {}, added or {})

    def publishes(self) -> tuple[PublishRecord, ...]:
        """Everything published by now."""
        with self._guard:
            return tuple(self._manifest.publishes)

    def retired(self) -> tuple[Retired, ...]:
        """Files that are no longer part of the store and not removed yet."""
        with self._guard:
            return tuple(self._manifest.retired)

    def path(self, file: StoredFile) -> Path:
        """Where a file lies. Raises ``StoreDamagedError`` where a link leads there."""
        return locate(self._root, [file.path])[0]

    def replace(self, gone: Collection[str], part: PartitionFile, first_offset: int, end_offset: int) -> None:
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
                PublishRecord(
                    shard=self.shard, first_offset=first_offset, end_offset=end_offset, low_water_offset=0, files=(file,)
                ),
            )
        except OSError:
            self._discard(part, name)
            raise

    def retire(self, gone: Collection[str], *added: PublishRecord) -> None:
        """Take the files at the paths ``gone`` out of the store, and put what is ``added`` in.

        Raises ``ValueError`` where one of them is not in the store and ``OSError``; after an error the store is in one of the two
        states, and ``publishes`` says which.
        """
        self._require_open()
        with self._guard:
            listed = _paths(self._manifest.publishes)
            if not listed.issuperset(gone):
                raise ValueError(f"not in the store: {', '.join(sorted(set(gone) - listed))}")
            now = self._now_unix_ns()
            self._manifest.rewrite(gone, added, [*self._manifest.retired, *(Retired(path, now) for path in sorted(gone))])

    def remove_retired(self, grace_ns: int) -> int:
        """Remove the files that were retired at least ``grace_ns`` ago, and folders that are empty then; how many files."""
        self._require_open()
        with self._guard:
            until = self._now_unix_ns() - grace_ns
            due = [retired for retired in self._manifest.retired if retired.since_unix_ns <= until]
            for path in locate(self._root, [retired.path for retired in due]):
                with contextlib.suppress(FileNotFoundError):  # removed before a crash that came before the manifest said so
                    self._files.unlink(str(path))
            for hour in sorted({PurePosixPath(retired.path).parent for retired in due}):
                if (self._root / hour).is_dir():  # or a removed file would come back and be in no list
                    self._files.fsync_dir(str(self._root / hour))
            for folder in sorted({folder for retired in due for folder in PurePosixPath(retired.path).parents[:2]}, reverse=True):
                self._folder.remove_if_empty(str(folder))
            if due:
                self._manifest.rewrite((), (), [retired for retired in self._manifest.retired if retired not in due])
            return len(due)

    def _require_open(self) -> None:
        """Raise ``ValueError`` where the store is not open, ``FolderGoneError`` where it is no longer what was opened."""
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
            again = first_offset == end_offset  # only an empty range comes twice
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
        self._require_open()  # or the journal would be released for a line that nobody can read
        self._end_offset, self._low_water_offset = end_offset, low_water_offset
        self._stem_files += len(stored)

    def _take_lock(self) -> None:
        try:
            self._lock = self._files.lock_dir(str(self._root))
        except BlockingIOError as error:
            raise StoreLockedError(
                f"{self._root}: another collector writes to this store; stop it, or give this one a folder of its own"
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
        """The first number that no file of this stem has, retired ones included. Held: ``_guard``."""
        name = f"/{table.value}-{beginning}"
        paths = [*_paths(self._manifest.publishes), *(retired.path for retired in self._manifest.retired)]
        numbers = (path.partition(name)[2][: -len(SUFFIX)] for path in paths)
        return 1 + max((int(number) for number in numbers if number.isdigit()), default=-1)

    def _sort_out_unlisted(self, listed: set[str]) -> None:
        unlisted = [path for path in files_below(self._root) if path not in listed]
        found = sorted_out(unlisted, self._manifest.publishes, self._rows_of, str(self._root / MANIFEST))
        self._manifest.settle()  # not before: a start that is refused changes nothing
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
        """How many a file has; None where that cannot be read."""
        try:
            return int(pq.read_metadata(self._root / path).num_rows)
        except READ_ERRORS as error:
            if of_machine(error):
                raise
            return None

    def _discard(self, part: PartitionFile, name: str) -> None:
        """Remove what a failed ``replace`` left on what may be a full disk; what cannot be removed now goes at the next start."""
        below = part.path(name)
        path = self._root / below
        with self._guard:
            if below.as_posix() in _paths(self._manifest.publishes):
                return  # only its folder's sync failed, and is made up for before anything relies on it
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
            covers=part.covers,
        )

    def _make_folders(self, part: PartitionFile) -> None:
        self._folder.make(str(part.path("").parent))


def _stem(shard: int, first_offset: int, end_offset: int) -> str:
    return f"{shard:03d}-{first_offset:020d}-{end_offset:020d}"


def _paths(publishes: Iterable[PublishRecord]) -> set[str]:
    return {file.path for publish in publishes for file in publish.files}


def _names_aside(path: Path) -> Iterator[Path]:
    """Names for a file that nothing reads from now on; more than one, so that none takes another's place."""
    for number in itertools.count():
        yield path.with_name(f"{path.name}{f'.{number}' if number else ''}{UNLISTED}")
