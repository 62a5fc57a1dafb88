"""Read the requests around one request, for comparison with it.

The query is plain SQL, since Ibis takes longer to load than the query takes to run. It is bounded at any traffic:
it reads a shorter time of a busy hour, and keeps a sample of what it reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import duckdb
import pyarrow as pa

from handrail.phases import Phase
from handrail_collector.rows import RequestRow
from handrail_collector.store.manifest import StoredFile, files_of
from handrail_collector.store.quarantine import QUERY_ERRORS, refusal
from handrail_collector.store.read import StoreReader
from handrail_collector.store.schema import UNATTRIBUTED_DECODE, UNATTRIBUTED_PREFILL, Table, phase_column

HALF_NS: Final = 1_800_000_000_000
"""Time before and after the request that is read, ns: one hour in all."""

LEAST_HALF_NS: Final = 60_000_000_000
MOST_READ: Final = 250_000
"""Most rows that are read; with more, a shorter time is read."""

SAMPLE: Final = 6_000
"""Approximate number of rows that are kept."""

_PHASES: Final = (*(phase_column(phase.value) for phase in Phase), UNATTRIBUTED_PREFILL, UNATTRIBUTED_DECODE)
_COLUMNS: Final = {
    "started_unix_ns": "started_unix_ns",
    "ttft_ns": "ttft_token_ns",
    "uncached_tokens": "prompt_tokens - coalesce(cached_tokens, 0)",
    "cached_tokens": "coalesce(cached_tokens, 0)",
    "moved": "coalesce(prefill_attempts, 0) > 1",
    "prefill_host": "coalesce(prefill_host, prefill_instance)",
    "decode_host": "coalesce(decode_host, decode_instance)",
    **{name: name for name in _PHASES},
}
_READ: Final = (
    *("started_unix_ns", "ttft_token_ns", "prompt_tokens", "cached_tokens", "prefill_host", "prefill_instance", "decode_host"),
    *("prefill_attempts", "decode_instance", "scope", "model", "phase_of", *_PHASES),
)


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
    files = files_of(reader.publishes(), Table.REQUESTS)
    half = HALF_NS
    while half > LEAST_HALF_NS and _estimate(files, row.started_unix_ns, half) > MOST_READ:
        half //= 2
    since, until = row.started_unix_ns - half, row.started_unix_ns + half
    near = [file for file in files if file.max_unix_ns >= since and file.min_unix_ns < until]
    if not near:
        return Around(since, until, pa.table({name: pa.array([], pa.int64()) for name in _COLUMNS}))
    every = max(1, round(_estimate(near, row.started_unix_ns, half)) // SAMPLE)
    cursor = reader.cursor()
    try:
        return Around(since, until, _rows(cursor, reader, near, row, (since, until, every)))
    except QUERY_ERRORS as error:
        raise refusal(error, reader.root, near) from error
    finally:
        cursor.close()


def _estimate(files: Sequence[StoredFile], started_unix_ns: int, half_ns: int) -> float:
    """Estimate the rows of that time, as if each file's rows were spread evenly."""
    rows = 0.0
    for file in files:
        lasts = max(1, file.max_unix_ns - file.min_unix_ns)
        common = min(file.max_unix_ns, started_unix_ns + half_ns) - max(file.min_unix_ns, started_unix_ns - half_ns)
        rows += file.rows * min(1.0, max(0, common + 1) / lasts)
    return rows


def _rows(
    cursor: duckdb.DuckDBPyConnection,
    reader: StoreReader,
    files: Sequence[StoredFile],
    row: RequestRow,
    taken: tuple[int, int, int],
) -> pa.Table:
    since, until, every = taken
    by_name = len({file.columns_crc for file in files}) > 1
    table = f"read_parquet($files, hive_partitioning = false, union_by_name = {str(by_name).lower()})"
    paths = {"files": [str(path) for path in reader.paths(files)]}
    cursor.execute(f"SELECT * FROM {table} LIMIT 0", paths)
    known = {column[0] for column in cursor.description or ()}
    read = ", ".join(name if name in known else f"NULL AS {name}" for name in _READ)
    text = ", ".join(f"{value} AS {name}" for name, value in _COLUMNS.items())
    query = (
        f"WITH read AS (SELECT {read} FROM {table} WHERE started_unix_ns >= $since AND started_unix_ns < $until "
        "AND hash(started_unix_ns) % $every = 0) "
        f"SELECT {text} FROM read WHERE scope = $scope AND model IS NOT DISTINCT FROM $model "
        "AND phase_of = 'ttft' AND ttft_token_ns IS NOT NULL"
    )
    given = {"since": since, "until": until, "every": every, "scope": row.scope, "model": row.model}
    return cursor.sql(query, params={**paths, **given}).to_arrow_table()
