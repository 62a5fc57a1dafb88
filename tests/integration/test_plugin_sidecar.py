"""A sidecar process with only the plugin's socket.

It receives recorded datagrams and exports the plugin's records to a collector.
"""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import sys
import urllib.request
from pathlib import Path

import pytest
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

import builders.replayed
from handrail.otlp.receiver.server import OtlpServer
from handrail.otlp.signals import Signal
from handrail.records import EngineFacts, EngineTimes, Iteration, KvFetch, ProcessEvent, Role
from handrail.wire.exchange import process_of
from handrail.wire.plugin import read_plugin_log, read_plugin_span

DATAGRAMS = "handrail_sidecar_plugin_datagrams_total"


class Door:
    """A collector that takes every export and notices the sixth fetch."""

    def __init__(self) -> None:
        self.records: list[object] = []
        self.scopes: set[str] = set()
        self.whole = asyncio.Event()

    async def consume(self, signal: Signal, payload: bytes) -> None:
        if signal is Signal.TRACES:
            for entry in ExportTraceServiceRequest.FromString(payload).resource_spans:
                process = process_of(entry.resource)
                for scope in entry.scope_spans:
                    self.scopes.add(scope.scope.name)
                    self.records += [read_plugin_span(span, process) for span in scope.spans]
        elif signal is Signal.LOGS:
            for logged in ExportLogsServiceRequest.FromString(payload).resource_logs:
                process = process_of(logged.resource)
                for logs in logged.scope_logs:
                    self.scopes.add(logs.scope.name)
                    self.records += [read_plugin_log(log, process) for log in logs.log_records]
        if sum(isinstance(record, KvFetch) and not record.provisional for record in self.records) >= 6:
            self.whole.set()


@pytest.mark.parametrize("moved", [True, False], ids=["of now", "as recorded"])
async def test_recorded_datagrams_reach_the_collector(tmp_path: Path, moved: bool) -> None:
    """Datagrams arrive with times moved to now, and with their recorded times.

    Recorded times are another host's: ahead of this host's clock, or hours behind it.
    """
    door = Door()
    server = OtlpServer(
        door, grpc=None, http=("127.0.0.1", 0), max_body_bytes=1 << 22, max_in_flight_bytes=1 << 24, loopback_only=True
    )
    await server.start()
    assert server.http_address is not None
    path, ready = tmp_path / "engine.sock", tmp_path / "ready.json"
    options = ("--role", "decode", "--instance", "10.0.0.7:8100", "--plugin-socket", str(path), "--ready-file", str(ready))
    command = (sys.executable, "-m", "handrail_cli.main", "sidecar", *options)
    collector = "http://{}:{}".format(*server.http_address)
    child = await asyncio.create_subprocess_exec(*command, "--collector", collector, stderr=asyncio.subprocess.PIPE)
    try:
        while not await asyncio.to_thread(ready.exists):
            assert child.returncode is None, await child.stderr.read() if child.stderr else ""
            await asyncio.wait({asyncio.create_task(child.wait())}, timeout=0.05)
        addresses = json.loads(await asyncio.to_thread(ready.read_text))["addresses"]
        assert addresses["plugin"] == str(path)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            lines = await asyncio.to_thread(_recorded, moved)
            for line in lines:
                sender.sendto(line, str(path))
        await asyncio.wait_for(door.whole.wait(), 60)
        while _samples(page := await asyncio.to_thread(_metrics, addresses["admin"]))[DATAGRAMS] < len(lines):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    finally:
        child.send_signal(signal.SIGTERM)
        await asyncio.wait_for(child.wait(), 60)
        await server.shutdown(5.0)
    assert child.returncode == 0
    assert door.scopes == {"handrail.plugin", "handrail.events"}
    kinds = {type(record) for record in door.records}
    assert {EngineTimes, KvFetch, EngineFacts, Iteration, ProcessEvent} <= kinds
    fetches = [record for record in door.records if isinstance(record, KvFetch)]
    assert all(f.process.role is Role.DECODE and f.process.instance == "10.0.0.7:8100" for f in fetches)
    assert sum(r.decode_tokens for r in door.records if isinstance(r, Iteration) and not r.full) == 6 * 11
    samples = _samples(page)
    for reason in ("future", "old", "wall") if moved else ():
        assert samples[f'handrail_sidecar_plugin_displaced_stamps_total{{reason="{reason}"}}'] == 0
    assert samples[DATAGRAMS] == len(lines)
    assert samples['handrail_sidecar_plugin_unmatched_total{kind="request"}'] == 0
    assert samples["handrail_kv_pinned_bytes"] == 0
    assert samples['handrail_kv_fetches_total{outcome="ok",reason=""}'] == 6
    assert samples['handrail_kv_fetches_total{outcome="failed",reason=""}'] == 0
    assert samples["handrail_kv_fetched_bytes_total"] == 786_432


def _recorded(moved: bool) -> list[bytes]:
    if moved:
        return builders.replayed.plugin("decode")
    return (builders.replayed.RECORDINGS / "plugin/decode.jsonl").read_bytes().splitlines()


def _samples(page: str) -> dict[str, float]:
    found = (line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, value in found}


def _metrics(address: str) -> str:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as response:
        found: str = response.read().decode()
    return found
