"""Serve the collector's HTTP API.

It answers with request rows and their spans, the collector's own state, and its health.
"""

from __future__ import annotations

import asyncio
import contextvars
import html
import json
import logging
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from aiohttp import web
from opentelemetry.trace import SpanKind, StatusCode, Tracer

from handrail import conventions as names
from handrail.metrics.registry import Registry
from handrail.runtime.admin_http import Problem, add_routes, denial
from handrail.runtime.connections import Gate, own_gate
from handrail.runtime.http_server import HttpServer
from handrail.security.tokens import Authenticator
from handrail.telemetry.tracing import NO_TRACES
from handrail_collector.api.compare import COMPARE_PARAMETERS, answer, parse_compare
from handrail_collector.api.errors import ApiError, nearest
from handrail_collector.api.events import happened_to_json
from handrail_collector.api.query import (
    EVENT_PARAMETERS,
    EXPLAIN_PARAMETERS,
    FETCH_PARAMETERS,
    LINK_PARAMETERS,
    PARAMETERS,
    parse_events,
    parse_fetches,
    parse_links,
    parse_query,
    parse_question,
)
from handrail_collector.api.samples import SAMPLE_PARAMETERS, parse_samples, samples_answer
from handrail_collector.api.schema import RequestAnswer, candidates_to_json, fetch_to_json, provisional_to_json
from handrail_collector.explain.devices.timeline_samples import tracked
from handrail_collector.links.question import LinksQuestion
from handrail_collector.rows import FetchRow, RequestRow, StallRow
from handrail_collector.store.contract import LiveRows, StoreQueries
from handrail_collector.store.manifest import StoreDamagedError
from handrail_collector.store.queries.events import happened
from handrail_collector.store.read import StoreReader

log = logging.getLogger(__name__)
T = TypeVar("T")

MAX_WAITING = 32
"""Most questions that may wait for the store.

The next one is refused, with a request to retry later.
"""

WORKERS = 2
VALID_ID = "a client's X-Request-Id, a response id, an engine's or router's id, a trace id, or the first 6 characters of one"
MAX_ID_CHARS = 512
_LET_IN = "one of the tokens, or certificates, that the collector was set up with (docs/security.md)"

ENDPOINTS: tuple[tuple[str, str], ...] = (
    ("/api/v1/requests", f"request rows; parameters: {', '.join(PARAMETERS)}"),
    ("/api/v1/requests/{id}", "one request with its hand-offs, stalls and spans, by an id in any form"),
    ("/api/v1/fetches", f"hand-offs of KV; parameters: {', '.join(FETCH_PARAMETERS)}"),
    ("/api/v1/events", f"events of the engines; parameters: {', '.join(EVENT_PARAMETERS)}"),
    ("/api/v1/links", f"the links that KV moves over, with rates and transports; parameters: {', '.join(LINK_PARAMETERS)}"),
    ("/api/v1/explain", f"why the slowest requests of a period are slow; parameters: {', '.join(EXPLAIN_PARAMETERS)}"),
    ("/api/v1/compare", f"two or three periods side by side; parameters: {', '.join(COMPARE_PARAMETERS)}"),
    ("/api/v1/samples", f"samples of GPUs and links; parameters: {', '.join(SAMPLE_PARAMETERS)}"),
    ("/api/v1/status", "what the collector has received, holds and has lost"),
    ("/metrics", "the collector's own figures for Prometheus"),
    ("/healthz", "it lives"),
    ("/readyz", "the collector works"),
)


class ApiServer:
    """Server of a reader's store with live rows laid over it.

    ``shutdown`` works without ``start``, and twice.
    ``status`` is called in the event loop and returns what JSON can hold.
    ``reader`` is closed with the server.
    ``tls`` None: plaintext.
    ``guard``: who may ask; everyone may ask about its health.
    ``gate``: how many may connect.
    """

    def __init__(
        self,
        reader: StoreQueries,
        live: LiveRows,
        status: Callable[[], Mapping[str, Any]],
        host: str,
        port: int,
        *,
        metrics: Registry | None = None,
        not_ready: Problem = lambda: "",
        now_unix_ns: Callable[[], int] = time.time_ns,
        tls: ssl.SSLContext | None = None,
        guard: Authenticator | None = None,
        gate: Gate | None = None,
        tracer: Tracer = NO_TRACES,
    ) -> None:
        self._reader = reader
        self._tracer = tracer
        self._live = live
        self._status = status
        self._now_unix_ns = now_unix_ns
        self._waiting = 0
        self._threads = ThreadPoolExecutor(WORKERS, thread_name_prefix="handrail-api")
        app = web.Application(middlewares=[_guarded(guard or Authenticator("api")), _traced(tracer), _errors_as_json])
        add_routes(app, metrics or Registry([]), not_ready)
        app.router.add_get("/", _page)
        app.router.add_get("/api/v1/requests", self._list)
        app.router.add_get("/api/v1/requests/{id}", self._one)
        app.router.add_get("/api/v1/fetches", self._fetches)
        app.router.add_get("/api/v1/events", self._events)
        app.router.add_get("/api/v1/links", self._links)
        app.router.add_get("/api/v1/explain", self._explain)
        app.router.add_get("/api/v1/compare", self._compare)
        app.router.add_get("/api/v1/samples", self._samples)
        app.router.add_get("/api/v1/status", self._state)
        self._http = HttpServer(app, host, port, gate or own_gate("api"), tls=tls, logger=log)

    @property
    def address(self) -> tuple[str, int]:
        """Address that it listens on, once it is started."""
        return self._http.address

    async def start(self) -> None:
        """Start to listen.

        Raises ``OSError`` when the port cannot be bound.
        """
        await self._http.start()

    async def shutdown(self, drain_seconds: float = 0.0) -> None:
        """Stop listening, finish running answers, and close the store."""
        await self._http.shutdown()
        await asyncio.to_thread(self._threads.shutdown)
        self._reader.close()

    async def _list(self, request: web.Request) -> web.Response:
        wanted = parse_query(request.query.items(), self._now_unix_ns())
        live = self._live.rows()  # before the store is read: a row stored meanwhile is then in both, never in neither

        def listed() -> tuple[int, dict[str, Any]]:
            return 200, {"requests": [provisional_to_json(row) for row in self._reader.requests(wanted, live)]}

        return await self._answer(listed)

    async def _one(self, request: web.Request) -> web.Response:
        any_id = request.match_info["id"]
        if len(any_id) > MAX_ID_CHARS:
            raise ApiError(status=400, what="the id is too long", where=request.path[:80], valid=f"{MAX_ID_CHARS} characters")
        if request.query:
            name = next(iter(request.query))
            raise ApiError(status=400, what=f"unknown parameter {name!r}", where="query string", valid="none here")
        live, live_fetches, live_stalls = self._live.rows(), self._live.fetches(), self._live.stalls()
        return await self._answer(lambda: self._naming(any_id, live, live_fetches, live_stalls))

    async def _fetches(self, request: web.Request) -> web.Response:
        wanted = parse_fetches(request.query.items(), self._now_unix_ns())
        live = self._live.fetches()
        return await self._answer(lambda: (200, {"fetches": [fetch_to_json(row) for row in self._reader.fetches(wanted, live)]}))

    async def _events(self, request: web.Request) -> web.Response:
        now = self._now_unix_ns()
        wanted, reader = parse_events(request.query.items(), now), self._files(request)
        return await self._answer(lambda: (200, {"events": [happened_to_json(one) for one in happened(reader, wanted, now)]}))

    async def _explain(self, request: web.Request) -> web.Response:
        pairs, now = list(request.query.items()), self._now_unix_ns()
        live = self._live.rows()
        pending = {"open": sum(row.version == 0 for row in live), "not_stored_yet": sum(row.version > 0 for row in live)}
        reader = self._files(request)
        return await self._answer(lambda: (200, _explanation(reader, pairs, now) | {"pending": pending}))

    async def _links(self, request: web.Request) -> web.Response:
        question, now = parse_links(request.query.items(), self._now_unix_ns()), self._now_unix_ns()
        live, reader = self._live.fetches(), self._files(request)
        return await self._answer(lambda: (200, _links(reader, question, now, live)))

    async def _compare(self, request: web.Request) -> web.Response:
        question = parse_compare(request.query.items(), self._files(request).root, self._now_unix_ns())
        return await self._answer(lambda: answer(question))

    async def _samples(self, request: web.Request) -> web.Response:
        question = parse_samples(request.query.items(), self._now_unix_ns())
        return await self._answer(lambda: (200, samples_answer(self._reader, question)))

    async def _state(self, _: web.Request) -> web.Response:
        return web.json_response(self._status())

    def _files(self, request: web.Request) -> StoreReader:
        """Return the store where it consists of files.

        Only such a store has columns and rollups to read. Raises ``ApiError`` for any other store.
        """
        if isinstance(self._reader, StoreReader):
            return self._reader
        raise ApiError(status=501, what="this store has no columns to offer", where=request.path, valid="a store of files")

    def _naming(
        self,
        any_id: str,
        live: Sequence[RequestRow],
        live_fetches: Sequence[FetchRow],
        live_stalls: Sequence[StallRow],
    ) -> tuple[int, dict[str, Any]]:
        found = self._reader.find(any_id, live)
        if not found:
            raise ApiError(
                status=404,
                what=f"no request has the id {any_id!r}",
                where=f"/api/v1/requests/{any_id}",
                valid=VALID_ID,
                nearest=tuple(self._reader.near(any_id)),
            )
        if len(found) > 1:
            return 300, candidates_to_json(found)
        (row,) = found
        spans = self._reader.spans(row)
        files = self._reader if isinstance(self._reader, StoreReader) else None
        answer = RequestAnswer(
            row=row,
            fetches=self._reader.fetches_of(row, live_fetches),
            stalls=self._reader.stalls_of(row, live_stalls),
            spans=spans,
            baseline=_compared(files, row) if files is not None else None,
            hardware=tracked(files, row, spans) if files is not None else None,
        )
        return 200, answer.to_json()

    async def _answer(self, question: Callable[[], tuple[int, dict[str, Any]]]) -> web.Response:
        """Answer with the JSON of ``question``, which may block."""
        if self._waiting >= MAX_WAITING:
            raise ApiError(status=503, what="too many queries at once", where="the collector", valid="try again in a second")

        def encoded() -> tuple[int, bytes]:
            with self._tracer.start_as_current_span(names.OWN_QUERY):
                status, body = question()
            return status, json.dumps(body, separators=(",", ":")).encode()

        self._waiting += 1
        try:
            context = contextvars.copy_context()  # the span of the question
            status, body = await asyncio.get_running_loop().run_in_executor(self._threads, context.run, encoded)
        finally:
            self._waiting -= 1
        return web.Response(status=status, body=body, content_type="application/json")


def _explanation(reader: StoreReader, pairs: list[tuple[str, str]], now_unix_ns: int) -> dict[str, Any]:
    """Explain a period, in a worker's thread: its imports take a while at first."""
    question = parse_question(pairs, now_unix_ns)
    from handrail_collector.explain.period.answer import answered

    return answered(reader, question, now_unix_ns)


def _links(reader: StoreReader, question: LinksQuestion, now_unix_ns: int, live: Sequence[FetchRow]) -> dict[str, Any]:
    """Answer the links of a period, in a worker's thread for the same reason."""
    from handrail_collector.links.answer import answered

    return answered(reader, question, now_unix_ns, live)


def _compared(reader: StoreReader, row: RequestRow) -> dict[str, Any] | None:
    """Compare a request with others, in a worker's thread for the same reason."""
    from handrail_collector.explain.period.request_comparison import compared

    return compared(reader, row)


async def _page(_: web.Request) -> web.Response:
    lines = "\n".join(f"<dt><code>{html.escape(path)}</code></dt><dd>{html.escape(text)}</dd>" for path, text in ENDPOINTS)
    page = (
        f"<!doctype html><meta charset=utf-8><title>Handrail collector</title><h1>Handrail collector</h1><dl>\n{lines}\n</dl>\n"
    )
    return web.Response(text=page, content_type="text/html")


def _guarded(guard: Authenticator) -> Any:
    @web.middleware
    async def let_in(request: web.Request, handler: Callable[[web.Request], Any]) -> web.StreamResponse:
        denied = denial(guard, request)
        if denied is not None:
            error = ApiError(status=denied.status, what=denied.reason, where=request.path, valid=_LET_IN)
            return web.json_response(error.to_json(), status=denied.status, headers=denied.headers)
        response: web.StreamResponse = await handler(request)
        return response

    return let_in


def _traced(tracer: Tracer) -> Any:
    """Trace API queries, but not scrapes and health checks.

    Those come every few seconds.
    """

    @web.middleware
    async def trace(request: web.Request, handler: Callable[[web.Request], Any]) -> web.StreamResponse:
        resource = request.match_info.route.resource
        route = resource.canonical if resource is not None else ""
        if not route.startswith("/api/"):
            response: web.StreamResponse = await handler(request)
            return response
        about = {names.HTTP_METHOD: request.method, names.HTTP_ROUTE: route}
        with tracer.start_as_current_span(f"{request.method} {route}", kind=SpanKind.SERVER, attributes=about) as span:
            response = await handler(request)
            span.set_attribute(names.HTTP_STATUS, response.status)
            if response.status >= 500:
                span.set_attribute(names.ERROR_TYPE, str(response.status))
                span.set_status(StatusCode.ERROR)
            return response

    return trace


@web.middleware
async def _errors_as_json(request: web.Request, handler: Callable[[web.Request], Any]) -> web.StreamResponse:
    try:
        response: web.StreamResponse = await handler(request)
    except ApiError as error:
        headers = {"Retry-After": "1"} if error.status == 503 else {}
        return web.json_response(error.to_json(), status=error.status, headers=headers)
    except StoreDamagedError as error:
        log.error("%s", error)
        failed = ApiError(status=500, what=str(error), where="the store", valid="a store that is whole")
        return web.json_response(failed.to_json(), status=500)
    except web.HTTPNotFound:
        paths = tuple(path for path, _ in ENDPOINTS)
        missing = ApiError(
            status=404, what="no such endpoint", where=request.path, valid=", ".join(paths), nearest=nearest(request.path, paths)
        )
        return web.json_response(missing.to_json(), status=404)
    return response
