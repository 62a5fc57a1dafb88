from __future__ import annotations

import pytest

from handrail_sidecar.proxy.response import Body, Headers, ResponseWatch

CASES = [
    # id, bytes, head only, status, body, complete, until close, unreadable
    ("length", b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc", False, 200, b"abc", True, False, False),
    ("empty", b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", False, 200, b"", True, False, False),
    ("short", b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nabc", False, 200, b"abc", False, False, False),
    ("until close", b"HTTP/1.0 200 OK\r\nA: b\r\n\r\nabc", False, 200, b"abc", False, True, False),
    ("HEAD", b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\n", True, 200, b"", True, False, False),
    ("304", b"HTTP/1.1 304 N\r\nContent-Length: 3\r\n\r\n", False, 304, b"", True, False, False),
    ("204", b"HTTP/1.1 204 N\r\n\r\n", False, 204, b"", True, False, False),
    (
        "interim",
        b"HTTP/1.1 100 C\r\n\r\nHTTP/1.1 103 E\r\nLink: x\r\n\r\nHTTP/1.1 204 N\r\n\r\n",
        False,
        204,
        b"",
        True,
        False,
        False,
    ),
    ("interim only", b"HTTP/1.1 100 C\r\n\r\n", False, None, b"", False, False, False),
    (
        "chunked with trailer",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3;x=1\r\nabc\r\n0\r\nT: 1\r\n\r\n",
        False,
        200,
        b"abc",
        True,
        False,
        False,
    ),
    (
        "length and chunked",
        b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
        False,
        200,
        b"abc",
        True,
        False,
        False,
    ),
    ("other coding", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\nabc", False, 200, b"abc", False, True, False),
    ("bare line feeds", b"HTTP/1.1 200 OK\nContent-Length: 3\n\nabc", False, 200, b"abc", True, False, False),
    ("bad chunk", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", False, 200, b"", False, False, True),
    ("not HTTP", b"SSH-2.0\r\n", False, None, b"", False, False, True),
    (
        "refused upgrade",
        b"HTTP/1.1 426 U\r\nConnection: Upgrade\r\nUpgrade: h\r\nContent-Length: 3\r\n\r\nabc",
        False,
        426,
        b"abc",
        True,
        False,
        False,
    ),
]


@pytest.mark.parametrize("step", [1, 10**6], ids=["byte by byte", "whole"])
@pytest.mark.parametrize("row", CASES, ids=[row[0] for row in CASES])
def test_where_a_response_ends(row: tuple[str, bytes, bool, int | None, bytes, bool, bool, bool], step: int) -> None:
    _, data, head_only, status, body, complete, until_close, unreadable = row
    pieces: list[bytes] = []
    heads: list[tuple[int, Headers]] = []

    def on_head(status: int, headers: Headers) -> Body:
        heads.append((status, headers))
        return lambda piece, stamp: pieces.append(piece)

    watch = ResponseWatch(head_only, on_head)
    for at in range(0, len(data), step):
        watch.feed(data[at : at + step], at)
        if watch.unreadable:
            break
    assert (watch.status, b"".join(pieces)) == (status, body)
    assert (watch.complete, watch.until_close, watch.unreadable, watch.upgraded) == (complete, until_close, unreadable, False)
    assert len(heads) == (status is not None)


@pytest.mark.parametrize("tail", [b"", b"\x81\x05hello"])
def test_101_ends_what_is_http(tail: bytes) -> None:
    watch = ResponseWatch(False, lambda status, headers: None)
    watch.feed(b"HTTP/1.1 101 S\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n" + tail, 1)
    assert (watch.upgraded, watch.complete, watch.unreadable) == (True, False, False)


def test_bytes_behind_a_response_are_not_taken_for_its_body() -> None:
    pieces: list[bytes] = []
    watch = ResponseWatch(False, lambda status, headers: lambda piece, stamp: pieces.append(piece))
    watch.feed(b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabcHTTP/1.1 500 X\r\nContent-Length: 1\r\n\r\nz", 1)
    assert (watch.status, watch.complete, pieces) == (200, True, [b"abc"])


def test_body_carries_the_stamp_of_its_read() -> None:
    seen: list[tuple[bytes, int]] = []
    watch = ResponseWatch(False, lambda status, headers: lambda piece, stamp: seen.append((piece, stamp)))
    watch.feed(b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\na", 5)
    watch.feed(b"bc", 9)
    assert seen == [(b"a", 5), (b"bc", 9)]
