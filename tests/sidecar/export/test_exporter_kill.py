"""After kill -9 of a sidecar that spools, what the spool had arrives once.

It has its original sender and number.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from handrail.conventions import BATCH_SEQ
from handrail.otlp.receiver.server import OtlpServer
from handrail.otlp.signals import Retryable, Signal
from handrail.wire.exchange import process_of
from harness.ports import held_port

CHILD = Path(__file__).with_name("spooling_child.py")
TESTS = Path(__file__).parents[2]
ROUND = 1_000_000


class Keeper:
    """A consumer that keeps span numbers by (sender, sequence).

    It accepts one batch and then answers as if it had not.
    """

    def __init__(self) -> None:
        self.batches: dict[tuple[str, int], list[int]] = {}
        self.deliveries = 0

    async def consume(self, signal: Signal, payload: bytes) -> None:
        self.deliveries += 1
        (entry,) = ExportTraceServiceRequest.FromString(payload).resource_spans
        (scope,) = entry.scope_spans
        (seq,) = [a.value.int_value for a in scope.scope.attributes if a.key == BATCH_SEQ]
        numbers = [int.from_bytes(span.span_id, "big") - 1 for span in scope.spans]
        key = (process_of(entry.resource).sender, seq)
        assert self.batches.setdefault(key, numbers) == numbers
        if self.deliveries == 2:  # once: Retry-After counts in whole seconds
            raise Retryable("taken, but the answer says otherwise", 0.001)


@asynccontextmanager
async def spooling(
    folder: Path, port: int, sender: str, first: int, count: int = 0
) -> AsyncIterator[tuple[asyncio.subprocess.Process, asyncio.StreamReader]]:
    arguments = [str(CHILD), str(folder), f"http://127.0.0.1:{port}", sender, str(first), str(count)]
    environment = {**os.environ, "PYTHONPATH": str(TESTS)}
    child = await asyncio.create_subprocess_exec(sys.executable, *arguments, stdout=asyncio.subprocess.PIPE, env=environment)
    assert child.stdout is not None
    try:
        yield child, child.stdout
    finally:
        if child.returncode is None:
            child.send_signal(signal.SIGKILL)
        await child.wait()


async def spooled_until_killed(folder: Path, port: int, sender: str, first: int, lines: int) -> int:
    """Return how many spans the child had spooled before it was killed."""
    async with spooling(folder, port, sender, first) as (_, stream_reader):
        for _ in range(lines):
            last = await asyncio.wait_for(stream_reader.readline(), 60)
        return int(last)


@pytest.mark.parametrize("seed", range(3))
async def test_every_spooled_span_arrives_exactly_once(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    keeper = Keeper()
    with held_port() as port:
        while_down = await spooled_until_killed(tmp_path, port, "a" * 32, 0, draw.randint(1, 40))
        server = OtlpServer(keeper, http=("127.0.0.1", port), loopback_only=True)
        await server.start()
        try:
            while_up = await spooled_until_killed(tmp_path, port, "b" * 32, ROUND, draw.randint(1, 40))
            async with spooling(tmp_path, port, "c" * 32, 2 * ROUND, 50) as (child, stream_reader):
                report = (await asyncio.wait_for(stream_reader.read(), 60)).splitlines()[-1].split()
                assert await child.wait() == 0
        finally:
            await server.shutdown(1)
    assert report == [b"50", b"0"]
    arrived = sorted(number for numbers in keeper.batches.values() for number in numbers)
    assert len(arrived) == len(set(arrived))
    for first, spooled in ((0, while_down), (ROUND, while_up), (2 * ROUND, 50)):
        of_round = [number - first for number in arrived if first <= number < first + ROUND]
        assert of_round == list(range(len(of_round)))
        assert len(of_round) >= spooled
    for sender in ("a" * 32, "b" * 32, "c" * 32):
        seqs = sorted(seq for who, seq in keeper.batches if who == sender)
        assert seqs == list(range(1, len(seqs) + 1))
    assert keeper.deliveries > len(keeper.batches)
