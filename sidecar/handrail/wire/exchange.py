"""Encode an ``Exchange`` as an OTLP span and decode it, by tables of attributes.

Spans are built as ``opentelemetry.proto`` messages, not as SDK spans: docs/decisions/0003-spans-by-opentelemetry-proto.md has the
figures. Format and meaning: docs/wire.md. ``read_exchange(to_span(x), x.process) == x`` for every exchange whose
times and counts are sane; a value outside that becomes None on the reading side, never an exception.
The stalls of a stream are on the same span: two counts are attributes, and the longest stalls are events. An event that is absurd
(no length, an end before its begin) is left out on reading, and so is everything beyond ``KEPT`` events.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from handrail import conventions as names
from handrail.identity import IdOrigin, joinable, request_key
from handrail.otlp.values import LARGEST, LATEST_UNIX_NS, Attributes, attributes_of
from handrail.records import Exchange, Gaps, Outcome, Process, Role, Source, SpanIds
from handrail.stalls import KEPT, Stall, Stalls
from handrail.wire.codec import RecordTable, add_bytes, add_number, add_text, clean_text, read_bytes, read_number, read_text

_FLAGS_REMOTE_KNOWN: Final = 0x100  # SPAN_FLAGS_CONTEXT_HAS_IS_REMOTE_MASK
_FLAGS_REMOTE: Final = 0x200  # SPAN_FLAGS_CONTEXT_IS_REMOTE_MASK: a proxy's parent always is
_NO_FAILURE: Final = frozenset({Outcome.OK, Outcome.INCOMPLETE, Outcome.CLIENT_DISCONNECT})
_SPAN_NAMES: Final[Mapping[Role, str]] = {Role.PREFILL: names.SPAN_PREFILL, Role.DECODE: names.SPAN_DECODE}


_EXCHANGE: Final = RecordTable(
    Exchange,
    {
        "duration_ns": names.TIME_DURATION_NS,  # also end - start, which some backends round to us
        "method": names.HTTP_METHOD,
        "path": names.URL_PATH,
        "operation": names.GEN_AI_OPERATION,
        "trace_origin": names.TRACE_ORIGIN,
        "client_parent": names.CLIENT_PARENT,
        "request_id": names.REQUEST_ID,
        "request_id_hash": names.REQUEST_ID_HASH,
        "request_id_added": names.REQUEST_ID_ADDED,
        "response_id": names.GEN_AI_RESPONSE_ID,
        "model": names.GEN_AI_MODEL,
        "choices": names.CHOICES,
        "stream": names.STREAM,
        "stream_requested": names.STREAM_REQUESTED,
        "inspected": names.INSPECTED,
        "status": names.HTTP_STATUS,
        "error_type": names.ERROR_TYPE,
        "error_code": names.ERROR_CODE,
        "forwarded_ns": names.TIME_FORWARDED_NS,
        "request_done_ns": names.TIME_REQUEST_DONE_NS,
        "ttfb_ns": names.TIME_FIRST_BYTE_NS,
        "ttft_token_ns": names.TIME_FIRST_TOKEN_NS,
        "ttft_text_ns": names.TIME_FIRST_TEXT_NS,
        "ttft_text_kind": names.FIRST_TEXT_KIND,
        "last_content_ns": names.TIME_LAST_CONTENT_NS,
        "finish_ns": names.TIME_FINISH_NS,
        "first_delivered_ns": names.TIME_FIRST_DELIVERED_NS,
        "write_blocked_ns": names.WRITE_BLOCKED_NS,
        "content_encoding": names.CONTENT_ENCODING,
        "events": names.EVENTS,
        "tpot_mean_ns": names.TPOT_MEAN_NS,
        "prompt_tokens": names.GEN_AI_INPUT_TOKENS,
        "output_tokens": names.GEN_AI_OUTPUT_TOKENS,
        "cached_tokens": names.GEN_AI_CACHED_TOKENS,
        "finish_reasons": names.GEN_AI_FINISH_REASONS,
        "kv_in": names.KV_IN,
        "kv_out": names.KV_OUT,
        "hints": names.HINTS,
        "resend_count": names.RETRY_COUNT,
        "exemplar": names.EXEMPLAR,
    },
)
_GAPS: Final = RecordTable(
    Gaps,
    {
        "unit": names.GAP_UNIT,
        "count": names.GAP_COUNT,
        "sum_ns": names.GAP_SUM_NS,
        "max_ns": names.GAP_MAX_NS,
        "max_at_ns": names.GAP_MAX_AT_NS,
        "sketch": names.GAP_SKETCH,
    },
)
_ITL: Final = RecordTable(
    Gaps,
    {
        "unit": names.ITL_UNIT,
        "count": names.ITL_COUNT,
        "sum_ns": names.ITL_SUM_NS,
        "max_ns": names.ITL_MAX_NS,
        "max_at_ns": names.ITL_MAX_AT_NS,
        "sketch": names.ITL_SKETCH,
    },
)
TABLES: Final = (_EXCHANGE, _GAPS, _ITL)


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
    values = _EXCHANGE.values(found)
    source = _SOURCES.get(read_text(found.get(names.SOURCE)) or "")
    outcome = read_text(found.get(names.OUTCOME))
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
        gaps=_gaps(_GAPS, found),
        itl=_gaps(_ITL, found),
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
_GAP_UNITS: Final = frozenset({"chunk", "token"})


def _gaps(table: RecordTable[Gaps], attributes: Attributes) -> Gaps | None:
    """Gaps of the exchange, or None where any part of them is missing.

    Half a figure is none.
    """
    values = table.values(attributes)
    return Gaps(**values) if table.required <= values.keys() and values["unit"] in _GAP_UNITS else None


_TURN_CHARS: Final = 64


def write_stalls(span: Span, stalls: Stalls) -> None:
    """Append ``stalls`` to a span that begins at its request's arrival."""
    attributes = span.attributes
    add_number(attributes, names.STALL_COUNT, stalls.count)
    add_number(attributes, names.STALL_SUM_NS, stalls.sum_ns)
    if stalls.times:
        add_bytes(attributes, names.STALL_TIMES, stalls.times)
    if stalls.held_ns:
        add_number(attributes, names.STALL_HELD_NS, stalls.held_ns)
    for stall in stalls.longest:
        event = span.events.add(time_unix_nano=span.start_time_unix_nano + stall.end_ns, name=names.EVENT_STALL)
        statement = event.attributes
        add_number(statement, names.STALL_GAP_NS, stall.gap_ns)
        add_number(statement, names.STALL_MEDIAN_NS, stall.median_ns)
        add_number(statement, names.STALL_INDEX, stall.index)
        if stall.held_ns:
            add_number(statement, names.STALL_HELD_NS, stall.held_ns)
        if stall.turn:
            add_text(statement, names.STALL_TURN, stall.turn)


def read_stalls(span: Span, attributes: Attributes) -> Stalls | None:
    """Read the stalls on ``span``; None where there are none.

    ``attributes``: the span's own, decoded.
    """
    count, sum_ns = read_number(attributes.get(names.STALL_COUNT)), read_number(attributes.get(names.STALL_SUM_NS))
    if not count or sum_ns is None:
        return None
    longest: list[Stall] = []
    for event in span.events:
        if event.name == names.EVENT_STALL and len(longest) < KEPT:
            stall = _stall(event, span.start_time_unix_nano)
            if stall is not None:
                longest.append(stall)
    held_ns = read_number(attributes.get(names.STALL_HELD_NS)) or 0
    times = read_bytes(attributes.get(names.STALL_TIMES)) or b""
    return Stalls(count=max(count, len(longest)), sum_ns=sum_ns, longest=tuple(longest), times=times, held_ns=held_ns)


def _stall(event: Span.Event, start_unix_ns: int) -> Stall | None:
    statement = attributes_of(event.attributes)
    end_ns = event.time_unix_nano - start_unix_ns
    gap_ns, median_ns, index, held_ns = (
        read_number(statement.get(name))
        for name in (names.STALL_GAP_NS, names.STALL_MEDIAN_NS, names.STALL_INDEX, names.STALL_HELD_NS)
    )
    if gap_ns is None or median_ns is None or index is None or not gap_ns <= end_ns < LARGEST:
        return None
    turn = read_text(statement.get(names.STALL_TURN)) or ""
    return Stall(end_ns=end_ns, gap_ns=gap_ns, median_ns=median_ns, index=index, held_ns=held_ns or 0, turn=turn[:_TURN_CHARS])
