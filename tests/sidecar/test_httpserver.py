"""An aiohttp application behind a gate: connection time limits and invalid HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from aiohttp import web

from doubles.handshake_rounds import HELLO, Rounds
from doubles.otlp import until
from handrail.metrics.registry import Registry
from handrail.runtime.admin_http import add_routes
from handrail.runtime.connections import Bounds, Expiry, Gate
from handrail.runtime.descriptors import DescriptorBudget
from handrail.runtime.handshakes import HandshakeQueue
from handrail.runtime.http_server import HttpServer
from handrail.security.tls import ServerTls, client_identity
from harness.certs import Authority

GET = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"
SECRET = b"do-not-log-this"
SHORT_S = 0.1
LONG_S = 3600.0


@dataclass(slots=True)
class Served:
    """One server; set ``handled`` to let a handler end."""

    server: HttpServer
    gate: Gate
    handled: asyncio.Event


@asynccontextmanager
async def serving(
    *,
    handshake_s: float = LONG_S,
    head_s: float = LONG_S,
    idle_s: float = LONG_S,
    peer: int = 50,
    tls: ssl.SSLContext | None = None,
    handshakes: HandshakeQueue | None = None,
) -> AsyncIterator[Served]:
    bounds = Bounds(listener=50, peer=peer, handshake_s=handshake_s, head_s=head_s, idle_s=idle_s)
    gate = Gate("admin", bounds, DescriptorBudget(10_000, 100, count=lambda: 0), handshakes=handshakes)
    handled = asyncio.Event()

    async def slow(_: web.Request) -> web.Response:
        await handled.wait()
        return web.Response(text="slow\n")

    app = web.Application()
    add_routes(app, Registry([]), lambda: "")
    app.router.add_get("/slow", slow)
    server = HttpServer(app, "127.0.0.1", 0, gate, tls=tls)
    await server.start()
    try:
        yield Served(server, gate, handled)
    finally:
        await server.shutdown()
        await until(lambda: gate.open == 0)


@asynccontextmanager
async def connected(
    served: Served, *, source: str = "127.0.0.2", context: ssl.SSLContext | None = None
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    opening = asyncio.open_connection(*served.server.address, local_addr=(source, 0), ssl=context)
    reader, writer = await asyncio.wait_for(opening, 60)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def ended(reader: asyncio.StreamReader) -> bytes:
    """Read everything up to the end, whether it is a reset or not."""
    found = b""
    try:
        while piece := await asyncio.wait_for(reader.read(65536), 60):
            found += piece
    except ConnectionResetError:
        pass
    return found


async def answer(reader: asyncio.StreamReader) -> bytes:
    """Read one short answer with its body."""
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60)
    length = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])
    return head + await asyncio.wait_for(reader.readexactly(length), 60)


@pytest.mark.parametrize("data", [b"", GET[:20]], ids=["nothing", "half a head"])
async def test_connection_without_a_whole_head_is_ended(data: bytes) -> None:
    async with serving(head_s=SHORT_S) as served, connected(served) as (reader, writer):
        writer.write(data)
        assert await ended(reader) == b""
        await until(lambda: served.gate.open == 0)
        assert served.gate.expired == {Expiry.HANDSHAKE: 0, Expiry.HEAD: 1, Expiry.IDLE: 0}


async def test_silence_before_and_after_the_tls_handshake_is_ended(tmp_path: Path) -> None:
    ca = Authority(tmp_path)
    files = ca.files("server")
    context = ServerTls(files.cert, files.key).context()
    trusting = client_identity(ca.file, None, None, use="test").value.context
    async with serving(handshake_s=SHORT_S, tls=context) as served, connected(served) as (reader, _):
        assert await ended(reader) == b""
        await until(lambda: served.gate.expired[Expiry.HANDSHAKE] == 1)
    async with serving(head_s=SHORT_S, tls=context) as served, connected(served, context=trusting) as (reader, _):
        assert await ended(reader) == b""
        await until(lambda: served.gate.expired[Expiry.HEAD] == 1)


async def test_silent_connections_take_no_turn_and_a_flood_only_its_own(tmp_path: Path) -> None:
    """A handshake queue lets one handshake begin each time that the test allows it."""
    ca = Authority(tmp_path)
    files = ca.files("server")
    trusting = client_identity(ca.file, None, None, use="test").value.context
    rounds = Rounds()
    async with (
        serving(tls=ServerTls(files.cert, files.key).context(), handshakes=rounds.queue) as served,
        contextlib.AsyncExitStack() as flood,
    ):
        for _ in range(20):
            await flood.enter_async_context(connected(served))
        await until(lambda: served.gate.open == 20)
        async with connected(served, source="127.0.0.3", context=trusting):  # at once: no handshake waits
            assert rounds.queue.waiting == 0
        for _ in range(10):
            _, writer = await flood.enter_async_context(connected(served))
            writer.write(HELLO)
        await until(lambda: rounds.queue.waiting == 10)
        good = asyncio.create_task(flood.enter_async_context(connected(served, source="127.0.0.3", context=trusting)))
        await until(lambda: rounds.queue.waiting == 11)
        rounds.pass_one()
        rounds.pass_one()
        reader, writer = await good
        writer.write(GET)
        assert (await answer(reader)).endswith(b"ok\n")
        assert rounds.queue.waiting == 9


async def test_sender_that_hangs_up_before_its_handshake_uses_no_turn(tmp_path: Path) -> None:
    files = Authority(tmp_path).files("server")
    rounds = Rounds()
    async with serving(tls=ServerTls(files.cert, files.key).context(), handshakes=rounds.queue) as served:
        rounds.use_up()
        async with connected(served):
            await until(lambda: served.gate.open == 1)
        await until(lambda: rounds.queue.waiting == 1)
        rounds.pass_one()
        await until(lambda: served.gate.open == 0)
        rounds.use_up()


async def test_wait_for_a_handshake_has_a_limit(tmp_path: Path) -> None:
    files = Authority(tmp_path).files("server")
    context = ServerTls(files.cert, files.key).context()
    rounds = Rounds()
    async with serving(tls=context, handshakes=rounds.queue, handshake_s=SHORT_S) as served:
        rounds.use_up()
        async with connected(served) as (reader, writer):
            writer.write(HELLO)
            assert await ended(reader) == b""
            await until(lambda: served.gate.open == 0)
            assert served.gate.expired[Expiry.HANDSHAKE] == 1


async def test_what_is_no_tls_leaves_nothing_behind(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = Authority(tmp_path).files("server")
    async with serving(tls=ServerTls(files.cert, files.key).context()) as served, connected(served) as (reader, writer):
        writer.write(GET)
        await ended(reader)
        await until(lambda: served.gate.open == 0)
    assert caplog.records == []


async def test_connection_is_idle_for_so_long_after_an_answer() -> None:
    async with serving(idle_s=SHORT_S) as served, connected(served) as (reader, writer):
        writer.write(GET)
        assert (await answer(reader)).endswith(b"ok\n")
        assert await ended(reader) == b""
        await until(lambda: served.gate.expired[Expiry.IDLE] == 1)


async def test_head_of_a_later_request_has_to_come_in_time_too() -> None:
    async with serving(head_s=1.0) as served, connected(served) as (reader, writer):
        for _ in range(3):
            writer.write(GET)
            assert (await answer(reader)).endswith(b"ok\n")
        writer.write(GET[:20])
        assert await ended(reader) == b""
        await until(lambda: served.gate.expired[Expiry.HEAD] == 1)


async def test_request_that_takes_long_is_not_cut() -> None:
    """Neither time limit counts while a request is answered.

    A half head behind it waits as well.
    """
    async with serving(head_s=1.0, idle_s=1.0) as served, connected(served) as (reader, writer):
        writer.write(GET.replace(b"/healthz", b"/slow") + GET[:20])
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(reader.read(1), 3.0)
        assert sum(served.gate.expired.values()) == 0
        served.handled.set()
        assert (await answer(reader)).endswith(b"slow\n")


async def test_one_peer_over_its_bound_leaves_room_for_others() -> None:
    async with serving(peer=3) as served, contextlib.AsyncExitStack() as silent:
        for _ in range(10):
            with contextlib.suppress(ConnectionResetError):  # as soon as it is connected
                await silent.enter_async_context(connected(served))
        await until(lambda: sum(served.gate.refused.values()) == 7)
        async with connected(served, source="127.0.0.3") as (reader, writer):
            writer.write(GET)
            assert (await answer(reader)).endswith(b"ok\n")


MALFORMED = {
    "a line that is too long": b"GET /" + SECRET * 1000 + b" HTTP/1.1\r\n\r\n",
    "a header that is too long": GET[:-2] + b"X-Long: " + SECRET * 1000 + b"\r\n\r\n",
    "too many headers": GET[:-2] + b"".join(b"X-%d: %s\r\n" % (number, SECRET) for number in range(500)) + b"\r\n",
    "no HTTP": SECRET + b"\r\n\r\n",
    "a wrong version": b"GET /" + SECRET + b" HTTP/9.9\r\n\r\n",
    "a wrong header": GET[:-2] + SECRET + b"\r\n\r\n",
    "a wrong length": GET[:-2] + b"Content-Length: " + SECRET + b"\r\n\r\n",
    "two framings": GET[:-2] + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\nX-S: " + SECRET + b"\r\n\r\nabc",
    "a wrong chunk": GET[:-2] + b"Transfer-Encoding: chunked\r\n\r\n" + SECRET + b"\r\n\r\n",
    "a chunk's line that is too long": GET[:-2] + b"Transfer-Encoding: chunked\r\n\r\n1;" + SECRET * 1000 + b"\r\n\r\n",
    "a body of a wrong encoding": GET[:-2] + b"Content-Encoding: gzip\r\nContent-Length: 15\r\n\r\n" + SECRET,
    "a wrong target": b"GET http://[" + SECRET + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    "a wrong host": b"GET /healthz HTTP/1.1\r\nHost: [" + SECRET + b"\r\n\r\n",
}


@pytest.mark.parametrize("sent", MALFORMED.values(), ids=MALFORMED.keys())
async def test_what_is_no_http_is_answered_and_not_logged(sent: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async with serving(head_s=1.0, idle_s=1.0) as served, connected(served) as (reader, writer):
        writer.write(sent)
        assert (await ended(reader)).startswith(b"HTTP/1.")
    assert [record.getMessage() for record in caplog.records] == []
