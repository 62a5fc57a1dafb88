"""Slow readers, large bodies and vanishing connections.

Memory, descriptors and times stay correct.
"""

from __future__ import annotations

import asyncio
import gc
import json
import math
import os
import random
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from handrail.records import Hint, Outcome
from handrail_sidecar.proxy.upstream import BUFFER_BYTES
from harness.proxy import (
    DEADLINE_S,
    DONE,
    END,
    SSE_HEAD,
    Peer,
    Proxied,
    Timeline,
    Upstream,
    case,
    chunk,
    client,
    event,
    everything,
    post,
    proxied,
    until,
)
from harness.skips import needs_ability

READ_BYTES = 262_144  # one read of uvloop


async def narrow(port: int, receive_bytes: int) -> Peer:
    """Open a client whose kernel buffers little while the client itself reads nothing."""
    raw = socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    raw.setblocking(False)
    await asyncio.get_running_loop().sock_connect(raw, ("127.0.0.1", port))
    reader, writer = await asyncio.open_connection(sock=raw, limit=1024)
    writer.transport.pause_reading()  # type: ignore[attr-defined]
    return Peer(reader, writer)


async def test_b21_a_slow_reader_changes_no_figure_but_its_own() -> None:
    script, clock, sent = case("http/B21_slow_reader.json"), Timeline(), asyncio.Event()
    times, expected = script["upstream_reads_s"], script["expected"]

    async def handler(peer: Peer) -> None:
        await peer.request()
        fill = SSE_HEAD + chunk(b": %b\n\n" % (b"x" * 40_000))  # what the kernel accepts
        await clock.send(peer, times[0], fill)
        for at in times:
            await clock.send(peer, at, chunk(event("t" * 80)))
        await clock.send(peer, times[-1], chunk(event("", finish="stop") + DONE) + END)
        sent.set()

    async with Upstream(handler) as upstream, proxied(upstream.port, clock=clock) as proxy:
        peer = await narrow(proxy.port, 2048)
        await peer.send(post())
        await asyncio.wait_for(sent.wait(), DEADLINE_S)  # the client's slowness delays no other
        clock.at(script["client_reads_from_s"])
        peer.writer.transport.resume_reading()  # type: ignore[attr-defined]
        await asyncio.wait_for(_drained(peer), DEADLINE_S)
        record = await proxy.recorded()
        peer.writer.close()
    assert record.ttft_token_ns == expected["ttft_s"] * 1e9
    assert record.gaps is not None
    assert record.gaps.count == expected["itl_count"]
    assert record.gaps.sum_ns == pytest.approx(expected["itl_count"] * expected["itl_s"] * 1e9, abs=100)
    assert record.gaps.max_ns == pytest.approx(expected["itl_s"] * 1e9, abs=2)
    assert record.first_delivered_ns == expected["first_delivered_s"] * 1e9
    assert record.write_blocked_ns == expected["write_blocked_s"] * 1e9
    assert Hint.CLIENT_SLOW in record.hints
    assert record.outcome is Outcome.OK
    assert proxy.source.stats.reads_paused == 0  # the buffer limit was not hit, so the engine never noticed
    assert record.stalls is None


async def test_b21_where_the_buffer_is_full_the_gap_that_follows_is_the_clients() -> None:
    """Case B21: the gap after a full buffer is no figure of the engine's.

    The proxy read nothing while it lasted.
    """
    clock = Timeline()

    async def handler(peer: Peer) -> None:
        await peer.request()
        await peer.send(SSE_HEAD)
        for number in range(12):
            await clock.send(peer, number * 0.025, chunk(event("t")))
        clock.at(0.3)
        await peer.send(chunk(b": %b\n\n" % (b"x" * (8 << 20))) + chunk(event("t")))  # more than all buffers on the way
        await peer.send(chunk(event("", finish="stop") + DONE) + END)

    async with Upstream(handler) as upstream, proxied(upstream.port, clock=clock) as proxy:
        peer = await narrow(proxy.port, 2048)
        await peer.send(post())
        await until(lambda: proxy.source.stats.reads_paused > 0)
        clock.at(0.8)  # what the client leaves unread
        peer.writer.transport.resume_reading()  # type: ignore[attr-defined]
        await asyncio.wait_for(_drained(peer), DEADLINE_S)
        record = await proxy.recorded()
        peer.writer.close()
    assert record.stalls is not None
    (stall,) = record.stalls.longest
    assert (stall.index, stall.gap_ns) == (11, 0.525e9)
    assert stall.held_ns == stall.excess_ns == record.stalls.held_ns == 0.5e9


async def _drained(peer: Peer) -> None:
    seen = b""
    while not seen.endswith(END):
        data = await peer.reader.read(65536)
        assert data
        seen = (seen + data)[-16:]


@pytest.mark.parametrize("kind", ["stream", "length"])
async def test_a_client_that_reads_nothing_stops_a_fast_upstream_and_loses_nothing(kind: str) -> None:
    total = 50 << 20
    piece = b"x" * (1 << 16)

    async def handler(peer: Peer) -> None:
        await peer.request()
        if kind == "stream":
            await peer.send(SSE_HEAD)
            for _ in range(total // len(piece)):
                await peer.send(chunk(b": " + piece[:-4] + b"\n\n"))
            await peer.send(END)
        else:
            await peer.send(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: %d\r\n\r\n" % total)
            for _ in range(total // len(piece)):
                await peer.send(piece)

    async with Upstream(handler) as upstream, proxied(upstream.port) as proxy:
        peer = await narrow(proxy.port, 65536)
        await peer.send(post())
        await until(lambda: proxy.source.stats.reads_paused > 0)
        taken = proxy.source.stats.upstream_bytes
        # In the proxy: at most the limit and the read that crossed it; in the client's kernel: its small receive buffer, doubled.
        assert taken < BUFFER_BYTES + READ_BYTES + 4 * 65536 + READ_BYTES
        peer.writer.transport.resume_reading()  # type: ignore[attr-defined]
        count = 0
        while data := await asyncio.wait_for(peer.reader.read(1 << 20), DEADLINE_S):
            count += len(data)
            if count >= total + (0 if kind == "length" else len(SSE_HEAD) + (total >> 16) * 10 + 5):
                break
        record = await proxy.recorded()
        assert count == proxy.source.stats.upstream_bytes
        assert count > total
        assert record.write_blocked_ns > 0
        peer.writer.close()


async def test_an_upstream_that_reads_nothing_stops_a_fast_client() -> None:
    go_on = asyncio.Event()
    total = 50 << 20

    async def handler(peer: Peer) -> None:
        head = await peer.reader.readuntil(b"\r\n\r\n")
        assert head
        peer.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await go_on.wait()
        peer.writer.transport.resume_reading()  # type: ignore[attr-defined]
        left = total
        while left:
            left -= len(await peer.reader.read(1 << 20))
        await peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")

    async with Upstream(handler) as upstream, proxied(upstream.port) as proxy, client(proxy.port) as peer:
        sending = asyncio.create_task(peer.send(post(b"x" * total)))
        await _stalled(proxy)
        # What the kernels of both sides hold (at most 6 MiB received, 4 MiB unsent, here) plus the limit and one read.
        assert proxy.source.stats.client_bytes < 20 << 20
        go_on.set()
        assert (await asyncio.wait_for(peer.reader.read(-1), DEADLINE_S)).endswith(b"ok")
        await sending
        assert (await proxy.recorded()).outcome is Outcome.OK


async def _stalled(proxy: Proxied) -> None:
    """Wait until the proxy has read something and then, for 50 turns, nothing more.

    A turn is one turn of the event loop.
    """
    still, last = 0, -1
    while still < 50:
        await asyncio.sleep(0.002)
        now = proxy.source.stats.client_bytes
        still, last = (still + 1, last) if now == last and now > 0 else (0, now)


@asynccontextmanager
async def child(*command: str) -> AsyncIterator[tuple[int, int, asyncio.subprocess.Process]]:
    """Run a listening script of ``tests`` in its own process.

    Yields its port, its pid and the process.
    """
    script = str(Path(__file__).parents[2] / command[0])
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(sys.executable, script, *command[1:], stdin=pipe, stdout=pipe)
    assert process.stdout is not None
    try:
        line = await asyncio.wait_for(process.stdout.readline(), DEADLINE_S)
        yield int(line.split()[1]), process.pid, process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def peak_rss_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmHWM")


def cpu_ms(pid: int) -> float:
    """Return the processor time of a process so far, in ms.

    It is that of the first thread, the proxy's only one that matters.
    """
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e6


@needs_ability(Path("/proc/self/status").exists(), "/proc, which tells the peak memory")
async def test_e21_64_mib_stream_through_with_little_memory_and_latency() -> None:
    size = 64 << 20
    body = b'{"model":"m","prompt":"' + b"a" * (size - 64)
    body += b" " * (size - len(body) - 16) + b'","stream":true}'
    assert len(body) == size

    came = 0

    async def handler(peer: Peer) -> None:
        nonlocal came
        while True:
            head = await peer.reader.readuntil(b"\r\n\r\n")
            length, came = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0]), 0
            while came < length:
                came += len(await peer.reader.read(1 << 20))
            await peer.send(SSE_HEAD + chunk(event("a", finish="stop") + DONE) + END)

    async def send(port: int, payload: bytes) -> None:
        nonlocal came
        came = 0
        whole = post(payload)
        async with client(port) as peer:
            await peer.send(whole[: -len(payload) // 2])
            await until(lambda: came > len(payload) // 4)  # before the rest is sent
            await peer.send(whole[-len(payload) // 2 :])
            await asyncio.wait_for(peer.reader.readuntil(END), DEADLINE_S)

    async with (
        Upstream(handler) as upstream,
        child("harness/proxy_child.py", str(upstream.port), "edge") as (port, pid, process),
        child("harness/proxy_peers.py", "relay", str(upstream.port)) as (bare_port, bare_pid, _),
    ):
        for each in (port, bare_port):
            await send(each, b'{"model":"m"}')
        before = peak_rss_bytes(pid)
        cost = {pid: math.inf, bare_pid: math.inf}
        for _ in range(3):
            for each, of in ((port, pid), (bare_port, bare_pid)):
                cpu_before = cpu_ms(of)
                await send(each, body)
                cost[of] = min(cost[of], cpu_ms(of) - cpu_before)
        grown = peak_rss_bytes(pid) - before
        process.send_signal(signal.SIGTERM)
        out, _ = await asyncio.wait_for(process.communicate(), DEADLINE_S)
    answer = json.loads(out)
    assert (answer["records"], answer["outcomes"], answer["observer_errors"]) == (4, {"ok": 4}, 0)
    assert grown < 16 << 20
    # The proxy streams the body, so it adds at most its work; a busy machine slows the bare relay equally (tests/bench)
    assert cost[pid] < 2 * cost[bare_pid]


async def test_e21_the_end_of_a_large_body_is_read_and_the_stream_known_from_its_answer() -> None:
    async def handler(peer: Peer) -> None:
        await peer.request()
        await peer.send(SSE_HEAD + chunk(event("a", finish="stop") + DONE) + END)

    body = b'{"model":"m","prompt":"' + b"a" * (3 << 20) + b'","stream":true}'
    async with Upstream(handler) as upstream, proxied(upstream.port) as proxy:
        await everything(proxy.port, post(body))
        record = await proxy.recorded()
        assert (record.inspected, record.stream, record.model) == ("partial", True, "m")


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def over(proxy: Proxied, connections: int) -> bool:
    """Return whether so many connections have come and all are gone.

    Only the test's own tasks are left.
    """
    stats = proxy.source.stats
    return (stats.connections, stats.open_connections) == (connections, 0) and len(asyncio.all_tasks()) <= 2


@needs_ability(Path("/proc/self/fd").exists(), "/proc, in which descriptors are counted")
async def test_fifty_connections_cut_at_random_points_leave_nothing_behind() -> None:
    chance = random.Random(7)
    wire = SSE_HEAD + b"".join(chunk(event("t")) for _ in range(30)) + chunk(event("", finish="stop") + DONE) + END
    request = post()

    async def handler(peer: Peer) -> None:
        while (await peer.request())[0]:
            cut = chance.randrange(len(wire) * 2)
            for at in range(0, min(cut, len(wire)), 200):
                await peer.send(wire[at : min(at + 200, cut)])
            if cut < len(wire):
                peer.writer.transport.abort()
                return

    async def one(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        sent, left = chance.randrange(1, len(request) * 3), chance.randrange(len(wire) * 2)
        try:
            writer.write(request[:sent])
            left = min(left, len(wire)) if sent >= len(request) else 0  # a partial request gets no answer
            while left > 0 and (data := await asyncio.wait_for(reader.read(min(left, 500)), DEADLINE_S)):
                left -= len(data)
        except ConnectionError:
            pass
        finally:
            if chance.random() < 0.5:
                writer.transport.abort()
            else:
                writer.close()

    async with Upstream(handler) as upstream, proxied(upstream.port) as proxy:
        await asyncio.gather(*(one(proxy.port) for _ in range(3)))
        await until(lambda: over(proxy, 3))
        gc.collect()
        before = descriptors()
        for _ in range(5):
            await asyncio.gather(*(one(proxy.port) for _ in range(10)))
        await until(lambda: over(proxy, 53))
        await until(lambda: descriptors() <= before)
        assert sum(proxy.source.stats.outcomes.values()) == len(proxy.records) > 10
        assert proxy.source.stats.observer_errors == 0
