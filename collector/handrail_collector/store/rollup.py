"""Make the rollup of a file of requests: its cells and gap sketches.

Rollups give the first answer over many hours. This module has no side effects.
A rollup is valid as long as its file is in the store, and says the same as the rows of that file.
"""

from __future__ import annotations

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from handrail.metrics.exponential_histogram import GapSketch
from handrail_collector.store import files_query
from handrail_collector.store.gap_counts import GapCounts
from handrail_collector.store.layout import HOUR_NS
from handrail_collector.store.queries import aggregates
from handrail_collector.store.queries.aggregates import Measure, PeriodQuery
from handrail_collector.store.schema import ROLLUP_COLUMNS

Key = tuple[str, str | None]
"""Scope and model of a sketch."""


COLUMNS = aggregates.READ
"""Columns of ``requests`` that a rollup is made from; old files may lack some."""


def roll_up(requests: pa.Table, hour: int, threads: int = 1) -> pa.Table:
    """Make the rollup of the rows of a file of one hour.

    ``requests``: its ``COLUMNS``. ``hour``: counted since 1970. Of a request with two versions the newest counts.
    """
    with duckdb.connect(":memory:", config={"threads": threads, "autoinstall_known_extensions": False}) as connection:
        for name in ("touched", "newer"):
            connection.register(name, requests)
        table = aggregates.placed(aggregates.wanted(PeriodQuery(), {"touched": frozenset(requests.column_names)}, newer_than=0))
        parts = [
            _completed(files_query.answer(connection, aggregates.cells(table, measure)), measure, hour)
            for measure in (Measure.TTFT, Measure.GAP)
        ]
        merged = merge_sketches(files_query.answer(connection, aggregates.sketches(table)))
    # Without any, there is one empty sketch, so that a file with nothing but withdrawing rows is covered too.
    parts.append(_completed(_sketch_rows(merged or {("", None): GapSketch()}), Measure.SKETCH, hour))
    return pa.concat_tables(parts).combine_chunks()


def merge_sketches(rows: pa.Table) -> dict[Key, GapSketch]:
    """Merge sketches into one per scope and model.

    ``rows``: scope, model and gap_sketch of streams or of whole hours.
    """
    if not rows.num_rows:
        return {}
    encoded = rows.select(["scope", "model"]).combine_chunks()
    keys = list(zip(encoded["scope"].to_pylist(), encoded["model"].to_pylist(), strict=True))
    numbers: dict[Key, int] = {}
    group = np.fromiter((numbers.setdefault(key, len(numbers)) for key in keys), np.int64, len(keys))
    counts = GapCounts(len(numbers))
    counts.add(rows["gap_sketch"], group)
    return {key: counts.merged[number] for key, number in numbers.items() if counts.merged[number].count}


def sketches_of(rollups: pa.Table) -> dict[Key, GapSketch]:
    """Merge the sketches of rollups."""
    return merge_sketches(rollups.filter(pc.equal(rollups["measure"], Measure.SKETCH.value)))


def _sketch_rows(merged: dict[Key, GapSketch]) -> pa.Table:
    return pa.table(
        {
            "scope": pa.array([scope for scope, _ in merged], pa.string()),
            "model": pa.array([model for _, model in merged], pa.string()),
            "requests": pa.array([sketch.count for sketch in merged.values()], pa.int64()),
            "gap_sketch": pa.array([sketch.encode() for sketch in merged.values()], pa.binary()),
        }
    )


def _completed(table: pa.Table, measure: Measure, hour: int) -> pa.Table:
    rows = table.num_rows
    given = {"hour_unix_ns": pa.repeat(pa.scalar(hour * HOUR_NS, pa.int64()), rows), "measure": pa.repeat(measure.value, rows)}
    arrays = []
    for column in ROLLUP_COLUMNS:
        if column.name in given:
            arrays.append(given[column.name])
        elif column.name in table.column_names:
            arrays.append(table[column.name].cast(column.type))
        else:
            arrays.append(pa.nulls(rows, column.type))
    return pa.table(arrays, schema=pa.schema([(column.name, column.type) for column in ROLLUP_COLUMNS]))
