"""Define a stored span, and convert spans between OTLP, rows and columns.

Attributes keep their OTLP type: a number stays a number. Arrays and key-value lists become tuples and dictionaries.
Only the order of attributes is lost. Rows are sorted by trace.
Every attribute key becomes a column of its own type (``a.i.gen_ai.usage.input_tokens``).
The values of one key are alike, so they compress, and any SQL client can read them.
A file has the ``MAX_ATTRIBUTE_COLUMNS`` most common attributes as columns.
Others, and keys with upper case (DuckDB's column names ignore case), are JSON in ``attributes_more``: bytes become
``{"$bytes": base64}``, arrays are read back as tuples, and a map whose only key starts with ``$`` is wrapped as
``{"$map": ...}``, so that a sender's map is never mistaken for a tag.
"""

from __future__ import annotations

import base64
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, Span

from handrail import conventions as names
from handrail.otlp.values import LATEST_UNIX_NS, Attributes, AttributeValue, attributes_of
from handrail_collector.store.schema import SPAN_COLUMNS, StoreColumn, attribute_column, column_array


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanEvent:
    """A timed event of a span."""

    name: str
    time_unix_ns: int
    attributes: Attributes


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanLink:
    """A link to another span. Ids are lower-case hex."""

    trace_id: str
    span_id: str
    attributes: Attributes


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanRow:
    """One span as the store keeps it.

    Ids are lower-case hex. ``kind`` and ``status`` are OTLP's enum numbers. ``offset`` is that of its journal entry.
    """

    offset: int
    trace_id: str
    span_id: str
    parent_span_id: str  # '' for a root
    name: str
    kind: int
    start_unix_ns: int
    end_unix_ns: int
    status: int
    status_message: str
    flags: int
    trace_state: str
    role: str
    instance: str
    service: str
    scope: str
    resource: Attributes
    attributes: Attributes
    events: tuple[SpanEvent, ...]
    links: tuple[SpanLink, ...]
    raw_bytes: int  # size of the span's protobuf encoding


@dataclass(frozen=True, slots=True)
class SpanPlace:
    """The resource and scope that the spans of one batch share.

    Build it once per batch.
    """

    offset: int
    scope: str
    resource: Attributes

    def row(self, span: Span, attributes: Attributes) -> SpanRow:
        """Convert ``span`` to a row; ``attributes`` are its own, decoded."""
        status = span.status
        resource = self.resource
        return SpanRow(
            offset=self.offset,
            trace_id=span.trace_id.hex(),
            span_id=span.span_id.hex(),
            parent_span_id=span.parent_span_id.hex(),
            name=span.name,
            kind=span.kind,
            start_unix_ns=min(span.start_time_unix_nano, LATEST_UNIX_NS),
            end_unix_ns=min(span.end_time_unix_nano, LATEST_UNIX_NS),
            status=status.code,
            status_message=status.message,
            flags=span.flags,
            trace_state=span.trace_state,
            role=_word(resource.get(names.ROLE)),
            instance=_word(resource.get(names.INSTANCE)),
            service=_word(resource.get(names.SERVICE_NAME)),
            scope=self.scope,
            resource=resource,
            attributes=attributes,
            events=tuple(map(_event, span.events)),
            links=tuple(map(_link, span.links)),
            raw_bytes=span.ByteSize(),
        )


def span_rows(resource_spans: Iterable[ResourceSpans], offset: int) -> Iterator[SpanRow]:
    """Convert the spans of one journal entry.

    Scope attributes (``handrail.batch.seq``) belong to the delivery and are dropped.
    """
    for group in resource_spans:
        resource = attributes_of(group.resource.attributes)
        for scoped in group.scope_spans:
            place = SpanPlace(offset, scoped.scope.name, resource)
            for span in scoped.spans:
                yield place.row(span, attributes_of(span.attributes))


def _event(event: Span.Event) -> SpanEvent:
    time_unix_ns = min(event.time_unix_nano, LATEST_UNIX_NS)
    return SpanEvent(name=event.name, time_unix_ns=time_unix_ns, attributes=attributes_of(event.attributes))


def _link(link: Span.Link) -> SpanLink:
    return SpanLink(trace_id=link.trace_id.hex(), span_id=link.span_id.hex(), attributes=attributes_of(link.attributes))


def _word(value: AttributeValue) -> str:
    return value if isinstance(value, str) else ""


def encode_attributes(value: AttributeValue | Mapping[str, AttributeValue]) -> str:
    """Encode a value or a map as compact JSON text."""
    return json.dumps(plain_attributes(value), separators=(",", ":"), ensure_ascii=False)


def decode_attribute(text: str) -> AttributeValue:
    """Decode the text that ``encode_attributes`` wrote. Raises ``ValueError``."""
    return _attribute_value(json.loads(text))


def decode_attributes(text: str | None) -> dict[str, AttributeValue]:
    """Decode a map that ``encode_attributes`` wrote.

    Returns an empty map for None. Raises ``ValueError`` when the text is no JSON object.
    """
    return parsed_attributes(json.loads(text)) if text else {}


def parsed_attributes(found: object) -> dict[str, AttributeValue]:
    """Decode a map that ``plain_attributes`` made. Raises ``ValueError``."""
    value = _attribute_value(found)
    if not isinstance(value, dict):
        raise ValueError("a JSON object was expected")
    return value


def plain_attributes(value: object) -> object:
    """Convert a value to types that ``json`` encodes, for use in a larger document."""
    if isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode("ascii")}
    if isinstance(value, (tuple, list)):
        return [plain_attributes(item) for item in value]
    if isinstance(value, Mapping):
        items = {key: plain_attributes(item) for key, item in value.items()}
        return {"$map": items} if _reserved(items) else items
    return value


def _reserved(value: Mapping[str, object]) -> bool:
    return len(value) == 1 and next(iter(value)).startswith("$")


def _attribute_value(found: object) -> AttributeValue:
    if isinstance(found, list):
        return tuple(_attribute_value(item) for item in found)
    if isinstance(found, dict):
        if _reserved(found):
            (tag, inner), *_ = found.items()
            if tag == "$bytes":
                return base64.b64decode(inner)
            if tag != "$map":
                raise ValueError(f"unknown tag {tag}")
            return _attribute_map(inner)
        return _attribute_map(found)
    if found is None or isinstance(found, (str, bool, int, float)):
        return found
    raise ValueError(f"not an attribute value: {type(found).__name__}")


def _attribute_map(found: object) -> dict[str, AttributeValue]:
    if not isinstance(found, dict):
        raise ValueError(f"a JSON object was expected, not {type(found).__name__}")
    return {key: _attribute_value(item) for key, item in found.items()}


MAX_ATTRIBUTE_COLUMNS = 96
"""Most attribute columns of a file, because a peer may send any key.

Each column costs a reader about 100 bytes of every file's footer.
"""

REPEATS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("gen_ai.latency.e2e", ("gen_ai.latency.time_to_first_token",)),
    ("gen_ai.latency.time_in_model_inference", ("gen_ai.latency.time_in_model_prefill", "gen_ai.latency.time_in_model_decode")),
    (names.REQUEST_KEY, (names.REQUEST_ID,)),
    (names.JOIN_KEY, (names.REQUEST_KEY,)),
)
"""Attributes that often repeat others and are then not stored.

An attribute that equals the others (their sum, to the last bit) is left out; bit n of column ``repeats`` marks the n-th.
New entries go to the end, because stored bits count from the front.
"""

_LETTERS: dict[type, str] = {str: "s", bool: "b", int: "i", float: "d", bytes: "x", tuple: "j", dict: "j"}
Shape = tuple[tuple[str, ...], tuple[type, ...]]


def spans_table(rows: Sequence[SpanRow]) -> tuple[pa.Table, tuple[StoreColumn, ...]]:
    """Encode ``rows``, sorted by trace, and return the columns of the table.

    Raises ``ValueError`` for ids that are not hex.
    """
    rows = _by_trace(rows)
    attributes, attribute_columns = _attributes(len(rows), _groups(rows))
    values: dict[str, list[object]] = {
        "offset": [row.offset for row in rows],
        "trace_id": [bytes.fromhex(row.trace_id) for row in rows],
        "span_id": [bytes.fromhex(row.span_id) for row in rows],
        "parent_span_id": [bytes.fromhex(row.parent_span_id) or None for row in rows],
        "name": [row.name for row in rows],
        "kind": [row.kind for row in rows],
        "start_unix_ns": [row.start_unix_ns for row in rows],
        "duration_ns": [row.end_unix_ns - row.start_unix_ns for row in rows],
        "status": [row.status for row in rows],
        "status_message": [row.status_message or None for row in rows],
        "flags": [row.flags for row in rows],
        "trace_state": [row.trace_state or None for row in rows],
        "role": [row.role for row in rows],
        "instance": [row.instance for row in rows],
        "service": [row.service for row in rows],
        "scope": [row.scope for row in rows],
        "resource": _resources(rows),
        "events": [_events(row.events) if row.events else None for row in rows],
        "links": [_links(row.links) if row.links else None for row in rows],
        "raw_bytes": [row.raw_bytes for row in rows],
        **attributes,
    }
    columns = (*SPAN_COLUMNS, *attribute_columns)
    arrays = [column_array(values[c.name], c.type) for c in columns]
    return pa.table(arrays, schema=pa.schema([(c.name, c.type) for c in columns])), columns


def span_row(stored: Mapping[str, object]) -> SpanRow:
    """Decode one row, given by column name.

    Raises ``ValueError`` for a damaged row.
    """
    get = stored.get
    start = _integer(get("start_unix_ns"))
    return SpanRow(
        offset=_integer(get("offset")),
        trace_id=_hex(get("trace_id")),
        span_id=_hex(get("span_id")),
        parent_span_id=_hex(get("parent_span_id")),
        name=_text(get("name")),
        kind=_integer(get("kind")),
        start_unix_ns=start,
        end_unix_ns=start + _integer(get("duration_ns")),
        status=_integer(get("status")),
        status_message=_text(get("status_message")),
        flags=_integer(get("flags")),
        trace_state=_text(get("trace_state")),
        role=_text(get("role")),
        instance=_text(get("instance")),
        service=_text(get("service")),
        scope=_text(get("scope")),
        resource=decode_attributes(_text(get("resource"))),
        attributes=_stored_attributes(stored),
        events=tuple(_event_rows(get("events"))),
        links=tuple(_link_rows(get("links"))),
        raw_bytes=_integer(get("raw_bytes")),
    )


def _by_trace(rows: Sequence[SpanRow]) -> list[SpanRow]:
    first: dict[str, int] = {}
    for row in rows:
        first[row.trace_id] = min(row.start_unix_ns, first.get(row.trace_id, row.start_unix_ns))
    return sorted(rows, key=lambda row: (first[row.trace_id], row.trace_id, row.start_unix_ns, row.offset))


@dataclass(slots=True)
class _Group:
    """Spans with the same keys of the same types: their indices, and values by key."""

    places: list[int]
    kinds: dict[str, type]
    values: dict[str, Sequence[object]]
    repeats: list[int]


def _groups(rows: Sequence[SpanRow]) -> list[_Group]:
    """Group spans by the shape of their attributes.

    The following steps then work on columns: 7 us per span instead of 11 us one by one.
    """
    shapes: dict[Shape, list[int]] = {}
    for at, row in enumerate(rows):
        attributes = row.attributes
        shapes.setdefault((tuple(attributes), tuple(map(type, attributes.values()))), []).append(at)
    groups = []
    for (keys, kinds), places in shapes.items():
        values = zip(*(rows[at].attributes.values() for at in places), strict=True)
        group = _Group(places, dict(zip(keys, kinds, strict=True)), dict(zip(keys, values, strict=True)), [0] * len(places))
        _leave_out_repeats(group)
        groups.append(group)
    return groups


def _leave_out_repeats(group: _Group) -> None:
    kept = dict(group.values)
    for bit, (name, parts) in enumerate(REPEATS):
        if name not in group.values or not group.values.keys() >= set(parts):
            continue
        left: list[object] = list(group.values[name])
        for at, (value, *known) in enumerate(zip(left, *(group.values[part] for part in parts), strict=True)):
            repeated = _repeated(known) if value else None  # 0.0 is stored: it would lose its sign
            if repeated is not None and repeated == value and type(repeated) is type(value):
                group.repeats[at] |= 1 << bit
                left[at] = None
        kept[name] = left
    group.values = kept


def _repeated(known: Sequence[object]) -> str | float | None:
    """Return the one text, or the sum of fractions from left to right.

    Returns None unless all values fit.
    """
    if len(known) == 1 and isinstance(known[0], str):
        return known[0]
    total = 0.0
    for value in known:
        if type(value) is not float or not value >= 0:
            return None
        total += value
    return total


def _attribute_columns(groups: Sequence[_Group]) -> list[tuple[str, str]]:
    counts: Counter[tuple[str, str]] = Counter()
    for group in groups:
        for key, kind in group.kinds.items():
            if kind in _LETTERS and key == key.lower() and any(value is not None for value in group.values[key]):
                counts[key, _LETTERS[kind]] += len(group.places)
    return sorted(column for column, _ in counts.most_common(MAX_ATTRIBUTE_COLUMNS))


def _attributes(rows: int, groups: Sequence[_Group]) -> tuple[dict[str, list[object]], list[StoreColumn]]:
    """Collect values by column, and list the attribute columns."""
    chosen = _attribute_columns(groups)
    lists: dict[tuple[str, str], list[object]] = {column: [None] * rows for column in chosen}
    repeats: list[object] = [None] * rows
    more: list[object] = [None] * rows
    for group in groups:
        left = []
        for key, kind in group.kinds.items():
            target = lists.get((key, _LETTERS.get(kind, "")))
            if target is None:
                left.append(key)
                continue
            values: Iterable[object] = group.values[key]
            if kind in (tuple, dict):
                values = map(encode_attributes, group.values[key])  # type: ignore[arg-type]  # by the kind
            for at, value in zip(group.places, values, strict=True):
                target[at] = value
        for position, at in enumerate(group.places):
            bits = group.repeats[position]
            repeats[at] = bits or None
            if rest := {key: group.values[key][position] for key in left if not bits or not _is_left_out(key, bits)}:
                more[at] = encode_attributes(rest)  # type: ignore[arg-type]  # attribute values, as they came
    columns = [attribute_column(letter, key) for key, letter in chosen]
    named = {column.name: lists[pair] for column, pair in zip(columns, chosen, strict=True)}
    return {"attributes_more": more, "repeats": repeats} | named, columns


def _is_left_out(key: str, bits: int) -> bool:
    return any(name == key and bits & 1 << bit for bit, (name, _) in enumerate(REPEATS))


def _stored_attributes(stored: Mapping[str, object]) -> dict[str, AttributeValue]:
    found: dict[str, AttributeValue] = {}
    for name, value in stored.items():
        if value is None or not name.startswith("a."):
            continue
        _, letter, key = name.split(".", 2)
        found[key] = decode_attribute(_text(value)) if letter == "j" else value  # type: ignore[assignment]  # by the column
    found |= decode_attributes(_text(stored.get("attributes_more")))
    repeats = stored.get("repeats")
    for bit, (name, parts) in enumerate(REPEATS):
        if isinstance(repeats, int) and repeats & 1 << bit:
            found[name] = _repeated([found.get(part) for part in parts])
    return found


def _resources(rows: Sequence[SpanRow]) -> list[object]:
    """Encode each row's resource as JSON.

    Spans of one batch share the object, so it is encoded once.
    """
    known: dict[int, str] = {}
    return [known.get(id(row.resource)) or known.setdefault(id(row.resource), encode_attributes(row.resource)) for row in rows]


def _events(events: Iterable[SpanEvent]) -> str:
    return encode_attributes(tuple((e.name, e.time_unix_ns, dict(e.attributes)) for e in events))


def _links(links: Iterable[SpanLink]) -> str:
    return encode_attributes(tuple((link.trace_id, link.span_id, dict(link.attributes)) for link in links))


def _event_rows(text: object) -> Iterator[SpanEvent]:
    for name, time_unix_ns, attributes in _triples(text):
        yield SpanEvent(name=_text(name), time_unix_ns=_integer(time_unix_ns), attributes=_map(attributes))


def _link_rows(text: object) -> Iterator[SpanLink]:
    for trace_id, span_id, attributes in _triples(text):
        yield SpanLink(trace_id=_text(trace_id), span_id=_text(span_id), attributes=_map(attributes))


def _triples(text: object) -> Iterator[tuple[AttributeValue, AttributeValue, AttributeValue]]:
    rows = decode_attribute(text) if isinstance(text, str) else ()
    if not isinstance(rows, tuple):
        raise ValueError("a JSON array was expected")
    for row in rows:
        if not isinstance(row, tuple) or len(row) != 3:
            raise ValueError("an array of three was expected")
        yield row[0], row[1], row[2]


def _map(value: AttributeValue) -> Attributes:
    if not isinstance(value, dict):
        raise ValueError("a JSON object was expected")
    return value


def _integer(value: object) -> int:
    if not isinstance(value, int):
        raise ValueError(f"an integer was expected, not {type(value).__name__}")
    return value


def _text(value: object) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise ValueError(f"text was expected, not {type(value).__name__}")
    return value


def _hex(value: object) -> str:
    if value is None:
        return ""
    if not isinstance(value, bytes):
        raise ValueError(f"bytes were expected, not {type(value).__name__}")
    return value.hex()
