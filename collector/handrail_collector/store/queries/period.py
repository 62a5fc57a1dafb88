"""Read the figures of a period for ``handrail explain``.

They are its cells, quantiles, gap sketches and, one by one, its slow requests.
The *first* answer takes whole hours from rollups and the rest from rows; its times are exact to 2 %.
The *exact* answer reads every row. When no hour has a rollup there is only the exact answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import duckdb
import pyarrow as pa

from handrail.metrics.exponential_histogram import GapSketch
from handrail_collector.store import files_query
from handrail_collector.store.files_query import ParquetFiles
from handrail_collector.store.manifest import StoreDamagedError, StoredFile
from handrail_collector.store.quarantine import ADVICE, QUERY_ERRORS, refusal
from handrail_collector.store.queries import aggregates
from handrail_collector.store.queries.aggregates import Measure, PeriodQuery, Thresholds
from handrail_collector.store.read import StoreReader, newer_files
from handrail_collector.store.rolled import SKETCH_COLUMNS, Rolled, rolled
from handrail_collector.store.rolling import split
from handrail_collector.store.rollup import merge_sketches, sketches_of
from handrail_collector.store.schema import Table
from handrail_collector.store.stall_counts import NO_STALLS, stall_counts

RANKS: Final = (0.25, 0.5, 0.75, 0.9, 0.99, 0.999)
"""Ranks of the quantiles that are computed.

Times from ``SLOW_RANK`` on are slow. Times from the first to the third quantile are usual.
"""

SLOW_RANK: Final = 0.99
SAMPLE_ROWS: Final = 120_000
"""Approximate number of requests that are sampled to learn what is typical."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantiles:
    """Number of values of one scope and measure, and the values at ``RANKS``."""

    counted: int
    values_ns: tuple[int, ...]

    @property
    def cuts(self) -> Thresholds:
        """Bounds of usual and slow times."""
        at = dict(zip(RANKS, self.values_ns, strict=True))
        return Thresholds(at[0.25], at[0.75], at[SLOW_RANK])


@dataclass(frozen=True, slots=True, kw_only=True)
class PeriodData:
    """The figures of a period.

    ``quantiles``: None when the bins of the cells give them.
    ``tail_and_sample``: slow and sampled requests one by one, None in the first answer.
    ``rolled_hours``: how many hours came from rollups.
    """

    of: PeriodQuery
    exact: bool
    ttft_cells: pa.Table
    gap_cells: pa.Table
    sketches: Mapping[str, GapSketch]  # by scope
    quantiles: Mapping[Measure, Mapping[str, Quantiles]] | None
    tail_and_sample: pa.Table | None
    rolled_hours: int
    stalls: pa.Table  # see ``store.stall_counts``


def latest_unix_ns(reader: StoreReader, now_unix_ns: int) -> int | None:
    """Return when the latest stored request began; None when there is none.

    Requests of clocks that are ahead count as of now.
    """
    return reader.latest(Table.REQUESTS, now_unix_ns)


def models(reader: StoreReader, of: PeriodQuery) -> list[str]:
    """List every model that the requests of the period name.

    Raises ``StoreDamagedError``.
    """
    assert of.since_unix_ns is not None
    assert of.until_unix_ns is not None
    files = [file for publish in reader.publishes() for file in publish.files if file.table is Table.REQUESTS]
    wanted = split(files, of.since_unix_ns, of.until_unix_ns).requests
    if not wanted:
        return []
    with _asking(reader, wanted) as cursor:
        known = files_query.bind(cursor, {"requests": _files(reader, wanted)})
        return sorted(files_query.answer(cursor, aggregates.models(of, known))["model"].to_pylist())


def load_period(reader: StoreReader, of: PeriodQuery, *, fast: bool) -> PeriodData:
    """Compute the first answer (``fast``) or the exact one.

    Both times of ``of`` must be set. Raises ``StoreDamagedError``.
    """
    assert of.since_unix_ns is not None
    assert of.until_unix_ns is not None
    files = [file for publish in reader.publishes() for file in publish.files]
    with _asking(reader, files) as cursor:
        by_hours = rolled(reader, cursor, files, of.since_unix_ns, of.until_unix_ns, None if fast else SKETCH_COLUMNS)
        if fast and by_hours.rollups is not None:
            found = _first(_Rows.bound(reader, cursor, of, files, by_hours.rest), of, by_hours)
        else:
            every = split([file for file in files if file.table is Table.REQUESTS], of.since_unix_ns, of.until_unix_ns).requests
            found = _exact(_Rows.bound(reader, cursor, of, files, every), of, by_hours)
    by_scope = found.quantiles[Measure.GAP] if found.quantiles else {}
    return replace(found, stalls=stall_counts(reader, of, {scope: each.cuts.slow_from_ns for scope, each in by_scope.items()}))


@contextmanager
def _asking(reader: StoreReader, files: Sequence[StoredFile]) -> Iterator[duckdb.DuckDBPyConnection]:
    """Open a cursor for one query, and turn read errors into ``StoreDamagedError``."""
    cursor = reader.cursor()
    try:
        yield cursor
    except OSError as error:
        raise StoreDamagedError(f"{reader.root}: {str(error).partition(chr(10))[0]}; {ADVICE}") from error
    except QUERY_ERRORS as error:
        raise refusal(error, reader.root, files) from error
    finally:
        cursor.close()


@dataclass(frozen=True, slots=True)
class _Rows:
    """Files of requests as a table of placed rows; None when there are no files."""

    reader: StoreReader
    cursor: duckdb.DuckDBPyConnection
    every: Sequence[StoredFile]
    table: aggregates.Expression | None

    @classmethod
    def bound(
        cls,
        reader: StoreReader,
        cursor: duckdb.DuckDBPyConnection,
        of: PeriodQuery,
        every: Sequence[StoredFile],
        files: Sequence[StoredFile],
    ) -> _Rows:
        every = [file for file in every if file.table is Table.REQUESTS]
        if not files:
            return cls(reader, cursor, every, None)
        newer, base = newer_files(every, min(file.min_unix_ns for file in files), max(file.max_unix_ns for file in files))
        touched: set[Path] = set()
        if newer:
            files_query.bind(cursor, {"requests": _files(reader, files, named=True), "newer": _files(reader, newer)})
            touched = {Path(name) for name in files_query.answer(cursor, aggregates.superseded(of, base))["filename"].to_pylist()}
        clean = [file for file, path in zip(files, reader.paths(files), strict=True) if path not in touched]
        rest = [file for file in files if file not in clean]
        tables = {name: _files(reader, part) for name, part in (("requests", clean), ("touched", rest)) if part}
        known = files_query.bind(cursor, tables)
        return cls(reader, cursor, every, aggregates.placed(aggregates.wanted(of, known, newer_than=base)))

    def of(self, of: PeriodQuery, files: Sequence[StoredFile]) -> _Rows:
        """Bind the same tables for some of the files only."""
        return _Rows.bound(self.reader, self.cursor, of, self.every, files)

    def answer(self, made: aggregates.Expression) -> pa.Table:
        return files_query.answer(self.cursor, made)


def _first(rows: _Rows, of: PeriodQuery, by_hours: Rolled) -> PeriodData:
    rows.cursor.register("rollups", by_hours.rollups)
    found = {}
    for measure in (Measure.TTFT, Measure.GAP):
        found[measure] = [rows.answer(aggregates.rolled(of, measure))]
        if rows.table is not None:
            found[measure].append(rows.answer(aggregates.cells(rows.table, measure)))
    return PeriodData(
        of=of,
        exact=False,
        ttft_cells=_together(found[Measure.TTFT]),
        gap_cells=_together(found[Measure.GAP]),
        sketches=_sketches(rows, of, by_hours.rollups),
        quantiles=None,
        tail_and_sample=None,
        rolled_hours=by_hours.files,
        stalls=NO_STALLS,
    )


def _exact(rows: _Rows, of: PeriodQuery, by_hours: Rolled) -> PeriodData:
    if rows.table is None:
        empty = pa.table({name: pa.array([], pa.string()) for name in (*aggregates.DIMENSIONS, "part")})
        return PeriodData(
            of=of,
            exact=True,
            ttft_cells=empty,
            gap_cells=empty,
            sketches={},
            quantiles={},
            tail_and_sample=None,
            rolled_hours=0,
            stalls=NO_STALLS,
        )
    quantiles = _quantiles(rows.answer(aggregates.quantiles(rows.table, RANKS)))
    cuts = {measure: {scope: each.cuts for scope, each in found.items()} for measure, found in quantiles.items()}
    timed = sum(each.counted for each in quantiles[Measure.TTFT].values())
    ttft, gap = (rows.answer(aggregates.cells(rows.table, measure, cuts[measure])) for measure in (Measure.TTFT, Measure.GAP))
    tail_and_sample = rows.answer(aggregates.tail_and_sample(rows.table, cuts[Measure.TTFT], max(1, timed // SAMPLE_ROWS)))
    return PeriodData(
        of=of,
        exact=True,
        ttft_cells=ttft,
        gap_cells=gap,
        sketches=_sketches(rows.of(of, by_hours.rest), of, by_hours.rollups),  # merging the sketches of hours is lossless
        quantiles=quantiles,
        tail_and_sample=tail_and_sample,
        rolled_hours=0,
        stalls=NO_STALLS,
    )


def _quantiles(table: pa.Table) -> dict[Measure, dict[str, Quantiles]]:
    found: dict[Measure, dict[str, Quantiles]] = {measure: {} for measure in aggregates.VALUE}
    for row in table.to_pylist():
        for measure, by_scope in found.items():
            if values := row[f"{measure.value}_values"]:
                by_scope[row["scope"]] = Quantiles(counted=row[f"{measure.value}_counted"], values_ns=tuple(values))
    return found


def _sketches(rows: _Rows, of: PeriodQuery, rollups: pa.Table | None) -> dict[str, GapSketch]:
    """Merge the gaps of all streams by scope.

    Whole hours come from ``rollups``, the rest from ``rows``.
    """
    found = [] if rollups is None else [sketches_of(rollups)]
    if rows.table is not None:
        found.append(merge_sketches(rows.answer(aggregates.sketches(rows.table))))
    merged: dict[str, GapSketch] = {}
    for part in found:
        for (scope, model), sketch in part.items():
            if of.scope in (None, scope) and of.model in (None, model):
                merged.setdefault(scope, GapSketch()).merge(sketch)
    return merged


def _together(tables: Sequence[pa.Table]) -> pa.Table:
    return pa.concat_tables(tables, promote_options="default")


def _files(reader: StoreReader, files: Sequence[StoredFile], *, named: bool = False) -> ParquetFiles:
    return ParquetFiles(reader.paths(files), alike=len({file.columns_crc for file in files}) <= 1, named=named)
