"""Case G10: the self-check names the mistake in one line, within 5 s.

It runs against real servers on this machine's loopback.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import grpc.aio
import pytest
from aiohttp import web

from doubles.otlp import CA, SERVER_CERT, SERVER_KEY, Keeping, until
from handrail.config.schema import keys
from handrail.config.telemetry import OtlpMetricsConfig
from handrail.otlp import diagnose
from handrail.otlp.client import OtlpClient
from handrail.otlp.endpoint import parse_endpoint
from handrail.otlp.receiver.server import OtlpServer
from handrail.otlp.security import ClientSecurity
from handrail.otlp.settings import NAMELESS, ClientSettings, Names
from handrail.otlp.signals import Signal, Unauthorized, Untrusted
from handrail_sidecar.settings import CollectorEndpoint, SidecarConfig
from harness.ports import refusing_port


@asynccontextmanager
async def http_server(status: int, tls: bool = False, path: str = "/{any:.*}") -> AsyncIterator[int]:
    """Answer ``status`` to every POST below ``path``."""

    async def answer(request: web.Request) -> web.Response:
        return web.Response(status=status)

    app = web.Application()
    app.router.add_post(path, answer)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    context = None
    if tls:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(SERVER_CERT, SERVER_KEY)
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
    try:
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


@asynccontextmanager
async def grpc_server(code: grpc.StatusCode | None, tls: bool = False) -> AsyncIterator[int]:
    """Abort every trace export with ``code``, or accept it.

    UNIMPLEMENTED means that the server has no such service.
    """

    async def export(body: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
        if code is not None:
            await context.abort(code, "no")
        return b""

    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    if code is not grpc.StatusCode.UNIMPLEMENTED:
        handler = {"Export": grpc.unary_unary_rpc_method_handler(export)}
        name = "opentelemetry.proto.collector.trace.v1.TraceService"
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, handler),))
    if tls:
        credentials = grpc.ssl_server_credentials([(SERVER_KEY.read_bytes(), SERVER_CERT.read_bytes())])
        port = server.add_secure_port("127.0.0.1:0", credentials)
    else:
        port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield port
    finally:
        await server.stop(0)


async def checked(endpoint: str, protocol: str | None = None, ca: bool = False) -> str | None:
    client = OtlpClient(ClientSettings(endpoint=endpoint, protocol=protocol, ca_file=str(CA) if ca else None))
    beats = 0

    async def beat() -> None:
        nonlocal beats
        while True:
            await asyncio.sleep(0.05)
            beats += 1

    beating = asyncio.create_task(beat())
    try:
        line = await client.check()
    finally:
        beating.cancel()
        await client.close()
    assert beats <= 100  # within 5 s, minus the time without a processor: that makes beats later, never more
    assert line is None or "\n" not in line
    return line


async def test_a_receiver_that_takes_it() -> None:
    server = OtlpServer(Keeping(), grpc=("127.0.0.1", 0), http=("127.0.0.1", 0), loopback_only=True)
    await server.start()
    try:
        assert server.http_address is not None
        assert server.grpc_address is not None
        for written in (f"http://127.0.0.1:{server.http_address[1]}", f"http://127.0.0.1:{server.http_address[1]}/v1/traces/"):
            assert await checked(written) is None
        assert await checked(f"grpc://127.0.0.1:{server.grpc_address[1]}") is None
        # An unusual port does not show the protocol: the message names it, for both.
        wrong = await checked(f"http://127.0.0.1:{server.grpc_address[1]}")
        assert wrong is not None
        assert "HTTP was sent to a gRPC port" in wrong
        wrong = await checked(f"grpc://127.0.0.1:{server.http_address[1]}")
        assert wrong is not None
        assert "gRPC was sent to an HTTP port" in wrong
    finally:
        await server.shutdown()


@pytest.mark.parametrize(
    ("status", "word"),
    [
        (401, "requires authentication"),
        (403, "requires authentication"),
        (404, "path is wrong or missing"),
        (405, "does not accept POST"),
        (503, "accepts nothing for now"),
        (400, "refuses an empty export"),
    ],
)
async def test_http_answers(status: int, word: str) -> None:
    async with http_server(status) as port:
        line = await checked(f"http://127.0.0.1:{port}")
    assert line is not None
    assert word in line
    assert f"127.0.0.1:{port}" in line


@pytest.mark.parametrize(
    ("code", "word"),
    [
        (grpc.StatusCode.UNAUTHENTICATED, "requires authentication"),
        (grpc.StatusCode.PERMISSION_DENIED, "requires authentication"),
        (grpc.StatusCode.UNIMPLEMENTED, "no OTLP trace service"),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
async def test_grpc_answers(code: grpc.StatusCode, word: str) -> None:
    async with grpc_server(code) as port:
        line = await checked(f"grpc://127.0.0.1:{port}")
    assert line is not None
    assert word in line


async def test_the_path_is_missing() -> None:
    async with http_server(200, path="/otlp/v1/traces") as port:
        assert await checked(f"http://127.0.0.1:{port}/otlp") is None
        line = await checked(f"http://127.0.0.1:{port}")
    assert line is not None
    assert "path is wrong or missing" in line


async def test_tls_over_http() -> None:
    async with http_server(200, tls=True) as port:
        assert await checked(f"https://127.0.0.1:{port}", ca=True) is None
        untrusted = await checked(f"https://127.0.0.1:{port}")
        plaintext = await checked(f"http://127.0.0.1:{port}")
    assert untrusted is not None
    assert "certificate is not accepted" in untrusted
    assert plaintext is not None
    assert f"plaintext was sent to a TLS port: write https://127.0.0.1:{port}" in plaintext


async def test_tls_over_grpc() -> None:
    async with grpc_server(None, tls=True) as port:
        assert await checked(f"grpcs://localhost:{port}", ca=True) is None
        untrusted = await checked(f"grpcs://127.0.0.1:{port}")
        plaintext = await checked(f"grpc://127.0.0.1:{port}")
    assert untrusted is not None
    assert "certificate is not accepted" in untrusted
    assert plaintext is not None
    assert f"plaintext was sent to a TLS port: write grpcs://127.0.0.1:{port}" in plaintext


async def test_tls_to_a_plaintext_port() -> None:
    async with http_server(200) as port:
        line = await checked(f"https://127.0.0.1:{port}", ca=True)
        assert line is not None
        assert f"TLS was sent to a plaintext port: write http://127.0.0.1:{port}" in line
    async with grpc_server(None) as port:
        line = await checked(f"grpcs://127.0.0.1:{port}", ca=True)
        assert line is not None
        assert f"TLS was sent to a plaintext port: write grpc://127.0.0.1:{port}" in line


@pytest.mark.parametrize("scheme", ["http", "grpc"])
async def test_nothing_listens(scheme: str) -> None:
    with refusing_port() as port:
        line = await checked(f"{scheme}://127.0.0.1:{port}")
    assert line is not None
    assert "nothing listens there" in line


@pytest.mark.parametrize("scheme", ["http", "grpc"])
async def test_the_name_does_not_resolve(scheme: str) -> None:
    line = await checked(f"{scheme}://collector.invalid:4318")
    assert line is not None
    assert "does not resolve" in line or "no answer in time" in line


@pytest.mark.parametrize("scheme", ["http", "grpc"])
async def test_a_peer_that_says_nothing(scheme: str) -> None:
    open_connections, finished = 0, asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal open_connections
        open_connections += 1
        await finished.wait()
        writer.transport.abort()
        open_connections -= 1

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    try:
        line = await checked(f"{scheme}://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    finally:
        finished.set()
        server.close()
        await server.wait_closed()
    await until(lambda: not open_connections)
    assert line is not None
    assert "no answer in time" in line


OWN = Names("collector.")
METRICS = OtlpMetricsConfig().client("grpc://127.0.0.1:4317").names


@pytest.mark.parametrize(
    ("names", "token", "authority", "certificate"),
    [
        (
            OWN,
            "give a token: collector.token_file, or a header authorization=Bearer TOKEN in collector.headers",
            "set collector.ca_file to the CA that signed it",
            "set collector.cert_file and collector.key_file",
        ),
        (
            METRICS,
            "give a token: a header authorization=Bearer TOKEN in otlp_metrics.headers",
            "set otlp_metrics.ca_file to the CA that signed it",
            "and none is set",
        ),
        (NAMELESS, "and Handrail sends no token", "only the system's authorities count", "and none is set"),
    ],
    ids=["collector", "metrics", "forward"],
)
def test_settings_are_called_what_users_call_them(names: Names, token: str, authority: str, certificate: str) -> None:
    endpoint = parse_endpoint("https://collector:4318")
    assert diagnose.named_by_answer(endpoint, Signal.TRACES, "HTTP 401: no", names).endswith(token)
    for peer, output in ((diagnose.PeerProtocol.UNTRUSTED, authority), (diagnose.PeerProtocol.CHOOSY, certificate)):
        assert output in diagnose.named_by_peer(endpoint, peer, "why", "reason", names)


def test_the_settings_that_messages_name_are_ones_that_there_are() -> None:
    known = {key.path for key in keys(SidecarConfig)}
    for names in (CollectorEndpoint().client.names, METRICS):
        assert {names.of(each) for each in names.known} <= known


def test_the_remedy_of_a_refusal_uses_the_senders_own_names() -> None:
    refusals = (Unauthorized("no", 0.0), Untrusted("no", 0.0))
    own, metrics, none = (
        ClientSecurity(parse_endpoint("http://c:4318"), ClientSettings(endpoint="http://c:4318", names=names))
        for names in (OWN, METRICS, NAMELESS)
    )
    assert own.remedy(refusals[0]) == "set a token that it accepts: collector.token_file"
    assert metrics.remedy(refusals[0]) == "set a token that it accepts: otlp_metrics.headers"
    assert none.remedy(refusals[0]) == "no setting holds a token here"
    assert "collector.cert_file" in own.remedy(refusals[1])
    assert "cert_file" not in metrics.remedy(refusals[1])
    assert none.remedy(refusals[1]).startswith("the system's authorities")
