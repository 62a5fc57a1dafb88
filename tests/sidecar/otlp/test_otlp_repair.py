"""Repair requests that do not parse because of single values.

The tests cover what is repaired, what is left, and the bound on the work.
"""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from doubles.otlp import RAW, span, spans_of, traces
from handrail.otlp.decode import JSON, PROTOBUF, Unparsed, receive
from handrail.otlp.payload import delimited
from handrail.otlp.repair import repaired
from handrail.otlp.signals import Rejected, Signal

MARK = b"@@@@@@@@"
BAD = st.binary(min_size=len(MARK), max_size=len(MARK))


def everywhere() -> dict[Signal, bytes]:
    """Build a request of each signal with ``MARK`` in every kind of text field."""
    mark = MARK.decode()
    spans = traces(span(1, name=mark, trace_state=mark), span(2), scope=mark, resource={mark: mark})
    one = spans.resource_spans[0].scope_spans[0].spans[0]
    one.attributes.add(key="deep").value.array_value.values.add().kvlist_value.values.add(key=mark).value.string_value = mark
    one.events.add(name=mark).attributes.add(key=mark).value.string_value = mark
    one.links.add(trace_state=mark).attributes.add(key="x").value.string_value = mark
    one.status.message = mark
    spans.resource_spans[0].schema_url = mark
    logs = ExportLogsServiceRequest()
    record = logs.resource_logs.add().scope_logs.add().log_records.add(severity_text=mark)
    record.body.string_value = mark
    metrics = ExportMetricsServiceRequest()
    metric = metrics.resource_metrics.add().scope_metrics.add().metrics.add(name=mark, unit=mark, description=mark)
    metric.gauge.data_points.add(as_int=-5).attributes.add(key=mark).value.string_value = mark
    return {
        Signal.TRACES: spans.SerializeToString(),
        Signal.LOGS: logs.SerializeToString(),
        Signal.METRICS: metrics.SerializeToString(),
    }


PLACES = [(signal, index) for signal, body in everywhere().items() for index in range(body.count(MARK))]


def with_bad(signal: Signal, index: int, bad: bytes) -> bytes:
    before, *rest = everywhere()[signal].split(MARK)
    return before + b"".join((bad if at == index else MARK) + part for at, part in enumerate(rest))


def is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


@pytest.mark.parametrize(("signal", "index"), PLACES)
def test_text_is_mended_wherever_it_stands(signal: Signal, index: int) -> None:
    body = with_bad(signal, index, b"ab\xff\xfecd\xe9f")
    with pytest.raises(Unparsed):
        receive(signal, body, PROTOBUF, "", repair=False)
    received = receive(signal, body, PROTOBUF, "")
    assert received.payload == with_bad(signal, index, b"ab??cd?f")
    assert (received.repaired, received.rejected) == (1, 0)


@given(st.sampled_from(PLACES), BAD)
def test_any_eight_bytes_cost_no_more_than_their_text(place: tuple[Signal, int], bad: bytes) -> None:
    received = receive(place[0], with_bad(*place, bad), PROTOBUF, "")
    assert received.repaired == (0 if is_text(bad) else 1)
    at = with_bad(*place, bad).index(bad)
    assert received.payload[:at] == with_bad(*place, bad)[:at]
    assert received.payload[at + len(bad) :] == with_bad(*place, bad)[at + len(bad) :]


@given(st.text(min_size=1, max_size=20), st.integers(0, 5))
def test_a_text_cut_within_a_character_keeps_what_is_whole(text: str, off: int) -> None:
    cut = text.encode("utf-8", "replace")[: -off or None]
    body = delimited(1, delimited(2, delimited(2, delimited(5, cut) + span(1).SerializeToString())))
    name = spans_of([receive(Signal.TRACES, body, PROTOBUF, "").payload])[0].name
    assert len(name.encode()) == len(cut) or name == "work"
    whole = cut.decode("utf-8", "ignore")
    body = delimited(1, delimited(2, delimited(2, span(1).SerializeToString() + delimited(5, cut))))
    found = spans_of([receive(Signal.TRACES, body, PROTOBUF, "").payload])[0].name
    assert found.startswith(whole)
    assert set(found[len(whole) :]) <= {"?"}


@pytest.mark.parametrize("path", RAW[:6], ids=lambda path: path.name)
def test_damage_that_is_no_text_is_refused_as_before(path: Any) -> None:
    body = path.read_bytes()
    for cut in range(1, len(body), max(1, len(body) // 40)):
        with suppress(Rejected):  # a request may be whole when cut between two of its entries
            assert receive(Signal.TRACES, body[:cut], PROTOBUF, "").repaired == 0


@given(st.binary(max_size=200))
def test_any_bytes_are_mended_or_refused(body: bytes) -> None:
    for signal in Signal:
        try:
            found, _ = repaired(signal, body)
        except ValueError:
            continue
        assert len(found) == len(body)


def test_the_work_is_bounded() -> None:
    empty = delimited(9, b"")
    many = delimited(1, empty * 600_000 + delimited(3, b"\xff"))  # unknown fields of a resource's entry, and an invalid text
    with pytest.raises(ValueError, match="too many fields"):
        repaired(Signal.TRACES, many)
    nested = delimited(1, b"\xff")
    for _ in range(90):
        nested = delimited(5, delimited(1, nested + b"\x0a\x00"))
    body = delimited(1, delimited(2, delimited(2, delimited(9, delimited(2, nested) * 300))))
    with pytest.raises(ValueError, match=r"too many bytes|nested too deep"):
        repaired(Signal.TRACES, body)


def json_span(**fields: Any) -> bytes:
    good = {"traceId": "0af7651916cd43dd8448eb211c80319c", "spanId": "b7ad6b7169203331", "name": "x"}
    return json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": [{**good, **fields}]}]}]}).encode()


def attribute(value: dict[str, Any]) -> bytes:
    return json_span(attributes=[{"key": "a", "value": value}])


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ({"intValue": "9223372036854775808"}, {"string_value": "9223372036854775808"}),
        ({"intValue": -(2**63) - 1}, {"string_value": "-9223372036854775809"}),
        ({"intValue": 1.5}, {"string_value": "1.5"}),
        ({"doubleValue": float("inf")}, {"double_value": float("inf")}),
        ({"doubleValue": float("-inf")}, {"double_value": float("-inf")}),
        ({"stringValue": "lone \ud800 surrogate"}, {"string_value": "lone ? surrogate"}),
    ],
)
def test_a_value_of_json_costs_that_attribute(value: dict[str, Any], shown: dict[str, Any]) -> None:
    received = receive(Signal.TRACES, attribute(value), JSON, "")
    (found,) = spans_of([received.payload])[0].attributes
    assert {found.value.WhichOneof("value"): getattr(found.value, str(found.value.WhichOneof("value")))} == shown
    assert received.repaired == 1


def test_times_of_json_beyond_64_bits_are_the_nearest() -> None:
    received = receive(Signal.TRACES, json_span(startTimeUnixNano=-1, endTimeUnixNano=str(2**70)), JSON, "")
    (found,) = spans_of([received.payload])
    assert (found.start_time_unix_nano, found.end_time_unix_nano) == (0, 2**64 - 1)


def test_bytes_of_json_that_are_not_utf8() -> None:
    received = receive(Signal.TRACES, json_span(name="M@ller").replace(b"@", b"\xfc"), JSON, "")
    assert spans_of([received.payload])[0].name == "M\ufffdller"
    assert received.repaired == 1


def test_a_field_of_json_whose_name_is_no_text_costs_itself() -> None:
    """protobuf's C part raises SystemError for half a surrogate pair in a name."""
    received = receive(Signal.TRACES, json_span(**{"na\ud800me": "y", "kind": 2}), JSON, "")
    (found,) = spans_of([received.payload])
    assert (found.name, found.kind) == ("x", 2)
    assert received.repaired == 1


def test_a_request_that_parses_is_not_looked_into() -> None:
    body = ExportTraceServiceRequest.FromString(RAW[0].read_bytes()).SerializeToString()
    received = receive(Signal.TRACES, body, PROTOBUF, "")
    assert received.payload is body
    assert received.repaired == 0
