"""The two-step router with every switch: what workers get and clients see."""

from __future__ import annotations

import json
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from fleet.running import MODEL, SMALL, Received, attributes, engine, routed, serving, until
from handrail_sim.emulator import load, router
from handrail_sim.emulator.faults import parse

CONTEXT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Worker:
    """A stand-in for an engine that keeps the requests it received."""

    def __init__(self, kv: dict[str, Any] | None) -> None:
        self.kv = kv
        self.seen: list[tuple[dict[str, str], dict[str, Any]]] = []

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_post("/v1/completions", self._take)
        return app

    async def _take(self, request: web.Request) -> web.Response:
        self.seen.append(({name.lower(): value for name, value in request.headers.items()}, await request.json()))
        return web.json_response({"id": "cmpl-x", "kv_transfer_params": self.kv})


@asynccontextmanager
async def between_workers(**changes: Any) -> AsyncIterator[tuple[str, Worker, Worker]]:
    p, d = Worker({"remote_request_id": "r"}), Worker(None)
    async with serving(p.app()) as prefill, serving(d.app()) as decode, routed(prefill, decode, **changes) as url:
        yield url, p, d


async def post(url: str, **more: Any) -> Any:
    headers = {"X-Request-Id": "mine", "traceparent": CONTEXT, "Authorization": "Bearer x", "X-Other": "y"}
    payload = {"prompt": "a", "max_tokens": 9, "stream": False, **more}
    async with aiohttp.ClientSession() as session, session.post(url + "/v1/completions", json=payload, headers=headers) as answer:
        return answer.status, {name.lower(): value for name, value in answer.headers.items()}, await answer.read()


async def test_the_two_steps() -> None:
    async with between_workers() as (url, p, d):
        status, headers, _ = await post(url, min_tokens=3, stream_options={"include_usage": True})
    assert status == 200
    assert headers["x-request-id"] == "mine"
    (p_headers, p_body), (d_headers, d_body) = p.seen[0], d.seen[0]
    assert p_body == {"prompt": "a", "max_tokens": 1, "stream": False, "kv_transfer_params": router._ASK_FOR_KV}
    assert d_body["max_tokens"] == 9
    assert d_body["kv_transfer_params"] == {"remote_request_id": "r"}
    for sent in (p_headers, d_headers):
        assert (sent["x-request-id"], sent["traceparent"], sent["authorization"]) == ("mine", CONTEXT, "Bearer x")
        assert "x-other" not in sent


@pytest.mark.parametrize(
    ("drop", "prefill", "decode"),
    [(None, True, True), ("prefill", False, True), ("decode", True, False), ("both", False, False)],
)
async def test_the_trace_context_is_dropped_where_set(drop: str | None, prefill: bool, decode: bool) -> None:
    async with between_workers(drop_traceparent=drop) as (url, p, d):
        await post(url)
    assert ("traceparent" in p.seen[0][0], "traceparent" in d.seen[0][0]) == (prefill, decode)


async def test_ids_are_replaced_as_vllm_router_does() -> None:
    async with between_workers(replace_ids=True) as (url, p, d):
        _, headers, _ = await post(url)
    assert headers["x-request-id"] == "mine"
    sent = p.seen[0][0]["x-request-id"]
    assert sent == d.seen[0][0]["x-request-id"]
    assert re.fullmatch(r"___prefill_addr_127\.0\.0\.1:\d+___decode_addr_127\.0\.0\.1:\d+_[0-9a-f]{32}", sent)


async def test_workers_take_turns() -> None:
    workers = [Worker({}), Worker({})]
    d = Worker(None)
    async with serving(workers[0].app()) as one, serving(workers[1].app()) as two, serving(d.app()) as decode:
        chosen = router.RouterSettings(listen=("127.0.0.1", 0), prefill=(one, two), decode=(decode,))
        async with serving(router.Router(chosen).app()) as url:
            for _ in range(4):
                await post(url)
    assert [len(worker.seen) for worker in workers] == [2, 2]


@pytest.mark.parametrize("dead", ["prefill", "decode"])
async def test_a_dead_worker_is_a_502(dead: str) -> None:
    alive = Worker({})
    async with serving(alive.app()) as there:
        nobody = "http://127.0.0.1:1"
        pair = (nobody, there) if dead == "prefill" else (there, nobody)
        async with routed(*pair) as url:
            status, headers, content = await post(url)
    assert (status, headers["x-request-id"]) == (502, "mine")
    assert dead in json.loads(content)["error"]["message"]


async def test_a_refusal_of_the_prefill_reaches_the_client() -> None:
    async with engine("prefill") as (_, prefill), engine("decode") as (_, decode), routed(prefill, decode) as url:
        status, _, content = await post(url, model="unknown")
        bad, _, _ = await post(url, prompt="")
    assert (status, bad) == (404, 400)
    assert json.loads(content)["error"]["type"] == "NotFoundError"


@pytest.mark.parametrize("replace_ids", [False, True], ids=["ids kept", "ids replaced"])
async def test_a_load_through_engines_is_answered_and_timed(replace_ids: bool) -> None:
    sent: list[load.SentRequest] = []
    async with (
        engine("prefill") as (p, prefill),
        engine("decode") as (d, decode),
        routed(prefill, decode, replace_ids=replace_ids, think_s=0.01) as url,
    ):
        await load.run(load.LoadSettings(url=url, requests=24, concurrency=6, model=MODEL, seed=3), sent.append)
        await until(lambda: (p._core.kv_usage, d._core.kv_usage) == (0, 0))
    assert [each.error for each in sent] == [None] * 24
    assert {each.stream for each in sent} == {True, False}
    assert {each.path for each in sent} == {"/v1/completions", "/v1/chat/completions"}
    for each in sent:
        assert (each.ttft_token_ns is not None) == each.stream
        assert each.completion_tokens is not None
        assert each.duration_ns > 10_000_000  # the router's own time
        if each.stream:
            assert each.ttfb_ns is not None
            assert each.ttft_token_ns is not None
            assert each.ttfb_ns <= each.ttft_token_ns <= each.duration_ns
            assert len(each.chunk_ns) <= each.completion_tokens
        own_id = ("chatcmpl-" if "chat" in each.path else "cmpl-") + each.request_id
        assert (each.response_id == own_id) != replace_ids


async def test_an_open_loop_sends_everything() -> None:
    sent: list[load.SentRequest] = []
    async with engine("both") as (_, url):
        await load.run(load.LoadSettings(url=url, requests=20, rate=500.0, traceparent=False), sent.append)
    assert sorted(each.index for each in sent) == list(range(20))
    assert {each.traceparent for each in sent} == {None}


def test_plans_repeat_and_differ_by_seed() -> None:
    one, same, other = (load.plans(load.LoadSettings(url="", requests=9, seed=seed)) for seed in (1, 1, 2))
    assert one == same != other


class Refusing(Worker):
    """A worker that answers with an error."""

    def __init__(self, status: int) -> None:
        super().__init__(None)
        self.status = status

    async def _take(self, request: web.Request) -> web.Response:
        await super()._take(request)
        return web.json_response({"error": {"message": "no"}}, status=self.status)


@pytest.mark.parametrize(
    ("status", "retries", "seen", "answered"), [(500, 1, 1, 200), (503, 3, 1, 200), (500, 0, 0, 500), (400, 1, 0, 400)]
)
async def test_a_failed_prefill_is_tried_elsewhere(status: int, retries: int, seen: int, answered: int) -> None:
    bad, good, d = Refusing(status), Worker({"remote_request_id": "r"}), Worker(None)
    async with serving(bad.app()) as one, serving(good.app()) as two, serving(d.app()) as decode:
        chosen = router.RouterSettings(
            listen=("127.0.0.1", 0), prefill=(one, two), decode=(decode,), retries=retries, replace_ids=True
        )
        async with serving(router.Router(chosen).app()) as url:
            got, _, _ = await post(url)
    assert (got, len(bad.seen), len(good.seen), len(d.seen)) == (answered, 1, seen, seen)
    if seen:  # an id of vllm-router's names the worker it goes to
        first, second = bad.seen[0][0]["x-request-id"], good.seen[0][0]["x-request-id"]
        assert first != second == d.seen[0][0]["x-request-id"]


async def test_the_router_s_own_spans_are_the_parents_of_the_workers() -> None:
    received = Received()
    async with serving(received.app()) as collector:
        otlp = {"otlp_endpoint": collector + "/v1/traces", "otlp_protocol": "http"}
        faults = (parse("clock_offset:router:5", SMALL.hosts()),)
        before_ns = time.time_ns()
        async with between_workers(**otlp, faults=faults) as (url, p, d):
            await post(url)
    after_ns = time.time_ns()
    server = next(span for span in received.spans() if span.kind == Span.SPAN_KIND_SERVER)
    legs = {attributes(span)["vllm.request_phase"]: span for span in received.spans() if span.kind == Span.SPAN_KIND_CLIENT}
    assert (server.trace_id.hex(), server.parent_span_id.hex()) == (CONTEXT.split("-")[1], CONTEXT.split("-")[2])
    assert attributes(server)["request_id"] == "mine"
    for phase, worker in (("prefill", p), ("decode", d)):
        span = legs[phase]
        assert span.parent_span_id == server.span_id
        sent = worker.seen[0][0]["traceparent"].split("-")
        assert (sent[1], sent[2]) == (span.trace_id.hex(), span.span_id.hex())
        assert before_ns + 5 * 10**9 <= server.start_time_unix_nano <= span.start_time_unix_nano
        assert span.end_time_unix_nano <= server.end_time_unix_nano <= after_ns + 5 * 10**9


async def test_the_router_s_spans_have_what_recorded_ones_say() -> None:
    raw = (Path(__file__).parents[1] / "data/recordings/otlp_raw/router_traced.pb").read_bytes()
    recorded = ExportTraceServiceRequest.FromString(raw)
    real = {
        span.kind: attributes(span)
        for resource in recorded.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
        if scope.scope.name == "vllm-router"
    }
    received = Received()
    async with (
        serving(received.app()) as collector,
        between_workers(otlp_endpoint=collector + "/v1/traces", otlp_protocol="http") as (url, _, _),
    ):
        await post(url)
    for span in received.spans():
        mine, theirs = attributes(span), real[span.kind]
        assert set(mine) <= set(theirs)
        assert {name: type(value) for name, value in mine.items()} == {name: type(theirs[name]) for name in mine}
    assert {scope.scope.name for each in received.requests for rs in each.resource_spans for scope in rs.scope_spans} == {
        "vllm-router"
    }
