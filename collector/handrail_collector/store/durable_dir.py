"""Write files and folders below one root so that they are on disk on return."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from pathlib import Path

from handrail.wal.filesystem import Filesystem

TEMPORARY = ".tmp"


class DurableDir:
    """The files that one process writes below ``root``.

    There is no lock: the owner's calls do not overlap where they touch the same names.
    """

    def __init__(self, root: Path, files: Filesystem) -> None:
        self.root = root
        self.files = files
        self._made: set[Path] = set()

    def make_root(self) -> None:
        """Make the root and its parents."""
        for folder in (*reversed([each for each in self.root.parents if not each.exists()]), self.root):
            self._make(folder)

    def make(self, below: str) -> None:
        """Make a folder below the root and its parents; ``below`` uses ``/``.

        Raises ``OSError`` when one of them is a link.
        """
        folder = self.root
        for step in Path(below).parts:
            folder = folder / step
            if folder not in self._made and folder.is_symlink():
                raise OSError(errno.ELOOP, "is a link, which may point out of the store", str(folder))
            self._make(folder)

    def remove_if_empty(self, below: str) -> None:
        """Remove a folder if it is empty.

        The caller makes sure that nobody is about to write there.
        """
        folder = self.root / below
        if folder.is_dir() and not any(folder.iterdir()):
            self._made.discard(folder)
            self.files.remove_dir(str(folder))

    def _make(self, folder: Path) -> None:
        """Make a folder and sync its name to disk, once per process.

        An existing folder is synced too: a crash may have left it without its sync.
        """
        if folder not in self._made:
            self.files.make_dir(str(folder))
            self.files.fsync_dir(str(folder.parent))
            self._made.add(folder)

    def put(self, path: Path, data: bytes) -> None:
        """Write a whole file under its name, or none.

        The name is durable once the caller has synced the folder.
        """
        temporary = f"{path}{TEMPORARY}"
        with self.opened(temporary) as handle:
            self.files.truncate(handle, 0)  # an earlier attempt may have left bytes
            self.write_all(handle, data)
            self.files.fdatasync(handle)
        self.files.rename(temporary, str(path))

    def read(self, path: Path) -> bytes:
        """Read a whole file; empty when the file does not exist."""
        try:
            handle = self.files.open_read(str(path))
        except FileNotFoundError:
            return b""
        try:
            return self.files.read_at(handle, self.files.size(handle), 0)
        finally:
            self.files.close(handle)

    @contextlib.contextmanager
    def opened(self, path: str) -> Iterator[int]:
        """Open a file to append to and close it afterwards."""
        handle = self.files.open_append(path)
        try:
            yield handle
        finally:
            self.files.close(handle)

    def write_all(self, handle: int, data: bytes) -> None:
        """Write every byte of ``data``."""
        left = memoryview(data)
        while left:
            left = left[self.files.write(handle, (bytes(left),)) :]
