"""``Files`` whose chosen operations fail until they are healed, on a bounded disk."""

from __future__ import annotations

import errno
import os

from handrail.wal.filesystem import Filesystem, MemoryFiles

KINDS = (errno.EMFILE, errno.ENFILE, errno.ENOSPC, errno.EIO, errno.EROFS, errno.ENOENT)
"""Errors for which every caller has a rule."""

NAMES = tuple(errno.errorcode[code] for code in KINDS)


def failure(code: int) -> OSError:
    """Build the exception that the operating system raises for an errno."""
    return OSError(code, os.strerror(code))


class FailingFiles:
    """A ``Files`` over another one, with failing operations.

    ``failing``: errno by operation; every call of the operation fails until its entry is removed.
    ``capacity``: the total bytes that a ``MemoryFiles`` accepts, including unlinked files that are still open.
    """

    def __init__(self, inner: Filesystem | None = None, capacity: int | None = None) -> None:
        self.inner: Filesystem = inner or MemoryFiles()
        self.failing: dict[str, int] = {}
        self.failures = 0
        self.capacity = capacity

    def make_dir(self, path: str) -> None:
        self._may_fail("make_dir")
        self.inner.make_dir(path)

    def lock_dir(self, path: str) -> int:
        self._may_fail("lock_dir")
        return self.inner.lock_dir(path)

    def list_dir(self, path: str) -> list[str]:
        self._may_fail("list_dir")
        return self.inner.list_dir(path)

    def fsync_dir(self, path: str) -> None:
        self._may_fail("fsync_dir")
        self.inner.fsync_dir(path)

    def open_append(self, path: str) -> int:
        self._may_fail("open_append")
        return self.inner.open_append(path)

    def open_read(self, path: str) -> int:
        self._may_fail("open_read")
        return self.inner.open_read(path)

    def write(self, fd: int, parts: tuple[bytes, ...]) -> int:
        self._may_fail("write")
        data = b"".join(parts)
        if self.capacity is not None:
            room = self.capacity - self._used()
            if room <= 0:
                raise failure(errno.ENOSPC)
            data = data[:room]
        return self.inner.write(fd, (data,))

    def read_at(self, fd: int, size: int, position: int) -> bytes:
        self._may_fail("read_at")
        return self.inner.read_at(fd, size, position)

    def size(self, fd: int) -> int:
        self._may_fail("size")
        return self.inner.size(fd)

    def truncate(self, fd: int, size: int) -> None:
        self._may_fail("truncate")
        self.inner.truncate(fd, size)

    def fdatasync(self, fd: int) -> None:
        self._may_fail("fdatasync")
        self.inner.fdatasync(fd)

    def close(self, fd: int) -> None:
        self.inner.close(fd)

    def rename(self, old: str, new: str) -> None:
        self._may_fail("rename")
        self.inner.rename(old, new)

    def unlink(self, path: str) -> None:
        self._may_fail("unlink")
        self.inner.unlink(path)

    def remove_dir(self, path: str) -> None:
        self._may_fail("remove_dir")
        self.inner.remove_dir(path)

    def is_at(self, fd: int, path: str) -> bool:
        self._may_fail("is_at")
        return self.inner.is_at(fd, path)

    def _used(self) -> int:
        assert isinstance(self.inner, MemoryFiles)
        contents = [*self.inner._files.values(), *self.inner._open.values()]
        return sum(len(content) for content in {id(content): content for content in contents}.values())

    def _may_fail(self, operation: str) -> None:
        if operation in self.failing:
            self.failures += 1
            raise failure(self.failing[operation])
