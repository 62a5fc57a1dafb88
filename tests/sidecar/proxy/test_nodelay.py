"""Small writes leave at once on both sides: TCP_NODELAY is set.

Nothing waits in the kernel for an acknowledgement.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import socket
import struct
import sys
from pathlib import Path
from typing import Any

import pytest

from handrail.security.tls import ServerTls, client_identity
from harness.certs import Authority
from harness.proxy import DEADLINE_S, DONE, END, SSE_HEAD, Peer, Proxied, Upstream, chunk, event, post, proxied, until
from harness.skips import needs_ability

pytestmark = pytest.mark.both_loops

SIOCOUTQNSD = 0x894B
"""Linux ioctl: bytes of a socket's send queue that were not sent yet.

It counts what Nagle's algorithm holds back, not what is in flight.
"""

TOKENS = 200
ASKING = b'{"model":"m","stream":true}'


def sides(proxy: Proxied) -> list[Any]:
    """Return the two sockets of the only connection: the client's and the upstream's."""
    relay = proxy.source._relay
    assert relay is not None
    connection: Any = next(iter(relay.connections))
    assert len(relay.connections) == 1
    assert connection.upstream is not None
    return [each.transport.get_extra_info("socket") for each in (connection, connection.upstream)]


def unsent(side: Any) -> int:
    held = fcntl.ioctl(side.fileno(), SIOCOUTQNSD, struct.pack("i", 0))
    return int(struct.unpack("i", held)[0])


@needs_ability(sys.platform == "linux", "Linux's SIOCOUTQNSD")
@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
async def test_small_writes_never_wait_in_the_kernel(tls: bool, tmp_path: Path) -> None:
    """Each token leaves alone, before the previous one is acknowledged.

    A delayed acknowledgement takes 40 ms.
    """
    proxy: Proxied
    held: list[int] = []

    async def handler(peer: Peer) -> None:
        await peer.reader.readuntil(b"\r\n\r\n")
        await peer.reader.readexactly(len(ASKING))
        await peer.send(SSE_HEAD)
        for number in range(TOKENS):
            due = proxy.source.stats.upstream_bytes + len(token := chunk(event(f"t{number}")))
            await peer.send(token)
            await until(lambda due=due: proxy.source.stats.upstream_bytes >= due)  # type: ignore[misc]
            held.append(unsent(sides(proxy)[0]))
        await peer.send(chunk(event("", finish="stop")) + chunk(DONE) + END)

    authority = Authority(tmp_path)
    files = authority.files("server")
    server = ServerTls(files.cert, files.key).context() if tls else None
    context = client_identity(authority.file, None, None, use="test").value.context if tls else None
    async with Upstream(handler) as upstream, proxied(upstream.port, tls=server) as proxy:
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port, ssl=context)
        writer.write(post(ASKING)[: -len(ASKING)])
        await until(lambda: upstream.connections == 1 and proxy.source.stats.upstream_connections == 1)
        for at in range(len(ASKING)):  # the request's body byte by byte: small writes in the other direction
            due = proxy.source.stats.client_bytes + 1
            writer.write(ASKING[at : at + 1])
            await until(lambda due=due: proxy.source.stats.client_bytes >= due)  # type: ignore[misc]
            if at < len(ASKING) - 1:
                held.append(unsent(sides(proxy)[1]))
                assert [side.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) for side in sides(proxy)] == [1, 1]
        got = await asyncio.wait_for(reader.readuntil(END), DEADLINE_S)
        writer.close()
    assert got.count(b"data: ") == TOKENS + 2
    assert held == [0] * (TOKENS + len(ASKING) - 1)


async def test_option_does_not_hang_on_what_the_loop_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """uvloop always sets the option itself; asyncio's setting can be removed."""
    monkeypatch.setattr("asyncio.selector_events.base_events._set_nodelay", lambda sock: None)

    async def handler(peer: Peer) -> None:
        await peer.request()
        await peer.send(SSE_HEAD + chunk(event("a")))
        await peer.gone()

    async with Upstream(handler) as upstream, proxied(upstream.port) as proxy:
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        writer.write(post(json.dumps({"model": "m"}).encode()))
        await asyncio.wait_for(reader.readuntil(b"\n\n"), DEADLINE_S)
        assert [side.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) for side in sides(proxy)] == [1, 1]
        writer.close()
        await until(lambda: proxy.source.stats.open_connections == 0)
