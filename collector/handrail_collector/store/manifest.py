"""Define the manifest: the list of a store's publishes in ``manifest.jsonl``.

The manifest lies at the store's root and has one line per publish.
A line is the CRC-32 of its JSON as 8 hex digits, a space, the JSON, a newline.
The first line lists nothing. It is durable before any data file exists, so a manifest without it is not a new store.
A torn last line was never published: readers ignore it and the writer cuts it off.
A line is torn when it has no newline or has NUL bytes (blocks that a power loss kept from the disk read as zeros).
Any other line with a wrong CRC is damage. A file that no line names is not part of the store.

A publish appends a line. Taking files out, for others with the same rows or for good, replaces the manifest.
The first line of the new manifest is the *head*: it counts these generations and carries the offsets on.
A reader that has read a part of the former manifest notices the change by the head.
"""

from __future__ import annotations

import contextlib
import errno
import json
import re
import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from handrail.printable import printable
from handrail.wal.log import FolderGoneError
from handrail_collector.store.layout import TEMPORARY, DurableDir, files_below, is_data_path, link_on_the_way
from handrail_collector.store.schema import SCHEMA_VERSION, Table

MANIFEST_VERSION = 7
"""Version of the manifest; rises when a line changes its meaning or gains a part.

Earlier versions refuse such a part. Version 1 had no heads, 2 no counts and no rollups, 3 no samples, 4 no increments
(``added``), 5 no checksums of files, 6 no schema version of files.
"""

MANIFEST = "manifest.jsonl"

HEAD_BYTES = 64
"""Bytes at the beginning of a manifest that differ between any two generations.

They hold the CRC and the generation.
"""


RESTORE = f"restore {MANIFEST} from a copy, or move the whole store away to begin a new one; Handrail removed nothing"


class StoreDamagedError(Exception):
    """The store cannot be read as it is; the message says where and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """One Parquet file of the store.

    Times are those of its rows (start, wall clock). Versions are 0 for ``spans`` and ``rollups``.
    """

    table: Table
    path: str  # below the store's root, with '/'
    rows: int
    bytes: int
    min_unix_ns: int
    max_unix_ns: int
    min_version: int
    max_version: int
    columns_crc: int  # CRC-32 of the column names: files with equal values can be read as one table
    written_unix_ns: int = 0  # when its newest rows were first written; 0 before version 2 recorded it
    crc: int | None = None  # CRC-32 of its bytes; None before version 6 recorded it
    schema: int = 1  # schema version of the file; recorded since version 7
    covers: str = ""  # of a rollup: path of its ``requests`` file; the rollup is valid as long as that file is listed

    @property
    def is_compacted(self) -> bool:
        """Whether it was made from other files; its name says so (``publish.py``)."""
        return re.search(r"-c\d+\.parquet$", self.path) is not None


@dataclass(frozen=True, slots=True)
class Retired:
    """A file that left the store, and when; it stays on disk for earlier readers."""

    path: str
    since_unix_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishRecord:
    """One publish of one shard: a journal range and the files made from it.

    The range is [first_offset, end_offset).
    ``low_water_offset``: everything before it is decided and published, and a replay starts there; 0 for a compacted range.
    ``generation``: above 0 only for a head, which has no files of its own. ``retired``: files that heads still account for.
    ``observed``: total counts of the collector's traffic as of this publish; the last of a shard counts.
    ``added``: what this publish adds to counters with many places; all publishes of a shard count together.
    """

    generation: int = 0
    shard: int
    first_offset: int
    end_offset: int
    low_water_offset: int
    files: tuple[StoredFile, ...]
    retired: tuple[Retired, ...] = ()
    observed: Mapping[str, int] = field(default_factory=dict)
    added: Added = field(default_factory=dict)


def encode_line(publish: PublishRecord) -> bytes:
    """Encode ``publish`` as a manifest line, newline included."""
    text = json.dumps({"v": MANIFEST_VERSION, "schema": SCHEMA_VERSION} | asdict(publish), separators=(",", ":")).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


OPENING = PublishRecord(shard=0, first_offset=0, end_offset=0, low_water_offset=0, files=())
"""The first line of a new manifest."""


@dataclass(frozen=True, slots=True)
class Parsed:
    """The publishes in order, and how many bytes of the input were whole lines.

    The rest of the input is torn.
    """

    publishes: tuple[PublishRecord, ...]
    whole_bytes: int


def parse(data: bytes, where: str) -> Parsed:
    """Parse a manifest or its rest; ``where`` names it in errors.

    Raises ``StoreDamagedError`` for a bad line, unless it is the last one and torn, and for a line of a later version.
    """
    publishes: list[PublishRecord] = []
    at = 0
    while (end := data.find(b"\n", at)) >= 0:
        publish = _line(data[at:end], where)
        if publish is None:
            if end + 1 == len(data) and b"\0" in data[at:end]:
                break
            raise StoreDamagedError(f"{where}: the line at byte {at} is damaged; {RESTORE}")
        if publish != OPENING:
            publishes.append(publish)
        at = end + 1
    return Parsed(tuple(publishes), at)


def require_new(root: Path) -> None:
    """Raise ``StoreDamagedError`` when a store without a first line holds data.

    A store whose manifest lacks even its first line must hold nothing yet.
    """
    files = [path for path in files_below(root) if not path.endswith(TEMPORARY)]
    if files:
        what = "is empty or damaged from its first line on" if (root / MANIFEST).exists() else "is missing"
        lie = f"{counted(len(files))} of a store {'lies' if len(files) == 1 else 'lie'} beside it"
        raise StoreDamagedError(f"{root / MANIFEST} {what}, and {lie}; {RESTORE}")


def counted(files: int) -> str:
    """Format a number of files: ``1 data file``, ``3 data files``."""
    return f"{files:,} data file{'' if files == 1 else 's'}"


def files_of(publishes: Iterable[PublishRecord], table: Table) -> list[StoredFile]:
    """List the files of one table, oldest publish first."""
    return [file for publish in publishes for file in publish.files if file.table is table]


def rewritten(
    publishes: Sequence[PublishRecord], gone: Collection[str], added: Sequence[PublishRecord], retired: Sequence[Retired]
) -> tuple[PublishRecord, ...]:
    """Build the next generation of the manifest.

    It has one head per shard, then ``publishes`` without the files ``gone``, and ``added``, in the order of their end offsets.
    Lines without files are left out: the heads carry their offsets.
    """
    generation = 1 + max((publish.generation for publish in publishes), default=0)
    heads = [
        PublishRecord(
            generation=generation,
            shard=shard,
            first_offset=last.first_offset,
            end_offset=last.end_offset,
            low_water_offset=max(p.low_water_offset for p in publishes if p.shard == shard),
            files=(),
            retired=tuple(retired) if index == 0 else (),
            observed=observed_by(publishes, shard),
            added=added_by(publishes, shard),
        )
        for index, (shard, last) in enumerate(sorted(_last_of_shards(publishes).items()))
    ]
    kept = (replace(p, files=tuple(f for f in p.files if f.path not in gone), observed={}, added={}) for p in publishes)
    lines = sorted((*added, *(p for p in kept if p.files)), key=lambda p: p.end_offset)  # stable: equal ones keep their order
    return (*heads, *lines)


def observed_by(publishes: Sequence[PublishRecord], shard: int) -> Mapping[str, int]:
    """Return the latest counts of a shard; empty when it has none."""
    return next((p.observed for p in reversed(publishes) if p.shard == shard and p.observed), {})


def added_by(publishes: Sequence[PublishRecord], shard: int) -> dict[str, tuple[int, ...]]:
    """Return the sum of what all publishes of a shard added."""
    return added_up(p.added for p in publishes if p.shard == shard)


def _last_of_shards(publishes: Iterable[PublishRecord]) -> dict[int, PublishRecord]:
    last: dict[int, PublishRecord] = {}
    for publish in publishes:
        if publish.shard not in last or publish.end_offset >= last[publish.shard].end_offset:
            last[publish.shard] = publish
    return last


class ManifestReader:
    """Reader of the publishes of a store that another process may write.

    It reads only what was appended since the last call.
    """

    def __init__(self, root: Path) -> None:
        self._path = root / MANIFEST
        self._publishes: tuple[PublishRecord, ...] = ()
        self._read_bytes = 0
        self._last_line = b""
        self._head = b""

    def publishes(self) -> tuple[PublishRecord, ...]:
        """List everything published so far; empty when there is no manifest yet.

        Raises ``StoreDamagedError`` and ``OSError``.
        """
        try:
            with self._path.open("rb") as file:
                head = file.read(HEAD_BYTES)
                file.seek(self._read_bytes - len(self._last_line))
                if not head.startswith(self._head) or file.read(len(self._last_line)) != self._last_line:
                    # A new generation, a line that its writer took back because it could not be made durable, or another store.
                    self._publishes, self._read_bytes, self._last_line = (), 0, b""
                    file.seek(0)
                data = file.read()
        except FileNotFoundError:
            require_new(self._path.parent)
            return ()
        parsed = parse(data, str(self._path))
        if not self._read_bytes + parsed.whole_bytes:
            require_new(self._path.parent)
        if parsed.whole_bytes:
            self._head = head
            self._last_line = data[: parsed.whole_bytes].splitlines(keepends=True)[-1]
        self._publishes += parsed.publishes
        self._read_bytes += parsed.whole_bytes
        return self._publishes


def _line(line: bytes, where: str) -> PublishRecord | None:
    crc, _, text = line.partition(b" ")
    if crc != b"%08x" % zlib.crc32(text):
        return None
    try:
        fields = json.loads(text)
        if fields.pop("v") > MANIFEST_VERSION or fields.pop("schema") > SCHEMA_VERSION:
            raise StoreDamagedError(f"{where} was written by a later version of Handrail; read it with that version")
        files = tuple(StoredFile(**(file | {"table": Table(file["table"])})) for file in fields.pop("files"))
        retired = tuple(Retired(**each) for each in fields.pop("retired", ()))
        publish = PublishRecord(**fields, files=files, retired=retired)
        paths = [(file.path, file.table) for file in files] + [(each.path, None) for each in retired]
        paths += [(file.covers, Table.REQUESTS) for file in files if file.covers]
        strange = next((path for path, table in paths if not _is_path_of(path, table)), None)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise StoreDamagedError(f"{where}: Handrail did not write one of its lines ({type(error).__name__}); {RESTORE}") from None
    if strange is not None:
        what = printable(repr(strange))[:300]
        raise StoreDamagedError(f"{where} names {what}, which is no place for a data file; Handrail leaves it alone; {RESTORE}")
    return publish


def _is_path_of(path: object, table: Table | None) -> bool:
    return isinstance(path, str) and is_data_path(path) and (table is None or path.startswith(f"{table.value}/"))


def locate(root: Path, paths: Iterable[str]) -> list[Path]:
    """Return the paths of data files.

    Raises ``StoreDamagedError`` when a link leads to one, because it may lead out of the store.
    """
    paths = list(paths)
    link = link_on_the_way(root, paths)
    if link is not None:
        raise StoreDamagedError(
            f"{link} is a link: Handrail neither reads nor removes files behind links; put the folder or file itself there"
        )
    return [root / path for path in paths]


Added = Mapping[str, Sequence[int]]
"""Increments by counter name."""


def added_up(parts: Iterable[Added]) -> dict[str, tuple[int, ...]]:
    """Sum all ``parts``: each place once, in ascending order."""
    found: dict[str, dict[int, int]] = {}
    for part in parts:
        for name, flat in part.items():
            amounts = found.setdefault(name, {})
            for place, amount in zip(flat[::2], flat[1::2], strict=True):
                amounts[place] = amounts.get(place, 0) + amount
    return {name: tuple(number for each in sorted(amounts.items()) for number in each) for name, amounts in found.items()}


class ManifestWriter:
    """The manifest of a store, in memory and on disk, with a single writer.

    Its owner's lock guards every call. ``publishes`` and ``retired`` match the manifest on disk, after an error too.
    """

    def __init__(self, folder: DurableDir) -> None:
        self.publishes: list[PublishRecord] = []
        self.retired: list[Retired] = []
        self._folder = folder
        self._path = folder.root / MANIFEST
        self._bytes = 0
        self._torn = False

    def load(self) -> None:
        """Read the manifest, or begin a new one.

        Raises ``StoreDamagedError`` and ``OSError``. Nothing may rely on the manifest before ``settle``.
        """
        data = self._folder.read(self._path)
        parsed = parse(data, str(self._path))
        self._bytes = parsed.whole_bytes
        if not self._bytes:
            self._begin()
        self.publishes = list(parsed.publishes)
        self.retired = [retired for publish in parsed.publishes for retired in publish.retired]

    def _begin(self) -> None:
        """Write the first line, durable before any data file exists.

        A lost manifest is therefore never mistaken for one that was not written yet.
        """
        require_new(self._folder.root)
        line = encode_line(OPENING)
        self._folder.put(self._path, line)
        self._folder.files.fsync_dir(str(self._folder.root))
        self._bytes = len(line)

    def settle(self) -> None:
        """Cut the manifest to its whole lines and sync it.

        The last process may have written lines that are not on disk yet; from now on others rely on them.
        """
        self._cut()

    def repair(self) -> None:
        """Undo what a failed write may have left, before anything relies on the manifest.

        Raises ``FolderGoneError`` when someone removed the manifest.
        """
        self._require_there()
        if self._torn:
            self._cut()

    def append(self, publish: PublishRecord) -> None:
        """Append one line, durable on return."""
        line = encode_line(publish)
        self._require_there()
        self._torn = True
        try:
            with self._folder.opened(str(self._path)) as handle:
                self._folder.write_all(handle, line)
                self._folder.files.fdatasync(handle)
        except OSError:
            with contextlib.suppress(OSError):  # a failed cut is repeated at the next publish or start
                self._cut()
            raise
        self._bytes += len(line)
        self._torn = False
        self.publishes.append(publish)

    def rewrite(self, gone: Collection[str], added: Sequence[PublishRecord], retired: list[Retired]) -> None:
        """Replace the manifest by its next generation."""
        self.repair()
        publishes = rewritten(self.publishes, gone, added, retired)
        data = b"".join(map(encode_line, publishes or (OPENING,)))
        self._folder.put(self._path, data)
        self._torn = True  # no append until the new name is durable: the old manifest might come back
        self._bytes, self.publishes, self.retired = len(data), list(publishes), retired
        self._folder.files.fsync_dir(str(self._folder.root))
        self._torn = False

    def _require_there(self) -> None:
        """Raise ``FolderGoneError`` when someone removed or cut the manifest.

        A new file in its place would pass for the whole store.
        """
        files = self._folder.files
        try:
            handle = files.open_read(str(self._path))
        except FileNotFoundError:
            size = -1
        else:
            try:
                size = files.size(handle)
            finally:
                files.close(handle)
        if size < self._bytes:
            raise FolderGoneError(errno.ENOENT, "deleted or replaced while in use", str(self._path))

    def remove_temporary(self) -> None:
        """Remove the temporary file that a crash may have left."""
        temporary = self._path.with_name(f"{MANIFEST}{TEMPORARY}")
        if temporary.exists():
            self._folder.files.unlink(str(temporary))

    def _cut(self) -> None:
        files = self._folder.files
        with self._folder.opened(str(self._path)) as handle:
            if files.size(handle) > self._bytes:
                files.truncate(handle, self._bytes)
            files.fdatasync(handle)
        files.fsync_dir(str(self._folder.root))  # makes the name of a new generation durable
        self._torn = False
