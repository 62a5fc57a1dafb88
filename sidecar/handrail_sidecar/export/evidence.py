"""Pass facts of logs and samples of metrics pages to the exporter.

The exporter spools them like a tapped batch.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from opentelemetry.proto.resource.v1.resource_pb2 import Resource

from handrail.otlp.signals import Rejected, Retryable, Signal
from handrail.records import EngineSample, LogFact, SchemaReport
from handrail.wire.engine_samples import metrics_request
from handrail.wire.log_events import fact_log, logs_request, report_log

_BATCH: Final = 512


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
