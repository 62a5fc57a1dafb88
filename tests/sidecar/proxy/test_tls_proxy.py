"""The proxy over TLS: the bytes are the same and a slow client is noticed.

A new certificate cuts no running stream.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from handrail.records import Outcome
from handrail.security.tls import ServerTls, client_identity
from harness.certs import Authority, Files
from harness.proxy import DEADLINE_S, DONE, END, SSE_HEAD, Peer, Upstream, chunk, event, post, proxied, until


@pytest.fixture
def ca(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def files(ca: Authority) -> Files:
    return ca.files("server")


@asynccontextmanager
async def client(port: int, ca: Authority, mine: Files | None = None) -> AsyncIterator[Peer]:
    shown = (mine.cert, mine.key) if mine is not None else (None, None)
    context = client_identity(ca.file, *shown, use="test").value.context
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**20, ssl=context)
    try:
        yield Peer(reader, writer)
    finally:
        writer.close()
        with suppress(ConnectionError, ssl.SSLError):
            await writer.wait_closed()


def serial(peer: Peer) -> object:
    return peer.writer.get_extra_info("peercert")["serialNumber"]


async def test_a_stream_passes_byte_for_byte_and_is_recorded(ca: Authority, files: Files) -> None:
    answer = SSE_HEAD + b"".join(chunk(each) for each in (event("a"), event("b", finish="stop"), DONE)) + END

    async def handler(peer: Peer) -> None:
        while (await peer.request())[0]:
            await peer.send(answer)

    tls = ServerTls(files.cert, files.key)
    async with Upstream(handler) as upstream, proxied(upstream.port, tls=tls.context()) as proxy, client(proxy.port, ca) as peer:
        for count in (1, 2):  # kept alive
            await peer.send(post())
            assert await asyncio.wait_for(peer.reader.readexactly(len(answer)), DEADLINE_S) == answer
            record = await proxy.recorded(count)
            assert record.outcome is Outcome.OK
        assert upstream.connections == 1


async def test_a_new_certificate_cuts_no_running_stream(ca: Authority, files: Files) -> None:
    more = asyncio.Event()

    async def handler(peer: Peer) -> None:
        await peer.request()
        await peer.send(SSE_HEAD + chunk(event("a")))
        await more.wait()
        await peer.send(chunk(event("b", finish="stop")) + chunk(DONE) + END)

    tls = ServerTls(files.cert, files.key)
    async with Upstream(handler) as upstream, proxied(upstream.port, tls=tls.context()) as proxy, client(proxy.port, ca) as early:
        await early.send(post())
        await early.reader.readuntil(b'"a"')
        former = serial(early)
        files.put(ca.leaf())
        assert tls.identity.poll()
        async with client(proxy.port, ca) as late:
            assert serial(late) != former
        more.set()
        await asyncio.wait_for(early.reader.readuntil(END), DEADLINE_S)
        assert (await proxy.recorded()).outcome is Outcome.OK


async def test_a_client_that_reads_nothing_stops_the_upstream(ca: Authority, files: Files) -> None:
    total = 64 << 20

    async def handler(peer: Peer) -> None:
        await peer.request()
        await peer.send(SSE_HEAD)
        for _ in range(total >> 16):
            await peer.send(chunk(bytes(1 << 16)))
        await peer.send(END)

    tls = ServerTls(files.cert, files.key)
    async with Upstream(handler) as upstream, proxied(upstream.port, tls=tls.context()) as proxy, client(proxy.port, ca) as peer:
        await peer.send(post())
        stats = proxy.source.stats
        await until(lambda: stats.reads_paused > 0)
        assert stats.upstream_bytes < total // 2
        read = 0
        while read < stats.upstream_bytes or stats.upstream_bytes < total:
            read += len(await asyncio.wait_for(peer.reader.read(1 << 20), DEADLINE_S))
        record = await proxy.recorded()
        assert record.write_blocked_ns > 0
        assert read == stats.upstream_bytes


async def test_a_client_that_leaves_is_noticed(ca: Authority, files: Files) -> None:
    requested_event = asyncio.Event()

    async def handler(peer: Peer) -> None:
        await peer.request()
        requested_event.set()
        await peer.gone()

    tls = ServerTls(files.cert, files.key)
    async with Upstream(handler) as upstream, proxied(upstream.port, tls=tls.context()) as proxy:
        async with client(proxy.port, ca) as peer:
            await peer.send(post())
            await requested_event.wait()
        assert (await proxy.recorded()).outcome is Outcome.CLIENT_DISCONNECT


async def test_who_shows_no_certificate_reaches_no_upstream(ca: Authority, files: Files) -> None:
    async def handler(peer: Peer) -> None:
        await peer.request()
        await peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")

    tls = ServerTls(files.cert, files.key, ca.file)
    async with Upstream(handler) as upstream, proxied(upstream.port, tls=tls.context()) as proxy:
        async with client(proxy.port, ca) as stranger:  # TLS 1.3: it learns of the refusal when it reads
            with suppress(ConnectionError, ssl.SSLError):
                await stranger.send(post())
                assert await stranger.reader.read(1) == b""
        assert upstream.connections == 0
        async with client(proxy.port, ca, ca.files("mine")) as peer:
            await peer.send(post())
            assert (await peer.reader.readline()).startswith(b"HTTP/1.1 200")


async def test_plaintext_to_the_tls_port_harms_nobody(ca: Authority, files: Files, caplog: pytest.LogCaptureFixture) -> None:
    async def handler(peer: Peer) -> None:
        await peer.request()
        await peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")

    tls = ServerTls(files.cert, files.key)
    async with Upstream(handler) as upstream, proxied(upstream.port, tls=tls.context()) as proxy:
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        writer.write(post())
        with suppress(ConnectionError):
            assert b"HTTP/1.1 2" not in await asyncio.wait_for(reader.read(-1), DEADLINE_S)
        writer.close()
        async with client(proxy.port, ca) as peer:
            await peer.send(post())
            assert (await peer.reader.readline()).startswith(b"HTTP/1.1 200")
    assert not [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")]
