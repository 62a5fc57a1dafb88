"""Divide a publish into files of one table and hour each.

This module has no side effects.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

import pyarrow as pa
import pyarrow.compute as pc

from handrail_collector.rows import RequestRow
from handrail_collector.store.layout import HOUR_NS, SUFFIX, hour_folder
from handrail_collector.store.request_columns import requests_table
from handrail_collector.store.schema import REQUEST_COLUMNS, StoreColumn, Table
from handrail_collector.store.span import SpanRow
from handrail_collector.store.span_columns import spans_table
from handrail_collector.store.tables.append_only import APPEND_ONLY
from handrail_collector.store.tables.dataclass_table import FlatRows

MAX_HOURS_A_PUBLISH = 24
"""Most hours of a publish that get files of their own.

Rows of further hours (from clocks that are far off) go into the fullest hour. The manifest has their times.
"""

TIME_COLUMN = {
    Table.REQUESTS: "started_unix_ns",
    Table.SPANS: "start_unix_ns",
    Table.ROLLUPS: "hour_unix_ns",
    **{table: kind.time for table, kind in APPEND_ONLY.items()},
}


@dataclass(frozen=True, slots=True)
class PartitionFile:
    """The rows of one table and one hour (counted since 1970).

    ``written_unix_ns``: when the newest rows were first written. ``covers``: the file that a rollup was made from.
    """

    name: Table
    hour: int
    table: pa.Table
    columns: tuple[StoreColumn, ...]
    written_unix_ns: int
    covers: str = ""

    def path(self, name: str) -> PurePosixPath:
        """Return the path of a file of this name, relative to the store's root."""
        return hour_folder(self.name, self.hour) / f"{self.name.value}-{name}{SUFFIX}"

    def times(self) -> tuple[int, int]:
        """Return the first and last time of the rows."""
        times = pc.min_max(self.table[TIME_COLUMN[self.name]]).as_py()
        return times["min"], times["max"]

    def versions(self) -> tuple[int, int]:
        """Return the lowest and highest version of the rows; 0 when they have none."""
        if self.name is not Table.REQUESTS:
            return 0, 0
        versions = pc.min_max(self.table["version"]).as_py()
        return versions["min"], versions["max"]


def partition(
    spans: Sequence[SpanRow], requests: Sequence[RequestRow] | pa.Table, flat: FlatRows, now_unix_ns: int
) -> Iterator[PartitionFile]:
    """Divide spans, then requests, then rows of other tables, by hour."""
    for hour, places in by_hour([span.start_unix_ns for span in spans]).items():
        table, columns = spans_table([spans[at] for at in places])
        yield PartitionFile(Table.SPANS, hour, table, columns, now_unix_ns)
    table = requests if isinstance(requests, pa.Table) else requests_table(requests)
    for hour, places in by_hour(table[TIME_COLUMN[Table.REQUESTS]].to_pylist()).items():
        rows = table.take(places) if len(places) < len(table) else table
        yield PartitionFile(Table.REQUESTS, hour, rows, REQUEST_COLUMNS, now_unix_ns)
    for name, of_table in flat.items():
        kind = APPEND_ONLY[name]
        for hour, places in by_hour([getattr(row, kind.time) for row in of_table]).items():
            table = kind.encode([of_table[at] for at in places])
            yield PartitionFile(name, hour, table, kind.columns_of(table), now_unix_ns)


def by_hour(starts_unix_ns: Sequence[int]) -> dict[int, list[int]]:
    """Group row indices by hour.

    Hours beyond the ``MAX_HOURS_A_PUBLISH`` fullest join the fullest hour.
    """
    hours: dict[int, list[int]] = {}
    for at, start in enumerate(starts_unix_ns):
        hours.setdefault(start // HOUR_NS, []).append(at)
    fullest = sorted(hours, key=lambda hour: -len(hours[hour]))
    for hour in fullest[MAX_HOURS_A_PUBLISH:]:
        hours[fullest[0]].extend(hours.pop(hour))
    return hours
