"""Read what ``handrail compare`` needs of the requests of a period, in batches.

One ``RequestRow`` for each request would be too slow.
The rows are those of ``StoreReader.requests``: each request in its highest version, without withdrawn requests.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import pyarrow as pa

from handrail_collector.store.filters import PeriodQuery
from handrail_collector.store.read import StoreReader
from handrail_collector.store.schema import Table

BATCH_ROWS: Final = 65_536


@dataclass(frozen=True, slots=True)
class ScopeCount:
    """Number of requests of one scope, and when the first and the last began."""

    scope: str
    requests: int
    first_unix_ns: int
    last_unix_ns: int


def scopes(root: Path, of: PeriodQuery) -> list[ScopeCount]:
    """List the scopes of the period, most requests first.

    Raises ``StoreDamagedError``.
    """
    with closing(StoreReader(root)) as reader:
        snapshot = reader.snapshot()
        with snapshot.ask() as views:
            views.requests(snapshot.files(Table.REQUESTS, of.since_unix_ns, of.until_unix_ns))
            return views.rows("scopes", lambda row: ScopeCount(**row), asdict(of))


def compared_requests(root: Path, of: PeriodQuery, batch_rows: int = BATCH_ROWS) -> Iterator[pa.RecordBatch]:
    """Read the requests of the period, in no order (``compared_requests.sql``).

    Raises ``StoreDamagedError``.
    """
    with closing(StoreReader(root)) as reader:
        snapshot = reader.snapshot()
        with snapshot.ask() as views:
            views.requests(snapshot.files(Table.REQUESTS, of.since_unix_ns, of.until_unix_ns))
            yield from views.batches("compared_requests", batch_rows, **asdict(of))
