"""What a reader of a store sees, from the bytes of its files alone."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import pyarrow.parquet as pq

from first_answer import disagreement
from handrail_collector.rows import MERGED, RequestRow
from handrail_collector.store.cells import Scoped
from handrail_collector.store.manifest import MANIFEST, files_of, parse
from handrail_collector.store.read import StoreReader
from handrail_collector.store.request_columns import request_row
from handrail_collector.store.schema import Table


@dataclass(frozen=True, slots=True)
class View:
    """Newest rows and the ids of all spans; ``spans`` are as often as they lie there."""

    rows: tuple[RequestRow, ...]
    spans: tuple[str, ...]

    @property
    def said(self) -> tuple[frozenset[tuple[str, int]], frozenset[str]]:
        """What differs between two states of a store, and not between two ways of writing the same one."""
        return frozenset((row.request_id, row.version) for row in self.rows), frozenset(self.spans)

    @property
    def twice(self) -> int:
        """Spans that are there more than once, and spans that more than one row rests on."""
        resting = Counter(span_id for row in self.rows for span_id in row.span_ids)
        rows = Counter((row.trace_id, row.request_id) for row in self.rows)
        return sum(times > 1 for counted in (resting, rows, Counter(self.spans)) for times in counted.values())


def first_answer_of(store: Path) -> str:
    """What the first answer says, over all time, that the rows do not; '' when nothing."""
    reader = StoreReader(store, threads=1)
    try:
        said = disagreement(reader, Scoped(since_unix_ns=0, until_unix_ns=2**62))
    finally:
        reader.close()
    return said and f"first answer: {said}"


def listed_files(manifest: bytes) -> list[str]:
    """Paths below the store."""
    return [file.path for publish in parse(manifest, MANIFEST).publishes for file in publish.files]


def view_of(manifest: bytes, contents: Mapping[str, bytes]) -> View:
    """What the listed files say, given by their paths below the store."""
    publishes = parse(manifest, MANIFEST).publishes
    newest: dict[tuple[str, str], list[RequestRow]] = {}
    for file in files_of(publishes, Table.REQUESTS):
        for row in _rows(contents[file.path]):
            key = row.trace_id, row.request_id
            known = newest.setdefault(key, [row])
            if row.version >= known[0].version and known[0] is not row:
                newest[key] = [row] if row.version > known[0].version else [*known, row]
    spans = [span_id for file in files_of(publishes, Table.SPANS) for span_id in _span_ids(contents[file.path])]
    return View(tuple(row for rows in newest.values() for row in rows if row.scope != MERGED), tuple(spans))


@lru_cache(maxsize=20_000)
def _rows(data: bytes) -> tuple[RequestRow, ...]:
    return tuple(map(request_row, pq.ParquetFile(io.BytesIO(data)).read().to_pylist()))


@lru_cache(maxsize=20_000)
def _span_ids(data: bytes) -> tuple[str, ...]:
    return tuple(span_id.hex() for span_id in pq.ParquetFile(io.BytesIO(data)).read(["span_id"])["span_id"].to_pylist())
