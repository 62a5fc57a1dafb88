"""The side channel between engines: JSON lines over TCP in place of NIXL.

It carries NIXL's handshake, reads and notifications between two engines.
No KV moves, only the permission to read it: P answers whether it holds the blocks, and frees them when D has read them.
Failures have the names that vLLM gives them in its log (MEASURED section 4d).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_LINE_BYTES = 1 << 20  # a message of this size holds the block list of a prompt of a million tokens
_MAX_PEERS = 256

Handler = Callable[[dict[str, Any]], dict[str, Any]]


class TransferError(Exception):
    """A KV load failed; ``kind`` is vLLM's ``failure_type``."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind = kind


class ChannelServer:
    """Serves the engines that read from this one.

    ``handler`` gets one message and returns its answer. It must not block.
    """

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.StreamWriter] = set()

    async def start(self, host: str) -> int:
        """Listen on a free port of ``host`` and return it."""
        self._server = await asyncio.start_server(self._serve, host, 0, limit=_LINE_BYTES)
        port = self._server.sockets[0].getsockname()[1]
        assert isinstance(port, int)
        return port

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
            for writer in list(self._connections):
                writer.close()
            await self._server.wait_closed()
            self._server = None

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections.add(writer)
        try:
            while line := await reader.readline():
                try:
                    message = json.loads(line)
                except ValueError:
                    break
                if not isinstance(message, dict):
                    break
                writer.write(json.dumps(self._handler(message)).encode() + b"\n")
                await writer.drain()
        except (ConnectionError, ValueError):
            pass  # the peer left, or sent a line beyond the limit: its next request opens a new connection
        finally:
            self._connections.discard(writer)
            writer.close()


@dataclass(frozen=True, slots=True)
class ProducerAddress:
    """Where a KV producer listens, and which start of the producer is meant."""

    host: str
    port: int
    engine_id: str


class PeerConnection:
    """One connection to a producer, which answers messages in order.

    ``host``: the producer's name in the fleet, known after ``hello``.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.host = ""
        self._reader = reader
        self._writer = writer
        self._turn = asyncio.Lock()  # the connection carries one message at a time

    async def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        """Send one message and return the answer.

        Raises ``ConnectionError`` when the producer is gone.
        """
        async with self._turn:
            self._writer.write(json.dumps(message).encode() + b"\n")
            await self._writer.drain()
            line = await self._reader.readline()
        if not line:
            raise ConnectionResetError("the producer closed the side channel")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        self._writer.close()


class Peers:
    """The producers to which this engine is connected.

    The wire model adds the time that a first contact takes beyond the connection.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._known: dict[ProducerAddress, asyncio.Task[PeerConnection]] = {}

    async def get(self, address: ProducerAddress) -> PeerConnection:
        """Return the connection to a peer, and connect first if needed.

        Requests that arrive during the connect share it.
        Raises ``TransferError`` with ``handshake_failed`` after the whole timeout when nothing listens there, as NIXL does.
        """
        task = self._known.get(address)
        if task is None:
            if len(self._known) >= _MAX_PEERS:
                self.forget(next(iter(self._known)))
            task = asyncio.create_task(self._connect(address))
            self._known[address] = task
        try:
            return await asyncio.shield(task)
        except TransferError:
            if self._known.get(address) is task:
                del self._known[address]
            raise

    def forget(self, address: ProducerAddress) -> None:
        task = self._known.pop(address, None)
        if task is None:
            return
        if not task.done():
            task.cancel()
        elif not task.cancelled() and task.exception() is None:
            task.result().close()

    async def close(self) -> None:
        tasks = list(self._known.values())
        for address in list(self._known):
            self.forget(address)
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _connect(self, address: ProducerAddress) -> PeerConnection:
        deadline = asyncio.get_running_loop().time() + self._timeout_s
        try:
            reader, writer = await asyncio.wait_for(
                asyncio.open_connection(address.host, address.port, limit=_LINE_BYTES), self._timeout_s
            )
            peer = PeerConnection(reader, writer)
            answer = await asyncio.wait_for(peer.ask({"op": "hello"}), self._timeout_s)
        except (OSError, ValueError, asyncio.TimeoutError) as error:
            await asyncio.sleep(max(0.0, deadline - asyncio.get_running_loop().time()))
            raise TransferError("handshake_failed", str(error) or type(error).__name__) from None
        if answer.get("engine_id") != address.engine_id:
            peer.close()
            raise TransferError("handshake_failed", f"remote engine is {answer.get('engine_id')}, expected {address.engine_id}")
        peer.host = str(answer.get("host"))
        return peer
