"""The tests' own two-step proxy and bare relay.

They stand in front of servers that answer as vLLM does.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from aiohttp import web

from vllm import relay
from vllm.client import Request, Result, send
from vllm.proxy import Context, Settings, TwoStepProxy, read_log

REMOTE = {"do_remote_prefill": True, "remote_engine_id": "engine-1", "remote_request_id": "cmpl-a-0-9c60a41c"}
STREAM = (
    b'data: {"id": "cmpl-a", "choices": [{"index": 0, "text": "x"}]}\n\n',
    b'data: {"id": "cmpl-a", "choices": [{"index": 0, "text": "y"}]}\n\ndata: [DONE]\n\n',
)


@dataclass(slots=True)
class Engine:
    """Answers like P when it gets a remote decode, else like D; keeps its requests."""

    status: int = 200
    seen: list[tuple[dict[str, str], dict[str, Any]]] = field(default_factory=list)
    url: str = ""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.seen.append(({name.lower(): value for name, value in request.headers.items()}, body))
        if self.status != 200:
            return web.json_response({"error": {"type": "InternalServerError"}}, status=self.status)
        if (body.get("kv_transfer_params") or {}).get("do_remote_decode"):
            return web.json_response({"id": "cmpl-a", "kv_transfer_params": REMOTE})
        if not body.get("stream"):
            return web.json_response({"id": "cmpl-a", "usage": {"completion_tokens": 2}})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        for part in STREAM:
            await response.write(part)
        await response.write_eof()
        return response


async def listen(app: web.Application) -> tuple[web.AppRunner, str]:
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    return runner, f"http://127.0.0.1:{runner.addresses[0][1]}"


@pytest_asyncio.fixture
async def engines() -> AsyncIterator[tuple[Engine, Engine]]:
    pair, runners = (Engine(), Engine()), []
    for engine in pair:
        app = web.Application()
        app.router.add_post("/v1/completions", engine.answer)
        app.router.add_post("/v1/chat/completions", engine.answer)
        runner, engine.url = await listen(app)
        runners.append(runner)
    yield pair
    for runner in runners:
        await runner.cleanup()


async def until(true: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline_s
        await asyncio.sleep(0.001)


def ask(*, stream: bool = True, chat: bool = False) -> Request:
    return Request(request_id="a", traceparent=f"00-{1:032x}-{2:016x}-01", chat=chat, stream=stream, prompt="p", max_tokens=9)


async def through(proxy: TwoStepProxy, request: Request) -> Result:
    runner, url = await listen(proxy.application())
    try:
        async with aiohttp.ClientSession() as session:
            return await send(session, url, request)
    finally:
        await runner.cleanup()


@pytest.mark.parametrize(
    ("context", "legs"),
    [
        pytest.param(Context.BOTH, (True, True), id="both"),
        pytest.param(Context.NONE, (False, False), id="none"),
        pytest.param(Context.DROP_PREFILL, (False, True), id="dropped on prefill"),
        pytest.param(Context.DROP_DECODE, (True, False), id="dropped on decode"),
    ],
)
async def test_the_context_goes_where_the_switch_says(
    context: Context, legs: tuple[bool, bool], engines: tuple[Engine, Engine]
) -> None:
    prefill, decode = engines
    request = ask()
    await through(TwoStepProxy(Settings(prefill=prefill.url, decode=decode.url, context=context)), request)
    for engine, gets_it in zip(engines, legs, strict=True):
        ((headers, _),) = engine.seen
        assert headers.get("traceparent") == (request.traceparent if gets_it else None)
        assert headers["x-request-id"] == "a"


@pytest.mark.parametrize("chat", [pytest.param(False, id="completions"), pytest.param(True, id="chat")])
@pytest.mark.parametrize("stream", [pytest.param(True, id="stream"), pytest.param(False, id="whole")])
async def test_decode_gets_what_prefill_handed_off(
    stream: bool, chat: bool, engines: tuple[Engine, Engine], tmp_path: Path
) -> None:
    prefill, decode = engines
    log = tmp_path / "proxy.jsonl"
    proxy = TwoStepProxy(Settings(prefill=prefill.url, decode=decode.url, log=log))
    result = await through(proxy, ask(stream=stream, chat=chat))
    assert result.status == 200
    assert result.answer.error is None
    assert result.answer.response_id == "cmpl-a"
    fields = prefill.seen[0][1]
    assert (fields["max_tokens"], fields["stream"], fields["kv_transfer_params"]["do_remote_decode"]) == (1, False, True)
    assert "stream_options" not in fields
    assert decode.seen[0][1]["kv_transfer_params"] == REMOTE
    assert decode.seen[0][1]["max_tokens"] == 9
    if stream:
        assert b"".join(chunk.data for chunk in result.chunks) == b"".join(STREAM)
    (handoff,) = read_log(log)
    assert handoff == proxy.handoffs[0]
    assert (handoff.request_id, handoff.remote_request_id, handoff.decode_status) == ("a", REMOTE["remote_request_id"], 200)


async def test_a_failed_prefill_is_the_answer(engines: tuple[Engine, Engine]) -> None:
    prefill, decode = engines
    prefill.status = 500
    result = await through(TwoStepProxy(Settings(prefill=prefill.url, decode=decode.url)), ask())
    assert result.answer.error == "HTTP 500: InternalServerError"
    assert decode.seen == []


async def test_the_relay_changes_nothing_and_stamps_the_first_token(engines: tuple[Engine, Engine], tmp_path: Path) -> None:
    _, decode = engines
    log, ready = tmp_path / "relay.jsonl", tmp_path / "ready.json"
    serving = asyncio.create_task(relay.run(decode.url.removeprefix("http://"), log, ready))
    try:
        await until(lambda: ready.exists() or serving.done())
        url = f"http://{json.loads(ready.read_text())['addresses']['proxy']}"
        async with aiohttp.ClientSession() as session:
            results = [await send(session, url, ask()) for _ in range(2)]
            assert decode.seen[0] == decode.seen[1]
        await until(lambda: log.exists() and len(log.read_text().splitlines()) == 2)  # the second when the client has gone
    finally:
        serving.cancel()
        await asyncio.wait([serving])
    for result in results:
        assert b"".join(chunk.data for chunk in result.chunks) == b"".join(STREAM)
    stamped = relay.read_log(log)["a"]
    assert 0 < stamped <= (results[1].answer.ttft_token_ns or 0)
