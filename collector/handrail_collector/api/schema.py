"""Encode rows and spans as JSON documents.

The HTTP API sends them, and the command line reads them.
Every field of the dataclass has its own name. Times are integer nanoseconds, which exceed what JavaScript's numbers hold
exactly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from handrail_collector.rows import FetchRow, JoinRow, PhaseRow, RequestRow, StallRow
from handrail_collector.store.tables.spans import SpanRow, plain_attributes

_TUPLES = ("other_trace_ids", "gap_buckets", "gap_counts", "findings", "hints", "span_ids", "kv_evidence")


def row_to_json(row: RequestRow) -> dict[str, Any]:
    """Encode every field."""
    return asdict(row)


def row_from_json(plain: Mapping[str, Any]) -> RequestRow:
    """Decode a row: the inverse of ``row_to_json``.

    Unknown names are ignored. Raises ``ValueError`` where a field is missing or has the wrong shape.
    """
    try:
        known = {field.name: plain[field.name] for field in fields(RequestRow)}
        known |= {name: tuple(known[name]) for name in _TUPLES}
        known["phases"] = tuple(_phase(phase) for phase in known["phases"])
        known["joins"] = tuple(JoinRow(**{f.name: join[f.name] for f in fields(JoinRow)}) for join in known["joins"])
    except (KeyError, TypeError) as error:
        raise ValueError(f"not a request row: {error}") from error
    return RequestRow(**known)


def fetch_to_json(row: FetchRow) -> dict[str, Any]:
    """Encode every field; ``provisional`` while the request is open."""
    return asdict(row) | {"provisional": row.version == 0}


def fetch_from_json(plain: Mapping[str, Any]) -> FetchRow:
    """Decode a KV fetch: the inverse of ``fetch_to_json``.

    Unknown names are ignored. Raises ``ValueError`` where a field is missing.
    """
    try:
        known = {field.name: plain[field.name] for field in fields(FetchRow)}
        return FetchRow(**(known | {"evidence": tuple(known["evidence"])}))
    except (KeyError, TypeError) as error:
        raise ValueError(f"not a hand-off: {error}") from error


def stall_to_json(row: StallRow) -> dict[str, Any]:
    """Encode every field."""
    return asdict(row)


def stall_from_json(plain: Mapping[str, Any]) -> StallRow:
    """Decode a stall: the inverse of ``stall_to_json``.

    Unknown names are ignored. Raises ``ValueError`` where a field is missing.
    """
    try:
        known = {field.name: plain[field.name] for field in fields(StallRow)}
        return StallRow(**(known | {"evidence": tuple(known["evidence"])}))
    except (KeyError, TypeError) as error:
        raise ValueError(f"not a stall: {error}") from error


def span_to_json(span: SpanRow) -> dict[str, Any]:
    """Encode every field.

    Attribute values keep their types; bytes become ``{"$bytes": base64}``.
    """
    plain = {field.name: getattr(span, field.name) for field in fields(SpanRow)}
    plain["resource"] = plain_attributes(span.resource)
    plain["attributes"] = plain_attributes(span.attributes)
    plain["events"] = [
        {"name": e.name, "time_unix_ns": e.time_unix_ns, "attributes": plain_attributes(e.attributes)} for e in span.events
    ]
    plain["links"] = [
        {"trace_id": link.trace_id, "span_id": link.span_id, "attributes": plain_attributes(link.attributes)}
        for link in span.links
    ]
    return plain


def _phase(plain: Mapping[str, Any]) -> PhaseRow:
    known = {field.name: plain[field.name] for field in fields(PhaseRow)}
    return PhaseRow(**(known | {"may_be": tuple(known["may_be"])}))
