"""Keep track of listed files that cannot be read.

Such a file is logged once and left out of maintenance.
A query that needs it fails and names it, because an answer without its rows would look complete.
The operator puts a copy in its place or renames it to ``<name>.damaged``.
A renamed file leaves the store at the next pass and stays on disk for inspection.
"""

from __future__ import annotations

import io
import logging
import zlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from handrail_collector.store.manifest import StoreDamagedError, StoredFile
from handrail_collector.store.upgrade import upgraded

log = logging.getLogger(__name__)

ASIDE = ".damaged"
ADVICE = f"restore it from a copy, or rename it to end in {ASIDE} to continue without its rows"

Stamp = tuple[int, int] | None
"""Size and modification time of a file; None when it does not exist."""


READ_ERRORS: Final = (pa.ArrowException, OSError, UnicodeDecodeError)  # UnicodeDecodeError: names of columns

QUERY_ERRORS: Final = (duckdb.Error, pa.ArrowInvalid)
"""Errors of a query over damaged files.

A wrong query over intact files raises them too; ``refusal`` tells the two apart.
"""


def columns_crc(names: Sequence[str]) -> int:
    """Compute ``StoredFile.columns_crc`` of a file with these columns."""
    return zlib.crc32(",".join(names).encode())


def refusal(error: Exception, root: Path, files: Sequence[StoredFile]) -> Exception:
    """Choose the exception to raise for a query error over ``files``.

    Returns ``StoreDamagedError`` with the name of a file when one is damaged, otherwise ``error`` itself.
    """
    what = str(error).partition("\n")[0]  # the rest is the text of the query, which helps nobody
    if not isinstance(error, (duckdb.IOException, duckdb.InvalidInputException, pa.ArrowInvalid)):  # these three name the file
        looks = (_footer_is_whole, _is_as_written)  # the second check reads the whole file
        damaged = next((file for whole in looks for file in files if not whole(root / file.path, file)), None)
        if damaged is None:
            return error
        what = f"{root / damaged.path}: {what}"
    return StoreDamagedError(f"{root}: {what}; {ADVICE}")


def _footer_is_whole(path: Path, file: StoredFile) -> bool:
    try:
        return columns_crc(pq.read_schema(path).names) == file.columns_crc
    except READ_ERRORS as error:
        if of_machine(error):
            raise
        return False


def _is_as_written(path: Path, file: StoredFile) -> bool:
    return file.crc is None or zlib.crc32(path.read_bytes()) == file.crc


def checked(file: StoredFile, data: bytes) -> pa.Table:
    """Read the rows of a file from its bytes ``data``.

    Raises ``READ_ERRORS`` when they are not the bytes that were written.
    The page checksums do not cover the footer, where one flipped bit turns a column into another.
    """
    if file.crc is not None and zlib.crc32(data) != file.crc:
        raise pa.ArrowInvalid("its checksum is wrong")
    return pq.ParquetFile(io.BytesIO(data), page_checksum_verification=True).read()


def read_checked(path: Path, columns: Sequence[str] | None = None) -> pa.Table:
    """Read the rows of a file.

    Raises ``READ_ERRORS`` when it cannot be read, or when a bit of what is read is flipped.
    Without page checksums, 234 of 300 single flipped bits were read as other values.
    """
    return pq.ParquetFile(path, page_checksum_verification=True).read(None if columns is None else list(columns))


def of_machine(error: Exception) -> bool:
    """Check whether the machine failed and not the file; the read is then tried again."""
    return isinstance(error, OSError) and bool(error.errno) and not isinstance(error, FileNotFoundError)


class DamagedFiles:
    """The files that are known to be damaged; for use in one thread.

    A file counts as damaged until its size or modification time changes.
    """

    def __init__(self, path: Callable[[StoredFile], Path]) -> None:
        self._path = path
        self._known: dict[str, Stamp] = {}

    def __len__(self) -> int:
        return len(self._known)

    def look(self, listed: Iterable[StoredFile]) -> list[StoredFile]:
        """Update the damaged files and return those that were set aside.

        Files that were repaired or left the store are forgotten. Missing files are added.
        """
        files = {file.path: file for file in listed}
        stamps = {path: stamp_of(self._path(file)) for path, file in files.items()}
        self._known = {path: stamp for path, stamp in self._known.items() if path in files and stamps[path] == stamp}
        missing = [file for path, file in files.items() if stamps[path] is None]
        aside = [file for file in missing if self._path(file).with_name(self._path(file).name + ASIDE).exists()]
        for file in missing:
            if file not in aside:
                self._found(file, "it is not there")
        return aside

    def knows(self, file: StoredFile) -> bool:
        """Check whether a file is known to be damaged."""
        return file.path in self._known

    def columns(self, file: StoredFile) -> list[str] | None:
        """Read the column names of a file; None when it cannot be read."""
        read = self._reading(file, lambda path: pq.read_schema(path).names)
        return None if read is None else list(read)

    def read(self, file: StoredFile, columns: Sequence[str] | None = None) -> pa.Table | None:
        """Read the rows of a file; None when it cannot be read.

        Whole rows are as of this schema version. Raises ``OSError`` when the machine fails and not the file.
        """
        if columns is None:
            return self._reading(file, lambda path: upgraded(file.table, file.schema, checked(file, path.read_bytes())))
        return self._reading(file, lambda path: read_checked(path, columns))

    def _reading(self, file: StoredFile, read: Callable[[Path], pa.Table]) -> pa.Table | None:
        if self.knows(file):
            return None
        try:
            return read(self._path(file))
        except READ_ERRORS as error:
            if of_machine(error):
                raise
            self._found(file, str(error))
            return None

    def _found(self, file: StoredFile, why: str) -> None:
        if not self.knows(file):
            path = self._path(file)
            self._known[file.path] = stamp_of(path)
            log.error("%s (%d rows) cannot be read: %s; %s", path, file.rows, why, ADVICE)


def stamp_of(path: Path) -> Stamp:
    """Return what distinguishes a file from another one of its name."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_size, found.st_mtime_ns
