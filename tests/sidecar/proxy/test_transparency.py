"""The client gets the same bytes with and without the proxy."""

from __future__ import annotations

import asyncio
import gzip
import zlib

import pytest

from handrail.records import Outcome
from harness.proxy import DEADLINE_S, DONE, END, SSE_HEAD, Peer, Upstream, chunk, client, event, everything, post, proxied

GZIP = gzip.compress(event("hi", finish="stop") + DONE, mtime=0)
RAW_GET = b"GET /anything?q=1 HTTP/1.1\r\nHost: h\r\n\r\n"

RESPONSES: list[tuple[str, bytes, list[bytes]]] = [
    # name, request, response pieces; the upstream closes after the last one
    ("stream", post(), [SSE_HEAD, chunk(event("a")), chunk(event("b", finish="stop") + DONE), END]),
    ("odd chunking", post(), [SSE_HEAD, b"5;ext=1\r\ndata", b": \r\n00a", b"\r\n0123456789\r\n0000\r\nT: 1\r\nU: 2\r\n\r\n"]),
    (
        "length",
        post(),
        [b'HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nCONTENT-LENGTH: 13\r\n\r\n{"choic', b'es":[]}'[:6]],
    ),
    ("until close", post(), [b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n", event("a"), DONE]),
    ("HTTP/1.0", post(), [b"HTTP/1.0 200 Okay\r\nX: y\r\n\r\n", b"body"]),
    (
        "gzip",
        post(headers="Accept-Encoding: br, gzip\r\n"),
        [b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Encoding: gzip\r\n\r\n", GZIP[:9], GZIP[9:]],
    ),
    (
        "deflate chunked",
        post(),
        [SSE_HEAD.replace(b"\r\n\r\n", b"\r\nContent-Encoding: deflate\r\n\r\n"), chunk(zlib.compress(event("a"))), END],
    ),
    ("unknown encoding", post(), [SSE_HEAD.replace(b"\r\n\r\n", b"\r\nContent-Encoding: br\r\n\r\n"), chunk(b"\x8b\x00"), END]),
    ("HEAD", RAW_GET.replace(b"GET", b"HEAD"), [b"HTTP/1.1 200 OK\r\nContent-Length: 5000\r\n\r\n"]),
    ("204", RAW_GET, [b"HTTP/1.1 204 No Content\r\nX: 1\r\n\r\n"]),
    ("304", RAW_GET, [b'HTTP/1.1 304 Not Modified\r\nETag: "x"\r\nContent-Length: 99\r\n\r\n']),
    (
        "interim responses",
        post(),
        [
            b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n",
            b"HTTP/1.1 102 Processing\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok",
        ],
    ),
    (
        "duplicate headers",
        post(),
        [
            b"HTTP/1.1 200 OK\r\nSet-Cookie: a=1\r\nset-cookie:b=2\r\nSet-Cookie:   c=3  \r\nX-Odd: \xe9\xff\r\n"
            b"Content-Length: 2\r\n\r\nok"
        ],
    ),
    (
        "400",
        post(),
        [b'HTTP/1.1 400 Bad Request\r\nContent-Length: 52\r\n\r\n{"error":{"message":"m","type":"T","code":400}}     '],
    ),
    ("500 without a reason", post(), [b"HTTP/1.1 500 \r\nContent-Length: 0\r\nRetry-After: 1\r\n\r\n"]),
    ("503 until close", post(), [b"HTTP/1.1 503 Service Unavailable\r\nServer: x\r\n\r\nbusy"]),
    (
        "length and chunked",
        post(),
        [b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n"],
    ),
    ("bare line feeds", post(), [b"HTTP/1.1 200 OK\nContent-Length: 2\n\nok"]),
    ("not HTTP", post(), [b"SSH-2.0-", b"OpenSSH\r\n", b"more"]),
    ("broken chunk", post(), [SSE_HEAD, chunk(event("a")), b"zz\r\nrest"]),
    ("cut in a chunk", post(), [SSE_HEAD, b"40\r\ndata: {"]),
    ("cut in a length", post(), [b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabc"]),
    ("cut in the head", post(), [b"HTTP/1.1 200 OK\r\nContent-Le"]),
    ("nothing at all", post(), []),
    ("malformed events", post(), [SSE_HEAD, chunk(b"data: {not json\n\ndata\n:\n\xff\xfe\n\n"), END]),
    ("one megabyte", RAW_GET, [b"HTTP/1.1 200 OK\r\nContent-Length: 1048576\r\n\r\n", b"x" * 1048576]),
]


def script(pieces: list[bytes]) -> Upstream:
    async def handler(peer: Peer) -> None:
        await peer.request()
        for piece in pieces:
            await peer.send(piece)

    return Upstream(handler)


@pytest.mark.parametrize(("request_", "pieces"), [row[1:] for row in RESPONSES], ids=[row[0] for row in RESPONSES])
async def test_bytes_at_the_client_are_identical_with_and_without_the_proxy(request_: bytes, pieces: list[bytes]) -> None:
    async with script(pieces) as upstream, proxied(upstream.port) as proxy:
        direct = await everything(upstream.port, request_)
        through = await everything(proxy.port, request_)
        assert through == direct == b"".join(pieces)
        assert proxy.source.stats.observer_errors == 0
        if b"POST" in request_:
            await proxy.recorded()


@pytest.mark.parametrize("step", [1, 3], ids=["byte by byte", "three bytes"])
async def test_a_stream_in_tiny_reads_stays_itself_and_is_understood(step: int) -> None:
    wire = SSE_HEAD + chunk(event("a")) + chunk(event("b", finish="stop") + DONE) + END

    async def handler(peer: Peer) -> None:
        await peer.request()
        for at in range(0, len(wire), step):
            await peer.send(wire[at : at + step])
            await asyncio.sleep(0)

    async with Upstream(handler) as upstream, proxied(upstream.port) as proxy:
        assert await everything(proxy.port, post()) == wire
        record = await proxy.recorded()
        assert (record.outcome.value, record.events, record.finish_reasons) == ("ok", 2, ("stop",))


async def test_requests_that_are_not_observed_reach_the_upstream_as_the_very_bytes() -> None:
    got = []

    async def handler(peer: Peer) -> None:
        got.append(await peer.request())
        await peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")

    odd = b"PUT /files/a%20b?x=1 HTTP/1.1\r\nhOsT:h\r\nX-A:   1\r\nx-a: 2\r\ntraceparent: junk\r\nContent-Length: 3\r\n\r\n"
    async with Upstream(handler) as upstream, proxied(upstream.port) as proxy:
        await everything(proxy.port, odd + b"abc")
        assert got == [(odd, b"abc")]
        assert proxy.records == []
        assert (proxy.source.stats.requests, proxy.source.stats.passed) == (1, 1)


async def test_keep_alive_and_pipelining_answer_in_order_on_one_upstream_connection() -> None:
    async def handler(peer: Peer) -> None:
        while True:
            head, body = await peer.request()
            if not head:
                return
            await asyncio.sleep(0)
            await peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))

    chunked = b"POST /v1/completions HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n"
    async with Upstream(handler) as upstream, proxied(upstream.port, trace_context="pass", request_id="pass") as proxy:
        async with client(proxy.port) as peer:
            await peer.send(post(b"1") + RAW_GET + chunked + chunk(b"2") + b"0\r\nT: 1\r\n\r\n" + post(b"3") + post(b"4"))
            want = b"".join(
                b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
                for body in (b"1", b"", chunk(b"2") + b"0\r\nT: 1\r\n\r\n", b"3", b"4")
            )
            assert await asyncio.wait_for(peer.reader.readexactly(len(want)), DEADLINE_S) == want
        await proxy.recorded(4)
        assert upstream.connections == 1
        assert upstream.heads == [post(b"1")[:-1], RAW_GET, chunked, post(b"3")[:-1], post(b"4")[:-1]]


async def test_answers_without_a_body_leave_the_connection_ready_for_the_next() -> None:
    answers = {
        b"HEAD": b"HTTP/1.1 200 OK\r\nContent-Length: 5000\r\n\r\n",
        b"GET": b"HTTP/1.1 304 Not Modified\r\nContent-Length: 9\r\n\r\n",
        b"PUT": b"HTTP/1.1 204 No Content\r\n\r\n",
        b"OPTIONS": b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok",
    }

    async def handler(peer: Peer) -> None:
        while head := (await peer.request())[0]:
            await peer.send(answers[head.split(b" ")[0]])

    async with Upstream(handler) as upstream, proxied(upstream.port) as proxy, client(proxy.port) as peer:
        for _ in range(2):
            for method, answer in answers.items():
                await peer.send(method + (b" *" if method == b"OPTIONS" else b" http://h/x") + b" HTTP/1.1\r\nHost: h\r\n\r\n")
                assert await asyncio.wait_for(peer.reader.readexactly(len(answer)), DEADLINE_S) == answer
        assert (upstream.connections, proxy.source.stats.passed) == (1, 8)


async def test_much_sent_ahead_is_bounded_and_answered() -> None:
    """Send 200 pipelined requests of 4 KiB: more than the proxy reads ahead."""

    async def handler(peer: Peer) -> None:
        while (await peer.request())[0]:
            await peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")

    async with Upstream(handler) as upstream, proxied(upstream.port) as proxy, client(proxy.port) as peer:
        sending = asyncio.create_task(peer.send(post(b"x" * 4096) * 200))
        want = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok" * 200
        assert await asyncio.wait_for(peer.reader.readexactly(len(want)), DEADLINE_S) == want
        await sending
        await proxy.recorded(200)


async def test_expect_100_continue_is_between_client_and_upstream() -> None:
    async def handler(peer: Peer) -> None:
        await peer.reader.readuntil(b"\r\n\r\n")
        await peer.send(b"HTTP/1.1 100 Continue\r\n\r\n")
        assert await peer.reader.readexactly(4) == b"body"
        await peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")

    async with Upstream(handler) as upstream, proxied(upstream.port) as proxy, client(proxy.port) as peer:
        await peer.send(post(b"body", headers="Expect: 100-continue\r\n")[:-4])
        assert await asyncio.wait_for(peer.reader.readuntil(b"\r\n\r\n"), DEADLINE_S) == b"HTTP/1.1 100 Continue\r\n\r\n"
        await peer.send(b"body")
        assert await asyncio.wait_for(peer.reader.read(-1), DEADLINE_S) == b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
        assert (await proxy.recorded()).status == 200


async def test_upgrade_becomes_a_tunnel_both_ways_and_half_closes_pass() -> None:
    async def handler(peer: Peer) -> None:
        await peer.request()
        await peer.send(b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: echo\r\n\r\nfirst")
        while data := await peer.reader.read(100):
            await peer.send(data.upper())
        await peer.send(b"last")

    async with Upstream(handler) as upstream, proxied(upstream.port) as proxy, client(proxy.port) as peer:
        await peer.send(b"GET /ws HTTP/1.1\r\nHost: h\r\nConnection: Upgrade\r\nUpgrade: echo\r\n\r\nahead")
        await asyncio.wait_for(peer.reader.readuntil(b"\r\n\r\n"), DEADLINE_S)
        assert await asyncio.wait_for(peer.reader.readexactly(10), DEADLINE_S) == b"firstAHEAD"
        await peer.send(b"not\r\nhttp")
        assert await asyncio.wait_for(peer.reader.readexactly(9), DEADLINE_S) == b"NOT\r\nHTTP"
        peer.writer.write_eof()
        assert await asyncio.wait_for(peer.reader.read(-1), DEADLINE_S) == b"last"
        assert proxy.source.stats.tunnels == 1


@pytest.mark.parametrize("first", ["client", "upstream"])
async def test_a_tunnel_whose_both_directions_have_ended_is_closed(first: str) -> None:
    """Close a tunnel once both of its directions have ended.

    The proxy passes each half-close on; otherwise each tunnel leaves two descriptors behind.
    """

    async def handler(peer: Peer) -> None:
        await peer.request()
        await peer.send(b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: echo\r\n\r\n")
        if first == "client":
            await peer.reader.read(-1)
        await peer.send(b"last")
        peer.writer.write_eof()
        await peer.reader.read(-1)
        await closed.wait()

    closed = asyncio.Event()
    async with Upstream(handler) as upstream, proxied(upstream.port, record_all=True) as proxy, client(proxy.port) as peer:
        await peer.send(b"GET /ws HTTP/1.1\r\nHost: h\r\nConnection: Upgrade\r\nUpgrade: echo\r\n\r\n")
        await asyncio.wait_for(peer.reader.readuntil(b"\r\n\r\n"), DEADLINE_S)
        if first == "client":
            peer.writer.write_eof()
        assert await asyncio.wait_for(peer.reader.read(-1), DEADLINE_S) == b"last"
        if first == "upstream":
            peer.writer.write_eof()
        await proxy.settled(lambda: proxy.source.stats.open_connections == 0)
        assert (await proxy.recorded()).outcome is Outcome.OK
        closed.set()


async def test_an_idle_upstream_that_closes_takes_the_client_with_it() -> None:
    async def handler(peer: Peer) -> None:
        await peer.request()
        await peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")

    async with Upstream(handler) as upstream, proxied(upstream.port) as proxy:
        assert (await everything(proxy.port, RAW_GET)).endswith(b"ok")


async def test_unsolicited_bytes_are_passed_and_end_the_connection() -> None:
    async def handler(peer: Peer) -> None:
        await peer.request()
        await peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
        await peer.reader.readexactly(0)
        asyncio.get_running_loop().call_later(0.05, peer.writer.write, b"HTTP/1.1 408 T\r\nContent-Length: 0\r\n\r\n")
        await peer.gone()

    async with Upstream(handler) as upstream, proxied(upstream.port) as proxy:
        assert (await everything(proxy.port, RAW_GET)).endswith(b"ok" + b"HTTP/1.1 408 T\r\nContent-Length: 0\r\n\r\n")


async def test_an_early_answer_is_delivered_while_the_client_still_sends() -> None:
    """Deliver an early answer while the client still sends.

    The upstream refuses a body without reading it and closes the connection; the client is in the middle of 8 MiB.
    """

    async def handler(peer: Peer) -> None:
        await peer.reader.readuntil(b"\r\n\r\n")
        await peer.send(b"HTTP/1.1 413 Too Large\r\nContent-Length: 3\r\nConnection: close\r\n\r\nbig")
        peer.writer.write_eof()
        await peer.gone()

    async with Upstream(handler) as upstream, proxied(upstream.port) as proxy, client(proxy.port) as peer:
        peer.writer.write(post(b"x" * (8 << 20)))
        assert (await asyncio.wait_for(peer.reader.readuntil(b"big"), DEADLINE_S)).startswith(b"HTTP/1.1 413")
        record = await proxy.recorded()
        assert (record.status, record.outcome.value) == (413, "http_error")
