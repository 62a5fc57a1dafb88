"""What a reader of a store sees, from the bytes of its files alone."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import pyarrow.parquet as pq

from handrail_collector.rows import MERGED, RequestRow
from handrail_collector.store.filters import PeriodQuery
from handrail_collector.store.manifest import MANIFEST, files_of, parse
from handrail_collector.store.read import StoreReader
from handrail_collector.store.schema import Table
from handrail_collector.store.tables.append_only import FLAT
from handrail_collector.store.tables.requests import request_row
from harness.rollup_check import disagreement, exact_answer, first_answer

LOAD_DIGITS = "00000009"


@dataclass(frozen=True, slots=True)
class View:
    """The newest rows and the ids of all spans.

    ``spans`` has an id as often as it is stored.
    """

    rows: tuple[RequestRow, ...]
    spans: tuple[str, ...]
    fetches: tuple[tuple[str, str, int, int], ...] = ()  # trace, request, version, number
    events: tuple[str, ...] = ()  # by their detail, samples by their device

    @property
    def described(self) -> tuple[frozenset[tuple[str, int]], frozenset[str], frozenset[str]]:
        """The state of a store, the same for two ways of writing it."""
        return frozenset((row.request_id, row.version) for row in self.rows), frozenset(self.spans), frozenset(self.events)

    @property
    def loads_lost(self) -> int:
        """The number of rows that rest on a load and have no hand-off of their version."""
        reports = {(trace_id, request_id, version) for trace_id, request_id, version, _ in self.fetches}
        resting = [row for row in self.rows if any(span_id.endswith(LOAD_DIGITS) for span_id in row.span_ids)]
        return sum((row.trace_id, row.request_id, row.version) not in reports for row in resting)

    @property
    def twice(self) -> int:
        """The number of spans stored more than once or used by more than one row.

        Rows, fetches and events that are there more than once count too.
        """
        resting = Counter(span_id for row in self.rows for span_id in row.span_ids)
        rows = Counter((row.trace_id, row.request_id) for row in self.rows)
        return sum(
            times > 1
            for counted in (resting, rows, Counter(self.spans), Counter(self.fetches), Counter(self.events))
            for times in counted.values()
        )


def first_answer_of(store: Path) -> str:
    """Return where the first answer over all time differs from the rows, or ''."""
    reader = StoreReader(store, threads=1)
    try:
        always = PeriodQuery(since_unix_ns=0, until_unix_ns=2**62)
        output = disagreement(first_answer(reader, always), exact_answer(reader, always))
    finally:
        reader.close()
    return output and f"first answer: {output}"


def listed_files(manifest: bytes) -> list[str]:
    """Return paths below the store."""
    return [file.path for publish in parse(manifest, MANIFEST).publishes for file in publish.files]


def view_of(manifest: bytes, contents: Mapping[str, bytes]) -> View:
    """Return what the listed files hold, by their paths below the store."""
    publishes = parse(manifest, MANIFEST).publishes
    newest: dict[tuple[str, str], list[RequestRow]] = {}
    for file in files_of(publishes, Table.REQUESTS):
        for row in _rows(contents[file.path]):
            key = row.trace_id, row.request_id
            known = newest.setdefault(key, [row])
            if row.version >= known[0].version and known[0] is not row:
                newest[key] = [row] if row.version > known[0].version else [*known, row]
    spans = [span_id for file in files_of(publishes, Table.SPANS) for span_id in _span_ids(contents[file.path])]
    fetches = [key for file in files_of(publishes, Table.KV_FETCHES) for key in _fetches(contents[file.path])]
    events = [event for file in files_of(publishes, Table.PROCESS_EVENTS) for event in _events(contents[file.path])]
    events += [device for file in files_of(publishes, Table.GPU_SAMPLES) for device in _events(contents[file.path], "device")]
    rows = tuple(row for rows in newest.values() for row in rows if row.scope != MERGED)
    return View(rows, tuple(spans), tuple(fetches), tuple(events))


@lru_cache(maxsize=20_000)
def _rows(data: bytes) -> tuple[RequestRow, ...]:
    return tuple(map(request_row, pq.ParquetFile(io.BytesIO(data)).read().to_pylist()))


@lru_cache(maxsize=20_000)
def _span_ids(data: bytes) -> tuple[str, ...]:
    return tuple(span_id.hex() for span_id in pq.ParquetFile(io.BytesIO(data)).read(["span_id"])["span_id"].to_pylist())


@lru_cache(maxsize=20_000)
def _fetches(data: bytes) -> tuple[tuple[str, str, int, int], ...]:
    rows = map(FLAT[Table.KV_FETCHES].decode, pq.ParquetFile(io.BytesIO(data)).read().to_pylist())
    return tuple((row.trace_id, row.request_id, row.version, row.number) for row in rows)


@lru_cache(maxsize=20_000)
def _events(data: bytes, column: str = "detail") -> tuple[str, ...]:
    return tuple(pq.ParquetFile(io.BytesIO(data)).read([column])[column].to_pylist())
