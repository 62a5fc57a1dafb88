"""Read files of schema version 1 as files of this version.

Version 1 had other names for some columns, and a stream's histogram of gaps as one encoded sketch.
A maintenance pass rewrites such files (``compaction.plan``); a rollup of version 1 is made again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final

import duckdb
import pyarrow as pa

from handrail.metrics.exponential_histogram import GapSketch
from handrail_collector.store.schema import Table

RENAMED: Final[Mapping[Table, Mapping[str, str]]] = {
    Table.KV_FETCHES: {
        "keeper_instance": "producer_instance",
        "keeper_host": "producer_host",
        "keeper_engine_id": "producer_engine_id",
        "keeper_request": "producer_request",
        "keeper_address": "producer_address",
        "reader_instance": "consumer_instance",
        "reader_host": "consumer_host",
        "reader_engine_id": "consumer_engine_id",
        "reader_request": "consumer_request",
    },
    Table.ITERATIONS: {"usual_ns": "median_ns"},
}
"""New name by the name of version 1."""

_SKETCH: Final = "gap_sketch"
_FUNCTION: Final = "gap_histogram_of_sketch"
_HISTOGRAM: Final = ("gap_sum_ns", "gap_min_ns", "gap_buckets", "gap_counts")
_LARGEST: Final = 2**31 - 1, 2**63 - 1


def is_outdated(table: Table, schema: int) -> bool:
    """Check whether files of this table and schema version have to be rewritten."""
    return schema < 2 and (table in RENAMED or table in (Table.REQUESTS, Table.ROLLUPS))


def upgraded(table: Table, schema: int, rows: pa.Table) -> pa.Table:
    """Convert the rows of a file to this version; other columns stay as they are."""
    if not is_outdated(table, schema):
        return rows
    names = RENAMED.get(table, {})
    rows = rows.rename_columns([names.get(name, name) for name in rows.column_names])
    if _SKETCH not in rows.column_names:
        return rows
    found = [_histogram(sketch) for sketch in rows[_SKETCH].to_pylist()]
    types = (pa.int64(), pa.int64(), pa.list_(pa.int32()), pa.list_(pa.int32()))
    for name, kind in zip(_HISTOGRAM, types, strict=True):
        rows = rows.append_column(name, pa.array([each[name] for each in found], kind))
    return rows.drop_columns([_SKETCH])


def expressions(table: Table, known: Collection[str]) -> dict[str, str]:
    """Return SQL for the columns that a file of version 1 has in another form.

    ``known``: the columns of that file.
    """
    found = {new: f'"{old}"' for old, new in RENAMED.get(table, {}).items() if old in known}
    if _SKETCH in known:
        found |= {name: f"{_FUNCTION}({_SKETCH}).{name}" for name in _HISTOGRAM}
    return found


def add_functions(connection: duckdb.DuckDBPyConnection) -> None:
    """Register the functions that ``expressions`` calls.

    Other connections to the same database may have done so.
    """
    kind = "STRUCT(gap_sum_ns BIGINT, gap_min_ns BIGINT, gap_buckets INTEGER[], gap_counts INTEGER[])"
    with contextlib.suppress(duckdb.CatalogException):
        functions: Any = connection  # its types know no name of a nested type
        functions.create_function(_FUNCTION, _histogram, ["BLOB"], kind, null_handling="special")


def _histogram(sketch: bytes | None) -> dict[str, Any]:
    """Decode a sketch of version 1; no gaps where it is missing or cannot be read."""
    gaps = GapSketch()
    if sketch is not None:
        try:
            gaps = GapSketch.decode(sketch)
        except ValueError:
            sketch = None
    count, time = _LARGEST
    buckets: Iterable[tuple[int, int]] = gaps.buckets().items()
    return {
        "gap_sum_ns": None if sketch is None else min(gaps.sum_ns, time),
        "gap_min_ns": gaps.min_ns,
        "gap_buckets": [bucket for bucket, _ in buckets],
        "gap_counts": [min(gaps_in, count) for _, gaps_in in buckets],
    }
