"""A two-step prefill/decode router: the prompt to P, then the request to D.

P gets the prompt for one token and returns the keys of its KV. D gets the request with those keys.
Behaviour of vLLM's toy proxy and, with ``replace_ids``, of vllm-router 0.1.17 (MEASURED section 3): the request id contains the
workers' addresses, and only the response header keeps the client's own id.
The router exports no telemetry unless it is configured to, as both do by default.
A prefill that ends in an error is tried again at the next host.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
from aiohttp import web

from handrail_sim.emulator import openai, process
from handrail_sim.emulator.faults import Fault
from handrail_sim.emulator.process import RunClock
from handrail_sim.emulator.truth_log import RouterSaw, TruthFile

if TYPE_CHECKING:
    from opentelemetry.trace import Span

    from handrail_sim.emulator.spans import RouterSpans

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


HOST = "router"  # its name as a place of faults


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSettings:
    """Settings of the router.

    ``prefill`` and ``decode`` are base URLs, taken in turn. A failed prefill is tried ``retries`` times elsewhere.
    ``began_unix_ns``: when the fleet began; None is now. The times of faults and of the truth are relative to it.
    """

    listen: tuple[str, int]
    prefill: tuple[str, ...]
    decode: tuple[str, ...]
    policy: str = "round_robin"
    drop_traceparent: str | None = None
    replace_ids: bool = False
    think_s: float = 0.0  # time to decide, before anything is forwarded
    retries: int = 0
    faults: tuple[Fault, ...] = ()
    began_unix_ns: int | None = None
    truth: Path | None = None
    otlp_endpoint: str | None = None
    otlp_protocol: str = "grpc"
    ready_file: Path | None = None


@dataclass(slots=True)
class _Relay:
    """One request on its way through."""

    request: web.Request
    body: dict[str, Any]
    client_id: str
    decode: str
    span: Span | None
    sent_ids: list[str] = field(default_factory=list)

    @property
    def echo(self) -> dict[str, str]:
        return {"X-Request-Id": self.client_id}


def prefill_body(body: Mapping[str, Any]) -> dict[str, Any]:
    """Build P's request from the client's: one token, not streamed, KV to be kept."""
    changed = {key: value for key, value in body.items() if key not in ("stream_options", "min_tokens")}
    changed |= {"stream": False, "max_tokens": 1, "kv_transfer_params": _ASK_FOR_KV}
    if "max_completion_tokens" in changed:
        changed["max_completion_tokens"] = 1
    return changed


def worker_id(prefill: str, decode: str, unique: str) -> str:
    """Build the request id that vllm-router uses for both workers.

    ``prefill`` and ``decode`` are base URLs; ``unique`` is 32 hex digits.
    """
    first, second = (url.split("://", 1)[-1].rstrip("/") for url in (prefill, decode))
    return f"___prefill_addr_{first}___decode_addr_{second}_{unique}"


class Router:
    """The relay, with one client session for all workers.

    It buffers only P's short answer and the client's body.
    """

    def __init__(self, settings: RouterSettings) -> None:
        self._settings = settings
        self._clock = RunClock.of(HOST, settings.faults, settings.began_unix_ns)
        self._faults = self._clock.active(settings.faults)
        self._turns = itertools.cycle(range(len(settings.prefill)))
        self._decode = itertools.cycle(settings.decode)
        self._session: aiohttp.ClientSession | None = None
        self._spans: RouterSpans | None = None
        self._truth: TruthFile | None = None

    def app(self) -> web.Application:
        app = web.Application(client_max_size=64 << 20)
        app.router.add_post("/v1/completions", self._relay)
        app.router.add_post("/v1/chat/completions", self._relay)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        app.cleanup_ctx.extend((self._sessions, self._outputs))
        return app

    async def _sessions(self, app: web.Application) -> AsyncIterator[None]:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(
            connector=connector, timeout=aiohttp.ClientTimeout(total=None), auto_decompress=False
        ) as session:
            self._session = session
            yield

    async def _outputs(self, app: web.Application) -> AsyncIterator[None]:
        settings = self._settings
        if settings.otlp_endpoint is not None:
            from handrail_sim.emulator import spans  # imports the SDK, which a router without traces does not need

            exporter = spans.exporter(settings.otlp_endpoint, settings.otlp_protocol)
            self._spans = spans.RouterSpans(exporter, lambda: self._clock.unix_ns(time.time_ns()))
        if settings.truth is not None:
            self._truth = TruthFile(settings.truth)
        yield
        if self._spans is not None:
            await asyncio.to_thread(self._spans.close)
        if self._truth is not None:
            self._truth.close()

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
        arrival_ns = time.monotonic_ns()
        try:
            body = json.loads(await request.read())
        except ValueError:
            body = None
        if not isinstance(body, dict):
            return web.json_response(openai.error_body("The body is not a JSON object", "BadRequestError", 400), status=400)
        client_id = request.headers.get("X-Request-Id") or str(uuid.uuid4())
        span = None
        if self._spans is not None:
            lower = {name.lower(): value for name, value in request.headers.items()}
            span = self._spans.request(lower, request.path, client_id)
        relay = _Relay(request, body, client_id, next(self._decode), span)
        response: web.StreamResponse | None = None
        thought_ns = arrival_ns
        try:
            await self._think(arrival_ns)
            thought_ns = time.monotonic_ns()
            response = await self._both_legs(relay)
            return response
        finally:
            status = response.status if response is not None else None
            if self._spans is not None and span is not None:
                self._spans.end(span, status)
            if self._truth is not None:
                self._truth.write(self._saw(relay, arrival_ns, thought_ns, status))

    async def _think(self, arrival_ns: int) -> None:
        slower_s = sum(fault.size for fault in self._faults.named("router_slow") if fault.at(HOST, arrival_ns))
        thinks_s = self._settings.think_s + slower_s
        if thinks_s:
            await asyncio.sleep(thinks_s)

    def _saw(self, relay: _Relay, arrival_ns: int, thought_ns: int, status: int | None) -> RouterSaw:
        return RouterSaw(
            request_id=relay.client_id,
            sent_ids=tuple(relay.sent_ids),
            arrival_ns=self._clock.run_ns(arrival_ns),
            thought_ns=self._clock.run_ns(thought_ns),
            end_ns=self._clock.run_ns(time.monotonic_ns()),
            status=status,
        )

    async def _both_legs(self, relay: _Relay) -> web.StreamResponse:
        hosts = self._settings.prefill
        place = next(self._turns)
        for tried in range(1 + min(self._settings.retries, len(hosts) - 1)):
            answer = await self._prefilled(relay, hosts[(place + tried) % len(hosts)])
            if not isinstance(answer, web.Response):
                return await self._decoded(relay, answer)
            refusal = answer
            if refusal.status < 500:
                break
        return refusal

    async def _prefilled(self, relay: _Relay, worker: str) -> dict[str, Any] | web.Response | None:
        """Return the keys of P's KV, or the response for the client."""
        settings = self._settings
        sent_id = worker_id(worker, relay.decode, uuid.uuid4().hex) if settings.replace_ids else relay.client_id
        relay.sent_ids.append(sent_id)
        try:
            async with self._leg(relay, worker, sent_id, "prefill", prefill_body(relay.body)) as answer:
                content = await answer.read()
                if answer.status != 200:
                    return web.Response(body=content, status=answer.status, content_type=answer.content_type, headers=relay.echo)
                kv: dict[str, Any] | None = json.loads(content).get("kv_transfer_params")
                return kv
        except (aiohttp.ClientError, ValueError) as error:
            return _unreachable("prefill", error, relay.echo)

    async def _decoded(self, relay: _Relay, kv: dict[str, Any] | None) -> web.StreamResponse:
        fields = {**relay.body, "kv_transfer_params": kv}
        try:
            async with self._leg(relay, relay.decode, relay.sent_ids[-1], "decode", fields) as answer:
                return await _pass_on(relay.request, answer, relay.echo)
        except aiohttp.ClientConnectorError as error:
            return _unreachable("decode", error, relay.echo)

    @asynccontextmanager
    async def _leg(
        self, relay: _Relay, worker: str, request_id: str, leg: str, body: dict[str, Any]
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        request = relay.request
        passed = {name: request.headers[name] for name in _PASSED if name in request.headers}
        span, status = None, None
        if self._spans is not None and relay.span is not None:
            span, carried = self._spans.leg(relay.span, leg, worker, request.path)
            passed |= carried
        if self._settings.drop_traceparent in (leg, "both"):
            passed.pop("traceparent", None)
            passed.pop("tracestate", None)
        try:
            async with self._http.post(
                worker + request.path, json=body, headers={"X-Request-Id": request_id, **passed}
            ) as answer:
                status = answer.status
                yield answer
        finally:
            if self._spans is not None and span is not None:
                self._spans.end(span, status)


async def _pass_on(request: web.Request, answer: aiohttp.ClientResponse, echo: dict[str, str]) -> web.StreamResponse:
    """Pass D's response on, byte for byte as it comes.

    When D's connection breaks, the client's connection breaks too.
    """
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


async def run(settings: RouterSettings) -> None:
    """Serve until a signal stops the process."""
    await process.serve(Router(settings).app(), settings.listen, settings.ready_file)
