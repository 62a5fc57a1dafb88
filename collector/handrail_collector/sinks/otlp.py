"""Forward received data to another OTLP endpoint, with retry and a bounded queue.

Examples of endpoints: Tempo, Jaeger, an OpenTelemetry Collector.

Sampling: the collector keeps a row of every request; only forwarding obeys the sampled flag of the trace context.
The flag is read only from spans of Handrail's own scope ``handrail.proxy``: a proxy span whose flags have bit 0 clear is
withheld. An engine's span is never withheld, because SDKs export only what they have sampled. vLLM 0.32
(opentelemetry-sdk 1.45) sends flags of 256 and 768, in which only the has-is-remote bits are set although the span was
sampled (recorded; OTLP's flags allow that).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from enum import Enum

from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from handrail.conventions import SCOPE_PROXY
from handrail.otlp.client import OtlpClient
from handrail.otlp.payload import count_items
from handrail.otlp.retry import Backoff, DeliveryStats, RetryingSender, Sender
from handrail.otlp.settings import ClientSettings
from handrail.otlp.signals import Accepted, Signal

_SAMPLED = 1
_SCOPE_BYTES = SCOPE_PROXY.encode()


class ForwardDropReason(str, Enum):
    """Reason why an item was not forwarded."""

    QUEUE_FULL = "queue_full"
    REJECTED = "rejected"  # the peer rejected it permanently
    SHUTDOWN = "shutdown"  # not delivered before the deadline
    CLOSED = "closed"  # offered before ``start`` or after ``shutdown``


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardSettings:
    """Settings of a forward endpoint.

    ``max_queue_bytes`` bounds what waits and what is being sent, together.
    """

    client: ClientSettings
    max_queue_bytes: int = 64 << 20
    backoff: Backoff = field(default_factory=Backoff)

    def validate(self) -> list[str]:
        problems = self.client.problems()
        if self.max_queue_bytes < 1:
            problems.append(f"max_queue_bytes {self.max_queue_bytes}: must be above 0, e.g. 67108864")
        return problems


@dataclass(slots=True)
class ForwardStats:
    """Counts since start, in spans, metrics and log records.

    ``withheld``: unsampled, so not forwarded on purpose.
    """

    dropped: dict[ForwardDropReason, int] = field(default_factory=lambda: dict.fromkeys(ForwardDropReason, 0))
    withheld: int = 0
    delivery: DeliveryStats = field(default_factory=DeliveryStats)


@dataclass(frozen=True, slots=True)
class _Queued:
    signal: Signal
    payload: bytes
    sampled_only: bool


class OtlpForward:
    """Forward to one peer.

    All methods run on the event loop of ``start``. ``offer`` never blocks and never raises.
    """

    def __init__(self, settings: ForwardSettings, client: Sender | None = None) -> None:
        """Create a forwarder.

        ``client``: the sender; by default it is made from the settings and closed at shutdown. Raises ``ValueError``.
        """
        problems = settings.validate()
        if problems:
            raise ValueError("; ".join(problems))
        self._own_client = OtlpClient(settings.client) if client is None else None
        self._max_queue_bytes = settings.max_queue_bytes
        self.stats = ForwardStats()
        sender: Sender | None = client if client is not None else self._own_client
        assert sender is not None
        self._sending = RetryingSender(sender, backoff=settings.backoff, stats=self.stats.delivery)
        self._queue: deque[_Queued] = deque()
        self._running: _Queued | None = None
        self._bytes = 0
        self._changed = asyncio.Event()
        self._stop = asyncio.Event()
        self._closing = False
        self._worker: asyncio.Task[None] | None = None

    @property
    def queue_bytes(self) -> int:
        """Payload bytes that wait or are being sent."""
        return self._bytes

    async def start(self) -> None:
        self._worker = asyncio.create_task(self._sending.run(self._batches(), stop=self._stop, settle=self._settle))

    def offer(self, signal: Signal, payload: bytes, sampled_only: bool = True) -> bool:
        """Queue one encoded export request; return False when it is dropped.

        A drop is counted. The payload is kept, not copied.
        """
        if self._worker is None or self._closing:
            self.stats.dropped[ForwardDropReason.CLOSED] += count_items(payload)
            return False
        if self._bytes + len(payload) > self._max_queue_bytes:
            self.stats.dropped[ForwardDropReason.QUEUE_FULL] += count_items(payload)
            return False
        self._queue.append(_Queued(signal, payload, sampled_only))
        self._bytes += len(payload)
        self._changed.set()
        return True

    async def shutdown(self, deadline_s: float = 5.0) -> None:
        """Send queued requests for at most ``deadline_s``; drop and count the rest.

        Idempotent; works without ``start``.
        """
        self._closing = True
        self._changed.set()
        worker, self._worker = self._worker, None
        if worker is not None:
            await asyncio.wait({worker}, timeout=deadline_s)
            self._stop.set()
            worker.cancel()
            await asyncio.gather(worker, return_exceptions=True)
        left = [*([self._running] if self._running is not None else []), *self._queue]
        self.stats.dropped[ForwardDropReason.SHUTDOWN] += sum(count_items(queued.payload) for queued in left)
        self._queue.clear()
        self._running = None
        self._bytes = 0
        if self._own_client is not None:
            await self._own_client.close()

    async def _batches(self) -> AsyncIterator[tuple[Signal, bytes]]:
        """Yield what waits, oldest first; end once closing and empty."""
        while True:
            while not self._queue:
                if self._closing:
                    return
                self._changed.clear()
                await self._changed.wait()
            queued = self._queue.popleft()
            payload = queued.payload
            if queued.sampled_only and queued.signal is Signal.TRACES:
                payload, withheld = without_unsampled(payload)
                self.stats.withheld += withheld
            if not payload:
                self._bytes -= len(queued.payload)
                continue
            self._running = queued
            yield queued.signal, payload

    def _settle(self, signal: Signal, payload: bytes, fate: Accepted | None) -> None:
        queued = self._running
        if queued is None or fate is None:
            return  # not settled: ``shutdown`` counts it
        self._running = None
        self._bytes -= len(queued.payload)
        self.stats.dropped[ForwardDropReason.REJECTED] += fate.rejected


def without_unsampled(payload: bytes) -> tuple[bytes, int]:
    """Remove unsampled proxy spans from ``payload`` and return their number.

    ``payload``: traces. Spans of ``handrail.proxy`` whose sampled flag is clear are removed.
    The bytes are unchanged when nothing is removed, and empty when everything is.
    """
    if _SCOPE_BYTES not in payload:  # true for nearly every engine batch; saves the parse
        return payload, 0
    try:
        request = ExportTraceServiceRequest.FromString(payload)
    except DecodeError:  # damage on disk: the content is unknown
        return b"", 0
    withheld = kept = 0
    for entry in request.resource_spans:
        for scope in entry.scope_spans:
            if scope.scope.name == SCOPE_PROXY:
                sampled = [span for span in scope.spans if span.flags & _SAMPLED]
                withheld += len(scope.spans) - len(sampled)
                if len(sampled) < len(scope.spans):
                    del scope.spans[:]
                    scope.spans.extend(sampled)
            kept += len(scope.spans)
    if not withheld:
        return payload, 0
    return (request.SerializeToString() if kept else b""), withheld
