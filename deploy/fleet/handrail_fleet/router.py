"""A two-step prefill/decode router: the prompt to P for one token and the keys of its KV, then the request to D with those keys.

Behaviour of vLLM's toy proxy and, with ``replace_ids``, of vllm-router 0.1.17 (MEASURED section 3): workers are addressed in the
request id, the client's own id lives on in the response header only. It exports no telemetry, as both do by default.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from handrail_fleet import openai, ready

_PASSED = ("traceparent", "tracestate", "authorization")
_ASK_FOR_KV = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
DROPS = ("prefill", "decode", "both")
POLICIES = ("round_robin",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """``prefill`` and ``decode`` are base URLs, taken in turn."""

    listen: tuple[str, int]
    prefill: tuple[str, ...]
    decode: tuple[str, ...]
    policy: str = "round_robin"
    drop_traceparent: str | None = None
    replace_ids: bool = False
    think_s: float = 0.0  # spent on deciding, before anything is forwarded
    ready_file: Path | None = None


def prefill_body(body: Mapping[str, Any]) -> dict[str, Any]:
    """The client's request as P gets it: one token, not streamed, KV to be kept."""
    changed = {key: value for key, value in body.items() if key not in ("stream_options", "min_tokens")}
    changed |= {"stream": False, "max_tokens": 1, "kv_transfer_params": _ASK_FOR_KV}
    if "max_completion_tokens" in changed:
        changed["max_completion_tokens"] = 1
    return changed


def worker_id(prefill: str, decode: str, unique: str) -> str:
    """vllm-router's id for both workers; ``prefill`` and ``decode`` are base URLs, ``unique`` 32 hex digits."""
    first, second = (url.split("://", 1)[-1].rstrip("/") for url in (prefill, decode))
    return f"___prefill_addr_{first}___decode_addr_{second}_{unique}"


class Router:
    """The relay. One client session for all workers; nothing is buffered but P's short answer and the client's body."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._prefill = itertools.cycle(settings.prefill)
        self._decode = itertools.cycle(settings.decode)
        self._session: aiohttp.ClientSession | None = None

    def app(self) -> web.Application:
        app = web.Application(client_max_size=64 << 20)
        app.router.add_post("/v1/completions", self._relay)
        app.router.add_post("/v1/chat/completions", self._relay)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        app.cleanup_ctx.append(self._sessions)
        return app

    async def _sessions(self, app: web.Application) -> Any:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(
            connector=connector, timeout=aiohttp.ClientTimeout(total=None), auto_decompress=False
        ) as session:
            self._session = session
            yield

    @property
    def _http(self) -> aiohttp.ClientSession:
        assert self._session is not None, "the app has started"
        return self._session

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(text="ok")

    async def _models(self, request: web.Request) -> web.Response:
        try:
            async with self._http.get(self._settings.decode[0] + request.path) as answer:
                return web.Response(body=await answer.read(), status=answer.status, content_type=answer.content_type)
        except aiohttp.ClientError as error:
            return _unreachable("decode", error, {})

    async def _relay(self, request: web.Request) -> web.StreamResponse:
        settings = self._settings
        try:
            body = json.loads(await request.read())
        except ValueError:
            body = None
        if not isinstance(body, dict):
            return web.json_response(openai.error_body("The body is not a JSON object", "BadRequestError", 400), status=400)
        prefill, decode = next(self._prefill), next(self._decode)
        client_id = request.headers.get("X-Request-Id") or str(uuid.uuid4())
        sent_id = worker_id(prefill, decode, uuid.uuid4().hex) if settings.replace_ids else client_id
        if settings.think_s:
            await asyncio.sleep(settings.think_s)
        echo = {"X-Request-Id": client_id}
        try:
            async with self._http.post(
                prefill + request.path, json=prefill_body(body), headers=self._headers(request, sent_id, "prefill")
            ) as answer:
                content = await answer.read()
                if answer.status != 200:
                    return web.Response(body=content, status=answer.status, content_type=answer.content_type, headers=echo)
                kv = json.loads(content).get("kv_transfer_params")
        except (aiohttp.ClientError, ValueError) as error:
            return _unreachable("prefill", error, echo)
        asked = {**body, "kv_transfer_params": kv}
        try:
            async with self._http.post(
                decode + request.path, json=asked, headers=self._headers(request, sent_id, "decode")
            ) as answer:
                return await _pass_on(request, answer, echo)
        except aiohttp.ClientConnectorError as error:
            return _unreachable("decode", error, echo)

    def _headers(self, request: web.Request, request_id: str, leg: str) -> dict[str, str]:
        dropped = self._settings.drop_traceparent in (leg, "both")
        passed = {name: request.headers[name] for name in _PASSED if name in request.headers}
        if dropped:
            passed.pop("traceparent", None)
            passed.pop("tracestate", None)
        return {"X-Request-Id": request_id, **passed}


async def _pass_on(request: web.Request, answer: aiohttp.ClientResponse, echo: dict[str, str]) -> web.StreamResponse:
    """D's response, byte for byte as it comes. A connection of D that breaks breaks the client's too."""
    response = web.StreamResponse(
        status=answer.status, headers={"Content-Type": answer.headers.get("Content-Type", "application/json"), **echo}
    )
    response.content_length = answer.content_length
    await response.prepare(request)
    try:
        async for chunk in answer.content.iter_any():
            await response.write(chunk)
    except aiohttp.ClientError:
        if request.transport is not None:
            request.transport.abort()
        return response
    await response.write_eof()
    return response


def _unreachable(leg: str, error: Exception, echo: dict[str, str]) -> web.Response:
    body = openai.error_body(f"{leg} worker: {type(error).__name__}", "BadGatewayError", 502)
    return web.json_response(body, status=502, headers=echo)


async def run(settings: Settings) -> None:
    """Serve until a signal says stop."""
    await ready.serve(Router(settings).app(), settings.listen, settings.ready_file)
