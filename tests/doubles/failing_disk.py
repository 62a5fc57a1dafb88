"""Files on a real disk that stop at a chosen operation.

They stop as a killed process does, or as a machine that loses power.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from handrail.wal.filesystem import OsFiles


class StoppedError(BaseException):
    """Raised where the process would be gone: no code in it can handle this."""


class StoppingFiles(OsFiles):
    """``Files`` that stop before operation number ``stop_at``, counted from 0.

    A write stops in the middle.
    ``lose_power`` then undoes what was not durable: bytes after the last sync of their file, names after the last sync of their
    folder.
    """

    def __init__(self, stop_at: int | None = None) -> None:
        self.operations = 0
        self._stop_at = stop_at
        self._paths: dict[int, str] = {}
        self._durable_bytes: dict[str, int] = {}
        self._loose_names: list[tuple[str, Callable[[], object]]] = []  # folder, and how to undo the change

    def lose_power(self, names: bool = True) -> None:
        """Undo on the real disk what a power loss would undo.

        ``names``: also undo names that were not durable.
        """
        for path, size in self._durable_bytes.items():
            if os.path.exists(path):
                os.truncate(path, size)
        for _, take_back in reversed(self._loose_names if names else []):
            take_back()

    def make_dir(self, path: str) -> None:
        self._step()
        if not os.path.isdir(path):
            super().make_dir(path)
            self._changed(path, lambda: shutil.rmtree(path))

    def fsync_dir(self, path: str) -> None:
        self._step()
        super().fsync_dir(path)
        self._loose_names = [(folder, undo) for folder, undo in self._loose_names if folder != path]

    def open_append(self, path: str) -> int:
        self._step()
        if not os.path.exists(path):
            self._changed(path, lambda: os.unlink(path))
        fd = super().open_append(path)
        self._paths[fd] = path
        self._durable_bytes.setdefault(path, self.size(fd))
        return fd

    def write(self, fd: int, parts: tuple[bytes, ...]) -> int:
        data = b"".join(parts)
        if self.operations == self._stop_at:
            super().write(fd, (data[: len(data) // 2],))
        self._step()
        return super().write(fd, parts)

    def truncate(self, fd: int, size: int) -> None:
        self._step()
        super().truncate(fd, size)
        path = self._paths[fd]
        self._durable_bytes[path] = min(size, self._durable_bytes[path])

    def fdatasync(self, fd: int) -> None:
        self._step()
        super().fdatasync(fd)
        self._durable_bytes[self._paths[fd]] = self.size(fd)

    def rename(self, old: str, new: str) -> None:
        self._step()
        replaced = self._durable(new)
        super().rename(old, new)
        self._durable_bytes[new] = self._durable_bytes.pop(old)

        def take_back() -> None:
            os.rename(new, old)
            if replaced is not None:
                Path(new).write_bytes(replaced)

        self._changed(new, take_back)

    def unlink(self, path: str) -> None:
        self._step()
        removed = self._durable(path)
        super().unlink(path)
        self._durable_bytes.pop(path, None)
        self._changed(path, lambda: Path(path).write_bytes(removed or b""))

    def remove_dir(self, path: str) -> None:
        self._step()
        super().remove_dir(path)
        self._changed(path, lambda: os.mkdir(path))

    def _durable(self, path: str) -> bytes | None:
        """Return what of a file would survive; None when nothing would."""
        if not os.path.exists(path):
            return None
        return Path(path).read_bytes()[: self._durable_bytes.get(path)]

    def _changed(self, path: str, take_back: Callable[[], object]) -> None:
        self._loose_names.append((str(Path(path).parent), take_back))

    def _step(self) -> None:
        if self.operations == self._stop_at:
            raise StoppedError
        self.operations += 1
