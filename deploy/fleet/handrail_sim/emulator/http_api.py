"""vLLM's OpenAI-compatible HTTP API of an emulated engine, and its server process."""

from __future__ import annotations

import json
import logging
import re
import time
import uuid
from typing import Any

from aiohttp import web

from handrail_sim.emulator import openai, process
from handrail_sim.emulator.core import FinishReason
from handrail_sim.emulator.engine import EmulatedEngine, EngineSettings
from handrail_sim.emulator.generation import Generation
from handrail_sim.emulator.openai import Ask, InvalidRequestError, ResponseFrame

log = logging.getLogger(__name__)

VERSION = "0.32.0"  # the version of vLLM whose behaviour this follows


class HttpApi:
    """vLLM's OpenAI-compatible routes in front of one engine."""

    def __init__(self, engine: EmulatedEngine) -> None:
        self._engine = engine
        self._settings = engine.settings
        self._started = int(time.time())
        self._fingerprint = f"vllm-{VERSION}-{uuid.uuid4().hex[:8]}"

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self._observe], client_max_size=64 << 20)
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        app.router.add_get("/version", self._version)
        app.router.add_get("/metrics", self._metrics)
        return app

    @web.middleware
    async def _observe(self, request: web.Request, handler: Any) -> web.StreamResponse:
        """Count requests as prometheus-fastapi-instrumentator does in vLLM.

        /health, /metrics and the like are not counted.
        """
        started = time.monotonic()
        response: web.StreamResponse = await handler(request)
        if request.path.startswith("/v1/"):
            self._engine.metrics.http(request.path, request.method, response.status, time.monotonic() - started)
        return response

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": VERSION})

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(
            body=self._engine.metrics.render(), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
        )

    async def _models(self, request: web.Request) -> web.Response:
        model = {"id": self._settings.model, "object": "model", "created": self._started, "owned_by": "vllm"}
        model |= {"root": self._settings.model, "parent": None, "max_model_len": self._settings.max_model_len, "permission": []}
        return web.json_response({"object": "list", "data": [model]})

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, chat=False)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, chat=True)

    async def _generate(self, request: web.Request, *, chat: bool) -> web.StreamResponse:
        given = request.headers.get("X-Request-Id")
        extra = {"X-Request-Id": given} if given and self._settings.echo_request_id else {}
        stem = ("chatcmpl-" if chat else "cmpl-") + (given or uuid.uuid4().hex)
        headers = {name.lower(): value for name, value in request.headers.items()}
        arrived = self._engine.arrive(stem, given or "", headers)
        try:
            ask = openai.parse(
                chat, await _body(request), served=self._settings.model, max_model_len=self._settings.max_model_len
            )
            if not await self._engine.admit(ask, arrived):
                return _json(openai.INTERNAL_ERROR, 500, extra)
            generation = self._engine.begin(ask, arrived)
        except InvalidRequestError as error:
            body = openai.error_body(str(error), error.kind, error.status, error.param)
            return _json(body, error.status, extra)
        answer = ResponseFrame(chat, stem, int(time.time()), self._settings.model, self._fingerprint)
        try:
            if ask.stream:
                return await self._stream(request, ask, answer, generation, extra)
            return await self._whole(ask, answer, generation, extra)
        finally:
            self._engine.give_up(generation)  # nothing is left of a choice that has finished

    async def _whole(self, ask: Ask, answer: ResponseFrame, generation: Generation, extra: dict[str, str]) -> web.Response:
        reasons: dict[int, FinishReason] = {}
        while len(reasons) < len(generation.calls):
            for choice, tokens, reason in await generation.outbox.take():
                generation.made[choice] += tokens
                if reason is not None:
                    reasons[choice] = reason
                if reason is FinishReason.ERROR:
                    log.error("Request %s failed with an internal error during generation", answer.id)
                    return _json(openai.INTERNAL_ERROR, 500, extra)
        texts = [
            (generation.texts[choice].take(generation.made[choice], last=True), reasons[choice].value)
            for choice in sorted(reasons)
        ]
        counts = openai.usage(_prompt_tokens(ask), sum(generation.made))
        return _json(answer.whole(texts, counts, self._engine.kv_params(generation)), 200, extra)

    async def _stream(
        self, request: web.Request, ask: Ask, answer: ResponseFrame, generation: Generation, extra: dict[str, str]
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8", **extra})
        response.enable_chunked_encoding()
        await response.prepare(request)
        open_choices = len(generation.calls)
        begun = not ask.chat
        try:
            while open_choices:
                for choice, tokens, reason in await generation.outbox.take():
                    if generation.sent_ns is None:
                        generation.sent_ns = time.monotonic_ns()
                    if reason is FinishReason.ERROR:
                        log.error("Request %s failed with an internal error during generation", answer.id)
                        await response.write(openai.ERROR_EVENT + openai.DONE)
                        await response.write_eof()
                        return response
                    if not begun:
                        begun = True
                        for index in range(len(generation.calls)):
                            await response.write(openai.event(answer.role_event(index)))
                    generation.made[choice] += tokens
                    open_choices -= reason is not None
                    await response.write(
                        openai.event(self._token_event(ask, answer, generation, choice, tokens, reason, open_choices))
                    )
            if ask.include_usage:
                await response.write(openai.event(answer.usage_event(openai.usage(_prompt_tokens(ask), sum(generation.made)))))
            await response.write(openai.DONE)
            await response.write_eof()
        except ConnectionResetError:
            pass  # the client is gone; the caller aborts what still runs
        return response

    def _token_event(
        self,
        ask: Ask,
        answer: ResponseFrame,
        generation: Generation,
        choice: int,
        tokens: int,
        reason: FinishReason | None,
        still_open: int,
    ) -> openai.Json:
        text = generation.texts[choice].take(tokens, last=reason is not None)
        counts = None
        if ask.continuous_usage:
            counts = openai.usage(generation.calls[choice].job.prompt_tokens, generation.made[choice])
        final = not ask.include_usage and reason is not None and still_open == 0
        return answer.token_event(choice, text, reason.value if reason else None, counts, final=final)


def _prompt_tokens(ask: Ask) -> int:
    return sum(prompt.tokens for prompt in ask.prompts)


async def _body(request: web.Request) -> object:
    try:
        body: object = json.loads(await request.read())
    except ValueError as error:
        raise InvalidRequestError(f"Invalid JSON: {error}") from None
    return body


_SAFE_HEADER = re.compile(r"[\x20-\x7e]*")


def _json(body: openai.Json, status: int, extra: dict[str, str]) -> web.Response:
    safe = {name: value for name, value in extra.items() if _SAFE_HEADER.fullmatch(value)}
    return web.Response(body=openai.compact(body), status=status, content_type="application/json", headers=safe)


async def run(settings: EngineSettings) -> None:
    """Serve until a signal stops the process."""
    engine = EmulatedEngine(settings)
    await engine.start()
    try:
        await process.serve(HttpApi(engine).app(), settings.listen, settings.ready_file)
    finally:
        await engine.close()
