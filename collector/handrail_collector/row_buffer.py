"""Hold the rows that wait for a publish, and those that a publish has taken.

A publish takes everything. When it fails, it puts everything back before what came since, so the order stays.
Until it ends, its rows are in memory and not in the store, so readers are served both parts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from handrail_collector.rows import RequestRow
from handrail_collector.store.schema import Table
from handrail_collector.store.tables.append_only import APPEND_ONLY, PUBLISHED_TOGETHER
from handrail_collector.store.tables.requests import requests_table
from handrail_collector.store.tables.spans import SpanRow, spans_table


@dataclass(slots=True)
class RowBatch:
    """Rows of all tables.

    ``flat``: the rows of every table besides requests and spans, each of its table's class.
    """

    spans: list[SpanRow] = field(default_factory=list)
    requests: list[RequestRow] = field(default_factory=list)
    flat: dict[Table, list[Any]] = field(default_factory=dict)

    def add(self, table: Table, *rows: Any) -> None:
        """Append rows of a table besides requests and spans."""
        if rows:
            self.flat.setdefault(table, []).extend(rows)

    def extend(self, more: RowBatch) -> None:
        """Append all rows of ``more``."""
        self.spans.extend(more.spans)
        self.requests.extend(more.requests)
        for table, rows in more.flat.items():
            self.flat.setdefault(table, []).extend(rows)

    @property
    def decided(self) -> int:
        """Number of rows that decisions made: of requests, KV fetches and stalls."""
        return len(self.requests) + sum(len(self.flat.get(table, ())) for table in PUBLISHED_TOGETHER)

    @property
    def events(self) -> int:
        """Number of rows that tell of no single request: events, findings, samples."""
        return sum(len(rows) for table, rows in self.flat.items() if table not in PUBLISHED_TOGETHER)

    def storable(self, left_out: Callable[[], None]) -> RowBatch | None:
        """Return the rows that their columns accept; None where all do.

        ``left_out`` is called in the handler of each exception that a row raised.
        """

        def accepts(encode: Callable[[list[Any]], object], row: Any) -> bool:
            try:
                encode([row])
            except Exception:
                left_out()
                return False
            return True

        fitting = RowBatch(
            [span for span in self.spans if accepts(spans_table, span)],
            [row for row in self.requests if accepts(requests_table, row)],
            {table: [row for row in rows if accepts(APPEND_ONLY[table].encode, row)] for table, rows in self.flat.items()},
        )
        return None if fitting == self else fitting


class RowBuffer:
    """The rows of one shard on their way to the store. The pipeline's loop owns it."""

    def __init__(self) -> None:
        self.waiting = RowBatch()
        self._taken = RowBatch()

    def take(self) -> RowBatch:
        """Take all that waits, for the publish that begins now. Only one runs at a time."""
        self._taken, self.waiting = self.waiting, RowBatch()
        return self._taken

    def put_back(self) -> None:
        """Return the rows of a publish that failed."""
        self._taken.extend(self.waiting)
        self.waiting, self._taken = self._taken, RowBatch()

    def published(self) -> None:
        """Forget the rows of a publish that is in the store."""
        self._taken = RowBatch()

    def requests(self) -> list[RequestRow]:
        """Return the rows of requests that are not in the store yet, oldest first."""
        return [*self._taken.requests, *self.waiting.requests]

    def rows(self, table: Table) -> list[Any]:
        """Return a table's rows that are not stored yet, oldest first.

        For every table but requests and spans.
        """
        return [*self._taken.flat.get(table, ()), *self.waiting.flat.get(table, ())]
