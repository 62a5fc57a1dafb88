"""The forward sink: a bounded queue and drops counted by cause.

The sampled flag is respected, and the flush has a deadline.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

import builders.replayed
from doubles.otlp import RAW, Full, Gated, Keeping, Refusing, span, spans_of, traces, until
from handrail.conventions import SCOPE_PROXY
from handrail.otlp.receiver.server import OtlpServer
from handrail.otlp.retry import Backoff
from handrail.otlp.settings import ClientSettings
from handrail.otlp.signals import Accepted, Rejected, Retryable, Signal
from handrail_collector.sinks.otlp import ForwardDropReason, ForwardSettings, OtlpForward, without_unsampled
from harness.ports import refusing_port

QUICK = Backoff(initial_s=0.001, max_s=0.01, wish_max_s=0.01)


async def serving(consumer: Keeping) -> tuple[OtlpServer, str]:
    server = OtlpServer(consumer, http=("127.0.0.1", 0), loopback_only=True)
    await server.start()
    assert server.http_address is not None
    return server, f"http://127.0.0.1:{server.http_address[1]}"


def forward_to(endpoint: str, max_queue_bytes: int = 1 << 20) -> OtlpForward:
    return OtlpForward(ForwardSettings(client=ClientSettings(endpoint=endpoint), max_queue_bytes=max_queue_bytes, backoff=QUICK))


def body(*numbers: int, scope: str = "engine", flags: int = 0) -> bytes:
    return traces(*(span(number, flags=flags) for number in numbers), scope=scope).SerializeToString()


async def test_everything_arrives_once_through_a_flaky_peer() -> None:
    flaky = Full(times=3)
    server, endpoint = await serving(flaky)
    forward = forward_to(endpoint)
    await forward.start()
    payloads = [body(number) for number in range(1, 31)]
    assert all(forward.offer(Signal.TRACES, payload) for payload in payloads)
    await forward.shutdown(20.0)
    assert flaky.payloads == payloads
    assert forward.stats.delivery.retries == 3
    assert forward.stats.delivery.items_sent == 30
    assert set(forward.stats.dropped.values()) == {0}
    assert forward.queue_bytes == 0
    await server.shutdown()


async def test_a_full_queue_drops_and_counts_without_blocking() -> None:
    gated = Gated()
    server, endpoint = await serving(gated)
    forward = forward_to(endpoint, max_queue_bytes=3 * len(body(1)))
    await forward.start()
    assert forward.offer(Signal.TRACES, body(1))
    await asyncio.wait_for(gated.entered.wait(), 60)
    # The one on its way still counts: memory is bounded by the setting, not by the setting plus one.
    assert [forward.offer(Signal.TRACES, body(number)) for number in (2, 3, 4)] == [True, True, False]
    assert forward.stats.dropped[ForwardDropReason.QUEUE_FULL] == 1
    gated.gate.set()
    await until(lambda: forward.queue_bytes == 0)
    assert forward.offer(Signal.TRACES, body(5))
    await forward.shutdown(20.0)
    assert gated.payloads == [body(number) for number in (1, 2, 3, 5)]
    await server.shutdown()


async def test_what_is_not_sent_by_the_deadline_is_counted() -> None:
    with refusing_port() as port:
        forward = forward_to(f"http://127.0.0.1:{port}")
        await forward.start()
        for number in range(1, 5):
            forward.offer(Signal.TRACES, body(number, number + 10))
        await until(lambda: forward.stats.delivery.retries > 0)
        await forward.shutdown(0.05)
        assert forward.stats.dropped[ForwardDropReason.SHUTDOWN] == 8
        assert "Connect" in forward.stats.delivery.last_error
        assert not forward.offer(Signal.TRACES, body(9))
        assert forward.stats.dropped[ForwardDropReason.CLOSED] == 1
        await forward.shutdown(0.05)
        assert forward.stats.dropped[ForwardDropReason.SHUTDOWN] == 8


async def test_what_the_peer_refuses_is_counted() -> None:
    server, endpoint = await serving(Refusing())
    forward = forward_to(endpoint)
    await forward.start()
    forward.offer(Signal.TRACES, body(1, 2, 3))
    await forward.shutdown(20.0)
    assert forward.stats.dropped[ForwardDropReason.REJECTED] == 3
    assert "not from you" in forward.stats.delivery.last_error
    await server.shutdown()


async def test_shutdown_without_start() -> None:
    forward = forward_to("http://127.0.0.1:4318")
    assert not forward.offer(Signal.TRACES, body(1))
    await forward.shutdown(1.0)


@pytest.mark.parametrize(
    ("scope", "flags", "forwarded"),
    [
        (SCOPE_PROXY, 1, 2),
        (SCOPE_PROXY, 0x101, 2),
        (SCOPE_PROXY, 0x301, 2),
        (SCOPE_PROXY, 0, 0),
        (SCOPE_PROXY, 0x300, 0),
        (SCOPE_PROXY, 2, 0),
        ("vllm.tracing.otel", 0, 2),
        ("vllm.tracing.otel", 256, 2),
        ("vllm.tracing.otel", 768, 2),
    ],
)
def test_the_sampled_flag_rules_our_own_spans_alone(scope: str, flags: int, forwarded: int) -> None:
    payload = body(1, 2, scope=scope, flags=flags)
    kept, withheld = without_unsampled(payload)
    assert (len(spans_of([kept])), withheld) == (forwarded, 2 - forwarded)
    if not withheld:
        assert kept is payload


def test_a_mixed_batch_loses_its_unsampled_spans() -> None:
    request = traces(span(1, flags=1), span(2, flags=0), scope=SCOPE_PROXY)
    request.MergeFrom(traces(span(3, flags=0), scope="vllm"))
    kept, withheld = without_unsampled(request.SerializeToString())
    assert [item.span_id[-1] for item in spans_of([kept])] == [1, 3]
    assert withheld == 1


@pytest.mark.parametrize("recording", RAW, ids=lambda path: path.name)
def test_recorded_vllm_spans_are_forwarded_whole(recording: Path) -> None:
    payload = builders.replayed.otlp(recording.read_bytes(), ExportTraceServiceRequest)
    assert without_unsampled(payload) == (payload, 0)


async def test_sampling_can_be_off() -> None:
    kept = Keeping()
    server, endpoint = await serving(kept)
    forward = forward_to(endpoint)
    await forward.start()
    forward.offer(Signal.TRACES, body(1, scope=SCOPE_PROXY))
    forward.offer(Signal.TRACES, body(2, scope=SCOPE_PROXY), sampled_only=False)
    await forward.shutdown(20.0)
    assert kept.payloads == [body(2, scope=SCOPE_PROXY)]
    assert forward.stats.withheld == 1
    assert forward.queue_bytes == 0
    await server.shutdown()


class Breaking:
    """A client that refuses one batch as retryable and the next for good."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []

    async def send(self, signal: Signal, payload: bytes) -> Accepted:
        self.sent.append(payload)
        if len(self.sent) == 1:
            raise Retryable("busy", 0.0)
        if len(self.sent) == 3:
            raise Rejected("HTTP 401")
        return Accepted()


async def test_one_lost_batch_does_not_hold_up_the_next() -> None:
    client = Breaking()
    forward = OtlpForward(ForwardSettings(client=ClientSettings(endpoint="unused:4317"), backoff=QUICK), client)
    await forward.start()
    for number in (1, 2, 3):
        forward.offer(Signal.LOGS, body(number))
    await forward.shutdown(20.0)
    assert client.sent == [body(1), body(1), body(2), body(3)]
    assert forward.stats.dropped[ForwardDropReason.REJECTED] == 1


def test_settings_that_cannot_work() -> None:
    settings = ForwardSettings(client=ClientSettings(endpoint="collector:4317", compression="br"), max_queue_bytes=0)
    with pytest.raises(ValueError, match=r"compression 'br'.*max_queue_bytes 0"):
        OtlpForward(settings)
