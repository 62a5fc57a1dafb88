"""Send streams through a sidecar.

There is a server that answers completions and clients that send requests and keep the answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import aiohttp
from aiohttp import web

from handrail_collector.store.read import StoreReader
from harness.acknowledged import row_keys

CHUNKS = 5
GAP_S = 0.02


@dataclass(frozen=True, slots=True)
class Answer:
    """A client's answer; ``error`` says why it is not whole, else empty.

    Times are monotonic.
    """

    request_id: str
    began_s: float
    ended_s: float
    status: int
    error: str

    @property
    def whole(self) -> bool:
        return not self.error and self.status == 200

    @property
    def seconds(self) -> float:
        return self.ended_s - self.began_s


@contextlib.asynccontextmanager
async def completions(chunks: int = CHUNKS, gap_s: float = GAP_S, host: str = "127.0.0.1") -> AsyncIterator[str]:
    """Serve completions that stream in so many chunks; return the address."""

    async def answer(request: web.Request) -> web.StreamResponse:
        await request.read()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for number in range(chunks):
            await asyncio.sleep(gap_s)
            event = {"id": "cmpl-1", "object": "text_completion", "model": "m", "choices": [{"index": 0, "text": f"{number} "}]}
            await response.write(f"data: {json.dumps(event)}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response

    app = web.Application()
    app.router.add_post("/v1/completions", answer)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.2)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, 0).start()
        yield "{}:{}".format(*runner.addresses[0][:2])
    finally:
        await runner.cleanup()


class Traffic:
    """Starts ``rate`` streams a second until ``stopping``.

    ``answers`` are in the order of their end.
    """

    def __init__(self, url: str, *, rate: float = 20.0, timeout_s: float = 60.0) -> None:
        self.answers: list[Answer] = []
        self.stopping = False
        self._url = url
        self._rate = rate
        self._timeout_s = timeout_s
        self._open: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Send streams and return when the last one has ended."""
        timeout = aiohttp.ClientTimeout(total=self._timeout_s)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
            try:
                for number in itertools.count():
                    if self.stopping:
                        break
                    task = asyncio.create_task(self._ask(session, f"stream-{number}"))
                    self._open.add(task)
                    task.add_done_callback(self._open.discard)
                    await asyncio.sleep(1 / self._rate)
                await asyncio.gather(*self._open)
            finally:
                for task in self._open:
                    task.cancel()
                await asyncio.gather(*self._open, return_exceptions=True)

    async def _ask(self, session: aiohttp.ClientSession, request_id: str) -> None:
        began_s, status, error = time.monotonic(), 0, ""
        body = {"prompt": "p", "max_tokens": 5, "stream": True}
        try:
            async with session.post(f"{self._url}/v1/completions", json=body, headers={"X-Request-Id": request_id}) as response:
                status = response.status
                text = await response.text()
                if status == 200 and "[DONE]" not in text:
                    error = "cut without an error"
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as why:
            error = f"{type(why).__name__}"
        self.answers.append(Answer(request_id, began_s, time.monotonic(), status, error))


@contextlib.asynccontextmanager
async def flowing(traffic: Traffic) -> AsyncIterator[asyncio.Task[None]]:
    """Run the traffic; cancel it at the end if it still runs."""
    task = asyncio.create_task(traffic.run())
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def missing(store: Path, answers: list[Answer]) -> tuple[set[str], int]:
    """Return the ids of whole answers without a row.

    Also returns the row counts of ids with more than one row.
    """
    keys = row_keys(StoreReader(store))
    return {answer.request_id for answer in answers if answer.whole} - set(keys), len(keys) - len(set(keys))
