"""Define the tables of samples, with one row per device or engine and instant.

The values of a row are columns of their own (``series.py``).
Rows are sorted by owner and then by time, so that the values of a series are adjacent.
Samples are stored per device (``hardware.DeviceRun``) and read one by one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa

from handrail.records import EngineHistogram, EngineSample, EngineValue, Process, Role, Source
from handrail.records.devices import Device, DeviceKind, DeviceRun, DeviceSample, Series
from handrail.records.quantities import QUANTITIES
from handrail_collector.store.schema import Encoding, StoreColumn, Table, column_array
from handrail_collector.store.series import SERIES_COLUMNS, is_series, series_table, series_values

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
        return sorted(found, key=lambda sample: (sample.at_unix_ns, sample.process.host, sample.process.instance))

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
