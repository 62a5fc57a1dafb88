"""Classify a peer's answer: case G07 by its file, and the specification's tables."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from multidict import CIMultiDict

from doubles.otlp import replay
from handrail.otlp.messages import SHAPES
from handrail.otlp.responses import grpc_refusal, read_grpc, read_http, retry_delay_s, status_bytes, status_message
from handrail.otlp.signals import Accepted, PayloadRejected, Rejected, Retryable, Signal, Unauthorized

NOW = 1_700_000_000.0
JSON = {"Content-Type": "application/json"}
PROTOBUF = {"Content-Type": "application/x-protobuf"}
G07 = replay("G07_responses.json")


def read(status: int, headers: dict[str, str] | None = None, body: bytes = b"") -> Accepted:
    return read_http(Signal.TRACES, status, CIMultiDict(headers or {}), body, NOW)


def g07(index: int) -> Accepted:
    case = G07[index]
    return read(case["status"], {**JSON, **case.get("headers", {})}, json.dumps(case["body"]).encode())


def test_g07_partial_success_is_success_with_three_rejected() -> None:
    assert g07(0) == Accepted(3, "x")


def test_g07_empty_is_full_success() -> None:
    assert g07(1) == Accepted(0, "")


def test_g07_a_message_alone_is_a_warning() -> None:
    assert g07(2) == Accepted(0, "warn")


def test_g07_a_400_is_the_payloads_fault() -> None:
    with pytest.raises(PayloadRejected, match="unmarshal: invalid TraceID length"):
        g07(3)


def test_g07_a_503_waits_as_long_as_it_says() -> None:
    with pytest.raises(Retryable) as refusal:
        g07(4)
    assert refusal.value.delay_s == 30.0


@pytest.mark.parametrize("status", [429, 502, 503, 504])
def test_retryable_statuses(status: int) -> None:
    with pytest.raises(Retryable) as refusal:
        read(status)
    assert refusal.value.delay_s == 0.0


@pytest.mark.parametrize("status", [301, 404, 405, 408, 415, 500, 501])
def test_statuses_that_lose_the_batch_whole(status: int) -> None:
    with pytest.raises(Rejected, match=f"HTTP {status}") as refusal:
        read(status, {"Location": "http://elsewhere/v1/traces"})
    assert not isinstance(refusal.value, PayloadRejected)


@pytest.mark.parametrize("status", [401, 403])
def test_not_being_let_in_keeps_the_batch(status: int) -> None:
    with pytest.raises(Unauthorized, match=f"HTTP {status}") as refusal:
        read(status)
    assert isinstance(refusal.value, Retryable)


@pytest.mark.parametrize("status", [400, 413, 422])
def test_statuses_after_which_a_part_may_pass(status: int) -> None:
    with pytest.raises(PayloadRejected):
        read(status)


@pytest.mark.parametrize(
    ("header", "delay_s"),
    [
        ("120", 120.0),
        (" 7 ", 7.0),
        ("Tue, 14 Nov 2023 22:14:20 GMT", 60.0),
        ("Tue, 14 Nov 2023 22:12:20 GMT", 0.0),
        ("soon", 0.0),
        ("-5", 0.0),
        ("1.5", 0.0),
        ("²", 0.0),
        ("9" * 4000, 999_999_999.0),
    ],
)
def test_retry_after(header: str, delay_s: float) -> None:
    with pytest.raises(Retryable) as refusal:
        read(503, {"retry-after": header})
    assert refusal.value.delay_s == delay_s


@pytest.mark.parametrize("signal", list(Signal))
def test_partial_success_in_protobuf_and_json(signal: Signal) -> None:
    shape = SHAPES[signal]
    answer = shape.response()
    setattr(answer.partial_success, shape.rejected_field, 4)
    answer.partial_success.error_message = "bad\nids"
    expected = Accepted(4, "bad ids")
    assert read_grpc(signal, answer.SerializeToString()) == expected
    assert read_http(signal, 200, CIMultiDict(PROTOBUF), answer.SerializeToString(), NOW) == expected
    for number in (4, "4"):
        body = json.dumps({"partialSuccess": {shape.rejected_json: number, "errorMessage": "bad\nids"}}).encode()
        assert read_http(signal, 200, CIMultiDict(JSON), body, NOW) == expected


@pytest.mark.parametrize(
    "body", [b"", b"OK", b"\xff\xff", b"[]", b'{"partialSuccess":[]}', b'{"partialSuccess":{"rejectedSpans":"x"}}']
)
@pytest.mark.parametrize("headers", [{}, JSON, PROTOBUF, {"Content-Type": "text/html"}], ids=str)
def test_a_success_with_an_odd_body_is_a_success(body: bytes, headers: dict[str, str]) -> None:
    assert read(200, headers, body).rejected == 0


@given(body=st.binary(max_size=200), status=st.sampled_from([200, 400, 404, 503]), kind=st.sampled_from([JSON, PROTOBUF]))
def test_any_answer_is_read(body: bytes, status: int, kind: dict[str, str]) -> None:
    with suppress(Retryable, Rejected):
        read(status, kind, body)


@pytest.mark.parametrize("encoding", ["json", "protobuf"])
def test_the_peers_message_is_reported(encoding: str) -> None:
    headers, body = (JSON, b'{"code":3,"message":"no"}') if encoding == "json" else (PROTOBUF, status_bytes(3, "no"))
    with pytest.raises(Rejected, match="HTTP 400: no"):
        read(400, headers, body)


KEPT_OUT = {"UNAUTHENTICATED", "PERMISSION_DENIED"}
RETRIED = {"CANCELLED", "DEADLINE_EXCEEDED", "ABORTED", "OUT_OF_RANGE", "UNAVAILABLE", "DATA_LOSS"} | KEPT_OUT


@pytest.mark.parametrize("code", [code for code in grpc.StatusCode if code is not grpc.StatusCode.OK], ids=lambda code: code.name)
def test_grpc_codes(code: grpc.StatusCode) -> None:
    plain = grpc_refusal(code, "why", None)
    assert isinstance(plain, Retryable) is (code.name in RETRIED)
    wished = grpc_refusal(code, "why", status_bytes(code.value[0], "why", 12.5))
    assert isinstance(wished, Retryable) is (code.name in RETRIED | {"RESOURCE_EXHAUSTED"})
    if isinstance(wished, Retryable):
        assert wished.delay_s == 12.5
    assert isinstance(plain, PayloadRejected) is (code.name in {"INVALID_ARGUMENT", "RESOURCE_EXHAUSTED"})
    assert isinstance(plain, Unauthorized) is (code.name in KEPT_OUT)


@pytest.mark.parametrize("encoded", [b"", b"\xff", status_bytes(8, "full")], ids=["empty", "damaged", "no-retry-info"])
def test_no_delay_where_none_is_given(encoded: bytes) -> None:
    assert retry_delay_s(encoded) is None


@given(st.binary(max_size=80))
def test_status_bytes_of_anyone(encoded: bytes) -> None:
    delay: Any = retry_delay_s(encoded)
    assert delay is None or delay >= 0
    assert isinstance(status_message(encoded), str)
