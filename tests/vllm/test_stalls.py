"""The causes of stalls in streams of a real engine.

The causes are long prompts computed beside the streams, and a processor quota.
One engine with the plugin serves prompts and streams, behind an edge. Prompts come without KV, so they are computed where the
streams run.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from handrail_collector.api.schema import stall_from_json
from handrail_collector.rows import StallRow
from harness.cpu_quota import NoQuotaError, cpu_quota, stopped_in_turns
from vllm.child import HOST, free_port
from vllm.client import Request, Result, load, new_traceparent
from vllm.figures import Figures
from vllm.handoffs import MIDDLEWARE, processes
from vllm.observed import make_plugin_site
from vllm.pair import ENGINE_ENV, MODEL_NAME, START_S, Engine, EngineSettings, find_installation, start_engine
from vllm.stack import Api, Starter

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1200)]

STREAMS, AT_ONCE, TOKENS = 12, 3, 500
LONG_STREAMS, LONG = 9, 1500  # about ten seconds each
LONG_PROMPT, EVERY_S = 1900, 2.5
MOST_AT_ONCE = 12  # prompts of a burst: with the streams, what the engine takes
BURST_MS = 120.0  # far above a stall (20 ms and three usual gaps), however fast the machine is
VOCABULARY = 2000  # of the tiny model, and no special tokens among them
SHARE = 0.3  # of a processor, while there is a quota
TITLE = "stalls of a real engine"

Times = Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Lone:
    """The engine, and what watches it."""

    engine: Engine
    edge_url: str
    api: Api

    def stalls(self, results: Sequence[Result]) -> list[StallRow]:
        """Return the stalls of these streams, once each stream has been reported."""
        names = [str(result.request.request_id) for result in results]
        deadline_s = time.monotonic() + 180
        while True:
            reported_names = {row.client_request_id for row in self.api.rows() if row.complete}
            if reported_names >= set(names) or time.monotonic() > deadline_s:
                break
            time.sleep(0.5)
        return [stall_from_json(each) for name in names for each in self.api.get(f"/requests/{name}")["stalls"]]


@pytest.fixture(scope="module")
def lone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lone]:
    installation, folder, port = find_installation(), tmp_path_factory.mktemp("stalls"), free_port()
    with contextlib.ExitStack() as parts:
        start = Starter(parts, folder)
        any_port = f"{HOST}:0"
        taps = ("--otlp-grpc", any_port, "--otlp-http", any_port, "--api", any_port)
        _, at = start.handrail("collector", "collector", *taps, "--data", str(folder / "data"), "--flush-interval", "500ms")
        report = ("--collector", f"http://{at['otlp_http']}")
        socket = folder / "decode.sock"
        place = ("--role", "decode", "--instance", f"{HOST}:{port}", "--plugin-socket", str(socket))
        start.handrail("sidecar", "decode", *place, *report)
        front = ("--role", "edge", "--new-traces", "sampled", "--listen", any_port, "--upstream", f"http://{HOST}:{port}")
        _, edge = start.handrail("sidecar", "edge", *front, *report)
        site = make_plugin_site(folder / "site")
        env = {"PYTHONPATH": f"{ENGINE_ENV['PYTHONPATH']}:{site}", "HANDRAIL_SOCKET": str(socket)}
        # a whole burst in one step: a fast machine computes one long prompt in less than a stall
        step = ("--max-num-batched-tokens", str(2048 * MOST_AT_ONCE))
        settings = EngineSettings(port=port, env=env, flags=("--middleware", MIDDLEWARE, *step))
        engine = start_engine(installation, "decode", settings, logs=folder)
        parts.callback(engine.child.stop)
        engine.wait_healthy(time.monotonic() + START_S)
        made = Lone(engine, f"http://{edge['proxy']}", Api(at["api"]))
        load(made.edge_url, streams("first", 2, 20), 1)
        yield made


def streams(name: str, count: int = STREAMS, tokens: int = TOKENS) -> list[Request]:
    source = random.Random(name)
    return [
        Request(
            request_id=f"{name}-{number:02d}",
            traceparent=new_traceparent(source),
            chat=False,
            stream=True,
            prompt=f"{name} {number}: def f(x): return",
            max_tokens=tokens,
        )
        for number in range(count)
    ]


def long_prompt(url: str, source: random.Random) -> None:
    """Send one new prompt and request an answer of one token."""
    prompt = [source.randrange(10, VOCABULARY) for _ in range(LONG_PROMPT)]
    body = json.dumps({"model": MODEL_NAME, "prompt": prompt, "max_tokens": 1}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        response.read()


def burst_of(prompts: int, pool: ThreadPoolExecutor, url: str, source: random.Random) -> tuple[int, int]:
    """Send that many long prompts at once; return begin and end (wall clock, ns)."""
    begin = time.time_ns()
    list(pool.map(lambda _: long_prompt(url, source), range(prompts)))
    return begin, time.time_ns()


def long_enough(pool: ThreadPoolExecutor, url: str, source: random.Random) -> int:
    """Return how many long prompts keep this engine busy for ``BURST_MS``.

    Nothing runs beside them.
    """
    burst_of(1, pool, url, source)  # the first is slower
    for prompts in range(4, MOST_AT_ONCE, 2):
        begin, end = burst_of(prompts, pool, url, source)
        if end - begin >= BURST_MS * 1e6:
            return prompts
    return MOST_AT_ONCE


def within(stall: StallRow, times: Times) -> bool:
    return any(stall.started_unix_ns < last and stall.started_unix_ns + stall.gap_ns > first for first, last in times)


def causes(stalls: Sequence[StallRow]) -> str:
    return ", ".join(f"{count} {cause}" for cause, count in Counter(stall.cause for stall in stalls).most_common()) or "none"


def test_long_prompts_beside_the_streams_are_named(lone: Lone, figures: Figures) -> None:
    source = random.Random(1)
    bursts: list[tuple[int, int]] = []
    with ThreadPoolExecutor(MOST_AT_ONCE + 1) as pool:
        prompts = long_enough(pool, lone.engine.url, source)
        under_way: Future[list[Result]] = pool.submit(load, lone.edge_url, streams("beside", LONG_STREAMS, LONG), AT_ONCE)
        while not under_way.done():
            time.sleep(EVERY_S)
            bursts.append(burst_of(prompts, pool, lone.engine.url, source))
        results = under_way.result()
    stalls = lone.stalls(results)
    inside = [stall for stall in stalls if within(stall, bursts)]
    outside = [stall for stall in stalls if not within(stall, bursts)]
    figures.add(
        TITLE, f"{len(bursts)} bursts of {prompts} prompts of {LONG_PROMPT} tokens, {LONG_STREAMS} streams of {LONG} tokens"
    )
    figures.add(TITLE, f"stalls in a burst: {causes(inside)}; at other times: {causes(outside)}")
    named = [stall for stall in inside if stall.cause == "prefill_coscheduled"]
    kept_waiting = [stall for stall in inside if stall.cause == "host_pause"]  # holds on a shared machine too
    assert len(named) >= 5
    assert len(named) >= 0.75 * (len(inside) - len(kept_waiting))
    assert all("prompt tokens" in " ".join(stall.evidence) for stall in named)
    assert sum(stall.cause == "prefill_coscheduled" for stall in outside) <= 0.1 * len(named)


def test_a_processor_quota_is_named(lone: Lone, figures: Figures) -> None:
    """The quota holds five times for three seconds, with as much and more between."""
    pids = processes(lone.engine, "")
    limited: list[tuple[int, int]] = []
    how = ""
    with ThreadPoolExecutor(1) as pool:
        under_way: Future[list[Result]] = pool.submit(load, lone.edge_url, streams("quota"), AT_ONCE)
        for number in range(5):
            time.sleep(3.5)
            with contextlib.ExitStack() as parts:
                begin = time.time_ns()
                try:
                    how = parts.enter_context(cpu_quota(pids, SHARE, name=f"handrail-vllm-{os.getpid()}-{number}"))
                except NoQuotaError as error:
                    output = parts.enter_context(stopped_in_turns(lone.engine.child.pid, SHARE))
                    how = f"{output} (no control group: {error})"
                time.sleep(3)
            limited.append((begin, time.time_ns()))
        results = under_way.result()
    stalls = lone.stalls(results)
    inside = [stall for stall in stalls if within(stall, limited)]
    outside = [stall for stall in stalls if not within(stall, limited)]
    figures.add(TITLE, f"{SHARE:.0%} of a processor for five times 3 s, by {how}")
    figures.add(TITLE, f"stalls meanwhile: {causes(inside)}; at other times: {causes(outside)}")
    assert len(inside) >= 20
    assert sum(stall.cause == "host_pause" for stall in inside) >= 0.6 * len(inside)
    named = [stall for stall in inside if stall.cause == "host_pause"]
    assert sum(stall.accounted_ns for stall in named) >= 0.5 * sum(stall.gap_ns - stall.median_ns for stall in named)
    assert not any(stall.cause == "prefill_coscheduled" for stall in inside)
