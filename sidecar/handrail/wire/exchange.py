"""Encode an ``Exchange`` as an OTLP span and decode it, by a table of attributes.

Spans are built as ``opentelemetry.proto`` messages, not as SDK spans: docs/decisions/0003-spans-by-opentelemetry-proto.md has the
figures. Format and meaning: docs/wire.md. ``read_exchange(to_span(x), x.process) == x`` for every exchange whose
times and counts are sane; a value outside that becomes None on the reading side, never an exception.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from enum import Enum
from operator import attrgetter
from typing import Any, Final

from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from handrail import conventions as names
from handrail.identity import IdOrigin, joinable, request_key
from handrail.otlp.values import LARGEST, LATEST_UNIX_NS, Attributes, AttributeValue, attributes_of
from handrail.records import Exchange, Gaps, Hint, KvParams, Outcome, Process, Role, Source, SpanIds
from handrail.wire.codec import (
    add_bytes,
    add_flag,
    add_number,
    add_text,
    add_texts,
    clean_text,
    read_bytes,
    read_flag,
    read_number,
    read_text,
    read_texts,
)
from handrail.wire.stalls import read_stalls, write_stalls

_FLAGS_REMOTE_KNOWN: Final = 0x100  # SPAN_FLAGS_CONTEXT_HAS_IS_REMOTE_MASK
_FLAGS_REMOTE: Final = 0x200  # SPAN_FLAGS_CONTEXT_IS_REMOTE_MASK: a proxy's parent always is
_NO_FAILURE: Final = frozenset({Outcome.OK, Outcome.INCOMPLETE, Outcome.CLIENT_DISCONNECT})
_SPAN_NAMES: Final[Mapping[Role, str]] = {Role.PREFILL: names.SPAN_PREFILL, Role.DECODE: names.SPAN_DECODE}


class AttributeType(Enum):
    """OTLP type of an attribute, and the rule for a sane value of it."""

    TEXT = "string"
    NUMBER = "int"  # 0 <= n < LARGEST
    FLAG = "bool"
    BYTES = "bytes"
    TEXTS = "array of string"
    HINTS = "array of string, values of records.Hint"
    KV = "kvlist, keys of conventions.KV_FIELDS"


@dataclass(frozen=True, slots=True)
class Attribute:
    """One row: attribute ``name`` carries the dataclass field ``field`` as ``kind``."""

    name: str
    field: str
    kind: AttributeType


EXCHANGE_ATTRIBUTES: Final = (
    Attribute(names.TIME_DURATION_NS, "duration_ns", AttributeType.NUMBER),  # also end - start, which some backends round to us
    Attribute(names.HTTP_METHOD, "method", AttributeType.TEXT),
    Attribute(names.URL_PATH, "path", AttributeType.TEXT),
    Attribute(names.GEN_AI_OPERATION, "operation", AttributeType.TEXT),
    Attribute(names.TRACE_ORIGIN, "trace_origin", AttributeType.TEXT),
    Attribute(names.CLIENT_PARENT, "client_parent", AttributeType.TEXT),
    Attribute(names.REQUEST_ID, "request_id", AttributeType.TEXT),
    Attribute(names.REQUEST_ID_HASH, "request_id_hash", AttributeType.TEXT),
    Attribute(names.REQUEST_ID_ADDED, "request_id_added", AttributeType.FLAG),
    Attribute(names.GEN_AI_RESPONSE_ID, "response_id", AttributeType.TEXT),
    Attribute(names.GEN_AI_MODEL, "model", AttributeType.TEXT),
    Attribute(names.CHOICES, "choices", AttributeType.NUMBER),
    Attribute(names.STREAM, "stream", AttributeType.FLAG),
    Attribute(names.STREAM_REQUESTED, "stream_requested", AttributeType.FLAG),
    Attribute(names.INSPECTED, "inspected", AttributeType.TEXT),
    Attribute(names.HTTP_STATUS, "status", AttributeType.NUMBER),
    Attribute(names.ERROR_TYPE, "error_type", AttributeType.TEXT),
    Attribute(names.ERROR_CODE, "error_code", AttributeType.TEXT),
    Attribute(names.TIME_FORWARDED_NS, "forwarded_ns", AttributeType.NUMBER),
    Attribute(names.TIME_REQUEST_DONE_NS, "request_done_ns", AttributeType.NUMBER),
    Attribute(names.TIME_FIRST_BYTE_NS, "ttfb_ns", AttributeType.NUMBER),
    Attribute(names.TIME_FIRST_TOKEN_NS, "ttft_token_ns", AttributeType.NUMBER),
    Attribute(names.TIME_FIRST_TEXT_NS, "ttft_text_ns", AttributeType.NUMBER),
    Attribute(names.FIRST_TEXT_KIND, "ttft_text_kind", AttributeType.TEXT),
    Attribute(names.TIME_LAST_CONTENT_NS, "last_content_ns", AttributeType.NUMBER),
    Attribute(names.TIME_FINISH_NS, "finish_ns", AttributeType.NUMBER),
    Attribute(names.TIME_FIRST_DELIVERED_NS, "first_delivered_ns", AttributeType.NUMBER),
    Attribute(names.WRITE_BLOCKED_NS, "write_blocked_ns", AttributeType.NUMBER),
    Attribute(names.CONTENT_ENCODING, "content_encoding", AttributeType.TEXT),
    Attribute(names.EVENTS, "events", AttributeType.NUMBER),
    Attribute(names.TPOT_MEAN_NS, "tpot_mean_ns", AttributeType.NUMBER),
    Attribute(names.GEN_AI_INPUT_TOKENS, "prompt_tokens", AttributeType.NUMBER),
    Attribute(names.GEN_AI_OUTPUT_TOKENS, "output_tokens", AttributeType.NUMBER),
    Attribute(names.GEN_AI_CACHED_TOKENS, "cached_tokens", AttributeType.NUMBER),
    Attribute(names.GEN_AI_FINISH_REASONS, "finish_reasons", AttributeType.TEXTS),
    Attribute(names.KV_IN, "kv_in", AttributeType.KV),
    Attribute(names.KV_OUT, "kv_out", AttributeType.KV),
    Attribute(names.HINTS, "hints", AttributeType.HINTS),
    Attribute(names.RETRY_COUNT, "resend_count", AttributeType.NUMBER),
    Attribute(names.EXEMPLAR, "exemplar", AttributeType.FLAG),
)
GAP_ATTRIBUTES: Final = (
    Attribute(names.GAP_UNIT, "unit", AttributeType.TEXT),
    Attribute(names.GAP_COUNT, "count", AttributeType.NUMBER),
    Attribute(names.GAP_SUM_NS, "sum_ns", AttributeType.NUMBER),
    Attribute(names.GAP_MAX_NS, "max_ns", AttributeType.NUMBER),
    Attribute(names.GAP_MAX_AT_NS, "max_at_ns", AttributeType.NUMBER),
    Attribute(names.GAP_SKETCH, "sketch", AttributeType.BYTES),
)
ITL_ATTRIBUTES: Final = (
    Attribute(names.ITL_UNIT, "unit", AttributeType.TEXT),
    Attribute(names.ITL_COUNT, "count", AttributeType.NUMBER),
    Attribute(names.ITL_SUM_NS, "sum_ns", AttributeType.NUMBER),
    Attribute(names.ITL_MAX_NS, "max_ns", AttributeType.NUMBER),
    Attribute(names.ITL_MAX_AT_NS, "max_at_ns", AttributeType.NUMBER),
    Attribute(names.ITL_SKETCH, "sketch", AttributeType.BYTES),
)
_KV_NUMBERS: Final = frozenset({"remote_port", "remote_blocks", "remote_num_tokens"})
_KV_FLAGS: Final = frozenset({"do_remote_prefill", "do_remote_decode"})
KV_ATTRIBUTES: Final = tuple(
    Attribute(
        field,
        field,
        AttributeType.NUMBER if field in _KV_NUMBERS else AttributeType.FLAG if field in _KV_FLAGS else AttributeType.TEXT,
    )
    for field in names.KV_FIELDS
)


def to_span(exchange: Exchange) -> Span:
    """Encode ``exchange`` as a SERVER span; fields at their default are left out.

    Raises ValueError for ids that are not hex.
    """
    ids = exchange.ids
    span = Span(
        trace_id=bytes.fromhex(ids.trace_id),
        span_id=bytes.fromhex(ids.span_id),
        flags=ids.flags & 0xFF | _FLAGS_REMOTE_KNOWN,
        name=_SPAN_NAMES.get(exchange.process.role, names.SPAN_REQUEST),
        kind=Span.SPAN_KIND_SERVER,
        start_time_unix_nano=exchange.arrival_unix_ns,
        end_time_unix_nano=exchange.arrival_unix_ns + exchange.duration_ns,
    )
    if ids.parent_span_id:
        span.parent_span_id = bytes.fromhex(ids.parent_span_id)
        span.flags |= _FLAGS_REMOTE
    if exchange.outcome not in _NO_FAILURE:
        span.status.code = Status.STATUS_CODE_ERROR
    attributes = span.attributes
    add_text(attributes, names.SOURCE, exchange.source.value)
    add_text(attributes, names.OUTCOME, exchange.outcome.value)
    add_text(attributes, names.JOIN_KEY, join_key(exchange))
    _EXCHANGE.write(attributes, exchange)
    if exchange.gaps is not None:
        _GAPS.write(attributes, exchange.gaps)
    if exchange.itl is not None:
        _ITL.write(attributes, exchange.itl)
    if exchange.stalls is not None:
        write_stalls(span, exchange.stalls)
    return span


def read_exchange(span: Span, process: Process, attributes: Attributes | None = None) -> Exchange:
    """Decode the exchange in ``span``, observed at ``process``.

    ``attributes``: the span's attributes where they are decoded already. Raises ValueError where the span carries no exchange:
    it is not a proxy's or middleware's span, has ids of a wrong length, or no usable start or duration. An attribute that is
    absent, of another type, or absurd (negative, ``LARGEST`` or above) reads as not seen.
    """
    if len(span.trace_id) != 16 or len(span.span_id) != 8 or len(span.parent_span_id) not in (0, 8):
        raise ValueError("ids of a wrong length")
    found = attributes_of(span.attributes) if attributes is None else attributes
    values, gaps, itl = _read(found)
    source = _SOURCES.get(values.pop("source", ""))
    outcome = values.pop("outcome", None)
    if source is None or outcome is None:
        raise ValueError("no exchange: handrail.source or handrail.outcome missing or unknown")
    if not 0 < span.start_time_unix_nano < LATEST_UNIX_NS:
        raise ValueError("no usable start time")
    if "duration_ns" not in values:
        duration_ns = span.end_time_unix_nano - span.start_time_unix_nano
        if not 0 <= duration_ns < LARGEST:
            raise ValueError("no usable duration")
        values["duration_ns"] = duration_ns
    if not 100 <= values.get("status", 200) <= 999:
        del values["status"]
    return Exchange(
        process=process,
        source=source,
        ids=SpanIds(
            trace_id=span.trace_id.hex(),
            span_id=span.span_id.hex(),
            parent_span_id=span.parent_span_id.hex(),
            flags=span.flags & 0xFF,
        ),
        arrival_unix_ns=span.start_time_unix_nano,
        outcome=_OUTCOMES.get(outcome, Outcome.UNKNOWN),
        gaps=_whole_gaps(gaps),
        itl=_whole_gaps(itl),
        stalls=read_stalls(span, found),
        **values,
    )


def join_key(exchange: Exchange) -> str:
    """Key by which a tier of OpenTelemetry Collectors balances load.

    It is the request key where there is a usable one, else the trace id.
    """
    if exchange.request_id:
        key = request_key(exchange.request_id, IdOrigin.CLIENT).key
        if joinable(key):
            return key
    return exchange.ids.trace_id


def resource_of(process: Process, *, cluster: str = "", extra: Mapping[str, Any] | None = None) -> Resource:
    """Resource of everything that is sent about ``process``.

    ``extra``: further attributes (from OTEL_RESOURCE_ATTRIBUTES), str, bool, int or float; Handrail's own names win over them.
    """
    own = {
        names.SERVICE_NAME: process.service,
        names.SERVICE_INSTANCE_ID: process.sender,
        names.ROLE: process.role.value,
        names.INSTANCE: process.instance,
        names.SENDER_ID: process.sender,
        names.CLUSTER: cluster,
        names.HOST_ID: process.host,
        names.HOST_NAME: process.host_name,
    }
    resource = Resource()
    for name, value in {**(extra or {}), **{name: text for name, text in own.items() if text}}.items():
        entry = resource.attributes.add()
        entry.key = name
        if isinstance(value, bool):
            entry.value.bool_value = value
        elif isinstance(value, int):
            entry.value.int_value = value
        elif isinstance(value, float):
            entry.value.double_value = value
        else:
            entry.value.string_value = clean_text(str(value))
    return resource


def process_of(resource: Resource) -> Process:
    """Process that a resource, ours or another's, describes.

    An unknown role is ``Role.UNKNOWN``, never a guess.
    """
    text = {a.key: a.value.string_value for a in resource.attributes if a.value.WhichOneof("value") == "string_value"}
    sender = text.get(names.SENDER_ID, "")
    instance = text.get(names.INSTANCE, "")
    # A sidecar's service.instance.id is its sender id: it names no engine.
    if not instance and (named := text.get(names.SERVICE_INSTANCE_ID, "")) != sender:
        instance = named
    host_name = text.get(names.HOST_NAME, "")
    return Process(
        role=_ROLES.get(text.get(names.ROLE, ""), Role.UNKNOWN),
        instance=instance,
        host=text.get(names.HOST_ID) or host_name,
        service=text.get(names.SERVICE_NAME, ""),
        sender=sender,
        host_name=host_name,
    )


_SOURCES: Final = {source.value: source for source in Source}
_OUTCOMES: Final = {outcome.value: outcome for outcome in Outcome}
_ROLES: Final = {role.value: role for role in Role}
_HINTS: Final = {hint.value: hint for hint in Hint}
_GAP_UNITS: Final = frozenset({"chunk", "token"})


def _add_hints(entries: Any, name: str, value: tuple[Hint, ...]) -> None:
    add_texts(entries, name, tuple(hint.value for hint in value))


def _add_kv(entries: Any, name: str, value: KvParams) -> None:
    entry = entries.add()
    entry.key = name
    entry.value.kvlist_value.SetInParent()
    _KV.write(entry.value.kvlist_value.values, value)


def _read_hints(value: AttributeValue) -> tuple[Hint, ...] | None:
    return tuple(_HINTS[text] for text in read_texts(value) or () if text in _HINTS)


def _read_kv(value: AttributeValue) -> KvParams | None:
    if not isinstance(value, dict):
        return None
    values = {}
    for key, entry in value.items():
        if (row := _KV_ROWS.get(key)) is not None and (found := row[1](entry)) is not None:
            values[row[0]] = found
    return KvParams(**values)


_WRITERS: Final[Mapping[AttributeType, Callable[[Any, str, Any], None]]] = {
    AttributeType.TEXT: add_text,
    AttributeType.NUMBER: add_number,
    AttributeType.FLAG: add_flag,
    AttributeType.BYTES: add_bytes,
    AttributeType.TEXTS: add_texts,
    AttributeType.HINTS: _add_hints,
    AttributeType.KV: _add_kv,
}
_READERS: Final[Mapping[AttributeType, Callable[[AttributeValue], Any]]] = {
    AttributeType.TEXT: read_text,
    AttributeType.NUMBER: read_number,
    AttributeType.FLAG: read_flag,
    AttributeType.BYTES: read_bytes,
    AttributeType.TEXTS: read_texts,
    AttributeType.HINTS: _read_hints,
    AttributeType.KV: _read_kv,
}


class _Writer:
    """Prepared table for fast writes.

    It fetches all fields at once, and binds the function of each row once (an Enum as a key costs 0.2 us).
    """

    def __init__(self, table: tuple[Attribute, ...], kind: type[Exchange] | type[Gaps] | type[KvParams]) -> None:
        defaults = {field.name: None if field.default is MISSING else field.default for field in fields(kind)}
        self._values: Callable[[Any], tuple[Any, ...]] = attrgetter(*(row.field for row in table))
        self._rows = tuple((row.name, defaults[row.field], _WRITERS[row.kind]) for row in table)

    def write(self, entries: Any, record: Exchange | Gaps | KvParams) -> None:
        """Append every field that is not at its default to a repeated KeyValue field."""
        for (name, default, add), value in zip(self._rows, self._values(record), strict=True):
            if value != default:
                add(entries, name, value)


_KV: Final = _Writer(KV_ATTRIBUTES, KvParams)
_GAPS: Final = _Writer(GAP_ATTRIBUTES, Gaps)
_ITL: Final = _Writer(ITL_ATTRIBUTES, Gaps)
_EXCHANGE: Final = _Writer(EXCHANGE_ATTRIBUTES, Exchange)
_KV_ROWS: Final = {row.name: (row.field, _READERS[row.kind]) for row in KV_ATTRIBUTES}
_ROWS: Final = {
    names.SOURCE: (0, "source", read_text),
    names.OUTCOME: (0, "outcome", read_text),
    **{
        row.name: (part, row.field, _READERS[row.kind])
        for part, table in enumerate((EXCHANGE_ATTRIBUTES, GAP_ATTRIBUTES, ITL_ATTRIBUTES))
        for row in table
    },
}


def _read(attributes: Attributes) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Sane values by field: of the exchange, its gaps and its per-token gaps."""
    parts: tuple[dict[str, Any], dict[str, Any], dict[str, Any]] = ({}, {}, {})
    for key, given in attributes.items():
        if (row := _ROWS.get(key)) is not None:
            part, field, read = row
            if (value := read(given)) is not None:
                parts[part][field] = value
    return parts


def _whole_gaps(values: dict[str, Any]) -> Gaps | None:
    """Gaps of the exchange, or None where any part of them is missing.

    Half a figure is none.
    """
    return Gaps(**values) if len(values) == len(GAP_ATTRIBUTES) and values["unit"] in _GAP_UNITS else None
