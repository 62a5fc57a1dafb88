"""The proxy accepts as many streams as fit and answers 503 beyond that.

It disconnects clients that owe it a request for too long.
"""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import socket
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Any

import pytest

from handrail.records import Outcome
from handrail.runtime.connections import QUIET_S
from handrail.runtime.descriptors import DescriptorBudget
from handrail_sidecar.proxy.admission import DESCRIPTORS_EACH, KEPT, REFUSALS, Admission
from harness.proxy import (
    DEADLINE_S,
    DONE,
    END,
    SSE_HEAD,
    Peer,
    Proxied,
    Timeline,
    Upstream,
    chunk,
    client,
    event,
    everything,
    post,
    until,
)
from harness.proxy import proxied as any_proxied

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
TICKS = {"idle_after_finish_s": 0.04}  # the proxy checks its limits every 10 ms


def proxied(port: int, **settings: Any) -> AbstractAsyncContextManager[Proxied]:
    return any_proxied(port, **{**TICKS, **settings})


async def answer(peer: Peer) -> None:
    while (await peer.request())[0]:
        await peer.send(OK)


async def stream(peer: Peer) -> None:
    """Answer with a stream that goes on until the other side leaves."""
    await peer.request()
    await peer.send(SSE_HEAD + chunk(event("a")))
    await peer.gone()


async def begun(peer: Peer) -> Peer:
    await peer.send(post())
    await asyncio.wait_for(peer.reader.readuntil(b"\n\n"), DEADLINE_S)
    return peer


async def ticked(proxy: Proxied) -> None:
    """Wait until the proxy has checked its limits again."""
    ticks = proxy.source.ticks
    await until(lambda: proxy.source.ticks > ticks + 1)


async def to_end(peer: Peer) -> bytes:
    return await asyncio.wait_for(peer.reader.read(-1), DEADLINE_S)


def budget(limit: int, in_use: int, reserved: int = 0) -> DescriptorBudget:
    return DescriptorBudget(limit, reserved, clock=lambda: 0.0, count=lambda: in_use)


# --- the count ------------------------------------------------------------------------------------------------------------


def test_stream_costs_two_descriptors_from_its_admission_on() -> None:
    limit = 1000
    found = Admission(budget(limit, 0))
    fit = (limit - KEPT) // DESCRIPTORS_EACH
    assert (found.free_streams(), found.capacity, found.crowded) == (fit, fit, False)
    taken = 0
    while found.has_room() and found.admit("peer") is None and found.stream():
        taken += 1
        if taken % 2:
            found.opening()  # half of them have their upstream connection
    assert taken == fit
    assert found.crowded
    assert f"{fit} of {fit} streams are open" in found.problem()


def test_reserve_is_nobodys_and_a_small_limit_keeps_a_quarter() -> None:
    assert Admission(budget(1000, 0, reserved=200)).free_streams() == (800 - KEPT) // 2
    assert Admission(budget(100, 20, reserved=40)).free_streams() == (60 - 15 - 20) // 2


def test_refusals_are_bounded_and_leave_descriptors_to_others() -> None:
    found = Admission(budget(1000, 0))
    while found.has_room():
        found.admit("peer")
        found.stream()
    assert found.connections - found.streams == REFUSALS
    assert 1000 - found.streams * 2 - REFUSALS >= KEPT - REFUSALS


def test_recount_between_decision_and_opening_loses_no_descriptor() -> None:
    """Connections that are admitted and not yet open keep their descriptors.

    No count of the process's descriptors includes them yet.
    """
    opened, now = [0], [0.0]
    found = Admission(DescriptorBudget(1000, 100, clock=lambda: now[0], count=lambda: opened[0]))
    streams = 0
    while found.has_room():
        opened[0] += 1  # the accepted connection; its upstream connection never opens
        found.admit("peer")
        streams += found.stream()
        now[0] += 1.0  # counted again each time
    assert streams <= (1000 - 100 - KEPT) // DESCRIPTORS_EACH
    assert found.connections - found.streams == REFUSALS


def test_refusals_go_on_where_others_have_taken_what_was_kept_for_them() -> None:
    others = [0]
    found = Admission(DescriptorBudget(1000, 100, clock=iter(range(10**6)).__next__, count=lambda: others[0]))
    others[0] = 920
    assert not found.stream()
    assert found.has_room()
    others[0] = 950
    assert not found.has_room()


def test_connections_in_their_handshake_count_as_the_streams_that_they_will_be() -> None:
    found = Admission(budget(1000, 0))
    accepted = 0
    while found.has_room():
        found.admit("peer")
        accepted += 1
    streams = sum(found.stream() for _ in range(accepted))
    assert streams >= (1000 - KEPT) // 2 - REFUSALS


def test_everything_is_given_back() -> None:
    found = Admission(budget(1000, 10), most=5)
    before = found.free_streams()
    for connected in (True, False):
        found.admit("peer")
        assert found.stream()
        if connected:
            found.opening()
            found.disconnected()
        found.closed(stream=True, owed=not connected)
    assert (found.free_streams(), found.streams, found.connections) == (before, 0, 0)
    assert found._free(budget(1000, 10)) == 1000 - 10 - KEPT


@pytest.mark.parametrize(("open_", "crowded"), [(89, False), (90, True), (100, True)])
def test_ninety_per_cent_are_crowded(open_: int, crowded: bool) -> None:
    found = Admission(most=100)
    for _ in range(open_):
        found.admit("peer")
        assert found.stream()
    assert (found.crowded, bool(found.problem())) == (crowded, crowded)


def test_without_a_limit_everything_fits() -> None:
    found = Admission()
    for _ in range(10_000):
        assert found.has_room()
        found.admit("peer")
        assert found.stream()
    assert (found.free_streams(), found.capacity, found.problem()) == (None, None, "")


def test_pauses_are_logged_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    found = Admission(clock=lambda: now[0])
    for second in (0.0, 1.0, 2.0, 3.0 + QUIET_S):
        now[0] = second
        found.pause("no room")
    assert found.pauses == 4
    assert len(caplog.records) == 2


# --- 503 ------------------------------------------------------------------------------------------------------------------


async def test_stream_that_does_not_fit_gets_503_and_the_others_go_on(caplog: pytest.LogCaptureFixture) -> None:
    clock, go_on = Timeline(), asyncio.Event()

    async def handler(peer: Peer) -> None:
        await peer.request()
        await peer.send(SSE_HEAD + chunk(event("a")))
        await go_on.wait()
        await peer.send(chunk(event("", finish="stop")) + chunk(DONE) + END)

    caplog.set_level(logging.INFO)
    async with Upstream(handler) as upstream, proxied(upstream.port, max_streams=2, clock=clock) as proxy:
        async with client(proxy.port) as first, client(proxy.port) as second:
            await begun(first)
            await begun(second)
            for count in (1, 2, 3):
                got = await everything(proxy.port, post())
                head, _, body = got.partition(b"\r\n\r\n")
                assert head.startswith(b"HTTP/1.1 503 Service Unavailable\r\n")
                assert b"\r\nRetry-After: 1\r\n" in head
                assert b"\r\nConnection: close" in head
                assert json.loads(body)["error"] == {
                    "message": "handrail: no more streams fit",
                    "type": "overloaded",
                    "code": 503,
                }
                record = await proxy.recorded(count)
                assert (record.outcome, record.status, record.error_type) == (Outcome.HTTP_ERROR, 503, "streams")
            assert proxy.source.stats.refused_streams == {"streams": 3, "descriptors": 0}
            assert "2 of 2 streams are open" in proxy.source.problem()
            assert upstream.connections == 2
            go_on.set()
            for peer in (first, second):
                assert (await asyncio.wait_for(peer.reader.readuntil(END), DEADLINE_S)).endswith(END)
        await until(lambda: proxy.source.stats.open_connections == 0)
        assert proxy.source.problem() == ""
        assert (await everything(proxy.port, post())).startswith(b"HTTP/1.1 200 ")
        clock.at(6)
        await until(lambda: any("accepts streams again" in line for line in caplog.messages))
    assert sum("refuses streams" in line for line in caplog.messages) == 1
    assert any("it refused 3 with 503" in line for line in caplog.messages)


async def test_refused_connection_that_asks_when_there_is_room_again_is_served() -> None:
    async with Upstream(stream) as upstream, proxied(upstream.port, max_streams=1) as proxy, client(proxy.port) as first:
        await begun(first)
        async with client(proxy.port) as late:
            await until(lambda: proxy.source.stats.open_connections == 2)
            first.writer.transport.abort()
            await until(lambda: proxy.source.stats.open_connections == 1)
            await begun(late)
        assert proxy.source.stats.refused_streams["streams"] == 0


async def test_refused_connection_that_asks_nothing_gets_503_too() -> None:
    clock = Timeline()
    async with (
        Upstream(stream) as upstream,
        proxied(upstream.port, max_streams=1, clock=clock) as proxy,
        client(proxy.port) as first,
    ):
        await begun(first)
        async with client(proxy.port) as silent:
            await until(lambda: proxy.source.stats.open_connections == 2)
            clock.at(2.5)
            assert (await to_end(silent)).startswith(b"HTTP/1.1 503 ")
        assert proxy.source.stats.refused_streams["streams"] == 1


async def test_hundreds_beyond_the_limit_wait_in_the_backlog_and_are_refused_in_turn() -> None:
    async with Upstream(stream) as upstream, proxied(upstream.port, max_streams=3) as proxy:
        async with client(proxy.port) as a, client(proxy.port) as b, client(proxy.port) as c:
            for peer in (a, b, c):
                await begun(peer)
            got = await asyncio.gather(*(everything(proxy.port, post()) for _ in range(10 * REFUSALS)))
            assert all(each.startswith(b"HTTP/1.1 503 ") for each in got)
        assert proxy.source.stats.refused_streams["streams"] == 10 * REFUSALS
        await until(lambda: proxy.source.stats.open_connections == 0)
        assert (proxy.source.admission.connections, proxy.source.admission.streams) == (0, 0)


async def test_budget_of_the_process_bounds_the_streams() -> None:
    found = budget(60, 30)  # a quarter of 60 is kept: 15 are left
    async with Upstream(stream) as upstream, proxied(upstream.port, budget=found) as proxy:
        async with AsyncExitStack() as stack:
            peers = [await stack.enter_async_context(client(proxy.port)) for _ in range(9)]
            for peer in peers:
                await peer.send(post())
            heads = [await asyncio.wait_for(peer.reader.readuntil(b"\r\n"), DEADLINE_S) for peer in peers]
            assert sum(head.startswith(b"HTTP/1.1 200 ") for head in heads) == 7
            assert sum(head.startswith(b"HTTP/1.1 503 ") for head in heads) == 2
        await until(lambda: proxy.source.stats.open_connections == 0)
        await until(lambda: found.in_use() == 30)


async def test_slow_connections_to_the_upstream_are_counted_once() -> None:
    """Sockets that are open already are not counted a second time as owed."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:  # nobody accepts: further connections stay half open
        port = full.getsockname()[1]
        recounted = DescriptorBudget(10_000, 100, recount_s=0.0)
        async with proxied(port, budget=recounted) as proxy, AsyncExitStack() as stack:
            peers = [await stack.enter_async_context(client(proxy.port)) for _ in range(20)]
            await until(lambda: proxy.source.admission.streams == 20)
            before = proxy.source.admission.capacity
            assert before is not None
            for peer in peers:
                await peer.send(post())
            await until(lambda: proxy.source.stats.requests == 20)
            now = proxy.source.admission.capacity
            assert now is not None
            assert abs(now - before) <= 1


async def test_idle_connection_gives_way_to_a_new_stream() -> None:
    clock = Timeline()
    async with Upstream(answer) as upstream, proxied(upstream.port, max_streams=1, clock=clock) as proxy:
        async with client(proxy.port) as kept:
            await kept.send(post())
            assert await asyncio.wait_for(kept.reader.readexactly(len(OK)), DEADLINE_S) == OK
            assert (await everything(proxy.port, post())).startswith(b"HTTP/1.1 503 "), "it may be used again any moment"
            clock.at(6)
            await ticked(proxy)
            async with client(proxy.port) as fresh:
                await fresh.send(post())
                assert await asyncio.wait_for(fresh.reader.readexactly(len(OK)), DEADLINE_S) == OK
            assert await to_end(kept) == b""
        assert proxy.source.stats.displaced == 1


async def test_silent_connections_give_way_to_a_request() -> None:
    clock = Timeline()
    async with (
        Upstream(answer) as upstream,
        proxied(upstream.port, max_streams=3, clock=clock) as proxy,
        AsyncExitStack() as stack,
    ):
        silent = [await stack.enter_async_context(client(proxy.port)) for _ in range(3)]
        await until(lambda: proxy.source.admission.streams == 3)
        assert (await everything(proxy.port, post(headers="Connection: close\r\n"))).startswith(b"HTTP/1.1 503 ")
        clock.at(6)
        await ticked(proxy)
        for _ in range(2):
            assert await everything(proxy.port, post(headers="Connection: close\r\n")) == OK
        assert 1 <= proxy.source.stats.displaced <= 2
        reads = [asyncio.create_task(peer.reader.readline()) for peer in silent]  # any may be the one: all are equally old
        done, waiting = await asyncio.wait(reads, timeout=DEADLINE_S, return_when=asyncio.FIRST_COMPLETED)
        for task in waiting:
            task.cancel()
        assert done
        assert all(task.result().startswith(b"HTTP/1.1 503 ") for task in done)


def test_no_descriptor_for_the_upstream_is_503_and_no_502() -> None:
    """Runs on asyncio's own loop, whose ``create_connection`` a test can replace."""

    async def run(error: OSError) -> tuple[bytes, Proxied]:
        async with any_proxied(1) as proxy:
            loop, connect = asyncio.get_running_loop(), asyncio.get_running_loop().create_connection

            async def fail(factory: Any, host: Any = None, port: Any = None, **more: Any) -> Any:
                if port == 1:
                    raise error
                return await connect(factory, host, port, **more)

            loop.create_connection = fail  # type: ignore[method-assign, assignment]
            got = await everything(proxy.port, post())
            await proxy.recorded()
            return got, proxy

    for error in (
        OSError(errno.EMFILE, "Too many open files"),
        OSError(errno.ENFILE, "Too many open files in system"),
        OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address"),
        OSError("Multiple exceptions: [Errno 24] Too many open files, [Errno 24] Too many open files"),
    ):
        got, proxy = asyncio.run(run(error))
        assert got.startswith(b"HTTP/1.1 503 ")
        assert b"\r\nRetry-After: 1\r\n" in got
        assert proxy.source.stats.refused_streams["descriptors"] == 1
        assert proxy.records[0].error_type == "descriptors"
    got, _ = asyncio.run(run(OSError(errno.EHOSTUNREACH, "No route to host")))
    assert got.startswith(b"HTTP/1.1 502 ")


# --- time limits ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sent", [b"", b"\r\n", b"\r", b"GET /x HT", b"POST /v1/completions HTTP/1.1\r\nHost: h\r\n"])
async def test_head_that_does_not_come_ends_the_connection(sent: bytes) -> None:
    clock = Timeline()
    async with Upstream(answer) as upstream, proxied(upstream.port, clock=clock, head_timeout_s=30.0) as proxy:
        async with client(proxy.port) as peer:
            await peer.send(sent)
            await until(lambda: proxy.source.stats.open_connections == 1 and proxy.source.stats.client_bytes == len(sent))
            clock.at(31)
            got = await to_end(peer)
            assert got.startswith(b"HTTP/1.1 408 ") if sent.strip() or sent == b"\r" else got == b""
        assert proxy.source.stats.timeouts == {"head": 1, "idle": 0, "body": 0}
        assert upstream.connections == 0


@pytest.mark.parametrize("stray", [b"", b"\r\n"], ids=["nothing", "an empty line"])
async def test_connection_that_is_not_used_again_is_closed(stray: bytes) -> None:
    clock = Timeline()
    async with Upstream(answer) as upstream, proxied(upstream.port, clock=clock, idle_timeout_s=300.0) as proxy:
        async with client(proxy.port) as peer:
            await peer.send(post() + stray)
            await asyncio.wait_for(peer.reader.readexactly(len(OK)), DEADLINE_S)
            clock.at(299)
            await peer.send(post())
            await asyncio.wait_for(peer.reader.readexactly(len(OK)), DEADLINE_S)
            clock.at(600)
            assert await to_end(peer) == b""
        assert proxy.source.stats.timeouts == {"head": 0, "idle": 1, "body": 0}
        assert upstream.connections == 1


async def test_body_that_stops_gets_408() -> None:
    clock = Timeline()

    async def handler(peer: Peer) -> None:
        await peer.reader.readuntil(b"\r\n\r\n")
        await peer.gone()

    async with Upstream(handler) as upstream, proxied(upstream.port, clock=clock, idle_timeout_s=300.0) as proxy:
        async with client(proxy.port) as peer:
            await peer.send(post(b"x" * 1000)[:-500])
            await until(lambda: upstream.connections == 1 and proxy.source.stats.upstream_connections == 1)
            clock.at(301)
            assert (await to_end(peer)).startswith(b"HTTP/1.1 408 ")
        assert (await proxy.recorded()).outcome is Outcome.CLIENT_DISCONNECT
        assert proxy.source.stats.timeouts["body"] == 1


async def test_no_limit_touches_an_answer_however_long_it_takes() -> None:
    clock = Timeline()
    async with (
        Upstream(stream) as upstream,
        proxied(upstream.port, clock=clock, head_timeout_s=1.0, idle_timeout_s=1.0) as proxy,
        client(proxy.port) as peer,
    ):
        await begun(peer)
        for hours in range(1, 5):
            clock.at(3600 * hours)
            await ticked(proxy)
        assert proxy.source.stats.open_connections == 1
        assert not peer.reader.at_eof()


async def test_request_sent_ahead_of_a_long_answer_has_its_time_from_then_on() -> None:
    clock, go_on = Timeline(), asyncio.Event()

    async def handler(peer: Peer) -> None:
        await peer.request()
        await go_on.wait()
        await peer.send(OK)
        await peer.request()
        await peer.send(OK)

    async with (
        Upstream(handler) as upstream,
        proxied(upstream.port, clock=clock, head_timeout_s=30.0) as proxy,
        client(proxy.port) as peer,
    ):
        ahead = post()[:10]
        await peer.send(post() + ahead)
        await until(lambda: len(upstream.heads) == 1)
        clock.at(1000)
        go_on.set()
        await asyncio.wait_for(peer.reader.readexactly(len(OK)), DEADLINE_S)
        await ticked(proxy)
        await peer.send(post()[10:])
        assert await asyncio.wait_for(peer.reader.readexactly(len(OK)), DEADLINE_S) == OK


# --- tasks that must not end ----------------------------------------------------------------------------------------------


async def test_fault_in_one_look_at_the_connections_ends_no_later_look(caplog: pytest.LogCaptureFixture) -> None:
    async with Upstream(answer) as upstream, proxied(upstream.port) as proxy:
        relay = proxy.source._relay
        assert relay is not None
        real, faults = relay.tick, []

        def broken() -> None:
            faults.append(1)
            if len(faults) <= 2:
                raise OSError(errno.EMFILE, "Too many open files")
            real()

        relay.tick = broken  # type: ignore[method-assign]
        await until(lambda: len(faults) > 4)
        assert proxy.source.stats.observer_errors == 2
    assert sum(record.exc_info is not None for record in caplog.records) == 1, "logged once"


def test_upstream_name_that_cannot_be_resolved_is_502() -> None:
    async def run() -> bytes:
        async with any_proxied(1) as proxy:
            object.__setattr__(proxy.source.settings, "upstream_host", f"{'a' * 64}.example")  # a label that is too long
            return await asyncio.wait_for(everything(proxy.port, post()), DEADLINE_S)

    assert asyncio.run(run()).startswith(b"HTTP/1.1 502 ")
