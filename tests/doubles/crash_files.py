"""In-memory files on a simulated disk that can lose power

After a power loss, each name and each byte that was not synced may be gone, cut anywhere, or zero.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from handrail.wal.filesystem import MemoryFiles


class PowerLost(Exception):  # noqa: N818 - an event, not a fault
    """Raised in place of an operation when the simulated machine loses power."""


class CrashFiles(MemoryFiles):
    """``MemoryFiles`` that know what a power loss would keep.

    ``refuse`` makes the next call of an operation fail.
    When ``operations_left`` is 0, the disk loses power before the next operation that changes anything.
    """

    def __init__(self) -> None:
        super().__init__()
        self._durable_bytes: dict[int, bytes] = {}  # by identity of the content, which the two tables below keep alive
        self._durable_names: dict[str, bytearray] = {}
        self._locked: set[str] = set()
        self.refuse: dict[str, OSError] = {}
        self.short_writes = False
        self.operations_left: int | None = None

    def lock_dir(self, path: str) -> int:
        if path in self._locked:
            raise BlockingIOError(path)
        self._locked.add(path)
        fd = super().lock_dir(path)
        self._lock_fd, self._lock_path = fd, path
        return fd

    def close(self, fd: int) -> None:
        if fd == self._lock_fd:
            self._locked.discard(self._lock_path)
        super().close(fd)

    def fsync_dir(self, path: str) -> None:
        self._fail("fsync_dir")
        kept = {name: content for name, content in self._durable_names.items() if os.path.dirname(name) != path}
        now = {name: content for name, content in self._files.items() if os.path.dirname(name) == path}
        self._durable_names = {**kept, **now}

    def fdatasync(self, fd: int) -> None:
        self._fail("fdatasync")
        content = self._open[fd]
        self._durable_bytes[id(content)] = bytes(content)

    def write(self, fd: int, parts: tuple[bytes, ...]) -> int:
        if self.short_writes:
            data = b"".join(parts)
            half = max(1, len(data) // 2)
            super().write(fd, (data[:half],))
            self._fail("write")
            return half
        self._fail("write")
        return super().write(fd, parts)

    def truncate(self, fd: int, size: int) -> None:
        self._fail("truncate")
        super().truncate(fd, size)

    def open_append(self, path: str) -> int:
        self._fail("open_append")
        return super().open_append(path)

    def rename(self, old: str, new: str) -> None:
        self._fail("rename")
        super().rename(old, new)

    def unlink(self, path: str) -> None:
        self._fail("unlink")
        super().unlink(path)

    def damage(self, path: str, position: int, count: int = 1) -> None:
        """Flip every bit of ``count`` bytes, as bit rot does."""
        content = self._files[path]
        content[position : position + count] = bytes(byte ^ 0xFF for byte in content[position : position + count])

    def crash(self, choose: Callable[[int], int]) -> None:
        """Lose power: drop part of what was not synced.

        ``choose(n)`` returns 0 to n: what the disk loses at each point where it is free to lose something.
        """
        names = dict(self._durable_names)
        for name in sorted({*self._files, *self._durable_names}):
            if self._files.get(name) is not self._durable_names.get(name) and choose(1):
                if name in self._files:
                    names[name] = self._files[name]
                else:
                    del names[name]
        self._files = {name: bytearray(self._survives(content, choose)) for name, content in names.items()}
        self._durable_names = dict(self._files)
        self._durable_bytes = {id(content): bytes(content) for content in self._files.values()}
        self._open.clear()
        self._locked.clear()
        self.operations_left = None

    def _survives(self, content: bytearray, choose: Callable[[int], int]) -> bytes:
        durable = self._durable_bytes.get(id(content), b"")
        if not content.startswith(durable):
            return (durable, bytes(content))[choose(1)]
        loose = bytes(content[len(durable) :])
        kept = choose(len(loose)) if loose else 0
        lost = len(loose) - kept
        return (
            durable
            + (
                loose[:kept],  # the tail never reached the disk
                loose[:kept] + bytes(lost),  # the length reached the disk, the tail did not
                bytes(kept) + loose[kept:],  # the later pages reached the disk, the earlier ones did not
            )[choose(2)]
        )

    def _fail(self, operation: str) -> None:
        if self.operations_left is not None:
            if self.operations_left == 0:
                raise PowerLost(operation)
            self.operations_left -= 1
        if operation in self.refuse:
            raise self.refuse.pop(operation)
