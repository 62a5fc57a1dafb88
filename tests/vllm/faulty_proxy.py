"""A two-step proxy that injects the hand-off fault of a request's ``X-Fault``.

It is the truth of the fault tests: for each request it records what it did and what P had offered. A test needs nothing under
test to know that.
Run as ``python -m vllm.faulty_proxy --prefill URL --decode URL --control FOLDER ...``.
A request that waits between its steps writes a file ``<id>.held`` to the folder and continues once ``<id>.go`` is there.
``<id>.left`` means that its client left while D had it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from vllm.child import free_port
from vllm.proxy import prefill_body, write_ready

HEADER = "X-Fault"
_POLL_S = 0.02


class Fault(str, Enum):
    """What the proxy does between the two steps."""

    NONE = "none"
    BAD_BLOCKS = "bad_blocks"  # ids that P never had
    DEAD_PORT = "dead_port"  # an unknown engine, at a side channel where nothing listens
    WAIT = "wait"  # until the test lets it go on
    NEVER = "never"  # D gets no request
    FEW_BLOCKS = "few_blocks"  # fewer than the prompt needs
    NO_ENGINE = "no_engine"  # remote_engine_id is missing


def _bad_blocks(params: dict[str, Any]) -> None:
    params["remote_block_ids"] = [[900_001 + n for n, _ in enumerate(group)] for group in params["remote_block_ids"]]


def _dead_port(params: dict[str, Any]) -> None:
    # an own engine for each: requests that wait for one engine share its handshake, and its end
    params |= {"remote_port": free_port(), "remote_engine_id": str(uuid.uuid4())}


def _few_blocks(params: dict[str, Any]) -> None:
    params["remote_block_ids"] = [params["remote_block_ids"][0][:1]]


def _no_engine(params: dict[str, Any]) -> None:
    del params["remote_engine_id"]


_SPOIL: dict[Fault, Callable[[dict[str, Any]], None]] = {
    Fault.BAD_BLOCKS: _bad_blocks,
    Fault.DEAD_PORT: _dead_port,
    Fault.FEW_BLOCKS: _few_blocks,
    Fault.NO_ENGINE: _no_engine,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    prefill: str  # base URLs
    decode: str
    control: Path


class FaultyProxy:
    """The proxy's application; it logs to ``done.jsonl`` in the control folder.

    A request has one line, written before D gets it.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def application(self) -> web.Application:
        app = web.Application(client_max_size=1 << 26)
        app.cleanup_ctx.append(self._client)
        app.router.add_post("/v1/completions", self.relay)
        app.router.add_post("/v1/chat/completions", self.relay)
        return app

    async def _client(self, app: web.Application) -> Any:
        timeout = aiohttp.ClientTimeout(total=None, connect=10)
        # own connection for each request: a given-up one is closed, so the engine notices
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
            self._session = session
            yield

    async def relay(self, request: web.Request) -> web.StreamResponse:
        """Relay one request; a client that leaves cancels this and its upstream call."""
        body = await request.json()
        fault = Fault(request.headers.get(HEADER, Fault.NONE.value))
        headers = {name: request.headers[name] for name in ("X-Request-Id", "traceparent") if name in request.headers}
        url = self._settings.prefill + request.path
        async with self._session.post(url, json=prefill_body(body), headers=headers) as response:
            answer = await response.json(content_type=None)
            if response.status != 200:
                return web.json_response(answer, status=response.status)
        params = answer["kv_transfer_params"]
        name = headers.get("X-Request-Id", "")
        self._note({"request_id": name, "fault": fault.value, "at_unix_ns": time.time_ns(), "params": params})
        if fault is Fault.NEVER:
            return web.json_response({"error": {"message": "no decode", "type": "no_decode", "code": 503}}, status=503)
        if fault is Fault.WAIT:
            await self._hold(name)
        if fault in _SPOIL:
            params = dict(params)
            _SPOIL[fault](params)
        try:
            return await self._decode(request, {**body, "kv_transfer_params": params}, headers)
        except asyncio.CancelledError:  # the client left; the connection to D is closed by now
            (self._settings.control / f"{name}.left").touch()
            raise

    async def _decode(self, request: web.Request, body: dict[str, Any], headers: dict[str, str]) -> web.StreamResponse:
        async with self._session.post(self._settings.decode + request.path, json=body, headers=headers) as response:
            kind = response.headers.get("Content-Type", "application/json")
            out = web.StreamResponse(status=response.status, headers={"Content-Type": kind})
            await out.prepare(request)
            async for chunk in response.content.iter_any():
                await out.write(chunk)
        await out.write_eof()
        return out

    async def _hold(self, name: str) -> None:
        (self._settings.control / f"{name}.held").touch()
        while not (self._settings.control / f"{name}.go").exists():  # noqa: ASYNC110 (another process makes the file)
            await asyncio.sleep(_POLL_S)

    def _note(self, line: dict[str, Any]) -> None:
        with (self._settings.control / "done.jsonl").open("a") as log:
            log.write(json.dumps(line) + "\n")


def read_done(control: Path) -> dict[str, dict[str, Any]]:
    """Return what was done, by request id."""
    path = control / "done.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return {line["request_id"]: line for line in map(json.loads, lines)}


async def _run(settings: Settings, ready_file: Path) -> None:
    runner = web.AppRunner(FaultyProxy(settings).application(), access_log=None, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    write_ready(ready_file, {"proxy": f"{host}:{port}"})
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await stop.wait()
    await runner.cleanup()


def main() -> None:
    parser = argparse.ArgumentParser(prog="vllm.faulty_proxy")
    parser.add_argument("--prefill", required=True)
    parser.add_argument("--decode", required=True)
    parser.add_argument("--control", type=Path, required=True)
    parser.add_argument("--ready-file", type=Path, required=True)
    options = parser.parse_args()
    settings = Settings(prefill=options.prefill, decode=options.decode, control=options.control)
    asyncio.run(_run(settings, options.ready_file))


if __name__ == "__main__":
    main()
