"""Encode rows and spans as JSON documents.

The HTTP API sends them, and the command line reads them.
Every field of the dataclass has its own name. Times are integer nanoseconds, which exceed what JavaScript's numbers hold
exactly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeVar

from handrail_collector.rows import FetchRow, JoinRow, PhaseRow, RequestRow, StallRow
from handrail_collector.store.tables.spans import SpanEvent, SpanLink, SpanRow, parsed_attributes, plain_attributes

SpanPartT = TypeVar("SpanPartT", SpanEvent, SpanLink)
_TUPLES = ("other_trace_ids", "gap_buckets", "gap_counts", "findings", "hints", "span_ids", "kv_evidence")


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestAnswer:
    """One request with everything that belongs to it.

    It is the answer of ``GET /api/v1/requests/{id}``.
    ``baseline``: how it compares with the requests around it. ``hardware``: activity of GPUs and links meanwhile.
    Both are None where they are not known.
    """

    row: RequestRow
    fetches: Sequence[FetchRow] = ()
    stalls: Sequence[StallRow] = ()
    spans: Sequence[SpanRow] = ()
    baseline: Mapping[str, Any] | None = None
    hardware: Mapping[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        """Encode every part."""
        return {
            "request": provisional_to_json(self.row),
            "fetches": [fetch_to_json(fetch) for fetch in self.fetches],
            "stalls": [stall_to_json(stall) for stall in self.stalls],
            "spans": [span_to_json(span) for span in self.spans],
            "matches": 1,
            "baseline": self.baseline,
            "hardware": self.hardware,
        }

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> RequestAnswer:
        """Decode the answer: the inverse of ``to_json``.

        Unknown names are ignored. Raises ``ValueError`` where a part is missing or has the wrong shape.
        """
        try:
            return cls(
                row=row_from_json(plain["request"]),
                fetches=[fetch_from_json(fetch) for fetch in plain["fetches"]],
                stalls=[stall_from_json(stall) for stall in plain["stalls"]],
                spans=[span_from_json(span) for span in plain["spans"]],
                baseline=plain["baseline"],
                hardware=plain["hardware"],
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"not the answer for one request: {error}") from error


def candidates_to_json(rows: Sequence[RequestRow]) -> dict[str, Any]:
    """Encode the requests that one id may mean."""
    return {"candidates": [provisional_to_json(row) for row in rows], "matches": len(rows)}


def provisional_to_json(row: RequestRow) -> dict[str, Any]:
    """Encode every field, and ``provisional``: the request is still open."""
    return row_to_json(row) | {"provisional": row.version == 0}


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


def span_from_json(plain: Mapping[str, Any]) -> SpanRow:
    """Decode a span: the inverse of ``span_to_json``.

    Unknown names are ignored. Raises ``ValueError`` where a field is missing or has the wrong shape.
    """
    try:
        known = {field.name: plain[field.name] for field in fields(SpanRow)}
        known |= {name: parsed_attributes(known[name]) for name in ("resource", "attributes")}
        known["events"] = tuple(_part(SpanEvent, event) for event in known["events"])
        known["links"] = tuple(_part(SpanLink, link) for link in known["links"])
    except (KeyError, TypeError) as error:
        raise ValueError(f"not a span: {error}") from error
    return SpanRow(**known)


def _part(kind: type[SpanPartT], plain: Mapping[str, Any]) -> SpanPartT:
    known = {field.name: plain[field.name] for field in fields(kind)}
    return kind(**(known | {"attributes": parsed_attributes(known["attributes"])}))


def _phase(plain: Mapping[str, Any]) -> PhaseRow:
    known = {field.name: plain[field.name] for field in fields(PhaseRow)}
    return PhaseRow(**(known | {"may_be": tuple(known["may_be"])}))
