from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from handrail_sidecar.proxy.head import HeadProbe, MalformedHeadError, parse_head, rewrite


def raw(*lines: str, start: str = "POST /v1/completions HTTP/1.1") -> bytes:
    return "\r\n".join((start, *lines, "", "")).encode("latin-1")


def test_head_says_method_target_headers_and_framing() -> None:
    head = parse_head(raw("Host: h", "content-LENGTH: 5 ", "X-A: 1", "x-a: 2"))
    assert (head.method, head.target, head.content_length, head.chunked) == (b"POST", b"/v1/completions", 5, False)
    assert head.headers == ((b"Host", b"h"), (b"content-LENGTH", b"5"), (b"X-A", b"1"), (b"x-a", b"2"))
    assert head.first(b"x-a") == b"1"
    assert head.first(b"x-b") is None


@pytest.mark.parametrize(
    ("target", "path"),
    [
        ("/v1/completions?a=b", "/v1/completions"),
        ("http://h:80/v1/completions?a", "/v1/completions"),
        ("//h/v1", "//h/v1"),
        ("*", "*"),
        ("http://[::1/v1/completions?a", "/v1/completions"),
        ("http://[v1.x]/v1/completions", "/v1/completions"),
        ("http://h?a=b", "/"),
    ],
)
def test_path_is_the_target_without_query_in_every_form(target: str, path: str) -> None:
    assert parse_head(raw("Host: h", start=f"OPTIONS {target} HTTP/1.1")).path == path


@pytest.mark.parametrize(
    "bad",
    [
        pytest.param(raw("Content-Length: 5", "Transfer-Encoding: chunked"), id="length and chunked"),
        pytest.param(raw("Transfer-Encoding: chunked", "Content-Length: 5"), id="chunked and length"),
        pytest.param(raw("Content-Length: 5", "Content-Length: 5"), id="two equal lengths"),
        pytest.param(raw("Content-Length: 5", "Content-Length: 6"), id="two lengths"),
        pytest.param(raw("Content-Length: 5, 5"), id="joined lengths"),
        pytest.param(raw("Content-Length: +5"), id="signed length"),
        pytest.param(raw("Content-Length: 0x5"), id="hex length"),
        pytest.param(raw("Content-Length: 99999999999999999999999"), id="length beyond 64 bits"),
        pytest.param(raw("Transfer-Encoding: chunked, gzip"), id="chunked is not last"),
        pytest.param(raw("Transfer-Encoding: xchunked"), id="unknown coding"),
        pytest.param(raw("Transfer-Encoding: chunked", start="POST / HTTP/1.0"), id="chunked in 1.0"),
        pytest.param(raw("Host : h"), id="space before the colon"),
        pytest.param(raw("X: a", " folded"), id="folded line"),
        pytest.param(raw("X: a\nY: b"), id="bare line feed"),
        pytest.param(raw("X: a\rY: b"), id="bare carriage return"),
        pytest.param(raw("X: a\0b"), id="NUL"),
        pytest.param(raw(start="POST / HTTP/2.0"), id="other version"),
        pytest.param(raw(start="PRI * HTTP/2.0"), id="HTTP/2 preface"),
        pytest.param(raw(start="HELO there"), id="not HTTP"),
        pytest.param(b"\x16\x03\x01\x02\x00\x01\r\n\r\n", id="TLS hello"),
    ],
)
def test_ambiguous_or_foreign_heads_are_refused(bad: bytes) -> None:
    with pytest.raises(MalformedHeadError):
        parse_head(bad)


@pytest.mark.parametrize("start", [b"\x16\x03\x01", b"GET / HTTP/1.1\n", b"SSH-2.0-x\r\n"])
def test_probe_refuses_before_the_head_is_whole(start: bytes) -> None:
    with pytest.raises(MalformedHeadError):
        HeadProbe().feed(start)


def test_probe_takes_a_good_head_byte_by_byte() -> None:
    probe = HeadProbe()
    for byte in raw("Host: h", "Upgrade: x", "Connection: upgrade"):
        probe.feed(bytes((byte,)))


def test_rewrite_without_changes_keeps_the_very_bytes() -> None:
    head = parse_head(raw("hOST:h", "X:   spaced  ", "Traceparent: junk"))
    assert rewrite(head, traceparent=None, request_id=None) == head.raw


def test_rewrite_sends_exactly_one_traceparent() -> None:
    head = parse_head(raw("Host: h", "traceparent: a", "tracestate: s=1", "TraceParent: b", "traceparentx: keep", "b3: 0"))
    assert rewrite(head, traceparent=b"00-1", request_id=b"id") == raw(
        "Host: h", "tracestate: s=1", "traceparentx: keep", "b3: 0", "traceparent: 00-1", "X-Request-Id: id"
    )


NAMES = st.text("abcdefghijklmnopqrstuvwxyzABCDEF-", min_size=1, max_size=20).filter(
    lambda name: name.lower() not in ("content-length", "transfer-encoding", "upgrade", "connection", "traceparent")
)
VALUES = st.text(st.characters(min_codepoint=0x21, max_codepoint=0xFF, exclude_characters="\x7f"), max_size=40)


@given(st.lists(st.tuples(NAMES, VALUES), max_size=12), st.integers(0, 12))
def test_rewrite_keeps_every_other_header_in_order(headers: list[tuple[str, str]], at: int) -> None:
    lines = [f"{name}: {value}" for name, value in headers]
    head = parse_head(raw(*lines[:at], "traceparent: old", *lines[at:]))
    assert rewrite(head, traceparent=b"new", request_id=None) == raw(*lines, "traceparent: new")
