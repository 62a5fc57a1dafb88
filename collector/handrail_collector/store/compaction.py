"""Fold the files of a finished hour into one file per table.

The folded file holds the newest version of each row and each span once.
``plan`` chooses the files from the manifest. The fold functions take tables and return one table; they read and write no files.
An hour gets several files when its rows, bytes or columns are too many for one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import pyarrow as pa
import pyarrow.compute as pc

from handrail_collector.rows import MERGED
from handrail_collector.store.layout import DAY_NS, HOUR_NS, hour_of
from handrail_collector.store.manifest import PublishRecord, StoredFile
from handrail_collector.store.publish import PartitionFile, StorePublisher
from handrail_collector.store.quarantine import DamagedFiles
from handrail_collector.store.schema import REQUEST_COLUMNS, SPAN_COLUMNS, StoreColumn, Table, attribute_column
from handrail_collector.store.snapshot import VERSION_MARGIN_NS
from handrail_collector.store.tables.append_only import FLAT, PUBLISHED_TOGETHER
from handrail_collector.store.tables.samples import MAX_SERIES_COLUMNS, SAMPLED, is_series
from handrail_collector.store.tables.spans import MAX_ATTRIBUTE_COLUMNS
from handrail_collector.store.upgrade import is_outdated

MAX_ROWS = 1_000_000
MAX_BYTES = 128 * 2**20
"""Largest size of a compacted file, bytes; folding takes about ten times as much."""

MAX_SAMPLES = 200_000
"""Most rows of a compacted file of samples.

Samples have up to three hundred columns and shrink to a fiftieth on disk.
"""

KEYS = ("trace_id", "request_id", "version")
"""Columns that identify a row of ``requests``."""


Ranged = tuple[int, int, StoredFile]
"""A file with its journal range: first_offset, end_offset, file."""


@dataclass(frozen=True, slots=True)
class Fold:
    """Files of one table and hour that are folded into one file, oldest first.

    Each file carries the journal range [first, end) that it covers.
    """

    table: Table
    hour: int  # hours since 1970
    ranged: tuple[Ranged, ...]

    @property
    def files(self) -> tuple[StoredFile, ...]:
        """The files without their ranges."""
        return tuple(file for _, _, file in self.ranged)

    @property
    def first_offset(self) -> int:
        """The smallest first offset of all files."""
        return min(first for first, _, _ in self.ranged)

    @property
    def end_offset(self) -> int:
        """The largest end offset of all files."""
        return max(end for _, end, _ in self.ranged)

    def part(self, start: int, stop: int) -> Fold:
        """Return a fold of the files ``start`` to ``stop``."""
        return replace(self, ranged=self.ranged[start:stop])


def plan(publishes: Iterable[PublishRecord], shard: int, now_unix_ns: int, closed_after_ns: int) -> list[Fold]:
    """List the folds that are due.

    A fold is due when its hour is over (``closed``), and its files fit into fewer files or have an earlier schema version.
    """
    hours: defaultdict[tuple[Table, int], list[Ranged]] = defaultdict(list)
    for publish in publishes:
        if publish.shard == shard:
            for file in publish.files:
                if file.table is Table.ROLLUPS:  # rollups are rebuilt from the folded rows
                    continue
                hours[file.table, hour_of(file.path)].append((publish.first_offset, publish.end_offset, file))
    return [
        Fold(table, hour, tuple(run))
        for (table, hour), files in sorted(hours.items())
        if closed(hour, max(file.written_unix_ns for _, _, file in files), now_unix_ns, closed_after_ns)
        for run in _runs(
            sorted(files, key=lambda each: (each[0], each[1], each[2].path)), MAX_SAMPLES if table in SAMPLED else MAX_ROWS
        )
        if worthwhile(run)
    ]


def worthwhile(run: Sequence[Ranged]) -> bool:
    """Check whether to fold these files.

    They are several, or of an earlier schema version.
    """
    return len(run) > 1 or any(is_outdated(file.table, file.schema) for _, _, file in run)


def closed(hour: int, written_unix_ns: int, now_unix_ns: int, closed_after_ns: int) -> bool:
    """Check whether an hour ended at least ``closed_after_ns`` ago.

    An hour that lies days ahead is closed when no rows have come to it for that long.
    ``written_unix_ns``: when the newest rows of the hour came.
    """
    if hour * HOUR_NS > now_unix_ns + DAY_NS:
        return written_unix_ns + HOUR_NS + closed_after_ns <= now_unix_ns
    return (hour + 1) * HOUR_NS + closed_after_ns <= now_unix_ns


def _runs(files: Sequence[Ranged], max_rows: int) -> Iterator[list[Ranged]]:
    run: list[Ranged] = []
    rows = size = 0
    for each in files:
        file = each[2]
        if run and (rows + file.rows > max_rows or size + file.bytes > MAX_BYTES):
            yield run
            run, rows, size = [], 0, 0
        run.append(each)
        rows, size = rows + file.rows, size + file.bytes
    if run:
        yield run


def alike(table: Table, columns: Sequence[Iterable[str]]) -> list[int]:
    """Split files into runs whose own columns fit into one file.

    ``columns``: the column names of each file of ``table``, in order. Returns the length of each run.
    """
    lengths: list[int] = []
    known: set[str] = set()
    of_own, most = (_is_attribute, MAX_ATTRIBUTE_COLUMNS) if table is Table.SPANS else (is_series, MAX_SERIES_COLUMNS)
    for names in columns:
        own = set(filter(of_own, names))
        if lengths and len(known | own) <= most:
            lengths[-1] += 1
            known |= own
        else:
            lengths.append(1)
            known = own
    return lengths


def _is_attribute(column: str) -> bool:
    return column.startswith("a.")


def fold_spans(tables: Sequence[pa.Table]) -> tuple[pa.Table, tuple[StoreColumn, ...]]:
    """Fold the spans of ``tables`` into one table, grouped by trace.

    ``tables``: oldest first. Of spans that were sent again, the one with the highest offset stays.
    Returns the table and its columns.
    """
    table = pa.concat_tables(tables, promote_options="default").combine_chunks()
    attributes = sorted({name for name in table.column_names if name.startswith("a.")})
    columns = (*SPAN_COLUMNS, *(attribute_column(*name.split(".", 2)[1:]) for name in attributes))
    table = in_order(table, columns)
    table = table.take(_last_of_each(table, ("trace_id", "span_id"), "offset"))
    traces = pc.dictionary_encode(_one(table["trace_id"])).indices
    firsts = pa.table({"trace": traces, "start": table["start_unix_ns"]}).group_by("trace").aggregate([("start", "min")])
    order = pa.table(
        {
            "first": firsts.sort_by("trace")["start_min"].take(traces),
            **{name: table[name] for name in ("trace_id", "start_unix_ns", "offset")},
        }
    )
    return table.take(pc.sort_indices(order, [(name, "ascending") for name in order.column_names])), columns


def fold_requests(
    tables: Sequence[pa.Table], elsewhere: pa.Table, all_known: bool = True
) -> tuple[pa.Table, tuple[StoreColumn, ...]]:
    """Fold request rows into one table of newest versions, ordered by start.

    A row leaves when a higher version exists in ``tables`` or in ``elsewhere``.
    A row that withdraws another (``rows.MERGED``) leaves with the last row that it withdraws; it stays
    while ``all_known`` is false.
    ``elsewhere``: ``KEYS`` of the same requests in other files. ``all_known``: all of these files could be read.
    Returns the table and its columns.
    """
    table = in_order(pa.concat_tables(tables, promote_options="default").combine_chunks(), REQUEST_COLUMNS)
    table = table.take(_last_of_each(table, ("trace_id", "request_id"), "version"))
    versions: dict[tuple[bytes, bytes], set[int]] = {}
    for trace_id, request_id, version in zip(*(elsewhere[name].to_pylist() for name in KEYS), strict=True):
        versions.setdefault((trace_id, request_id), set()).add(version)
    kept = pc.not_equal(table["scope"], MERGED).to_pylist()
    for at in _places(table, versions, kept):
        others = versions.get((table["trace_id"][at].as_py(), table["request_id"][at].as_py()), set())
        own = table["version"][at].as_py()
        kept[at] = not any(other > own for other in others) and (kept[at] or bool(others) or not all_known)
    table = table.filter(pa.array(kept, pa.bool_()))
    return table.take(pc.sort_indices(table, [("started_unix_ns", "ascending")])), REQUEST_COLUMNS


def superseding(keys: pa.Table) -> dict[bytes, dict[bytes, int]]:
    """Find the rows of ``keys`` that replace or withdraw an earlier version.

    Returns the highest version by request id, then by trace id.
    """
    found: dict[bytes, dict[bytes, int]] = {}
    later = keys.filter(pc.greater(keys["version"], 1))
    for trace_id, request_id, version in zip(*(later[name].to_pylist() for name in KEYS), strict=True):
        traces = found.setdefault(request_id, {})
        traces[trace_id] = max(version, traces.get(trace_id, 0))
    return found


def without(table: pa.Table, later: dict[bytes, dict[bytes, int]]) -> pa.Table:
    """Drop the rows of ``table`` that ``later`` replaces or withdraws.

    ``later``: the result of ``superseding``.
    """
    among = pc.is_in(table["request_id"], value_set=pa.array(sorted(later), table.schema.field("request_id").type))
    places = pc.indices_nonzero(among).to_pylist()
    kept = [True] * table.num_rows
    for at in places:
        key = (table[name][at].as_py() for name in ("request_id", "trace_id"))
        kept[at] = table["version"][at].as_py() >= later[next(key)].get(next(key), 0)
    return table if all(kept) else table.filter(pa.array(kept, pa.bool_()))


def fold_flat(name: Table, tables: Sequence[pa.Table]) -> tuple[pa.Table, tuple[StoreColumn, ...]]:
    """Fold rows of a flat table into one table, ordered by time.

    ``tables``: oldest first. Of events, each key stays once. Of hand-offs and stalls, those of a request's last version stay.
    A row that withdraws others stays, because the others may lie in another hour.
    Returns the table and its columns.
    """
    flat = FLAT[name]
    table = in_order(pa.concat_tables(tables, promote_options="default").combine_chunks(), flat.columns)
    if name in PUBLISHED_TOGETHER:
        table = table.take(pa.array(_last_reported(table), pa.int64()))
    else:
        table = table.take(_last_of_each(table, ("key", flat.time), "offset"))
    return table.take(pc.sort_indices(table, [(flat.time, "ascending")])), flat.columns


def fold_samples(name: Table, tables: Sequence[pa.Table]) -> tuple[pa.Table, tuple[StoreColumn, ...]]:
    """Fold samples into one table, in the order of the table.

    ``tables``: oldest first. Of samples that were delivered twice, the last one stays.
    The series of ``tables`` fit into one file (``series.MAX_SERIES_COLUMNS``): ``maintenance`` folds only files that fit.
    Returns the table and its columns.
    """
    kind = SAMPLED[name]
    table = pa.concat_tables(tables, promote_options="default")
    columns = kind.columns_of(table)
    table = in_order(table.combine_chunks(), columns)
    table = table.take(_last_of_each(table, (*kind.by, kind.time), kind.time))
    return kind.ordered(table), columns


def _last_reported(table: pa.Table) -> list[int]:
    """Find the rows of each request's highest version, each number once.

    Returns row indices.
    """
    newest: dict[tuple[bytes, bytes], tuple[int, dict[int, int]]] = {}
    columns = (table[name].to_pylist() for name in (*KEYS, "number"))
    for at, (trace_id, request_id, version, number) in enumerate(zip(*columns, strict=True)):
        known = newest.get((trace_id, request_id))
        if known is None or known[0] < version:
            newest[trace_id, request_id] = version, {number: at}
        elif known[0] == version:
            known[1][number] = at
    return sorted(at for _, places in newest.values() for at in places.values())


def _places(table: pa.Table, versions: dict[tuple[bytes, bytes], set[int]], kept: Sequence[bool]) -> list[int]:
    """Find the few rows that need a check one by one.

    These rows withdraw others, or others may supersede them. Returns row indices.
    """
    known = pa.array(sorted({request_id for _, request_id in versions}), table.schema.field("request_id").type)
    among = pc.is_in(table["request_id"], value_set=known).to_pylist()
    return [at for at, (found, stays) in enumerate(zip(among, kept, strict=True)) if found or not stays]


def _last_of_each(table: pa.Table, keys: tuple[str, ...], by: str) -> pa.Array:
    """Find the row with the highest ``by`` among the rows that are equal in ``keys``.

    ``keys`` are never null. Of rows with equal ``by``, the last one counts. Returns row indices.
    """
    narrow = table.select(dict.fromkeys((*keys, by))).append_column("place", pa.array(range(table.num_rows), pa.int64()))
    narrow = narrow.sort_by([(name, "ascending") for name in dict.fromkeys((*keys, by, "place"))]).combine_chunks()
    if not narrow.num_rows:
        return pa.array([], pa.int64())
    differs = pa.array([False] * (narrow.num_rows - 1), pa.bool_())  # typed: of one row it is empty
    for key in keys:
        values = _one(narrow[key])
        differs = pc.or_(differs, pc.not_equal(values[1:], values[:-1]))
    last = pa.concat_arrays([differs, pa.array([True])])
    return _one(narrow["place"]).filter(last)


def _one(values: pa.ChunkedArray) -> pa.Array:
    """Combine all chunks into one array.

    ``combine_chunks`` returns an array in pyarrow 18 and may return a chunked one later.
    """
    combined = values.combine_chunks()
    return combined.chunk(0) if isinstance(combined, pa.ChunkedArray) else combined


def in_order(table: pa.Table, columns: Sequence[StoreColumn]) -> pa.Table:
    """Give ``table`` exactly these columns and types; missing columns become null."""
    arrays = [table[c.name].cast(c.type) if c.name in table.column_names else pa.nulls(table.num_rows, c.type) for c in columns]
    return pa.table(arrays, schema=pa.schema([(c.name, c.type) for c in columns]))


class ReplacedRows:
    """Remove replaced rows, in the one thread that folds and retires."""

    def __init__(self, publisher: StorePublisher, damaged: DamagedFiles) -> None:
        self._publisher = publisher
        self._damaged = damaged

    def drop(self, file: StoredFile, later: dict[bytes, dict[bytes, int]]) -> int:
        """Rewrite ``file`` without the rows that ``later`` replaces.

        ``later``: the result of ``superseding``. Returns how many rows went.
        A file that cannot be read stays as it is.
        """
        keys = self._damaged.read(file, KEYS)
        if keys is None or len(without(keys, later)) == len(keys):
            return 0
        table = self._damaged.read(file)
        if table is None:
            return 0
        table, columns = fold_requests([without(table, later)], keys[:0], all_known=False)
        first, end = next((p.first_offset, p.end_offset) for p in self._publisher.publishes() if file in p.files)
        self.put(file.table, hour_of(file.path), table, columns, [file], first, end)
        return file.rows - int(table.num_rows)

    def put(
        self,
        name: Table,
        hour: int,
        table: pa.Table,
        columns: tuple[StoreColumn, ...],
        files: Sequence[StoredFile],
        first_offset: int,
        end_offset: int,
    ) -> None:
        """Replace ``files`` by a file with the rows of ``table``.

        An empty ``table`` adds no file.
        """
        gone = {file.path for file in files}
        if table.num_rows:
            part = PartitionFile(name, hour, table, columns, max(file.written_unix_ns for file in files))
            self._publisher.replace(gone, part, first_offset, end_offset)
        else:
            self._publisher.retire(gone)


def near(files: Iterable[StoredFile], others: Sequence[StoredFile]) -> list[StoredFile]:
    """Select those of ``files`` that may hold another version of a row in ``others``."""
    first = min((file.min_unix_ns for file in others), default=0) - VERSION_MARGIN_NS
    last = max((file.max_unix_ns for file in others), default=0) + VERSION_MARGIN_NS
    return [file for file in files if file.max_unix_ns >= first and file.min_unix_ns <= last] if others else []
