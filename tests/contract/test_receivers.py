"""The contract of an OTLP receiver.

One battery runs for the server and for the tap, over every transport and with every kind of consumer.
"""

from __future__ import annotations

import asyncio
import base64
import gc
import gzip
import json
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import aiohttp
import grpc
import grpc.aio
import pytest
import uvloop
from google.protobuf.json_format import MessageToDict
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter

from doubles.otlp import Faulty, Full, Gated, Keeping, Refusing, span, span_bytes, spans_of, traces, until
from handrail.otlp.decode import JSON, PROTOBUF
from handrail.otlp.messages import SHAPES, Request
from handrail.otlp.receiver.server import OtlpServer
from handrail.otlp.responses import DETAILS_KEY, grpc_refusal, retry_delay_s, status_message
from handrail.otlp.signals import Consumer, Retryable, Signal
from handrail_sidecar.sources.otlp_tap import OtlpTap

LOOPBACK = ("127.0.0.1", 0)
BATCH = traces(*(span(number) for number in range(1, 11)))


def server(consumer: Consumer, **limits: Any) -> OtlpServer:
    return OtlpServer(consumer, grpc=LOOPBACK, http=LOOPBACK, loopback_only=False, **limits)


def tap(consumer: Consumer, **limits: Any) -> OtlpTap:
    return OtlpTap(consumer.consume, {}, partial(server, **limits))


Receiver = OtlpServer | OtlpTap
RECEIVERS: dict[str, Callable[..., Receiver]] = {"server": server, "tap": tap}


@dataclass(frozen=True)
class Reply:
    """An answer in terms that all transports share.

    ``code``: HTTP status or gRPC code.
    """

    code: int | str
    rejected: int = 0
    message: str = ""
    delay_s: float | None = None


@dataclass(frozen=True)
class Transport:
    """One way to send."""

    name: str
    content_type: str | None  # None: gRPC
    gzip: bool

    async def send(self, receiver: Receiver, signal: Signal, request: Request, timeout_s: float = 20.0) -> Reply:
        body = as_json(request) if self.content_type == JSON else request.SerializeToString()
        return await self.send_bytes(receiver, signal, body, timeout_s)

    async def send_bytes(self, receiver: Receiver, signal: Signal, body: bytes, timeout_s: float = 20.0) -> Reply:
        if self.content_type is None:
            return await self._grpc(receiver, signal, body, timeout_s)
        return await post(receiver, f"/v1/{signal.value}", gzip.compress(body) if self.gzip else body, self._headers(), signal)

    def _headers(self) -> dict[str, str]:
        assert self.content_type is not None
        return {"Content-Type": self.content_type, **({"Content-Encoding": "gzip"} if self.gzip else {})}

    async def _grpc(self, receiver: Receiver, signal: Signal, body: bytes, timeout_s: float) -> Reply:
        compression = grpc.Compression.Gzip if self.gzip else grpc.Compression.NoCompression
        async with channel(receiver, compression) as opened:
            try:
                answer = await opened.unary_unary(SHAPES[signal].method, None, None)(body, timeout=timeout_s)
            except grpc.aio.AioRpcError as error:
                trailers: Any = error.trailing_metadata()
                status = next((value for key, value in trailers if key == DETAILS_KEY), b"")
                # Both must be equal: some senders read one, some the other.
                message = (error.details() or "") if status_message(status) in ("", error.details()) else "contradiction"
                return Reply(error.code().name, 0, message, retry_delay_s(status))
        partial = SHAPES[signal].response.FromString(answer).partial_success
        return Reply("OK", getattr(partial, SHAPES[signal].rejected_field), partial.error_message)


TRANSPORTS = [
    Transport("grpc", None, False),
    Transport("grpc-gzip", None, True),
    Transport("http-protobuf", PROTOBUF, False),
    Transport("http-protobuf-gzip", PROTOBUF, True),
    Transport("http-json", JSON, False),
    Transport("http-json-gzip", JSON, True),
]
OVER_GRPC, OVER_HTTP = TRANSPORTS[1], TRANSPORTS[3]
each_transport = pytest.mark.parametrize("transport", TRANSPORTS, ids=lambda transport: transport.name)
each_receiver = pytest.mark.parametrize("make", RECEIVERS.values(), ids=RECEIVERS.keys())


@asynccontextmanager
async def channel(receiver: Receiver, compression: grpc.Compression) -> AsyncIterator[grpc.aio.Channel]:
    assert receiver.grpc_address is not None
    target = f"{receiver.grpc_address[0]}:{receiver.grpc_address[1]}"
    options = [("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(target, options, compression) as opened:
        yield opened


def url(receiver: Receiver, path: str) -> str:
    assert receiver.http_address is not None
    return f"http://{receiver.http_address[0]}:{receiver.http_address[1]}{path}"


async def post(receiver: Receiver, path: str, body: Any, headers: dict[str, str], signal: Signal = Signal.TRACES) -> Reply:
    async with (
        aiohttp.ClientSession() as session,
        session.post(url(receiver, path), data=body, headers=headers) as response,
    ):
        answer = await response.read()
        content_type = response.headers["Content-Type"].partition(";")[0]
        after = response.headers.get("Retry-After")
        delay = float(after) if after is not None else None
        if response.status != 200:
            # A refusal is a google.rpc.Status in the type that was sent, where that is one of OTLP's.
            sent = headers.get("Content-Type", "").partition(";")[0]
            assert content_type == (sent if sent in (PROTOBUF, JSON) and response.status not in (404, 405) else JSON)
            message = status_message(answer) if content_type == PROTOBUF else json.loads(answer)["message"]
            return Reply(response.status, 0, message, delay)
    shape = SHAPES[signal]
    if content_type == PROTOBUF:
        partial = shape.response.FromString(answer).partial_success
        return Reply(200, getattr(partial, shape.rejected_field), partial.error_message)
    found = json.loads(answer).get("partialSuccess", {})
    return Reply(200, int(found.get(shape.rejected_json, "0")), found.get("errorMessage", ""))


def as_json(request: Request) -> bytes:
    """Return OTLP/JSON: protobuf's mapping, with hex ids and numbers for enums."""

    def hexed(node: Any) -> Any:
        if isinstance(node, list):
            return [hexed(item) for item in node]
        if not isinstance(node, dict):
            return node
        ids = {"traceId", "spanId", "parentSpanId"}
        return {key: base64.b64decode(value).hex() if key in ids else hexed(value) for key, value in node.items()}

    return json.dumps(hexed(MessageToDict(request, use_integers_for_enums=True))).encode()


@asynccontextmanager
async def running(make: Callable[..., Receiver], consumer: Consumer, **limits: int) -> AsyncIterator[Receiver]:
    receiver = make(consumer, **limits)
    await receiver.start()
    try:
        yield receiver
    finally:
        await receiver.shutdown(5.0)


def ok(transport: Transport) -> int | str:
    return "OK" if transport.content_type is None else 200


@each_receiver
@each_transport
async def test_accepting(make: Callable[..., Receiver], transport: Transport) -> None:
    kept = Keeping()
    async with running(make, kept) as receiver:
        assert await transport.send(receiver, Signal.TRACES, BATCH) == Reply(ok(transport))
        assert span_bytes(kept.payloads) == span_bytes([BATCH.SerializeToString()])
        assert receiver.stats.items[Signal.TRACES] == 10
        if transport.content_type != JSON and make is server:
            assert kept.payloads == [BATCH.SerializeToString()]


@each_receiver
@each_transport
async def test_a_string_that_is_not_utf8_costs_that_attribute(make: Callable[..., Receiver], transport: Transport) -> None:
    """The test swaps the text in the request's bytes, since no library sends it."""
    kept, whole = Keeping(), span(2, name="whole")
    bad = span(1)
    bad.attributes.add(key="pod").value.string_value = "MUELLER"
    request = traces(bad, whole)
    plain = request.SerializeToString() if transport.content_type != JSON else as_json(request)
    broken = plain.replace(b"MUELLER", b"M\xfcller-"[:7])
    assert len(broken) == len(plain)
    async with running(make, kept) as receiver:
        answer = await transport.send_bytes(receiver, Signal.TRACES, broken)
        assert (answer.code, answer.rejected) == (ok(transport), 0)
        assert answer.message.startswith("1 value repaired")
        assert receiver.stats.items[Signal.TRACES] == 2
        assert receiver.stats.values_repaired == 1
    repaired, untouched = spans_of(kept.payloads)
    assert repaired.attributes[0].value.string_value in ("M?ller-", "M\ufffdller-")
    assert (repaired.name, untouched) == ("work", whole)


@each_receiver
@each_transport
async def test_metrics_and_logs(make: Callable[..., Receiver], transport: Transport) -> None:
    metrics = ExportMetricsServiceRequest()
    metrics.resource_metrics.add().scope_metrics.add().metrics.add(name="m").gauge.data_points.add(as_int=-3)
    logs = ExportLogsServiceRequest()
    logs.resource_logs.add().scope_logs.add().log_records.add(event_name="e", trace_id=b"\1" * 16)
    kept = Keeping()
    async with running(make, kept) as receiver:
        assert await transport.send(receiver, Signal.METRICS, metrics) == Reply(ok(transport))
        assert await transport.send(receiver, Signal.LOGS, logs) == Reply(ok(transport))
        assert [signal for signal, _ in kept.taken] == [Signal.METRICS, Signal.LOGS]
        assert ExportMetricsServiceRequest.FromString(kept.payloads[0]) == metrics
        assert ExportLogsServiceRequest.FromString(kept.payloads[1]) == logs


@each_receiver
@each_transport
async def test_retryable(make: Callable[..., Receiver], transport: Transport) -> None:
    async with running(make, Full(delay_s=2.5)) as receiver:
        reply = await transport.send(receiver, Signal.TRACES, BATCH)
        expected = ("RESOURCE_EXHAUSTED", 2.5) if transport.content_type is None else (429, 3.0)
        assert (reply.code, reply.delay_s, reply.message) == (*expected, "the disk is full")
        assert receiver.stats.requests_refused == 1
        assert receiver.stats.items[Signal.TRACES] == 0


@each_receiver
@each_transport
async def test_rejecting(make: Callable[..., Receiver], transport: Transport) -> None:
    async with running(make, Refusing()) as receiver:
        reply = await transport.send(receiver, Signal.TRACES, BATCH)
        assert reply == Reply("INVALID_ARGUMENT" if transport.content_type is None else 400, 0, "not from you")
        assert receiver.stats.requests_rejected == 1


@each_receiver
@each_transport
async def test_a_consumer_that_breaks_its_contract(
    make: Callable[..., Receiver], transport: Transport, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(make, Faulty()) as receiver:
        reply = await transport.send(receiver, Signal.TRACES, BATCH)
        assert reply.code == ("UNAVAILABLE" if transport.content_type is None else 503)
        assert reply.delay_s == 1.0
        assert reply.message == "internal fault"  # no text of the exception
        assert receiver.stats.consumer_faults == 1
    assert "the consumer of traces failed" in caplog.text


@each_receiver
@each_transport
async def test_mixed(make: Callable[..., Receiver], transport: Transport) -> None:
    kept = Keeping()
    mixed = traces(span(1), span(2, trace_id=bytes(16)), span(3), span(4, span_id=b"\1" * 7))
    async with running(make, kept) as receiver:
        reply = await transport.send(receiver, Signal.TRACES, mixed)
        assert (reply.code, reply.rejected) == (ok(transport), 2)
        assert "trace id is all zero (1)" in reply.message
        assert "span id is not 8 bytes (1)" in reply.message
        assert span_bytes(kept.payloads) == [span(1).SerializeToString(), span(3).SerializeToString()]
        assert receiver.stats.items_rejected == 2


@each_receiver
@each_transport
async def test_only_bad_items_reach_no_consumer(make: Callable[..., Receiver], transport: Transport) -> None:
    kept = Keeping()
    async with running(make, kept) as receiver:
        reply = await transport.send(receiver, Signal.TRACES, traces(span(1, span_id=b"")))
        assert (reply.code, reply.rejected, kept.taken) == (ok(transport), 1, [])


@each_receiver
@each_transport
async def test_slow(make: Callable[..., Receiver], transport: Transport) -> None:
    """A batch is acknowledged after the consumer; the others are not delayed."""
    gated = Gated()
    async with running(make, gated) as receiver:
        first = asyncio.create_task(transport.send(receiver, Signal.TRACES, BATCH))
        await asyncio.wait_for(gated.entered.wait(), 60)
        other = await post(receiver, "/v1/traces", b"\xff", {"Content-Type": PROTOBUF})
        assert other.code == 400
        assert not first.done()
        gated.gate.set()
        assert await first == Reply(ok(transport))


@each_receiver
@each_transport
async def test_the_bytes_in_flight_are_bounded(make: Callable[..., Receiver], transport: Transport) -> None:
    gated = Gated()
    size = len(BATCH.SerializeToString())
    async with running(make, gated, max_in_flight_bytes=size + 10) as receiver:
        # The first alone is larger than the bound in JSON, and passes: a request alone always does.
        first = asyncio.create_task(transport.send(receiver, Signal.TRACES, BATCH))
        await asyncio.wait_for(gated.entered.wait(), 60)
        second = await transport.send(receiver, Signal.TRACES, BATCH)
        assert second.code == ("RESOURCE_EXHAUSTED" if transport.content_type is None else 429)
        assert second.delay_s == 1.0
        gated.gate.set()
        assert (await first).code == ok(transport)
        assert await transport.send(receiver, Signal.TRACES, BATCH) == Reply(ok(transport))
        assert len(gated.taken) == 2


@each_receiver
@each_transport
async def test_a_body_over_the_bound(make: Callable[..., Receiver], transport: Transport) -> None:
    kept = Keeping()
    async with running(make, kept, max_body_bytes=4096) as receiver:
        large = traces(span(1, name="x" * 100_000))  # compresses to nearly nothing: the bound holds after that too
        reply = await transport.send(receiver, Signal.TRACES, large)
        assert reply.code == ("RESOURCE_EXHAUSTED" if transport.content_type is None else 413)
        assert reply.delay_s is None
        assert kept.taken == []


@each_receiver
@each_transport
async def test_shutdown_lets_running_requests_end(make: Callable[..., Receiver], transport: Transport) -> None:
    gated = Gated()
    receiver = make(gated)
    await receiver.start()
    running_request = asyncio.create_task(transport.send(receiver, Signal.TRACES, BATCH))
    await asyncio.wait_for(gated.entered.wait(), 60)
    stopping = asyncio.create_task(receiver.shutdown(20.0))
    await asyncio.sleep(0)
    assert not stopping.done()
    gated.gate.set()
    assert await running_request == Reply(ok(transport))
    await stopping
    assert len(gated.taken) == 1


@each_receiver
async def test_stopping_is_announced_on_an_open_connection(make: Callable[..., Receiver]) -> None:
    gated = Gated()
    receiver = make(gated)
    await receiver.start()
    headers = {"Content-Type": PROTOBUF}
    async with aiohttp.ClientSession() as session:
        async with session.post(url(receiver, "/v1/traces"), data=b"\xff", headers=headers) as response:
            assert response.status == 400  # this answer leaves a connection open
        held = asyncio.create_task(OVER_HTTP.send(receiver, Signal.TRACES, BATCH))
        await asyncio.wait_for(gated.entered.wait(), 60)
        stopping = asyncio.create_task(receiver.shutdown(20.0))
        await asyncio.sleep(0)
        async with session.post(url(receiver, "/v1/traces"), data=b"", headers=headers) as response:
            assert (response.status, response.headers["Retry-After"]) == (503, "1")
        gated.gate.set()
        assert (await held).code == 200
        await stopping


@each_receiver
async def test_a_caller_that_gives_up_does_not_tear_the_consumer(make: Callable[..., Receiver]) -> None:
    gated = Gated()
    async with running(make, gated) as receiver:
        for patience_s in (0.3, 3.0, 30.0):  # until the patience is long enough to reach the consumer
            reply = await OVER_GRPC.send(receiver, Signal.TRACES, BATCH, timeout_s=patience_s)
            assert reply.code == "DEADLINE_EXCEEDED"
            if gated.entered.is_set():
                break
        gated.gate.set()
        await until(lambda: bool(gated.taken))
        assert span_bytes(gated.payloads[:1]) == span_bytes([BATCH.SerializeToString()])
        assert isinstance(grpc_refusal(grpc.StatusCode.DEADLINE_EXCEEDED, "", None), Retryable)


@each_receiver
async def test_a_bomb_over_either_protocol(make: Callable[..., Receiver]) -> None:
    bomb = gzip.compress(bytes(64 << 20))
    kept = Keeping()
    async with running(make, kept, max_body_bytes=1 << 20) as receiver:
        reply = await post(receiver, "/v1/traces", bomb, {"Content-Type": PROTOBUF, "Content-Encoding": "gzip"})
        assert reply.code == 413
        async with channel(receiver, grpc.Compression.Gzip) as opened:
            with pytest.raises(grpc.aio.AioRpcError) as refusal:
                await opened.unary_unary(SHAPES[Signal.TRACES].method, None, None)(bytes(64 << 20), timeout=120)
        assert refusal.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert kept.taken == []


@pytest.mark.parametrize(
    ("method", "path", "headers", "body", "status", "word"),
    [
        ("GET", "/", {}, b"", 200, "OTLP/HTTP receiver"),
        ("GET", "/v1/traces", {}, b"", 405, "accepts only POST"),
        ("PUT", "/v1/logs", {}, b"", 405, "accepts only POST"),
        ("POST", "/", {"Content-Type": JSON}, b"{}", 404, "valid paths: /v1/traces, /v1/metrics, /v1/logs"),
        ("POST", "/v1/trace", {"Content-Type": JSON}, b"{}", 404, "valid paths"),
        ("POST", "/v1/traces/", {"Content-Type": JSON}, b"{}", 404, "valid paths"),
        ("POST", "/v1/traces", {"Content-Type": "text/plain"}, b"x", 415, "application/x-protobuf, application/json"),
        ("POST", "/v1/traces", {"Content-Type": JSON, "Content-Encoding": "br"}, b"x", 415, "gzip"),
        ("POST", "/v1/traces", {"Content-Type": JSON, "Content-Encoding": "gzip"}, b"x", 400, "compressed"),
        ("POST", "/v1/traces", {"Content-Type": JSON}, b"<html>", 400, "not JSON"),
        ("POST", "/v1/traces", {"Content-Type": JSON}, b"{}", 200, "{}"),
    ],
    ids=lambda value: value if isinstance(value, str) and value else None,
)
async def test_http_answers(method: str, path: str, headers: dict[str, str], body: bytes, status: int, word: str) -> None:
    async with (
        running(server, Keeping()) as receiver,
        aiohttp.ClientSession() as session,
        session.request(method, url(receiver, path), data=body, headers=headers) as response,
    ):
        assert response.status == status
        assert word in await response.text()
        assert response.headers.get("Allow") == ("POST" if status == 405 else None)


async def test_a_body_in_chunks_and_one_cut_short() -> None:
    kept = Keeping()
    whole = BATCH.SerializeToString()

    async def chunks() -> AsyncIterator[bytes]:
        for start in range(0, len(whole), 100):
            yield whole[start : start + 100]

    async with running(server, kept, max_body_bytes=len(whole)) as receiver:
        assert (await post(receiver, "/v1/traces", chunks(), {"Content-Type": PROTOBUF})).code == 200
        assert kept.payloads == [whole]
        assert receiver.http_address is not None
        _, writer = await asyncio.open_connection(*receiver.http_address)
        writer.write(
            b"POST /v1/traces HTTP/1.1\r\nHost: x\r\nContent-Type: application/x-protobuf\r\nContent-Length: 50\r\n\r\nabc"
        )
        await writer.drain()
        assert isinstance(receiver, OtlpServer)
        await until(lambda: receiver.in_flight_bytes == 3)
        writer.transport.abort()
        await until(lambda: receiver.in_flight_bytes == 0)
        assert len(kept.taken) == 1


@pytest.mark.parametrize(
    "greeting", [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\r\n\r\n"], ids=["grpc", "tls"]
)
async def test_another_protocol_on_the_http_port_is_counted_not_logged(greeting: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async with running(server, Keeping()) as receiver:
        assert receiver.http_address is not None
        reader, writer = await asyncio.open_connection(*receiver.http_address)
        writer.write(greeting)
        assert (await asyncio.wait_for(reader.read(12), 60)).startswith(b"HTTP/1.")
        writer.transport.abort()
        assert isinstance(receiver, OtlpServer)
        assert receiver.http_gate.malformed == 1
    assert caplog.records == []


async def test_a_body_that_does_not_come() -> None:
    receiver = OtlpServer(Keeping(), http=LOOPBACK, read_timeout_s=0.05, loopback_only=True)
    await receiver.start()
    assert receiver.http_address is not None
    reader, writer = await asyncio.open_connection(*receiver.http_address)
    writer.write(b"POST /v1/traces HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 50\r\n\r\n{")
    answer = await asyncio.wait_for(reader.read(), 60)
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"did not arrive within 0.05 s" in answer
    writer.close()
    await receiver.shutdown()


@pytest.mark.parametrize("protocol", ["grpc", "http"])
async def test_a_port_that_is_taken_is_an_os_error(protocol: str) -> None:
    async with running(server, Keeping()) as first:
        address = first.grpc_address if protocol == "grpc" else first.http_address
        assert address is not None
        second = OtlpServer(
            Keeping(),
            grpc=address if protocol == "grpc" else LOOPBACK,
            http=address if protocol == "http" else LOOPBACK,
            loopback_only=True,
        )
        with pytest.raises(OSError, match=str(address[1])):
            await second.start()


@each_receiver
async def test_nothing_is_left_open(make: Callable[..., Receiver]) -> None:
    async def cycle(times: int) -> tuple[int, int]:
        for _ in range(times):
            async with running(make, Keeping()) as receiver:
                assert (await OVER_HTTP.send(receiver, Signal.TRACES, BATCH)).code == 200
                assert (await OVER_GRPC.send(receiver, Signal.TRACES, BATCH)).code == "OK"
        gc.collect()
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    descriptors, threads = await cycle(5)
    after = await cycle(25)
    assert after[0] <= descriptors + 5
    assert after[1] <= threads + 2


def emit(exporter: SpanExporter, count: int) -> None:
    """Send as an instrumented engine does: a provider, a batch processor, a flush.

    It runs in a thread of its own.
    """
    provider = TracerProvider(resource=Resource.create({"service.name": "engine"}))
    provider.add_span_processor(BatchSpanProcessor(exporter, max_export_batch_size=64, schedule_delay_millis=50))
    tracer = provider.get_tracer("engine")
    for number in range(count):
        with tracer.start_as_current_span(f"s{number}") as current:
            current.set_attribute("number", number)
    assert provider.force_flush(30_000)
    provider.shutdown()


def sdk_exporter(receiver: Receiver, protocol: str) -> SpanExporter:
    if protocol == "grpc":
        assert receiver.grpc_address is not None
        return GrpcExporter(
            endpoint=f"http://127.0.0.1:{receiver.grpc_address[1]}", insecure=True, compression=grpc.Compression.Gzip
        )
    return HttpExporter(endpoint=url(receiver, "/v1/traces"))


@each_receiver
@pytest.mark.parametrize("protocol", ["grpc", "http"])
async def test_opentelemetry_sdk(make: Callable[..., Receiver], protocol: str) -> None:
    """The consumer is full once; the real SDK loses and doubles nothing."""
    flaky = Full(times=1, delay_s=0.2)
    async with running(make, flaky) as receiver:
        await asyncio.to_thread(emit, sdk_exporter(receiver, protocol), 300)
        assert sorted(item.name for item in spans_of(flaky.payloads)) == sorted(f"s{number}" for number in range(300))
        assert receiver.stats.requests_refused == 1


def test_under_uvloop() -> None:
    async def scenario() -> list[Reply]:
        kept = Keeping()
        async with running(server, kept) as receiver:
            return [await transport.send(receiver, Signal.TRACES, BATCH) for transport in TRANSPORTS]

    run: Awaitable[list[Reply]] = scenario()
    loop = uvloop.new_event_loop()
    try:
        assert loop.run_until_complete(run) == [Reply(ok(transport)) for transport in TRANSPORTS]
    finally:
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()
