"""Build the SQL queries of hand-offs.

``sql.py`` does the same for requests. Of a request's rows, those of its highest version count.
"""

from __future__ import annotations

from handrail_collector.store.fetch_filter import FAILED, FETCH_SORTS, FetchFilter
from handrail_collector.store.sql import Parameter, SqlQuery

NEWEST = (
    "SELECT * FROM {table} QUALIFY version = max(version) OVER (PARTITION BY trace_id, request_id)"
    ' AND row_number() OVER (PARTITION BY trace_id, request_id, version, "number" ORDER BY last_offset DESC) = 1'
)

_CONDITIONS = {
    "since_unix_ns": "started_unix_ns >= $since_unix_ns",
    "until_unix_ns": "started_unix_ns < $until_unix_ns",
    "outcome": "outcome = $outcome",
    "failed": f"(outcome IN ({', '.join(repr(word) for word in sorted(FAILED))})) = $failed",
    "open": '"open" = $open',
    "direction": "direction = $direction",
    "peer": "$peer IN (consumer_instance, producer_instance, consumer_host, producer_host, producer_address)",
}


def fetches(wanted: FetchFilter) -> SqlQuery:
    """Select the hand-offs that match, in the order of the filter."""
    parameters: dict[str, Parameter] = {"row_limit": wanted.limit}
    conditions = ['"number" >= 0']
    for name, condition in _CONDITIONS.items():
        value = getattr(wanted, name)
        if value is not None:
            parameters[name] = value
            conditions.append(condition)
    direction = "DESC" if wanted.descending else "ASC"
    order = f'{FETCH_SORTS[wanted.sort]} {direction} NULLS LAST, started_unix_ns DESC, trace_id, request_id, "number"'
    text = f"SELECT * FROM ({NEWEST}) WHERE {' AND '.join(conditions)} ORDER BY {order} LIMIT $row_limit"
    return SqlQuery(text, parameters)


RECENT: tuple[str, ...] = (
    "started_unix_ns",
    "trace_id",
    "request_id",
    "version",
    "number",
    "span_id",
    "direction",
    "mode",
    "connector",
    "consumer_instance",
    "producer_instance",
    "consumer_host",
    "producer_host",
    "consumer_engine_id",
    "producer_engine_id",
    "producer_address",
    "outcome",
    "open",
    "duration_ns",
    "handshake_ns",
    "posted_ns",
    "transfer_ns",
    "transfer_bound_ns",
    "bytes_expected",
    "bytes_moved",
    "descriptors",
    "last_offset",
)
"""Columns that the findings about the links of a period need."""


def recent(since_unix_ns: int, until_unix_ns: int, limit: int) -> SqlQuery:
    """Select the last hand-offs of a period, with the columns ``RECENT`` only."""
    columns = f"COLUMNS('^({'|'.join(RECENT)})$')"  # older files lack some of these columns
    part = (
        f"SELECT {columns} FROM {{table}} WHERE started_unix_ns >= $since AND started_unix_ns < $until"
        " ORDER BY started_unix_ns DESC LIMIT $row_limit"
    )
    text = f"{NEWEST.replace('{table}', f'({part})')}"
    return SqlQuery(text, {"since": since_unix_ns, "until": until_unix_ns, "row_limit": limit})


def of_request(trace_id: bytes, request_id: bytes) -> SqlQuery:
    """Select the hand-offs or the stalls of one request, in order."""
    where = 'trace_id = $trace_id AND request_id = $request_id AND "number" >= 0'
    text = f'SELECT * FROM ({NEWEST}) WHERE {where} ORDER BY "number"'
    return SqlQuery(text, {"trace_id": trace_id, "request_id": request_id})


def events(since_unix_ns: int, until_unix_ns: int, limit: int) -> SqlQuery:
    """Select rows of an append-only table, each key once, latest first."""
    text = (
        "SELECT * FROM {table} WHERE at_unix_ns >= $since AND at_unix_ns < $until"
        ' QUALIFY row_number() OVER (PARTITION BY key ORDER BY "offset" DESC) = 1 ORDER BY at_unix_ns DESC LIMIT $row_limit'
    )
    return SqlQuery(text, {"since": since_unix_ns, "until": until_unix_ns, "row_limit": limit})
