"""Define the tables besides requests and spans.

Each definition has what publishing and folding need.
The rows of most are plain dataclasses: the columns follow from the fields, and a row is exactly its columns.
Ids are bytes in the file and hex in a row. A column that an older file lacks reads as the field's default.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any, Final, Protocol

import pyarrow as pa

from handrail_collector.rows import (
    ClockPairRow,
    FetchRow,
    FindingRow,
    IterationRow,
    LinkFactRow,
    ProcessEventRow,
    StallRow,
)
from handrail_collector.store.schema import ID_8, ID_16, Encoding, StoreColumn, Table, column_array
from handrail_collector.store.tables.samples import SAMPLED

_IDS: Final = {"trace_id": ID_16, "request_id": ID_8, "span_id": ID_8, "key": ID_8}
_TYPES: Final = {
    "str": (pa.string(), Encoding.DICTIONARY),
    "int": (pa.int64(), Encoding.DELTA),
    "bool": (pa.bool_(), Encoding.PLAIN),
    "float": (pa.float64(), Encoding.SPLIT),
    "tuple[str, ...]": (pa.list_(pa.string()), Encoding.DICTIONARY),
}


def _column(name: str, type_name: str) -> StoreColumn:
    if name in _IDS:
        return StoreColumn(name, _IDS[name], Encoding.PLAIN)
    kind, encoding = _TYPES[type_name.removesuffix(" | None")]
    return StoreColumn(name, kind, encoding)


@dataclass(frozen=True, slots=True)
class DataclassTable:
    """A table of one dataclass. ``time``: the column that decides a row's hour."""

    table: Table
    row: type[Any]
    time: str

    @property
    def columns(self) -> tuple[StoreColumn, ...]:
        """Columns in the order of the fields."""
        return tuple(_column(field.name, str(field.type)) for field in fields(self.row))

    def columns_of(self, table: pa.Table) -> tuple[StoreColumn, ...]:
        """Return the columns; they are the same for every table of these rows."""
        return self.columns

    def encode(self, rows: Sequence[Any]) -> pa.Table:
        """Encode ``rows`` in the order of their time.

        Raises ``ValueError`` or ``pa.ArrowInvalid`` for values that no column accepts.
        """
        rows = sorted(rows, key=lambda row: getattr(row, self.time))
        columns = self.columns
        arrays = [
            column_array([bytes.fromhex(value) for value in values] if column.name in _IDS else values, column.type)
            for column in columns
            for values in ([getattr(row, column.name) for row in rows],)
        ]
        return pa.table(arrays, schema=pa.schema([(column.name, column.type) for column in columns]))

    def decode(self, stored: Mapping[str, Any]) -> Any:
        """Decode one row, given by column name.

        Raises ``ValueError`` for a damaged row.
        """
        found: dict[str, Any] = {}
        for field in fields(self.row):
            value = stored.get(field.name)
            if value is None and field.default is not MISSING:
                value = field.default
            elif field.name in _IDS:
                if not isinstance(value, bytes):
                    raise ValueError(f"{field.name}: an id expected")
                value = value.hex()
            elif isinstance(value, list):
                value = tuple(value)
            found[field.name] = value
        return self.row(**found)


FLAT: Final[Mapping[Table, DataclassTable]] = {
    flat.table: flat
    for flat in (
        DataclassTable(Table.KV_FETCHES, FetchRow, "started_unix_ns"),
        DataclassTable(Table.STALLS, StallRow, "started_unix_ns"),
        DataclassTable(Table.PROCESS_EVENTS, ProcessEventRow, "at_unix_ns"),
        DataclassTable(Table.FINDINGS, FindingRow, "at_unix_ns"),
        DataclassTable(Table.CLOCK_PAIRS, ClockPairRow, "at_unix_ns"),
        DataclassTable(Table.ITERATIONS, IterationRow, "at_unix_ns"),
        DataclassTable(Table.LINK_FACTS, LinkFactRow, "at_unix_ns"),
    )
}
"""Tables of dataclass rows by name."""

PUBLISHED_TOGETHER: Final = frozenset({Table.KV_FETCHES, Table.STALLS})
"""Tables whose rows of one request are published together.

They have the request's ids and version. The rows of its highest version count.
"""

FlatRows = Mapping[Table, Sequence[Any]]
"""Rows of these tables and of samples, each of its own class."""


class AppendOnlyTable(Protocol):
    """A table besides requests and spans."""

    @property
    def time(self) -> str:
        """The column, and the attribute of a row, that decides its hour."""

    def encode(self, rows: Sequence[Any]) -> pa.Table:
        """Encode rows as a table.

        Raises ``ValueError`` or ``pa.ArrowInvalid`` for values that no column accepts.
        """

    def columns_of(self, table: pa.Table) -> tuple[StoreColumn, ...]:
        """Return the columns of a table that ``encode`` made, in its order."""


APPEND_ONLY: Final[Mapping[Table, AppendOnlyTable]] = {**FLAT, **SAMPLED}
"""Append-only tables by name."""
