"""Define the folders of the store, and write files into them durably.

The rows of an hour lie in ``<table>/day=YYYY-MM-DD/hour=HH`` below the store's root. Times are UTC.
"""

from __future__ import annotations

import contextlib
import errno
import re
from collections.abc import Iterable, Iterator
from datetime import datetime, timezone
from pathlib import Path, PurePosixPath

from handrail.wal.filesystem import Filesystem
from handrail_collector.store.schema import Table

SUFFIX = ".parquet"

HOUR_NS = 3_600_000_000_000
DAY_NS = 24 * HOUR_NS
_SECOND_NS = 1_000_000_000
_DATA_PATH = re.compile(
    rf"(?:{'|'.join(table.value for table in Table)})/day=[0-9]{{4}}-[0-9]{{2}}-[0-9]{{2}}/hour=[0-9]{{2}}/"
    rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,199}}{re.escape(SUFFIX)}"
)


def hour_folder(table: Table, hour: int) -> PurePosixPath:
    """Return the folder of an hour, counted since 1970."""
    at = datetime.fromtimestamp(hour * HOUR_NS // _SECOND_NS, timezone.utc)
    return PurePosixPath(table.value, f"day={at:%Y-%m-%d}", f"hour={at:%H}")


def hour_of(path: str) -> int:
    """Return the hour, counted since 1970, of a file of the store.

    Raises ``ValueError`` for another path.
    """
    _, day, hour, _ = PurePosixPath(path).parts
    at = datetime.strptime(f"{day} {hour} +0000", "day=%Y-%m-%d hour=%H %z")
    return round(at.timestamp()) * _SECOND_NS // HOUR_NS


def day_of(path: str) -> int:
    """Return the day, counted since 1970, of a file of the store.

    Raises ``ValueError`` for another path.
    """
    return hour_of(path) * HOUR_NS // DAY_NS


def is_data_path(path: str) -> bool:
    """Check whether ``path`` is a valid path of a data file.

    A valid path has a table, a day, an hour, and a name of plain characters.
    """
    if _DATA_PATH.fullmatch(path) is None:
        return False
    try:
        hour_of(path)
    except ValueError:
        return False
    return True


def link_on_the_way(root: Path, paths: Iterable[str]) -> Path | None:
    """Find the first link below ``root`` that leads to one of ``paths``.

    A store has no links. ``root`` itself may be a link.
    """
    plain: set[Path] = set()
    for path in paths:
        at = root
        for step in PurePosixPath(path).parts:
            at = at / step
            if at not in plain:
                if at.is_symlink():
                    return at
                plain.add(at)
    return None


def files_below(root: Path) -> list[str]:
    """List every data file of a store, listed or not, temporary files included.

    Paths are relative to the store's root. Links are not followed.
    """
    found = (path for table in Table for path in root.glob(f"{table.value}/day=*/hour=*/*{SUFFIX}*"))
    paths = sorted(path.relative_to(root).as_posix() for path in found if path.name.endswith((SUFFIX, f"{SUFFIX}{TEMPORARY}")))
    return [path for path in paths if link_on_the_way(root, [path]) is None]


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
