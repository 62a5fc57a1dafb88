"""The OTLP tap: takes what the engine or router exports, and passes it on.

It adds where the data came from. Spans, metrics and log records keep their bytes; only their resource gains what the engine
could not know (wire.md, "Spans that pass through a tap"). The engine gets its acknowledgement when ``take`` returns, so when
the spool has the batch.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from handrail.otlp.decode import MAX_BODY_BYTES
from handrail.otlp.payload import with_resource
from handrail.otlp.receiver.intake import IntakeStats
from handrail.otlp.receiver.server import Address, OtlpServer
from handrail.otlp.signals import Signal
from handrail.runtime.connections import Gate
from handrail.security.tls import ServerTls
from handrail.security.tokens import Authenticator

Take = Callable[[Signal, bytes], Awaitable[None]]
"""Takes over one encoded export request.

Raises ``Retryable`` when it cannot now, ``Rejected`` when it never will.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TapSettings:
    """Where the tap listens and what it knows of the process beside it.

    A port of None is off, 0 is a free one.
    ``resource``: attributes added where absent, by name: role, instance, sender id, host id and host name.
    """

    grpc_host: str = "127.0.0.1"
    grpc_port: int | None = 4317
    http_host: str = "127.0.0.1"
    http_port: int | None = 4318
    resource: Mapping[str, str] = field(default_factory=dict)
    max_body_bytes: int = MAX_BODY_BYTES
    max_in_flight_bytes: int = 128 << 20
    loopback_only: bool = True  # without TLS, and not named in `plaintext`
    tls: ServerTls | None = None
    guard: Authenticator | None = None
    grpc_gate: Gate | None = None
    http_gate: Gate | None = None


class OtlpTap:
    """A source that passes batches on.

    Raises ``ValueError`` for an address that may not be bound, or when both ports are off.
    """

    def __init__(self, settings: TapSettings, take: Take) -> None:
        self._resource = dict(settings.resource)
        self._take = take
        self._server = OtlpServer(
            self,
            grpc=None if settings.grpc_port is None else (settings.grpc_host, settings.grpc_port),
            http=None if settings.http_port is None else (settings.http_host, settings.http_port),
            max_body_bytes=settings.max_body_bytes,
            max_in_flight_bytes=settings.max_in_flight_bytes,
            loopback_only=settings.loopback_only,
            grpc_tls=settings.tls,
            http_tls=settings.tls,
            grpc_guard=settings.guard,
            http_guard=settings.guard,
            grpc_gate=settings.grpc_gate,
            http_gate=settings.http_gate,
        )

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
