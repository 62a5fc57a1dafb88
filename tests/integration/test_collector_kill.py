"""``kill -9`` of the collector at random moments under load: acknowledged spans lost 0, rows and spans twice 0.

A real collector process, the real OTLP client with its retries, the real store read back afterwards.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from builders import split_request
from handrail.conventions import BATCH_SEQ, SCOPE_PROXY
from handrail.export.spans import resource_of, to_span
from handrail.live.models import UNKNOWN
from handrail.otlp.client import OtlpClient
from handrail.otlp.contract import Retryable, Signal
from handrail.phases import Phase
from handrail.records import Exchange, Role
from handrail_collector.observed import Observed, Seen, Timed
from handrail_collector.store.filter import RequestFilter
from handrail_collector.store.folders import HOUR_NS
from handrail_collector.store.manifest import added_by, observed_by
from handrail_collector.store.read import StoreReader
from handrail_collector.store.schema import Table
from ports import held_port

KILLS = 20
BATCH = 160  # spans: more than the pipeline works on at a stretch
SENDERS = (Role.EDGE, Role.PREFILL, Role.DECODE)
HANGS_S = 180.0  # who waits so long for a step waits for nothing


def requests() -> Iterator[dict[str, Exchange]]:
    """P/D requests without end, as the proxies at edge, P and D see them, of hours that are over: compaction goes on as well."""
    number = 0
    while True:
        base = time.time_ns() - 2 * HOUR_NS
        made = split_request(f"req-{number}", f"t{number}")
        proxies = {n: r for n, r in made.items() if isinstance(r, Exchange)}
        shift = base - proxies["edge"].arrival_unix_ns
        yield {n: replace(r, arrival_unix_ns=r.arrival_unix_ns + shift) for n, r in proxies.items()}
        number += 1


class Load:
    """Sends batches of three senders until told to stop; remembers what was acknowledged."""

    def __init__(self, endpoint: str) -> None:
        self.client = OtlpClient(endpoint, protocol="http/protobuf", timeout_s=5)
        self.acknowledged: set[str] = set()
        self.retries = 0
        self.requests = 0
        self.stopping = False
        self._source = requests()
        self._seq = dict.fromkeys(SENDERS, 0)

    async def run(self) -> None:
        while not self.stopping:
            made = [next(self._source) for _ in range(BATCH)]
            self.requests += len(made)
            await asyncio.gather(
                *(self._send(role, [r[name] for r in made]) for role, name in zip(SENDERS, ("edge", "p", "d"), strict=True))
            )

    async def _send(self, role: Role, records: list[Exchange]) -> None:
        self._seq[role] += 1
        process = replace(records[0].process, sender=role.value * 4)
        spans = [to_span(r) for r in records]
        request = ExportTraceServiceRequest()
        group = request.resource_spans.add(resource=resource_of(process))
        scoped = group.scope_spans.add(spans=spans)
        scoped.scope.name = SCOPE_PROXY
        scoped.scope.attributes.add(key=BATCH_SEQ).value.int_value = self._seq[role]
        while not await self._taken(request.SerializeToString()):
            self.retries += 1
            await asyncio.sleep(0.02)  # the client's own wait between tries
        self.acknowledged.update(s.span_id.hex() for s in spans)

    async def _taken(self, payload: bytes) -> bool:
        try:
            await self.client.send(Signal.TRACES, payload)
        except Retryable:
            return False
        return True


@contextlib.asynccontextmanager
async def collector(data: Path, port: int) -> AsyncIterator[asyncio.subprocess.Process]:
    ready = data / "ready.json"
    ready.unlink(missing_ok=True)
    command = (
        "-m",
        "handrail.cli.main",
        "collector",
        "--data",
        str(data),
        "--otlp-http",
        f"127.0.0.1:{port}",
        "--otlp-grpc",
        "off",
    )
    options = (
        *("--api", "off", "--flush-interval", "200ms", "--decision-engine-wait", "1s", "--decision-settle", "100ms"),
        *("--store-compact-after", "0s", "--store-upkeep-interval", "1s", "--store-grace", "60s"),
    )
    log = os.open(data / "collector.log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    child = await asyncio.create_subprocess_exec(
        sys.executable, *command, *options, "--ready-file", str(ready), stdout=log, stderr=log
    )
    os.close(log)
    try:
        deadline = time.monotonic() + HANGS_S
        while not ready.exists():
            assert child.returncode is None, (data / "collector.log").read_text()[-2000:]
            assert time.monotonic() < deadline, f"the collector did not get ready within {HANGS_S:g} s"
            await asyncio.sleep(0.02)
        assert json.loads(ready.read_text())["pid"] == child.pid
        yield child
    finally:
        if child.returncode is None:
            os.kill(child.pid, signal.SIGKILL)
        await child.wait()


@pytest.mark.timeout(1200)  # 20 starts of a process, and the work of 20 lives
async def test_acknowledged_spans_survive_kill_9_exactly_once(tmp_path: Path) -> None:
    with held_port() as port:
        load = Load(f"http://127.0.0.1:{port}")
        sending = asyncio.create_task(load.run())
        try:
            await _kill_again_and_again(tmp_path, port, load, sending)
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
            await load.client.close()


async def _kill_again_and_again(tmp_path: Path, port: int, load: Load, sending: asyncio.Task[None]) -> None:
    rng = random.Random()
    seed = rng.randrange(2**32)
    rng.seed(seed)
    for _ in range(KILLS):
        async with collector(tmp_path, port):
            seen = len(load.acknowledged)
            until = time.monotonic() + HANGS_S
            while len(load.acknowledged) == seen:  # it works again before the next moment is drawn
                assert not sending.done(), sending.exception()
                assert time.monotonic() < until, f"nothing acknowledged within {HANGS_S:g} s (seed {seed})"
                await asyncio.sleep(0.01)
            await asyncio.sleep(rng.uniform(0, 1.2))  # the random moment
    load.stopping = True
    async with collector(tmp_path, port) as child:
        await sending
        reader = StoreReader(tmp_path / "store")
        until = time.monotonic() + HANGS_S
        while (count := await asyncio.to_thread(reader.count, RequestFilter())) < load.requests:
            assert time.monotonic() < until, f"{count} of {load.requests} rows (seed {seed})"
            await asyncio.sleep(0.2)
        until = time.monotonic() + HANGS_S
        while not await asyncio.to_thread(_compacted, reader):  # a life may be too short for it; this one is long enough
            assert time.monotonic() < until, f"nothing was compacted (seed {seed})"
            await asyncio.sleep(0.2)
        child.terminate()
        await child.wait()
    reader = StoreReader(tmp_path / "store")
    spans = Counter(_span_ids(tmp_path / "store", reader))
    lost = load.acknowledged - set(spans)
    doubled = [span for span, times in spans.items() if times > 1]
    rows = Counter(_row_keys(reader))
    print(
        f"\nkill -9: {KILLS} kills, {len(load.acknowledged)} spans acknowledged, {load.retries} retries, "
        f"{len(lost)} lost, {len(doubled)} spans twice, {sum(rows.values())} rows of {load.requests} requests (seed {seed})"
    )
    assert not lost
    assert not doubled
    assert len(rows) == load.requests
    assert set(rows.values()) == {1}
    _check_counts(reader, load.requests)


def _compacted(reader: StoreReader) -> bool:
    return any("-c0" in file.path for publish in reader.publishes() for file in publish.files)


def _check_counts(reader: StoreReader, requests: int) -> None:
    """What metrics show in the end: each request counted once over all lives, its phases too; one told in two parts twice."""
    publishes = reader.publishes()
    seen = Observed(observed_by(publishes, 0), added_by(publishes, 0))
    whole = seen.durations(Timed.PHASES, 2)[Phase.UNATTRIBUTED.value, UNKNOWN].histogram().count
    assert sum(seen.by_words(Seen.JOINED, 2).values()) == requests
    assert requests <= whole <= requests + seen[Seen.WITHDRAWN_ROWS]


def _span_ids(store: Path, reader: StoreReader) -> list[str]:
    files = [file for publish in reader.publishes() for file in publish.files if file.table is Table.SPANS]
    return [i.hex() for f in files for i in pq.read_table(store / f.path, columns=["span_id"])["span_id"].to_pylist()]


def _row_keys(reader: StoreReader) -> list[str]:
    """The client's id of every row as a reader sees it: the highest version of each."""
    found: list[str] = []
    before = None
    while True:
        rows = reader.requests(RequestFilter(limit=10_000, until_unix_ns=before))
        found.extend(r.client_request_id or "" for r in rows)
        if len(rows) < 10_000:
            return found
        before = min(r.started_unix_ns for r in rows)
