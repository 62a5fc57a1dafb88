"""File operations of a durable log, as a layer that a crash test can replace.

``OsFiles`` is the operating system; ``MemoryFiles`` keeps bytes in this process, for a spool without a folder. Durability:
data survives the death of the process after ``write`` and a power loss after ``fdatasync``; a name survives a power loss after
``fsync_dir``.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from pathlib import Path
from typing import Final, Protocol

OUT_OF_DESCRIPTORS: Final = frozenset({errno.EMFILE, errno.ENFILE})
"""Errors of a process, or host, that has no descriptor left.

Nothing is wrong with the file, and the call may work later.
"""

FOLDER_MODE: Final = 0o750
FILE_MODE: Final = 0o640
"""Mode of the files that we create, whatever the umask is.

Data holds names and addresses of others, and a group may have permission to read it.
"""

READABLE_MODE: Final = 0o644
REACHABLE_MODE: Final = 0o755
"""Mode of the ready file, which any process may read, and of a folder made for it."""


def make_folder(path: str | os.PathLike[str], mode: int = FOLDER_MODE) -> None:
    """Create the folder and its parents where missing, each with ``mode``.

    Existing folders keep their own mode.
    """
    missing = []
    at = os.path.abspath(path)
    while not os.path.isdir(at):
        missing.append(at)
        at = os.path.dirname(at)
    for folder in reversed(missing):
        _make_one(folder, mode)


def _make_one(folder: str, mode: int) -> None:
    try:
        os.mkdir(folder, mode)
    except FileExistsError:
        if not os.path.isdir(folder):
            raise
        return
    with contextlib.suppress(PermissionError):  # a file system that has no modes of its own
        os.chmod(folder, mode)


def create(path: str | os.PathLike[str], flags: int, mode: int = FILE_MODE) -> int:
    """Open a file for writing; a new one gets ``mode``, an existing one keeps its own."""
    try:
        fd = os.open(path, flags | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    except FileExistsError:
        return os.open(path, flags | os.O_CREAT | os.O_CLOEXEC, mode)
    try:
        os.fchmod(fd, mode)
    except PermissionError:  # a file system that has no modes of its own
        pass
    except BaseException:
        os.close(fd)
        raise
    return fd


def replace_file(path: Path, data: bytes, mode: int = FILE_MODE, folder_mode: int = FOLDER_MODE) -> None:
    """Replace ``path`` by a file with ``data`` and ``mode``, whole or not at all.

    Raises ``OSError``.
    """
    make_folder(path.parent, folder_mode)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with contextlib.suppress(FileNotFoundError):
        os.unlink(temporary)  # of a process with our pid that died here
    with open(create(temporary, os.O_WRONLY, mode), "wb") as file:
        file.write(data)
    os.replace(temporary, path)


class Filesystem(Protocol):
    """File operations on absolute or relative paths; every failure is an ``OSError``."""

    def make_dir(self, path: str) -> None:
        """Create the folder and its parents where missing."""

    def lock_dir(self, path: str) -> int:
        """Hold the folder for this process until ``close``.

        Raises ``BlockingIOError`` while another process holds it.
        """

    def list_dir(self, path: str) -> list[str]:
        """Names in the folder, in no order."""

    def fsync_dir(self, path: str) -> None:
        """Make the names in the folder durable."""

    def open_append(self, path: str) -> int:
        """Open for appending, created where missing."""

    def open_read(self, path: str) -> int:
        """Open for reading; raises ``FileNotFoundError``."""

    def write(self, fd: int, parts: tuple[bytes, ...]) -> int:
        """Append ``parts`` in one call and return the bytes taken.

        These may be fewer than given.
        """

    def read_at(self, fd: int, size: int, position: int) -> bytes:
        """Read up to ``size`` bytes from ``position``; fewer only at the end of the file."""

    def size(self, fd: int) -> int:
        """Number of bytes in the file."""

    def truncate(self, fd: int, size: int) -> None:
        """Cut the file to ``size`` bytes."""

    def fdatasync(self, fd: int) -> None:
        """Make the bytes (and the size) durable."""

    def close(self, fd: int) -> None:
        """Release the descriptor."""

    def rename(self, old: str, new: str) -> None:
        """Rename ``old`` to ``new`` atomically, replacing ``new``."""

    def unlink(self, path: str) -> None:
        """Remove a name; raises ``FileNotFoundError``."""

    def remove_dir(self, path: str) -> None:
        """Remove an empty folder."""

    def is_at(self, fd: int, path: str) -> bool:
        """Whether ``path`` still names the file or folder that ``fd`` holds open.

        The folder is one that ``lock_dir`` holds.
        """


class OsFiles:
    """Files of the operating system."""

    def make_dir(self, path: str) -> None:
        make_folder(path)

    def lock_dir(self, path: str) -> int:
        # On the folder itself: a lock file would be one more name to list, and one to leave behind.
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def list_dir(self, path: str) -> list[str]:
        return os.listdir(path)

    def fsync_dir(self, path: str) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def open_append(self, path: str) -> int:
        return create(path, os.O_RDWR | os.O_APPEND)

    def open_read(self, path: str) -> int:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def write(self, fd: int, parts: tuple[bytes, ...]) -> int:
        return os.writev(fd, parts)

    def read_at(self, fd: int, size: int, position: int) -> bytes:
        return os.pread(fd, size, position)

    def size(self, fd: int) -> int:
        return os.fstat(fd).st_size

    def truncate(self, fd: int, size: int) -> None:
        os.ftruncate(fd, size)

    def fdatasync(self, fd: int) -> None:
        # macOS has no fdatasync.
        (os.fdatasync if hasattr(os, "fdatasync") else os.fsync)(fd)

    def close(self, fd: int) -> None:
        os.close(fd)

    def rename(self, old: str, new: str) -> None:
        os.replace(old, new)

    def unlink(self, path: str) -> None:
        os.unlink(path)

    def remove_dir(self, path: str) -> None:
        os.rmdir(path)

    def is_at(self, fd: int, path: str) -> bool:
        try:
            named = os.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        held = os.fstat(fd)
        return (named.st_dev, named.st_ino) == (held.st_dev, held.st_ino)


class MemoryFiles:
    """Files in one process's memory.

    They are gone with the process, so a sync does nothing. Folders exist as soon as they are named.
    """

    def __init__(self) -> None:
        self._files: dict[str, bytearray] = {}
        self._open: dict[int, bytearray] = {}
        self._folders: set[int] = set()
        self._next_fd = 0

    def make_dir(self, path: str) -> None:
        """Nothing to do."""

    def lock_dir(self, path: str) -> int:
        fd = self._opened(bytearray())
        self._folders.add(fd)
        return fd

    def list_dir(self, path: str) -> list[str]:
        return [os.path.basename(name) for name in self._files if os.path.dirname(name) == path]

    def fsync_dir(self, path: str) -> None:
        """Nothing to do."""

    def open_append(self, path: str) -> int:
        return self._opened(self._files.setdefault(path, bytearray()))

    def open_read(self, path: str) -> int:
        if path not in self._files:
            raise FileNotFoundError(path)
        return self._opened(self._files[path])

    def write(self, fd: int, parts: tuple[bytes, ...]) -> int:
        for part in parts:
            self._open[fd] += part
        return sum(map(len, parts))

    def read_at(self, fd: int, size: int, position: int) -> bytes:
        return bytes(memoryview(self._open[fd])[position : position + size])

    def size(self, fd: int) -> int:
        return len(self._open[fd])

    def truncate(self, fd: int, size: int) -> None:
        del self._open[fd][size:]

    def fdatasync(self, fd: int) -> None:
        """Nothing to do."""

    def close(self, fd: int) -> None:
        del self._open[fd]
        self._folders.discard(fd)

    def rename(self, old: str, new: str) -> None:
        self._files[new] = self._files.pop(old)

    def unlink(self, path: str) -> None:
        if self._files.pop(path, None) is None:
            raise FileNotFoundError(path)

    def remove_dir(self, path: str) -> None:
        """Nothing to do."""

    def is_at(self, fd: int, path: str) -> bool:
        return fd in self._folders or self._files.get(path) is self._open[fd]

    def _opened(self, content: bytearray) -> int:
        self._next_fd += 1
        self._open[self._next_fd] = content
        return self._next_fd
