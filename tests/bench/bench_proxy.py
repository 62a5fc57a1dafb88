"""Measure what the proxy costs for a token and for a first token.

A bare relay and vllm-router run beside it for comparison.
The processor time is that of the proxy's process alone, from the scheduler's own account (nanoseconds), over all tokens that
passed. It includes the kernel's share, the connects and the head of each request.
Every figure is the median over alternating rounds.
The benchmark looks for the router in ``HANDRAIL_VLLM_ROUTER`` and where the project installs it. Without a router the budget is
the lower of the figures measured for it (DESIGN section 13).
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles
from typing import Any, TypedDict, cast

import uvloop

ROUNDS = 5
STREAMS = 64
PACED_TOKENS, PACE_US = 160, 10_000
UNPACED_TOKENS = 400
BODY_MIB = 64
FIRST_TOKEN_REQUESTS = {1: 100, 8: 240}  # requests for each round and target, by concurrency
FIRST_TOKEN_US = 8_000  # the engine takes once to twice this until the first token: short for a real engine
ROUTER_US = 23.0  # budgets where no router is installed
ADDED_P50_MS, ADDED_P99_MS = 1.0, 3.0
ADDED_MS_PER_MIB = 1.0

_TESTS = Path(__file__).parents[1]
_END = b"\r\n0\r\n\r\n"


def request(port: int, tokens: int, pace_us: int, first_us: int = 0) -> bytes:
    """Build a request for ``tokens`` streamed tokens.

    The first comes after ``first_us``, then one every ``pace_us`` (0: at once).
    """
    body = b'{"model":"tiny","prompt":"%b","stream":true,"max_tokens":%d,"user":"pace-%d-%d"}' % (
        b"a" * 400,
        tokens,
        pace_us,
        first_us,
    )
    return (
        b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nContent-Type: application/json\r\nUser-Agent: bench\r\n"
        b"Accept: */*\r\nContent-Length: %d\r\n\r\n%b" % (port, len(body), body)
    )


class Client(asyncio.Protocol):
    """A connection that streams one answer after another.

    ``tokens`` counts events. ``first_ns`` is the time of the first one.
    """

    def __init__(self) -> None:
        self.tokens = 0
        self.first_ns = 0
        self._tail = b""
        self._done: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def ask(self, data: bytes) -> asyncio.Future[None]:
        """Send a request and return when its answer is whole."""
        self._done = asyncio.get_running_loop().create_future()
        self.first_ns = 0
        self._tail = b""
        self.transport.write(data)
        return self._done

    def data_received(self, data: bytes) -> None:
        found = data.count(b"data: {")
        if found and not self.first_ns:
            self.first_ns = time.monotonic_ns()
        self.tokens += found
        self._tail = (self._tail + data)[-len(_END) :]
        if self._tail == _END and self._done is not None and not self._done.done():
            self._done.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(ConnectionError("the answer was cut"))


class Row(TypedDict):
    """One figure of the result."""

    name: str
    value: float
    unit: str
    budget: float | None
    ratio: float | None
    met: bool | None


@dataclass
class Target:
    """One way to the engine; ``pid`` is None for the direct way."""

    name: str
    port: int
    pid: int | None
    paced_us: list[float] = field(default_factory=list)
    unpaced_us: list[float] = field(default_factory=list)
    body_s: list[float] = field(default_factory=list)  # seconds until the answer to a request of BODY_MIB
    first_ms: dict[tuple[int, bool], list[list[float]]] = field(default_factory=dict)  # by concurrency and "new connection each"


def run() -> list[dict[str, Any]]:
    """Start everything, measure in rounds, stop everything."""
    with ExitStack() as running:
        engine = running.enter_context(_child(_TESTS / "harness/proxy_peers.py", "engine"))
        direct = Target("direct", engine[0], None)
        bare = Target("bare relay", *running.enter_context(_child(_TESTS / "harness/proxy_peers.py", "relay", str(engine[0]))))
        ours = Target("proxy", *running.enter_context(_child(_TESTS / "harness/proxy_child.py", str(engine[0]), "edge")))
        targets = [direct, bare, ours]
        binary = router_binary()
        router = None
        if binary is not None:
            router = Target("vllm-router", *running.enter_context(_router(binary, engine[0])))
            targets.append(router)
        uvloop.run(_measure(targets))
    return [dict(row) for row in _rows(direct, bare, ours, router)]


def router_binary() -> Path | None:
    """Return the path of the router to compare with, or None."""
    named = os.environ.get("HANDRAIL_VLLM_ROUTER")
    cache = Path.home() / ".cache"
    found = [Path(named)] if named else [*cache.glob("handrail/*/venv_router/bin/vllm-router")]
    found.append(cache / "pd-testbed/venv_router/bin/vllm-router")
    return next((path for path in found if path.exists()), None)


async def _measure(targets: list[Target]) -> None:
    for target in targets:  # warm-up: imports, caches, code paths
        await _stream(target, 20, 0)
        await _first_tokens(target, 1, False)
        await _first_tokens(target, 8, True)
    for target in targets:
        target.first_ms.clear()
    for turn in range(ROUNDS):
        order = targets if turn % 2 == 0 else targets[::-1]
        for target in order:
            if target.pid is not None:
                target.paced_us.append(await _stream(target, PACED_TOKENS, PACE_US))
                target.unpaced_us.append(await _stream(target, UNPACED_TOKENS, 0))
        for target in order:
            if target.name != "vllm-router":  # the router refuses bodies of this size
                target.body_s.append(await _large_body(target))
        for concurrency in (1, 8):
            for new in (False, True):
                for target in order:
                    await _first_tokens(target, concurrency, new)


async def _stream(target: Target, tokens: int, pace_us: int) -> float:
    """Measure the processor microseconds that the target's process takes for a token.

    ``STREAMS`` answers stream at once.
    """
    loop = asyncio.get_running_loop()
    before = _cpu_ns(target.pid)
    clients = []
    for _ in range(STREAMS):
        _, client = await loop.create_connection(Client, "127.0.0.1", target.port)
        clients.append(client)
    await asyncio.gather(*(client.ask(request(target.port, tokens, pace_us)) for client in clients))
    got = sum(client.tokens for client in clients)
    for client in clients:
        client.transport.close()
    assert got == STREAMS * tokens, (target.name, got)
    return (_cpu_ns(target.pid) - before) / got / 1000


async def _large_body(target: Target) -> float:
    """Measure the seconds from the first byte of a ``BODY_MIB`` request to its answer.

    The end is the last byte of the answer.
    """
    small = request(target.port, 2, 0)
    head, _, body = small.partition(b"\r\n\r\n")
    body = body[:-1] + b',"pad":"' + b"a" * (BODY_MIB << 20) + b'"}'
    head = head[: head.rindex(b" ") + 1] + b"%d" % len(body)
    _, client = await asyncio.get_running_loop().create_connection(Client, "127.0.0.1", target.port)
    begin = time.monotonic_ns()
    await client.ask(head + b"\r\n\r\n" + body)
    client.transport.close()
    return (time.monotonic_ns() - begin) / 1e9


async def _first_tokens(target: Target, concurrency: int, new: bool) -> None:
    """Measure the milliseconds to the first token of short answers.

    The engine's own time is subtracted. Each worker sends one request after another.
    """
    loop = asyncio.get_running_loop()
    found: list[float] = []
    target.first_ms.setdefault((concurrency, new), []).append(found)
    chance = random.Random(concurrency)  # every target gets the same random waits; equal waits would synchronise the workers

    async def worker() -> None:
        client: Client | None = None
        for _ in range(FIRST_TOKEN_REQUESTS[concurrency] // concurrency):
            first_us = FIRST_TOKEN_US + chance.randrange(FIRST_TOKEN_US)
            begin = time.monotonic_ns()
            if client is None:
                _, client = await loop.create_connection(Client, "127.0.0.1", target.port)
            await client.ask(request(target.port, 3, 0, first_us))
            found.append((client.first_ns - begin - first_us * 1000) / 1e6)
            if new:
                client.transport.close()
                client = None
        if client is not None:
            client.transport.close()

    await asyncio.gather(*(worker() for _ in range(concurrency)))


def _rows(direct: Target, bare: Target, ours: Target, router: Target | None) -> Iterator[Row]:
    for kind in ("paced", "unpaced"):
        for target in (bare, router, ours):
            if target is None:
                continue
            times = target.paced_us if kind == "paced" else target.unpaced_us
            budget = None
            if target is ours:
                budget = ROUTER_US if router is None else median(router.paced_us if kind == "paced" else router.unpaced_us)
            name = f"{target.name}: CPU per token, {kind}"
            yield _row(name, median(times), "us", budget)
            yield _row(f"{name}, spread of the rounds", max(times) - min(times), "us", None)
    for concurrency in (1, 8):
        for new in (False, True):
            key = (concurrency, new)
            how = f"{'new' if new else 'kept'} connections, concurrency {concurrency}"
            for target in (bare, router, ours):
                if target is None:
                    continue
                mine = target is ours
                rounds = list(zip(target.first_ms[key], direct.first_ms[key], strict=True))
                added = median(median(its) - median(base) for its, base in rounds)
                yield _row(f"{target.name}: added TTFT p50, {how}", added, "ms", ADDED_P50_MS if mine else None)
                tails = [_p99(its) - _p99(base) for its, base in rounds]
                yield _row(f"{target.name}: added TTFT p99, {how}", median(tails), "ms", ADDED_P99_MS if mine else None)
                if mine:
                    yield _row(f"{target.name}: added TTFT p99, {how}, spread of the rounds", max(tails) - min(tails), "ms", None)

    for target in (bare, ours):
        added = (min(target.body_s) - min(direct.body_s)) * 1e3 / BODY_MIB
        yield _row(f"{target.name}: added a MiB of request body", added, "ms", ADDED_MS_PER_MIB if target is ours else None)


def _row(name: str, value: float, unit: str, budget: float | None) -> Row:
    return Row(
        name=name,
        value=round(value, 3),
        unit=unit,
        budget=None if budget is None else round(budget, 3),
        ratio=None if budget is None else round(value / budget, 3),
        met=None if budget is None else value <= budget,
    )


def _p99(times: list[float]) -> float:
    return quantiles(times, n=100, method="inclusive")[98]


def _cpu_ns(pid: int | None) -> int:
    """Return the processor time of all threads of ``pid`` since they started.

    It misses threads that ended in between; here none do.
    """
    if pid is None:
        return 0
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):
            total += int((task / "schedstat").read_text().split()[0])
    return total


@contextmanager
def _child(script: Path, *arguments: str) -> Iterator[tuple[int, int]]:
    """Start a script that prints ``PORT n``; return its port and process id."""
    process = subprocess.Popen(
        [sys.executable, str(script), *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=None, text=True
    )
    assert process.stdout is not None
    try:
        yield int(process.stdout.readline().split()[1]), process.pid
    finally:
        process.kill()
        process.communicate()


@contextmanager
def _router(binary: Path, engine_port: int) -> Iterator[tuple[int, int]]:
    """Start vllm-router in front of the engine, in its plain mode.

    It makes one upstream request for each request, as the proxy does.
    """
    port, metrics_port = _free_port(), _free_port()
    process = subprocess.Popen(
        [
            str(binary),
            *("--worker-urls", f"http://127.0.0.1:{engine_port}"),
            *("--policy", "round_robin", "--host", "127.0.0.1", "--port", str(port)),
            *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port), "--log-level", "error"),
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + 60
        while not _answers(port):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{binary} does not start; set HANDRAIL_VLLM_ROUTER to one that does")
            time.sleep(0.1)
        yield port, process.pid
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)  # own session, so that the launcher and the router it started end together
        with suppress(subprocess.TimeoutExpired):
            process.wait(5)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1) as response:
            return int(response.status) == 200
    except (urllib.error.URLError, OSError):
        return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
