"""Trace context: strict W3C, B3 is read, one value is sent."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from handrail.identity import derive_trace_id
from handrail.records import Hint, SpanIds
from handrail.trace_context import Inbound, Origin, TraceContext, continue_from, extract, format_traceparent, parse_traceparent

DATA = Path(__file__).parents[1] / "data" / "replay" / "http"
TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
GOOD = f"00-{TRACE}-{SPAN}-01".encode()


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        pytest.param(GOOD, TraceContext(TRACE, SPAN, 1), id="version 00"),
        pytest.param(f"00-{TRACE}-{SPAN}-00".encode(), TraceContext(TRACE, SPAN, 0), id="not sampled"),
        pytest.param(f"00-{TRACE}-{SPAN}-03".encode(), TraceContext(TRACE, SPAN, 3), id="random flag kept"),
        pytest.param(f"cc-{TRACE}-{SPAN}-01-later".encode(), TraceContext(TRACE, SPAN, 1), id="a later version may append"),
        pytest.param(GOOD + b"-x", None, id="version 00 may not"),
        pytest.param(GOOD.upper(), None, id="upper case"),
        pytest.param(f"ff-{TRACE}-{SPAN}-01".encode(), None, id="version ff"),
        pytest.param(f"00-{'0' * 32}-{SPAN}-01".encode(), None, id="zero trace id"),
        pytest.param(f"00-{TRACE}-{'0' * 16}-01".encode(), None, id="zero span id"),
        pytest.param(GOOD[:-1], None, id="short"),
        pytest.param(GOOD + b"\n", None, id="trailing newline"),
        pytest.param(GOOD + b"," + GOOD, None, id="joined with a comma"),
        pytest.param(b"", None, id="empty"),
    ],
)
def test_traceparent_is_read_strictly(value: bytes, expected: TraceContext | None) -> None:
    assert parse_traceparent(value) == expected


@given(st.binary(max_size=80))
def test_no_header_value_raises(value: bytes) -> None:
    extract([(b"traceparent", value), (b"b3", value), (b"X-B3-TraceId", value), (b"X-B3-SpanId", value)])


def test_C02_two_traceparents_are_none() -> None:
    other = f"00-{'1' * 32}-{SPAN}-01".encode()
    inbound = extract([(b"traceparent", GOOD), (b"Traceparent", other)])
    assert inbound == Inbound(None, Origin.DERIVED, (Hint.DUPLICATE_TRACEPARENT,))
    assert continue_from(inbound, "r", exported=True)[0].trace_id == derive_trace_id("r")


def _pairs(headers: dict[str, str]) -> list[tuple[bytes, bytes]]:
    return [(k.encode(), v.encode()) for k, v in headers.items()]


def test_C13_b3_headers() -> None:
    nothing, single, multi, deny, both = (
        extract(_pairs(case["h"])) for case in json.loads((DATA / "C13_b3_headers.json").read_text())
    )
    assert nothing == Inbound(None, Origin.DERIVED)
    assert single.context == TraceContext("80f198ee56343ba864fe8b2a57d3eff7", "e457b5a2e4d86bd1", 1)
    assert single.origin is Origin.B3
    assert multi.context == TraceContext("0" * 16 + "a3ce929d0e0e4736", "00f067aa0ba902b7", 0)
    assert deny.context is None
    assert deny.denied
    assert continue_from(deny, "r", exported=True)[0].flags == 0
    assert both.context is not None
    assert both.context.trace_id == "12345678901234567890123456789012"
    assert both.hints == (Hint.CONTEXT_CONFLICT,)


def test_C12_garbage_beside_a_good_context_does_not_wipe_it() -> None:
    inbound = extract([(b"traceparent", GOOD), (b"x-request-id", b"\xff"), (b"b3", b"garbage")])
    assert inbound.context == TraceContext(TRACE, SPAN, 1)
    assert (
        extract([(b"traceparent", b"garbage"), (b"b3", b"80f198ee56343ba864fe8b2a57d3eff7-e457b5a2e4d86bd1-1")]).origin
        is Origin.B3
    )


def test_C25_the_callers_flag_is_kept_and_no_parent_is_not_flag_zero() -> None:
    unsampled = extract([(b"traceparent", f"00-{TRACE}-{SPAN}-00".encode())])
    assert format_traceparent(continue_from(unsampled, "r", exported=True)[0]).endswith(b"-00")
    assert continue_from(extract([]), "r", exported=True)[0].flags == 1
    assert continue_from(extract([]), "r", exported=False)[0].flags == 0


def test_our_span_is_a_fresh_child_in_the_callers_trace() -> None:
    inbound = extract([(b"traceparent", GOOD)])
    one, origin = continue_from(inbound, "r", exported=False)
    two, _ = continue_from(inbound, "r", exported=False)
    assert origin is Origin.INBOUND
    assert (one.trace_id, one.parent_span_id, one.flags) == (TRACE, SPAN, 1)
    assert one.span_id not in (two.span_id, SPAN)
    assert parse_traceparent(format_traceparent(one)) == TraceContext(TRACE, one.span_id, 1)


@given(st.integers(1, 2**128 - 1), st.integers(1, 2**64 - 1), st.integers(0, 255))
def test_what_is_sent_is_read_back(trace: int, span: int, flags: int) -> None:
    ids = SpanIds(trace_id=f"{trace:032x}", span_id=f"{span:016x}", flags=flags)
    assert parse_traceparent(format_traceparent(ids)) == TraceContext(ids.trace_id, ids.span_id, flags)
