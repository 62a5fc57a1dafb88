"""Answer a period from rollups where possible, elsewhere from files of requests.

An unreadable rollup is not used; the rows of its file are.
The same holds for a rollup of a file with rows that a later version in another file replaces.
That other file can only be one without a rollup (``rollups.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import duckdb
import pyarrow as pa

from handrail_collector.store import files_query
from handrail_collector.store.files_query import ParquetFiles
from handrail_collector.store.manifest import StoredFile
from handrail_collector.store.quarantine import READ_ERRORS, read_checked
from handrail_collector.store.queries import aggregates
from handrail_collector.store.read import StoreReader, newer_files
from handrail_collector.store.rolling import covered, split
from handrail_collector.store.schema import Table

SKETCH_COLUMNS: Final = ("scope", "model", "measure", "gap_sketch")


@dataclass(frozen=True, slots=True)
class Rolled:
    """Rollups of a period, and the files of requests for the rest of it.

    ``rollups``: the rows of ``files`` rollups, None when there are none. ``rest``: files of requests.
    """

    rollups: pa.Table | None
    files: int
    rest: tuple[StoredFile, ...]


def rolled(
    reader: StoreReader,
    cursor: duckdb.DuckDBPyConnection,
    files: Sequence[StoredFile],
    since_unix_ns: int,
    until_unix_ns: int,
    columns: Sequence[str] | None = None,
) -> Rolled:
    """Read the rollups of [since, until) and select the files for the rest.

    Raises DuckDB's errors for files of requests that are needed and cannot be read.
    """
    parts = split(files, since_unix_ns, until_unix_ns)
    read = {file.path: _read(path, columns) for file, path in zip(parts.rollups, reader.paths(parts.rollups), strict=True)}
    by_rows = {file.covers for file in parts.rollups if read[file.path] is None}
    if len(by_rows) < len(read):
        by_rows |= _replaced(reader, cursor, files, {file.covers for file in parts.rollups})
    if by_rows:
        parts = split(files, since_unix_ns, until_unix_ns, by_rows)
    tables = [read[file.path] for file in parts.rollups]
    return Rolled(pa.concat_tables(tables, promote_options="default") if tables else None, len(tables), parts.requests)


def _read(path: Path, columns: Sequence[str] | None) -> pa.Table | None:
    try:
        return read_checked(path, columns)
    except READ_ERRORS:
        return None  # the collector logs it and makes it again


def _replaced(
    reader: StoreReader, cursor: duckdb.DuckDBPyConnection, files: Sequence[StoredFile], answering: set[str]
) -> set[str]:
    """Select files whose rollups are outdated.

    Such a file is in ``answering`` and holds a row with a later version in a file without a rollup.
    """
    requests = [file for file in files if file.table is Table.REQUESTS]
    those = [file for file in requests if file.path in answering]
    has_rollup = covered(files)
    newer, base = newer_files(requests, min(file.min_unix_ns for file in those), max(file.max_unix_ns for file in those))
    if all(file.path in has_rollup for file in newer):
        return set()
    loose = [file for file in requests if file.path not in has_rollup]
    _bind(reader, cursor, "newer", loose)
    later = files_query.answer(cursor, aggregates.later_versions(base))
    if not later.num_rows:
        return set()
    cursor.register("later", later)
    _bind(reader, cursor, "requests", those)
    names = set(files_query.answer(cursor, aggregates.holding_earlier())["filename"].to_pylist())
    return {file.path for file, path in zip(those, reader.paths(those), strict=True) if str(path) in names}


def _bind(reader: StoreReader, cursor: duckdb.DuckDBPyConnection, name: str, files: Sequence[StoredFile]) -> None:
    alike = len({file.columns_crc for file in files}) <= 1
    files_query.bind(cursor, {name: ParquetFiles(reader.paths(files), alike=alike, named=True)})
