from __future__ import annotations

import httptools
import pytest
from hypothesis import given
from hypothesis import strategies as st

from handrail_sidecar.proxy.request_framing import LAST, BadChunkError, ChunkedBody, encode

HEAD = b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"


def decode(data: bytes, step: int) -> tuple[bytes, int, ChunkedBody]:
    body, got, taken = ChunkedBody(), b"", 0
    for at in range(0, len(data), step):
        pieces, count = body.feed(data[at : at + step])
        got += b"".join(pieces)
        taken += count
        if body.done:
            break
    return got, taken, body


@pytest.mark.parametrize("step", [1, 2, 7, 10_000])
def test_body_trailers_and_the_first_byte_behind(step: int) -> None:
    message = b"3\r\nabc\r\nA;x=1\r\n0123456789\r\n0\r\nT: 1\r\nU: \xe9\r\n\r\n"
    got, taken, body = decode(message + b"GET / HTTP/1.1\r\n", step)
    assert (got, taken, body.done, body.trailers) == (b"abc0123456789", len(message), True, b"T: 1\r\nU: \xe9\r\n")


@pytest.mark.parametrize(
    "bad",
    [
        pytest.param(b"zz\r\n", id="no hex"),
        pytest.param(b"-1\r\n", id="signed"),
        pytest.param(b"0x3\r\n", id="0x"),
        pytest.param(b" 3\r\n", id="space first"),
        pytest.param(b"\r\n", id="empty size"),
        pytest.param(b"3\nabc\n", id="bare line feed"),
        pytest.param(b"3\r\nabcd\r\n", id="data longer than its size"),
        pytest.param(b"3\r\nabc\n", id="bare line feed after data"),
        pytest.param(b"1" * 17 + b"\r\n", id="size beyond 64 bits"),
        pytest.param(b"3;a\rb\r\n", id="bare carriage return in an extension"),
        pytest.param(b"3;" + b"a" * 5000 + b"\r\n", id="endless extension"),
        pytest.param(b"a" * 5000, id="endless size line"),
        pytest.param(b"0\r\n folded\r\n\r\n", id="folded trailer"),
        pytest.param(b"0\r\nT : 1\r\n\r\n", id="space before the colon of a trailer"),
        pytest.param(b"0\r\n" + b"T: 12345678\r\n" * 2000, id="endless trailers"),
    ],
)
@pytest.mark.parametrize("step", [1, 10**6])
def test_broken_framing_is_refused(bad: bytes, step: int) -> None:
    with pytest.raises(BadChunkError):
        decode(bad, step)


class Seen:
    def __init__(self) -> None:
        self.body = b""
        self.complete = False

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        self.complete = True


def by_llhttp(data: bytes) -> Seen | None:
    seen = Seen()
    try:
        httptools.HttpRequestParser(seen).feed_data(HEAD + data)
    except httptools.HttpParserError:
        return None
    return seen


@given(
    st.lists(st.binary(min_size=1, max_size=40), max_size=6),
    st.integers(1, 50),
    st.lists(st.sampled_from([b"T: 1\r\n", b"X-Y: z\r\n"])),
)
def test_what_is_sent_on_is_what_llhttp_reads(pieces: list[bytes], step: int, trailers: list[bytes]) -> None:
    wire = b"".join(encode(piece) for piece in pieces) + LAST + b"".join(trailers) + b"\r\n"
    got, taken, body = decode(wire, step)
    seen = by_llhttp(wire)
    assert seen is not None
    assert seen.complete
    assert (got, taken, body.trailers) == (seen.body, len(wire), b"".join(trailers))


FRAGMENTS = st.sampled_from(
    [
        b"0",
        b"1",
        b"5",
        b"a",
        b"\r\n",
        b"\n",
        b"\r",
        b";",
        b"x=1",
        b" ",
        b"\t",
        b"abc",
        b":",
        b"T: 1",
        b"\r\n\r\n",
        b'"',
        b"-",
        b"\0",
    ]
)


@given(st.lists(FRAGMENTS, max_size=16))
def test_never_ends_a_body_that_llhttp_refuses_or_reads_otherwise(parts: list[bytes]) -> None:
    """Chunk extensions are the exception: the reader drops them.

    So their spelling cannot matter upstream.
    """
    wire = b"".join(parts)
    try:
        got, taken, body = decode(wire, 10**6)
    except BadChunkError:
        return
    if body.done and b";" not in wire:
        seen = by_llhttp(wire[:taken])
        assert seen is not None
        assert (seen.body, seen.complete) == (got, True)
