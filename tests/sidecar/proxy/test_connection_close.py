"""A client that sends ``Connection: close`` gets its answer and then the end.

The connection ends whatever the upstream does.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from harness.proxy import DEADLINE_S, DONE, END, SSE_HEAD, Peer, Upstream, chunk, client, event, post, proxied

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
STREAM = SSE_HEAD + chunk(event("a", finish="stop")) + chunk(DONE) + END

ANSWERS = {
    "length": OK,
    "length and keep-alive": OK.replace(b"\r\n\r\n", b"\r\nConnection: keep-alive\r\nKeep-Alive: timeout=5\r\n\r\n"),
    "chunked": STREAM,
    "chunked with trailers": STREAM[:-2] + b"T: 1\r\n\r\n",
    "after 100 and 103": b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n" + OK,
    "204": b"HTTP/1.1 204 No Content\r\n\r\n",
    "304": b"HTTP/1.1 304 Not Modified\r\nContent-Length: 99\r\n\r\n",
    "400": b"HTTP/1.1 400 Bad Request\r\nContent-Length: 2\r\n\r\n{}",
    "500": b"HTTP/1.1 500 \r\nContent-Length: 0\r\n\r\n",
    "503": b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 4\r\nRetry-After: 1\r\n\r\nbusy",
    "empty": b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",
}
REQUESTS = {
    "close": post(headers="Connection: close\r\n"),
    "Close among others": post(headers="Connection: TE, Close\r\n"),
    "in a second line": post(headers="Connection: TE\r\nConnection: close\r\n"),
    "HTTP/1.0": post().replace(b"HTTP/1.1", b"HTTP/1.0"),
    "chunked body": b"POST /v1/completions HTTP/1.1\r\nHost: h\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
    + chunk(b"{}")
    + END,
    "GET": b"GET /health HTTP/1.1\r\nHost: h\r\nconnection:close\r\n\r\n",
}


async def to_end(peer: Peer) -> bytes:
    return await asyncio.wait_for(peer.reader.read(-1), DEADLINE_S)


@pytest.mark.parametrize("answer", ANSWERS)
@pytest.mark.parametrize("request_", REQUESTS)
async def test_connection_ends_after_the_answer_though_the_upstream_keeps_its_own(request_: str, answer: str) -> None:
    async def handler(peer: Peer) -> None:
        await peer.request()
        await peer.send(ANSWERS[answer])
        await peer.gone()  # as an upstream does that keeps connections alive

    async with Upstream(handler) as upstream, proxied(upstream.port) as proxy, client(proxy.port) as peer:
        await peer.send(REQUESTS[request_])
        assert await to_end(peer) == ANSWERS[answer]


@pytest.mark.parametrize("request_", [b"HEAD /x HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n", b"HEAD /x HTTP/1.0\r\n\r\n"])
async def test_answer_to_head_ends_it_too(request_: bytes) -> None:
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: 5000\r\n\r\n"

    async def handler(peer: Peer) -> None:
        await peer.request()
        await peer.send(answer)
        await peer.gone()

    async with Upstream(handler) as upstream, proxied(upstream.port) as proxy, client(proxy.port) as peer:
        await peer.send(request_)
        assert await to_end(peer) == answer


async def test_body_without_length_ends_with_the_upstream() -> None:
    answer = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n" + event("a", finish="stop")

    async def handler(peer: Peer) -> None:
        await peer.request()
        await peer.send(answer)

    async with Upstream(handler) as upstream, proxied(upstream.port) as proxy, client(proxy.port) as peer:
        await peer.send(post(headers="Connection: close\r\n"))
        assert await to_end(peer) == answer


async def test_what_is_sent_behind_the_last_request_is_not_answered() -> None:
    async def handler(peer: Peer) -> None:
        while (await peer.request())[0]:
            await peer.send(OK)

    async with Upstream(handler) as upstream, proxied(upstream.port) as proxy, client(proxy.port) as peer:
        await peer.send(post() + post(headers="Connection: close\r\n") + post() + b"\r\n" + post(b"x" * 1000))
        assert await to_end(peer) == OK * 2
        assert len(upstream.heads) == 2
        assert (await proxy.recorded(2)).outcome.value == "ok"


async def test_early_answer_waits_for_the_rest_of_the_body() -> None:
    async def handler(peer: Peer) -> None:
        await peer.reader.readuntil(b"\r\n\r\n")
        await peer.send(OK)
        with suppress(asyncio.IncompleteReadError):
            await peer.reader.readexactly(1000)
        await peer.gone()

    request = post(b"x" * 1000, headers="Connection: close\r\n")
    async with Upstream(handler) as upstream, proxied(upstream.port) as proxy, client(proxy.port) as peer:
        await peer.send(request[:-500])
        assert await asyncio.wait_for(peer.reader.readexactly(len(OK)), DEADLINE_S) == OK
        await peer.send(request[-500:])
        assert await to_end(peer) == b""


async def test_http_1_0_with_keep_alive_goes_on() -> None:
    async def handler(peer: Peer) -> None:
        while (await peer.request())[0]:
            await peer.send(OK)

    request = post(headers="Connection: keep-alive\r\n").replace(b"HTTP/1.1", b"HTTP/1.0")
    async with Upstream(handler) as upstream, proxied(upstream.port) as proxy, client(proxy.port) as peer:
        for _ in range(2):
            await peer.send(request)
            assert await asyncio.wait_for(peer.reader.readexactly(len(OK)), DEADLINE_S) == OK
        assert upstream.connections == 1
