"""Real sockets on both sides of a proxy under test.

Holds scripted upstreams, the proxy, and a client that sees raw bytes.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

from handrail.records import Exchange, Observation, Process, Role
from handrail.runtime.descriptors import DescriptorBudget
from handrail_sidecar.live_metrics.requests import LiveRequests
from handrail_sidecar.proxy.settings import ProxySettings
from handrail_sidecar.proxy.stats import ProxyStats
from handrail_sidecar.sources.proxy import ProxySource

DEADLINE_S = 60.0
DATA = Path(__file__).parents[1] / "data" / "replay"

Handler = Callable[["Peer"], Coroutine[Any, Any, None]]


class Peer:
    """One connection at the scripted upstream."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def request(self) -> tuple[bytes, bytes]:
        """Return the head and the raw body of the next request.

        The head includes the blank line, the body its framing. Both are empty at the end of the connection.
        """
        try:
            head = await self.reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:
            return b"", b""
        fields = dict(line.lower().split(b":", 1) for line in head.split(b"\r\n")[1:] if b":" in line)
        if b"chunked" in fields.get(b"transfer-encoding", b""):
            body = b""
            while not body.endswith(b"0\r\n\r\n"):
                body += await self.reader.readuntil(b"\r\n")
                if b"\r\n0\r\n" in body and body.endswith(b"\r\n\r\n"):
                    break
            return head, body
        return head, await self.reader.readexactly(int(fields.get(b"content-length", b"0")))

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def gone(self) -> None:
        """Wait until the proxy closes this connection; discard what still arrives."""
        with contextlib.suppress(ConnectionError):
            while await self.reader.read(65536):
                pass


class Upstream:
    """A server that runs ``handler`` for each connection.

    ``heads``: the request heads that arrived.
    """

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.heads: list[bytes] = []
        self.connections = 0
        self.port = 0

    async def __aenter__(self) -> Upstream:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=2**20)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.connections += 1
        peer = Peer(reader, writer)
        read = peer.request

        async def request() -> tuple[bytes, bytes]:
            head, body = await read()
            if head:
                self.heads.append(head)
            return head, body

        peer.request = request  # type: ignore[method-assign]
        try:
            await self._handler(peer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self._tasks.discard(task)
            writer.close()
            with contextlib.suppress(ConnectionError, asyncio.CancelledError):
                await writer.wait_closed()


class Proxied:
    """A started proxy, its records, and a way to wait for them."""

    def __init__(self) -> None:
        self.source: ProxySource
        self.records: list[Exchange] = []
        self._changed = asyncio.Event()

    def take(self, record: Observation) -> None:
        assert isinstance(record, Exchange)
        self.records.append(record)
        self._changed.set()

    async def recorded(self, count: int = 1) -> Exchange:
        """Return the newest record, once there are ``count``."""

        async def enough() -> None:
            while len(self.records) < count:
                self._changed.clear()
                await self._changed.wait()

        await asyncio.wait_for(enough(), DEADLINE_S)
        assert len(self.records) == count
        return self.records[-1]

    @property
    def port(self) -> int:
        return self.source.address[1]

    async def settled(self, condition: Callable[[], bool]) -> None:
        """Wait until ``condition`` about the proxy's own state holds."""
        await until(condition)


async def until(condition: Callable[[], bool]) -> None:
    """Wait until ``condition`` holds; fail after the deadline."""

    async def holds() -> None:
        while not condition():  # noqa: ASYNC110 - a socket's state announces itself to nobody
            await asyncio.sleep(0.001)

    await asyncio.wait_for(holds(), DEADLINE_S)


class Timeline:
    """A proxy's clock that the test's script moves.

    The clock stands while bytes are under way, so the proxy's times are exact on a busy machine.
    """

    def __init__(self) -> None:
        self.stats: ProxyStats
        self._began_ns = self._now_ns = 10**15

    def __call__(self) -> int:
        return self._now_ns

    def at(self, seconds: float) -> None:
        """Set the time since the beginning."""
        self._now_ns = self._began_ns + round(seconds * 1e9)

    async def send(self, peer: Peer, seconds: float, data: bytes) -> None:
        """Let ``peer`` send at that time; return once the proxy has read it."""
        self.at(seconds)
        due = self.stats.upstream_bytes + len(data)
        await peer.send(data)
        await until(lambda: self.stats.upstream_bytes >= due)


@contextlib.asynccontextmanager
async def proxied(
    upstream_port: int,
    *,
    role: Role = Role.EDGE,
    live: LiveRequests | None = None,
    clock: Timeline | None = None,
    budget: DescriptorBudget | None = None,
    **settings: Any,
) -> AsyncIterator[Proxied]:
    """Run a proxy in front of ``upstream_port``; on exit shut it down at once."""
    proxy = Proxied()
    process = Process(role=role, instance=f"127.0.0.1:{upstream_port}", host="h", sender="s")
    proxy.source = ProxySource(
        ProxySettings(
            listen_host="127.0.0.1",
            listen_port=0,
            upstream_host="127.0.0.1",
            upstream_port=upstream_port,
            role=role,
            process=process,
            **settings,
        ),
        proxy.take,
        clock=clock or time.monotonic_ns,
        live=live,
        budget=budget,
    )
    if clock is not None:
        clock.stats = proxy.source.stats
    await proxy.source.start()
    try:
        yield proxy
    finally:
        await proxy.source.shutdown(0)


@contextlib.asynccontextmanager
async def client(port: int) -> AsyncIterator[Peer]:
    """Open a raw client connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**20)
    try:
        yield Peer(reader, writer)
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def everything(port: int, request: bytes) -> bytes:
    """Send ``request`` and read until the other side closes."""
    async with client(port) as peer:
        await peer.send(request)
        return await asyncio.wait_for(peer.reader.read(-1), DEADLINE_S)


def post(body: bytes = b'{"model":"m","stream":true}', *, path: str = "/v1/completions", headers: str = "") -> bytes:
    """Build a generation request with a Content-Length body.

    ``headers``: whole lines, each with its line end.
    """
    return (
        f"POST {path} HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\n{headers}Content-Length: {len(body)}\r\n\r\n"
    ).encode("latin-1") + body


def chunk(data: bytes) -> bytes:
    """Build one HTTP chunk."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(text: str, *, finish: str | None = None) -> bytes:
    """Build one server-sent event of /v1/completions."""
    choice = {"index": 0, "text": text, "finish_reason": finish}
    return b"data: " + json.dumps({"id": "cmpl-x", "model": "m", "choices": [choice]}).encode() + b"\n\n"


SSE_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
DONE = b"data: [DONE]\n\n"
END = b"0\r\n\r\n"


def case(name: str) -> Any:
    """Load a replay case of ``tests/data/replay``.

    ``name`` includes its folder, e.g. ``sse/E07_cut_inside_chunk.sse.json``.
    """
    return json.loads((DATA / name).read_text())


def replay(name: str, clock: Timeline | None = None) -> Handler:
    """Run an upstream that answers every request as the case defines.

    It follows the case's times on ``clock``; without a clock it sends all at once.
    """
    script = case(name)
    response = script["response"]
    chunked = "transfer-encoding" in response["headers"]

    async def handler(peer: Peer) -> None:
        head = b"?"
        while b"connection: close" not in head.lower() and (head := (await peer.request())[0]):
            lines = "".join(f"{key}: {value}\r\n" for key, value in response["headers"].items())
            await peer.send(f"HTTP/1.1 {response['status']} OK\r\n{lines}\r\n".encode())
            for position, read in enumerate(script["reads"]):
                data = base64.b64decode(read["b64"])
                if script["end"] == "fin_inside_chunk" and position == len(script["reads"]) - 1:
                    data = b"%x\r\n%b" % (len(data) + 64, data)
                elif chunked:
                    data = chunk(data)
                if clock is None:
                    await peer.send(data)
                else:
                    await clock.send(peer, read["t"], data)
            if script["end"] == "clean" and chunked:
                await peer.send(END)
            elif script["end"] in ("open", "left_open"):
                await peer.gone()
            if script["end"] != "clean" or not chunked:
                return

    return handler
