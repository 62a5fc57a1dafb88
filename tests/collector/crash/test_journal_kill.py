"""``kill -9`` of a collector under load.

The journal holds every acknowledged request, and nothing that was never sent.
"""

from __future__ import annotations

import asyncio
import random
import signal
import sys
from pathlib import Path

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span

from handrail.otlp.client import OtlpClient
from handrail.otlp.settings import ClientSettings
from handrail.otlp.signals import Retryable, Signal
from handrail_collector.journal.journal import Journal, JournalSettings

CHILD = Path(__file__).with_name("journal_child.py")
SENDERS = 8


def request(number: int) -> bytes:
    span = Span(trace_id=number.to_bytes(16, "big"), span_id=number.to_bytes(8, "big"), name="x" * (number % 3000))
    scope = ScopeSpans(spans=[span])
    return ExportTraceServiceRequest(resource_spans=[ResourceSpans(scope_spans=[scope])]).SerializeToString()


class Load:
    """Senders that number their requests and note which were acknowledged."""

    def __init__(self) -> None:
        self.sent = 0
        self.acknowledged: set[int] = set()
        self.progress = asyncio.Condition()

    async def run(self, client: OtlpClient) -> None:
        """Send until the collector is gone."""
        while True:
            self.sent += 1
            number = self.sent
            try:
                await client.send(Signal.TRACES, request(number))
            except Retryable:
                return
            async with self.progress:
                self.acknowledged.add(number)
                self.progress.notify_all()

    async def until(self, count: int) -> None:
        async with self.progress:
            await asyncio.wait_for(self.progress.wait_for(lambda: len(self.acknowledged) >= count), 100)


async def run_and_kill(folder: Path, load: Load, count: int) -> None:
    child = await asyncio.create_subprocess_exec(sys.executable, str(CHILD), str(folder), stdout=asyncio.subprocess.PIPE)
    assert child.stdout is not None
    try:
        port = int(await asyncio.wait_for(child.stdout.readline(), 100))
        client = OtlpClient(ClientSettings(endpoint=f"http://127.0.0.1:{port}", compression="none"))
        senders = [asyncio.create_task(load.run(client)) for _ in range(SENDERS)]
        await load.until(len(load.acknowledged) + count)
        child.send_signal(signal.SIGKILL)
        await asyncio.wait_for(asyncio.gather(*senders), 100)
        await client.close()
    finally:
        if child.returncode is None:
            child.send_signal(signal.SIGKILL)
        await child.wait()


async def test_what_was_acknowledged_survives_kill_9(tmp_path: Path) -> None:
    draw, load = random.Random(2), Load()
    for _ in range(4):
        await run_and_kill(tmp_path, load, draw.randint(5, 200))
    journal = Journal(JournalSettings(folder=tmp_path).open_log())
    await journal.start()
    found: list[int] = []
    async for entry in journal.follow(0):
        (resource,) = ExportTraceServiceRequest.FromString(entry.payload).resource_spans
        number = int.from_bytes(resource.scope_spans[0].spans[0].span_id, "big")
        assert entry.payload == request(number)
        found.append(number)
        if entry.next_offset == journal.end:
            break
    await journal.shutdown()
    assert journal.damaged_bytes == 0
    assert len(found) == len(set(found))
    assert load.acknowledged <= set(found) <= set(range(1, load.sent + 1))
