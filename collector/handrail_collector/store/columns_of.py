"""Columns of the requests of a period, in batches: for questions over all of them, where a ``RequestRow`` each would be too slow.

The same rows as ``StoreReader.requests`` gives: of each request the highest version, and none that was withdrawn.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import duckdb
import pyarrow as pa

from handrail_collector.rows import MERGED
from handrail_collector.store.manifest import ManifestReader, StoreDamagedError, StoredFile, files_of
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
    """How many requests of one scope, and when the first and the last of them began."""

    scope: str
    requests: int
    first_unix_ns: int
    last_unix_ns: int


@dataclass(frozen=True, slots=True)
class _Question:
    """``text`` reads ``files``, and ``newer``: those that may hold later versions of rows in them."""

    text: str
    parameters: dict[str, object]


def scopes(root: Path, wanted: Selection, threads: int = 2) -> list[ScopeCount]:
    """The scopes of the selection, most requests first. Raises ``StoreDamagedError``."""
    counted = "scope, count(*), min(started_unix_ns), max(started_unix_ns)"
    question = _question(root, wanted, counted, "GROUP BY scope ORDER BY count(*) DESC, scope")
    if question is None:
        return []
    batches = [batch.to_pydict().values() for batch in _answer(root, question, threads, BATCH_ROWS)]
    return [ScopeCount(*row) for columns in batches for row in zip(*columns, strict=True)]


def columns(
    root: Path, wanted: Selection, names: Sequence[str], *, threads: int = 2, batch_rows: int = BATCH_ROWS
) -> Iterator[pa.RecordBatch]:
    """The columns ``names`` of the selection, in no order. Raises ``StoreDamagedError``."""
    question = _question(root, wanted, ", ".join(f't."{name}"' for name in names), "")
    if question is not None:
        yield from _answer(root, question, threads, batch_rows)


def _question(root: Path, wanted: Selection, selected: str, ending: str) -> _Question | None:
    """None where the store has nothing of that time."""
    every = files_of(ManifestReader(root).publishes(), Table.REQUESTS)
    files = [
        file
        for file in every
        if (wanted.since_unix_ns is None or file.max_unix_ns >= wanted.since_unix_ns)
        and (wanted.until_unix_ns is None or file.min_unix_ns < wanted.until_unix_ns)
    ]
    if not files:
        return None
    parameters: dict[str, object] = {"files": [str(root / file.path) for file in files]}
    conditions = [f"t.scope <> '{MERGED}'"]
    for name, condition in _CONDITIONS.items():
        if (value := getattr(wanted, name)) is not None:
            parameters[name] = value
            conditions.append(condition)
    relation, before, joined = _relation("files", files), "", ""
    base = min(file.min_version for file in every)
    first, last = min(f.min_unix_ns for f in files) - VERSION_MARGIN_NS, max(f.max_unix_ns for f in files) + VERSION_MARGIN_NS
    newer = [f for f in every if f.max_version > base and f.max_unix_ns >= first and f.min_unix_ns <= last]
    if newer:
        parameters |= {"newer_files": [str(root / file.path) for file in newer], "base_version": base}
        before = (
            f"WITH newest AS (SELECT trace_id, request_id, max(version) AS newest_version FROM {_relation('newer_files', newer)}"
            " WHERE version > $base_version GROUP BY ALL) "
        )
        joined = " LEFT JOIN newest AS n ON t.trace_id = n.trace_id AND t.request_id = n.request_id"
        conditions.append("(n.newest_version IS NULL OR t.version >= n.newest_version)")
    text = f"{before}SELECT {selected} FROM {relation} AS t{joined} WHERE {' AND '.join(conditions)} {ending}"
    return _Question(text, parameters)


_CONDITIONS: Final = {
    "since_unix_ns": "t.started_unix_ns >= $since_unix_ns",
    "until_unix_ns": "t.started_unix_ns < $until_unix_ns",
    "scope": "t.scope = $scope",
    "model": "t.model = $model",
}


def _relation(parameter: str, files: Sequence[StoredFile]) -> str:
    by_name = str(len({file.columns_crc for file in files}) > 1).lower()
    return f"read_parquet(${parameter}, hive_partitioning = false, union_by_name = {by_name})"


def _answer(root: Path, question: _Question, threads: int, batch_rows: int) -> Iterator[pa.RecordBatch]:
    settings: dict[str, Any] = {"threads": threads, "autoinstall_known_extensions": False, "preserve_insertion_order": False}
    with closing(duckdb.connect(":memory:", config=settings)) as connection:
        try:
            yield from connection.sql(question.text, params=question.parameters).to_arrow_reader(batch_rows)
        except (duckdb.IOException, duckdb.InvalidInputException, pa.ArrowInvalid) as error:
            raise StoreDamagedError(f"{root}: {error}") from error
