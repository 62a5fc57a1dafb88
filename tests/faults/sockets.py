"""Send hostile bytes to every socket of running processes.

Other traffic must go on, and the logs must repeat nothing of the bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import struct
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from builders.records import split_request
from doubles.otlp import Keeping
from faults.mutate import COMMON, mutated, nested_json
from faults.processes import Running, collector, get, metrics, port, sidecar
from faults.trial import Context, Got, Trial
from handrail.otlp.client import OtlpClient
from handrail.otlp.receiver.server import OtlpServer
from handrail.otlp.settings import ClientSettings
from handrail.otlp.signals import Signal
from handrail.records import Exchange
from harness.pipelines import batch
from harness.proxy import Peer, Upstream

MARK: Final = b"zqxJkW"
"""Marker in everything that is sent; in a log it shows the sender's own bytes."""

_PLUGIN: Final = Path(__file__).parents[1] / "data" / "recordings" / "plugin" / "decode.jsonl"
_OK: Final = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"
_REQUESTED: Final = b'POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 13\r\n\r\n{"model":"m"}'


def random_bytes(rng: random.Random) -> bytes:
    """Return random bytes."""
    return rng.randbytes(rng.choice((1, 9, 300, 9000))) + MARK


def half_request(rng: random.Random) -> bytes:
    """Return the beginning of a good request."""
    whole = (
        b"POST /v1/traces HTTP/1.1\r\nHost: x\r\nX-Mark: "
        + MARK
        + b"\r\nContent-Type: application/x-protobuf\r\nContent-Length: 90\r\n\r\nabc"
    )
    return whole[: rng.randrange(1, len(whole))]


def long_line(rng: random.Random) -> bytes:
    """Return a request line or a header that is longer than any reader takes."""
    long = MARK * (rng.choice((2_000, 12_000, 40_000)))
    return rng.choice(
        (b"GET /" + long + b" HTTP/1.1\r\nHost: x\r\n\r\n", b"GET / HTTP/1.1\r\nHost: x\r\nX: " + long + b"\r\n\r\n", long)
    )


def many_headers(rng: random.Random) -> bytes:
    """Return thousands of header lines."""
    return b"GET /healthz HTTP/1.1\r\n" + b"".join(b"X-%d: %b\r\n" % (n, MARK) for n in range(5000)) + b"\r\n"


def tls_hello(rng: random.Random) -> bytes:
    """Return a client's first bytes of TLS, for a plaintext socket."""
    hello = (
        b"\x03\x03"
        + rng.randbytes(32)
        + b"\x00\x00\x04\x13\x01\x13\x02\x01\x00\x00\x0a\x00\x00\x00\x06\x00\x04\x00\x00\x01z"
        + MARK
    )
    body = b"\x01" + struct.pack(">I", len(hello))[1:] + hello
    return b"\x16\x03\x01" + struct.pack(">H", len(body)) + body


def http2(rng: random.Random) -> bytes:
    """Return the preface of HTTP/2 and invalid frames."""
    frame = struct.pack(">I", rng.choice((0, 6, 16383, 0xFFFFFF)))[1:] + bytes([rng.randrange(12), rng.randrange(256)])
    return b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00" + frame + rng.randbytes(40) + MARK


def ssh_banner(rng: random.Random) -> bytes:
    """Return the banner of another protocol."""
    return rng.choice(
        (
            b"SSH-2.0-" + MARK + b"\r\n",
            b"EHLO " + MARK + b"\r\n",
            b"*1\r\n$4\r\n" + MARK + b"\r\n",
            b"\x00\x00\x00\x2b\xffSMB" + MARK,
        )
    )


def bad_request(rng: random.Random) -> bytes:
    """Return HTTP that two parsers would read differently, or that none takes."""
    return rng.choice(
        (
            b"GET /" + MARK + b" HTTP/9.9\r\n\r\n",
            b"GET / HTTP/1.1\r\nContent-Length: 5\r\nContent-Length: 6\r\nX: " + MARK + b"\r\n\r\n",
            b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz" + MARK + b"\r\n",
            b"GET /" + MARK + b"\x00 HTTP/1.1\r\nHost: x\r\n\r\n",
            b"GET http://[::1/" + MARK + b" HTTP/1.1\r\nHost: x\r\n\r\n",
            b"GET / HTTP/1.1\r\nHost: x\r\n" + MARK + b"\r\n\r\n",
            b"GET / HTTP/1.1\r\nX: a\r\n " + MARK + b"\r\n\r\n",
            b"\r\n" * 4000 + MARK,
            b"GET /api/v1/requests?since=" + MARK + b"%ff%00 HTTP/1.1\r\nHost: x\r\n\r\n",
            b"POST /v1/traces HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 20\r\n\r\n"
            + (b"{" + MARK * 4)[:20],
            b"POST /v1/logs HTTP/1.1\r\nHost: x\r\nContent-Type: application/" + MARK + b"\r\nContent-Length: 1\r\n\r\nx",
            b"POST /v1/traces HTTP/1.1\r\nHost: x\r\nContent-Type: application/x-protobuf\r\nContent-Encoding: gzip\r\n"
            b"Content-Length: 6\r\n\r\n" + MARK,
            b"POST /v1/traces HTTP/1.1\r\nHost: x\r\nExpect: " + MARK + b"\r\nContent-Length: 99999999999\r\n\r\n",
        )
    )


KINDS: Final[tuple[Callable[[random.Random], bytes], ...]] = (
    random_bytes,
    half_request,
    long_line,
    many_headers,
    tls_hello,
    http2,
    ssh_banner,
    bad_request,
    bad_request,
)


async def _send(address: tuple[str, int], data: bytes, rng: random.Random) -> None:
    """Send on an own connection and end it in one of the usual ways."""
    reader, writer = await asyncio.open_connection(*address)
    try:
        cut = rng.randrange(len(data) + 1) if rng.random() < 0.3 else len(data)
        for piece in (data[:cut], data[cut:]):
            if piece:
                writer.write(piece)
                await asyncio.wait_for(writer.drain(), 1.0)
        if rng.random() < 0.3 and writer.can_write_eof():
            writer.write_eof()
        if rng.random() < 0.7:
            await asyncio.wait_for(reader.read(200), 0.05)
    except (OSError, asyncio.TimeoutError):
        pass  # refused, or it waits for more
    finally:
        if rng.random() < 0.3:
            raw = writer.get_extra_info("socket")
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()


async def _batter(targets: Sequence[tuple[str, int]], ctx: Context, most_s: float) -> Counter[str]:
    """Send all kinds to all sockets, eight connections at a time."""
    rng = ctx.random()
    end_s = time.monotonic() + min(most_s, ctx.left_s() / 2)
    sent: Counter[str] = Counter()

    async def work(own: random.Random) -> None:
        while time.monotonic() < end_s:
            kind = own.choice(KINDS)
            with contextlib.suppress(OSError):
                await _send(own.choice(targets), kind(own), own)
            sent[kind.__name__] += 1

    await asyncio.gather(*(work(random.Random(rng.getrandbits(32))) for _ in range(8)))
    return sent


def _logged(running: Running) -> list[str]:
    """Return what is wrong with a log: the sender's bytes, tracebacks, its size."""
    log = running.log()
    found = [f"{running.name} repeats the sender's bytes"] if MARK.decode() in log else []
    found += [f"{running.tracebacks()} tracebacks of {running.name}"] if running.tracebacks() else []
    return found if len(log) < 1 << 20 else [*found, f"{len(log) >> 20} MiB of log of {running.name}"]


async def _until(condition: Callable[[], object], seconds: float) -> bool:
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        found = condition()
        if await found if asyncio.iscoroutine(found) else found:
            return True
        await asyncio.sleep(0.1)
    return False


def _address(text: str) -> tuple[str, int]:
    return text.rpartition(":")[0], port(text)


async def of_collector(ctx: Context) -> Got:
    """Attack the collector's OTLP over gRPC and HTTP, and its API."""
    with collector(ctx.folder, "--otlp-grpc", "127.0.0.1:0") as running:
        await running.start()
        addresses = running.addresses
        before = running.descriptors()
        targets = [_address(addresses[name]) for name in ("otlp_grpc", "otlp_http", "api")]
        sent = await _batter(targets, ctx, ctx.scale(12, 120))
        wrong = [] if running.alive else [f"the collector ended with {running.status}: {running.last_line()}"]
        if running.alive:
            status, text = await get(addresses["api"], "/healthz", 20)
            wrong += [] if status == 200 else [f"/healthz: {status} {text[:80]}"]
            for protocol, name in (("grpc", "otlp_grpc"), ("http/protobuf", "otlp_http")):
                wrong += await _delivered(protocol, addresses[name])
            joined = await _until(lambda: _rows(addresses["api"], 2), 60)
            wrong += [] if joined else ["good requests do not come into the store"]
            freed = await _until(lambda: running.descriptors() <= before + 12, 60)
            wrong += [] if freed else [f"{running.descriptors()} descriptors are open, {before} before"]
        wrong += _logged(running)
        return _reported(sent, wrong)


async def _delivered(protocol: str, address: str) -> list[str]:
    """Deliver one request as edge, P and D see it, each in a batch."""
    client = OtlpClient(ClientSettings(endpoint=f"http://{address}", protocol=protocol, timeout_s=20))
    name = f"good-{protocol[:4]}"
    try:
        made = [r for r in split_request(name, name).values() if isinstance(r, Exchange)]
        shift = time.time_ns() - 10**10 - made[0].arrival_unix_ns
        for record in made:
            moved = replace(record, arrival_unix_ns=record.arrival_unix_ns + shift)
            accepted = await client.send(Signal.TRACES, batch([moved], 1, f"{protocol}-{record.process.role.value}"))
            if accepted.rejected:
                return [f"good OTLP over {protocol} is rejected: {accepted.message}"]
    except Exception as error:
        return [f"good OTLP over {protocol} fails: {error}"]
    finally:
        await client.close()
    return []


async def _rows(api: str, wanted: int) -> bool:
    status, text = await get(api, "/api/v1/requests?since=-1h", 20)
    return status == 200 and text.count("good-") >= wanted


async def of_sidecar(ctx: Context) -> Got:
    """Attack the sidecar's proxy, tap, admin port and the plugin's socket."""

    async def answer(peer: Peer) -> None:
        while (await peer.request())[0]:
            await peer.send(_OK)

    plugin = ctx.folder / "p.sock"
    flags = ("--plugin-socket", str(plugin), "--otlp-grpc", "127.0.0.1:0", "--otlp-http", "127.0.0.1:0")
    async with Upstream(answer) as upstream, _taken(ctx.folder) as (address, taken):
        with sidecar(ctx.folder, "decode", f"127.0.0.1:{upstream.port}", f"http://{address}", *flags) as running:
            await running.start()
            addresses = running.addresses
            targets = [_address(addresses[name]) for name in ("proxy", "admin", "otlp_grpc", "otlp_http")]
            before = running.descriptors()
            datagrams = asyncio.create_task(_datagrams(plugin, ctx))
            sent = await _batter(targets, ctx, ctx.scale(12, 120))
            sent["datagrams"] = await datagrams
            wrong = [] if running.alive else [f"the sidecar ended with {running.status}: {running.last_line()}"]
            if running.alive:
                status, text = await get(addresses["admin"], "/healthz", 20)
                wrong += [] if status == 200 else [f"/healthz: {status} {text[:80]}"]
                wrong += await _requested(_address(addresses["proxy"]))
                wrong += await _spoken(plugin, addresses["admin"])
                for protocol, name in (("grpc", "otlp_grpc"), ("http/protobuf", "otlp_http")):
                    wrong += await _delivered(protocol, addresses[name])
                passed = await _until(lambda: b"good-grpc" in taken() and b"good-http" in taken(), 60)
                wrong += [] if passed else ["what the tap acknowledged does not come to the collector"]
                freed = await _until(lambda: running.descriptors() <= before + 12, 60)
                wrong += [] if freed else [f"{running.descriptors()} descriptors are open, {before} before"]
            wrong += _logged(running)
            return _reported(sent, wrong)


@contextlib.asynccontextmanager
async def _taken(folder: Path) -> AsyncIterator[tuple[str, Callable[[], bytes]]]:
    """Serve a stand-in collector; yield its address and a reader of its payloads."""
    kept = Keeping()
    server = OtlpServer(kept, http=("127.0.0.1", 0), loopback_only=True)
    await server.start()
    assert server.http_address is not None
    try:
        yield f"127.0.0.1:{server.http_address[1]}", lambda: b"".join(payload for _, payload in kept.taken)
    finally:
        await server.shutdown(1)


async def _requested(address: tuple[str, int]) -> list[str]:
    try:
        reader, writer = await asyncio.wait_for(asyncio.open_connection(*address), 20)
        writer.write(_REQUESTED)
        found = await asyncio.wait_for(reader.readexactly(len(_OK)), 20)
        writer.transport.abort()
    except (OSError, asyncio.TimeoutError, asyncio.IncompleteReadError) as error:
        return [f"a good request through the proxy fails: {type(error).__name__}"]
    return [] if found == _OK else ["a good request through the proxy is answered otherwise"]


async def _datagrams(path: Path, ctx: Context) -> int:
    """Send hostile datagrams for a while; wait when the socket is full."""
    rng = random.Random(ctx.seed + 1)
    lines = _PLUGIN.read_bytes().splitlines()
    sent, end_s = 0, time.monotonic() + ctx.scale(10, 100)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.setblocking(False)
        while time.monotonic() < end_s:
            data = rng.choice((mutated(rng.choice(lines), lines, (*COMMON, nested_json), rng), rng.randbytes(50) + MARK))[:60_000]
            try:
                sender.sendto(data, str(path))
                sent += 1
            except OSError:
                await asyncio.sleep(0.01)
            if sent % 20 == 0:
                await asyncio.sleep(0.005)
    return sent


async def _spoken(path: Path, admin: str) -> list[str]:
    """Check that recorded datagrams of another engine become fetches."""
    before = (await metrics(admin)).get("handrail_sidecar_plugin_datagrams_total", 0.0)
    boots: dict[str, str] = {}
    lines = _PLUGIN.read_bytes().splitlines()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        for line in lines:
            packet = json.loads(line)
            packet[1] = boots.setdefault(packet[1], f"good{len(boots)}")
            sender.sendto(json.dumps(packet).replace("cmpl-", "cmpl-good-").encode(), str(path))

    async def come() -> bool:
        return (await metrics(admin)).get("handrail_sidecar_plugin_datagrams_total", 0.0) >= before + len(lines)

    return [] if await _until(come, 60) else ["good datagrams are not taken"]


def _reported(sent: Counter[str], wrong: Sequence[str]) -> Got:
    total = f"{sum(sent.values()):,} hostile sendings ({', '.join(f'{n} {kind}' for kind, n in sorted(sent.items()))})"
    if wrong:
        return f"{total}; {'; '.join(wrong)}", False
    return f"{total}; alive, good traffic as before, nothing of theirs in the log", True


_EXPECTED: Final = (
    "the process lives, good traffic goes on, descriptors come back, no traceback and none of their bytes in the log"
)

TRIALS: Final = (
    Trial(name="hostile.collector_sockets", group="hostile", expected=_EXPECTED, seconds=40, long_seconds=150, run=of_collector),
    Trial(name="hostile.sidecar_sockets", group="hostile", expected=_EXPECTED, seconds=40, long_seconds=150, run=of_sidecar),
)
