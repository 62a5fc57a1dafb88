"""Decode an OTLP export request: decompress, parse, check the ids.

The functions are pure. Times are not checked: a span with absurd ones is evidence too, and the stitcher handles it.
Content encodings: ``gzip`` and ``deflate`` in, ``gzip`` out. Ids in OTLP/JSON are hex; protobuf's JSON parser reads base64 (and
would read 16 hex digits as 12 wrong bytes without an error), so they are converted.
Source: OTLP specification 1.x, also "JSON Protobuf Encoding"; RFC 9110 section 8.4.1, RFC 1950 to 1952; ``docs/wire.md``.
"""

from __future__ import annotations

import base64
import gzip
import zlib
from collections import Counter
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

import msgspec
from google.protobuf import json_format
from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from handrail.otlp.messages import SHAPES, Request
from handrail.otlp.repair import repaired, repaired_json
from handrail.otlp.signals import Rejected, Signal, TooLarge, Unsupported

IDENTITY: Final = ("", "identity")
_GZIP_WBITS = 16 + zlib.MAX_WBITS
_MAX_MEMBERS = 16  # each one copies all bytes after it: millions of empty ones would take minutes
_LEVEL = 1  # spans shrink 5 to 10 times already; level 6 costs four times the CPU for a tenth of the bytes


def inflate(body: bytes, encoding: str, limit_bytes: int) -> bytes:
    """Decompress ``body``; memory stays near ``limit_bytes`` whatever it claims.

    ``encoding``: the Content-Encoding header, in any case; '' means none. Raises ``Unsupported`` for an unknown one, ``TooLarge``
    when the result would be over ``limit_bytes``, ``Rejected`` when the stream is damaged or cut short.
    """
    name = encoding.strip().lower()
    if name in IDENTITY:
        if len(body) > limit_bytes:
            raise TooLarge(f"the body has {len(body)} bytes; at most {limit_bytes} are allowed")
        return body
    if name in ("gzip", "x-gzip"):
        return _members(body, limit_bytes)
    if name == "deflate":
        # RFC 9110 means zlib by "deflate"; some senders leave the zlib header out.
        zlib_header = len(body) >= 2 and body[0] & 0x0F == 8 and (body[0] << 8 | body[1]) % 31 == 0
        data, rest = _stream(body, zlib.MAX_WBITS if zlib_header else -zlib.MAX_WBITS, limit_bytes)
        if rest:
            raise Rejected("bytes after the end of the deflate stream")
        return data
    raise Unsupported(f"content encoding {name[:40]!r} is not known; valid: gzip, deflate, identity")


def _members(body: bytes, limit_bytes: int) -> bytes:
    """Decompress a gzip file: one or more members, one after the other."""
    data, rest = _stream(body, _GZIP_WBITS, limit_bytes)
    if not rest:
        return data
    parts, size = [data], len(data)
    while rest:
        if len(parts) == _MAX_MEMBERS:
            raise Rejected(f"the gzip body has more than {_MAX_MEMBERS} members")
        data, rest = _stream(rest, _GZIP_WBITS, limit_bytes - size)
        parts.append(data)
        size += len(data)
    return b"".join(parts)


def _stream(body: bytes, wbits: int, limit_bytes: int) -> tuple[bytes, bytes]:
    decoder = zlib.decompressobj(wbits)
    try:
        # One byte above the bound tells "over it" from "exactly it"; a max_length of 0 would mean no bound at all.
        data = decoder.decompress(body, limit_bytes + 1)
    except zlib.error as error:
        raise Rejected(f"the compressed body is damaged ({error})") from None
    if len(data) > limit_bytes:
        raise TooLarge(f"the body decompresses to more than {limit_bytes} bytes")
    if not decoder.eof:
        raise Rejected("the compressed body is cut short")
    return data, decoder.unused_data


def deflate(body: bytes) -> bytes:
    """Compress ``body`` as gzip, the one encoding that every OTLP receiver must take."""
    return gzip.compress(body, compresslevel=_LEVEL, mtime=0)


_ID_KEYS: Final = frozenset({"traceId", "spanId", "parentSpanId", "trace_id", "span_id", "parent_span_id"})
_NOT_HEX: Final = base64.b64encode(b"?").decode()  # one byte: no id has that length, so the screen drops that span alone


def json_tree(body: bytes) -> dict[str, Any]:
    """Parse ``body`` and convert every id to protobuf's form.

    Raises ``Rejected`` for anything but one JSON object.
    """
    try:
        document = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Rejected(f"the body is not JSON ({_brief(error)})") from None
    return with_ids(document)


def with_ids(document: Any) -> dict[str, Any]:
    """Convert every id in ``document`` to protobuf's form, in place.

    Raises ``Rejected`` for anything but one JSON object.
    """
    if not isinstance(document, dict):
        raise Rejected("the body is JSON, but not an object")
    # User data is never a key in OTLP (attributes are lists of key and value), so keys are matched at any depth.
    # A stack, not recursion: the sender controls the depth.
    stack: list[Any] = [document]
    while stack:
        node = stack.pop()
        if isinstance(node, list):
            stack.extend(child for child in node if isinstance(child, (dict, list)))
            continue
        for key, value in node.items():
            if key in _ID_KEYS:
                node[key] = _base64(value)
            elif isinstance(value, (dict, list)):
                stack.append(value)
    return document


def _base64(value: object) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        return _NOT_HEX
    try:
        return base64.b64encode(bytes.fromhex(value)).decode()
    except ValueError:
        return _NOT_HEX


def _brief(error: Exception) -> str:
    return str(error)[:120] or type(error).__name__


MAX_BODY_BYTES: Final = 64 << 20
PROTOBUF: Final = "application/x-protobuf"
JSON: Final = "application/json"
_NO_TRACE: Final = bytes(16)
_NO_SPAN: Final = bytes(8)


class IdFault(str, Enum):
    """Reason why a span was dropped; the value is the message to the sender."""

    TRACE_ID_LENGTH = "trace id is not 16 bytes"
    TRACE_ID_ZERO = "trace id is all zero"
    SPAN_ID_LENGTH = "span id is not 8 bytes"
    SPAN_ID_ZERO = "span id is all zero"
    PARENT_ID_LENGTH = "parent span id is neither empty nor 8 bytes"


@dataclass(frozen=True, slots=True)
class Received:
    """One decoded request, ready for a consumer.

    ``payload`` is protobuf: the sender's own bytes, unless it was JSON or items were dropped.
    """

    payload: bytes
    items: int  # spans, metrics or log records kept
    rejected: int
    message: str
    repaired: int = 0  # values in it that did not parse


class Unparsed(Rejected):
    """Body that does not parse as it is; single values in it may be repaired."""


def media_type(content_type: str) -> str:
    """Media type without its parameters.

    Raises ``Unsupported`` unless it is one of OTLP's two.
    """
    name = content_type.partition(";")[0].strip().lower()
    if name in (PROTOBUF, JSON):
        return name
    # A few senders (and curl users) write the unprefixed name that was registered later.
    if name == "application/protobuf":
        return PROTOBUF
    raise Unsupported(f"content type {name[:60]!r} is not OTLP; valid: {PROTOBUF}, {JSON}")


def decode(signal: Signal, body: bytes, content_type: str) -> Request:
    """Parse an uncompressed ``body``.

    Raises ``Unparsed`` (``Unsupported`` for the content type) and nothing else.
    """
    if media_type(content_type) == PROTOBUF:
        request = SHAPES[signal].request()
        try:
            request.ParseFromString(body)
        except DecodeError:
            # upb says only "Error parsing message": no use in repeating it.
            raise Unparsed(f"the body is not a protobuf Export{signal.value.capitalize()} request") from None
        return request
    try:
        return _of_json(signal, json_tree(body))
    except Rejected as error:
        raise Unparsed(error.reason) from None


def _of_json(signal: Signal, document: dict[str, Any]) -> Request:
    request = SHAPES[signal].request()
    try:
        json_format.ParseDict(document, request, ignore_unknown_fields=True)
    except (
        json_format.ParseError,
        ValueError,
        TypeError,
        AttributeError,
        OverflowError,
        RecursionError,
        SystemError,
    ) as error:
        # Beside ParseError, the parser raises these when a list or a string is where an object belongs. SystemError comes from
        # upb, for a name with half a surrogate pair.
        raise Rejected(f"the JSON is not an OTLP {signal.value} request ({_shape_only(error)})") from None
    return request


def decode_repaired(signal: Signal, body: bytes, content_type: str = PROTOBUF) -> tuple[Request, bytes, int]:
    """Parse a body that ``decode`` refused, after repairing single values.

    ``repair.py`` repairs the values that do not parse. Returns (request, its protobuf encoding, values repaired). Raises
    ``Rejected``. Takes up to a second: not for the event loop.
    """
    try:
        if media_type(content_type) == PROTOBUF:
            payload, count = repaired(signal, body)
            return decode(signal, payload, PROTOBUF), payload, count
        document, count = repaired_json(body)
        request = _of_json(signal, with_ids(document))
        return request, request.SerializeToString(), count
    except (ValueError, RecursionError):
        raise Rejected(f"the body is not an OTLP {signal.value} request, and no single value is the reason") from None


def _shape_only(error: Exception) -> str:
    """First words of a parser's message, without the sender's data.

    They name the field and its type; the rest quotes the data.
    """
    return str(error).partition(":")[0][:160] or type(error).__name__


def screen(signal: Signal, request: Request) -> tuple[Request, int, str]:
    """Drop spans with unusable ids, in place.

    Returns (request, number dropped, why). Reads three ids a span and no attributes. Metrics and logs pass as they are.
    """
    if not isinstance(request, ExportTraceServiceRequest):
        return request, 0, ""
    faults: Counter[IdFault] = Counter()
    for resource in request.resource_spans:
        for scope in resource.scope_spans:
            spans = scope.spans
            bad = [index for index, span in enumerate(spans) if not _usable(span)]
            if not bad:
                continue
            faults.update(_fault(spans[index]) for index in bad)
            drop = set(bad)
            kept = [span for index, span in enumerate(spans) if index not in drop]
            del spans[:]
            spans.extend(kept)
    rejected = sum(faults.values())
    if not rejected:
        return request, 0, ""
    listed = ", ".join(f"{fault.value} ({count})" for fault, count in sorted(faults.items()))
    return request, rejected, f"{rejected} span{'s' if rejected > 1 else ''} rejected: {listed}"


def _usable(span: Span) -> bool:
    """Whether a span's ids are usable, by a quick check that nearly every span passes."""
    trace_id, span_id = span.trace_id, span.span_id
    return (
        len(trace_id) == 16
        and len(span_id) == 8
        and trace_id != _NO_TRACE
        and span_id != _NO_SPAN
        and len(span.parent_span_id) in (0, 8)
    )


def _fault(span: Span) -> IdFault:
    if len(span.trace_id) != 16:
        return IdFault.TRACE_ID_LENGTH
    if span.trace_id == _NO_TRACE:
        return IdFault.TRACE_ID_ZERO
    if len(span.span_id) != 8:
        return IdFault.SPAN_ID_LENGTH
    if span.span_id == _NO_SPAN:
        return IdFault.SPAN_ID_ZERO
    return IdFault.PARENT_ID_LENGTH


def count(request: Request) -> int:
    """Number of spans, metrics or log records in ``request``; reads no item."""
    if isinstance(request, ExportTraceServiceRequest):
        return sum(len(scope.spans) for entry in request.resource_spans for scope in entry.scope_spans)
    if isinstance(request, ExportMetricsServiceRequest):
        return sum(len(scope.metrics) for entry in request.resource_metrics for scope in entry.scope_metrics)
    assert isinstance(request, ExportLogsServiceRequest)
    return sum(len(scope.log_records) for entry in request.resource_logs for scope in entry.scope_logs)


def receive(
    signal: Signal, body: bytes, content_type: str, encoding: str, limit_bytes: int = MAX_BODY_BYTES, *, repair: bool = True
) -> Received:
    """Decompress, parse and check a request.

    Raises ``Rejected`` and its subclasses only.
    ``repair``: whether single values that do not parse are repaired; else ``Unparsed`` is raised for them.
    """
    kind = media_type(content_type)
    plain = inflate(body, encoding, limit_bytes)
    repaired_values = 0
    try:
        request, payload = decode(signal, plain, kind), plain if kind == PROTOBUF else None
    except Unparsed as unparsed:
        if not repair:
            raise
        try:
            request, payload, repaired_values = decode_repaired(signal, plain, kind)
        except Rejected:
            raise unparsed from None  # its message has more detail
    request, rejected, message = screen(signal, request)
    if rejected or payload is None:
        payload = request.SerializeToString()
    if repaired_values:
        plural = "s" if repaired_values > 1 else ""
        text = f"{repaired_values} value{plural} repaired: text that is not UTF-8, or a number out of range"
        message = f"{message}; {text}" if message else text
    return Received(payload, count(request), rejected, message, repaired_values)
