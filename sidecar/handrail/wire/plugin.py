"""Encode the plugin's records as OTLP spans and log records and decode them.

Format: docs/wire.md, "Records of the plugin". ``read_plugin_span`` of the first span of ``plugin_spans(x)`` and
``read_plugin_log`` of ``plugin_log(x)`` restore ``x`` for every record whose numbers are sane.
"""

from __future__ import annotations

from typing import Final

from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord, SeverityNumber
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from handrail import conventions as names
from handrail.identity import IdOrigin, joinable, request_key
from handrail.otlp.values import LATEST_UNIX_NS, Attributes, attributes_of
from handrail.records import (
    EngineFacts,
    EngineTimes,
    Iteration,
    KvFetch,
    KvPublish,
    PluginEvent,
    PluginSpan,
    Process,
    ProcessEvent,
    ProcessEventKind,
    Role,
    Source,
    SpanIds,
)
from handrail.wire.codec import RecordTable, add_text, read_text

_ENGINE_TIMES: Final = RecordTable.prefixed(
    EngineTimes, names.ENGINE_TIMES_PREFIX, ("process", "source", "ids", "queued_unix_ns")
)
_KV_FETCH: Final = RecordTable.prefixed(KvFetch, names.KV_FETCH_PREFIX, ("process", "source", "ids", "known_unix_ns"))
_KV_PUBLISH: Final = RecordTable.prefixed(KvPublish, names.KV_PUBLISH_PREFIX, ("process", "source", "ids", "published_unix_ns"))
_ITERATION: Final = RecordTable.prefixed(Iteration, names.ITERATION_PREFIX, ("process", "source", "started_unix_ns"))
_PROCESS_EVENT: Final = RecordTable.prefixed(ProcessEvent, names.PROCESS_EVENT_PREFIX, ("process", "source", "at_unix_ns"))
_ENGINE_FACTS: Final = RecordTable.prefixed(EngineFacts, names.ENGINE_FACTS_PREFIX, ("process", "source", "at_unix_ns"))
TABLES: Final = (_ENGINE_TIMES, _KV_FETCH, _KV_PUBLISH, _ITERATION, _PROCESS_EVENT, _ENGINE_FACTS)

_SOURCES: Final = {source.value: source for source in Source}
_WRONG: Final = frozenset({ProcessEventKind.HUNG, ProcessEventKind.DEAD})
_QUEUE_SPANS: Final = frozenset({names.SPAN_PREFILL_QUEUE, names.SPAN_DECODE_QUEUE})


def plugin_spans(record: PluginSpan) -> list[Span]:
    """Span that carries ``record``, then spans that only draw a part of it.

    Raises ValueError for ids that are not hex.
    """
    if isinstance(record, KvFetch):
        return [_fetch_span(record)]
    if isinstance(record, KvPublish):
        return [_publish_span(record)]
    return _request_spans(record)


def read_plugin_span(span: Span, process: Process, attributes: Attributes | None = None) -> PluginSpan | None:
    """Decode the record in ``span``; None for a span that only draws.

    Raises ValueError where it cannot be read.
    """
    kind = _SPAN_KINDS.get(span.name)
    if kind is None:
        return None
    ids = SpanIds(
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_span_id=span.parent_span_id.hex(),
        flags=span.flags & 0xFF,
    )
    found = attributes_of(span.attributes) if attributes is None else attributes
    return _read_carried(kind, found, process, ids, span.start_time_unix_nano)


def plugin_log(record: PluginSpan | PluginEvent) -> LogRecord:
    """Encode ``record`` as a log record of scope ``handrail.events``.

    It is an event, or a span's record while it is provisional.
    """
    log = LogRecord(severity_number=SeverityNumber.SEVERITY_NUMBER_INFO)
    add_text(log.attributes, names.SOURCE, record.source.value)
    if isinstance(record, Iteration):
        log.event_name, log.time_unix_nano = names.LOG_ITERATION, record.started_unix_ns
        _ITERATION.write(log.attributes, record)
    elif isinstance(record, ProcessEvent):
        log.event_name, log.time_unix_nano = names.LOG_PROCESS_EVENT, record.at_unix_ns
        if record.kind in _WRONG:
            log.severity_number = SeverityNumber.SEVERITY_NUMBER_ERROR
        _PROCESS_EVENT.write(log.attributes, record)
    elif isinstance(record, EngineFacts):
        log.event_name, log.time_unix_nano = names.LOG_ENGINE_FACTS, record.at_unix_ns
        _ENGINE_FACTS.write(log.attributes, record)
    else:
        _write_open(log, record)
    return log


def read_plugin_log(log: LogRecord, process: Process) -> PluginSpan | PluginEvent | None:
    """Decode the record in ``log``; None for another kind of event.

    Raises ValueError where it cannot be read.
    """
    attributes = attributes_of(log.attributes)
    if (kind := _LOG_KINDS.get(log.event_name)) is not None:
        parent = read_text(attributes.get(names.PARENT_SPAN_ID)) or ""
        ids = SpanIds(trace_id=log.trace_id.hex(), span_id=log.span_id.hex(), parent_span_id=parent, flags=log.flags & 0xFF)
        return _read_carried(kind, attributes, process, ids, log.time_unix_nano)
    if log.event_name not in _EVENTS:
        return None
    source, at = _source(attributes), _time(log.time_unix_nano)
    if log.event_name == names.LOG_ITERATION:
        return Iteration(process=process, source=source, started_unix_ns=at, **_ITERATION.read(attributes))
    if log.event_name == names.LOG_PROCESS_EVENT:
        return ProcessEvent(process=process, source=source, at_unix_ns=at, **_PROCESS_EVENT.read(attributes))
    return EngineFacts(process=process, source=source, at_unix_ns=at, **_ENGINE_FACTS.read(attributes))


def _request_spans(record: EngineTimes) -> list[Span]:
    decodes = record.process.role is Role.DECODE
    start = record.queued_unix_ns
    waited = _first(record.scheduled_ns, record.finished_ns, record.seen_ns)
    carrier = _span(
        record, names.SPAN_DECODE_QUEUE if decodes else names.SPAN_PREFILL_QUEUE, Span.SPAN_KIND_INTERNAL, start, start + waited
    )
    _ENGINE_TIMES.write(carrier.attributes, record)
    if record.status == "error":
        carrier.status.code = Status.STATUS_CODE_ERROR
    drawn = [carrier]
    if record.scheduled_ns is not None and record.first_token_ns is not None:
        name = names.SPAN_DECODE_FIRST_STEP if decodes else names.SPAN_PREFILL_COMPUTE
        drawn.append(_drawn(record, name, 1, record.scheduled_ns, record.first_token_ns))
    if (
        record.process.role is not Role.PREFILL
        and record.first_token_ns is not None
        and record.finished_ns is not None
        and record.finished_ns > record.first_token_ns
    ):
        drawn.append(_drawn(record, names.SPAN_DECODE_STREAM, 2, record.first_token_ns, record.finished_ns))
    return drawn


def _drawn(record: EngineTimes, name: str, number: int, begin_ns: int, end_ns: int) -> Span:
    """Span without a record.

    Its id is the carrier's with other low bits: random like it, and the same when it is sent again.
    """
    start = record.queued_unix_ns
    span = _span(record, name, Span.SPAN_KIND_INTERNAL, start + begin_ns, start + end_ns)
    span.span_id = ((int(record.ids.span_id, 16) ^ number) or 4).to_bytes(8, "big")
    add_text(span.attributes, names.ENGINE_TIMES_PREFIX + "request_id", record.request_id)
    return span


def _fetch_span(record: KvFetch) -> Span:
    start = record.known_unix_ns
    end = start + _first(record.ended_ns, record.noticed_ns, record.done_ns, record.seen_ns)
    span = _span(record, names.SPAN_KV_FETCH, Span.SPAN_KIND_CONSUMER, start, end)
    _KV_FETCH.write(span.attributes, record)
    if record.decode_span_id and record.decode_span_id != record.ids.parent_span_id:
        span.links.add(trace_id=span.trace_id, span_id=bytes.fromhex(record.decode_span_id))
    if record.failure or record.effect:
        span.status.code = Status.STATUS_CODE_ERROR
        add_text(span.attributes, names.ERROR_TYPE, record.failure or "load_failed")
    return span


def _publish_span(record: KvPublish) -> Span:
    start = record.published_unix_ns
    end = start + max(_first(record.freed_ns, record.expired_ns, record.read_ns, record.seen_ns), record.late_read_ns or 0)
    span = _span(record, names.SPAN_KV_PUBLISH, Span.SPAN_KIND_PRODUCER, start, end)
    _KV_PUBLISH.write(span.attributes, record)
    if record.failure or record.expired_ns is not None or record.late_read_ns is not None:
        span.status.code = Status.STATUS_CODE_ERROR
        add_text(span.attributes, names.ERROR_TYPE, record.failure or "expired")
    return span


def _span(record: PluginSpan, name: str, kind: Span.SpanKind.ValueType, start: int, end: int) -> Span:
    ids = record.ids
    span = Span(
        trace_id=bytes.fromhex(ids.trace_id),
        span_id=bytes.fromhex(ids.span_id),
        parent_span_id=bytes.fromhex(ids.parent_span_id),
        flags=ids.flags & 0xFF,
        name=name,
        kind=kind,
        start_time_unix_nano=start,
        end_time_unix_nano=end,
    )
    add_text(span.attributes, names.SOURCE, record.source.value)
    add_text(span.attributes, names.JOIN_KEY, _join_key(record))
    return span


def _join_key(record: PluginSpan) -> str:
    """Join key of a record, as ``wire.exchange.join_key`` makes it.

    A tier of OpenTelemetry Collectors must send all of a request to one place.
    """
    key = request_key(record.request_id, IdOrigin.VLLM_ENGINE).key
    return key if joinable(key) else record.ids.trace_id


def _write_open(log: LogRecord, record: PluginSpan) -> None:
    ids = record.ids
    log.trace_id, log.span_id, log.flags = bytes.fromhex(ids.trace_id), bytes.fromhex(ids.span_id), ids.flags & 0xFF
    add_text(log.attributes, names.JOIN_KEY, _join_key(record))
    if ids.parent_span_id:
        add_text(log.attributes, names.PARENT_SPAN_ID, ids.parent_span_id)
    if isinstance(record, KvFetch):
        log.event_name, log.time_unix_nano = names.LOG_KV_FETCH, record.known_unix_ns
        _KV_FETCH.write(log.attributes, record)
    elif isinstance(record, KvPublish):
        log.event_name, log.time_unix_nano = names.LOG_KV_PUBLISH, record.published_unix_ns
        _KV_PUBLISH.write(log.attributes, record)
    else:
        log.event_name, log.time_unix_nano = names.LOG_ENGINE_TIMES, record.queued_unix_ns
        _ENGINE_TIMES.write(log.attributes, record)


_EVENTS: Final = frozenset({names.LOG_ITERATION, names.LOG_PROCESS_EVENT, names.LOG_ENGINE_FACTS})
_SPAN_KINDS: Final[dict[str, type[PluginSpan]]] = {
    **dict.fromkeys(_QUEUE_SPANS, EngineTimes),
    names.SPAN_KV_FETCH: KvFetch,
    names.SPAN_KV_PUBLISH: KvPublish,
}
_LOG_KINDS: Final[dict[str, type[PluginSpan]]] = {
    names.LOG_ENGINE_TIMES: EngineTimes,
    names.LOG_KV_FETCH: KvFetch,
    names.LOG_KV_PUBLISH: KvPublish,
}


def _read_carried(kind: type[PluginSpan], attributes: Attributes, process: Process, ids: SpanIds, start: int) -> PluginSpan:
    if len(ids.trace_id) != 32 or len(ids.span_id) != 16 or len(ids.parent_span_id) not in (0, 16):
        raise ValueError("ids of a wrong length")
    source, start = _source(attributes), _time(start)
    if kind is KvFetch:
        return KvFetch(process=process, source=source, ids=ids, known_unix_ns=start, **_KV_FETCH.read(attributes))
    if kind is KvPublish:
        return KvPublish(process=process, source=source, ids=ids, published_unix_ns=start, **_KV_PUBLISH.read(attributes))
    return EngineTimes(process=process, source=source, ids=ids, queued_unix_ns=start, **_ENGINE_TIMES.read(attributes))


def _source(attributes: Attributes) -> Source:
    source = _SOURCES.get(read_text(attributes.get(names.SOURCE)) or "")
    if source is None:
        raise ValueError("handrail.source missing or unknown")
    return source


def _time(unix_ns: int) -> int:
    if not 0 < unix_ns < LATEST_UNIX_NS:
        raise ValueError("no usable time")
    return unix_ns


def _first(*offsets: int | None) -> int:
    """First known offset; 0 where there is none."""
    return next((offset for offset in offsets if offset is not None), 0)
