"""Decode, screen and decompress OTLP messages.

The inputs are real messages, the specification's examples, and nonsense.
"""

from __future__ import annotations

import gzip
import json
import tracemalloc
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from doubles.otlp import DATA, RAW, span, traces
from handrail.otlp.decode import JSON, PROTOBUF, decode, deflate, inflate, receive, screen
from handrail.otlp.signals import Rejected, Signal, TooLarge, Unsupported

SPEC_TRACE = (DATA / "otlp" / "otel_proto_example_trace.json").read_bytes()
ONE_BATCH = RAW[7].read_bytes()


def traced(body: bytes, content_type: str = JSON) -> ExportTraceServiceRequest:
    request = decode(Signal.TRACES, body, content_type)
    assert isinstance(request, ExportTraceServiceRequest)
    return request


def one_span(**fields: Any) -> bytes:
    good = {"traceId": "0af7651916cd43dd8448eb211c80319c", "spanId": "b7ad6b7169203331", "name": "x"}
    return json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": [{**good, **fields}]}]}]}).encode()


@pytest.mark.parametrize("path", RAW, ids=lambda path: path.name)
def test_recorded_vllm_messages_keep_their_bytes(path: Path) -> None:
    body = path.read_bytes()
    received = receive(Signal.TRACES, body, PROTOBUF, "")
    assert received.payload == body
    assert received.items > 0
    assert (received.rejected, received.message) == (0, "")


def test_the_specifications_trace_in_json() -> None:
    request = traced(SPEC_TRACE)
    found = request.resource_spans[0].scope_spans[0].spans[0]
    assert found.trace_id.hex().upper() == "5B8EFFF798038103D269B633813FC60C"
    assert found.span_id.hex().upper() == "EEE19B7EC3C1B174"
    assert found.parent_span_id.hex().upper() == "EEE19B7EC3C1B173"
    assert found.start_time_unix_nano == 1544712660000000000
    assert found.kind == 2
    assert receive(Signal.TRACES, SPEC_TRACE, JSON, "").rejected == 0


def test_the_specifications_metrics_and_logs_in_json() -> None:
    metrics = decode(Signal.METRICS, (DATA / "otlp" / "otel_proto_example_metrics.json").read_bytes(), JSON)
    assert isinstance(metrics, ExportMetricsServiceRequest)
    assert metrics.resource_metrics[0].scope_metrics[0].metrics[0].name == "my.counter"
    logs = decode(Signal.LOGS, (DATA / "otlp" / "otel_proto_example_logs.json").read_bytes(), JSON)
    assert isinstance(logs, ExportLogsServiceRequest)
    record = logs.resource_logs[0].scope_logs[0].log_records[0]
    assert record.trace_id.hex().upper() == "5B8EFFF798038103D269B633813FC60C"
    events = decode(Signal.LOGS, (DATA / "otlp" / "otel_proto_example_events.json").read_bytes(), JSON)
    assert isinstance(events, ExportLogsServiceRequest)
    assert events.resource_logs[0].scope_logs[0].log_records[0].event_name == "browser.page_view"


@pytest.mark.parametrize("path", sorted((DATA / "otlp").glob("jaeger_*.json")), ids=lambda path: path.name)
def test_jaegers_traces_decode(path: Path) -> None:
    received = receive(Signal.TRACES, path.read_bytes(), JSON, "")
    assert received.items > 0
    assert received.rejected == 0


def test_another_format_that_is_json_brings_no_spans() -> None:
    # inference-perf's own trace format: an object without resourceSpans. Unknown fields are ignored, as OTLP requires.
    body = (DATA / "otlp" / "inference-perf_parallel_requests.json").read_bytes()
    assert receive(Signal.TRACES, body, JSON, "").items == 0


def test_c17_absurd_times_pass_untouched() -> None:
    body = (DATA / "replay" / "otlp" / "C17_bad_intervals.json").read_bytes()
    received = receive(Signal.TRACES, body, JSON, "")
    kept = ExportTraceServiceRequest.FromString(received.payload).resource_spans[0].scope_spans[0].spans
    assert [(item.start_time_unix_nano, item.end_time_unix_nano) for item in kept] == [
        (1700000001000000000, 1700000000999000000),
        (1700000001000000000, 0),
        (0, 1700000001000000000),
        (1700000001000000000, 18446744073709551615),
    ]


@pytest.mark.parametrize(
    ("fields", "check"),
    [
        ({"startTimeUnixNano": "1700000000000000001"}, lambda item: item.start_time_unix_nano == 1700000000000000001),
        ({"startTimeUnixNano": 1700000000000000001}, lambda item: item.start_time_unix_nano == 1700000000000000001),
        ({"kind": 2}, lambda item: item.kind == 2),
        ({"newField": {"deep": [1, {"spanId": 7}]}}, lambda item: item.name == "x"),
        ({"parentSpanId": ""}, lambda item: item.parent_span_id == b""),
        ({"parentSpanId": None}, lambda item: item.parent_span_id == b""),
        (
            {"attributes": [{"key": "b", "value": {"bytesValue": "AAEC"}}]},
            lambda i: i.attributes[0].value.bytes_value == b"\0\1\2",
        ),
        ({"attributes": [{"key": "n", "value": {"intValue": "-7"}}]}, lambda i: i.attributes[0].value.int_value == -7),
        ({"attributes": [{"key": "n", "value": {"intValue": -7}}]}, lambda i: i.attributes[0].value.int_value == -7),
        ({"links": [{"traceId": "AB" * 16, "spanId": "cd" * 8}]}, lambda i: i.links[0].trace_id == b"\xab" * 16),
    ],
    ids=["time-text", "time-number", "enum", "unknown", "no-parent", "null-parent", "base64", "int-text", "int-number", "link"],
)
def test_json_forms(fields: dict[str, Any], check: Any) -> None:
    request = traced(one_span(**fields))
    assert check(request.resource_spans[0].scope_spans[0].spans[0])
    assert screen(Signal.TRACES, request)[1] == 0


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"traceId": "zz"}, "trace id is not 16 bytes"),
        ({"traceId": "not hex, 16 char"}, "trace id is not 16 bytes"),
        ({"traceId": 5}, "trace id is not 16 bytes"),
        ({"traceId": "00" * 16}, "trace id is all zero"),
        ({"spanId": "abc"}, "span id is not 8 bytes"),
        ({"spanId": "0" * 16}, "span id is all zero"),
        ({"parentSpanId": "xyz"}, "parent span id"),
    ],
)
def test_a_bad_id_in_json_loses_its_span_alone(fields: dict[str, Any], word: str) -> None:
    document = json.loads(one_span(**fields))
    document["resourceSpans"] += json.loads(one_span(name="good"))["resourceSpans"]
    received = receive(Signal.TRACES, json.dumps(document).encode(), JSON, "")
    assert (received.items, received.rejected) == (1, 1)
    assert word in received.message


@pytest.mark.parametrize(
    ("bad", "word"),
    [
        (span(1, trace_id=b""), "trace id is not 16 bytes (1)"),
        (span(1, trace_id=bytes(16)), "trace id is all zero (1)"),
        (span(1, trace_id=b"\1" * 17), "trace id is not 16 bytes (1)"),
        (span(1, span_id=b"\1" * 7), "span id is not 8 bytes (1)"),
        (span(1, span_id=bytes(8)), "span id is all zero (1)"),
        (span(1, parent_span_id=b"\1" * 3), "parent span id is neither empty nor 8 bytes (1)"),
    ],
    ids=["empty", "zero-trace", "long", "short", "zero-span", "parent"],
)
def test_the_screen_drops_the_bad_and_keeps_the_rest(bad: Any, word: str) -> None:
    request = traces(span(2), bad, span(3, parent_span_id=bytes(8)))
    received = receive(Signal.TRACES, request.SerializeToString(), PROTOBUF, "")
    assert (received.items, received.rejected) == (2, 1)
    assert received.message == f"1 span rejected: {word}"
    kept = ExportTraceServiceRequest.FromString(received.payload).resource_spans[0].scope_spans[0].spans
    assert [item.SerializeToString() for item in kept] == [
        span(2).SerializeToString(),
        span(3, parent_span_id=bytes(8)).SerializeToString(),
    ]


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"[]",
        b"null",
        b"1",
        b"\xff{}",
        b'{"resourceSpans": 1}',
        b'{"resourceSpans": [1]}',
        b'{"resourceSpans": {"a": 1}}',
        b'{"a":' * 5000,
        b'{"resourceSpans":' + b"[" * 100_000,
        one_span(startTimeUnixNano="yesterday"),
        one_span(startTimeUnixNano=-1),
        one_span(startTimeUnixNano="9" * 5000),
        one_span(name=["x"]),
        one_span(attributes={"a": 1}),
        one_span(links="x"),
        one_span(attributes=[{"key": "k", "value": {"doubleValue": 10**400}}]),
    ],
    ids=range(17),
)
def test_json_that_is_no_otlp_is_rejected(body: bytes) -> None:
    with pytest.raises(Rejected) as refusal:
        decode(Signal.TRACES, body, JSON)
    assert len(refusal.value.reason) < 300


@pytest.mark.parametrize("content_type", ["", "text/plain", "application/x-protobuffer", "application/grpc"])
def test_other_content_types_are_named(content_type: str) -> None:
    with pytest.raises(Unsupported, match=r"application/x-protobuf, application/json"):
        decode(Signal.TRACES, b"", content_type)


def test_parameters_of_the_content_type_do_not_matter() -> None:
    assert traced(SPEC_TRACE, "Application/JSON; charset=utf-8").resource_spans


@pytest.mark.parametrize("signal", list(Signal))
@given(body=st.binary(max_size=400))
@settings(max_examples=150, deadline=None)
def test_random_bytes_raise_nothing_but_rejected(signal: Signal, body: bytes) -> None:
    for content_type in (PROTOBUF, JSON):
        for encoding in ("", "gzip", "deflate"):
            with suppress(Rejected):
                receive(signal, body, content_type, encoding, 1 << 20)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda children: (
        st.lists(children, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["resourceSpans", "scopeSpans", "spans", "traceId", "spanId", "name", "kind", "attributes", "key", "value"]
            ),
            children,
            max_size=3,
        )
    ),
    max_leaves=12,
)


@given(document=JSON_VALUES)
@settings(max_examples=300, deadline=None)
def test_random_json_raises_nothing_but_rejected(document: Any) -> None:
    for body in (document, {"resourceSpans": [{"scopeSpans": [{"spans": document}]}]}, {"resourceSpans": document}):
        with suppress(Rejected):
            receive(Signal.TRACES, json.dumps(body).encode("utf-8", "replace"), JSON, "")


@given(cut=st.integers(0, len(ONE_BATCH)), tail=st.binary(max_size=20))
@settings(max_examples=200, deadline=None)
def test_a_truncated_message_is_read_or_rejected(cut: int, tail: bytes) -> None:
    for body, encoding in ((ONE_BATCH[:cut] + tail, ""), (gzip.compress(ONE_BATCH)[:cut] + tail, "gzip")):
        with suppress(Rejected):
            receive(Signal.TRACES, body, PROTOBUF, encoding)


@given(cut=st.integers(0, len(SPEC_TRACE)))
@settings(max_examples=60, deadline=None)
def test_truncated_json_is_rejected(cut: int) -> None:
    body = SPEC_TRACE[:cut].rstrip()
    if body != SPEC_TRACE.rstrip():
        with pytest.raises(Rejected):
            decode(Signal.TRACES, body, JSON)


RAW_DEFLATE = zlib.compressobj(wbits=-15)


@pytest.mark.parametrize(
    ("body", "encoding"),
    [
        (ONE_BATCH, ""),
        (ONE_BATCH, "identity"),
        (deflate(ONE_BATCH), "gzip"),
        (deflate(ONE_BATCH), " X-GZIP "),
        (gzip.compress(ONE_BATCH[:100]) + gzip.compress(ONE_BATCH[100:]), "gzip"),
        (zlib.compress(ONE_BATCH), "deflate"),
        (RAW_DEFLATE.compress(ONE_BATCH) + RAW_DEFLATE.flush(), "deflate"),
    ],
    ids=["none", "identity", "gzip", "x-gzip", "two-members", "zlib", "raw-deflate"],
)
def test_encodings(body: bytes, encoding: str) -> None:
    assert inflate(body, encoding, len(ONE_BATCH)) == ONE_BATCH
    with pytest.raises(TooLarge):
        inflate(body, encoding, len(ONE_BATCH) - 1)


@pytest.mark.parametrize(
    ("body", "encoding", "word"),
    [
        (gzip.compress(ONE_BATCH)[:-4], "gzip", "cut short"),
        (gzip.compress(ONE_BATCH) + b"more", "gzip", "damaged"),
        (gzip.compress(b"") * 50, "gzip", "members"),
        (zlib.compress(ONE_BATCH) + b"more", "deflate", "after the end"),
        (b"plain", "gzip", "damaged"),
        (b"", "gzip", "cut short"),
        (ONE_BATCH, "br", "valid: gzip"),
        (ONE_BATCH, "gzip, gzip", "valid: gzip"),
    ],
    ids=["cut", "tail", "members", "zlib-tail", "plain", "empty", "unknown", "twice"],
)
def test_damaged_encodings(body: bytes, encoding: str, word: str) -> None:
    with pytest.raises(Rejected, match=word):
        inflate(body, encoding, 1 << 20)


def test_a_bomb_does_not_fill_memory() -> None:
    bomb = gzip.compress(bytes(256 << 20), compresslevel=9)
    assert len(bomb) < 1 << 20
    tracemalloc.start()
    try:
        with pytest.raises(TooLarge):
            inflate(bomb, "gzip", 1 << 20)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()
