"""Count the stalls of a period by cause and host.

The counts are stalls, streams, events, and stalls among the longest gaps.
An *event* is a time in which streams of one host stall for one cause, however many they are: one garbage collection
stalls every stream of its process (case B12).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import pyarrow as pa

from handrail_collector.store.fetch_sql import NEWEST
from handrail_collector.store.manifest import files_of
from handrail_collector.store.quarantine import QUERY_ERRORS, refusal
from handrail_collector.store.queries.aggregates import PeriodQuery
from handrail_collector.store.read import StoreReader
from handrail_collector.store.schema import Table

MARGIN_NS: Final = 3_600_000_000_000
"""Largest distance between the starts of two versions of a stall."""

COLUMNS: Final = {
    "scope": pa.string(),
    "cause": pa.string(),
    "host": pa.string(),
    "stalls": pa.int64(),
    "streams": pa.int64(),
    "events": pa.int64(),
    "every_ns": pa.int64(),  # median time from one event to the next; null when there is only one
    "gap_sum_ns": pa.int64(),
    "gap_max_ns": pa.int64(),
    "longest": pa.int64(),  # stalls that are at least as long as the cut of their scope
    "lift": pa.float64(),  # median
}

NO_STALLS: Final = pa.schema(list(COLUMNS.items())).empty_table()

_QUERY: Final = f"""
WITH told AS (
    SELECT scope, cause, coalesce(host, instance, '') AS host, trace_id, request_id, started_unix_ns AS begin_ns, gap_ns, lift
    FROM ({NEWEST})
    WHERE "number" >= 0 AND started_unix_ns >= $since AND started_unix_ns < $until
      AND ($scope IS NULL OR scope = $scope) AND ($model IS NULL OR model = $model)
), events AS (
    SELECT *, begin_ns > coalesce(max(begin_ns + gap_ns) OVER (
        PARTITION BY scope, cause, host ORDER BY begin_ns, gap_ns ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING), -1) AS first
    FROM told
), apart AS (
    SELECT *, CASE WHEN first THEN begin_ns - lag(CASE WHEN first THEN begin_ns END IGNORE NULLS) OVER (
        PARTITION BY scope, cause, host ORDER BY begin_ns, gap_ns) END AS since_ns
    FROM events
)
SELECT scope, cause, host, count(*) AS stalls, count(DISTINCT (trace_id, request_id)) AS streams,
    count(*) FILTER (first) AS events, CAST(median(since_ns) AS BIGINT) AS every_ns,
    CAST(sum(gap_ns) AS BIGINT) AS gap_sum_ns, max(gap_ns) AS gap_max_ns,
    count(*) FILTER (gap_ns >= coalesce(map_extract($cuts, scope)[1], 9223372036854775807)) AS longest, median(lift) AS lift
FROM apart GROUP BY scope, cause, host ORDER BY scope, stalls DESC, cause, host
"""


def stall_counts(reader: StoreReader, of: PeriodQuery, cuts: Mapping[str, int]) -> pa.Table:
    """Compute ``COLUMNS`` of the stalls that began in the period.

    ``cuts``: by scope, the length from which on a gap is among the longest. Raises ``StoreDamagedError``.
    """
    assert of.since_unix_ns is not None
    assert of.until_unix_ns is not None
    files = [
        file
        for file in files_of(reader.publishes(), Table.STALLS)
        if file.max_unix_ns >= of.since_unix_ns - MARGIN_NS and file.min_unix_ns < of.until_unix_ns + MARGIN_NS
    ]
    if not files:
        return NO_STALLS
    by_name = len({file.columns_crc for file in files}) > 1
    table = f"read_parquet($files, hive_partitioning = false, union_by_name = {str(by_name).lower()})"
    parameters = {
        "files": [str(path) for path in reader.paths(files)],
        "since": of.since_unix_ns,
        "until": of.until_unix_ns,
        "scope": of.scope,
        "model": of.model,
        "cuts": {"key": list(cuts), "value": list(cuts.values())},
    }
    cursor = reader.cursor()
    try:
        return cursor.sql(_QUERY.replace("{table}", table), params=parameters).to_arrow_table().cast(NO_STALLS.schema)
    except QUERY_ERRORS as error:
        raise refusal(error, reader.root, files) from error
    finally:
        cursor.close()
