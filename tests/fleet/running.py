"""Run engines and routers of the fleet inside the test's event loop.

They listen on free ports. A receiver takes what they export.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest, ExportTraceServiceResponse

from handrail_sim.emulator import router, truth_log
from handrail_sim.emulator.engine import EmulatedEngine, EngineSettings
from handrail_sim.emulator.faults import parse
from handrail_sim.emulator.http_api import HttpApi
from handrail_sim.emulator.load import SentRequest
from handrail_sim.emulator.profile import Profile
from handrail_sim.emulator.scenario import Scenario
from handrail_sim.emulator.truth import RequestTruth

HOST = "127.0.0.1"
MODEL = "tiny"
# Steps of 1 ms and hand-offs of 2 ms keep the tests short.
FAST = Profile(
    name="fast",
    model=MODEL,
    calculator="per-token",
    max_num_seqs=8,
    inter_token_ns=1_000_000,
    inter_token_sd_ns=0,
    prefill_overhead_ns=1_000_000,
    prefill_per_token_ns=10_000,
    transfer_per_token_ns=20_000,
    handshake_ns=1_000_000,
)
# A host of each kind that costs about as little by the scenario's own model.
SMALL = Scenario(
    name="small",
    prefill_hosts=2,
    decode_hosts=1,
    step_ns=2_000_000,
    prefill_token_ns=10_000,
    prefill_pair_ps=0,
    noise_share=0.0,
    admission_ns=1_000_000,
    handshake_ns=2_000_000,
    prompt_tokens_min=100,
    prompt_tokens_max=400,
)
DEADLINE_S = 60.0


def settings(role: str, **changes: Any) -> EngineSettings:
    host = "d0" if role == "decode" else "p0"
    base = EngineSettings(
        role=role, listen=(HOST, 0), scenario=SMALL, host=host, profile=FAST, model=MODEL, handshake_timeout_s=60.0
    )
    return replace(base, **changes)


@asynccontextmanager
async def serving(app: web.Application) -> AsyncIterator[str]:
    """Serve the app and yield its base URL."""
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.2)
    await runner.setup()
    try:
        await web.TCPSite(runner, HOST, 0).start()
        yield "http://{}:{}".format(*runner.addresses[0][:2])
    finally:
        await runner.cleanup()


@asynccontextmanager
async def engine(role: str, **changes: Any) -> AsyncIterator[tuple[EmulatedEngine, str]]:
    """Start an engine; yield it and its base URL."""
    running = EmulatedEngine(settings(role, **changes))
    await running.start()
    try:
        async with serving(HttpApi(running).app()) as url:
            yield running, url
    finally:
        await running.close()


@asynccontextmanager
async def routed(prefill: str, decode: str, **changes: Any) -> AsyncIterator[str]:
    """Start a router in front of one P and one D; yield its base URL."""
    chosen = router.RouterSettings(listen=(HOST, 0), prefill=(prefill,), decode=(decode,), **changes)
    async with serving(router.Router(chosen).app()) as url:
        yield url


@dataclass(frozen=True, slots=True)
class Fleet:
    """Two P and one D of ``SMALL`` behind a router, all by the scenario's own model."""

    url: str
    engines: dict[str, EmulatedEngine]
    began_unix_ns: int
    folder: Path

    def truths(self, sent: Sequence[SentRequest]) -> list[RequestTruth]:
        """Return the truth of each request; call after the fleet has ended."""
        lines = [line for path in sorted(self.folder.glob("*.truth")) for line in truth_log.read(path)]
        return truth_log.truths(lines, sent, self.began_unix_ns)


@asynccontextmanager
async def fleet(folder: Path, *faults: str, scenario: Scenario = SMALL, **routing: Any) -> AsyncIterator[Fleet]:
    began = time.time_ns()
    shared: dict[str, Any] = {"faults": tuple(parse(text, scenario.hosts()) for text in faults), "began_unix_ns": began}

    def own(host: str) -> dict[str, Any]:
        return {**shared, "scenario": scenario, "profile": None, "host": host, "truth": folder / f"{host}.truth"}

    async with (
        engine("prefill", **own("p0")) as (p0, first),
        engine("prefill", **own("p1")) as (p1, second),
        engine("decode", **own("d0")) as (d0, decode),
    ):
        chosen = router.RouterSettings(
            listen=(HOST, 0), prefill=(first, second), decode=(decode,), truth=folder / "router.truth", **shared, **routing
        )
        async with serving(router.Router(chosen).app()) as url:
            yield Fleet(url, {"p0": p0, "p1": p1, "d0": d0}, began, folder)


class Received:
    """What an OTLP/HTTP receiver got."""

    def __init__(self) -> None:
        self.requests: list[ExportTraceServiceRequest] = []

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_post("/v1/traces", self._take)
        return app

    async def _take(self, request: web.Request) -> web.Response:
        body = await request.read()
        self.requests.append(ExportTraceServiceRequest.FromString(body))
        return web.Response(body=ExportTraceServiceResponse().SerializeToString(), content_type="application/x-protobuf")

    def spans(self) -> list[Any]:
        return [span for each in self.requests for rs in each.resource_spans for ss in rs.scope_spans for span in ss.spans]


async def until(holds: Callable[[], bool]) -> None:
    """Return as soon as ``holds()``. Raises ``TimeoutError``."""
    deadline = time.monotonic() + DEADLINE_S
    while not holds():
        if time.monotonic() > deadline:
            raise TimeoutError("the condition never held")
        await asyncio.sleep(0.005)


def attributes(span: Any) -> dict[str, Any]:
    """Return a span's attributes as Python values."""
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in span.attributes}
