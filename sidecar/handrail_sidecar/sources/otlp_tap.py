"""The OTLP tap: takes what the engine or router exports, and passes it on.

It adds where the data came from. Spans, metrics and log records keep their bytes; only their resource gains what the engine
could not know (wire.md, "Spans that pass through a tap"). The engine gets its acknowledgement when ``take`` returns, so when
the spool has the batch.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from handrail.otlp.payload import with_resource
from handrail.otlp.receiver.intake import IntakeStats
from handrail.otlp.receiver.server import Address, OtlpServer
from handrail.otlp.signals import Consumer, Signal

Take = Callable[[Signal, bytes], Awaitable[None]]
"""Takes over one encoded export request.

Raises ``Retryable`` when it cannot now, ``Rejected`` when it never will.
"""


class OtlpTap:
    """A source that passes batches on.

    ``resource``: attributes added where absent, by name: role, instance, sender id, host id and host name.
    ``serve``: makes the receiver whose consumer this is. Raises its ``ValueError``.
    """

    def __init__(self, take: Take, resource: Mapping[str, str], serve: Callable[[Consumer], OtlpServer]) -> None:
        self._take = take
        self._resource = dict(resource)
        self._server = serve(self)

    @property
    def grpc_address(self) -> Address | None:
        return self._server.grpc_address

    @property
    def http_address(self) -> Address | None:
        return self._server.http_address

    @property
    def stats(self) -> IntakeStats:
        return self._server.stats

    @property
    def spans_seen(self) -> int:
        """Spans taken over since start.

        Still 0 while requests pass means that the engine sends no spans (case C05).
        """
        return self._server.stats.items[Signal.TRACES]

    async def start(self) -> None:
        """Begin to listen. Raises ``OSError`` when a port cannot be bound."""
        await self._server.start()

    async def shutdown(self, drain_seconds: float) -> None:
        await self._server.shutdown(drain_seconds)

    async def consume(self, signal: Signal, payload: bytes) -> None:
        """Consume what the server received; only the server calls it."""
        await self._take(signal, with_resource(payload, self._resource))
