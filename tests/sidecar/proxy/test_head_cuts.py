"""A request head reads the same however TCP cuts it.

Empty lines may come before it.
"""

from __future__ import annotations

import asyncio
import random
import zlib
from collections.abc import Iterable, Iterator

import pytest

from builders.request_heads import HEADS, LIMIT, Head, raw
from handrail_sidecar.proxy.head import HeadReader, HeadTooLongError, MalformedHeadError, RequestHead
from harness.proxy import DEADLINE_S, Peer, Upstream, client, everything, proxied, until

EMPTY_LINES = (0, 1, 2, 5)
BODY = b"GET /behind"  # what may have been sent before the head
MULTI_SPLITS = 40
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


def split(whole: bytes, cuts: Iterable[int]) -> Iterator[bytes]:
    at = 0
    for cut in sorted(cuts):
        yield whole[at:cut]
        at = cut
    yield whole[at:]


def read(parts: Iterable[bytes]) -> tuple[int | None, RequestHead | None, bytes]:
    """Return the status of the refusal, or the head and the bytes after it."""
    reader, pending, head = HeadReader(LIMIT), bytearray(), None
    for part in parts:
        pending += part
        if head is not None:
            continue
        try:
            head = reader.take(pending)
        except MalformedHeadError:
            return 400, None, b""
        except HeadTooLongError:
            return 431, None, b""
    assert head is not None, "the head is whole and was not taken"
    return (405 if head.method == b"CONNECT" else None), head, bytes(pending)


def cuts_near_the_head(sent: bytes) -> range:
    """Return the cuts to test; the middle of a long head adds nothing."""
    return range(1, min(len(sent), 700))


@pytest.mark.parametrize("head", HEADS, ids=lambda head: head.name)
def test_head_is_the_same_however_it_is_cut(head: Head) -> None:
    chance = random.Random(zlib.crc32(head.name.encode()))
    for count in EMPTY_LINES:
        sent = b"\r\n" * count + head.raw + BODY
        whole = read([sent])
        assert whole[0] == head.status
        if whole[1] is not None:
            assert (whole[1].raw, whole[2]) == (head.raw, BODY)
        for cut in cuts_near_the_head(sent):
            assert read(split(sent, [cut])) == whole, f"{count} empty lines, cut at {cut}"
        for _ in range(MULTI_SPLITS):
            cuts = chance.sample(range(1, len(sent)), chance.randint(2, min(8, len(sent) - 1)))
            assert read(split(sent, cuts)) == whole, f"{count} empty lines, cut at {sorted(cuts)}"


def test_every_head_is_the_same_byte_by_byte() -> None:
    for head in HEADS:
        sent = b"\r\n\r\n" + head.raw + BODY
        assert read(sent[at : at + 1] for at in range(len(sent))) == read([sent]), head.name


def test_ninety_heads_have_names_of_their_own() -> None:
    assert len(HEADS) >= 90
    assert len({head.name for head in HEADS}) == len(HEADS)


@pytest.mark.parametrize("before", [b"\n", b"\r", b"\r\r\n", b"\n\r\n", b"\r\n\n", b"\r\n\r", b" \r\n"])
def test_what_is_no_empty_line_before_a_request_is_refused(before: bytes) -> None:
    """A bare line feed before a request is no line's end.

    RFC 9112 section 2.2 allows a server to accept it; the proxy does not, as everywhere in a head.
    """
    sent = before + raw("Host: h")
    assert read([sent])[0] == 400
    for cut in range(1, len(sent)):
        assert read(split(sent, [cut]))[0] == 400


def test_empty_lines_alone_are_no_request_and_are_not_kept() -> None:
    reader, pending = HeadReader(LIMIT), bytearray()
    for _ in range(LIMIT):
        pending += b"\r\n\r"
        assert reader.take(pending) is None
        pending += b"\n"
        assert reader.take(pending) is None
        assert not pending


@pytest.mark.parametrize("empty", [b"\r\n", b"\r\n\r\n\r\n"], ids=["one", "three"])
async def test_empty_line_cut_in_reads_on_a_socket_is_no_error(empty: bytes) -> None:
    """Cut between an empty line and the head, and cut the head in two.

    The second request of a connection is cut too.
    """
    request = b"GET /x HTTP/1.1\r\nHost: h\r\n\r\n"

    async def handler(peer: Peer) -> None:
        while (await peer.request())[0]:
            await peer.send(OK)

    async with Upstream(handler) as upstream, proxied(upstream.port) as proxy:
        stats = proxy.source.stats
        for cut in range(1, len(empty) + 3):
            async with client(proxy.port) as peer:
                for _ in range(2):
                    for part in split(empty + request, [cut, cut + 6]):
                        due = stats.client_bytes + len(part)
                        await peer.send(part)
                        await until(lambda due=due: stats.client_bytes >= due)  # type: ignore[misc]
                    assert await asyncio.wait_for(peer.reader.readexactly(len(OK)), DEADLINE_S) == OK
        assert stats.protocol_errors == 0
        assert set(upstream.heads) == {request}


async def test_bare_line_feed_before_a_request_never_reaches_the_upstream() -> None:
    async def handler(peer: Peer) -> None:
        raise AssertionError("must not be reached")

    async with Upstream(handler) as upstream, proxied(upstream.port) as proxy:
        got = await everything(proxy.port, b"\nGET /x HTTP/1.1\r\nHost: h\r\n\r\n")
        assert got.startswith(b"HTTP/1.1 400 ")
        assert upstream.connections == 0
