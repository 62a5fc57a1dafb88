"""Measure how many spans the collector accepts and journals.

Rates are per second and per core. The collector calls ``fdatasync`` before each acknowledgement.
First the journal runs alone in this process. Then receiver and journal run in their own process with this process as client.
The client sends prepared requests over 32 connections; for gRPC it has 32 calls at a time over 8 connections.
Client and server share the machine's cores, so compare the spans per CPU second of the server.
gRPC is measured with and without Handrail's front in turns, which gives the cost of the front.
By hand: ``python -m tests.bench.bench_ingest``.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import grpc.aio
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from handrail.otlp.decode import MAX_BODY_BYTES
from handrail.otlp.messages import SHAPES
from handrail.otlp.receiver.grpc_receiver import handlers
from handrail.otlp.receiver.intake import Intake
from handrail.otlp.receiver.server import DEFAULT_IN_FLIGHT_BYTES, OtlpServer
from handrail.otlp.signals import Signal
from handrail_collector.journal.journal import Journal, JournalSettings

SPANS = 512  # spans in a request
SPAN_BYTES = 522  # bytes: the mean of vLLM's and the router's spans
SENDERS = 32
SECONDS = 5.0
DISK_SECONDS = 1.5
BUDGET = 400_000
TURNS = 3
CHANNELS = 8
HTTP, GRPC, GRPC_ALONE = "http", "grpc", "grpc-alone"
_RELEASE_S = 0.2


def run() -> list[dict[str, Any]]:
    """Return every row of this benchmark.

    Takes about 15 seconds and at most 4 GiB of disk meanwhile.
    """
    requests = [_request(number) for number in range(16)]
    with tempfile.TemporaryDirectory(dir=os.environ.get("HANDRAIL_BENCH_DIR")) as folder:
        alone = _with_uvloop(_journal_alone(Path(folder) / "alone", requests))
        served = _served(Path(folder) / "served", requests, HTTP)
        fronted, direct = _in_turns(Path(folder), requests)
        disk = _disk_bytes_per_second(Path(folder) / "disk", served["bytes"] / served["syncs"])
    return [
        _row("disk_write_and_sync_in_groups_of_that_size", disk / SPAN_BYTES, "spans/s"),
        _row("collector_journal_spans_per_second", alone["spans"] / alone["wall_s"], "spans/s", BUDGET),
        _row("collector_journal_spans_per_core_second", alone["spans"] / alone["cpu_s"], "spans/CPU s", BUDGET),
        _row("collector_ingest_http_spans_per_second", served["spans"] / served["wall_s"], "spans/s", BUDGET),
        _row("collector_ingest_http_spans_per_core_second", served["spans"] / served["cpu_s"], "spans/CPU s", BUDGET),
        _row("collector_ingest_http_cores", served["cpu_s"] / served["wall_s"], "cores"),
        _row("collector_ingest_grpc_spans_per_second", fronted["spans"] / fronted["wall_s"], "spans/s"),
        _row("collector_ingest_grpc_spans_per_core_second", _per_core(fronted), "spans/CPU s"),
        _row("collector_ingest_grpc_front_over_none_per_second", _per_second(fronted) / _per_second(direct), "ratio"),
        _row("collector_ingest_grpc_front_over_none_per_core_second", _per_core(fronted) / _per_core(direct), "ratio"),
        _row("collector_journal_requests_per_sync", served["records"] / served["syncs"], "requests"),
        _row("collector_journal_write_and_sync", served["sync_s"] / served["syncs"] * 1000, "ms"),
        _row("collector_journal_bytes_per_span", served["bytes"] / served["spans"], "bytes"),
    ]


def _request(number: int) -> bytes:
    """Build an export request of 512 spans of about 522 bytes, as an engine sends it."""
    request = ExportTraceServiceRequest()
    entry = request.resource_spans.add()
    entry.resource.attributes.add(key="service.name").value.string_value = "vllm"
    scope = entry.scope_spans.add()
    scope.scope.name = "vllm.llm_engine"
    for index in range(SPANS):
        scope.spans.append(_span(number * SPANS + index + 1))
    return request.SerializeToString()


def _span(number: int) -> Span:
    span = Span(
        trace_id=number.to_bytes(16, "big"),
        span_id=number.to_bytes(8, "big"),
        parent_span_id=number.to_bytes(8, "little"),
        name="llm_request",
        kind=Span.SPAN_KIND_SERVER,
        start_time_unix_nano=1_800_000_000_000_000_000 + number,
        end_time_unix_nano=1_800_000_000_400_000_000 + number,
    )
    for part in ("time_in_queue", "time_to_first_token", "e2e", "time_in_model_prefill", "time_in_model_decode"):
        span.attributes.add(key=f"gen_ai.latency.{part}").value.double_value = number * 1e-6
    for part in ("prompt_tokens", "completion_tokens"):
        span.attributes.add(key=f"gen_ai.usage.{part}").value.int_value = 100 + number % 900
    request_id = span.attributes.add(key="gen_ai.request.id").value
    request_id.string_value = f"chatcmpl-{number:032x}"
    request_id.string_value += "-" * (SPAN_BYTES - span.ByteSize() - 1)
    return span


async def _journal_alone(folder: Path, requests: list[bytes]) -> dict[str, float]:
    journal = Journal(JournalSettings(folder=folder).open_log())
    await journal.start()
    stop_at = time.perf_counter() + SECONDS

    async def feed(first: int) -> None:
        index = first
        while time.perf_counter() < stop_at:
            await journal.consume(Signal.TRACES, requests[index % len(requests)])
            index += SENDERS

    releasing = asyncio.create_task(_release(journal))
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    await asyncio.gather(*(feed(first) for first in range(SENDERS)))
    wall_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
    releasing.cancel()
    await journal.shutdown()
    return {"spans": journal.stats.appended_records * SPANS, "wall_s": wall_s, "cpu_s": cpu_s}


def _in_turns(folder: Path, requests: list[bytes]) -> tuple[dict[str, float], dict[str, float]]:
    """Measure gRPC with and without the front in turns, and sum all turns.

    Other work on the machine then falls on both alike.
    """
    sums: tuple[dict[str, float], dict[str, float]] = ({}, {})
    for turn in range(TURNS):
        for total, way in zip(sums, (GRPC, GRPC_ALONE), strict=True):
            for name, value in _served(folder / f"{way}-{turn}", requests, way).items():
                total[name] = total.get(name, 0.0) + value
    return sums


def _per_second(figures: dict[str, float]) -> float:
    return figures["spans"] / figures["wall_s"]


def _per_core(figures: dict[str, float]) -> float:
    return figures["spans"] / figures["cpu_s"]


def _served(folder: Path, requests: list[bytes], way: str) -> dict[str, float]:
    arguments = [sys.executable, "-m", "tests.bench.bench_ingest", str(folder), way]
    server = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert server.stdin is not None
    assert server.stdout is not None
    try:
        port = int(server.stdout.readline())
        accepted = _with_uvloop(_post(port, requests) if way == HTTP else _call(port, requests))
        server.stdin.close()
        figures: dict[str, float] = json.loads(server.stdout.readline())
        server.wait(30)
    finally:
        server.kill()
        server.wait()
        server.stdout.close()
    assert figures["records"] * SPANS == accepted["spans"]
    return {**figures, **accepted}


def _disk_bytes_per_second(path: Path, group_bytes: float) -> float:
    """Measure how fast this disk does nothing but write and ``fdatasync``.

    This is the upper limit of every figure above.
    """
    group = os.urandom(int(group_bytes))
    fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    started, written = time.perf_counter(), 0
    try:
        while (took_s := time.perf_counter() - started) < DISK_SECONDS:
            written += os.write(fd, group)
            os.fdatasync(fd)
    finally:
        os.close(fd)
    return written / took_s


async def _post(port: int, requests: list[bytes]) -> dict[str, float]:
    head = b"POST /v1/traces HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/x-protobuf\r\nContent-Length: %d\r\n\r\n"
    wire = [head % len(request) + request for request in requests]
    stop_at = time.perf_counter() + SECONDS

    async def feed(first: int) -> int:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        sent = 0
        while time.perf_counter() < stop_at:
            writer.write(wire[(first + sent) % len(wire)])
            answer = await reader.readuntil(b"\r\n\r\n")
            assert answer.startswith(b"HTTP/1.1 200"), answer
            length = int(answer.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])
            await reader.readexactly(length)
            sent += 1
        writer.close()
        await writer.wait_closed()
        return sent

    wall_s = time.perf_counter()
    counts = await asyncio.gather(*(feed(first) for first in range(SENDERS)))
    return {"spans": float(sum(counts) * SPANS), "wall_s": time.perf_counter() - wall_s}


async def _call(port: int, requests: list[bytes]) -> dict[str, float]:
    options = [("grpc.use_local_subchannel_pool", 1)]
    channels = [grpc.aio.insecure_channel(f"127.0.0.1:{port}", options) for _ in range(CHANNELS)]
    exports = [channel.unary_unary(SHAPES[Signal.TRACES].method, None, None) for channel in channels]
    stop_at = time.perf_counter() + SECONDS

    async def feed(first: int) -> int:
        sent = 0
        while time.perf_counter() < stop_at:
            assert await exports[first % CHANNELS](requests[(first + sent) % len(requests)]) == b""
            sent += 1
        return sent

    wall_s = time.perf_counter()
    counts = await asyncio.gather(*(feed(first) for first in range(SENDERS)))
    wall_s = time.perf_counter() - wall_s
    for channel in channels:
        await channel.close(None)
    return {"spans": float(sum(counts) * SPANS), "wall_s": wall_s}


async def _grpc_alone(journal: Journal) -> tuple[grpc.aio.Server, int]:
    """Serve gRPC on its own port, with the receiver's handlers."""
    server = grpc.aio.server(options=[("grpc.max_receive_message_length", MAX_BODY_BYTES), ("grpc.max_concurrent_streams", 64)])
    intake = Intake(journal, max_body_bytes=MAX_BODY_BYTES, max_in_flight_bytes=DEFAULT_IN_FLIGHT_BYTES, retry_delay_s=1.0)
    server.add_generic_rpc_handlers(handlers(intake))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    return server, port


async def _serve(folder: Path, way: str) -> None:
    """Run the server's process.

    It prints its port, serves until its standard input ends, and prints its figures.
    """
    journal = Journal(JournalSettings(folder=folder).open_log())
    await journal.start()
    place = ("127.0.0.1", 0)
    server = OtlpServer(journal, http=place, grpc=place if way == GRPC else None, loopback_only=True)
    await server.start()
    alone, port = await _grpc_alone(journal) if way == GRPC_ALONE else (None, 0)
    address = server.grpc_address or server.http_address
    assert address is not None
    releasing = asyncio.create_task(_release(journal))
    cpu_s = time.process_time()
    print(port or address[1], flush=True)
    await asyncio.to_thread(sys.stdin.read)
    cpu_s = time.process_time() - cpu_s
    releasing.cancel()
    await server.shutdown(1)
    if alone is not None:
        await alone.stop(1)
    await journal.shutdown()
    stats = journal.stats
    figures = {
        "cpu_s": cpu_s,
        "records": stats.appended_records,
        "bytes": stats.appended_bytes,
        "syncs": stats.syncs,
        "sync_s": stats.sync_ns / 1e9,
    }
    print(json.dumps(figures), flush=True)


async def _release(journal: Journal) -> None:
    """Release what is on disk, as a collector that keeps up does."""
    while True:
        await asyncio.sleep(_RELEASE_S)
        journal.release(journal.end)


def _with_uvloop(work: Coroutine[Any, Any, dict[str, float]]) -> dict[str, float]:
    import uvloop  # an optional dependency: only the benchmark's process needs it

    figures: dict[str, float] = uvloop.run(work)
    return figures


def _row(name: str, value: float, unit: str, budget: float | None = None) -> dict[str, Any]:
    """Return one row for a rate, which is met at or above its budget."""
    ratio = None if budget is None else value / budget
    return {
        "name": name,
        "value": value,
        "unit": unit,
        "budget": budget,
        "ratio": ratio,
        "met": None if ratio is None else ratio >= 1,
    }


if __name__ == "__main__":
    if len(sys.argv) > 1:
        import uvloop

        uvloop.run(_serve(Path(sys.argv[1]), sys.argv[2]))
    else:
        for figure in run():
            print(json.dumps(figure))
