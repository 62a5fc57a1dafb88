"""The OTLP tap: loopback only, spans byte for byte.

It acknowledges spans when the spool has them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

import builders.replayed
from doubles.otlp import RAW, Full, Keeping, span_bytes, traces
from handrail.conventions import HOST_ID, INSTANCE, ROLE, SENDER_ID
from handrail.otlp.client import OtlpClient
from handrail.otlp.receiver.server import Address, OtlpServer
from handrail.otlp.settings import ClientSettings
from handrail.otlp.signals import Rejected, Retryable, Signal
from handrail_sidecar.live_metrics.sidecar_metrics import tap_rows
from handrail_sidecar.sources.otlp_tap import OtlpTap, Take

RESOURCE = {ROLE: "decode", INSTANCE: "127.0.0.1:8200", SENDER_ID: "ab" * 16, HOST_ID: "cd" * 16, "host.name": "d0"}
LOOPBACK = ("127.0.0.1", 0)


def tap_of(take: Take, *, grpc: Address | None = LOOPBACK, http: Address | None = LOOPBACK) -> OtlpTap:
    return OtlpTap(take, RESOURCE, partial(OtlpServer, grpc=grpc, http=http, loopback_only=True))


@pytest.fixture(params=["grpc", "http"])
async def pair(request: pytest.FixtureRequest) -> AsyncIterator[tuple[OtlpTap, OtlpClient, Keeping]]:
    kept = Keeping()
    tap = tap_of(kept.consume)
    await tap.start()
    address = tap.grpc_address if request.param == "grpc" else tap.http_address
    assert address is not None
    client = OtlpClient(ClientSettings(endpoint=f"{request.param}://{address[0]}:{address[1]}"))
    yield tap, client, kept
    await client.close()
    await tap.shutdown(1.0)


@pytest.mark.parametrize("recording", RAW, ids=lambda path: path.name)
async def test_recorded_vllm_spans_pass_byte_for_byte(pair: tuple[OtlpTap, OtlpClient, Keeping], recording: Path) -> None:
    tap, client, kept = pair
    body = builders.replayed.otlp(recording.read_bytes(), ExportTraceServiceRequest)  # noqa: ASYNC240
    await client.send(Signal.TRACES, body)
    assert span_bytes(kept.payloads) == span_bytes([body])
    attributes = ExportTraceServiceRequest.FromString(kept.payloads[0]).resource_spans[0].resource.attributes
    found = {attribute.key: attribute.value.string_value for attribute in attributes}
    assert RESOURCE.items() <= found.items()
    assert found["service.name"].startswith("vllm")
    assert tap.spans_seen == len(span_bytes([body]))


async def test_what_the_engine_says_of_itself_stays(pair: tuple[OtlpTap, OtlpClient, Keeping]) -> None:
    _, client, kept = pair
    await client.send(Signal.TRACES, traces(resource={"host.name": "mine", ROLE: "prefill"}).SerializeToString())
    attributes = ExportTraceServiceRequest.FromString(kept.payloads[0]).resource_spans[0].resource.attributes
    assert [(a.key, a.value.string_value) for a in attributes][:2] == [("host.name", "mine"), (ROLE, "prefill")]
    assert len(attributes) == len(RESOURCE)


async def test_c05_no_span_is_seen_before_one_comes(pair: tuple[OtlpTap, OtlpClient, Keeping]) -> None:
    tap, client, _ = pair
    assert await client.check() is None
    assert tap.spans_seen == 0
    assert tap.stats.requests[Signal.TRACES] == 1


async def test_rows_made_before_the_start_count_what_the_tap_takes() -> None:
    kept = Keeping()
    tap = tap_of(kept.consume, grpc=None)
    rows = {row.name: row for row in tap_rows(tap)}
    await tap.start()
    assert tap.http_address is not None
    client = OtlpClient(ClientSettings(endpoint=f"http://127.0.0.1:{tap.http_address[1]}"))
    await client.send(Signal.TRACES, traces().SerializeToString())
    await client.send(Signal.TRACES, RAW[0].read_bytes())
    assert tap.spans_seen > 0
    assert rows["handrail_sidecar_tap_items"].read() == {("traces",): tap.spans_seen, ("metrics",): 0, ("logs",): 0}
    await client.close()
    await tap.shutdown(1.0)


async def test_a_full_spool_is_reported_to_the_engine() -> None:
    full = Full()
    tap = tap_of(full.consume, grpc=None)
    await tap.start()
    assert tap.http_address is not None
    client = OtlpClient(ClientSettings(endpoint=f"http://127.0.0.1:{tap.http_address[1]}"))
    with pytest.raises(Retryable) as refusal:
        await client.send(Signal.TRACES, RAW[0].read_bytes())
    assert refusal.value.delay_s == 3.0  # 2.5 s, rounded up to whole seconds
    assert (tap.spans_seen, tap.stats.requests_refused) == (0, 1)
    with pytest.raises(Rejected):
        await client.send(Signal.TRACES, b"\xff")
    assert tap.stats.requests_rejected == 1
    await client.close()
    await tap.shutdown(1.0)


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.7", "::", "example.org", ""])
@pytest.mark.parametrize("which", ["grpc", "http"])
def test_anything_but_loopback_is_refused(host: str, which: str) -> None:
    with pytest.raises(ValueError, match=r"everyone who reaches this port.*valid: 127\.0\.0\.1, ::1, localhost"):
        tap_of(Keeping().consume, **{which: (host, 0)})


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.10", "::1", "[::1]", "localhost", "LOCALHOST"])
def test_loopback_in_its_spellings(host: str) -> None:
    tap_of(Keeping().consume, grpc=(host, 0), http=(host, 0))


def test_a_tap_needs_a_port() -> None:
    with pytest.raises(ValueError, match="at least one of grpc and http"):
        tap_of(Keeping().consume, grpc=None, http=None)


async def test_shutdown_without_start_and_twice() -> None:
    tap = tap_of(Keeping().consume)
    await tap.shutdown(1.0)
    await tap.start()
    await tap.shutdown(1.0)
    await tap.shutdown(1.0)
