"""A two-step prefill/decode proxy for the tests.

P gets the request with ``max_tokens=1``, then D gets the ``kv_transfer_params`` of P.
It behaves as the small proxies that people run. Its switch ``--context`` makes it as careless with the trace context: forwarded
to both legs, to none, or dropped on one of them.
It logs one line for each request, so that a test knows the hand-off of each request without anything under test.
Run as ``python -m vllm.proxy --prefill URL ...``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import time
import uuid
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

CONTEXT_HEADERS = ("traceparent", "tracestate")
PASSED_HEADERS = ("authorization",)
KEEP_IDLE_S = 1.0
REMOTE_DECODE: dict[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


class Context(str, Enum):
    """Which legs get the incoming trace context."""

    BOTH = "both"
    NONE = "none"
    DROP_PREFILL = "drop-prefill"
    DROP_DECODE = "drop-decode"

    @property
    def prefill(self) -> bool:
        return self in (Context.BOTH, Context.DROP_DECODE)

    @property
    def decode(self) -> bool:
        return self in (Context.BOTH, Context.DROP_PREFILL)


@dataclass(slots=True, kw_only=True)
class Handoff:
    """What the proxy saw of one request: a line of its log.

    It is filled in as the request proceeds.
    """

    request_id: str
    path: str
    traceparent: str | None  # as received
    arrived_unix_ns: int
    prefill_status: int | None = None
    prefill_response_id: str | None = None
    remote_request_id: str | None = None
    remote_engine_id: str | None = None
    prefill_done_ns: int | None = None  # since arrival
    decode_status: int | None = None
    first_byte_ns: int | None = None
    done_ns: int | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    prefill: str  # base URLs, no slash at the end
    decode: str
    context: Context = Context.BOTH
    log: Path | None = None


def prefill_body(body: dict[str, Any]) -> dict[str, Any]:
    """Return the request for P: one token, not streamed, KV kept for a remote decode."""
    fields = {name: value for name, value in body.items() if name not in ("stream_options", "min_tokens")}
    fields |= {"stream": False, "max_tokens": 1, "kv_transfer_params": dict(REMOTE_DECODE)}
    if "max_completion_tokens" in fields:
        fields["max_completion_tokens"] = 1
    return fields


@dataclass(slots=True)
class TwoStepProxy:
    """The proxy itself.

    ``application`` serves it. ``handoffs`` is what it saw (also in the log file).
    """

    settings: Settings
    handoffs: list[Handoff] = field(default_factory=list)
    _session: aiohttp.ClientSession | None = None

    def application(self) -> web.Application:
        app = web.Application(client_max_size=1 << 26)
        app.cleanup_ctx.append(self._client)
        app.router.add_post("/v1/completions", self.relay)
        app.router.add_post("/v1/chat/completions", self.relay)
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/health", self.health)
        return app

    async def _client(self, app: web.Application) -> Any:
        timeout = aiohttp.ClientTimeout(total=None, connect=10)
        # the engine closes a connection after five idle seconds, which can fail a POST: keep none nearly as long
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_IDLE_S)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
            self._session = session
            yield
        self._session = None

    @property
    def session(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise RuntimeError("the proxy's application is not running")
        return self._session

    def headers(self, request: web.Request, request_id: str, *, context: bool) -> dict[str, str]:
        names = PASSED_HEADERS + (CONTEXT_HEADERS if context else ())
        return {"X-Request-Id": request_id, **{name: request.headers[name] for name in names if name in request.headers}}

    async def relay(self, request: web.Request) -> web.StreamResponse:
        arrived_ns = time.monotonic_ns()
        body = await request.json()
        handoff = Handoff(
            request_id=request.headers.get("X-Request-Id") or str(uuid.uuid4()),
            path=request.path,
            traceparent=request.headers.get("traceparent"),
            arrived_unix_ns=time.time_ns(),
        )
        try:
            return await self._two_steps(request, body, handoff, arrived_ns)
        except (aiohttp.ClientError, ConnectionError) as error:
            handoff.error = type(error).__name__
            raise
        finally:
            handoff.done_ns = time.monotonic_ns() - arrived_ns
            self._keep(handoff)

    async def _two_steps(
        self, request: web.Request, body: dict[str, Any], handoff: Handoff, arrived_ns: int
    ) -> web.StreamResponse:
        settings = self.settings
        headers = self.headers(request, handoff.request_id, context=settings.context.prefill)
        async with self.session.post(settings.prefill + request.path, json=prefill_body(body), headers=headers) as response:
            handoff.prefill_status = response.status
            answer = await response.json(content_type=None)
        handoff.prefill_done_ns = time.monotonic_ns() - arrived_ns
        if handoff.prefill_status != 200:
            return web.json_response(answer, status=handoff.prefill_status)
        transfer = answer.get("kv_transfer_params") or {}
        handoff.prefill_response_id = answer.get("id")
        handoff.remote_request_id = transfer.get("remote_request_id")
        handoff.remote_engine_id = transfer.get("remote_engine_id")
        headers = self.headers(request, handoff.request_id, context=settings.context.decode)
        fields = {**body, "kv_transfer_params": transfer}
        async with self.session.post(settings.decode + request.path, json=fields, headers=headers) as response:
            handoff.decode_status = response.status
            kind = response.headers.get("Content-Type", "application/json")
            out = web.StreamResponse(status=response.status, headers={"Content-Type": kind, "X-Request-Id": handoff.request_id})
            await out.prepare(request)
            async for chunk in response.content.iter_any():
                if handoff.first_byte_ns is None:
                    handoff.first_byte_ns = time.monotonic_ns() - arrived_ns
                await out.write(chunk)
        await out.write_eof()
        return out

    def _keep(self, handoff: Handoff) -> None:
        self.handoffs.append(handoff)
        if self.settings.log is not None:
            with self.settings.log.open("a") as log:
                log.write(json.dumps(asdict(handoff)) + "\n")

    async def models(self, request: web.Request) -> web.Response:
        async with self.session.get(self.settings.decode + request.path) as response:
            return web.Response(body=await response.read(), status=response.status, content_type="application/json")

    async def health(self, request: web.Request) -> web.Response:
        return web.Response(text="ok")


def read_log(path: Path) -> list[Handoff]:
    """Return the hand-offs in a proxy's log, oldest end first."""
    return [Handoff(**json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []


async def serve(settings: Settings, ready_file: Path, port: int) -> web.AppRunner:
    """Serve on 127.0.0.1 and write ``ready_file``."""
    runner = web.AppRunner(TwoStepProxy(settings).application(), access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port)
    await site.start()
    host, bound = runner.addresses[0][:2]
    write_ready(ready_file, {"proxy": f"{host}:{bound}"})
    return runner


def write_ready(ready_file: Path, addresses: dict[str, str]) -> None:
    """Write the ready file, as the parts of Handrail do.

    The write is atomic: a reader sees the whole file.
    """
    part = ready_file.with_suffix(".part")
    part.write_text(json.dumps({"pid": os.getpid(), "addresses": addresses}))
    part.rename(ready_file)


def main() -> None:
    parser = argparse.ArgumentParser(prog="vllm.proxy")
    parser.add_argument("--prefill", required=True)
    parser.add_argument("--decode", required=True)
    parser.add_argument("--context", type=Context, choices=list(Context), default=Context.BOTH)
    parser.add_argument("--log", type=Path)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--ready-file", type=Path, required=True)
    options = parser.parse_args()
    settings = Settings(prefill=options.prefill, decode=options.decode, context=options.context, log=options.log)

    async def run() -> None:
        runner = await serve(settings, options.ready_file, options.port)
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        await stop.wait()
        await runner.cleanup()

    asyncio.run(run())


if __name__ == "__main__":
    main()
