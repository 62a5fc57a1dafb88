"""How a request's head changes on its way upstream, and the ids in the record."""

from __future__ import annotations

import asyncio
import json
import re

import pytest

from handrail.records import Hint, Outcome, Role
from handrail.wire.exchange import to_span
from harness.proxy import DEADLINE_S, DONE, END, SSE_HEAD, Peer, Upstream, case, chunk, client, event, everything, post, proxied

T, S = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


async def answer_ok(peer: Peer) -> None:
    await peer.request()
    await peer.send(OK)


def values(head: bytes, name: str) -> list[str]:
    return [
        value.strip() for key, _, value in (line.partition(":") for line in head.decode().split("\r\n")) if key.lower() == name
    ]


def lines(headers: list[list[str]] | dict[str, str]) -> str:
    pairs = headers.items() if isinstance(headers, dict) else headers
    return "".join(f"{key}: {value}\r\n" for key, value in pairs)


async def test_an_inbound_traceparent_keeps_its_trace_and_gets_our_span_as_parent() -> None:
    async with Upstream(answer_ok) as upstream, proxied(upstream.port) as proxy:
        await everything(proxy.port, post(headers=f"traceparent: 00-{T}-{S}-01\r\nx-request-id: foo\r\n"))
        record = await proxy.recorded()
        assert values(upstream.heads[0], "traceparent") == [f"00-{T}-{record.ids.span_id}-01"]
        assert (record.ids.trace_id, record.ids.parent_span_id, record.client_parent) == (T, S, S)
        assert (record.trace_origin, record.ids.flags, record.request_id, record.request_id_added) == ("inbound", 1, "foo", False)
        assert record.ids.span_id != S


@pytest.mark.parametrize("trace_context", ["set", "pass"])
async def test_C04_the_parent_in_what_is_exported_shows_whether_the_context_was_handed_on(trace_context: str) -> None:
    """Case C04: the exported parent shows whether the context was handed on.

    The same trace id and a new span id are there in both cases; only the exported parent differs.
    """
    async with (
        Upstream(answer_ok) as upstream,
        proxied(upstream.port, role=Role.DECODE) as d,
        proxied(d.port, trace_context=trace_context) as edge,
    ):
        await everything(edge.port, post(headers=f"traceparent: 00-{T}-{S}-01\r\n"))
        outer, inner = to_span(await edge.recorded()), to_span(await d.recorded())
    assert outer.trace_id.hex() == inner.trace_id.hex() == T
    assert len({outer.span_id.hex(), inner.span_id.hex(), S}) == 3
    assert inner.parent_span_id.hex() == (outer.span_id.hex() if trace_context == "set" else S)


async def test_C26_a_gateway_that_drops_the_context_on_one_route_shows_in_each_record() -> None:
    """Case C26: a gateway drops the context on one route, and each record shows it.

    Chat comes with a traceparent, embeddings without. Embeddings have no token; they are recorded where all requests are.
    """
    async with Upstream(answer_ok) as upstream, proxied(upstream.port, record_all=True) as proxy:
        for route, headers in (("chat/completions", f"traceparent: 00-{T}-{S}-01\r\n"), ("embeddings", "")) * 2:
            agent = "User-Agent: AsyncOpenAI/Python 1.30\r\n"
            await everything(proxy.port, post(b'{"model":"m","input":"x"}', path=f"/v1/{route}", headers=headers + agent))
        await proxy.recorded(4)
        reports = [(record.path, record.operation, record.trace_origin, record.outcome) for record in proxy.records]
    assert sorted(reports, key=str) == [
        *[("/v1/chat/completions", "chat", "inbound", Outcome.OK)] * 2,
        *[("/v1/embeddings", None, "random", Outcome.OK)] * 2,
    ]
    for record in proxy.records:
        if record.operation is None:
            assert (record.ttft_token_ns, record.gaps, record.client_parent) == (None, None, "")


@pytest.mark.parametrize(("exports", "flags"), [(False, 0), (True, 1)])
async def test_without_an_inbound_one_the_trace_id_is_derived_from_the_request_id(exports: bool, flags: int) -> None:
    async with Upstream(answer_ok) as upstream:
        traces = set()
        for role in (Role.EDGE, Role.DECODE):
            async with proxied(upstream.port, role=role, engine_exports_to_us=exports) as proxy:
                await everything(proxy.port, post(headers="X-Request-Id: user-42-7\r\n"))
                record = await proxy.recorded()
                assert values(upstream.heads[-1], "traceparent") == [f"00-{record.ids.trace_id}-{record.ids.span_id}-0{flags}"]
                assert (record.trace_origin, record.ids.parent_span_id) == ("derived", "")
                traces.add(record.ids.trace_id)
        assert len(traces) == 1


@pytest.mark.parametrize(
    ("role", "setting", "added"),
    [(Role.EDGE, None, True), (Role.DECODE, None, False), (Role.PREFILL, "add", True), (Role.EDGE, "pass", False)],
)
async def test_a_request_id_is_added_only_where_none_is_and_it_may_be(role: Role, setting: str | None, added: bool) -> None:
    async with Upstream(answer_ok) as upstream, proxied(upstream.port, role=role, request_id=setting) as proxy:
        await everything(proxy.port, post())
        record = await proxy.recorded()
        ids = values(upstream.heads[0], "x-request-id")
        assert record.request_id_added is added
        assert ids == ([record.request_id] if added else [])
        assert record.trace_origin == ("derived" if added else "random")
        await everything(proxy.port, post(headers="x-REQUEST-id: mine\r\n"))
        assert values(upstream.heads[1], "x-request-id") == ["mine"]


async def test_both_switched_off_the_head_goes_on_as_the_very_bytes() -> None:
    request = post(headers=f"traceparent: 00-{T}-{S}-01\r\ntraceparent: junk\r\nTraceState: a=1\r\n")
    async with Upstream(answer_ok) as upstream, proxied(upstream.port, trace_context="pass", request_id="pass") as proxy:
        await everything(proxy.port, request)
        assert request.startswith(upstream.heads[0])
        assert (await proxy.recorded()).request_id is None


async def test_c02_two_traceparents_are_invalid_and_one_is_sent_on() -> None:
    headers = f"traceparent: 00-{T}-{S}-01\r\ntraceparent: 00-{T}-00f067aa0ba902b7-01\r\n"
    async with Upstream(answer_ok) as upstream, proxied(upstream.port) as proxy:
        await everything(proxy.port, post(headers=headers))
        record = await proxy.recorded()
        (sent,) = values(upstream.heads[0], "traceparent")
        assert sent == f"00-{record.ids.trace_id}-{record.ids.span_id}-00"
        assert record.ids.trace_id != T
        assert Hint.DUPLICATE_TRACEPARENT in record.hints


async def test_c10_a_megabyte_of_request_id_is_refused_and_long_ones_are_clipped() -> None:
    async with Upstream(answer_ok) as upstream, proxied(upstream.port) as proxy:
        got = await everything(proxy.port, post(headers=f"X-Request-Id: {'a' * 1_000_000}\r\n"))
        assert got.startswith(b"HTTP/1.1 431 ")
        assert (proxy.records, proxy.source.stats.protocol_errors, upstream.connections) == ([], 1, 0)
        long = "b" * 20_000
        await everything(proxy.port, post(headers=f"X-Request-Id: {long}\r\n"))
        record = await proxy.recorded()
        assert values(upstream.heads[0], "x-request-id") == [long]
        assert record.request_id == "b" * 128
        assert record.request_id_hash is not None
        assert Hint.LONG_REQUEST_ID in record.hints


@pytest.mark.parametrize("odd", ["with spaces", "caf\xe9", "a,b"])
async def test_c10_odd_request_ids_go_on_unchanged(odd: str) -> None:
    async with Upstream(answer_ok) as upstream, proxied(upstream.port) as proxy:
        await everything(proxy.port, post(headers=f"X-Request-Id: {odd}\r\n"))
        assert f"X-Request-Id: {odd}\r\n".encode("latin-1") in upstream.heads[0]
        record = await proxy.recorded()
        assert record.request_id is not None
        assert record.request_id.isprintable()


async def test_c10_a_folded_request_id_is_refused() -> None:
    async with Upstream(answer_ok) as upstream, proxied(upstream.port) as proxy:
        assert (await everything(proxy.port, post(headers="X-Request-Id: a\r\n b\r\n"))).startswith(b"HTTP/1.1 400 ")
        assert upstream.connections == 0


@pytest.mark.parametrize("row", case("http/C13_b3_headers.json"), ids=lambda row: row["expect"])
async def test_c13_b3_alone_is_read_and_traceparent_wins(row: dict[str, dict[str, str]]) -> None:
    headers = row["h"]
    async with Upstream(answer_ok) as upstream, proxied(upstream.port) as proxy:
        await everything(proxy.port, post(headers=lines(headers)))
        record = await proxy.recorded()
        assert values(upstream.heads[0], "traceparent") == [
            f"00-{record.ids.trace_id}-{record.ids.span_id}-{record.ids.flags:02x}"
        ]
        for name, value in headers.items():
            if name != "traceparent":
                assert values(upstream.heads[0], name.lower()) == [value]
        single = headers.get("b3", "")
        if "traceparent" in headers:
            assert record.ids.trace_id == headers["traceparent"].split("-")[1]
            assert Hint.CONTEXT_CONFLICT in record.hints
        elif "-" in single:
            assert (record.ids.trace_id, record.ids.flags, record.trace_origin) == (single.split("-")[0], 1, "b3")
        elif "X-B3-TraceId" in headers:
            assert (record.ids.trace_id, record.ids.flags) == (headers["X-B3-TraceId"].rjust(32, "0"), 0)
        else:
            assert (record.trace_origin, record.ids.flags) == ("derived", 0)


async def test_c28_baggage_and_vendor_headers_pass() -> None:
    script = case("http/C28_headers_at_worker.json")
    async with Upstream(answer_ok) as upstream, proxied(upstream.port) as proxy:
        await everything(proxy.port, post(headers=lines(script["client"])))
        record = await proxy.recorded()
        for name, value in script["client"]:
            if name != "traceparent":
                assert values(upstream.heads[0], name) == [value]
        assert values(upstream.heads[0], "traceparent") == [f"00-{T}-{record.ids.span_id}-01"]
        assert (record.request_id, record.ids.trace_id) == ("foo", T)


async def test_c28_a_400_for_an_id_is_a_client_error() -> None:
    async def handler(peer: Peer) -> None:
        await peer.request()
        await peer.send(b"HTTP/1.1 400 Bad Request\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}")

    async with Upstream(handler) as upstream, proxied(upstream.port) as proxy:
        await everything(proxy.port, post(headers=lines(case("http/C28_headers_at_worker.json")["client"])))
        assert (await proxy.recorded()).outcome is Outcome.HTTP_ERROR


async def test_c06_a_rejected_request_is_recorded_with_status_and_type_and_no_token_times() -> None:
    body = json.dumps(
        {"error": {"message": "max_tokens is too large: secret prompt", "type": "BadRequestError", "code": 400}}
    ).encode()

    async def handler(peer: Peer) -> None:
        await peer.request()
        await peer.send(
            b"HTTP/1.1 400 Bad Request\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
        )

    async with Upstream(handler) as upstream, proxied(upstream.port) as proxy:
        await everything(proxy.port, post(b'{"model":"m","max_tokens":99999999}'))
        record = await proxy.recorded()
        assert (record.outcome, record.status, record.error_type) == (Outcome.HTTP_ERROR, 400, "BadRequestError")
        assert (record.ttft_token_ns, record.ttft_text_ns, record.gaps, record.itl) == (None, None, None, None)
        assert "secret" not in repr(record)


async def test_c09_the_same_request_id_twice_in_flight_gives_two_records_and_a_hint() -> None:
    release = asyncio.Event()

    async def handler(peer: Peer) -> None:
        head, _ = await peer.request()
        if b"/slow" in head:
            await release.wait()
        await peer.send(SSE_HEAD + chunk(event("a", finish="stop") + DONE) + END)
        await peer.gone()

    def request(path: str, trace: str) -> bytes:
        return post(path=path, headers=f"X-Request-Id: benchmark-serving0\r\ntraceparent: 00-{trace}-{S}-01\r\n")

    async with Upstream(handler) as upstream, proxied(upstream.port) as proxy:
        async with client(proxy.port) as first, client(proxy.port) as second:
            await first.send(request("/slow/v1/completions", T))
            await asyncio.wait_for(_heads(upstream, 1), DEADLINE_S)
            await second.send(request("/v1/completions", T[::-1]))
            later = await proxy.recorded(1)
            release.set()
            earlier = await proxy.recorded(2)
        assert (earlier.request_id, later.request_id) == ("benchmark-serving0", "benchmark-serving0")
        assert (earlier.ids.trace_id, later.ids.trace_id) == (T, T[::-1])
        assert (earlier.ttft_token_ns or 0) > (later.ttft_token_ns or 0) > 0
        # on both: this id alone does not show whose evidence it is
        assert (Hint.DUPLICATE_REQUEST_ID in earlier.hints, Hint.DUPLICATE_REQUEST_ID in later.hints) == (True, True)
        async with client(proxy.port) as third:
            await third.send(request("/v1/completions", T))
            assert Hint.DUPLICATE_REQUEST_ID not in (await proxy.recorded(3)).hints


async def _heads(upstream: Upstream, count: int) -> None:
    while len(upstream.heads) < count:  # noqa: ASYNC110 - set by another task's read
        await asyncio.sleep(0.001)


async def test_the_record_has_the_request_and_its_times() -> None:
    body = (
        b'{"model":"m","prompt":"secret","stream":true,"n":2,"kv_transfer_params":{"do_remote_prefill":true,'
        b'"remote_engine_id":"e","remote_request_id":"cmpl-1","remote_block_ids":[1,2,3]}}'
    )

    async def handler(peer: Peer) -> None:
        await peer.request()
        await peer.send(SSE_HEAD + chunk(event("a")))
        await peer.send(chunk(event("b", finish="stop") + DONE) + END)

    async with Upstream(handler) as upstream, proxied(upstream.port, role=Role.DECODE) as proxy:
        await everything(proxy.port, post(body))
        record = await proxy.recorded()
        assert (record.operation, record.model, record.choices, record.stream, record.stream_requested) == (
            "text_completion",
            "m",
            2,
            True,
            True,
        )
        assert (record.method, record.path, record.status, record.inspected) == ("POST", "/v1/completions", 200, "whole")
        assert record.kv_in is not None
        assert (record.kv_in.remote_request_id, record.kv_in.remote_blocks) == ("cmpl-1", 3)
        assert "secret" not in repr(record)
        times = (
            record.forwarded_ns,
            record.request_done_ns,
            record.ttft_token_ns,
            record.first_delivered_ns,
            record.duration_ns,
        )
        assert all(time is not None and time > 0 for time in times)
        assert (record.forwarded_ns or 0) <= (record.request_done_ns or 0) < (record.ttft_token_ns or 0) <= record.duration_ns
        assert record.process.role is Role.DECODE
        assert re.fullmatch(r"[0-9a-f]{16}", record.ids.span_id)


async def test_record_all_also_records_what_is_only_passed() -> None:
    async with Upstream(answer_ok) as upstream, proxied(upstream.port, record_all=True) as proxy:
        await everything(proxy.port, b"GET /metrics?x=1 HTTP/1.1\r\nHost: h\r\n\r\n")
        record = await proxy.recorded()
        assert (record.operation, record.method, record.path, record.status, record.outcome) == (
            None,
            "GET",
            "/metrics",
            200,
            Outcome.OK,
        )
