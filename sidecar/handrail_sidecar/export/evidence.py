"""Pass facts, samples of metrics pages and counts of requests to the exporter.

The exporter spools them like a tapped batch.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final

from opentelemetry.proto.resource.v1.resource_pb2 import Resource

from handrail.otlp.signals import Rejected, Retryable, Signal
from handrail.records import EngineSample, LogFact, Outcome, SchemaReport
from handrail.wire.counts import counts_request
from handrail.wire.engine_samples import metrics_request
from handrail.wire.log_events import fact_log, logs_request, report_log

_BATCH: Final = 512
EVERY_S: Final = 10.0  # between two exports of counts


class EvidenceExport:
    """Passes evidence on; ``take`` is ``Exporter.take``.

    Every method returns False when it cannot take over now, and never raises.
    """

    def __init__(self, resource: Resource, take: Callable[[Signal, bytes], Awaitable[None]]) -> None:
        self.rejected = 0
        self._resource = resource
        self._take = take

    async def facts(self, facts: Sequence[LogFact]) -> bool:
        """Take facts of ``sources.log``.

        Some of them may be taken twice; their ids show it.
        """
        for at in range(0, len(facts), _BATCH):
            if not await self._put(
                Signal.LOGS, logs_request(self._resource, [fact_log(fact) for fact in facts[at : at + _BATCH]])
            ):
                return False
        return True

    async def sample(self, record: EngineSample | SchemaReport | LogFact) -> bool:
        """Take a sample of ``sources.metrics``."""
        if isinstance(record, LogFact):
            return await self.facts([record])
        if isinstance(record, SchemaReport):
            return await self._put(Signal.LOGS, logs_request(self._resource, [report_log(record)]))
        return await self._put(Signal.METRICS, metrics_request(self._resource, [record]))

    async def _put(self, signal: Signal, payload: bytes) -> bool:
        try:
            await self._take(signal, payload)
        except Retryable:
            return False
        except Rejected:  # it can never fit
            self.rejected += 1
        return True


class CountsExport:
    """Export the counts at the start, every ten seconds, and at the end.

    ``take`` is ``Exporter.take``. A refused export is left out: the next carries the same counts. ``shutdown`` works without
    ``start`` and twice.
    """

    def __init__(
        self,
        resource: Resource,
        finished: Mapping[Outcome, int],
        take: Callable[[Signal, bytes], Awaitable[None]],
        *,
        every_s: float = EVERY_S,
        now_unix_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self.not_taken = 0
        self._resource = resource
        self._finished = finished
        self._take = take
        self._every_s = every_s
        self._now_unix_ns = now_unix_ns
        self._start_unix_ns = now_unix_ns()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to export. Start it before the proxy, so that its first reading says 0."""
        await self.tell()
        self._task = asyncio.create_task(self._run())

    async def shutdown(self, drain_seconds: float = 0.0) -> None:
        """Export a last time."""
        task, self._task = self._task, None
        if task is None:
            return
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await self.tell()

    async def tell(self) -> None:
        """Export once, now. Never raises."""
        payload = counts_request(self._resource, self._finished, self._start_unix_ns, self._now_unix_ns())
        try:
            await self._take(Signal.METRICS, payload)
        except (Retryable, Rejected):
            self.not_taken += 1

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._every_s)
            await self.tell()
