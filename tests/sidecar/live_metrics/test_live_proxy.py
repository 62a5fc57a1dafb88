"""A proxy on real sockets and its metrics page, scraped while a stream goes on."""

from __future__ import annotations

import asyncio

from handrail.metrics.model_labels import UNKNOWN
from handrail.records import Outcome, Role
from handrail_sidecar.live_metrics.requests import LiveRequests
from handrail_sidecar.live_metrics.slo import RequestObjectives
from harness.proxy import DONE, END, SSE_HEAD, Peer, Upstream, chunk, client, event, everything, post, proxied, until


def live() -> LiveRequests:
    return LiveRequests(Role.EDGE, RequestObjectives(), wall=lambda: 1_800_000_000 * 10**9)


async def test_an_unfinished_stream_is_on_the_page() -> None:
    going_on = asyncio.Event()

    async def slow(peer: Peer) -> None:
        await peer.request()
        await peer.send(SSE_HEAD)
        for text in "abcd":
            await peer.send(chunk(event(text)))
            await asyncio.sleep(0.002)  # each in its own read
        await going_on.wait()
        await peer.send(chunk(event("e", finish="stop")) + chunk(DONE) + END)

    requests = live()
    async with Upstream(slow) as upstream, proxied(upstream.port, live=requests, idle_after_finish_s=0.04) as proxy:
        async with client(proxy.port) as peer:
            await peer.send(post(b'{"model":"m","prompt":"p","stream":true}'))
            await until(lambda: bool(requests.ttft))
            assert requests.ttft["m", "edge", "edge"].count == 1
            (since,) = proxy.source.open_since()
            assert since > 0
            await until(lambda: requests.gaps_of("m").count == 3)  # a tick processes what was put off
            assert requests.outcomes["m", Outcome.OK] == 0
            going_on.set()
            record = await proxy.recorded()
        assert (record.outcome, requests.outcomes["m", Outcome.OK]) == (Outcome.OK, 1)
        assert record.exemplar  # the first in its bucket
        assert requests.gaps_of("m").count == 4
        assert list(proxy.source.open_since()) == []


async def test_nobody_behind_is_a_failure_of_no_model_that_is_known() -> None:
    requests = live()
    async with proxied(1, live=requests) as proxy:
        await everything(proxy.port, post(headers="Connection: close\r\n"))
        await proxy.recorded()
    assert {key: count for key, count in requests.outcomes.items() if count} == {(UNKNOWN, Outcome.UPSTREAM_UNREACHABLE): 1}


async def test_what_is_no_generation_is_not_counted() -> None:
    async def models(peer: Peer) -> None:
        await peer.request()
        await peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}")

    requests = live()
    async with Upstream(models) as upstream, proxied(upstream.port, live=requests) as proxy:
        await everything(proxy.port, b"GET /v1/models HTTP/1.1\r\nHost: h\r\n\r\n")
    assert set(requests.outcomes.values()) == {0}
