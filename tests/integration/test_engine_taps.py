"""A sidecar with only a log file and a metrics page.

It sends what it reads as log records and metrics.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
from aiohttp import web
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from handrail.conventions import BATCH_SEQ
from handrail.otlp.receiver.server import OtlpServer
from handrail.otlp.signals import Signal
from handrail.records import EngineSample, LogFact, LogKind, SchemaReport
from handrail.wire.engine_samples import read_samples
from handrail.wire.exchange import process_of
from handrail.wire.log_events import read_fact, read_report

_PAGE = Path(__file__).parents[1] / "data/recordings/metrics_decode_after_one_failure.txt"
_FAILED = (
    "(EngineCore pid=7) ERROR {at} [s.py:1] Failing 1 request(s) due to KV load failure (failure_policy=fail, "
    "120 tokens affected). Request IDs: {{'cmpl-{rid}-0-00000001'}}\n"
)


@dataclass
class Collected:
    """Everything that a collector would have."""

    batches: list[tuple[Signal, bytes]] = field(default_factory=list)
    came: asyncio.Event = field(default_factory=asyncio.Event)

    async def consume(self, signal: Signal, payload: bytes) -> None:
        self.batches.append((signal, payload))
        self.came.set()

    async def until(self, met: Callable[[], bool]) -> None:
        while not met():
            self.came.clear()
            await self.came.wait()

    @property
    def logs(self) -> list[LogFact | SchemaReport]:
        found: list[LogFact | SchemaReport] = []
        for kind, payload in self.batches:
            if kind is not Signal.LOGS:
                continue
            for entry in ExportLogsServiceRequest.FromString(payload).resource_logs:
                process = process_of(entry.resource)
                for scope in entry.scope_logs:
                    records = [read_fact(log, process) or read_report(log, process) for log in scope.log_records]
                    found += [record for record in records if record is not None]
        return found

    @property
    def facts(self) -> list[LogFact]:
        return [record for record in self.logs if isinstance(record, LogFact)]

    @property
    def reports(self) -> list[SchemaReport]:
        return [record for record in self.logs if isinstance(record, SchemaReport)]

    @property
    def samples(self) -> list[EngineSample]:
        return [
            sample
            for kind, payload in self.batches
            if kind is Signal.METRICS
            for entry in ExportMetricsServiceRequest.FromString(payload).resource_metrics
            for scope in entry.scope_metrics
            for sample in read_samples(scope.metrics, process_of(entry.resource))
        ]

    def sequence(self) -> list[int]:
        found = []
        for kind, payload in self.batches:
            scopes = (
                [s.scope for e in ExportLogsServiceRequest.FromString(payload).resource_logs for s in e.scope_logs]
                if kind is Signal.LOGS
                else [s.scope for e in ExportMetricsServiceRequest.FromString(payload).resource_metrics for s in e.scope_metrics]
            )
            found += [a.value.int_value for scope in scopes for a in scope.attributes if a.key == BATCH_SEQ]
        return found


@contextlib.asynccontextmanager
async def collecting(into: Collected) -> AsyncIterator[str]:
    server = OtlpServer(into, grpc=None, http=("127.0.0.1", 0), loopback_only=True)
    await server.start()
    assert server.http_address is not None
    try:
        yield f"http://127.0.0.1:{server.http_address[1]}"
    finally:
        await server.shutdown(1)


@contextlib.asynccontextmanager
async def engine_page() -> AsyncIterator[str]:
    async def page(_: web.Request) -> web.Response:
        response = web.Response(body=_PAGE.read_bytes(), content_type="text/plain")
        response.enable_compression()
        return response

    app = web.Application()
    app.router.add_get("/metrics", page)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@contextlib.asynccontextmanager
async def sidecar(tmp_path: Path, collector: str, page: str) -> AsyncIterator[dict[str, str]]:
    """Yield the addresses of a sidecar that is ready."""
    ready = tmp_path / "ready.json"
    ready.unlink(missing_ok=True)
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "handrail_cli.main", "sidecar", "--role", "decode", "--collector", collector),
        *("--log-file", str(tmp_path / "engine.log"), "--metrics-url", page, "--metrics-interval", "200ms"),
        *("--spool-dir", str(tmp_path / "spool"), "--ready-file", str(ready)),
    )
    try:
        while not ready.exists():
            assert child.returncode is None
            await asyncio.sleep(0.02)
        yield json.loads(ready.read_text())["addresses"]
    finally:
        child.send_signal(signal.SIGTERM)
        assert await child.wait() == 0


def append(tmp_path: Path, rid: str, at: str = "11-29 10:00:00") -> None:
    with (tmp_path / "engine.log").open("a") as file:
        file.write(_FAILED.format(at=at, rid=rid))


async def test_log_and_metrics_alone(tmp_path: Path) -> None:
    append(tmp_path, "before")
    got = Collected()
    async with collecting(got) as collector, engine_page() as page:
        async with sidecar(tmp_path, collector, page) as addresses:
            append(tmp_path, "one")
            await got.until(lambda: bool(got.facts and len(got.samples) > 1))
            async with aiohttp.ClientSession() as session, session.get(f"http://{addresses['admin']}/metrics") as response:
                exposed = await response.text()
        append(tmp_path, "while-down")
        async with sidecar(tmp_path, collector, page):
            await got.until(lambda: len(got.facts) >= 2 and len(got.reports) >= 2)
    assert [(fact.kind, fact.request_id) for fact in got.facts] == [
        (LogKind.REQUEST_FAILED_BY_KV, "cmpl-one-0-00000001"),
        (LogKind.REQUEST_FAILED_BY_KV, "cmpl-while-down-0-00000001"),
    ]
    assert {fact.process.instance for fact in got.facts} == {page.removeprefix("http://")}
    values = {(value.name, value.label): value.value for value in got.samples[0].values}
    assert values[("requests_finished", "error")] == 1.0
    assert values[("kv_transfer_failures", "nixl")] == 1.0
    assert [report.emitters for report in got.reports] == [("vllm", "vllm-nixl")] * 2
    assert 'handrail_engine_kv_transfer_failures_total{engine="0",transport="nixl"} 1.0' in exposed
    assert 'handrail_sidecar_log_facts_total{kind="request_failed_by_kv"} 1.0' in exposed
    assert 'handrail_sidecar_log_facts_total{kind="stale_read"} 0.0' in exposed
    first = got.sequence()[: got.sequence().index(1, 1)]
    assert first == list(range(1, len(first) + 1)), "one numbering over all signals of a sender"
