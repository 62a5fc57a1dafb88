"""Read the requests around one request, for comparison with it.

The query is bounded at any traffic: it reads a shorter time of a busy hour, and keeps a sample of what it reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import pyarrow as pa

from handrail_collector.rows import RequestRow
from handrail_collector.store.manifest import StoredFile
from handrail_collector.store.read import StoreReader
from handrail_collector.store.schema import Table

HALF_NS: Final = 1_800_000_000_000
"""Time before and after the request that is read, ns: one hour in all."""

LEAST_HALF_NS: Final = 60_000_000_000
MOST_READ: Final = 250_000
"""Most rows that are read; with more, a shorter time is read."""

SAMPLE: Final = 6_000
"""Approximate number of rows that are kept."""


@dataclass(frozen=True, slots=True)
class Around:
    """Requests between ``since_unix_ns`` and ``until_unix_ns``.

    ``rows`` have the columns that ``explain.tail.requests_in`` reads.
    """

    since_unix_ns: int
    until_unix_ns: int
    rows: pa.Table


def around(reader: StoreReader, row: RequestRow) -> Around:
    """Read the requests of the same scope and model around the start of ``row``.

    Only requests with a time to first token count. Raises ``StoreDamagedError``.
    A request that was stored again with late evidence may appear twice, which does not change what is typical.
    """
    snapshot = reader.snapshot()
    files = snapshot.files(Table.REQUESTS)
    half = HALF_NS
    while half > LEAST_HALF_NS and _estimate(files, row.started_unix_ns, half) > MOST_READ:
        half //= 2
    since, until = row.started_unix_ns - half, row.started_unix_ns + half
    near = snapshot.files(Table.REQUESTS, since, until)
    every = max(1, round(_estimate(near, row.started_unix_ns, half)) // SAMPLE)
    with snapshot.ask() as views:
        views.request_versions(near)
        found = views.table(
            "neighbours", since_unix_ns=since, until_unix_ns=until, sample_every=every, scope=row.scope, model=row.model
        )
    return Around(since, until, found)


def _estimate(files: Sequence[StoredFile], started_unix_ns: int, half_ns: int) -> float:
    """Estimate the rows of that time, as if each file's rows were spread evenly."""
    rows = 0.0
    for file in files:
        lasts = max(1, file.max_unix_ns - file.min_unix_ns)
        common = min(file.max_unix_ns, started_unix_ns + half_ns) - max(file.min_unix_ns, started_unix_ns - half_ns)
        rows += file.rows * min(1.0, max(0, common + 1) / lasts)
    return rows
