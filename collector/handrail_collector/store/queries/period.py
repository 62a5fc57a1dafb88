"""Read the figures of a period for ``handrail explain``.

They are its requests counted by place and time, quantiles, gaps and, one by one, its slow requests.
The *first* answer takes whole hours from rollups and the rest from rows; its times are exact to 2 %.
The *exact* answer reads every row. When no hour has a rollup there is only the exact answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from handrail.metrics.exponential_histogram import GapSketch
from handrail.phases import Phase
from handrail_collector.store.filters import PeriodQuery
from handrail_collector.store.manifest import StoredFile, locate
from handrail_collector.store.quarantine import READ_ERRORS, read_checked
from handrail_collector.store.read import StoreReader
from handrail_collector.store.rollups import BINS_PER_E, NO_ROLLUPS
from handrail_collector.store.schema import UNATTRIBUTED_DECODE, UNATTRIBUTED_PREFILL, Table, phase_column
from handrail_collector.store.snapshot import FETCH_MARGIN_NS, Snapshot, Views, split

RANKS: Final = (0.25, 0.5, 0.75, 0.9, 0.99, 0.999)
"""Ranks of the quantiles that are computed.

Times from ``SLOW_RANK`` on are slow. Times from the first to the third quantile are the baseline.
"""

SLOW_RANK: Final = 0.99
SAMPLE_ROWS: Final = 120_000
"""Approximate number of requests that are sampled to learn what is typical."""

DIMENSIONS: Final = ("scope", "model", "prefill_host", "decode_host", "outcome", "kv_outcome")
PHASE_SUMS: Final = (*(phase_column(phase.value) for phase in Phase), UNATTRIBUTED_PREFILL, UNATTRIBUTED_DECODE)
"""Columns that are summed: every phase, and the unattributed time by place."""

PAUSED: Final = ("prefill_paused_ns", "decode_paused_ns")
"""Columns with the time that an engine's process was paused.

A request waited for its first token at that engine meanwhile.
"""

SLOW, USUAL, OTHER = "slow", "usual", "other"
GAP_COLUMNS: Final = ("scope", "model", "measure", "gap_sum_ns", "gap_min_ns", "gap_max_ns", "gap_buckets", "gap_counts")
"""Columns of rollups that ``queries/gap_histograms.sql`` reads."""

_THRESHOLDS: Final = pa.schema(
    [("scope", pa.string()), ("measure", pa.string())]
    + [(name, pa.int64()) for name in ("baseline_from_ns", "baseline_to_ns", "slow_from_ns")]
)
_STALLS: Final = {
    "scope": pa.string(),
    "cause": pa.string(),
    "host": pa.string(),
    "stalls": pa.int64(),
    "streams": pa.int64(),
    "events": pa.int64(),
    "every_ns": pa.int64(),
    "gap_sum_ns": pa.int64(),
    "gap_max_ns": pa.int64(),
    "longest": pa.int64(),
    "lift": pa.float64(),
}
NO_STALLS: Final = pa.schema(list(_STALLS.items())).empty_table()


class Measure(str, Enum):
    """What is measured of a request."""

    TTFT = "ttft"  # time to first generated token
    GAP = "gap"  # largest gap of a stream


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Bounds of baseline times, and the bound of slow times, of one scope."""

    baseline_from_ns: int
    baseline_to_ns: int
    slow_from_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantiles:
    """Number of values of one scope and measure, and the values at ``RANKS``."""

    counted: int
    values_ns: tuple[int, ...]

    @property
    def cuts(self) -> Thresholds:
        """Bounds of baseline and slow times."""
        at = dict(zip(RANKS, self.values_ns, strict=True))
        return Thresholds(at[0.25], at[0.75], at[SLOW_RANK])


@dataclass(frozen=True, slots=True, kw_only=True)
class PeriodData:
    """The figures of a period.

    ``ttft_cells``, ``gap_cells``: requests counted (``aggregates.sql``, in the exact answer ``parts.sql``).
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
    stalls: pa.Table  # ``stall_causes.sql``


def latest_unix_ns(reader: StoreReader, now_unix_ns: int) -> int | None:
    """Return when the latest stored request began; None when there is none.

    Requests of clocks that are ahead count as of now.
    """
    return reader.latest(Table.REQUESTS, now_unix_ns)


def models(reader: StoreReader, of: PeriodQuery) -> list[str]:
    """List every model that the requests of the period name.

    Raises ``StoreDamagedError``.
    """
    snapshot = reader.snapshot()
    with snapshot.ask() as views:
        views.requests(snapshot.files(Table.REQUESTS, of.since_unix_ns, of.until_unix_ns))
        return [str(name) for name in views.table("models", **asdict(of))["model"].to_pylist()]


def load_period(reader: StoreReader, of: PeriodQuery, *, fast: bool) -> PeriodData:
    """Compute the first answer (``fast``) or the exact one.

    Both times of ``of`` must be set. Raises ``StoreDamagedError``.
    """
    snapshot = reader.snapshot()
    hours = _rolled(snapshot, of, None if fast else GAP_COLUMNS)
    found = _first(snapshot, of, hours) if fast and hours.rollups is not None else _exact(snapshot, of, hours)
    by_scope = found.quantiles[Measure.GAP] if found.quantiles else {}
    return replace(found, stalls=stall_counts(reader, of, {scope: each.cuts.slow_from_ns for scope, each in by_scope.items()}))


def stall_counts(reader: StoreReader, of: PeriodQuery, cuts: Mapping[str, int]) -> pa.Table:
    """Count the stalls that began in the period (``stall_causes.sql``).

    ``cuts``: by scope, the length from which on a gap is among the longest. Raises ``StoreDamagedError``.
    """
    snapshot = reader.snapshot()
    files = snapshot.files(Table.STALLS, of.since_unix_ns, of.until_unix_ns, FETCH_MARGIN_NS)
    if not files:
        return NO_STALLS
    with snapshot.ask() as views:
        views.newest(Table.STALLS, files)
        views.register("thresholds", _thresholds([(scope, Measure.GAP, Thresholds(0, 0, cut)) for scope, cut in cuts.items()]))
        return views.table("stall_causes", **asdict(of)).cast(NO_STALLS.schema)


@dataclass(frozen=True, slots=True)
class _Hours:
    """Rollups of a period, and the files of requests for the rest of it.

    ``rollups``: the rows of ``files`` rollups, None when there are none. ``rest``: files of requests.
    """

    rollups: pa.Table | None
    files: int
    rest: tuple[StoredFile, ...]


def _rolled(snapshot: Snapshot, of: PeriodQuery, columns: Sequence[str] | None) -> _Hours:
    """Read the rollups of a period and select the files for the rest.

    An unreadable rollup is not used; the rows of its file are. The same holds for a rollup of a file with rows that a later
    version in another file replaces. That other file can only be one without a rollup (``rollups.py``).
    """
    assert of.since_unix_ns is not None
    assert of.until_unix_ns is not None
    files = [file for publish in snapshot.publishes for file in publish.files]
    parts = split(files, of.since_unix_ns, of.until_unix_ns)
    paths = locate(snapshot.root, (file.path for file in parts.rollups))
    read = {file.path: _read(path, columns) for file, path in zip(parts.rollups, paths, strict=True)}
    by_rows = {file.covers for file in parts.rollups if read[file.path] is None}
    if len(by_rows) < len(read):
        answering = {file.covers for file in parts.rollups}
        by_rows |= _outdated(snapshot, [file for file in files if file.path in answering])
    if by_rows:
        parts = split(files, of.since_unix_ns, of.until_unix_ns, by_rows)
    tables = [read[file.path] for file in parts.rollups]
    return _Hours(pa.concat_tables(tables, promote_options="default") if tables else None, len(tables), parts.requests)


def _outdated(snapshot: Snapshot, files: Sequence[StoredFile]) -> set[str]:
    """Return the request files whose rollups count a replaced row.

    Such a row has a later version.
    Such a version lies in a file without a rollup. Where the files without one have all its versions, nothing else is read.
    """
    loose = [file for file in snapshot.files(Table.REQUESTS) if file.path not in snapshot.rolled]
    newer = [file for file in snapshot.newer_files(files) if file in loose]
    if not newer:
        return set()
    with snapshot.ask() as views:
        views.bind("later_rows", views.keys(loose))
        if not views.table("unpaired_versions", base_version=snapshot.base_version).num_rows:
            return set()
    names = snapshot.replaced(files, newer)["filename"].to_pylist()
    return {Path(name).relative_to(snapshot.root).as_posix() for name in names}


def _read(path: Path, columns: Sequence[str] | None) -> pa.Table | None:
    try:
        return read_checked(path, columns)
    except READ_ERRORS:
        return None  # the collector logs it and makes it again


def _first(snapshot: Snapshot, of: PeriodQuery, hours: _Hours) -> PeriodData:
    with snapshot.ask() as views:
        views.requests(hours.rest)
        views.register("rollups", hours.rollups)
        ttft, gap = _by_measure(views.table("aggregates", bins_per_e=BINS_PER_E, **asdict(of)))
        return PeriodData(
            of=of,
            exact=False,
            ttft_cells=ttft,
            gap_cells=gap,
            sketches=_sketches(views, of),
            quantiles=None,
            tail_and_sample=None,
            rolled_hours=hours.files,
            stalls=NO_STALLS,
        )


def _exact(snapshot: Snapshot, of: PeriodQuery, hours: _Hours) -> PeriodData:
    with snapshot.ask() as views:
        views.requests(snapshot.files(Table.REQUESTS, of.since_unix_ns, of.until_unix_ns))
        quantiles = _quantiles(views.table("quantiles", ranks=list(RANKS), **asdict(of)))
        cuts = [(scope, measure, each.cuts) for measure, by_scope in quantiles.items() for scope, each in by_scope.items()]
        views.register("thresholds", _thresholds(cuts))
        ttft, gap = _by_measure(views.table("parts", **asdict(of)))
        timed = sum(each.counted for each in quantiles[Measure.TTFT].values())
        tail_and_sample = views.table("tail_and_sample", sample_every=max(1, timed // SAMPLE_ROWS), **asdict(of))
        views.requests(hours.rest)
        views.register("rollups", NO_ROLLUPS if hours.rollups is None else hours.rollups)
        return PeriodData(
            of=of,
            exact=True,
            ttft_cells=ttft,
            gap_cells=gap,
            sketches=_sketches(views, of),  # merging the histograms of hours loses nothing
            quantiles=quantiles,
            tail_and_sample=tail_and_sample,
            rolled_hours=0,
            stalls=NO_STALLS,
        )


def _by_measure(cells: pa.Table) -> tuple[pa.Table, pa.Table]:
    ttft, gap = (cells.filter(pc.equal(cells["measure"], measure.value)) for measure in Measure)
    return ttft, gap


def _thresholds(cuts: Sequence[tuple[str, Measure, Thresholds]]) -> pa.Table:
    rows = [{"scope": scope, "measure": measure.value} | asdict(each) for scope, measure, each in cuts]
    return pa.Table.from_pylist(rows, _THRESHOLDS)


def _quantiles(table: pa.Table) -> dict[Measure, dict[str, Quantiles]]:
    found: dict[Measure, dict[str, Quantiles]] = {measure: {} for measure in Measure}
    for row in table.to_pylist():
        for measure, by_scope in found.items():
            if values := row[f"{measure.value}_values"]:
                by_scope[row["scope"]] = Quantiles(counted=row[f"{measure.value}_counted"], values_ns=tuple(values))
    return found


def _sketches(views: Views, of: PeriodQuery) -> dict[str, GapSketch]:
    """Merge the gaps of all streams by scope."""
    merged: dict[str, GapSketch] = {}
    for row in views.table("gap_histograms", **asdict(of)).to_pylist():
        counts = dict(zip(row["gap_buckets"], row["gap_counts"], strict=True))
        times = {name: row[f"gap_{name}"] for name in ("sum_ns", "min_ns", "max_ns")}
        merged.setdefault(row["scope"], GapSketch()).merge(GapSketch.of_counts(counts, **times))
    return merged
