"""Spans read from OTLP: recorded messages of vLLM 0.32, and values of every type."""

from __future__ import annotations

from pathlib import Path

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, KeyValue, KeyValueList
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span

from handrail.otlp.values import LATEST_UNIX_NS, attributes_of
from handrail_collector.store.tables.spans import SpanRow, span_row, span_rows, spans_table

RECORDINGS = Path(__file__).parents[2] / "data" / "recordings" / "otlp_raw"


def recorded() -> list[SpanRow]:
    rows: list[SpanRow] = []
    for offset, file in enumerate(sorted(RECORDINGS.glob("*.pb"))):
        rows += span_rows(ExportTraceServiceRequest.FromString(file.read_bytes()).resource_spans, offset)
    return rows


def test_recorded_spans_are_read_whole() -> None:
    rows = [row for row in recorded() if row.name == "llm_request"]
    assert rows
    for row in rows:
        assert (row.kind, row.scope, row.parent_span_id != "") in (
            (2, "vllm.tracing.otel", True),
            (2, "vllm.tracing.otel", False),
        )
        assert row.service in ("vllm-prefill", "vllm-decode")
        assert isinstance(row.attributes["gen_ai.latency.e2e"], float)
        assert isinstance(row.attributes["gen_ai.usage.prompt_tokens"], int)
        assert isinstance(row.attributes["gen_ai.request.id"], str)
        assert 0 < row.end_unix_ns - row.start_unix_ns < 60 * 10**9
        assert row.raw_bytes > 300


def test_recorded_spans_come_back_from_columns() -> None:
    rows = recorded()
    table, _ = spans_table(rows)
    back = [span_row(stored) for stored in table.to_pylist()]
    assert sorted(map(repr, map(_ordered, back))) == sorted(map(repr, map(_ordered, rows)))


def _ordered(row: SpanRow) -> tuple[object, ...]:
    return (
        row.span_id,
        row.offset,
        sorted(row.attributes.items()),
        sorted(row.resource.items()),
        row.start_unix_ns,
        row.end_unix_ns,
    )


def test_values_keep_their_types() -> None:
    values = {
        "text": AnyValue(string_value="é"),
        "true": AnyValue(bool_value=True),
        "integer": AnyValue(int_value=-(2**63)),
        "fraction": AnyValue(double_value=0.1),
        "bytes": AnyValue(bytes_value=b"\x00\xff"),
        "array": AnyValue(array_value=ArrayValue(values=[AnyValue(int_value=1), AnyValue(string_value="1")])),
        "map": AnyValue(kvlist_value=KeyValueList(values=[KeyValue(key="a", value=AnyValue(bool_value=False))])),
        "nothing": AnyValue(),
    }
    assert repr(attributes_of([KeyValue(key=key, value=value) for key, value in values.items()])) == repr(
        {
            "text": "é",
            "true": True,
            "integer": -(2**63),
            "fraction": 0.1,
            "bytes": b"\x00\xff",
            "array": (1, "1"),
            "map": {"a": False},
            "nothing": None,
        }
    )


def test_a_time_beyond_int64_is_stored_as_the_latest() -> None:
    span = Span(trace_id=bytes(16), span_id=bytes(8), start_time_unix_nano=2**64 - 1, end_time_unix_nano=5)
    (row,) = span_rows([ResourceSpans(scope_spans=[ScopeSpans(spans=[span])])], 3)
    assert (row.start_unix_ns, row.end_unix_ns, row.offset, row.role) == (LATEST_UNIX_NS, 5, 3, "")
    table, _ = spans_table([row])
    assert span_row(table.to_pylist()[0]) == row
