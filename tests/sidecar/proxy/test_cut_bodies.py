"""Bodies that only the end of the connection ends.

A cut body never looks whole to the client, with or without TLS.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from handrail.records import Outcome
from handrail.security.tls import ServerTls, client_identity
from harness.certs import Authority
from harness.proxy import DEADLINE_S, Peer, Proxied, Upstream, event, post, proxied, until

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
pytestmark = pytest.mark.both_loops
RESET = struct.pack("ii", 1, 0)


def reset(peer: Peer) -> None:
    """Cut the connection as a process does that dies with unread data."""
    peer.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    peer.writer.transport.abort()


class Wire:
    """A TLS client without a transport.

    It sees every record that the proxy sends, and how TCP ends.
    """

    def __init__(self, context: ssl.SSLContext | None) -> None:
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = None
        if context is not None:
            self._tls = context.wrap_bio(self._incoming, self._outgoing, server_hostname="127.0.0.1")
        self.clean = False  # the end was a close_notify, or FIN where there is no TLS
        self.reset = False
        self.body = b""

    async def open(self, port: int) -> None:
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", port)
        while self._tls is not None:
            try:
                self._tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                self._writer.write(self._outgoing.read())
                self._incoming.write(await asyncio.wait_for(self._reader.read(65536), DEADLINE_S))

    async def send(self, data: bytes) -> None:
        if self._tls is not None:
            self._tls.write(data)
            data = self._outgoing.read()
        self._writer.write(data)
        await self._writer.drain()

    async def to_end(self) -> None:
        """Read until TCP ends."""
        while True:
            try:
                data = await asyncio.wait_for(self._reader.read(65536), DEADLINE_S)
            except ConnectionResetError:
                self.reset = True
                return
            if not data:
                self.clean = self._tls is None
                return
            self._take(data)
            if self.clean:
                return

    def _take(self, data: bytes) -> None:
        if self._tls is None:
            self.body += data
            return
        self._incoming.write(data)
        try:
            while piece := self._tls.read(65536):
                self.body += piece
            self.clean = True  # close_notify reads as the end
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLZeroReturnError:
            self.clean = True

    def close(self) -> None:
        self._writer.transport.abort()


@asynccontextmanager
async def wire(proxy: Proxied, authority: Authority | None) -> AsyncIterator[Wire]:
    context = None if authority is None else client_identity(authority.file, None, None, use="test").value.context
    made = Wire(context)
    await made.open(proxy.port)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture(params=["plain", "tls"])
def authority(request: pytest.FixtureRequest, tmp_path: Path) -> Authority | None:
    return Authority(tmp_path) if request.param == "tls" else None


def server(authority: Authority | None) -> ssl.SSLContext | None:
    if authority is None:
        return None
    files = authority.files("server")
    return ServerTls(files.cert, files.key).context()


@pytest.mark.parametrize("events", [0, 1, 3, 5_000], ids=lambda count: f"{count} events")
async def test_cut_body_without_length_ends_by_reset(authority: Authority | None, events: int) -> None:
    proxy: Proxied

    async def handler(peer: Peer) -> None:
        await peer.request()
        sent = HEAD + event("a") * events
        await peer.send(sent)
        await until(lambda: proxy.source.stats.upstream_bytes >= len(sent))
        reset(peer)

    async with Upstream(handler) as upstream, proxied(upstream.port, tls=server(authority)) as proxy:
        async with wire(proxy, authority) as client:
            await client.send(post())
            await client.to_end()
        assert (await proxy.recorded()).outcome is Outcome.UPSTREAM_DISCONNECT
    assert (client.clean, client.reset) == (False, True)


@pytest.mark.parametrize("kind", ["until close", "no HTTP", "tunnel"])
async def test_answers_that_only_a_close_ends_are_reset_with_their_upstream(authority: Authority | None, kind: str) -> None:
    proxy: Proxied
    sent = {
        "until close": b"HTTP/1.0 200 OK\r\n\r\nx",
        "no HTTP": b"SSH-2.0-x\r\n",
        "tunnel": b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: echo\r\n\r\nx",
    }[kind]

    async def handler(peer: Peer) -> None:
        await peer.request()
        await peer.send(sent)
        await until(lambda: proxy.source.stats.upstream_bytes >= len(sent))
        reset(peer)

    request = post(headers="Connection: Upgrade\r\nUpgrade: echo\r\n" if kind == "tunnel" else "")
    async with (
        Upstream(handler) as upstream,
        proxied(upstream.port, tls=server(authority)) as proxy,
        wire(proxy, authority) as client,
    ):
        await client.send(request)
        await client.to_end()
    assert (client.clean, client.reset) == (False, True)


@pytest.mark.parametrize("how", ["shutdown", "bytes behind a body that cannot be read", "a bad chunk of the request"])
async def test_answer_that_the_proxy_cuts_ends_by_reset(authority: Authority | None, how: str) -> None:
    proxy: Proxied
    begun = b"SSH-2.0-x\r\n" if how.startswith("bytes") else HEAD + event("a")

    async def handler(peer: Peer) -> None:
        await peer.reader.readuntil(b"\r\n\r\n")
        await peer.send(begun)
        await peer.gone()

    chunked = b"POST /v1/completions HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n"
    async with (
        Upstream(handler) as upstream,
        proxied(upstream.port, tls=server(authority)) as proxy,
        wire(proxy, authority) as client,
    ):
        await client.send(chunked if how.startswith("a bad") else post())
        await until(lambda: proxy.source.stats.upstream_bytes >= len(begun))
        if how == "shutdown":
            await proxy.source.shutdown(0)
        else:
            await client.send(b"zz\r\n")
        await client.to_end()
    assert (client.clean, client.reset) == (False, True)


async def test_whole_body_without_length_ends_cleanly(authority: Authority | None) -> None:
    async def handler(peer: Peer) -> None:
        await peer.request()
        await peer.send(HEAD + event("a", finish="stop"))

    async with Upstream(handler) as upstream, proxied(upstream.port, tls=server(authority)) as proxy:
        async with wire(proxy, authority) as client:
            await client.send(post())
            await client.to_end()
        assert (await proxy.recorded()).outcome is Outcome.OK
    assert (client.clean, client.reset, client.body) == (True, False, HEAD + event("a", finish="stop"))
