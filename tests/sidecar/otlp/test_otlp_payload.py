"""Cut and mark payloads without a change of their content."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from doubles.otlp import RAW, span, span_bytes, spans_of, traces
from handrail.conventions import BATCH_SEQ, ROLE
from handrail.otlp.payload import SGROUP, count_items, delimited, fields, halves, slice_items, with_batch_seq, with_resource

MARKS = {ROLE: "decode", "service.name": "handrail", "host.id": "h"}


def many(sizes: list[list[int]]) -> ExportTraceServiceRequest:
    """Build one resource per list and one scope per number, with that many spans."""
    request = ExportTraceServiceRequest()
    number = 1
    for scopes in sizes:
        entry = request.resource_spans.add(schema_url="resource-schema")
        entry.resource.attributes.add(key="service.name").value.string_value = f"engine-{number}"
        for size in scopes:
            group = entry.scope_spans.add(schema_url="scope-schema")
            group.scope.name = "vllm"
            group.scope.attributes.add(key=BATCH_SEQ).value.int_value = 9
            group.scope.attributes.add(key="other").value.int_value = 1
            for _ in range(size):
                group.spans.append(span(number))
                number += 1
    return request


SIZES = st.lists(st.lists(st.integers(0, 4), max_size=3), max_size=3)


@pytest.mark.parametrize("path", RAW, ids=lambda path: path.name)
def test_marking_a_recording_changes_its_resource_alone(path: object) -> None:
    body = next(raw for raw in RAW if raw == path).read_bytes()
    marked = with_resource(body, MARKS)
    assert span_bytes([marked]) == span_bytes([body])
    before, after = ExportTraceServiceRequest.FromString(body), ExportTraceServiceRequest.FromString(marked)
    names = [attribute.key for attribute in after.resource_spans[0].resource.attributes]
    assert names == [attribute.key for attribute in before.resource_spans[0].resource.attributes] + [ROLE, "host.id"]
    # Each scope entry is in the output as the sender wrote it.
    for entry in fields(body):
        for part in fields(body, entry.value, entry.end):
            if part.number != 1:
                assert body[part.start : part.end] in marked


def test_nothing_to_add_means_the_same_bytes() -> None:
    body = traces(span(1), resource=MARKS).SerializeToString()
    assert with_resource(body, MARKS) == body
    assert with_resource(with_resource(RAW[0].read_bytes(), MARKS), MARKS) == with_resource(RAW[0].read_bytes(), MARKS)
    assert with_resource(b"", MARKS) == b""


@pytest.mark.parametrize("spelling", ["absent", "twice", "unordered", "groups", "nonzero-default"])
def test_unusual_encodings(spelling: str) -> None:
    """Legal encodings that no library here writes.

    The resource is missing, in two pieces, or last; groups; explicit defaults.
    """
    item = span(7).SerializeToString() + bytes((0x48, 0))  # dropped_attributes_count 0, spelt out... field 9, varint
    scope_entry = delimited(2, delimited(2, item))
    name = delimited(1, delimited(1, b"service.name") + delimited(2, delimited(1, b"engine")))
    other = delimited(1, delimited(1, b"host.id") + delimited(2, delimited(1, b"mine")))
    group = bytes((15 << 3 | SGROUP, 1 << 3, 5, 15 << 3 | 4))
    entry = {
        "absent": scope_entry,
        "twice": delimited(1, name) + scope_entry + delimited(1, other),
        "unordered": scope_entry + delimited(1, name),
        "groups": group + delimited(1, name) + scope_entry,
        "nonzero-default": delimited(1, name + bytes((2 << 3, 0))) + scope_entry,
    }[spelling]
    marked = with_resource(delimited(1, entry), MARKS)
    assert item in marked
    request = ExportTraceServiceRequest.FromString(marked)
    found = {a.key: a.value.string_value for a in request.resource_spans[0].resource.attributes}
    assert found == {
        ROLE: "decode",
        "service.name": "handrail" if spelling == "absent" else "engine",
        "host.id": "mine" if spelling == "twice" else "h",
    }
    assert count_items(marked) == 1


def test_metrics_and_logs_have_the_same_layout() -> None:
    metrics = ExportMetricsServiceRequest()
    metric_scope = metrics.resource_metrics.add().scope_metrics.add()
    metric_scope.metrics.add(name="a").gauge.data_points.add(as_int=1)
    metric_scope.metrics.add(name="b").gauge.data_points.add(as_int=2)
    body = metrics.SerializeToString()
    marked = ExportMetricsServiceRequest.FromString(with_resource(body, MARKS))
    assert {a.key for a in marked.resource_metrics[0].resource.attributes} == set(MARKS)
    cut = halves(body)
    assert cut is not None
    assert [ExportMetricsServiceRequest.FromString(h).resource_metrics[0].scope_metrics[0].metrics[0].name for h in cut] == [
        "a",
        "b",
    ]
    logs = ExportLogsServiceRequest()
    logs.resource_logs.add().scope_logs.add().log_records.add(event_name="x")
    body = logs.SerializeToString()
    assert count_items(body) == 1
    assert halves(body) is None
    marked_logs = ExportLogsServiceRequest.FromString(with_resource(body, MARKS))
    assert {a.key for a in marked_logs.resource_logs[0].resource.attributes} == set(MARKS)


@given(sizes=SIZES)
@settings(max_examples=100, deadline=None)
def test_halves_hold_every_item_once_and_in_order(sizes: list[list[int]]) -> None:
    request = many(sizes)
    body = request.SerializeToString()
    total = sum(sum(scopes) for scopes in sizes)
    assert count_items(body) == total
    cut = halves(body)
    if total < 2:
        assert cut is None
        return
    assert cut is not None
    assert span_bytes(list(cut)) == span_bytes([body])
    assert [count_items(half) for half in cut] == [total // 2, total - total // 2]
    for half in cut:
        for entry in ExportTraceServiceRequest.FromString(half).resource_spans:
            assert entry.schema_url == "resource-schema"
            assert entry.resource.attributes[0].value.string_value.startswith("engine-")
            for scope in entry.scope_spans:
                # A half must not look like the whole batch to a collector that drops what it has seen.
                assert [attribute.key for attribute in scope.scope.attributes] == ["other"]
                assert (scope.scope.name, scope.schema_url) == ("vllm", "scope-schema")
                assert scope.spans


@given(sizes=SIZES, start=st.integers(0, 12), length=st.integers(0, 12))
@settings(max_examples=100, deadline=None)
def test_a_slice_is_the_slice_of_the_items(sizes: list[list[int]], start: int, length: int) -> None:
    body = many(sizes).SerializeToString()
    assert span_bytes([slice_items(body, start, start + length)]) == span_bytes([body])[start : start + length]


def test_the_batch_seq_goes_on_every_scope_that_has_none() -> None:
    body = with_batch_seq(traces(span(1), span(2)).SerializeToString(), 41)
    scope = ExportTraceServiceRequest.FromString(body).resource_spans[0].scope_spans[0].scope
    assert (scope.name, scope.attributes[0].key, scope.attributes[0].value.int_value) == ("test", BATCH_SEQ, 41)
    assert with_batch_seq(body, 42) == body
    assert [item.name for item in spans_of([body])] == ["work", "work"]


@given(body=st.binary(max_size=60))
@settings(max_examples=200, deadline=None)
def test_damaged_bytes_raise_value_error_alone(body: bytes) -> None:
    try:
        walked = list(fields(body))
    except ValueError:
        return
    assert b"".join(body[field.start : field.end] for field in walked) == body
