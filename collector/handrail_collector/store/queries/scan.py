"""Read columns of the requests of a period, in batches.

This serves queries over all requests, for which one ``RequestRow`` each would be too slow.
The rows are those of ``StoreReader.requests``: each request in its highest version, without withdrawn requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, Final

import duckdb
import pyarrow as pa

from handrail_collector.store import sql
from handrail_collector.store.manifest import ManifestReader, StoredFile, files_of, locate
from handrail_collector.store.quarantine import QUERY_ERRORS, refusal
from handrail_collector.store.read import VERSION_MARGIN_NS
from handrail_collector.store.schema import Table

BATCH_ROWS: Final = 65_536


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Requests that began in [since, until), of one scope and one model; None: any."""

    since_unix_ns: int | None = None
    until_unix_ns: int | None = None
    scope: str | None = None
    model: str | None = None


@dataclass(frozen=True, slots=True)
class ScopeCount:
    """Number of requests of one scope, and when the first and the last began."""

    scope: str
    requests: int
    first_unix_ns: int
    last_unix_ns: int


def scopes(root: Path, wanted: Selection, threads: int = 2) -> list[ScopeCount]:
    """List the scopes of the selection, most requests first.

    Raises ``StoreDamagedError``.
    """
    batches = [batch.to_pydict().values() for batch in _answer(root, wanted, sql.scopes, threads, BATCH_ROWS)]
    return [ScopeCount(*row) for columns in batches for row in zip(*columns, strict=True)]


def columns(
    root: Path, wanted: Selection, names: Sequence[str], *, threads: int = 2, batch_rows: int = BATCH_ROWS
) -> Iterator[pa.RecordBatch]:
    """Read the columns ``names`` of the selection, in no order.

    Raises ``StoreDamagedError``.
    """
    yield from _answer(root, wanted, partial(sql.columns, names), threads, batch_rows)


def _answer(
    root: Path,
    wanted: Selection,
    requested_query: Callable[[Mapping[str, sql.Parameter], int | None], sql.SqlQuery],
    threads: int,
    batch_rows: int,
) -> Iterator[pa.RecordBatch]:
    """Run the query over the files of the period; empty when there are none."""
    every = files_of(ManifestReader(root).publishes(), Table.REQUESTS)
    files = [
        file
        for file in every
        if (wanted.since_unix_ns is None or file.max_unix_ns >= wanted.since_unix_ns)
        and (wanted.until_unix_ns is None or file.min_unix_ns < wanted.until_unix_ns)
    ]
    if not files:
        return
    base = min(file.min_version for file in every)
    first, last = min(f.min_unix_ns for f in files) - VERSION_MARGIN_NS, max(f.max_unix_ns for f in files) + VERSION_MARGIN_NS
    newer = [f for f in every if f.max_version > base and f.max_unix_ns >= first and f.min_unix_ns <= last]
    conditions = {field.name: getattr(wanted, field.name) for field in fields(Selection)}
    query = requested_query({name: value for name, value in conditions.items() if value is not None}, base if newer else None)
    parameters: dict[str, object] = dict(query.parameters)
    text = query.text
    for name, part in (("table", files), ("newer", newer)):
        if f"{{{name}}}" in text:
            text = text.replace(f"{{{name}}}", _relation(name, part))
            parameters[name] = [str(path) for path in locate(root, (file.path for file in part))]
    settings: dict[str, Any] = {"threads": threads, "autoinstall_known_extensions": False, "preserve_insertion_order": False}
    with closing(duckdb.connect(":memory:", config=settings)) as connection:
        try:
            yield from connection.sql(text, params=parameters).to_arrow_reader(batch_rows)
        except QUERY_ERRORS as error:
            raise refusal(error, root, [*files, *newer]) from error


def _relation(parameter: str, files: Sequence[StoredFile]) -> str:
    by_name = str(len({file.columns_crc for file in files}) > 1).lower()
    return f"read_parquet(${parameter}, hive_partitioning = false, union_by_name = {by_name})"
