"""Measure how silent connections to a collector affect its good senders.

Good senders come from other addresses.
By hand: ``PYTHONPATH=tests python -m faults.silence SECONDS [COUNT] [DESCRIPTORS]``.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import aiohttp
import pyarrow.parquet as pq
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from prometheus_client.parser import text_string_to_metric_families

from builders.records import split_request
from faults.connections import flooding, result_of
from handrail.conventions import BATCH_SEQ, SCOPE_PROXY
from handrail.otlp.client import OtlpClient
from handrail.otlp.settings import ClientSettings
from handrail.otlp.signals import Retryable, Signal
from handrail.records import Exchange
from handrail.security.tls import client_identity
from handrail.security.tokens import bearer
from handrail.wire.exchange import resource_of, to_span
from handrail_collector.store.layout import HOUR_NS
from handrail_collector.store.read import StoreReader
from handrail_collector.store.schema import Table
from harness.certs import Authority
from harness.certs import replace as put

STARTS_S: Final = 180.0
TOKEN: Final = "0123456789abcdef0123456789abcdef"
QUICK: Final = ("--flush-interval", "1s", "--decision-engine-wait", "1s", "--decision-settle", "100ms")


@dataclass(slots=True)
class Sender:
    """Exports a batch every ``pause_s`` until ``stopping``.

    It opens new connections after every ``renew`` batches.
    ``took_s``: the time of each acknowledgement in s, with that of a new connection where there was one.
    """

    endpoint: str
    name: str
    settings: dict[str, Any]
    batch: int = 20
    pause_s: float = 0.1
    renew: int = 50
    stopping: bool = False
    retries: int = 0
    acknowledged: set[str] = field(default_factory=set)
    took_s: list[float] = field(default_factory=list)

    async def run(self) -> None:
        client = OtlpClient(ClientSettings(endpoint=self.endpoint, **self.settings))
        numbers = itertools.count()
        try:
            for batch in itertools.count(1):
                if self.stopping:
                    return
                ids, payload = self._made([next(numbers) for _ in range(self.batch)], batch)
                await self._deliver(client, payload)
                self.acknowledged |= ids
                if batch % self.renew == 0:
                    await client.close()
                    client = OtlpClient(ClientSettings(endpoint=self.endpoint, **self.settings))
                await asyncio.sleep(self.pause_s)
        finally:
            await client.close()

    async def _deliver(self, client: OtlpClient, payload: bytes) -> None:
        while True:
            began_s = time.perf_counter()
            try:
                await client.send(Signal.TRACES, payload)
            except Retryable:
                self.retries += 1
                await asyncio.sleep(0.05)
            else:
                self.took_s.append(time.perf_counter() - began_s)
                return

    def _made(self, numbers: Sequence[int], seq: int) -> tuple[set[str], bytes]:
        """Make spans of an edge's proxy in past hours."""
        records = [self._exchange(number) for number in numbers]
        spans = [to_span(record) for record in records]
        request = ExportTraceServiceRequest()
        group = request.resource_spans.add(resource=resource_of(replace(records[0].process, sender=f"sender-{self.name}")))
        scoped = group.scope_spans.add(spans=spans)
        scoped.scope.name = SCOPE_PROXY
        scoped.scope.attributes.add(key=BATCH_SEQ).value.int_value = seq
        return {span.span_id.hex() for span in spans}, request.SerializeToString()

    def _exchange(self, number: int) -> Exchange:
        record = split_request(f"{self.name}-{number}", f"{self.name}-t{number}")["edge"]
        assert isinstance(record, Exchange)
        return replace(record, arrival_unix_ns=time.time_ns() - 2 * HOUR_NS)


@dataclass(slots=True, kw_only=True)
class Collector:
    """A collector's process with TLS, client certificates and a token.

    All listeners have them.
    """

    folder: Path
    ca: Authority
    child: asyncio.subprocess.Process
    addresses: dict[str, str]

    @property
    def alive(self) -> bool:
        return self.child.returncode is None

    @property
    def listeners(self) -> list[tuple[str, int]]:
        places = (self.addresses[name].rpartition(":") for name in ("otlp_grpc", "otlp_http", "api"))
        return [(host, int(port)) for host, _, port in places]

    @property
    def settings(self) -> dict[str, Any]:
        """Return the settings of a client that is let in."""
        mine = self.folder / "mine"
        return {
            "ca_file": self.ca.file,
            "cert_file": mine.with_suffix(".crt"),
            "key_file": mine.with_suffix(".key"),
            "token_file": self.folder / "tokens",
            "timeout_s": 30.0,
        }

    def log(self) -> str:
        return (self.folder / "collector.log").read_text()

    async def get(self, path: str) -> tuple[int, str]:
        """Get a page over a connection of its own."""
        settings = self.settings
        context = client_identity(self.ca.file, settings["cert_file"], settings["key_file"], use="test").value.context
        headers = {"Authorization": bearer(TOKEN)}
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session,
            session.get(f"https://{self.addresses['api']}{path}", ssl=context, headers=headers) as answer,
        ):
            return answer.status, await answer.text()

    async def metrics(self) -> dict[str, float]:
        """Return the metrics by name and labels, as on the page."""
        _, page = await self.get("/metrics")
        samples = (sample for family in text_string_to_metric_families(page) for sample in family.samples)
        return {" ".join((sample.name, *sample.labels.values())): sample.value for sample in samples}

    async def end(self) -> int:
        """Send SIGTERM and return the status once everything is stored."""
        self.child.terminate()
        return await self.child.wait()

    def lost(self, acknowledged: set[str]) -> set[str]:
        """Count the acknowledged spans that the store misses; call after ``end``."""
        store = self.folder / "data" / "store"
        files = [
            file for publish in StoreReader(store).snapshot().publishes for file in publish.files if file.table is Table.SPANS
        ]
        stored = (pq.read_table(store / file.path, columns=["span_id"])["span_id"].to_pylist() for file in files)
        return acknowledged - {span.hex() for spans in stored for span in spans}


@contextlib.asynccontextmanager
async def collector(folder: Path, *flags: str, descriptors: int | None = None) -> AsyncIterator[Collector]:
    """Start a collector, yield it when it is ready, and kill it by its pid at the end.

    ``descriptors``: its limit, soft and hard.
    """
    ca, ready = Authority(folder), folder / "ready.json"
    files = ca.files("server")
    ca.files("mine")
    put(folder / "tokens", TOKEN.encode())
    limit = f"ulimit -Sn {descriptors} && ulimit -Hn {descriptors} && " if descriptors is not None else ""
    command = [sys.executable, "-m", "handrail_cli.main", "collector", "--data", str(folder / "data"), *QUICK, *flags]
    command += ["--otlp-grpc", "127.0.0.1:0", "--otlp-http", "127.0.0.1:0", "--api", "127.0.0.1:0", "--ready-file", str(ready)]
    command += ["--tls-cert-file", str(files.cert), "--tls-key-file", str(files.key), "--tls-client-ca-file", str(ca.file)]
    command += ["--auth-token-file", str(folder / "tokens")]
    log = os.open(folder / "collector.log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    child = await asyncio.create_subprocess_exec("sh", "-c", f'{limit}exec "$@"', "sh", *command, stdout=log, stderr=log)
    os.close(log)
    made = Collector(folder=folder, ca=ca, child=child, addresses={})
    try:
        deadline = time.monotonic() + STARTS_S
        while not ready.exists():
            assert made.alive, made.log()
            assert time.monotonic() < deadline, made.log()
            await asyncio.sleep(0.05)
        made.addresses = json.loads(ready.read_text())["addresses"]
        yield made
    finally:
        if child.returncode is None:
            child.kill()
        await child.wait()


async def beside_silence(
    folder: Path, seconds: float, *, count: int, tls_share: float = 0.5, descriptors: int | None = None, refusals: int = 0
) -> dict[str, Any]:
    """Run good senders over gRPC and HTTP beside ``count`` silent connections.

    The silent connections go to all listeners. Returns what was seen.
    It takes longer when fewer than ``refusals`` connections have been refused at one of the listeners by then.
    """
    async with collector(folder, descriptors=descriptors) as running:
        grpc = Sender(f"grpcs://{running.addresses['otlp_grpc']}", "grpc", running.settings)
        http = Sender(f"https://{running.addresses['otlp_http']}", "http", running.settings)
        sending = [asyncio.create_task(each.run()) for each in (grpc, http)]
        async with flooding(running.listeners, count, tls_share) as child:
            until_s = time.monotonic() + seconds
            ready_statuses: list[int] = []
            while running.alive and not (time.monotonic() >= until_s and await _refuses(running, refusals)):
                await asyncio.sleep(min(5.0, max(0.2, seconds / 4)))
                answered, _ = await running.get("/readyz")
                ready_statuses.append(answered)
            metrics = await running.metrics() if running.alive else {}
            figures = {each.name: _figures(each) for each in (grpc, http)}
            flood = await result_of(child)
        grpc.stopping = http.stopping = True
        done, late = await asyncio.wait(sending, timeout=120)
        for task in late:
            task.cancel()
        for task in done:
            task.result()
        alive = running.alive
        status = await running.end() if alive else running.child.returncode
        acknowledged = grpc.acknowledged | http.acknowledged
        lost = await asyncio.to_thread(running.lost, acknowledged)
        return {
            "alive": alive,
            "exit_status": status,
            "acknowledged_spans": len(acknowledged),
            "lost_spans": len(lost),
            "ready": {str(code): ready_statuses.count(code) for code in set(ready_statuses)},
            "senders": figures,
            "flood": flood,
            "metrics": {name: value for name, value in metrics.items() if "_connections_" in name or "_descriptors_" in name},
            "load": os.getloadavg()[1],
            "log": [line for line in running.log().splitlines() if " INFO " not in line][:20],
        }


async def _refuses(running: Collector, refusals: int) -> bool:
    if not refusals:
        return True
    metrics = await running.metrics()
    return all(
        metrics[f"handrail_connections_refused_total {name} peer"] >= refusals for name in ("otlp_grpc", "otlp_http", "api")
    )


def _figures(sender: Sender) -> dict[str, float]:
    took = sorted(sender.took_s)
    cuts = statistics.quantiles(took, n=1000, method="inclusive") if len(took) > 1 else [0.0] * 999
    return {
        "batches": len(took),
        "retries": sender.retries,
        "p50_ms": cuts[499] * 1e3,
        "p99_ms": cuts[989] * 1e3,
        "p999_ms": cuts[998] * 1e3,
        "most_ms": max(took, default=0.0) * 1e3,
    }


def main(arguments: Sequence[str]) -> None:
    seconds, count = float(arguments[0]), int(arguments[1]) if len(arguments) > 1 else 5000
    descriptors = int(arguments[2]) if len(arguments) > 2 else None
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(asyncio.run(beside_silence(Path(folder), seconds, count=count, descriptors=descriptors)), indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
