"""A real OpenTelemetry collector on either end.

rotel sends to our receiver, and our client sends to rotel.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter

import builders.replayed
from doubles.otlp import RAW, Full, Keeping, span, span_bytes, spans_of, traces, until
from handrail.otlp.client import OtlpClient
from handrail.otlp.payload import count_items
from handrail.otlp.receiver.server import OtlpServer
from handrail.otlp.retry import Backoff, DeliveryStats, deliver
from handrail.otlp.settings import ClientSettings
from handrail.otlp.signals import Accepted, ReceiverUnavailable, Signal
from handrail_collector.sinks.otlp import ForwardDropReason, ForwardSettings, OtlpForward
from harness.rotel import Rotel, missing, rotel
from harness.skips import MISSING

pytestmark = pytest.mark.skipif(bool(missing()), reason=MISSING + missing())

SPANS = 150


@dataclass
class Down(Keeping):
    """Answers 503 or UNAVAILABLE the first ``times`` times."""

    times: int = 3

    async def consume(self, signal: Signal, payload: bytes) -> None:
        if self.times > 0:
            self.times -= 1
            raise ReceiverUnavailable("restarting", 0.5)
        await Keeping.consume(self, signal, payload)


@dataclass
class Middle(Full):
    """A flaky relay that is full thrice and then sends everything to the next hop."""

    times: int = 3
    delay_s: float = 0.1
    client: OtlpClient | None = None

    async def consume(self, signal: Signal, payload: bytes) -> None:
        await Full.consume(self, signal, payload)
        assert self.client is not None
        await self.client.send(signal, payload)


@asynccontextmanager
async def serving(consumer: Keeping) -> AsyncIterator[OtlpServer]:
    server = OtlpServer(consumer, grpc=("127.0.0.1", 0), http=("127.0.0.1", 0), loopback_only=True)
    await server.start()
    try:
        yield server
    finally:
        await server.shutdown()


def address(server: OtlpServer, protocol: str) -> str:
    bound = server.grpc_address if protocol == "grpc" else server.http_address
    assert bound is not None
    return f"http://127.0.0.1:{bound[1]}"


def emit(exporter: SpanExporter) -> None:
    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(exporter, max_export_batch_size=25, schedule_delay_millis=20))
    tracer = provider.get_tracer("engine")
    for number in range(SPANS):
        with tracer.start_as_current_span(f"s{number}") as current:
            current.set_attribute("number", number)
    assert provider.force_flush(30_000)
    provider.shutdown()


def to_grpc(ports: Rotel) -> SpanExporter:
    return GrpcExporter(endpoint=f"http://127.0.0.1:{ports.grpc_port}", insecure=True)


def to_http(ports: Rotel) -> SpanExporter:
    return HttpExporter(endpoint=f"http://127.0.0.1:{ports.http_port}/v1/traces")


def names(kept: Keeping) -> list[str]:
    return sorted(item.name for item in spans_of(kept.payloads))


EMITTED = sorted(f"s{number}" for number in range(SPANS))


@pytest.mark.parametrize("trouble", ["steady", "down", "full"])
@pytest.mark.parametrize(("exporter", "protocol"), [(to_grpc, "grpc"), (to_http, "http")], ids=["grpc", "http"])
async def test_sdk_to_rotel_to_us(tmp_path: Path, exporter: Callable[[Rotel], SpanExporter], protocol: str, trouble: str) -> None:
    consumers: dict[str, Keeping] = {"steady": Keeping(), "down": Down(), "full": Full(times=3, delay_s=0.5)}
    kept = consumers[trouble]
    async with serving(kept) as server:
        async with rotel(tmp_path, address(server, protocol), protocol) as ports:
            await asyncio.to_thread(emit, exporter(ports))
            await until(lambda: len(spans_of(kept.payloads)) >= SPANS)
        # rotel has stopped: anything that it would send twice is here
        assert names(kept) == EMITTED
        assert server.stats.requests_refused == (0 if trouble == "steady" else 3)


@pytest.mark.parametrize("protocol", ["grpc", "http"])
async def test_us_to_rotel_to_us(tmp_path: Path, protocol: str) -> None:
    """The recorded vLLM spans go through our forward sink, rotel and our receiver.

    All of them arrive once and unchanged.
    """
    kept = Keeping()
    payloads = [builders.replayed.otlp(path.read_bytes(), ExportTraceServiceRequest) for path in RAW]
    expected = sorted(span_bytes(payloads))
    async with serving(kept) as server, rotel(tmp_path, address(server, protocol), protocol) as ports:
        endpoint = f"grpc://127.0.0.1:{ports.grpc_port}" if protocol == "grpc" else f"http://127.0.0.1:{ports.http_port}"
        client = OtlpClient(ClientSettings(endpoint=endpoint))
        assert await client.check() is None
        await client.close()
        forward = OtlpForward(ForwardSettings(client=client.settings))
        await forward.start()
        assert all(forward.offer(Signal.TRACES, payload) for payload in payloads)
        await forward.shutdown(20.0)
        assert forward.stats.dropped == dict.fromkeys(ForwardDropReason, 0)
        await until(lambda: len(spans_of(kept.payloads)) >= len(expected))
    assert sorted(span_bytes(kept.payloads)) == expected


@pytest.mark.parametrize("protocol", ["grpc", "http"])
async def test_a_flaky_middle_loses_and_doubles_nothing(tmp_path: Path, protocol: str) -> None:
    """The path is our sender, a relay that is full thrice, rotel, and our receiver."""
    kept, middle, stats = Keeping(), Middle(), DeliveryStats()
    batches = [
        traces(*(span(number) for number in range(start, start + 10))).SerializeToString() for start in range(1, SPANS, 10)
    ]
    async with (
        serving(kept) as server,
        serving(middle) as relay,
        rotel(tmp_path, address(server, protocol), protocol) as ports,
    ):
        port = ports.grpc_port if protocol == "grpc" else ports.http_port
        middle.client = OtlpClient(ClientSettings(endpoint=f"{protocol}://127.0.0.1:{port}"))
        client = OtlpClient(
            ClientSettings(endpoint=address(relay, protocol), protocol="grpc" if protocol == "grpc" else "http/protobuf")
        )
        stop, backoff = asyncio.Event(), Backoff(initial_s=0.01)
        fates = [await deliver(client, Signal.TRACES, batch, stop=stop, backoff=backoff, stats=stats) for batch in batches]
        await until(lambda: sum(count_items(payload) for payload in kept.payloads) >= SPANS)
        await client.close()
        await middle.client.close()
    assert fates == [Accepted()] * len(batches)
    assert sorted(span_bytes(kept.payloads)) == sorted(span_bytes(batches))
    assert (stats.retries, stats.items_sent) == (3, SPANS)
