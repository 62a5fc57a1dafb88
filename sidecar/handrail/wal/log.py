"""Append-only log in a folder of segment files, for spool and journal.

A record's offset is a byte position that only grows over the whole life of the log. A segment file is named by the offset of its
first byte (20 digits, ``.seg``), so an offset finds its file without an index, and a dropped segment leaves no trace. The content
of a file: ``handrail.wal.segment_file``.
One thread appends, syncs and drops; another may read.

The next open handles the remains of a crash. A tail that holds no whole record is cut off and its bytes are reported
(``recovery``). Wrong bytes in the middle are skipped up to the next whole record, reported and counted, and kept on disk for a
person to examine.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Final

from handrail.wal.filesystem import OUT_OF_DESCRIPTORS, Filesystem, OsFiles
from handrail.wal.segment_file import HEADER_BYTES, Damage, SegmentFile, Stored, pack_header

__all__ = [
    "Damage",
    "DiskFull",
    "Filesystem",
    "FolderGoneError",
    "Full",
    "LogLimits",
    "NoDescriptors",
    "OsFiles",
    "Recovery",
    "SegmentLog",
    "Stored",
]

_NAME: Final = re.compile(r"(\d{20})\.seg\Z")
_NO_SPACE: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class Full(Exception):  # noqa: N818 - a state, not a fault
    """The log is at its bound, or the disk is full; nothing was appended."""


class DiskFull(Full):
    """The disk is full, or its quota is used up."""


class NoDescriptors(Full):
    """The process, or the host, has no descriptor left for a segment."""


class FolderGoneError(OSError):
    """The log's folder, or the current file, was deleted or replaced while in use.

    New writes are then in no file.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLimits:
    """Bounds of one log.

    A segment is the unit of freeing space: ``max_bytes`` counts segments until they are dropped whole.
    """

    max_bytes: int = 8 << 30
    segment_bytes: int = 64 << 20
    max_record_bytes: int = 64 << 20  # of payload

    @classmethod
    def within(cls, max_bytes: int) -> LogLimits:
        """Workable limits for a total of ``max_bytes``.

        At most an eighth is in the segment that cannot be freed.
        """
        segment_bytes = min(64 << 20, max_bytes // 8)
        return cls(
            max_bytes=max_bytes,
            segment_bytes=segment_bytes,
            max_record_bytes=min(64 << 20, max_bytes - segment_bytes - HEADER_BYTES),
        )

    def validate(self) -> list[str]:
        """All mistakes in these limits, in words; empty when the log can work with them."""
        problems = [f"{name}: must be above 0" for name in self.__slots__ if getattr(self, name) <= 0]
        if self.max_bytes < self.segment_bytes + self.max_record_bytes + HEADER_BYTES:
            # The segment being written is never dropped, so a record must fit beside one, or the log stays full for ever.
            problems.append("max_bytes: must hold a segment and the largest record")
        return problems


@dataclass(frozen=True, slots=True)
class Recovery:
    """Result of opening: the segments kept and the bytes cut off a torn tail."""

    segments: int
    torn_bytes: int


class SegmentLog:
    """Log in ``folder``, opened for appending and locked against other processes.

    ``floor``: offsets below it are known to have been used (acknowledged, published) even where the files are gone. The log goes
    on at or above it, so that no offset ever means two records. The reading thread calls ``on_damage``, once a read for
    each damaged range. Raises ``BlockingIOError`` where another process has the folder, ``ValueError`` for unworkable limits.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        limits: LogLimits | None = None,
        *,
        files: Filesystem | None = None,
        floor: int = 0,
        on_damage: Callable[[Damage], None] | None = None,
    ) -> None:
        self.limits = limits or LogLimits()
        if problems := self.limits.validate():
            raise ValueError("; ".join(problems))
        self.damaged_bytes = 0  # skipped while reading, by this process
        self._folder = os.fspath(folder)
        self._files: Filesystem = files or OsFiles()
        self._on_damage = on_damage
        self._failed: OSError | None = None
        self._unsure: OSError | None = None  # a sync that failed: a later one reports nothing of the data written before it
        self._unsynced: dict[int, int] = {}  # descriptors by first offset, of segments that were rolled over before a sync
        self._names_unsynced = True
        self._sizes: dict[int, int] = {}  # bytes by first offset, oldest first
        self._bytes = 0  # their sum
        self._firsts: tuple[int, ...] = ()  # replaced, never changed: the reading thread takes it as it is
        self._fd = -1  # of the newest segment
        self._end = self._synced = floor
        self._files.make_dir(self._folder)
        try:
            self._lock_fd = self._files.lock_dir(self._folder)
        except BlockingIOError as error:
            raise BlockingIOError(error.errno, "another process has this log open", self._folder) from None
        try:
            self.recovery = self._open(floor)
            self._found_end = self._end  # the data before it may have been acknowledged by an earlier process
        except BaseException:
            self._files.close(self._lock_fd)
            raise

    @property
    def end(self) -> int:
        """Offset that the next record will get."""
        return self._end

    @property
    def synced(self) -> int:
        """Records below this offset survive a power loss."""
        return self._synced

    @property
    def begin(self) -> int:
        """Offset of the first byte that is kept."""
        return self._firsts[0]

    def size(self) -> int:
        """Bytes of the segments on disk."""
        return self._bytes

    def append(self, kind: int, payload: bytes, at_unix_ns: int) -> int:
        """Write one record into the operating system and return its offset.

        The record is durable after ``sync``. ``kind`` 0 to 255. Raises ``Full`` (nothing changed), ``ValueError`` for a payload
        above ``max_record_bytes``, ``OSError`` where the disk fails; after a failed sync every append fails until the log is
        opened again, because the kernel may report a lost write only once. ``DiskFull`` and ``NoDescriptors`` name the cause
        where it is not the bound.
        """
        if self._failed is not None:
            raise self._failed
        if len(payload) > self.limits.max_record_bytes:
            raise ValueError(f"a payload of {len(payload)} bytes is above the limit of {self.limits.max_record_bytes}")
        size = HEADER_BYTES + len(payload)
        if self._bytes + size > self.limits.max_bytes:
            raise Full(f"{self._bytes} of {self.limits.max_bytes} bytes used")
        kept = self._sizes[self._firsts[-1]]
        if kept and kept + size > self.limits.segment_bytes:
            self._roll()
        offset = self._end
        self._write(pack_header(offset, kind, payload, at_unix_ns), payload)
        self._sizes[self._firsts[-1]] += size
        self._bytes += size
        self._end += size
        return offset

    def sync(self) -> int:
        """Make everything appended so far durable.

        Returns the offset below which all is durable. Raises ``Full`` where the disk, or the supply of descriptors, is used up:
        the records since the last sync are then removed. Raises ``FolderGoneError`` where the written file has no name on the
        disk any more. Raises ``OSError`` where it fails otherwise, or at the first sync after opening, which may be of records
        that were acknowledged: whether the records since the last sync are durable is unknown. The log then takes no more, and
        every later sync fails as well, since the kernel drops what it could not write and reports that once.
        """
        if self._unsure is not None:
            raise self._unsure
        end = self._end
        if end == self._synced and not self._names_unsynced:
            return end
        try:
            for first in tuple(self._unsynced):
                self._files.fdatasync(self._unsynced[first])
                self._require_at(self._unsynced[first], self._path(first))
                self._files.close(self._unsynced.pop(first))
            self._files.fdatasync(self._fd)
            if self._names_unsynced:
                self._files.fsync_dir(self._folder)
                self._names_unsynced = False
            self.require_in_place()
        except OSError as failed:
            error = self._gone(failed) or failed
            self._failed = self._unsure = error
            full = _full(error)
            if full is not None and self._synced >= self._found_end:
                self._take_back()
                raise full from error
            raise error from None
        self._synced = end
        return end

    def require_in_place(self) -> None:
        """Raise ``FolderGoneError`` where the folder or the newest segment was moved.

        Each must be where it was opened.
        """
        self._require_at(self._lock_fd, self._folder)
        self._require_at(self._fd, self._path(self._firsts[-1]))

    def _require_at(self, fd: int, path: str) -> None:
        if not self._files.is_at(fd, path):
            raise FolderGoneError(errno.ENOENT, "deleted or replaced while in use", path)

    def _gone(self, error: OSError) -> FolderGoneError | None:
        """``FolderGoneError`` for an ``error`` from a removed folder or newest segment.

        The error is that a name was not found; None for other errors.
        """
        if isinstance(error, FolderGoneError):
            return error
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            try:
                self.require_in_place()
            except FolderGoneError as gone:
                return gone
            except OSError:
                pass
        return None

    def _take_back(self) -> None:
        """Cut off the records that were not synced.

        Nobody has a promise that they are safe, and the log can go on when there is space again. Later records are written and
        synced as new. Raises ``OSError``: then the log takes no more.
        """
        for fd in (*self._unsynced.values(), self._fd):
            self._files.close(fd)
        self._unsynced.clear()
        self._fd = -1
        while len(self._firsts) > 1 and self._firsts[-1] >= self._synced:
            self._files.unlink(self._path(self._firsts[-1]))
            self._bytes -= self._sizes.pop(self._firsts[-1])
            self._firsts = self._firsts[:-1]
        last = self._firsts[-1]
        self._fd = self._files.open_append(self._path(last))
        self._files.truncate(self._fd, self._synced - last)
        self._bytes += self._synced - last - self._sizes[last]
        self._sizes[last] = self._synced - last
        self._end, self._names_unsynced = self._synced, True
        self._failed = self._unsure = None

    def read(self, from_offset: int, until: int | None = None) -> Generator[Stored, None, None]:
        """Yield the records from ``from_offset`` to ``until``.

        ``from_offset``: a record's offset, or a ``next_offset``. ``until``: by default all appended records are read.
        Begins with the first record kept where ``from_offset`` was dropped. Safe in a second thread; a segment that is dropped
        meanwhile is left out.
        """
        until = self._end if until is None else until
        firsts = self._firsts
        for first, following in zip(firsts, (*firsts[1:], None), strict=True):
            stop = until if following is None else min(until, following)
            if stop <= from_offset or stop <= first:
                continue
            try:
                fd = self._files.open_read(self._path(first))
            except FileNotFoundError:
                if first in self._firsts:  # dropped by no process: a person deleted the file
                    self._damaged(Damage(max(from_offset, first), stop))
                continue
            try:
                yield from self._read_segment(self._segment(fd, first), max(from_offset, first), stop)
            finally:
                self._files.close(fd)

    def drop_before(self, offset: int) -> int:
        """Remove every segment that is entirely below ``offset``; return the freed bytes.

        The segment being written always stays.
        """
        freed = 0
        while len(self._firsts) > 1 and self._firsts[1] <= offset:
            first = self._firsts[0]
            with contextlib.suppress(FileNotFoundError):
                self._files.unlink(self._path(first))
            if (fd := self._unsynced.pop(first, None)) is not None:
                self._files.close(fd)  # or a log that is never synced would hold the bytes of every segment
            # No sync of the name: one that comes back after a power loss is below the offset that its reader starts from.
            self._firsts = self._firsts[1:]
            size = self._sizes.pop(first)
            self._bytes -= size
            freed += size
        return freed

    def start_anew(self) -> None:
        """Drop every record and go on at ``end`` in an empty file.

        It frees the space before it takes any. It is for a log that is never synced and whose records nobody needs any more.
        Raises ``OSError``: ``repair`` may go on.
        """
        last = self._firsts[-1]
        self._files.truncate(self._fd, 0)
        self._bytes -= self._sizes[last]
        self._sizes[last] = 0
        self._failed = OSError(errno.EIO, "the log was not begun anew")
        self.repair()
        self.drop_before(self._end)

    def repair(self) -> None:
        """Make the newest file match the offsets again after a failed append.

        Raises ``OSError`` where it still fails.
        """
        if self._failed is None:
            return
        if self._unsure is not None or self._lock_fd < 0:
            raise self._failed
        last = self._firsts[-1]
        self._files.truncate(self._fd, self._sizes[last])
        if last + self._sizes[last] != self._end:
            former = self._fd
            self._start_segment()
            self._files.close(former)
        self._failed = None

    def rescue(self, from_offset: int) -> Iterator[Stored]:
        """Yield the records from ``from_offset`` on that open descriptors still reach.

        It is for a log whose files have lost their names, and for the appending thread. Raises ``OSError``.
        """
        held = {**self._unsynced, self._firsts[-1]: self._fd}
        for first, fd in held.items():
            stop = first + self._sizes[first]
            if stop > from_offset:
                for found in self._segment(fd, first).scan(max(from_offset, first), stop):
                    if isinstance(found, Stored):
                        yield found

    def next_segment(self, offset: int) -> int:
        """Begin of the first segment above ``offset``; ``end`` where there is none."""
        return next((first for first in self._firsts if first > offset), self._end)

    def close(self) -> None:
        """Close the files and unlock the folder, without a sync. Works twice."""
        if self._lock_fd < 0:
            return
        for fd in (*self._unsynced.values(), self._fd, self._lock_fd):
            if fd >= 0:
                self._files.close(fd)
        self._unsynced.clear()
        self._lock_fd = -1
        self._failed = OSError(errno.EBADF, "the log is closed")

    def _open(self, floor: int) -> Recovery:
        self._files.fsync_dir(os.path.dirname(os.path.abspath(self._folder)))
        for name in sorted(self._files.list_dir(self._folder)):
            if found := _NAME.match(name):
                self._sizes[int(found[1])] = 0
        self._firsts = tuple(self._sizes)
        torn_bytes = 0
        for first in self._firsts:
            fd = self._files.open_append(self._path(first))
            self._sizes[first] = self._files.size(fd)
            if first == self._firsts[-1]:
                self._fd, self._end = fd, first + self._whole_bytes(fd, first)
                torn_bytes = first + self._sizes[first] - self._end
                if torn_bytes:
                    self._files.truncate(fd, self._end - first)
                    self._sizes[first] = self._end - first
            else:
                # The process that wrote it may have died before its sync; records read from here on must not vanish later.
                self._files.fdatasync(fd)
                self._files.close(fd)
        self._bytes = sum(self._sizes.values())
        self._synced = self._firsts[0] if self._firsts else floor
        if not self._firsts or self._end < floor:
            if self._firsts:
                self._unsynced[self._firsts[-1]] = self._fd
            self._end = floor
            self._start_segment()
        return Recovery(len(self._firsts), torn_bytes)

    def _whole_bytes(self, fd: int, first: int) -> int:
        """End of the last whole record in the newest segment, as a position in its file."""
        end = first
        for found in self._segment(fd, first).scan(first, first + self._sizes[first]):
            if isinstance(found, Stored):
                end = found.next_offset
        return end - first

    def _roll(self) -> None:
        full_fd, full = self._fd, self._firsts[-1]
        try:
            self._start_segment()
        except OSError as error:
            if (at_its_end := _full(error)) is not None:
                raise at_its_end from error
            if (gone := self._gone(error)) is not None:
                self._failed = gone
                raise gone from error
            raise
        if self._synced < self._end:
            self._unsynced[full] = full_fd
        else:
            self._files.close(full_fd)

    def _start_segment(self) -> None:
        self._fd = self._files.open_append(self._path(self._end))
        self._names_unsynced = True
        self._sizes[self._end] = 0
        self._firsts = (*self._firsts, self._end)

    def _write(self, header: bytes, payload: bytes) -> None:
        """Append all bytes or none."""
        rest: tuple[bytes, ...] = (header, payload)
        size = written = 0
        try:
            size = len(header) + len(payload)
            while (written := written + self._files.write(self._fd, rest)) < size:
                rest = ((header + payload)[written:],)
        except OSError as error:
            self._unwrite()
            if (full := _full(error)) is not None:
                raise full from error
            raise

    def _unwrite(self) -> None:
        """Cut off half a record.

        Where even that fails, the file no longer matches the offsets and takes no more.
        """
        try:
            self._files.truncate(self._fd, self._sizes[self._firsts[-1]])
        except OSError as error:
            self._failed = error

    def _read_segment(self, segment: SegmentFile, start: int, stop: int) -> Iterator[Stored]:
        for found in segment.scan(start, stop):
            if isinstance(found, Stored):
                yield found
            else:
                self._damaged(found)

    def _damaged(self, damage: Damage) -> None:
        self.damaged_bytes += damage.next_offset - damage.offset
        if self._on_damage is not None:
            self._on_damage(damage)

    def _segment(self, fd: int, first: int) -> SegmentFile:
        return SegmentFile(self._files, fd, first)

    def _path(self, first: int) -> str:
        return os.path.join(self._folder, f"{first:020d}.seg")


def _full(error: OSError) -> Full | None:
    """``Full`` for an error that means that a resource is used up; else None."""
    if error.errno in _NO_SPACE:
        return DiskFull(str(error))
    return NoDescriptors(str(error)) if error.errno in OUT_OF_DESCRIPTORS else None
