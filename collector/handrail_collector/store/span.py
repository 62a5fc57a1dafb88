"""Define a stored span, and convert spans from OTLP.

Attributes keep their OTLP type: a number stays a number. Arrays and key-value lists become tuples and dictionaries.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, Span

from handrail import conventions as names
from handrail.otlp.values import LATEST_UNIX_NS, Attributes, AttributeValue, attributes_of


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
            role=_text(resource.get(names.ROLE)),
            instance=_text(resource.get(names.INSTANCE)),
            service=_text(resource.get(names.SERVICE_NAME)),
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


def _text(value: AttributeValue) -> str:
    return value if isinstance(value, str) else ""
