"""A bed of engines, sidecars, edge, collector and a proxy that spoils hand-offs.

The engines have the plugin. They may be started, killed and started again while the rest runs. Each keeps its port, so it is
one instance.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from handrail_collector.api.schema import fetch_from_json
from handrail_collector.rows import FetchRow, FindingRow, ProcessEventRow, RequestRow
from handrail_collector.store.read import StoreReader
from handrail_collector.store.schema import Table
from vllm.child import HOST, Child, free_port
from vllm.observed import make_plugin_site
from vllm.pair import ENGINE_ENV, START_S, Engine, EngineSettings, Installation, start_engine
from vllm.stack import Api, Starter

MIDDLEWARE = "handrail.plugin.middleware.Handrail"
_POLL_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Bed:
    """The processes that run while engines come and go."""

    installation: Installation
    folder: Path
    site: Path  # the package, as installed in the engines' environment
    ports: Mapping[str, int]  # of the engines, by role
    edge_url: str
    proxy_url: str  # behind the edge
    control: Path  # of the proxy
    api: Api
    collector: Child
    data: Path
    engines: dict[str, Engine] = field(default_factory=dict)

    def socket(self, role: str) -> Path:
        return self.folder / f"{role}.sock"

    def start(
        self,
        role: str,
        *,
        connector: Mapping[str, object] | None = None,
        env: Mapping[str, str] | None = None,
        sites: tuple[Path, ...] = (),
        middlewares: tuple[str, ...] = (MIDDLEWARE,),
    ) -> Engine:
        """Start ``role`` and return at once; ``sites``: more folders for its PYTHONPATH."""
        path = ":".join((ENGINE_ENV["PYTHONPATH"], *(str(site) for site in (self.site, *sites))))
        settings = EngineSettings(
            port=self.ports[role],
            env={"PYTHONPATH": path, "HANDRAIL_SOCKET": str(self.socket(role)), **(env or {})},
            connector=connector or {},
            flags=tuple(part for name in middlewares for part in ("--middleware", name)),
        )
        engine = start_engine(self.installation, role, settings, logs=self.folder)
        self.engines[role] = engine
        return engine

    def wait_healthy(self) -> None:
        deadline_s = time.monotonic() + START_S
        for engine in self.engines.values():
            engine.wait_healthy(deadline_s)

    def kill(self, role: str) -> None:
        """Send SIGKILL to every process of the engine at once."""
        os.killpg(self.engines[role].child.pid, signal.SIGKILL)
        self.stop(role)

    def stop(self, role: str) -> None:
        engine = self.engines.pop(role, None)
        if engine is not None:
            engine.child.stop()

    # --- what Handrail says ---------------------------------------------------------------------------------------------

    def rows(self) -> dict[str, list[RequestRow]]:
        """Return the rows by the client's request id."""
        found: dict[str, list[RequestRow]] = {}
        for row in self.api.rows():
            found.setdefault(row.client_request_id or "", []).append(row)
        return found

    def wait_rows(self, enough: Callable[[dict[str, list[RequestRow]]], bool], timeout_s: float) -> dict[str, list[RequestRow]]:
        """Return the rows once ``enough`` accepts them, else what exists at the timeout.

        An assertion then shows more than an exception.
        """
        deadline_s = time.monotonic() + timeout_s
        while not enough(rows := self.rows()) and time.monotonic() < deadline_s and self.collector.exit_status is None:
            time.sleep(_POLL_S * 3)
        return rows

    def fetches(self) -> list[FetchRow]:
        return [fetch_from_json(each) for each in self.api.get("/fetches", limit="10000")["fetches"]]

    def findings(self) -> list[FindingRow]:
        """Return all published findings so far; a finding concerns no single request."""
        reader = StoreReader(self.data / "store")
        try:
            found = reader.events(Table.FINDINGS, 0, time.time_ns() + 10**9)
        finally:
            reader.close()
        return [each for each in found if isinstance(each, FindingRow)]

    def process_events(self) -> list[ProcessEventRow]:
        """Return all published process events so far."""
        reader = StoreReader(self.data / "store")
        try:
            found = reader.events(Table.PROCESS_EVENTS, 0, time.time_ns() + 10**9)
        finally:
            reader.close()
        return [each for each in found if isinstance(each, ProcessEventRow)]

    def wait_event(self, kind: str, pid: int, timeout_s: float = 180.0) -> ProcessEventRow:
        """Return the event of ``kind`` of the process ``pid``, once it exists.

        Fails at the timeout.
        """
        deadline_s = time.monotonic() + timeout_s
        while not (found := [e for e in self.process_events() if (e.kind, e.pid) == (kind, pid)]):
            assert time.monotonic() < deadline_s, f"{kind} of {pid} is not told"
            time.sleep(_POLL_S)
        return found[0]

    # --- the proxy's control folder ---------------------------------------------------------------------------------------

    def wait_held(self, *request_ids: str, timeout_s: float = 240.0) -> None:
        """Return once all of them wait between their steps."""
        wait_for(
            lambda: all((self.control / f"{each}.held").exists() for each in request_ids), "held between the steps", timeout_s
        )

    def let_go(self, request_id: str) -> None:
        (self.control / f"{request_id}.go").touch()


def processes(engine: Engine, title: str) -> list[int]:
    """Return the pids of the engine whose title begins so.

    Titles: ``VLLM::EngineCore``, ``VLLM::Worker``; an empty one matches all.
    """
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            stat = (entry / "stat").read_text().rpartition(")")[2].split()
            if int(stat[2]) == engine.child.pid and (entry / "cmdline").read_text().startswith(title):
                found.append(int(entry.name))
    return sorted(found)


def wait_for(holds: Callable[[], bool], what: str, timeout_s: float) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline_s, f"not in time: {what}"
        time.sleep(_POLL_S)


@contextlib.contextmanager
def running_bed(installation: Installation, folder: Path) -> Iterator[Bed]:
    """Start everything but the engines; stop senders before receivers."""
    folder.mkdir(parents=True, exist_ok=True)
    control = folder / "control"
    control.mkdir()
    ports = {role: free_port() for role in ("prefill", "decode")}
    with contextlib.ExitStack() as parts:
        start = Starter(parts, folder)
        any_port = f"{HOST}:0"
        taps = ("--otlp-grpc", any_port, "--otlp-http", any_port, "--api", any_port)
        quick = ("--flush-interval", "500ms", "--decision-engine-wait", "3s")
        collector, at = start.handrail("collector", "collector", *taps, "--data", str(folder / "data"), *quick)
        report = ("--collector", f"http://{at['otlp_http']}")
        for role, port in ports.items():
            place = ["--role", role, "--instance", f"{HOST}:{port}", "--plugin-socket", str(folder / f"{role}.sock")]
            place += ["--metrics-url", f"http://{HOST}:{port}/metrics", "--metrics-interval", "2s"]
            start.handrail("sidecar", role, *place, *report)
        urls = [part for role, port in ports.items() for part in (f"--{role}", f"http://{HOST}:{port}")]
        proxy = start.module("vllm.faulty_proxy", "proxy", *urls, "--control", str(control))["proxy"]
        front = ("--role", "edge", "--new-traces", "sampled", "--listen", any_port, "--upstream", f"http://{proxy}")
        _, edge = start.handrail("sidecar", "edge", *front, *report)
        bed = Bed(
            installation=installation,
            folder=folder,
            site=make_plugin_site(folder / "site"),
            ports=ports,
            edge_url=f"http://{edge['proxy']}",
            proxy_url=f"http://{proxy}",
            control=control,
            api=Api(at["api"]),
            collector=collector,
            data=folder / "data",
        )
        try:
            yield bed
        finally:
            for role in tuple(bed.engines):
                bed.stop(role)
