"""Send one batch until it is settled, with jittered exponential back-off.

A batch that a peer refuses for its content is halved. The source of the batches does not matter: the sidecar's spool and the
collector's forward sink both use it.
Source: OTLP specification 1.x, "OTLP/gRPC Throttling" and "OTLP/HTTP Throttling"; case G07.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Protocol

from handrail.otlp.payload import count_items, halves
from handrail.otlp.signals import Accepted, PayloadRejected, Rejected, Retryable, Signal

_MAX_PARTS = 128  # sends for one refused batch: enough to find a few bad spans among thousands, and a wholly bad batch ends


class Sender(Protocol):
    """Send one payload once: ``OtlpClient``.

    Raises ``Retryable`` or ``Rejected``; ``PayloadRejected`` where the peer may still take a part of the payload.
    """

    async def send(self, signal: Signal, payload: bytes) -> Accepted: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """Waits between attempts.

    The peer's requested delay counts up to ``wish_max_s``, and never makes our own wait shorter.
    """

    initial_s: float = 0.5
    factor: float = 2.0
    max_s: float = 30.0
    jitter: float = 0.5  # random share of the wait, so that the processes of a fleet do not retry in step
    wish_max_s: float = 300.0

    def wait_s(self, attempt: int, wish_s: float, draw: float) -> float:
        """Seconds to wait after failed attempt ``attempt`` (from 1).

        ``draw`` is uniform in [0, 1). ``wish_s``: the delay that the peer requested, 0 for none.
        """
        own = min(self.max_s, self.initial_s * self.factor ** min(attempt - 1, 32))
        own *= 1.0 - self.jitter * draw
        wish = min(wish_s, self.wish_max_s)
        return max(own, wish * (1.0 + 0.1 * self.jitter * draw))


@dataclass(slots=True)
class DeliveryStats:
    """Counts since start.

    ``up``: the last attempt reached a peer that took the batch (None before the first).
    """

    batches_sent: int = 0
    items_sent: int = 0
    items_rejected: int = 0
    batches_rejected: int = 0  # batches of which nothing was taken
    retries: int = 0
    up: bool | None = None
    last_error: str = ""
    last_warning: str = ""


async def deliver(
    client: Sender,
    signal: Signal,
    payload: bytes,
    *,
    stop: asyncio.Event,
    backoff: Backoff,
    stats: DeliveryStats,
    draw: Callable[[], float] = random.random,
) -> Accepted | None:
    """Send ``payload`` until the peer has settled all of it.

    Raises nothing but ``CancelledError``. Returns ``Accepted`` when nothing remains to be sent: ``rejected`` counts the items
    lost for good, ``message`` says why.
    Returns None when ``stop`` was set first: the caller still owns the payload, of which the peer may have taken parts.
    An attempt that runs when ``stop`` is set is awaited (the client's timeout bounds it); cancel the task to cut that short.
    """
    parts = [payload]
    sent = rejected = parts_taken = 0
    messages: dict[str, None] = {}  # an ordered set
    splits = 0
    while parts:
        part = parts.pop()
        outcome = await _settle(client, signal, part, stop=stop, backoff=backoff, stats=stats, draw=draw)
        if outcome is None:
            return None
        if isinstance(outcome, Accepted):
            parts_taken += 1
            sent += max(0, count_items(part) - outcome.rejected)
            rejected += outcome.rejected
            if outcome.message:
                messages[outcome.message] = None
            continue
        split = halves(part) if isinstance(outcome, PayloadRejected) and splits < _MAX_PARTS else None
        if split is not None:
            splits += 1
            parts.extend(reversed(split))
            continue
        rejected += count_items(part)
        messages[outcome.reason] = None
    stats.batches_sent += 1 if parts_taken else 0
    stats.batches_rejected += 0 if parts_taken else 1
    stats.items_sent += sent
    stats.items_rejected += rejected
    message = "; ".join(list(messages)[:3])
    if rejected:
        stats.last_error = message
    elif message:
        stats.last_warning = message
    return Accepted(rejected, message)


async def _settle(
    client: Sender,
    signal: Signal,
    payload: bytes,
    *,
    stop: asyncio.Event,
    backoff: Backoff,
    stats: DeliveryStats,
    draw: Callable[[], float],
) -> Accepted | Rejected | None:
    """Send one payload until it is accepted, refused for good, or (None) stopped."""
    attempt = 0
    while not stop.is_set():
        attempt += 1
        try:
            accepted = await client.send(signal, payload)
        except Rejected as refusal:
            stats.up = isinstance(refusal, PayloadRejected)
            return refusal
        except Retryable as refusal:
            stats.up = False
            stats.last_error = refusal.reason
            if await _stopped_within(stop, backoff.wait_s(attempt, refusal.delay_s, draw())):
                return None
            stats.retries += 1
        else:
            stats.up = True
            return accepted
    return None


async def _stopped_within(stop: asyncio.Event, seconds: float) -> bool:
    try:
        await asyncio.wait_for(stop.wait(), seconds)
    except asyncio.TimeoutError:
        return False
    return True


Settle = Callable[[Signal, bytes, "Accepted | None"], None]
"""Callback for the result of every batch, called once.

The result is None when the batch was not settled before the stop. It never raises.
"""


class RetryingSender:
    """Send each batch by ``deliver``, ``concurrency`` at a time (1 keeps their order)."""

    def __init__(
        self, client: Sender, *, backoff: Backoff | None = None, concurrency: int = 1, stats: DeliveryStats | None = None
    ) -> None:
        self._client = client
        self._backoff = backoff if backoff is not None else Backoff()
        self._concurrency = concurrency
        self.stats = stats if stats is not None else DeliveryStats()

    async def run(self, batches: AsyncIterator[tuple[Signal, bytes]], *, stop: asyncio.Event, settle: Settle) -> None:
        """Send ``batches``; return at their end, or soon after ``stop`` is set.

        ``batches`` must itself end once ``stop`` is set.
        """
        turn = asyncio.Lock()  # an async generator serves one caller at a time

        async def drain() -> None:
            while not stop.is_set():
                async with turn:
                    try:
                        signal, payload = await batches.__anext__()
                    except StopAsyncIteration:
                        return
                fate = await deliver(self._client, signal, payload, stop=stop, backoff=self._backoff, stats=self.stats)
                settle(signal, payload, fate)

        await asyncio.gather(*(drain() for _ in range(self._concurrency)))
