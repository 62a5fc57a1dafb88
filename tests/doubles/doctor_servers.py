"""Servers on free loopback ports: HTTP with fixed answers, and raw TCP."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from aiohttp import web


@contextlib.asynccontextmanager
async def serving(routes: dict[str, Any], *, headers: dict[str, str] | None = None) -> AsyncIterator[str]:
    """Run an HTTP server with these answers by path.

    An answer is bytes, text, JSON, a status, or a handler.
    """

    async def answer(request: web.Request) -> web.StreamResponse:
        body = routes.get(request.path, 404)
        if callable(body):
            made: web.StreamResponse = await body(request)
            return made
        if isinstance(body, int):
            return web.Response(status=body)
        content = body if isinstance(body, bytes) else body.encode() if isinstance(body, str) else json.dumps(body).encode()
        return web.Response(body=content, headers=headers)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@contextlib.asynccontextmanager
async def listening(handle: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]) -> AsyncIterator[int]:
    """Run a raw TCP server; on exit it closes every connection."""
    ended: list[asyncio.Event] = []

    async def one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        done = asyncio.Event()
        ended.append(done)
        try:
            await handle(reader, writer)
        except ConnectionError:
            pass
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()
            done.set()

    server = await asyncio.start_server(one, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]
        await asyncio.gather(*(each.wait() for each in ended))
