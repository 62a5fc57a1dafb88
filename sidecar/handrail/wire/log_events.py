"""Encode log facts and metrics page reports as OTLP log records and decode them.

Format: docs/wire.md. ``read_fact(fact_log(x), x.process) == x`` for every fact whose numbers are finite, likewise for reports.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord, SeverityNumber
from opentelemetry.proto.resource.v1.resource_pb2 import Resource

from handrail import conventions as names
from handrail.identity import IdOrigin, joinable, request_key
from handrail.otlp.values import LATEST_UNIX_NS, Attributes, attributes_of
from handrail.records import LogFact, Process, SchemaNote, SchemaReport, SchemaState, Source
from handrail.wire.codec import RecordTable, add_text, add_texts, read_text, read_texts

_FACT: Final = RecordTable.prefixed(LogFact, names.KV_LINE_PREFIX, ("process", "source", "at_unix_ns", "numbers", "words"))
_SOURCES: Final = {source.value: source for source in Source}
_SEVERITIES: Final = {
    "TRACE": SeverityNumber.SEVERITY_NUMBER_TRACE,
    "DEBUG": SeverityNumber.SEVERITY_NUMBER_DEBUG,
    "WARNING": SeverityNumber.SEVERITY_NUMBER_WARN,
    "ERROR": SeverityNumber.SEVERITY_NUMBER_ERROR,
    "CRITICAL": SeverityNumber.SEVERITY_NUMBER_FATAL,
}


def logs_request(resource: Resource, records: Sequence[LogRecord]) -> bytes:
    """Encode an ``ExportLogsServiceRequest`` of scope ``handrail.events``.

    The exporter adds its batch number.
    """
    request = ExportLogsServiceRequest()
    entry = request.resource_logs.add()
    entry.resource.CopyFrom(resource)
    scope = entry.scope_logs.add()
    scope.scope.name = names.SCOPE_EVENTS
    scope.log_records.extend(records)
    return request.SerializeToString()


def fact_log(fact: LogFact) -> LogRecord:
    """Encode ``fact`` as a log record."""
    log = LogRecord(
        event_name=names.LOG_KV_LINE,
        time_unix_nano=fact.at_unix_ns,
        severity_number=_SEVERITIES.get(fact.level, SeverityNumber.SEVERITY_NUMBER_INFO),
    )
    add_text(log.attributes, names.SOURCE, fact.source.value)
    if fact.request_id is not None:
        origin = IdOrigin.OTHER if fact.recogniser.startswith("sglang.") else IdOrigin.VLLM_ENGINE
        key = request_key(fact.request_id, origin).key
        if joinable(key):
            add_text(log.attributes, names.JOIN_KEY, key)
    _FACT.write(log.attributes, fact)
    for name, number in fact.numbers:
        if math.isfinite(number):
            entry = log.attributes.add()
            entry.key = names.KV_LINE_NUMBERS + name
            entry.value.double_value = number
    for name, word in fact.words:
        add_text(log.attributes, names.KV_LINE_WORDS + name, word)
    return log


def read_fact(log: LogRecord, process: Process, attributes: Attributes | None = None) -> LogFact | None:
    """Decode the fact in ``log``; None for another kind of event.

    Raises ValueError where it cannot be read.
    """
    if log.event_name != names.LOG_KV_LINE:
        return None
    found = attributes_of(log.attributes) if attributes is None else attributes
    return LogFact(
        process=process,
        source=_source(found),
        at_unix_ns=_time(log.time_unix_nano),
        numbers=tuple(_below(found, names.KV_LINE_NUMBERS, (int, float), float)),
        words=tuple(_below(found, names.KV_LINE_WORDS, (str,), str)),
        **_FACT.read(found),
    )


def report_log(report: SchemaReport) -> LogRecord:
    """Encode ``report`` as a log record; WARN where it holds any difference."""
    severity = SeverityNumber.SEVERITY_NUMBER_WARN if report.notes else SeverityNumber.SEVERITY_NUMBER_INFO
    log = LogRecord(event_name=names.LOG_SCHEMA, time_unix_nano=report.at_unix_ns, severity_number=severity)
    add_text(log.attributes, names.SOURCE, report.source.value)
    add_texts(log.attributes, names.SCHEMA_EMITTERS, report.emitters)
    for state in SchemaState:
        of_it = tuple(f"{note.quantity}|{note.seen}|{note.expected}" for note in report.notes if note.state is state)
        if of_it:
            add_texts(log.attributes, names.SCHEMA_NOTES + state.value, of_it)
    return log


def read_report(log: LogRecord, process: Process) -> SchemaReport | None:
    """Decode the report in ``log``; None for another kind of event.

    Raises ValueError where it cannot be read.
    """
    if log.event_name != names.LOG_SCHEMA:
        return None
    found = attributes_of(log.attributes)
    notes = []
    for state in SchemaState:
        for text in read_texts(found.get(names.SCHEMA_NOTES + state.value)) or ():
            quantity, _, rest = text.partition("|")
            seen, _, expected = rest.partition("|")
            notes.append(SchemaNote(state=state, quantity=quantity, seen=seen, expected=expected))
    return SchemaReport(
        process=process,
        source=_source(found),
        at_unix_ns=_time(log.time_unix_nano),
        emitters=read_texts(found.get(names.SCHEMA_EMITTERS)) or (),
        notes=tuple(notes),
    )


def _below(found: Attributes, prefix: str, kinds: tuple[type, ...], made: type) -> list[tuple[str, Any]]:
    return sorted(
        (key[len(prefix) :], made(value))
        for key, value in found.items()
        if key.startswith(prefix) and isinstance(value, kinds) and not isinstance(value, bool)
    )


def _source(attributes: Attributes) -> Source:
    source = _SOURCES.get(read_text(attributes.get(names.SOURCE)) or "")
    if source is None:
        raise ValueError("handrail.source missing or unknown")
    return source


def _time(unix_ns: int) -> int:
    if not 0 < unix_ns < LATEST_UNIX_NS:
        raise ValueError("no usable time")
    return unix_ns
