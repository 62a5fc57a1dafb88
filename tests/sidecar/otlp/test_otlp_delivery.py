"""Deliver one batch: back-off, honoured delays, stop.

The tests also find the one bad item of a refused batch.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from doubles.otlp import span, span_bytes, spans_of, traces, until
from handrail.otlp.payload import count_items
from handrail.otlp.retry import Backoff, DeliveryStats, RetryingSender, deliver
from handrail.otlp.signals import Accepted, PayloadRejected, Rejected, Retryable, Signal

QUICK = Backoff(initial_s=0.001, max_s=0.004)


@dataclass
class Peer:
    """A peer that answers by script, then accepts everything except spans named bad."""

    script: list[Exception | Accepted] = field(default_factory=list)
    taken: list[bytes] = field(default_factory=list)
    attempts: int = 0

    async def send(self, signal: Signal, payload: bytes) -> Accepted:
        self.attempts += 1
        if self.script:
            answer = self.script.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer
        if any(item.name == "bad" for item in spans_of([payload])):
            raise PayloadRejected("HTTP 400: unmarshal: invalid TraceID length")
        self.taken.append(payload)
        return Accepted()


def batch(*numbers: int, bad: int = 0) -> bytes:
    return traces(*(span(number, "bad" if number == bad else "work") for number in numbers)).SerializeToString()


async def delivered(peer: Peer, payload: bytes, stats: DeliveryStats | None = None) -> Accepted | None:
    stats = stats if stats is not None else DeliveryStats()
    return await deliver(peer, Signal.TRACES, payload, stop=asyncio.Event(), backoff=QUICK, stats=stats)


async def test_retried_until_taken_and_counted() -> None:
    peer, stats = Peer([Retryable("HTTP 503", 0.0), Retryable("refused", 0.0)]), DeliveryStats()
    assert await delivered(peer, batch(1, 2), stats) == Accepted()
    assert peer.taken == [batch(1, 2)]
    assert stats == DeliveryStats(batches_sent=1, items_sent=2, retries=2, up=True, last_error="refused")


async def test_g07_partial_success_is_never_resent() -> None:
    peer, stats = Peer([Accepted(1, "one is bad")]), DeliveryStats()
    assert await delivered(peer, batch(1, 2), stats) == Accepted(1, "one is bad")
    assert (peer.attempts, stats.items_sent, stats.items_rejected) == (1, 1, 1)
    assert stats.last_error == "one is bad"


async def test_g07_a_warning_is_kept_apart() -> None:
    stats = DeliveryStats()
    assert await delivered(Peer([Accepted(0, "old schema")]), batch(1), stats) == Accepted(0, "old schema")
    assert (stats.last_warning, stats.last_error, stats.items_rejected) == ("old schema", "", 0)


@pytest.mark.parametrize("bad", range(1, 8))
async def test_g07_a_refused_batch_loses_the_bad_item_alone(bad: int) -> None:
    peer, stats = Peer(), DeliveryStats()
    fate = await delivered(peer, batch(*range(1, 8), bad=bad), stats)
    assert fate == Accepted(1, "HTTP 400: unmarshal: invalid TraceID length")
    assert span_bytes(peer.taken) == [span(n).SerializeToString() for n in range(1, 8) if n != bad]
    assert (stats.items_sent, stats.items_rejected, stats.batches_sent, stats.batches_rejected) == (6, 1, 1, 0)


async def test_a_wholly_bad_batch_ends() -> None:
    body = traces(*(span(n, "bad") for n in range(1, 1001))).SerializeToString()
    peer, stats = Peer(), DeliveryStats()
    fate = await delivered(peer, body, stats)
    assert fate is not None
    assert fate.rejected == 1000
    assert peer.attempts < 300
    assert (stats.batches_rejected, stats.batches_sent) == (1, 0)


async def test_a_refusal_of_the_sender_is_not_bisected() -> None:
    peer, stats = Peer([Rejected("HTTP 401")]), DeliveryStats()
    assert await delivered(peer, batch(1, 2, 3), stats) == Accepted(3, "HTTP 401")
    assert (peer.attempts, stats.up, stats.items_rejected) == (1, False, 3)


async def test_stop_leaves_the_batch_with_its_owner() -> None:
    peer, stats, stop = Peer([Retryable("HTTP 503", 3600.0)]), DeliveryStats(), asyncio.Event()
    task = asyncio.create_task(deliver(peer, Signal.TRACES, batch(1), stop=stop, backoff=QUICK, stats=stats))
    await until(lambda: stats.last_error == "HTTP 503")
    assert not task.done()  # it waits the hour that the peer requested
    stop.set()
    assert await asyncio.wait_for(task, 60) is None
    assert peer.attempts == 1
    assert await deliver(peer, Signal.TRACES, batch(1), stop=stop, backoff=QUICK, stats=stats) is None
    assert peer.attempts == 1


def test_the_schedule() -> None:
    backoff = Backoff(initial_s=1.0, factor=2.0, max_s=10.0, jitter=0.5, wish_max_s=60.0)
    assert [backoff.wait_s(attempt, 0.0, 0.0) for attempt in (1, 2, 3, 4, 5, 99)] == [1.0, 2.0, 4.0, 8.0, 10.0, 10.0]
    assert backoff.wait_s(1, 30.0, 0.0) == 30.0
    assert backoff.wait_s(1, 1e9, 0.0) == 60.0


@given(attempt=st.integers(1, 10_000), wish=st.floats(0, 1e9), draw=st.floats(0, 1, exclude_max=True))
def test_the_schedule_has_bounds(attempt: int, wish: float, draw: float) -> None:
    backoff = Backoff()
    wait = backoff.wait_s(attempt, wish, draw)
    assert backoff.initial_s * (1 - backoff.jitter) <= wait <= 1.1 * max(backoff.max_s, backoff.wish_max_s)
    assert wait >= min(wish, backoff.wish_max_s)


@pytest.mark.parametrize("concurrency", [1, 3])
async def test_the_retrying_sender_settles_every_batch_once(concurrency: int) -> None:
    async def batches() -> AsyncIterator[tuple[Signal, bytes]]:
        for number in range(1, 21):
            yield Signal.TRACES, batch(number, bad=7)

    peer = Peer([Retryable("HTTP 503", 0.0)] * 5)
    sender = RetryingSender(peer, backoff=QUICK, concurrency=concurrency)
    settled: list[tuple[bytes, Accepted | None]] = []
    await sender.run(batches(), stop=asyncio.Event(), settle=lambda _, payload, fate: settled.append((payload, fate)))
    assert sorted(payload for payload, _ in settled) == sorted(batch(n, bad=7) for n in range(1, 21))
    assert sum(count_items(payload) for payload in peer.taken) == 19
    assert (sender.stats.items_sent, sender.stats.items_rejected, sender.stats.retries) == (19, 1, 5)
    if concurrency == 1:
        assert peer.taken == [batch(n) for n in range(1, 21) if n != 7]
