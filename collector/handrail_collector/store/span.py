"""One span as the store keeps it, and how it is read from OTLP.

Attributes keep their OTLP type: a number stays a number. Arrays and key-value lists become tuples and dictionaries.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Union

from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, Span

from handrail import conventions as names

AttributeValue = Union[str, bool, int, float, bytes, None, "tuple[AttributeValue, ...]", "dict[str, AttributeValue]"]
Attributes = Mapping[str, AttributeValue]

MAX_UNIX_NS = 2**63 - 1
"""OTLP times are unsigned 64 bit; a later one is stored as this."""


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
    """One span. Ids are lower-case hex; ``kind`` and ``status`` are OTLP's enum numbers; ``offset`` is of its journal entry."""

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


def span_rows(resource_spans: Iterable[ResourceSpans], offset: int) -> Iterator[SpanRow]:
    """The spans of one journal entry. Scope attributes (``handrail.batch.seq``) belong to the delivery and are not kept."""
    for group in resource_spans:
        resource = attributes_of(group.resource.attributes)
        role, instance, service = (_text(resource.get(key)) for key in (names.ROLE, names.INSTANCE, names.SERVICE_NAME))
        for scoped in group.scope_spans:
            scope = scoped.scope.name
            for span in scoped.spans:
                yield _row(span, offset, resource, role, instance, service, scope)


def _row(span: Span, offset: int, resource: Attributes, role: str, instance: str, service: str, scope: str) -> SpanRow:
    status = span.status
    return SpanRow(
        offset=offset,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_span_id=span.parent_span_id.hex(),
        name=span.name,
        kind=span.kind,
        start_unix_ns=min(span.start_time_unix_nano, MAX_UNIX_NS),
        end_unix_ns=min(span.end_time_unix_nano, MAX_UNIX_NS),
        status=status.code,
        status_message=status.message,
        flags=span.flags,
        trace_state=span.trace_state,
        role=role,
        instance=instance,
        service=service,
        scope=scope,
        resource=resource,
        attributes=attributes_of(span.attributes),
        events=tuple(map(_event, span.events)),
        links=tuple(map(_link, span.links)),
        raw_bytes=span.ByteSize(),
    )


def _event(event: Span.Event) -> SpanEvent:
    time_unix_ns = min(event.time_unix_nano, MAX_UNIX_NS)
    return SpanEvent(name=event.name, time_unix_ns=time_unix_ns, attributes=attributes_of(event.attributes))


def _link(link: Span.Link) -> SpanLink:
    return SpanLink(trace_id=link.trace_id.hex(), span_id=link.span_id.hex(), attributes=attributes_of(link.attributes))


def attributes_of(pairs: Sequence[KeyValue]) -> dict[str, AttributeValue]:
    """OTLP key-value pairs as a dictionary; the last of equal keys wins."""
    found: dict[str, AttributeValue] = {}
    for pair in pairs:  # half of what a span costs to read: the commonest types without another call
        value = pair.value
        kind = value.WhichOneof("value")
        if kind == "double_value":
            found[pair.key] = value.double_value
        elif kind == "string_value":
            found[pair.key] = value.string_value
        elif kind == "int_value":
            found[pair.key] = value.int_value
        else:
            found[pair.key] = _value(value)
    return found


def _value(value: AnyValue) -> AttributeValue:
    kind = value.WhichOneof("value")
    if kind is None:
        return None
    if kind == "array_value":
        return tuple(_value(item) for item in value.array_value.values)
    if kind == "kvlist_value":
        return attributes_of(value.kvlist_value.values)
    found: AttributeValue = getattr(value, kind)
    return found


def _text(value: AttributeValue) -> str:
    return value if isinstance(value, str) else ""
