"""The peers of a measured proxy: an emulated engine, and a bare relay to compare.

Each runs in its own process: ``python harness/proxy_peers.py engine`` or ``python harness/proxy_peers.py relay PORT``.
Each prints ``PORT n`` once it listens, and ends when its standard input ends.
"""

from __future__ import annotations

import asyncio
import re
import sys
import time
from collections.abc import Callable
from typing import cast

import uvloop

_EVENT = (
    b'data: {"id":"cmpl-lab-0001","object":"text_completion","created":1795970465,"model":"tiny","choices":[{"index":0,'
    b'"text":" os","logprobs":null,"finish_reason":%b,"stop_reason":null,"prompt_token_ids":null,"token_ids":null}]}\n\n'
)


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


TOKEN = _chunk(_EVENT % b"null")  # as vLLM 0.32 sends them: one event, one chunk, one write
LAST = _chunk(_EVENT % b'"length"') + _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
_ALIVE = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"
_LENGTH = re.compile(rb"content-length: *(\d+)", re.I)
_REQUESTED_TOKENS = re.compile(rb'"max_tokens": *(\d+).*"user": *"pace-(\d+)-(\d+)"', re.S)


class Engine(asyncio.Protocol):
    """Answer completions with paced tokens and anything else with ``{}``."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._seen = b""
        self._missing = 0
        self._left = 0
        self._due = 0.0
        self._pace_s = 0.0
        self._paused = False
        self._alive = True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._alive = False

    def data_received(self, data: bytes) -> None:
        if self._missing > 0:  # the rest of a large body is discarded
            self._missing -= len(data)
            body = self._seen
        else:
            self._seen += data
            head, blank, body = self._seen.partition(b"\r\n\r\n")
            if not blank:
                return
            length = _LENGTH.search(head)
            self._missing = (int(length[1]) if length else 0) - len(body)
            self._seen = body
        if self._missing > 0:
            return
        self._seen = b""
        match = _REQUESTED_TOKENS.search(body)
        if match is None:
            self._transport.write(_ALIVE)
            return
        self._left, self._pace_s = int(match[1]), int(match[2]) / 1e6
        first_s = int(match[3]) / 1e6
        self._due = self._loop.time() + first_s
        if first_s:
            self._loop.call_at(self._due, self._begin)
        else:
            self._begin()

    def _begin(self) -> None:
        if self._alive:
            self._transport.write(_HEAD)
            self._next()

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        if self._left:
            self._next()

    def _next(self) -> None:
        if not self._alive or self._paused or not self._left:
            return
        self._left -= 1
        if not self._left:
            self._transport.write(LAST)
            return
        self._transport.write(TOKEN)
        self._due += self._pace_s
        if self._pace_s:
            self._loop.call_at(self._due, self._next)
        else:
            self._loop.call_soon(self._next)


class _RelayFront(asyncio.Protocol):
    """A minimal relay in Python: it stamps every read and writes it on."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._back: asyncio.Transport | None = None
        self._early: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self._task = asyncio.get_running_loop().create_task(self._connect())

    async def _connect(self) -> None:
        transport, _ = await asyncio.get_running_loop().create_connection(
            lambda: _RelayBack(self.transport), "127.0.0.1", self._port
        )
        self._back = transport
        for data in self._early:
            transport.write(data)

    def data_received(self, data: bytes) -> None:
        if self._back is None:
            self._early.append(data)
        else:
            self._back.write(data)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._back is not None:
            self._back.close()


class _RelayBack(asyncio.Protocol):
    def __init__(self, front: asyncio.Transport) -> None:
        self._front = front
        self.stamp_ns = 0

    def data_received(self, data: bytes) -> None:
        self.stamp_ns = time.monotonic_ns()
        self._front.write(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._front.close()


async def _serve(factory: Callable[[], asyncio.Protocol]) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(factory, "127.0.0.1", 0, backlog=1024)
    print("PORT", server.sockets[0].getsockname()[1], flush=True)
    ended = asyncio.Event()
    loop.add_reader(sys.stdin.fileno(), ended.set)
    await ended.wait()


if __name__ == "__main__":
    uvloop.run(_serve(Engine if sys.argv[1] == "engine" else lambda: _RelayFront(int(sys.argv[2]))))
