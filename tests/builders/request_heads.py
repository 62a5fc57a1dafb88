"""The request heads that the proxy's tests share.

Each has an id, its bytes, and the status of its refusal, or None where the proxy accepts it.
Add every new head here: ``test_head_cuts`` reads each head with all cuts that TCP may make.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from harness.proxy import DATA, case, post

LIMIT: Final = 4096
"""Limit of a head's size in these tests, in bytes."""

_TRACE: Final = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@dataclass(frozen=True, slots=True)
class Head:
    """One request head.

    ``status``: 400, 405 or 431 when the proxy refuses it; None when it accepts it.
    """

    name: str
    raw: bytes
    status: int | None = None


def raw(*lines: str, start: str = "POST /v1/completions HTTP/1.1") -> bytes:
    """Build a head from these lines."""
    return "\r\n".join((start, *lines, "", "")).encode("latin-1")


def _posted(headers: dict[str, str] | list[list[str]] | str, path: str = "/v1/completions") -> bytes:
    """Return the head that ``post`` sends."""
    if not isinstance(headers, str):
        pairs = headers.items() if isinstance(headers, dict) else headers
        headers = "".join(f"{key}: {value}\r\n" for key, value in pairs)
    return post(path=path, headers=headers).partition(b"\r\n\r\n")[0] + b"\r\n\r\n"


def _methods() -> list[Head]:
    targets = {"OPTIONS": "*"}
    return [
        Head(f"{method} {version}", raw("Host: h", start=f"{method} {targets.get(method, 'http://h/x')} HTTP/{version}"))
        for method in ("GET", "HEAD", "PUT", "DELETE", "OPTIONS", "PATCH", "POST")
        for version in ("1.0", "1.1")
    ]


def _targets() -> list[Head]:
    targets = ("/v1/completions?a=b", "http://h:80/v1/completions?a", "*", "//h/v1", "/files/a%20b?x=1", "/metrics?x=1", "/ws")
    return [Head(f"target {target}", raw("Host: h", start=f"OPTIONS {target} HTTP/1.1")) for target in targets]


def _connections() -> list[Head]:
    values = ("close", "Close", "keep-alive", "keep-alive, close", "close,x", "Upgrade")
    return [
        Head(f"{version} Connection: {value}", raw("Host: h", f"Connection: {value}", start=f"GET / HTTP/{version}"))
        for value in values
        for version in ("1.0", "1.1")
    ]


def _routes() -> list[Head]:
    routes = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/embeddings", "/slow", "/generate")
    return [Head(f"POST {route}", _posted("", path=route)) for route in routes]


def _recorded() -> list[Head]:
    b3 = [Head(f"C13 b3 row {at}", _posted(row["h"])) for at, row in enumerate(case("http/C13_b3_headers.json"))]
    clash = [
        Head(f"C08 clash row {at}", _posted({"X-Request-Id": row["header"]}, path=row["route"]))
        for at, row in enumerate(case("http/C08_id_clash.json"))
    ]
    worker = case("http/C28_headers_at_worker.json")
    return [
        *b3,
        *clash,
        Head("C28 client", _posted(worker["client"])),
        Head("C28 worker", _posted(worker["worker"])),
        Head("E18 HTTP/2 preface", (DATA / "http/E18_h2_preface.raw").read_bytes(), 400),
    ]


_TAKEN: Final = [
    Head("length", raw("Host: h", "content-LENGTH: 5 ", "X-A: 1", "x-a: 2")),
    Head("no length", raw("Host: h")),
    Head("no header at all", raw(start="GET / HTTP/1.0")),
    Head("chunked", raw("Host: h", "Transfer-Encoding: chunked")),
    Head("chunked, odd case", raw("Host: h", "transfer-ENCODING: Chunked")),
    Head("Expect", _posted("Expect: 100-continue\r\n")),
    Head("Upgrade", raw("Host: h", "Connection: Upgrade", "Upgrade: echo", start="GET /ws HTTP/1.1")),
    Head("Upgrade in other words", raw("Host: h", "Upgrade: x", "Connection: upgrade")),
    Head("h2c upgrade", raw("Host: h", "Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAM")),
    Head("odd spaces", raw("hOST:h", "X:   spaced  ", "Traceparent: junk")),
    Head(
        "two traceparents", raw("Host: h", "traceparent: a", "tracestate: s=1", "TraceParent: b", "traceparentx: keep", "b3: 0")
    ),
    Head("traceparent", _posted(f"traceparent: {_TRACE}\r\nx-request-id: foo\r\n")),
    Head("traceparents and state", _posted(f"traceparent: {_TRACE}\r\ntraceparent: junk\r\nTraceState: a=1\r\n")),
    Head("request id", _posted("x-REQUEST-id: mine\r\n")),
    Head("request id with spaces", _posted("X-Request-Id: with spaces\r\n")),
    Head("request id of Latin 1", _posted("X-Request-Id: caf\xe9\r\n")),
    Head("request id with a comma", _posted("X-Request-Id: a,b\r\n")),
    Head("long request id", _posted(f"X-Request-Id: {'b' * 400}\r\n")),
    Head("encodings", _posted("Accept-Encoding: br, gzip, zstd\r\n")),
    Head("empty value", raw("Host: h", "X-Empty:", "X-Space: ")),
    Head("as long as may be", raw("Host: h", f"X: {'a' * (LIMIT - len(raw('Host: h', 'X: ')))}")),
]

_REFUSED: Final = [
    Head("length and chunked", raw("Content-Length: 5", "Transfer-Encoding: chunked"), 400),
    Head("chunked and length", raw("Transfer-Encoding: chunked", "Content-Length: 5"), 400),
    Head("two equal lengths", raw("Content-Length: 5", "Content-Length: 5"), 400),
    Head("two lengths", raw("Content-Length: 5", "Content-Length: 6"), 400),
    Head("joined lengths", raw("Content-Length: 5, 5"), 400),
    Head("signed length", raw("Content-Length: +5"), 400),
    Head("hex length", raw("Content-Length: 0x5"), 400),
    Head("length beyond 64 bits", raw("Content-Length: 99999999999999999999999"), 400),
    Head("chunked is not last", raw("Transfer-Encoding: chunked, gzip"), 400),
    Head("unknown coding", raw("Transfer-Encoding: xchunked"), 400),
    Head("chunked in 1.0", raw("Transfer-Encoding: chunked", start="POST / HTTP/1.0"), 400),
    Head("space before the colon", raw("Host : h"), 400),
    Head("folded line", raw("X: a", " folded"), 400),
    Head("bare line feed", raw("X: a\nY: b"), 400),
    Head("bare line feeds", b"GET / HTTP/1.1\nHost: h\n\n\r\n\r\n", 400),
    Head("bare carriage return", raw("X: a\rY: b"), 400),
    Head("NUL", raw("X: a\0b"), 400),
    Head("other version", raw(start="POST / HTTP/2.0"), 400),
    Head("not HTTP", raw(start="HELO there"), 400),
    Head("TLS hello", b"\x16\x03\x01\x02\x00\x01\r\n\r\n", 400),
    Head("SSH", b"SSH-2.0-x\r\n\r\n", 400),
    Head("CONNECT", raw("Host: h", start="CONNECT h:1 HTTP/1.1"), 405),
    Head("one byte too long", raw("Host: h", f"X: {'a' * (LIMIT + 1 - len(raw('Host: h', 'X: ')))}"), 431),
    Head("far too long", raw(f"X-Request-Id: {'a' * 2 * LIMIT}"), 431),
]

HEADS: Final = (*_methods(), *_targets(), *_connections(), *_routes(), *_recorded(), *_TAKEN, *_REFUSED)
