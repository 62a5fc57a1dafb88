"""Follow a log file through rotation and truncation, and save the position.

Rotation by rename: the old file is read to its end before the new one is begun. Rotation by copy and truncate: the file is
shorter than what was read, or begins with other bytes (it was filled again between two polls); it is read from its beginning.
What was written and truncated away between two polls is lost without a trace.

One thread only; every call reads a bounded amount. ``poll`` may block on a slow disk: call it off the event loop.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import stat
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from handrail.wal.filesystem import OUT_OF_DESCRIPTORS, replace_file

_NO_FILE: Final = frozenset({errno.EISDIR, errno.ENOTDIR, errno.ELOOP, errno.ENXIO, errno.ENODEV})
"""Errors that mean no file is there: a later one is read from its beginning."""

_HEAD_BYTES: Final = 256
_SIBLINGS: Final = 1000
LONGEST_LINE: Final = 65536


@dataclass(frozen=True, slots=True)
class Position:
    """Position of the reader: which file, and how far.

    ``head`` is a hash of its first ``head_bytes`` bytes.
    """

    device: int
    inode: int
    offset: int
    head: str
    head_bytes: int

    def save(self, path: Path) -> None:
        """Write the position whole or not at all. Raises ``OSError``."""
        replace_file(path, json.dumps(asdict(self)).encode())

    @staticmethod
    def load(path: Path) -> Position | None:
        """Read the saved position; None when there is none or it cannot be read."""
        try:
            given = json.loads(path.read_text(encoding="ascii"))
            return Position(
                int(given["device"]), int(given["inode"]), int(given["offset"]), str(given["head"]), int(given["head_bytes"])
            )
        except (OSError, ValueError, KeyError, TypeError):
            return None


@dataclass(slots=True)
class TailStats:
    """Counts since start."""

    bytes_read: int = 0
    lines: int = 0
    long_lines: int = 0  # cut at 64 KiB
    rotations: int = 0
    truncations: int = 0
    skipped_bytes: int = 0  # too far behind to read
    errors: int = 0  # the file is there and could not be read


class LineSplitter:
    """Split bytes into lines; keep the unfinished line for the next bytes.

    The part of a line above ``LONGEST_LINE`` is dropped.
    """

    def __init__(self, stats: TailStats) -> None:
        self._stats = stats
        self._partial = b""
        self._dropping = False

    def feed(self, data: bytes) -> list[str]:
        """Return the lines that ``data`` ends, decoded.

        Bytes that are not UTF-8 are replaced. NULs (holes of a truncated file) are dropped.
        """
        *whole, self._partial = (self._partial + data).split(b"\n")
        if self._dropping and whole:
            del whole[0]
            self._dropping = False
        if len(self._partial) > LONGEST_LINE:
            if not self._dropping:
                whole.append(self._partial[:LONGEST_LINE])
                self._stats.long_lines += 1
            self._dropping, self._partial = True, b""
        self._stats.lines += len(whole)
        return [line.replace(b"\0", b"").decode("utf-8", "replace") for line in whole]

    def end(self) -> list[str]:
        """Return the last line of a file that gets no more, if it lacks a line end."""
        return self.feed(b"\n") if self._partial and not self._dropping else self.reset()

    def reset(self) -> list[str]:
        """Forget the unfinished line."""
        self._partial, self._dropping = b"", False
        return []

    def skip_line(self) -> None:
        """Drop up to the next line end: the next bytes begin in the middle of a line."""
        self._partial, self._dropping = b"", True

    @property
    def pending_bytes(self) -> int:
        """Bytes of the unfinished line; a restart reads them again."""
        return len(self._partial)


@dataclass(frozen=True, slots=True, kw_only=True)
class TailSettings:
    """Settings of a tail.

    ``from_start``: whether a file that is there at first is read from its beginning when it has no saved position.
    """

    from_start: bool = False
    most_bytes: int = 1 << 20  # for each poll
    most_behind_bytes: int = 256 << 20  # farther behind than this, the middle is skipped
    idle_polls: int = 5  # a renamed file is left when this many polls found nothing: its writer reopens its log a little later


class NotRegularError(OSError):
    """No regular file: opening it could wait for ever, reading it could never end."""


def open_regular(path: Path) -> int:
    """Open for reading, without waiting.

    Raises ``NotRegularError`` for pipes, devices, sockets and folders, and ``OSError``.
    """
    _require_regular(os.stat(path).st_mode, path)  # before opening, which alone triggers some devices
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        _require_regular(os.fstat(fd).st_mode, path)  # it may have been replaced in between
    except BaseException:
        os.close(fd)
        raise
    return fd


def _require_regular(mode: int, path: Path) -> None:
    if not stat.S_ISREG(mode):
        what = next((name for test, name in _KINDS if test(mode)), "not a regular file")
        raise NotRegularError(errno.EINVAL, f"is {what}", str(path))


_KINDS: Final[tuple[tuple[Callable[[int], bool], str], ...]] = (
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISDIR, "a folder"),
)


class FileTail:
    """Tail of one file, which need not exist yet. ``close`` works twice.

    A path that is no regular file, at first or later, is not read; a file that was being read then stays open.
    """

    def __init__(self, path: Path, settings: TailSettings, saved: Position | None = None) -> None:
        self.path = path
        self.stats = TailStats()
        self.written_unix_ns = 0
        """When the file was last written to, as of the last poll."""
        self.caught_up = False
        """Whether the last poll read to the end.

        The next poll then finds only what was written since.
        """
        self.problem = ""
        """Why the path is not read; empty while it is read, or does not exist."""
        self._settings = settings
        self._saved = saved
        self._first = True
        self._fd: int | None = None
        self._offset = 0
        self._head, self._head_bytes = "", 0
        self._lines = LineSplitter(self.stats)
        self._idle = 0

    @property
    def position(self) -> Position | None:
        """Where a later process should continue: before an unfinished line.

        None while there is no file.
        """
        if self._fd is None:
            return None
        state = os.fstat(self._fd)
        return Position(state.st_dev, state.st_ino, self._offset - self._lines.pending_bytes, self._head, self._head_bytes)

    def poll(self) -> list[str]:
        """Return the lines that ended since the last call.

        It reads at most ``most_bytes``.
        """
        try:
            return self._poll()
        except FileNotFoundError:
            self._first, self.caught_up, self.problem = False, True, ""
            return []
        except NotRegularError as error:
            self._not_regular(error)
            self._first, self.caught_up = False, True
            return []
        except OSError as error:
            self.stats.errors += 1
            if error.errno in _NO_FILE:
                self._first = False
            elif self._saved is None and not self._first:
                with contextlib.suppress(OSError):
                    self._saved = self.position  # else the next poll would begin the file again
            self.close()
            self.caught_up = True
            return []

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _not_regular(self, error: NotRegularError) -> None:
        self.stats.errors += 1
        self.problem = str(error.strerror)

    def _poll(self) -> list[str]:
        if self._fd is None:
            self._open_first()
        fd = self._fd
        if fd is None:
            return []
        state = os.fstat(fd)
        self.written_unix_ns = state.st_mtime_ns
        lines: list[str] = []
        if state.st_size < self._offset or not self._same_beginning(fd):
            self.stats.truncations += 1
            lines += self._lines.reset()
            self._offset, self._head, self._head_bytes = 0, "", 0
        self._skip_what_is_too_far(state.st_size)
        data = os.pread(fd, self._settings.most_bytes, self._offset)
        self._offset += len(data)
        self.stats.bytes_read += len(data)
        self._note_beginning(fd)
        lines += self._lines.feed(data) if data else []
        self.caught_up = len(data) < self._settings.most_bytes
        self._idle = 0 if data else self._idle + 1
        if self._idle >= self._settings.idle_polls:
            lines += self._follow(fd)
        return lines

    def _follow(self, fd: int) -> list[str]:
        """Continue with the file that has taken the path; return the last line before.

        The open file stays while no file has taken its path.
        """
        try:
            successor = open_regular(self.path) if self._replaced(fd) else None
        except NotRegularError as error:
            self._not_regular(error)
            return []
        self.problem = ""
        if successor is None:
            return []
        lines = self._lines.end()
        self.close()
        self.stats.rotations += 1
        self._begin(successor, 0)
        self.caught_up = False
        return lines

    def _open_first(self) -> None:
        saved, first = self._saved, self._first
        if saved is not None and (found := self._find(saved)) is not None:
            self._begin(open_regular(found), saved.offset)
            self._head, self._head_bytes = saved.head, saved.head_bytes
        else:
            fd = open_regular(self.path)
            self._fd = fd
            size = os.fstat(fd).st_size
            at_end = first and saved is None and not self._settings.from_start
            self._begin(fd, size if at_end else 0)
            if at_end and size and os.pread(fd, 1, size - 1) != b"\n":
                self._lines.skip_line()
        self._saved, self._first = None, False  # after the calls that may fail: the next try uses the same values

    def _begin(self, fd: int, offset: int) -> None:
        self._fd, self._offset, self.problem = fd, offset, ""
        self._head, self._head_bytes, self._idle = "", 0, 0
        self._lines.reset()
        self._note_beginning(fd)

    def _find(self, saved: Position) -> Path | None:
        """Find the file of ``saved``: at the path, or renamed beside it."""
        candidates = [self.path]
        with contextlib.suppress(OSError), os.scandir(self.path.parent) as entries:
            candidates += [
                Path(entry.path)
                for entry, _ in zip(entries, range(_SIBLINGS), strict=False)
                if entry.name.startswith(self.path.name) and entry.name != self.path.name
            ]
        return next((candidate for candidate in candidates if self._is(candidate, saved)), None)

    def _is(self, candidate: Path, saved: Position) -> bool:
        """Whether ``candidate`` is the file of ``saved``.

        Raises ``OSError`` when that cannot be determined now: a wrong no would read the file from its beginning.
        """
        try:
            state = candidate.stat()
            if (state.st_dev, state.st_ino) != (saved.device, saved.inode) or state.st_size < saved.offset:
                return False
            with open(open_regular(candidate), "rb") as file:
                return _digest(file.read(saved.head_bytes)) == saved.head
        except FileNotFoundError:
            return False
        except OSError as error:
            if candidate == self.path or error.errno in OUT_OF_DESCRIPTORS:
                raise
            return False

    def _same_beginning(self, fd: int) -> bool:
        return not self._head_bytes or _digest(os.pread(fd, self._head_bytes, 0)) == self._head

    def _note_beginning(self, fd: int) -> None:
        if self._head_bytes < _HEAD_BYTES:
            beginning = os.pread(fd, min(_HEAD_BYTES, self._offset), 0)
            self._head, self._head_bytes = _digest(beginning), len(beginning)

    def _skip_what_is_too_far(self, size: int) -> None:
        behind = size - self._offset
        if behind > self._settings.most_behind_bytes:
            self.stats.skipped_bytes += behind - self._settings.most_bytes
            self._offset = size - self._settings.most_bytes
            self._lines.skip_line()

    def _replaced(self, fd: int) -> bool:
        """Whether another file is at the path now.

        False for a missing file: it may come back, so the open file stays.
        """
        try:
            there = self.path.stat()
        except FileNotFoundError:
            return False
        ours = os.fstat(fd)
        return (there.st_dev, there.st_ino) != (ours.st_dev, ours.st_ino)


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()
