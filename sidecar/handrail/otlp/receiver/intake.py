"""Common part of the gRPC and the HTTP receiver.

It holds the bound on bytes in flight, the decoding, the consumer and the counters.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from handrail.otlp.decode import IDENTITY, PROTOBUF, Received, Unparsed, receive
from handrail.otlp.signals import Accepted, Consumer, ReceiverUnavailable, Rejected, Retryable, Signal

_LOG = logging.getLogger(__name__)
# Above these sizes a body would hold the event loop for about 10 ms: JSON or compressed, and plain protobuf.
_HEAVY_BYTES: Final = 32 << 10
_LIGHT_BYTES: Final = 1 << 20
_OFF_LOOP_AT_ONCE: Final = 2

REPAIRED: Final = "Repaired values of senders: text that is not UTF-8, numbers out of range"
"""Meaning of ``IntakeStats.values_repaired``, for help texts."""


@dataclass(slots=True)
class IntakeStats:
    """Counts since start.

    ``items``: spans, metrics and log records that the consumer took over.
    """

    requests: dict[Signal, int] = field(default_factory=lambda: dict.fromkeys(Signal, 0))
    items: dict[Signal, int] = field(default_factory=lambda: dict.fromkeys(Signal, 0))
    payload_bytes: int = 0
    values_repaired: int = 0  # text that is no UTF-8, numbers out of range: each would have cost its request
    items_rejected: int = 0  # dropped one by one (partial success)
    requests_rejected: int = 0  # refused for good
    requests_refused: int = 0  # refused for now: full or stopping
    consumer_faults: int = 0  # exceptions that the contract does not allow


class Budget:
    """Bytes that may be in flight at once. One owner: the event loop."""

    def __init__(self, limit_bytes: int, retry_delay_s: float) -> None:
        self._limit_bytes = limit_bytes
        self._retry_delay_s = retry_delay_s
        self.used_bytes = 0

    def take(self, size: int) -> None:
        """Take ``size`` bytes; raise ``Retryable`` when they do not fit.

        A request alone always fits: its own bound is the body's.
        """
        if self.used_bytes and self.used_bytes + size > self._limit_bytes:
            raise Retryable(
                f"{self.used_bytes} bytes are in progress; at most {self._limit_bytes} are allowed", self._retry_delay_s
            )
        self.used_bytes += size

    def give(self, size: int) -> None:
        self.used_bytes -= size


class Reservation:
    """One request's share of the budget.

    It may grow while the body arrives and when it is decompressed.
    """

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._held_bytes = 0

    def hold(self, total_bytes: int) -> None:
        """Hold ``total_bytes`` in all. Raises ``Retryable``."""
        more = total_bytes - self._held_bytes
        if more <= 0:
            return
        # The bytes that this request holds already must not count against it: alone it always fits.
        self._budget.give(self._held_bytes)
        try:
            self._budget.take(total_bytes)
        except Retryable:
            self._budget.used_bytes += self._held_bytes
            raise
        self._held_bytes = total_bytes

    def release(self) -> None:
        self._budget.give(self._held_bytes)
        self._held_bytes = 0


class Intake:
    """Decode requests and hand them to the consumer.

    Returns ``Accepted``.     Raises ``Retryable`` or ``Rejected``, never anything else.
    """

    def __init__(self, consumer: Consumer, *, max_body_bytes: int, max_in_flight_bytes: int, retry_delay_s: float) -> None:
        self._consumer = consumer
        self.max_body_bytes = max_body_bytes
        self._budget = Budget(max_in_flight_bytes, retry_delay_s)
        self._retry_delay_s = retry_delay_s
        self._off_loop = asyncio.Semaphore(_OFF_LOOP_AT_ONCE)
        self._open_requests = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self.stopping = False
        self.stats = IntakeStats()

    @property
    def in_flight_bytes(self) -> int:
        return self._budget.used_bytes

    @contextmanager
    def reservation(self) -> Iterator[Reservation]:
        """Open one request, and count the kind of its refusal, if any."""
        reserved = Reservation(self._budget)
        try:
            if self.stopping:
                raise ReceiverUnavailable("stopping", self._retry_delay_s)
            self._open_requests += 1
            self._idle.clear()
            try:
                yield reserved
            finally:
                self._open_requests -= 1
                if not self._open_requests:
                    self._idle.set()
        except Retryable:
            self.stats.requests_refused += 1
            raise
        except Rejected:
            self.stats.requests_rejected += 1
            raise
        finally:
            reserved.release()

    async def drained(self, timeout_s: float) -> bool:
        """Wait until no request is open; False when ``timeout_s`` passed first."""
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except asyncio.TimeoutError:
            return False
        return True

    async def take(
        self, signal: Signal, body: bytes, reserved: Reservation, content_type: str = PROTOBUF, encoding: str = ""
    ) -> Accepted:
        """Decode ``body`` and hand it to the consumer; return once it has taken it."""
        reserved.hold(len(body))
        received = await self._decoded(signal, body, content_type, encoding)
        reserved.hold(max(len(body), len(received.payload)))
        if received.items or not received.rejected:
            await self._consumed(signal, received.payload)
        stats = self.stats
        stats.requests[signal] += 1
        stats.items[signal] += received.items
        stats.payload_bytes += len(received.payload)
        stats.items_rejected += received.rejected
        if received.repaired:
            if not stats.values_repaired:
                _LOG.warning("a sender of %s: %s; further ones are only counted", signal.value, received.message)
            stats.values_repaired += received.repaired
        return Accepted(received.rejected, received.message)

    async def _decoded(self, signal: Signal, body: bytes, content_type: str, encoding: str) -> Received:
        heavy = encoding.strip().lower() not in IDENTITY or not content_type.startswith(PROTOBUF)
        if len(body) <= (_HEAVY_BYTES if heavy else _LIGHT_BYTES):
            try:
                return receive(signal, body, content_type, encoding, self.max_body_bytes, repair=False)
            except Unparsed:
                pass  # to repair it takes longer
        async with self._off_loop:  # also bounds the bytes decompressed at once, before the budget knows its size
            return await asyncio.to_thread(receive, signal, body, content_type, encoding, self.max_body_bytes)

    async def _consumed(self, signal: Signal, payload: bytes) -> None:
        try:
            await self._consumer.consume(signal, payload)
        except (Retryable, Rejected):
            raise
        except Exception:
            # The contract forbids it, so it is our bug: the sender keeps its data and tries again.
            self.stats.consumer_faults += 1
            _LOG.exception("the consumer of %s failed", signal.value)
            raise ReceiverUnavailable("internal fault", self._retry_delay_s) from None
