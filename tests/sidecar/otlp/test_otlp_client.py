"""The client against real servers, over both protocols.

The tests cover what it sends, and how it handles answers.
"""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web

from doubles.otlp import Full, Gated, Keeping, Refusing, replay, span, traces
from handrail.otlp.client import OtlpClient
from handrail.otlp.receiver.server import OtlpServer
from handrail.otlp.settings import ClientSettings
from handrail.otlp.signals import Accepted, PayloadRejected, Rejected, Retryable, Signal
from harness.ports import refusing_port

BATCH = traces(span(1), span(2)).SerializeToString()
PROTOCOLS = pytest.mark.parametrize("protocol", ["grpc", "http"])


@asynccontextmanager
async def connected(consumer: Keeping, protocol: str, **settings: Any) -> AsyncIterator[OtlpClient]:
    server = OtlpServer(consumer, grpc=("127.0.0.1", 0), http=("127.0.0.1", 0), loopback_only=True)
    await server.start()
    address = server.grpc_address if protocol == "grpc" else server.http_address
    assert address is not None
    client = OtlpClient(ClientSettings(endpoint=f"{protocol}://{address[0]}:{address[1]}", **settings))
    try:
        yield client
    finally:
        await client.close()
        await server.shutdown(1.0)


@PROTOCOLS
@pytest.mark.parametrize("compression", ["gzip", "none"])
@pytest.mark.parametrize("signal", list(Signal))
async def test_the_payload_arrives_as_it_is(protocol: str, compression: str, signal: Signal) -> None:
    kept = Keeping()
    payload = BATCH if signal is Signal.TRACES else b""
    async with connected(kept, protocol, compression=compression) as client:
        assert await client.send(signal, payload) == Accepted()
        await client.close()
        assert await client.send(signal, payload) == Accepted()  # opens again
        await client.close()
        await client.close()
    assert kept.taken == [(signal, payload)] * 2


@PROTOCOLS
async def test_a_full_peer_names_its_delay(protocol: str) -> None:
    async with connected(Full(delay_s=2.5), protocol) as client:
        with pytest.raises(Retryable, match="the disk is full") as refusal:
            await client.send(Signal.TRACES, BATCH)
    assert refusal.value.delay_s == (2.5 if protocol == "grpc" else 3.0)


@PROTOCOLS
async def test_a_refusing_peer_gives_its_reason(protocol: str) -> None:
    async with connected(Refusing(), protocol) as client:
        with pytest.raises(PayloadRejected, match="not from you"):
            await client.send(Signal.TRACES, BATCH)


@PROTOCOLS
async def test_partial_success(protocol: str) -> None:
    bad = traces(span(1), span(2, span_id=b"")).SerializeToString()
    async with connected(Keeping(), protocol) as client:
        assert await client.send(Signal.TRACES, bad) == Accepted(1, "1 span rejected: span id is not 8 bytes (1)")


@PROTOCOLS
async def test_no_answer_in_time_is_retryable(protocol: str) -> None:
    gated = Gated()
    async with connected(gated, protocol, timeout_s=0.2) as client:
        with pytest.raises(Retryable):
            await client.send(Signal.TRACES, BATCH)
        gated.gate.set()


@PROTOCOLS
async def test_nobody_there_is_retryable(protocol: str) -> None:
    with refusing_port() as port:
        client = OtlpClient(ClientSettings(endpoint=f"{protocol}://127.0.0.1:{port}"))
        with pytest.raises(Retryable):
            await client.send(Signal.TRACES, BATCH)
        await client.close()


@PROTOCOLS
async def test_many_at_once(protocol: str) -> None:
    kept = Keeping()
    async with connected(kept, protocol) as client:
        fates = await asyncio.gather(*(client.send(Signal.TRACES, BATCH) for _ in range(50)))
    assert fates == [Accepted()] * 50
    assert len(kept.taken) == 50


@dataclass
class Scripted:
    """An HTTP server that gives one scripted response and keeps the request."""

    status: int = 200
    body: Any = None
    headers: dict[str, str] = field(default_factory=dict)
    seen: list[tuple[str, dict[str, str], bytes]] = field(default_factory=list)

    async def answer(self, request: web.Request) -> web.Response:
        self.seen.append((request.path, {key.lower(): value for key, value in request.headers.items()}, await request.read()))
        return web.json_response(self.body, status=self.status, headers=self.headers)

    @asynccontextmanager
    async def client(self, path: str = "", **settings: Any) -> AsyncIterator[OtlpClient]:
        app = web.Application()
        app.router.add_route("*", "/{any:.*}", self.answer)
        runner = web.AppRunner(app, access_log=None, auto_decompress=False, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        client = OtlpClient(ClientSettings(endpoint=f"http://127.0.0.1:{runner.addresses[0][1]}{path}", **settings))
        try:
            yield client
        finally:
            await client.close()
            await runner.cleanup()


async def test_what_goes_over_http() -> None:
    server = Scripted(body={})
    async with server.client("/otlp/v1/traces/", headers={"Authorization": "Bearer s3cret"}) as client:
        assert await client.send(Signal.LOGS, BATCH) == Accepted()
        assert "s3cret" not in repr(client.settings)
    path, headers, body = server.seen[0]
    assert path == "/otlp/v1/logs"
    assert headers["authorization"] == "Bearer s3cret"
    assert (headers["content-type"], headers["content-encoding"]) == ("application/x-protobuf", "gzip")
    assert gzip.decompress(body) == BATCH


@pytest.mark.parametrize("case", replay("G07_responses.json"), ids=lambda case: case["expected"])
async def test_g07_over_the_wire(case: dict[str, Any]) -> None:
    server = Scripted(case["status"], case["body"], case.get("headers", {}))
    async with server.client() as client:
        try:
            fate = repr(await client.send(Signal.TRACES, BATCH))
        except Retryable as refusal:
            fate = f"retry after {refusal.delay_s:g} s"
        except PayloadRejected as refusal:
            fate = refusal.reason
    expected = {
        "3 rejected, no retry": repr(Accepted(3, "x")),
        "full success": repr(Accepted()),
        "warning only": repr(Accepted(0, "warn")),
        "no retry as is; bisect or drop with reason": "HTTP 400: unmarshal: invalid TraceID length",
        "retry after 30 s, bounded by shutdown": "retry after 30 s",
    }
    assert fate == expected[case["expected"]]
    assert len(server.seen) == 1


async def test_a_redirect_is_not_followed() -> None:
    server = Scripted(308, {}, {"Location": "https://elsewhere.example/v1/traces"})
    async with server.client() as client:
        with pytest.raises(Rejected, match="set the endpoint to that"):
            await client.send(Signal.TRACES, BATCH)
    assert len(server.seen) == 1


def test_from_settings() -> None:
    settings = ClientSettings(endpoint="https://collector:4317", headers={"a": "b"}, timeout_s=3.0)
    client = OtlpClient(settings)
    assert client.settings == settings
    assert str(client.endpoint) == "grpcs://collector:4317"


@pytest.mark.parametrize("endpoint", ["https://collector:4318", "https://collector:4317"])
def test_a_missing_ca_is_reported_at_construction(endpoint: str) -> None:
    with pytest.raises(FileNotFoundError):
        OtlpClient(ClientSettings(endpoint=endpoint, ca_file="/nonexistent/ca.pem"))
