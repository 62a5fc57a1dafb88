"""The front of gRPC's server: bounds per peer, time limits, bytes passed on as is."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from doubles.handshake_rounds import HELLO, Rounds
from doubles.otlp import Gated, Keeping, span, spans_of, traces, until
from handrail.otlp.client import OtlpClient
from handrail.otlp.receiver.grpc_front import DESCRIPTORS, sender_of
from handrail.otlp.receiver.server import OtlpServer
from handrail.otlp.settings import ClientSettings
from handrail.otlp.signals import Accepted, Signal, Unauthorized
from handrail.runtime.connections import Bounds, Expiry, Gate, Refusal
from handrail.runtime.descriptors import DescriptorBudget
from handrail.runtime.handshakes import HandshakeQueue
from handrail.security.tls import ServerTls
from handrail.security.tokens import Authenticator, tokens
from harness.certs import Authority, replace

BATCH = traces(span(1), span(2)).SerializeToString()
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SHORT_S, LONG_S = 0.2, 3600.0


def gate(
    *,
    peer: int = 50,
    handshake_s: float = LONG_S,
    head_s: float = LONG_S,
    idle_s: float = LONG_S,
    used: list[int] | None = None,
    handshakes: HandshakeQueue | None = None,
) -> Gate:
    bounds = Bounds(listener=50, peer=peer, handshake_s=handshake_s, head_s=head_s, idle_s=idle_s, descriptors=DESCRIPTORS)
    count = used or [0]
    budget = DescriptorBudget(10_000, 100, count=lambda: count[0], recount_s=0.0)
    return Gate("otlp_grpc", bounds, budget, handshakes=handshakes)


@asynccontextmanager
async def serving(
    consumer: Keeping, doors: Gate, *, tls: ServerTls | None = None, guard: Authenticator | None = None
) -> AsyncIterator[OtlpServer]:
    server = OtlpServer(consumer, grpc=("127.0.0.1", 0), loopback_only=True, grpc_gate=doors, grpc_tls=tls, grpc_guard=guard)
    await server.start()
    try:
        yield server
    finally:
        await server.shutdown(1.0)
        assert doors.open == 0


def address(server: OtlpServer) -> tuple[str, int]:
    assert server.grpc_address is not None
    return server.grpc_address


@asynccontextmanager
async def sender(server: OtlpServer, ca: Path | None = None) -> AsyncIterator[OtlpClient]:
    scheme = "grpc" if ca is None else "grpcs"
    client = OtlpClient(ClientSettings(endpoint=f"{scheme}://127.0.0.1:{address(server)[1]}", timeout_s=60.0, ca_file=ca))
    try:
        yield client
    finally:
        await client.close()


@asynccontextmanager
async def connected(
    server: OtlpServer, data: bytes = b"", *, source: str = "127.0.0.2", context: ssl.SSLContext | None = None
) -> AsyncIterator[asyncio.StreamReader]:
    opening = asyncio.open_connection(*address(server), local_addr=(source, 0), ssl=context)
    reader, writer = await asyncio.wait_for(opening, 60)
    try:
        writer.write(data)
        yield reader
    finally:
        writer.transport.abort()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def ended(reader: asyncio.StreamReader) -> None:
    with contextlib.suppress(ConnectionResetError):
        while await asyncio.wait_for(reader.read(65536), 60):
            pass


async def test_silent_peer_leaves_room_for_others() -> None:
    kept, doors = Keeping(), gate(peer=3)
    async with serving(kept, doors) as server, contextlib.AsyncExitStack() as silent:
        for _ in range(10):
            with contextlib.suppress(ConnectionResetError):
                await silent.enter_async_context(connected(server))
        await until(lambda: doors.refused[Refusal.PEER] == 7)
        async with sender(server) as client:
            assert await client.send(Signal.TRACES, BATCH) == Accepted()
        assert doors.open >= 3
    assert len(spans_of(kept.payloads)) == 2


async def test_silent_connections_take_no_turn_and_a_flood_only_its_own(tmp_path: Path) -> None:
    """A handshake queue lets one handshake begin each time that the test allows it."""
    ca, rounds = Authority(tmp_path), Rounds()
    files = ca.files("server")
    kept, doors = Keeping(), gate(handshakes=rounds.queue)
    tls = ServerTls(files.cert, files.key)
    async with serving(kept, doors, tls=tls) as server, contextlib.AsyncExitStack() as flood:
        for _ in range(20):
            await flood.enter_async_context(connected(server))
        await until(lambda: doors.open == 20)
        rounds.use_up()
        for _ in range(10):
            await flood.enter_async_context(connected(server, HELLO))
        await until(lambda: rounds.queue.waiting == 10)
        async with sender(server, ca.file) as client:
            sending = asyncio.create_task(client.send(Signal.TRACES, BATCH))
            await until(lambda: rounds.queue.waiting == 11)
            rounds.pass_one()
            rounds.pass_one()
            assert await sending == Accepted()
        assert rounds.queue.waiting == 9


async def test_connection_that_says_nothing_is_ended() -> None:
    doors = gate(head_s=SHORT_S)
    async with serving(Keeping(), doors) as server, connected(server) as reader:
        await ended(reader)
        await until(lambda: doors.open == 0)
        assert doors.expired == {Expiry.HANDSHAKE: 0, Expiry.HEAD: 1, Expiry.IDLE: 0}


@pytest.mark.parametrize("data", [PREFACE[:5], PREFACE], ids=["half a preface", "no settings"])
async def test_connection_that_never_gets_to_a_request_is_ended(data: bytes) -> None:
    doors = gate(handshake_s=SHORT_S, head_s=SHORT_S)
    async with serving(Keeping(), doors) as server, connected(server, data) as reader:
        await ended(reader)
        await until(lambda: doors.open == 0)


async def test_silence_after_the_tls_handshake_is_ended(tmp_path: Path) -> None:
    ca = Authority(tmp_path)
    files = ca.files("server")
    context = ssl.create_default_context(cafile=str(ca.file))
    context.set_alpn_protocols(["h2"])
    doors = gate(handshake_s=SHORT_S, head_s=1.0)
    tls = ServerTls(files.cert, files.key)
    async with serving(Keeping(), doors, tls=tls) as server, connected(server, context=context) as reader:
        await ended(reader)
        await until(lambda: doors.open == 0)


async def test_sender_that_was_idle_too_long_exports_again_without_noticing() -> None:
    kept, doors = Keeping(), gate(idle_s=1.0)
    async with serving(kept, doors) as server, sender(server) as client:
        assert await client.send(Signal.TRACES, BATCH) == Accepted()
        await until(lambda: doors.open == 0)
        assert await client.send(Signal.TRACES, BATCH) == Accepted()
    assert len(kept.payloads) == 2


async def test_large_batches_pass_whole_in_both_directions_at_once() -> None:
    kept = Keeping()
    batches = [traces(*(span(number) for number in range(n * 4000 + 1, n * 4000 + 4001))).SerializeToString() for n in range(8)]
    assert sum(map(len, batches)) > 1 << 20
    async with serving(kept, gate()) as server, sender(server) as client:
        assert await asyncio.gather(*(client.send(Signal.TRACES, batch) for batch in batches)) == [Accepted()] * 8
    assert sorted(kept.payloads) == sorted(batches)


async def test_log_names_the_sender_not_the_front(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    replace(tmp_path / "tokens", b"0123456789abcdef")
    guard = Authenticator("otlp_grpc", tokens(tmp_path / "tokens", use="tokens", setting="auth.token_file"))
    async with serving(Keeping(), gate(), guard=guard) as server, sender(server) as client:
        with pytest.raises(Unauthorized):
            await client.send(Signal.TRACES, BATCH)
    lines = [record.getMessage() for record in caplog.records if record.name == "handrail.security.tokens"]
    assert lines == [
        "otlp_grpc: refused a request from 127.0.0.1: a token is required: Authorization: Bearer TOKEN (logged once a host)"
    ]


async def test_senders_wait_while_descriptors_are_short() -> None:
    used, kept = [9_900], Keeping()
    doors = gate(used=used)
    async with serving(kept, doors) as server, sender(server) as client:
        sending = asyncio.create_task(client.send(Signal.TRACES, BATCH))
        await until(lambda: doors.pauses >= 2)
        assert kept.payloads == []
        used[0] = 100
        assert await asyncio.wait_for(sending, 60) == Accepted()


async def test_shutdown_lets_running_exports_end_and_cuts_the_silent() -> None:
    consumer = Gated()
    doors = gate()
    server = OtlpServer(consumer, grpc=("127.0.0.1", 0), loopback_only=True, grpc_gate=doors)
    await server.start()
    async with sender(server) as client, connected(server) as silent:
        sending = asyncio.create_task(client.send(Signal.TRACES, BATCH))
        await until(lambda: doors.open == 2 and consumer.entered.is_set())
        stopping = asyncio.create_task(server.shutdown(60.0))
        consumer.gate.set()
        assert await asyncio.wait_for(sending, 60) == Accepted()
        await asyncio.wait_for(stopping, 60)
        await ended(silent)
    assert doors.open == 0


@pytest.mark.parametrize(
    ("peer", "sender"),
    [
        ("unix-abstract:handrail-from/0123abcd/7/10.0.0.7", "10.0.0.7"),
        ("unix-abstract:handrail-from%2F0123abcd%2F7%2F2001:db8::7", "2001:db8::7"),
        ("ipv4:10.0.0.7:4711", ""),
        ("unix:", ""),
    ],
)
def test_sender_of(peer: str, sender: str) -> None:
    assert sender_of(peer) == sender
