"""``kill -9`` of the collector at random moments under load.

Lost acknowledged spans: 0. Rows and spans stored twice: 0.
The collector process and the OTLP client with its retries are real. The store is read back afterwards.
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
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from handrail.metrics.model_labels import UNKNOWN
from handrail.phases import Phase
from handrail_collector.counters import CounterKey, DurableCounters, Timed
from handrail_collector.store.filters import RequestFilter
from handrail_collector.store.manifest import added_by, observed_by
from handrail_collector.store.read import StoreReader
from harness.acknowledged import Load, loading, stored
from harness.ports import held_port

HANGS_S = 180.0  # a step that takes this long hangs


@contextlib.asynccontextmanager
async def collector(data: Path, port: int) -> AsyncIterator[asyncio.subprocess.Process]:
    ready = data / "ready.json"
    ready.unlink(missing_ok=True)
    command = (
        "-m",
        "handrail_cli.main",
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


@pytest.mark.parametrize("kills", [3, pytest.param(20, marks=[pytest.mark.eval, pytest.mark.timeout(1200)])])
async def test_acknowledged_spans_survive_kill_9_exactly_once(tmp_path: Path, kills: int) -> None:
    with held_port() as port:
        load = Load(f"http://127.0.0.1:{port}")
        async with loading(load) as sending:
            await _kill_again_and_again(tmp_path, port, load, sending, kills)


async def _kill_again_and_again(tmp_path: Path, port: int, load: Load, sending: asyncio.Task[None], kills: int) -> None:
    rng = random.Random()
    seed = rng.randrange(2**32)
    rng.seed(seed)
    for _ in range(kills):
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
        while not await asyncio.to_thread(_compacted, reader):  # a life may be too short for it; this one is not
            assert time.monotonic() < until, f"nothing was compacted (seed {seed})"
            await asyncio.sleep(0.2)
        child.terminate()
        await child.wait()
    kept = stored(tmp_path / "store", load)
    print(f"\nkill -9: {kills} kills, {load.retries} retries, {kept.text()} (seed {seed})")
    assert kept.whole, kept.text()
    _check_counts(StoreReader(tmp_path / "store"), load.requests)


def _compacted(reader: StoreReader) -> bool:
    return any("-c0" in file.path for publish in reader.snapshot().publishes for file in publish.files)


def _check_counts(reader: StoreReader, requests: int) -> None:
    """Check the final metrics: each request counts once over all lives.

    Its phases count once too. A request that was reported in two parts counts twice.
    """
    publishes = reader.snapshot().publishes
    seen = DurableCounters(observed_by(publishes, 0), added_by(publishes, 0))
    whole = seen.durations(Timed.PHASES, 2)[Phase.UNATTRIBUTED.value, UNKNOWN].histogram().count
    assert sum(seen.by_words(CounterKey.JOINED, 2).values()) == requests
    assert requests <= whole <= requests + seen[CounterKey.WITHDRAWN_ROWS]
