"""Start what a test needs around a pair of engines.

These are router or proxy, sidecars and collector, for one configuration at a time.
The engines outlive it, so the tap ports that they export to are chosen before they start and used again each time.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from handrail_collector.api.schema import row_from_json
from handrail_collector.rows import RequestRow
from vllm.child import HOST, Child, free_port
from vllm.pair import EngineSettings, Installation, Pair, running_router
from vllm.proxy import Context, Handoff
from vllm.proxy import read_log as read_proxy_log

START_S = 180.0
ROWS_S = 180.0
_POLL_S = 0.1
_TESTS = Path(__file__).parents[1]


class Attach(str, Enum):
    """How P and D are observed.

    The edge sidecar always stands in front of the router.
    """

    INLINE = "inline"  # a sidecar's proxy in front of each, and its tap for the engine's spans
    TAP = "tap"  # the tap alone


class Front(str, Enum):
    """What splits a request into its two legs."""

    TWO_STEP = "two-step"
    ROUTER = "vllm-router"
    ROUTER_TRACED = "vllm-router-traced"  # exports its own spans to the edge sidecar's tap


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """One way to run and observe the pair."""

    name: str
    front: Front = Front.TWO_STEP
    context: Context = Context.BOTH  # what the two-step proxy forwards
    client_context: bool = True  # whether the client sends a traceparent
    attach: Attach = Attach.INLINE

    @property
    def id(self) -> str:
        return f"{self.name}-{self.attach.value}"

    @property
    def evidence(self) -> frozenset[str]:
        """The evidence that a row needs when all attached sources have reported.

        It refers to ``JoinRow.evidence``.
        """
        proxies = ("prefill:proxy", "decode:proxy") if self.attach is Attach.INLINE else ()
        spans = ("router:otlp",) if self.front is Front.ROUTER_TRACED else ()
        return frozenset(("edge:proxy", "prefill:otlp", "decode:otlp", *proxies, *spans))


@dataclass(frozen=True, slots=True)
class Taps:
    """Ports that the engines export to: P over gRPC, D over HTTP."""

    prefill_grpc: int = field(default_factory=free_port)
    decode_http: int = field(default_factory=free_port)

    def settings(self) -> tuple[EngineSettings, EngineSettings]:
        """Settings of P and D that make them export here."""
        prefill = EngineSettings(otlp_endpoint=f"grpc://{HOST}:{self.prefill_grpc}")
        decode = EngineSettings(otlp_endpoint=f"http://{HOST}:{self.decode_http}/v1/traces")
        return prefill, decode


@dataclass(frozen=True, slots=True)
class Bed:
    """What lasts for the whole test session."""

    installation: Installation
    pair: Pair
    taps: Taps


class Api:
    """The collector's HTTP API."""

    def __init__(self, address: str) -> None:
        self.url = f"http://{address}/api/v1"

    def get(self, path: str, **parameters: str) -> Any:
        query = f"?{urllib.parse.urlencode(parameters)}" if parameters else ""
        with urllib.request.urlopen(f"{self.url}{path}{query}", timeout=30) as response:
            return json.load(response)

    def rows(self) -> list[RequestRow]:
        """Return every request, earliest first."""
        found = self.get("/requests", limit="10000")["requests"]
        return sorted((row_from_json(row) for row in found), key=lambda row: row.started_unix_ns)


@dataclass(frozen=True, slots=True)
class Stack:
    """A running configuration."""

    configuration: Configuration
    edge_url: str
    router_url: str  # behind the edge sidecar
    api: Api
    collector: Child
    data: Path  # the collector's folder
    folder: Path
    proxy_log: Path

    def handoffs(self) -> list[Handoff]:
        """Return what the two-step proxy saw; empty with vllm-router."""
        return read_proxy_log(self.proxy_log)

    def wait_rows(self, enough: Callable[[list[RequestRow]], bool], timeout_s: float = ROWS_S) -> list[RequestRow]:
        """Return the rows as soon as ``enough`` accepts them.

        At the timeout it returns what exists (an assertion shows more).
        """
        deadline_s = time.monotonic() + timeout_s
        while not enough(rows := self.api.rows()) and time.monotonic() < deadline_s and self.collector.exit_status is None:
            time.sleep(_POLL_S)
        return rows


@contextlib.contextmanager
def running_stack(bed: Bed, configuration: Configuration, folder: Path) -> Iterator[Stack]:
    """Start everything of ``configuration`` around the bed's engines.

    At the end senders stop before receivers.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as parts:
        start = Starter(parts, folder)
        any_port = f"{HOST}:0"
        data = folder / "data"
        ports = ("--otlp-grpc", any_port, "--otlp-http", any_port, "--api", any_port)
        # The engines export every 200 ms here (ENGINE_ENV), so the decision wait is shorter than the default; the
        # router exports every 5 s, after spans that end 3 s late.
        wait = () if configuration.front is Front.ROUTER_TRACED else ("--decision-engine-wait", "3s")
        quick = ("--flush-interval", "500ms", *wait)
        collector, at = start.handrail("collector", "collector", *ports, "--data", str(data), *quick)
        report = ("--collector", f"http://{at['otlp_http']}")
        inline = configuration.attach is Attach.INLINE
        urls = []
        for engine, tap in (
            (bed.pair.prefill, ("--otlp-grpc", f"{HOST}:{bed.taps.prefill_grpc}")),
            (bed.pair.decode, ("--otlp-http", f"{HOST}:{bed.taps.decode_http}")),
        ):
            proxy = ("--listen", any_port, "--upstream", engine.url) if inline else ()
            _, found = start.handrail(
                "sidecar", engine.role, "--role", engine.role, "--instance", engine.instance, *proxy, *tap, *report
            )
            urls.append(f"http://{found['proxy']}" if inline else engine.url)
        traced = configuration.front is Front.ROUTER_TRACED
        edge_tap = f"{HOST}:{free_port()}"
        proxy_log = folder / "proxy.jsonl"
        if configuration.front is Front.TWO_STEP:
            options = (
                "--prefill",
                urls[0],
                "--decode",
                urls[1],
                "--context",
                configuration.context.value,
                "--log",
                str(proxy_log),
            )
            router_url = f"http://{start.module('vllm.proxy', 'proxy', *options)['proxy']}"
        else:
            router = running_router(
                bed.installation,
                prefill_urls=urls[:1],
                decode_urls=urls[1:],
                logs=folder,
                otlp_endpoint=edge_tap if traced else "",
            )
            router_url = parts.enter_context(router)
        proxy = ("--listen", any_port, "--upstream", router_url)
        at_edge = ("--otlp-grpc", edge_tap) if traced else ()
        # The engines export to taps of their own: a trace that starts at the edge must be sampled.
        _, edge = start.handrail("sidecar", "edge", "--role", "edge", "--new-traces", "sampled", *proxy, *at_edge, *report)
        yield Stack(configuration, f"http://{edge['proxy']}", router_url, Api(at["api"]), collector, data, folder, proxy_log)


@contextlib.contextmanager
def running_relay(upstream_url: str, folder: Path) -> Iterator[tuple[str, Path]]:
    """Run a bare relay in front of ``upstream_url``; yield its URL and its log."""
    log = folder / "relay.jsonl"
    with contextlib.ExitStack() as parts:
        address = upstream_url.removeprefix("http://")
        found = Starter(parts, folder).module("vllm.relay", "relay", "--upstream", address, "--log", str(log))
        yield f"http://{found['proxy']}", log


class Starter:
    """Starts children that write a ready file; stops them in the opposite order."""

    def __init__(self, parts: contextlib.ExitStack, folder: Path) -> None:
        self._parts = parts
        self._folder = folder

    def handrail(self, command: str, name: str, *options: str) -> tuple[Child, dict[str, str]]:
        return self._start(name, (sys.executable, "-m", "handrail_cli.main", command, *options))

    def module(self, module: str, name: str, *options: str) -> dict[str, str]:
        return self._start(name, (sys.executable, "-m", module, *options))[1]

    def _start(self, name: str, command: tuple[str, ...]) -> tuple[Child, dict[str, str]]:
        ready = self._folder / f"{name}.ready.json"
        env = {"PYTHONPATH": str(_TESTS)}
        child = Child(name, (*command, "--ready-file", str(ready)), log=self._folder / f"{name}.log", env=env)
        self._parts.callback(child.stop)
        return child, child.wait_ready_file(ready, deadline_s=time.monotonic() + START_S)
