"""Define the tables of samples, with one row per device or engine and instant.

The values of a row are columns of their own, which compress well and which any SQL client can read.
The column of a fractional gauge is ``g.d.NAME`` or ``g.d.NAME.LABEL``, that of an integer counter ``c.i.NAME.LABEL``.
``since_unix_ns`` is when counters started to count; ``since_more`` holds the counters that started at another time.
A file has the ``MAX_SERIES_COLUMNS`` most common series as columns.
Others, and names with upper case (DuckDB's column names ignore case), are JSON in ``more``.
Rows are sorted by owner and then by time, so that the values of a series are adjacent.
Samples are stored per device (``records.devices.DeviceRun``) and read one by one.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import pyarrow as pa

from handrail.records import EngineHistogram, EngineSample, EngineValue, Process, Role, Source
from handrail.records.devices import Device, DeviceKind, DeviceRun, DeviceSample, DeviceValue, Series
from handrail.records.quantities import QUANTITIES
from handrail_collector.store.schema import Encoding, StoreColumn, Table, column_array

MAX_SERIES_COLUMNS: Final = 256
"""Most series columns of a file, because a peer may send any name.

Each column costs a reader about 100 bytes of every file's footer.
"""

SERIES_COLUMNS: Final = (
    StoreColumn("since_unix_ns", pa.int64(), Encoding.DICTIONARY),
    StoreColumn("since_more", pa.string(), Encoding.DICTIONARY),  # JSON: unix ns by column
    StoreColumn("more", pa.string(), Encoding.DICTIONARY),  # JSON: value by column
)
"""Columns besides those of the series."""

_TYPES: Final = {"i": (pa.int64(), Encoding.DELTA), "d": (pa.float64(), Encoding.DICTIONARY)}

SeriesBlock = tuple[int, Sequence[Series]]
"""Number of rows, and their values by series."""


def series_table(blocks: Sequence[SeriesBlock]) -> tuple[dict[str, list[Any]], tuple[StoreColumn, ...]]:
    """Convert blocks to lists of values by column, and to the columns of the series.

    The columns are ordered by name.
    """
    named = [(rows, [(_column_of(each), each) for each in series]) for rows, series in blocks]
    counts: Counter[str] = Counter()
    for rows, series in named:
        for name, _ in series:
            counts[name] += rows
    lists: dict[str, list[Any]] = {name: [] for name in sorted(_commonest(counts))}
    since: list[int | None] = []
    since_more: list[str | None] = []
    more: list[str | None] = []
    at = 0
    for rows, series in named:
        rest: list[dict[str, float]] = []
        for name, each in series:
            target = lists.get(name)
            if target is None:
                rest = rest or [{} for _ in range(rows)]
                for row, value in zip(rest, each.values, strict=True):
                    row |= {} if value is None else {name: value}
            else:
                _put(target, at, each.values)
        starts, others = _since(rows, series)
        since.extend(starts)
        since_more.extend(others)
        more.extend(json.dumps(row) if row else None for row in rest or [{}] * rows)
        at += rows
    for target in lists.values():
        target.extend([None] * (at - len(target)))
    columns = tuple(StoreColumn(name, *_TYPES[name[2]]) for name in lists)
    return {"since_unix_ns": since, "since_more": since_more, "more": more, **lists}, columns


def series_values(stored: Mapping[str, Any]) -> list[DeviceValue]:
    """Decode the values of one row, given by column name; sorted by name and label.

    Raises ``ValueError`` for a damaged row.
    """
    since = stored.get("since_unix_ns")
    others = _loaded(stored.get("since_more"))
    found = []
    for column, value in _valued(stored):
        reports = _series_of(column)
        if reports is None or not isinstance(value, (int, float)):
            raise ValueError(f"{column}: no value of a series")
        counter, name, label = reports
        start = others.get(column, since) if counter else 0
        if not isinstance(start, int):
            raise ValueError(f"{column}: the start of its count is missing")
        found.append(DeviceValue(name=name, value=value, label=label, start_unix_ns=start))
    return sorted(found, key=lambda each: (each.name, each.label))


def is_series(column: str) -> bool:
    """Check whether a column of a file holds a series."""
    return column[:2] in ("c.", "g.") and column[2:4] in ("i.", "d.")


def name_of(column: str) -> str:
    """Return the counter name of a series column."""
    return column.split(".", 3)[2]


def _put(target: list[Any], at: int, values: Sequence[float | None]) -> None:
    """Write ``values`` from row ``at`` on.

    Values of another series of the same column are overwritten; a counter that restarts makes such a series.
    """
    there = len(target) - at
    if there <= 0:
        target.extend([None] * -there)
        target.extend(values)
    else:
        target[at:] = [old if value is None else value for old, value in zip(target[at:], values, strict=True)]


def _since(rows: int, series: Sequence[tuple[str, Series]]) -> tuple[list[int | None], list[str | None]]:
    """Return the most common counter start of each row, and the other starts as JSON.

    The JSON has starts by column.
    """
    counters = [(name, each) for name, each in series if each.start_unix_ns]
    starts = {each.start_unix_ns for _, each in counters}
    if len(starts) <= 1:  # the usual case: all counters started together
        return [starts.pop() if starts else None] * rows, [None] * rows
    since: list[int | None] = []
    others: list[str | None] = []
    for at in range(rows):
        there = {name: each.start_unix_ns for name, each in counters if each.values[at] is not None}
        common = Counter(there.values()).most_common(1)[0][0] if there else None
        apart = {name: start for name, start in there.items() if start != common}
        since.append(common)
        others.append(json.dumps(apart) if apart else None)
    return since, others


def _valued(stored: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    yield from ((name, value) for name, value in stored.items() if value is not None and is_series(name))
    yield from _loaded(stored.get("more")).items()


def _loaded(text: Any) -> dict[str, Any]:
    found = json.loads(text) if text else {}
    if not isinstance(found, dict):
        raise ValueError("a JSON object was expected")
    return found


def _commonest(counts: Counter[str]) -> list[str]:
    fitting = Counter({name: count for name, count in counts.items() if name == name.lower()})
    return [name for name, _ in fitting.most_common(MAX_SERIES_COLUMNS)]


def _column_of(series: Series) -> str:
    whole = isinstance(next((value for value in series.values if value is not None), None), int)
    return _column_name(series.name, series.label, whole, series.start_unix_ns != 0)


@lru_cache(maxsize=8192)
def _column_name(name: str, label: str, whole: bool, counter: bool) -> str:
    """Return the column name of a series; dots in ``name`` are escaped."""
    escaped = name.replace("%", "%25").replace(".", "%2e")
    return f"{'c' if counter else 'g'}.{'i' if whole else 'd'}.{escaped}{f'.{label}' if label else ''}"


@lru_cache(maxsize=8192)
def _series_of(column: str) -> tuple[bool, str, str] | None:
    """Parse a column name: whether it is a counter, its name, its label."""
    if not is_series(column):
        return None
    kind, _, name, *label = column.split(".", 3)
    return kind == "c", name.replace("%2e", ".").replace("%25", "%"), label[0] if label else ""


_TEXT, _INT = pa.string(), pa.int64()
_D, _B = Encoding.DICTIONARY, Encoding.DELTA

_PROCESS_COLUMNS: Final = tuple(
    StoreColumn(name, _TEXT, _D) for name in ("role", "instance", "host", "service", "sender", "host_name")
)
_DEVICE_COLUMNS: Final = (
    StoreColumn("at_unix_ns", _INT, _B),
    StoreColumn("took_ns", _INT, _B),
    *_PROCESS_COLUMNS,
    StoreColumn("source", _TEXT, _D),
    StoreColumn("kind", _TEXT, _D),
    StoreColumn("device", _TEXT, _D),
    StoreColumn("index", _INT, _D),
    StoreColumn("product", _TEXT, _D),
    StoreColumn("pci", _TEXT, _D),
    StoreColumn("line_rate_bytes", _INT, _D),
    StoreColumn("parent", _TEXT, _D),
    StoreColumn("engine", _TEXT, _D),
)
_ENGINE_COLUMNS: Final = (
    StoreColumn("at_unix_ns", _INT, _B),
    *_PROCESS_COLUMNS,
    StoreColumn("source", _TEXT, _D),
    StoreColumn("engine", _TEXT, _D),  # the engine's own label, '' when it has none
    StoreColumn("model", _TEXT, _D),
    StoreColumn("histograms", _TEXT, Encoding.LENGTHS),  # JSON: [[name, label, start, count, sum, [counts]], ...]
    StoreColumn("bounds", _TEXT, _D),  # JSON: [[bound, ...], ...], one list per histogram
)
_ORDER: Final = {quantity.name: place for place, quantity in enumerate(QUANTITIES)}

Block = tuple[tuple[Any, ...], Sequence[int], Sequence[int], Sequence[Series]]
"""Rows of one owner: shared columns, times, durations of sampling, values.

Only devices have durations.
"""


def _read_order(sample: Any) -> tuple[int, str, str, str, str]:
    """Order samples of one time by their process and device.

    The order of the files and of the threads that read them would change from run to run.
    """
    device = sample.device.key if isinstance(sample, DeviceSample) else ""
    return sample.at_unix_ns, sample.process.host, sample.process.instance, sample.source.value, device


@dataclass(frozen=True, slots=True)
class Sampled:
    """One table of samples.

    ``own``: columns besides those of series; the columns of each row come first, then the shared ones.
    ``blocks_of`` splits what a publish brings into blocks. ``samples_of`` makes samples from rows.
    ``by``: columns that identify the owner of a row.
    """

    table: Table
    own: tuple[StoreColumn, ...]
    by: tuple[str, ...]
    blocks_of: Callable[[Any], Iterator[Block]]
    samples_of: Callable[[Sequence[Mapping[str, Any]]], list[Any]]
    time: str = "at_unix_ns"

    def encode(self, rows: Sequence[Any]) -> pa.Table:
        """Encode ``DeviceRun`` or ``EngineSample`` rows in the order of the table.

        Raises ``ValueError`` or ``pa.ArrowInvalid`` for values that no column accepts.
        """
        blocks = sorted((block for each in rows for block in self.blocks_of(each)), key=self._place)
        values, series = series_table([(len(times), series) for _, times, _, series in blocks])
        values["at_unix_ns"] = [at for _, times, _, _ in blocks for at in times]
        values["took_ns"] = [took for _, _, all_took, _ in blocks for took in all_took]
        for place, column in enumerate(self._shared):
            values[column.name] = [answer for own, times, _, _ in blocks for answer in (own[place],) * len(times)]
        columns = (*self.own, *SERIES_COLUMNS, *series)
        arrays = [column_array(values[column.name], column.type) for column in columns]
        return pa.table(arrays, schema=pa.schema([(column.name, column.type) for column in columns]))

    def decode(self, stored: Sequence[Mapping[str, Any]]) -> list[Any]:
        """Decode rows, given by column name, into samples, oldest first.

        Raises ``ValueError`` for a damaged row.
        """
        try:
            found = self.samples_of(stored)
        except (KeyError, TypeError) as error:
            raise ValueError(f"{self.table.value}: not a row of it: {error!r}") from error
        return sorted(found, key=_read_order)

    def columns_of(self, table: pa.Table) -> tuple[StoreColumn, ...]:
        """Return the columns of a table that ``encode`` made, in its order.

        For concatenated files, returns the columns that they should have.
        Raises ``ValueError`` for a column that no samples have.
        """
        own = (*self.own, *SERIES_COLUMNS)
        names = {column.name for column in own}
        series = sorted((field for field in table.schema if field.name not in names), key=lambda field: str(field.name))
        return (*own, *map(_series_column, series))

    def ordered(self, table: pa.Table) -> pa.Table:
        """Sort rows by owner, then by time."""
        return table.sort_by([*((name, "ascending") for name in self.by), (self.time, "ascending")])

    @property
    def _shared(self) -> tuple[StoreColumn, ...]:
        return tuple(column for column in self.own if column.name not in ("at_unix_ns", "took_ns"))

    def _place(self, block: Block) -> tuple[Any, ...]:
        """Return the sort key of a block, as in ``ordered``."""
        own, times, _, _ = block
        named = {column.name: answer for column, answer in zip(self._shared, own, strict=True)}
        return *(named[name] for name in self.by), times[0]


def _series_column(field: pa.Field) -> StoreColumn:
    if not is_series(field.name):
        raise ValueError(f"{field.name}: no column of samples")
    return StoreColumn(field.name, field.type, _B if pa.types.is_integer(field.type) else _D)


# --- devices --------------------------------------------------------------------------------------------------------------


def _run_blocks(run: DeviceRun) -> Iterator[Block]:
    device = run.device
    own = (
        *_newest_samples(run.process),
        run.source.value,
        device.kind.value,
        device.key,
        device.index,
        device.product,
        device.pci,
        device.line_rate_bytes,
        device.parent,
        device.engine,
    )
    yield own, run.at, run.took_ns, run.series


def _device_samples(stored: Sequence[Mapping[str, Any]]) -> list[DeviceSample]:
    processes: dict[tuple[Any, ...], Process] = {}
    return [
        DeviceSample(
            process=_process(row, processes),
            source=Source(row["source"]),
            device=Device(
                kind=DeviceKind(row["kind"]),
                key=row["device"],
                index=row["index"],
                product=row["product"],
                pci=row["pci"],
                line_rate_bytes=row["line_rate_bytes"],
                parent=row["parent"],
                engine=row["engine"],
            ),
            at_unix_ns=row["at_unix_ns"],
            values=tuple(series_values(row)),
            took_ns=row["took_ns"],
        )
        for row in stored
    ]


# --- engines --------------------------------------------------------------------------------------------------------------


def _engine_blocks(sample: EngineSample) -> Iterator[Block]:
    """Make one row for each engine in the sample."""
    values: dict[str, list[Series]] = {}
    histograms: dict[str, list[EngineHistogram]] = {}
    for value in sample.values:
        values.setdefault(value.engine, []).append(Series(value.name, value.label, value.start_unix_ns, (value.value,)))
    for histogram in sample.histograms:
        histograms.setdefault(histogram.engine, []).append(histogram)
    for engine in sorted({*values, *histograms}):
        report = histograms.get(engine, ())
        own = (
            *_newest_samples(sample.process),
            sample.source.value,
            engine,
            sample.model,
            json.dumps([[h.name, h.label, h.start_unix_ns, h.count, h.total, h.counts] for h in report]) if report else None,
            json.dumps([h.bounds for h in report]) if report else None,
        )
        yield own, (sample.at_unix_ns,), (), values.get(engine, ())


def _engine_samples(stored: Sequence[Mapping[str, Any]]) -> list[EngineSample]:
    processes: dict[tuple[Any, ...], Process] = {}
    parts: dict[tuple[Process, int], list[Mapping[str, Any]]] = {}
    for row in stored:
        parts.setdefault((_process(row, processes), row["at_unix_ns"]), []).append(row)
    return [
        EngineSample(
            process=process,
            source=Source(rows[0]["source"]),
            at_unix_ns=at,
            model=rows[0]["model"],
            values=tuple(sorted((v for row in rows for v in _engine_values(row)), key=_in_schema)),
            histograms=tuple(sorted((h for row in rows for h in _histograms(row)), key=_in_schema)),
        )
        for (process, at), rows in parts.items()
    ]


def _engine_values(row: Mapping[str, Any]) -> list[EngineValue]:
    return [
        EngineValue(name=v.name, value=v.value, engine=row["engine"], label=v.label, start_unix_ns=v.start_unix_ns)
        for v in series_values(row)
    ]


def _histograms(row: Mapping[str, Any]) -> list[EngineHistogram]:
    report = zip(json.loads(row["histograms"] or "[]"), json.loads(row["bounds"] or "[]"), strict=True)
    return [
        EngineHistogram(
            name=name,
            bounds=tuple(bounds),
            counts=tuple(counts),
            count=count,
            total=total,
            engine=row["engine"],
            label=label,
            start_unix_ns=start,
        )
        for (name, label, start, count, total, counts), bounds in report
    ]


def _in_schema(each: EngineValue | EngineHistogram) -> tuple[int, str, str, str]:
    return _ORDER.get(each.name, len(_ORDER)), each.name, each.engine, each.label


# --- both -----------------------------------------------------------------------------------------------------------------


def _newest_samples(process: Process) -> tuple[str, ...]:
    return process.role.value, process.instance, process.host, process.service, process.sender, process.host_name


def _process(row: Mapping[str, Any], known: dict[tuple[Any, ...], Process]) -> Process:
    reports = tuple(row[column.name] for column in _PROCESS_COLUMNS)
    found = known.get(reports)
    if found is None:
        role, instance, host, service, sender, host_name = reports
        found = Process(role=Role(role), instance=instance, host=host, service=service, sender=sender, host_name=host_name)
        known[reports] = found
    return found


_OF_DEVICE: Final = ("host", "instance", "kind", "device")
_OF_ENGINE: Final = ("host", "instance", "engine")

SAMPLED: Final[Mapping[Table, Sampled]] = {
    Table.GPU_SAMPLES: Sampled(Table.GPU_SAMPLES, _DEVICE_COLUMNS, _OF_DEVICE, _run_blocks, _device_samples),
    Table.LINK_SAMPLES: Sampled(Table.LINK_SAMPLES, _DEVICE_COLUMNS, _OF_DEVICE, _run_blocks, _device_samples),
    Table.ENGINE_SAMPLES: Sampled(Table.ENGINE_SAMPLES, _ENGINE_COLUMNS, _OF_ENGINE, _engine_blocks, _engine_samples),
}
"""Tables of samples by name."""

SampleRow = DeviceRun | EngineSample
"""What a publish brings for these tables."""


def table_of(row: SampleRow) -> Table:
    """Return the table that holds ``row``."""
    if isinstance(row, EngineSample):
        return Table.ENGINE_SAMPLES
    return Table.GPU_SAMPLES if row.device.kind is DeviceKind.GPU else Table.LINK_SAMPLES
