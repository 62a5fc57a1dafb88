"""Build the store's queries as parameterised SQL for DuckDB; open no files.

All of the store's SQL is in this module, so that another backend needs only another version of this module
(docs/decisions/0004-store-queries.md). ``{table}`` is replaced by the relation to read, never by user input.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from handrail_collector.rows import MERGED
from handrail_collector.store.filter import SORT_FIELDS, RequestFilter
from handrail_collector.store.schema import phase_column

Parameter = str | int | bytes | list[bytes] | list[str]

# The common case comes first: columns of only '=' are one dictionary entry, and DuckDB skips the other branches.
_KEY = (
    "CASE WHEN request_key = '=' THEN coalesce(client_request_id, '')"
    " WHEN starts_with(request_key, '\\') THEN substr(request_key, 2)"
    " ELSE replace(request_key, '=', coalesce(client_request_id, '')) END"
)
_RESPONSE = (
    "CASE WHEN starts_with(response_id, '\\') THEN substr(response_id, 2)"
    f" ELSE replace(response_id, '=', coalesce({_KEY}, '')) END"
)
_BEGIN = "split_part(response_id, '=', 1)"
_TRACE = "lower(hex(trace_id))"
_REQUEST = "lower(hex(request_id))"
_WORDS = ("client_request_id", _KEY, _RESPONSE)
_SEARCHED = (*_WORDS, "model", "edge_instance", "router_instance", "prefill_instance", "decode_instance", "error_type")
_HEX_DIGITS = frozenset("0123456789abcdef")

_CONDITIONS = {
    "since_unix_ns": "started_unix_ns >= $since_unix_ns",
    "until_unix_ns": "started_unix_ns < $until_unix_ns",
    "scope": "scope = $scope",
    "outcome": "outcome = $outcome",
    "model": "model = $model",
    "instance": "$instance IN (edge_instance, router_instance, prefill_instance, decode_instance)",
    "min_ttft_ns": "ttft_token_ns >= $min_ttft_ns",
    "finding": "(list_contains(findings, $finding)"
    " OR list_contains(list_transform(findings, lambda f: split_part(f, ':', 1)), $finding))",
}
"""SQL conditions of the fields of ``RequestFilter``, except ``text``."""


@dataclass(frozen=True, slots=True)
class SqlQuery:
    """SQL with ``{table}`` and ``$name`` parameters.

    ``with_file``: rows need the column ``filename``, the path of their file.
    """

    text: str
    parameters: dict[str, Parameter]
    with_file: bool = False


def bound(wanted: RequestFilter, rows: int) -> SqlQuery:
    """Select the sort value of the row at position ``rows``.

    There is no result when fewer rows match or that row has no value.
    """
    where, parameters = _where(wanted)
    column, direction = _ordered_by(wanted)
    known = f"{where} AND {column} IS NOT NULL"
    text = f"SELECT {column} FROM {{table}} WHERE {known} ORDER BY {column} {direction} LIMIT 1 OFFSET $before"
    return SqlQuery(text, parameters | {"before": rows - 1})


def requests(wanted: RequestFilter, limit: int, offset: int, bound: int | None = None) -> SqlQuery:
    """Select whole rows, all versions, in the order of ``RequestFilter.order``.

    ``bound``: no row has a sort value beyond it. DuckDB then reads the other columns of few rows: half the time over 10 million.
    """
    where, parameters = _where(wanted)
    column, direction = _ordered_by(wanted)
    if bound is not None:
        where += f" AND {column} {'>=' if wanted.descending else '<='} $bound"
        parameters["bound"] = bound
    order = f"{column} {direction} NULLS LAST, started_unix_ns DESC, trace_id, request_id, version DESC"
    text = f"SELECT * FROM {{table}} WHERE {where} ORDER BY {order} LIMIT $row_limit OFFSET $row_offset"
    return SqlQuery(text, parameters | {"row_limit": limit, "row_offset": offset})


def _ordered_by(wanted: RequestFilter) -> tuple[str, str]:
    return SORT_FIELDS.get(wanted.sort) or phase_column(wanted.sort), "DESC" if wanted.descending else "ASC"


def count(wanted: RequestFilter) -> SqlQuery:
    """Count the rows that match, all versions."""
    where, parameters = _where(wanted)
    return SqlQuery(f"SELECT count(*) FROM {{table}} WHERE {where}", parameters)


def count_superseded(wanted: RequestFilter, base_version: int) -> SqlQuery:
    """Count the matching rows that are not the highest version of their request.

    ``{newer}``: the files that hold later versions.
    """
    where, parameters = _where(wanted)
    text = (
        "WITH newest AS (SELECT trace_id, request_id, max(version) AS newest_version FROM {newer}"
        " WHERE version > $base_version GROUP BY ALL)"
        f" SELECT count(*) FROM {{table}} JOIN newest USING (trace_id, request_id) WHERE version < newest_version AND {where}"
    )
    return SqlQuery(text, parameters | {"base_version": base_version})


def newest_versions(request_ids: list[bytes], base_version: int) -> SqlQuery:
    """Select the highest version of requests that have one above ``base_version``.

    Columns: trace_id, request_id and the version.
    """
    text = (
        "SELECT trace_id, request_id, max(version) FROM {table}"
        " WHERE version > $base_version AND list_contains($request_ids::BLOB[], request_id) GROUP BY ALL"
    )
    return SqlQuery(text, {"base_version": base_version, "request_ids": request_ids})


def find_stored(raw: str, keys: tuple[str, ...], limit: int) -> SqlQuery:
    """Find rows whose columns hold ``raw`` or one of its ``keys`` as stored.

    Columns: filename, started_unix_ns.
    Each column has its own branch, so that DuckDB uses its Bloom filters (with OR it uses none):
    0.1 s instead of 1.1 s of processor time over 10 million requests.
    ``find_equal`` finds ids that are composed of other columns (``SAME``).
    """
    parameters: dict[str, Parameter] = {f"key_{index}": key for index, key in enumerate(dict.fromkeys((raw, *keys)))}
    listed = ", ".join(f"${name}" for name in parameters)
    conditions = [f"client_request_id IN ({listed})", f"request_key IN ({listed})", "response_id = $key_0"]
    if (plain := _hex(raw)) is not None and len(plain) in (16, 32):
        conditions.append("request_id = $plain" if len(plain) == 16 else "trace_id = $plain")
        parameters["plain"] = bytes.fromhex(plain)
        if len(plain) == 32:  # the column is null in nearly every row
            conditions.append("contains(lower(hex(other_trace_ids)), $hex)")
            parameters["hex"] = plain
    branches = " UNION ALL ".join(f"SELECT filename, started_unix_ns FROM {{table}} WHERE {each}" for each in conditions)
    text = f"SELECT DISTINCT * FROM ({branches}) ORDER BY started_unix_ns DESC LIMIT $row_limit"
    return SqlQuery(text, parameters | {"row_limit": limit}, with_file=True)


def find_equal(raw: str, keys: tuple[str, ...], limit: int) -> SqlQuery:
    """Find rows that have the id ``raw`` or one of its ``keys``.

    Columns: filename, started_unix_ns.
    """
    parameters: dict[str, Parameter] = {f"key_{index}": key for index, key in enumerate(dict.fromkeys((raw, *keys)))}
    listed = ", ".join(f"${name}" for name in parameters)
    # A key of '=' is the client's id, which is compared already. A response id is composed only when the id contains its key:
    # over 10 million requests that took 1.1 s less of processor time than to compare prefixes.
    conditions = [
        f"client_request_id IN ({listed})",
        f"(request_key <> '=' AND {_KEY} IN ({listed}))",
        "response_id = $key_0",
        "((request_key <> '=' OR contains($key_0, client_request_id) OR starts_with(response_id, '\\'))"
        f" AND {_RESPONSE} = $key_0)",
    ]
    if (plain := _hex(raw)) is not None:
        if len(plain) == 16:
            conditions.append("request_id = $span_id")
            parameters["span_id"] = bytes.fromhex(plain)
        if len(plain) == 32:
            conditions += ["trace_id = $trace_id", "contains(lower(hex(other_trace_ids)), $hex)"]
            parameters |= {"trace_id": bytes.fromhex(plain), "hex": plain}
    return _latest(conditions, parameters, limit)


def find_prefix(raw: str, limit: int) -> SqlQuery:
    """Find rows with an id that begins with ``raw``.

    Columns: filename, started_unix_ns.
    """
    conditions = [
        "starts_with(client_request_id, $raw)",
        f"(request_key <> '=' AND starts_with({_KEY}, $raw))",
        f"((starts_with($raw, {_BEGIN}) OR starts_with(response_id, $raw) OR starts_with(response_id, '\\'))"
        f" AND starts_with({_RESPONSE}, $raw))",
    ]
    parameters: dict[str, Parameter] = {"raw": raw}
    plain = _hex(raw)
    for column, digits in (("trace_id", 32), ("request_id", 16)):
        if plain is not None and len(plain) <= digits:
            conditions.append(f"{column} BETWEEN ${column}_first AND ${column}_last")
            parameters[f"{column}_first"] = bytes.fromhex(plain.ljust(digits, "0"))
            parameters[f"{column}_last"] = bytes.fromhex(plain.ljust(digits, "f"))
    return _latest(conditions, parameters, limit)


def _latest(conditions: list[str], parameters: dict[str, Parameter], limit: int) -> SqlQuery:
    # Only the places: with OR, DuckDB reads every selected column of every row (0.36 s of CPU against 0.06 s).
    text = (
        f"SELECT filename, started_unix_ns FROM {{table}} WHERE {' OR '.join(conditions)}"
        " ORDER BY started_unix_ns DESC LIMIT $row_limit"
    )
    return SqlQuery(text, parameters | {"row_limit": limit}, with_file=True)


def started(times_unix_ns: list[int]) -> SqlQuery:
    """Select whole rows that started at these times, all versions, latest first."""
    parameters: dict[str, Parameter] = {f"time_{index}": time for index, time in enumerate(dict.fromkeys(times_unix_ns))}
    listed = ", ".join(f"${name}" for name in parameters)
    text = f"SELECT * FROM {{table}} WHERE started_unix_ns IN ({listed}) ORDER BY started_unix_ns DESC, trace_id, request_id"
    return SqlQuery(text, parameters)


def _hex(raw: str) -> str | None:
    plain = raw.lower()
    return plain if _HEX_DIGITS.issuperset(plain) else None


def near(raw: str, limit: int) -> SqlQuery:
    """Select the ids most similar to ``raw``."""
    text = (
        "SELECT id FROM (SELECT id, max(jaro_winkler_similarity(id, $raw)) AS likeness FROM"
        f" (SELECT unnest([client_request_id, {_RESPONSE}, {_TRACE}, {_REQUEST}]) AS id FROM {{table}}"
        f" WHERE scope <> '{MERGED}')"
        " WHERE id IS NOT NULL GROUP BY id) WHERE likeness > 0.7 ORDER BY likeness DESC, id LIMIT $row_limit"
    )
    return SqlQuery(text, {"raw": raw, "row_limit": limit})


def spans(trace_ids: list[bytes]) -> SqlQuery:
    """Select every span of these traces."""
    text = 'SELECT * FROM {table} WHERE list_contains($trace_ids::BLOB[], trace_id) ORDER BY start_unix_ns, span_id, "offset"'
    return SqlQuery(text, {"trace_ids": trace_ids})


def columns(names: Sequence[str], conditions: Mapping[str, Parameter], base_version: int | None) -> SqlQuery:
    """Select columns of the newest versions of the requests that match, in no order.

    ``conditions``: fields of ``RequestFilter`` by name.
    ``base_version``: the lowest version of the store when ``{newer}`` files hold later ones; None when no file does.
    """
    return _newest(", ".join(f't."{name}"' for name in names), conditions, base_version, "")


def scopes(conditions: Mapping[str, Parameter], base_version: int | None) -> SqlQuery:
    """Select the scopes of the requests that match, most requests first.

    Columns: scope, number of requests, first and last start. Parameters as for ``columns``.
    """
    counted = "t.scope, count(*), min(t.started_unix_ns), max(t.started_unix_ns)"
    return _newest(counted, conditions, base_version, " GROUP BY t.scope ORDER BY count(*) DESC, t.scope")


def _newest(selected: str, conditions: Mapping[str, Parameter], base_version: int | None, ending: str) -> SqlQuery:
    parameters = dict(conditions)
    where = " AND ".join([f"scope <> '{MERGED}'", *(_CONDITIONS[name] for name in conditions)])
    if base_version is None:
        return SqlQuery(f"SELECT {selected} FROM {{table}} AS t WHERE {where}{ending}", parameters)
    text = (
        "WITH newest AS (SELECT trace_id, request_id, max(version) AS newest_version FROM {newer}"
        " WHERE version > $base_version GROUP BY ALL)"
        f" SELECT {selected} FROM {{table}} AS t LEFT JOIN newest USING (trace_id, request_id)"
        f" WHERE (newest_version IS NULL OR version >= newest_version) AND {where}{ending}"
    )
    return SqlQuery(text, parameters | {"base_version": base_version})


def _where(wanted: RequestFilter) -> tuple[str, dict[str, Parameter]]:
    parameters: dict[str, Parameter] = {}
    conditions = [f"scope <> '{MERGED}'"]
    for name, condition in _CONDITIONS.items():
        value = getattr(wanted, name)
        if value is not None:
            parameters[name] = value
            conditions.append(condition)
    if wanted.text is not None:
        text = wanted.text.lower()
        columns = (*_SEARCHED, _TRACE, _REQUEST) if _HEX_DIGITS.issuperset(text) else _SEARCHED
        found = [f"contains(lower({column}), $text)" for column in columns]
        found.append("contains(lower(array_to_string(findings, chr(10))), $text)")
        parameters["text"] = text
        conditions.append(f"({' OR '.join(found)})")
    return " AND ".join(conditions) or "TRUE", parameters
