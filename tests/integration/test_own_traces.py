"""Whole processes report about themselves to a backend.

A collector also reports to itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from prometheus_client.parser import text_string_to_metric_families

from doubles.otlp import Keeping
from handrail import conventions as names
from handrail.otlp.receiver.server import OtlpServer
from handrail.otlp.signals import Signal
from handrail.otlp.values import attributes_of
from handrail_collector.store.layout import SUFFIX
from harness.ports import held_port

SIDECAR = (
    *("sidecar", "--role", "decode", "--instance", "127.0.0.1:8200", "--otlp-http", "127.0.0.1:0"),
    *("--links-sample", "off", "--gpu-sample", "off"),
)


@contextlib.asynccontextmanager
async def process(folder: Path, *arguments: str) -> AsyncIterator[dict[str, str]]:
    """Run ``handrail`` with these arguments, and yield its addresses.

    Stops it cleanly afterwards.
    """
    ready = folder / "ready.json"
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "handrail_cli.main", *arguments, "--ready-file", str(ready)), cwd=folder
    )
    try:
        while not ready.exists():
            assert child.returncode is None
            await asyncio.sleep(0.02)
        yield json.loads(ready.read_text())["addresses"]
    finally:
        child.send_signal(signal.SIGTERM)
        assert await child.wait() == 0


@contextlib.asynccontextmanager
async def backend() -> AsyncIterator[tuple[Keeping, str]]:
    kept = Keeping()
    server = OtlpServer(kept, http=("127.0.0.1", 0), loopback_only=True)
    await server.start()
    assert server.http_address is not None
    try:
        yield kept, f"http://127.0.0.1:{server.http_address[1]}"
    finally:
        await server.shutdown()


async def value(address: str, name: str, **labels: str) -> float:
    async with aiohttp.ClientSession() as session, session.get(f"http://{address}/metrics") as response:
        families = text_string_to_metric_families(await response.text())
        (found,) = [each.value for family in families for each in family.samples if (each.name, each.labels) == (name, labels)]
        return found


def parts(kept: Keeping, name: str) -> dict[str, set[str]]:
    """Return the parts in spans of this name, by service."""
    found: dict[str, set[str]] = {}
    for kind, payload in kept.taken:
        if kind is Signal.TRACES:
            for entry in ExportTraceServiceRequest.FromString(payload).resource_spans:
                service = str(attributes_of(entry.resource.attributes)[names.SERVICE_NAME])
                for scope in entry.scope_spans:
                    found.setdefault(service, set()).update(
                        str(attributes_of(span.attributes)[names.OWN_PART]) for span in scope.spans if span.name == name
                    )
    return found


async def test_both_processes_send_their_traces_until_their_end(tmp_path: Path) -> None:
    folders = {kind: tmp_path / kind for kind in ("collector", "sidecar")}
    for folder in folders.values():
        folder.mkdir()
    async with backend() as (kept, url):
        own = ("--own-traces-endpoint", url, "--otlp-metrics-endpoint", url)
        listening = ("--otlp-grpc", "none", "--otlp-http", "127.0.0.1:0", "--api", "127.0.0.1:0")
        async with process(folders["collector"], "collector", *listening, *own) as addresses:
            collector = f"http://{addresses['otlp_http']}"
            async with process(folders["sidecar"], *SIDECAR, "--collector", collector, *own):
                pass
        for name in (names.OWN_PART_START, names.OWN_PART_STOP):
            found = parts(kept, name)
            assert {"pipeline", "receivers", "api"} <= found["handrail-collector"]
            assert {"exporter", "tap"} <= found["handrail-sidecar"]
        metrics = [ExportMetricsServiceRequest.FromString(payload) for kind, payload in kept.taken if kind is Signal.METRICS]
    sent = {metric.name for request in metrics for entry in request.resource_metrics for metric in entry.scope_metrics[0].metrics}
    assert {"handrail.collector_publishes", "handrail.sidecar_export_batches", "handrail.phase_seconds"} <= sent


async def test_a_collector_that_is_its_own_backend_keeps_its_traces_out_of_its_store(tmp_path: Path) -> None:
    with held_port() as port:
        own = ("--own-traces-endpoint", f"http://127.0.0.1:{port}", "--own-traces-sample-ratio", "1")
        listening = ("--otlp-grpc", "none", "--otlp-http", f"127.0.0.1:{port}", "--api", "127.0.0.1:0")
        async with process(tmp_path, "collector", *listening, *own, "--flush-interval", "50ms") as addresses:
            while not await value(addresses["api"], "handrail_collector_received_own_spans_total"):  # noqa: ASYNC110 - of another process
                await asyncio.sleep(0.05)
            assert await value(addresses["api"], "handrail_collector_spans_total") == 0
            assert await value(addresses["api"], "handrail_collector_own_spans_total", outcome="failed") == 0
    assert list((tmp_path / "handrail-data" / "store").rglob(f"*{SUFFIX}")) == []


@pytest.mark.parametrize("scheme", ["grpc", "http"])
async def test_a_backend_that_never_answers_keeps_no_process_from_its_end(tmp_path: Path, scheme: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"{scheme}://127.0.0.1:{silent.getsockname()[1]}"
        own = ("--own-traces-endpoint", url, "--otlp-metrics-endpoint", url, "--drain", "200ms")
        async with process(tmp_path, *SIDECAR, *own, "--admin", "127.0.0.1:0") as addresses:
            assert await value(addresses["admin"], "handrail_sidecar_own_spans_total", outcome="dropped") == 0
