"""How an exchange may end, and what the client and the record then see."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct

import pytest

from handrail.records import Hint, Outcome, Process, Role
from handrail_sidecar.proxy.settings import ProxySettings
from handrail_sidecar.sources.proxy import ProxySource
from harness.ports import refusing_port
from harness.proxy import (
    DATA,
    DEADLINE_S,
    DONE,
    END,
    SSE_HEAD,
    Peer,
    Timeline,
    Upstream,
    case,
    chunk,
    client,
    event,
    everything,
    post,
    proxied,
    replay,
    until,
)


async def to_end(peer: Peer) -> bytes:
    return await asyncio.wait_for(peer.reader.read(-1), DEADLINE_S)


async def test_e07_a_body_cut_inside_a_chunk_is_passed_and_not_ended_cleanly() -> None:
    async with Upstream(replay("sse/E07_cut_inside_chunk.sse.json")) as upstream, proxied(upstream.port) as proxy:
        got = await everything(proxy.port, post(path="/v1/chat/completions"))
        assert got == await everything(upstream.port, post(path="/v1/chat/completions"))
        assert got.endswith(b'{"index":0,"del')
        record = await proxy.recorded()
        assert (record.outcome, record.status) == (Outcome.UPSTREAM_DISCONNECT, 200)
        # The proxy keeps running.
        assert (await everything(proxy.port, post(path="/v1/chat/completions"))) == got


async def test_a_length_cut_short_is_an_upstream_disconnect() -> None:
    async def handler(peer: Peer) -> None:
        await peer.request()
        await peer.send(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{")

    async with Upstream(handler) as upstream, proxied(upstream.port) as proxy:
        assert (await everything(proxy.port, post())).endswith(b"\r\n\r\n{")
        assert (await proxy.recorded()).outcome is Outcome.UPSTREAM_DISCONNECT


async def test_a_reset_of_a_body_without_length_is_no_clean_end_for_the_client() -> None:
    async def handler(peer: Peer) -> None:
        await peer.request()
        await peer.send(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n" + event("a"))
        await until(lambda: proxy.source.stats.upstream_bytes > 0)
        raw = peer.writer.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        peer.writer.transport.abort()

    async with Upstream(handler) as upstream, proxied(upstream.port) as proxy:
        with pytest.raises(ConnectionResetError):
            await everything(proxy.port, post())
        assert (await proxy.recorded()).outcome is Outcome.UPSTREAM_DISCONNECT


async def test_e15_a_client_that_leaves_before_the_first_byte_is_noticed_at_once() -> None:
    closed, clock = asyncio.Event(), Timeline()

    async def handler(peer: Peer) -> None:
        await peer.request()
        await peer.gone()
        closed.set()

    async with Upstream(handler) as upstream, proxied(upstream.port, clock=clock) as proxy:
        async with client(proxy.port) as peer:
            await peer.send(post(b'{"model":"m"}'))
            await until(lambda: len(upstream.heads) == 1)
            clock.at(1.5)  # when it leaves
        await asyncio.wait_for(closed.wait(), DEADLINE_S)  # the engine sees it, although nothing was ever written to the client
        record = await proxy.recorded()
        assert (record.outcome, record.status, record.ttfb_ns, record.model) == (Outcome.CLIENT_DISCONNECT, None, None, "m")
        assert record.duration_ns == 1.5e9


async def test_e15_also_in_the_middle_of_its_body() -> None:
    async def handler(peer: Peer) -> None:
        await peer.reader.readuntil(b"\r\n\r\n")
        await peer.gone()

    async with Upstream(handler) as upstream, proxied(upstream.port) as proxy:
        async with client(proxy.port) as peer:
            await peer.send(post(b"x" * 1000)[:-500])
            await until(lambda: upstream.connections == 1)
        record = await proxy.recorded()
        assert (record.outcome, record.request_done_ns) == (Outcome.CLIENT_DISCONNECT, None)


async def test_a_client_that_leaves_in_the_stream_ends_the_upstream_connection() -> None:
    async def handler(peer: Peer) -> None:
        await peer.request()
        await peer.send(SSE_HEAD + chunk(event("a")))
        await peer.gone()

    async with Upstream(handler) as upstream, proxied(upstream.port) as proxy:
        async with client(proxy.port) as peer:
            await peer.send(post())
            await asyncio.wait_for(peer.reader.readuntil(b"\n\n"), DEADLINE_S)
        record = await proxy.recorded()
        assert (record.outcome, record.events) == (Outcome.CLIENT_DISCONNECT, 1)


async def test_e16_the_records_tell_that_the_abort_came_after_the_prefill_answer() -> None:
    """Case E16: the records show that the abort came after the prefill answer.

    Edge and prefill proxies are around a router that has P's answer when its client leaves.
    """
    kv = {"remote_engine_id": "e", "remote_request_id": "r", "remote_block_ids": [1]}
    answer = json.dumps({"choices": [{"index": 0, "text": "", "finish_reason": "length"}], "kv_transfer_params": kv}).encode()
    response = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(answer), answer)

    async def prefill(peer: Peer) -> None:
        await peer.request()
        await peer.send(response)

    answered = asyncio.Event()

    async with Upstream(prefill) as p, proxied(p.port, role=Role.PREFILL) as at_p:

        async def router(peer: Peer) -> None:
            await peer.request()
            await everything(at_p.port, post())
            answered.set()
            await peer.gone()

        async with Upstream(router) as r, proxied(r.port) as edge:
            async with client(edge.port) as peer:
                await peer.send(post())
                await asyncio.wait_for(answered.wait(), DEADLINE_S)
            aborted, prefilled = await edge.recorded(), await at_p.recorded()
    assert (prefilled.outcome, aborted.outcome) == (Outcome.OK, Outcome.CLIENT_DISCONNECT)
    assert prefilled.kv_out is not None
    assert prefilled.kv_out.remote_request_id == "r"
    ends = [record.arrival_unix_ns + record.duration_ns for record in (prefilled, aborted)]
    assert ends == sorted(ends)


async def test_e18_an_http2_preface_is_a_protocol_error_and_no_request() -> None:
    async def handler(peer: Peer) -> None:
        raise AssertionError("must not be reached")

    async with Upstream(handler) as upstream, proxied(upstream.port, record_all=True) as proxy:
        got = await everything(proxy.port, (DATA / "http/E18_h2_preface.raw").read_bytes())
        assert got.startswith(b"HTTP/1.1 400 ")
        assert (proxy.source.stats.protocol_errors, proxy.source.stats.requests, proxy.records) == (1, 0, [])
        assert upstream.connections == 0


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        pytest.param(
            post()[:-1].replace(b"Content-Length", b"Transfer-Encoding: chunked\r\nContent-Length"), 400, id="two framings"
        ),
        pytest.param(post(headers="Content-Length: 5\r\n"), 400, id="two lengths"),
        pytest.param(post(headers="X : y\r\n"), 400, id="space before a colon"),
        pytest.param(b"GET / HTTP/1.1\nHost: h\n\n", 400, id="bare line feeds"),
        pytest.param(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400, id="TLS"),
        pytest.param(b"CONNECT h:1 HTTP/1.1\r\nHost: h\r\n\r\n", 405, id="CONNECT"),
        pytest.param(b"GET / HTTP/1.1\r\nX: " + b"a" * 70_000, 431, id="head without an end"),
    ],
)
async def test_what_is_no_request_is_refused_before_the_upstream_hears_of_it(request_: bytes, status: int) -> None:
    async def handler(peer: Peer) -> None:
        raise AssertionError("must not be reached")

    async with Upstream(handler) as upstream, proxied(upstream.port, record_all=True) as proxy:
        got = await everything(proxy.port, request_)
        head, _, body = got.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 %d " % status)
        assert json.loads(body)["error"]["code"] == status
        assert (proxy.source.stats.protocol_errors, proxy.records, upstream.connections) == (1, [], 0)


@pytest.mark.parametrize("bad", [b"zz\r\n", b"3\nabc\n", b"3\r\nabcdef\r\n", b"1000000000000000000\r\n"])
async def test_a_bad_chunk_of_a_request_never_reaches_the_upstream(bad: bytes) -> None:
    bodies = []

    async def handler(peer: Peer) -> None:
        bodies.append((await peer.reader.read(-1)).partition(b"\r\n\r\n")[2])

    head = b"POST /v1/completions HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n"
    async with Upstream(handler) as upstream, proxied(upstream.port) as proxy:
        got = await everything(proxy.port, head + chunk(b"good") + bad)
        assert got.startswith(b"HTTP/1.1 400 ")
        await until(lambda: len(bodies) == 1)
        assert bodies[0] in (b"", chunk(b"good"), chunk(b"good") + chunk(b"abc"))
        assert proxy.source.stats.protocol_errors == 1


async def test_smuggled_bytes_in_a_chunk_extension_do_not_get_through() -> None:
    got = []

    async def handler(peer: Peer) -> None:
        got.append(await peer.request())
        await peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")

    head = b"POST /v1/completions HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n"
    async with Upstream(handler) as upstream, proxied(upstream.port, trace_context="pass", request_id="pass") as proxy:
        await everything(proxy.port, head + b"03;evil=GET / HTTP/1.1\r\nabc\r\n0\r\n\r\n")
        assert got == [(head, b"3\r\nabc\r\n0\r\n\r\n")]


@pytest.mark.parametrize("method", ["POST", "HEAD"])
async def test_an_upstream_that_refuses_gives_502_and_a_record(method: str) -> None:
    with refusing_port() as port:
        async with proxied(port, record_all=True) as proxy:
            got = await everything(proxy.port, post().replace(b"POST", method.encode()))
            head, _, body = got.partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 502 Bad Gateway\r\n")
            if method == "HEAD":
                assert body == b""
            else:
                message = f"handrail: upstream 127.0.0.1:{port} refused the connection"
                assert json.loads(body) == {"error": {"message": message, "type": "bad_gateway", "code": 502}}
            record = await proxy.recorded()
            assert (record.outcome, record.status, record.error_type) == (Outcome.UPSTREAM_UNREACHABLE, 502, "connection_refused")
            assert proxy.source.stats.connect_failures == 1


async def test_an_upstream_that_does_not_answer_the_connect_gives_504() -> None:
    # A listener whose backlog is full drops further SYNs.
    with socket.socket() as full, contextlib.ExitStack() as queued:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for _ in range(4):
            waiting = queued.enter_context(socket.socket())
            waiting.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                waiting.connect(full.getsockname())
        async with proxied(full.getsockname()[1], connect_timeout_s=0.1) as proxy:
            got = await everything(proxy.port, post())
            assert got.startswith(b"HTTP/1.1 504 Gateway Timeout\r\n")
            record = await proxy.recorded()
            assert (record.outcome, record.status, record.error_type) == (
                Outcome.UPSTREAM_UNREACHABLE,
                504,
                "connect_timeout",
            )


async def test_an_unreachable_upstream_answers_a_client_that_is_still_sending() -> None:
    with refusing_port() as port:
        async with proxied(port) as proxy, client(proxy.port) as peer:
            peer.writer.write(post(b"x" * (4 << 20)))
            assert (await asyncio.wait_for(peer.reader.readuntil(b"\r\n\r\n"), DEADLINE_S)).startswith(b"HTTP/1.1 502 ")


@pytest.mark.parametrize("framing", ["length", "chunked"])
async def test_a_body_above_the_limit_is_refused(framing: str) -> None:
    async def handler(peer: Peer) -> None:
        await peer.request()

    request = post(b"x" * 2000)
    if framing == "chunked":
        request = b"POST /v1/completions HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n" + chunk(b"x" * 900) * 3
    async with Upstream(handler) as upstream, proxied(upstream.port, max_body_bytes=1000) as proxy:
        assert (await everything(proxy.port, request)).startswith(b"HTTP/1.1 413 ")
        record = await proxy.recorded()
        assert (record.outcome, record.status) == (Outcome.HTTP_ERROR, 413)
        assert proxy.source.stats.refused_bodies == 1


async def test_e06b_a_finished_stream_left_open_is_recorded_once_and_never_cut() -> None:
    release, clock = asyncio.Event(), Timeline()
    script = replay("sse/E06_b_finish_then_open.sse.json", clock)

    async def handler(peer: Peer) -> None:
        serving = asyncio.create_task(script(peer))
        await release.wait()
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        await peer.send(chunk(DONE) + END)

    async with (
        Upstream(handler) as upstream,
        proxied(upstream.port, clock=clock, idle_after_finish_s=0.1) as proxy,
        client(proxy.port) as peer,
    ):
        await peer.send(post(path="/v1/chat/completions"))
        await asyncio.wait_for(peer.reader.readuntil(b'"finish_reason":"stop"'), DEADLINE_S)
        clock.at(0.6)
        record = await proxy.recorded()
        assert Hint.CLOSE_MISSING in record.hints
        assert record.outcome is Outcome.OK
        assert record.finish_ns is not None
        assert record.duration_ns == record.finish_ns == 0.5e9  # not before it was detected
        assert not peer.reader.at_eof()
        release.set()
        assert (await to_end(peer)).endswith(chunk(DONE) + END)
        await until(lambda: proxy.source.stats.open_connections == 0)
        assert len(proxy.records) == 1


async def test_e10_gzip_that_holds_text_back_is_passed_untouched_and_timed_by_its_text() -> None:
    name, clock = "sse/E10_gzip_buffered.sse.json", Timeline()
    expected = case(name)["expected"]
    request = post(path="/v1/chat/completions", headers="Accept-Encoding: br, gzip, zstd\r\n")
    async with Upstream(replay(name)) as plain:
        direct = await everything(plain.port, request)
    async with Upstream(replay(name, clock)) as upstream, proxied(upstream.port, clock=clock) as proxy:
        assert await everything(proxy.port, request) == direct
        assert b"Accept-Encoding: br, gzip, zstd\r\n" in upstream.heads[0]
        record = await proxy.recorded()
        assert record.content_encoding == "gzip"
        assert record.ttfb_ns == expected["ttfb_s"] * 1e9
        assert record.ttft_token_ns == expected["ttft_s"] * 1e9
        assert Hint.BUFFERED in record.hints


async def test_e19_everything_at_the_end_is_a_fake_stream() -> None:
    name, clock = "sse/E19_fake_stream.sse.json", Timeline()
    async with Upstream(replay(name, clock)) as upstream, proxied(upstream.port, clock=clock) as proxy:
        await everything(proxy.port, post(path="/v1/chat/completions").replace(b"Host: h", b"Host: h\r\nConnection: close"))
        record = await proxy.recorded()
        assert record.ttft_token_ns == case(name)["expected"]["ttft_s"] * 1e9
        assert record.tpot_mean_ns is None
        assert Hint.FAKE_STREAM in record.hints


async def test_an_unreadable_answer_is_passed_and_its_end_unknown() -> None:
    async def handler(peer: Peer) -> None:
        await peer.request()
        await peer.send(b"SSH-2.0-x\r\n")

    async with Upstream(handler) as upstream, proxied(upstream.port) as proxy:
        assert await everything(proxy.port, post()) == b"SSH-2.0-x\r\n"
        record = await proxy.recorded()
        assert (record.outcome, record.status) == (Outcome.UNKNOWN, None)
        assert Hint.UNDECODABLE in record.hints
        assert proxy.source.stats.upstream_unreadable == 1


async def test_shutdown_lets_a_running_stream_end_and_closes_idle_connections() -> None:
    go_on = asyncio.Event()

    async def handler(peer: Peer) -> None:
        while (await peer.request())[0]:
            await peer.send(SSE_HEAD + chunk(event("a")))
            await go_on.wait()
            await peer.send(chunk(event("b", finish="stop") + DONE) + END)

    async with Upstream(handler) as upstream, proxied(upstream.port) as proxy:
        async with client(proxy.port) as idle, client(proxy.port) as busy:
            await busy.send(post())
            await asyncio.wait_for(busy.reader.readuntil(b"\n\n"), DEADLINE_S)
            await until(lambda: proxy.source.stats.open_connections == 2)
            stopping = asyncio.create_task(proxy.source.shutdown(DEADLINE_S))
            assert await to_end(idle) == b""
            with pytest.raises(ConnectionRefusedError):
                await asyncio.open_connection("127.0.0.1", proxy.port)
            assert not stopping.done()
            go_on.set()
            assert (await to_end(busy)).endswith(END)
            await asyncio.wait_for(stopping, DEADLINE_S)
        assert (await proxy.recorded()).outcome is Outcome.OK
        assert proxy.source.stats.aborted == 0


async def test_shutdown_aborts_and_records_what_does_not_end_in_time() -> None:
    async def handler(peer: Peer) -> None:
        await peer.request()
        await peer.send(SSE_HEAD + chunk(event("a")))
        await peer.gone()

    async with Upstream(handler) as upstream, proxied(upstream.port) as proxy:
        async with client(proxy.port) as peer:
            await peer.send(post())
            await asyncio.wait_for(peer.reader.readuntil(b"\n\n"), DEADLINE_S)
            await proxy.source.shutdown(0.05)
            assert END not in await to_end(peer)
        record = await proxy.recorded()
        assert (record.outcome, record.error_type, record.events) == (Outcome.UNKNOWN, "proxy_shutdown", 1)
        assert (proxy.source.stats.aborted, proxy.source.stats.open_connections) == (1, 0)


async def test_shutdown_works_without_start_and_twice() -> None:
    settings = ProxySettings(
        listen_host="127.0.0.1",
        listen_port=0,
        upstream_host="127.0.0.1",
        upstream_port=1,
        role=Role.EDGE,
        process=Process(role=Role.EDGE, instance="", host=""),
    )
    source = ProxySource(settings, lambda record: None)
    await source.shutdown(0)
    await source.start()
    await source.shutdown(0)
    await source.shutdown(0)


def test_an_https_upstream_is_refused_with_a_reason() -> None:
    with pytest.raises(ValueError, match="without a scheme"):
        ProxySettings(
            listen_host="127.0.0.1",
            listen_port=0,
            upstream_host="https://engine",
            upstream_port=443,
            role=Role.EDGE,
            process=Process(role=Role.EDGE, instance="", host=""),
        )


async def test_a_taken_port_is_an_error_of_start() -> None:
    async def handler(peer: Peer) -> None:
        await peer.gone()

    async with Upstream(handler) as upstream, proxied(upstream.port) as proxy:
        settings = ProxySettings(
            listen_host="127.0.0.1",
            listen_port=proxy.port,
            upstream_host="127.0.0.1",
            upstream_port=1,
            role=Role.EDGE,
            process=Process(role=Role.EDGE, instance="", host=""),
        )
        with pytest.raises(OSError, match=r"in use|bind"):
            await ProxySource(settings, lambda record: None).start()
