"""OTLP over TLS, both protocols and both ends.

The tests cover who trusts whom, the messages when they do not, and changes under traffic.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest
from opentelemetry.exporter.otlp.proto.grpc import trace_exporter as grpc_exporter
from opentelemetry.exporter.otlp.proto.http import trace_exporter as http_exporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter

from doubles.otlp import Keeping, span, span_bytes, spans_of, traces, until
from handrail.otlp.client import Backoff, DeliveryStats, OtlpClient, deliver
from handrail.otlp.messages import SHAPES
from handrail.otlp.receiver.server import OtlpServer
from handrail.otlp.settings import ClientSettings
from handrail.otlp.signals import Accepted, AuthFailed, Signal, Unauthorized, Untrusted
from handrail.security.tls import ServerTls, client_identity
from handrail.security.tokens import Authenticator, tokens
from handrail_doctor.gather.reachability import export_nothing
from handrail_sidecar.sources.otlp_tap import OtlpTap
from harness.certs import DAY, Authority, Files, now, replace

BATCH = traces(span(1), span(2)).SerializeToString()
PROTOCOLS = pytest.mark.parametrize("protocol", ["grpcs", "https"])
TOKEN, OTHER = "0123456789abcdef", "fedcba9876543210"
QUICK = Backoff(initial_s=0.01, max_s=0.05)


@pytest.fixture
def ca(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@asynccontextmanager
async def serving(
    consumer: Keeping, files: Files, client_ca: Path | None = None, token_file: Path | None = None
) -> AsyncIterator[Server]:
    server = Server(consumer, files, client_ca, token_file)
    await server.otlp.start()
    try:
        yield server
    finally:
        await server.otlp.shutdown(1.0)


class Server:
    """A receiver and its TLS and token settings."""

    def __init__(self, consumer: Keeping, files: Files, client_ca: Path | None, token_file: Path | None) -> None:
        self.tls = ServerTls(files.cert, files.key, client_ca)
        self.tokens = None if token_file is None else tokens(token_file, use="tokens", setting="auth.token_file")
        self.guards = {"grpcs": Authenticator("otlp_grpc", self.tokens), "https": Authenticator("otlp_http", self.tokens)}
        self.otlp = OtlpServer(
            consumer,
            grpc=("127.0.0.1", 0),
            http=("127.0.0.1", 0),
            loopback_only=True,
            grpc_tls=self.tls,
            http_tls=self.tls,
            grpc_guard=self.guards["grpcs"],
            http_guard=self.guards["https"],
        )

    def at(self, protocol: str, host: str = "127.0.0.1") -> str:
        address = self.otlp.grpc_address if protocol == "grpcs" else self.otlp.http_address
        assert address is not None
        return f"{protocol}://{host}:{address[1]}"


@asynccontextmanager
async def client_of(endpoint: str, **settings: Any) -> AsyncIterator[OtlpClient]:
    client = OtlpClient(ClientSettings(endpoint=endpoint, **settings))
    try:
        yield client
    finally:
        await client.close()


async def kept_out(client: OtlpClient) -> AuthFailed:
    with pytest.raises(AuthFailed) as caught:
        await client.send(Signal.TRACES, BATCH)
    return caught.value


@PROTOCOLS
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
async def test_each_side_knows_the_other(protocol: str, host: str, ca: Authority) -> None:
    kept, mine = Keeping(), ca.files("client", ca.leaf("a-sidecar"))
    async with (
        serving(kept, ca.files("server"), ca.file) as server,
        client_of(server.at(protocol, host), ca_file=ca.file, cert_file=mine.cert, key_file=mine.key) as client,
    ):
        assert await client.check() is None
        assert await client.send(Signal.TRACES, BATCH) == Accepted()
    assert kept.payloads[1:] == [BATCH]


@PROTOCOLS
@pytest.mark.parametrize(
    "fault", ["another-authority", "expired", "not-yet", "another-name", "no-client-certificate", "wrong-client-certificate"]
)
async def test_who_does_not_trust_whom_is_kept_out_with_the_reason(
    protocol: str, fault: str, ca: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stranger = Authority(tmp_path, "stranger")
    leaf, client_ca, shown, trusted = ca.leaf(), None, {}, ca.file
    if fault == "another-authority":
        trusted = stranger.file
    elif fault == "expired":
        leaf = ca.leaf(begins=now() - 9 * DAY, ends=now() - DAY)
    elif fault == "not-yet":
        leaf = ca.leaf(begins=now() + DAY, ends=now() + 9 * DAY)
    elif fault == "another-name":
        leaf = ca.leaf("collector.example")
    else:
        client_ca = ca.file
        if fault == "wrong-client-certificate":
            theirs = stranger.files("stranger-client")
            shown = {"cert_file": theirs.cert, "key_file": theirs.key}
    kept = Keeping()
    async with (
        serving(kept, ca.files("server", leaf), client_ca) as server,
        client_of(server.at(protocol), ca_file=trusted, **shown) as client,
    ):
        caplog.clear()
        refusal = await kept_out(client)
        assert isinstance(refusal, Untrusted), refusal.reason
        await kept_out(client)
        (record,) = [record for record in caplog.records if record.name == "handrail.otlp.client"]
        assert record.levelname == "WARNING"
        assert f"{server.at(protocol)} does not accept data" in record.getMessage()
        assert "Handrail keeps it and retries: ca_file must contain" in record.getMessage()
        line = await client.check()
        assert line is not None
        assert (
            "it seems to require a client certificate, or a different one" if client_ca else "certificate is not accepted"
        ) in line
    assert kept.payloads == []


@PROTOCOLS
@pytest.mark.parametrize("sent", [None, OTHER])
async def test_without_the_token_nothing_is_taken_and_nothing_is_lost(
    protocol: str, sent: str | None, ca: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    valid, mine = tmp_path / "valid", tmp_path / "mine"
    replace(valid, TOKEN.encode())
    replace(mine, (sent or TOKEN).encode())
    kept, stats = Keeping(), DeliveryStats()
    settings = {"ca_file": ca.file} if sent is None else {"ca_file": ca.file, "token_file": mine}
    async with (
        serving(kept, ca.files("server"), token_file=valid) as server,
        client_of(server.at(protocol), **settings) as client,
    ):
        refusal = await kept_out(client)
        assert isinstance(refusal, Unauthorized)
        words = "a token is required" if sent is None else "the token is not in auth.token_file"
        assert words in refusal.reason
        assert ("gRPC UNAUTHENTICATED" if protocol == "grpcs" else "HTTP 401") in refusal.reason
        line = await client.check()
        assert line is not None
        assert "requires authentication" in line
        delivering = asyncio.create_task(deliver(client, Signal.TRACES, BATCH, stop=asyncio.Event(), backoff=QUICK, stats=stats))
        await until(lambda: stats.retries >= 3)
        lines = [record.getMessage() for record in caplog.records if record.name == "handrail.otlp.client"]
        assert len(lines) == 1
        assert "set a token that it accepts: token_file" in lines[0]
        assert server.guards[protocol].refused >= 4
        reported_lines = [record.getMessage() for record in caplog.records if record.name == "handrail.security.tokens"]
        assert len(reported_lines) == 1
        assert "refused a request from 127.0.0.1" in reported_lines[0]
        # The server learns the client's token: waiting batches are delivered, and a log line reports it.
        assert server.tokens is not None
        if sent is None:
            delivering.cancel()
            await asyncio.gather(delivering, return_exceptions=True)
            return
        replace(valid, f"{TOKEN}\n{OTHER}\n".encode())
        assert server.tokens.poll()
        with caplog.at_level(logging.INFO):
            assert await delivering == Accepted()
        assert "accepts data again" in caplog.text
    assert span_bytes(kept.payloads) == span_bytes([BATCH])
    assert stats.items_rejected == 0


async def test_the_answers_to_strangers_are_those_of_the_protocols(ca: Authority, tmp_path: Path) -> None:
    replace(tmp_path / "valid", TOKEN.encode())
    kept = Keeping()
    async with serving(kept, ca.files("server"), token_file=tmp_path / "valid") as server:
        context = client_identity(ca.file, None, None, use="test").value.context
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{server.at('https')}/v1/traces", data=bytes(1 << 20), ssl=context) as answer,
        ):
            assert answer.status == 401
            assert answer.headers["WWW-Authenticate"] == 'Bearer realm="handrail"'
            assert "a token is required" in await answer.text()
        address = server.at("grpcs").removeprefix("grpcs://")
        async with grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(ca.pem)) as channel:
            call = channel.unary_unary(SHAPES[Signal.TRACES].method, None, None)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(BATCH, metadata=(("authorization", f"Bearer {OTHER}"),))
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
            assert await call(BATCH, metadata=(("authorization", f"bearer {TOKEN}"),)) == b""
    assert kept.payloads == [BATCH]


@PROTOCOLS
async def test_certificates_and_authority_change_under_traffic_and_no_batch_is_lost(protocol: str, tmp_path: Path) -> None:
    """Certificates and authority change under traffic, and no batch is lost.

    Both sides move from one authority to another, in the order that docs/security.md gives.
    """
    old, new = Authority(tmp_path, "old"), Authority(tmp_path, "new")
    trust = tmp_path / "trust.pem"
    replace(trust, old.pem)
    server_files, client_files = old.files("server"), old.files("client")
    kept, stop = Keeping(), asyncio.Event()
    stats, sent = DeliveryStats(), 0
    async with (
        serving(kept, server_files, trust) as server,
        client_of(server.at(protocol), ca_file=trust, cert_file=client_files.cert, key_file=client_files.key) as client,
    ):

        async def send() -> None:
            nonlocal sent
            while not stop.is_set():
                payload = traces(span(sent + 1)).SerializeToString()
                assert (
                    await deliver(client, Signal.TRACES, payload, stop=asyncio.Event(), backoff=QUICK, stats=stats) == Accepted()
                )
                sent += 1

        async def goes_on() -> None:
            seen = sent
            await until(lambda: sent > seen + 5 or sending.done())

        def look() -> list[bool]:
            return [each.poll() for each in (server.tls.identity, *client.security.watched)]

        sending = asyncio.create_task(send())
        await goes_on()
        replace(trust, old.pem + new.pem)
        assert look() == [True, True]
        await goes_on()
        server_files.put(new.leaf())
        assert look() == [True, False]
        await goes_on()
        client_files.put(new.leaf("a-sidecar"))
        assert look() == [False, True]
        await goes_on()
        replace(trust, new.pem)
        assert look() == [True, True]
        await goes_on()
        server_files.key.write_bytes(b"garbage")  # and an unusable file at the end
        assert [look(), look()] == [[False, False], [False, False]]
        assert "holds no private key" in server.tls.identity.refused
        await goes_on()
        stop.set()
        await sending
    assert [each.span_id for each in spans_of(kept.payloads)] == [number.to_bytes(8, "big") for number in range(1, sent + 1)]
    assert (stats.items_rejected, stats.retries) == (0, 0)


@PROTOCOLS
async def test_the_exporters_of_engines_get_in(
    protocol: str, ca: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OpenTelemetry's own exporters get access by their standard settings.

    vLLM sends with these. The settings are certificate and token.
    """
    for variable in ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"):  # when set, requests ignores its given authority
        monkeypatch.delenv(variable, raising=False)
    replace(tmp_path / "valid", TOKEN.encode())
    mine, kept = ca.files("engine"), Keeping()
    async with serving(kept, ca.files("server"), ca.file, tmp_path / "valid") as server:
        exporter: SpanExporter
        if protocol == "grpcs":
            credentials = grpc.ssl_channel_credentials(ca.pem, mine.key.read_bytes(), mine.cert.read_bytes())
            headers = (("authorization", f"Bearer {TOKEN}"),)
            exporter = grpc_exporter.OTLPSpanExporter(
                endpoint=server.at(protocol, "localhost").removeprefix("grpcs://"), credentials=credentials, headers=headers
            )
        else:
            exporter = http_exporter.OTLPSpanExporter(
                endpoint=f"{server.at(protocol)}/v1/traces",
                certificate_file=str(ca.file),
                client_certificate_file=str(mine.cert),
                client_key_file=str(mine.key),
                headers={"Authorization": f"Bearer {TOKEN}"},
            )
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(exporter))

        def send() -> None:
            with provider.get_tracer("engine").start_as_current_span("llm_request"):
                pass
            provider.shutdown()

        await asyncio.to_thread(send)
    assert [each.name for each in spans_of(kept.payloads)] == ["llm_request"]


@PROTOCOLS
async def test_the_tap_and_the_doctor(protocol: str, ca: Authority, tmp_path: Path) -> None:
    """A tap beyond this host, and doctor's check of it by the sidecar's configuration."""
    replace(tmp_path / "tokens", TOKEN.encode())
    files, kept = ca.files("server"), Keeping()
    guard = Authenticator("tap", tokens(tmp_path / "tokens", use="tokens", setting="auth.token_file"))
    tls = ServerTls(files.cert, files.key)
    serve = partial(
        OtlpServer,
        grpc=("0.0.0.0", 0),
        http=("127.0.0.1", 0),
        loopback_only=False,
        grpc_tls=tls,
        http_tls=tls,
        grpc_guard=guard,
        http_guard=guard,
    )
    tap = OtlpTap(kept.consume, {}, serve)
    await tap.start()
    try:
        address = tap.grpc_address if protocol == "grpcs" else tap.http_address
        assert address is not None
        endpoint = f"{protocol}://127.0.0.1:{address[1]}"
        known = ClientSettings(endpoint=endpoint, ca_file=ca.file, token_file=tmp_path / "tokens")
        assert (await export_nothing("the tap", endpoint, {}, known)).problem == ""
        assert "certificate is not accepted" in (await export_nothing("the tap", endpoint, {})).problem
        assert guard.refused == 0
        async with client_of(endpoint, ca_file=ca.file) as client:
            assert isinstance(await kept_out(client), Unauthorized)
        assert guard.refused == 1
    finally:
        await tap.shutdown(1.0)


@PROTOCOLS
async def test_a_removed_authority_lets_nobody_in_any_more(protocol: str, tmp_path: Path) -> None:
    old, new = Authority(tmp_path, "old"), Authority(tmp_path, "new")
    trust = tmp_path / "trust.pem"
    replace(trust, old.pem)
    theirs = old.files("client")
    kept = Keeping()
    async with serving(kept, old.files("server"), trust) as server:
        settings = {"ca_file": old.file, "cert_file": theirs.cert, "key_file": theirs.key}
        async with client_of(server.at(protocol), **settings) as client:
            assert await client.send(Signal.TRACES, BATCH) == Accepted()
            replace(trust, new.pem)
            assert server.tls.identity.poll()
            assert await client.send(Signal.TRACES, BATCH) == Accepted()  # open connections stay open
            await client.close()
            assert isinstance(await kept_out(client), Untrusted)
    assert len(kept.payloads) == 2
