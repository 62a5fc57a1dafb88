"""Listed files that cannot be read: told once, left out of upkeep, and how a person takes one out of the store.

A question that needs such a file fails and names it: an answer without its rows would look whole. Whoever has no copy to put in
its place renames it to ``<name>.damaged``; then it leaves the store at the next pass, and the file stays for a look into it.
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

log = logging.getLogger(__name__)

ASIDE = ".damaged"
ADVICE = f"put a copy in its place, or rename it to end in {ASIDE} to go on without its rows"

Stamp = tuple[int, int] | None
"""Size and time of change of a file; None where there is none."""


READ_ERRORS: Final = (pa.ArrowException, OSError, UnicodeDecodeError)  # the last: names of columns

QUERY_ERRORS: Final = (duckdb.Error, pa.ArrowInvalid)
"""What a question over damaged files raises; and one over good ones, where it is wrong: see ``refusal``."""


def columns_crc(names: Sequence[str]) -> int:
    """``StoredFile.columns_crc`` of a file with these columns."""
    return zlib.crc32(",".join(names).encode())


def refusal(error: Exception, root: Path, files: Sequence[StoredFile]) -> Exception:
    """What to raise for ``error`` of a question over ``files``: damage, which names a file; ``error`` itself where it is none."""
    what = str(error).partition("\n")[0]  # the query that follows helps nobody
    if not isinstance(error, (duckdb.IOException, duckdb.InvalidInputException, pa.ArrowInvalid)):  # those name the file
        looks = (_footer_is_whole, _is_as_written)  # the second reads all of it
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
    """The rows of a file whose bytes are ``data``. Raises ``READ_ERRORS`` where they are not those that were written.

    The checksums of pages say nothing of the footer: a bit there makes a column another one.
    """
    if file.crc is not None and zlib.crc32(data) != file.crc:
        raise pa.ArrowInvalid("its checksum is wrong")
    return pq.ParquetFile(io.BytesIO(data), page_checksum_verification=True).read()


def read_checked(path: Path, columns: Sequence[str] | None = None) -> pa.Table:
    """The rows of a file. Raises ``READ_ERRORS`` where it cannot be read, a turned bit in what is read included.

    Of 300 bits turned one by one, 234 were read as other values where the checksums of the pages were not looked at.
    """
    return pq.ParquetFile(path, page_checksum_verification=True).read(None if columns is None else list(columns))


def of_machine(error: Exception) -> bool:
    """Whether it is the machine that fails, and not a file: it is tried again."""
    return isinstance(error, OSError) and bool(error.errno) and not isinstance(error, FileNotFoundError)


class DamagedFiles:
    """What is known of them, in one thread. A file counts as damaged until it is another one."""

    def __init__(self, path: Callable[[StoredFile], Path]) -> None:
        self._path = path
        self._known: dict[str, Stamp] = {}

    def __len__(self) -> int:
        return len(self._known)

    def look(self, listed: Iterable[StoredFile]) -> list[StoredFile]:
        """Forget those that were repaired or have left the store, notice missing ones; those that were put aside."""
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
        """Whether it was found to be damaged."""
        return file.path in self._known

    def columns(self, file: StoredFile) -> list[str] | None:
        """Its columns; None where it cannot be read."""
        read = self._reading(file, lambda path: pq.read_schema(path).names)
        return None if read is None else list(read)

    def read(self, file: StoredFile, columns: Sequence[str] | None = None) -> pa.Table | None:
        """Its rows; None where it cannot be read. Raises ``OSError`` where the machine fails and not the file."""
        if columns is None:
            return self._reading(file, lambda path: checked(file, path.read_bytes()))
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
    """What tells a file from another of its name."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_size, found.st_mtime_ns
