"""Query running engines, a collector and ports over real sockets.

The tests also cover what peers do instead of answering.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from doubles.doctor_servers import listening, serving
from handrail_doctor.facts import ClockPair, EngineView, PairSide, Reach
from handrail_doctor.gather.collector import ask_collector, traffic
from handrail_doctor.gather.engines import ask_engine
from handrail_doctor.gather.reachability import connect, export_nothing, is_local, is_loopback

DATA = Path(__file__).parents[2] / "data/recordings"
SECOND = 10**9


async def ask(url: str, timeout_s: float = 60.0, **more: Any) -> EngineView:
    return await ask_engine(PairSide.DECODE, url, timeout_s=timeout_s, headers={}, **more)


def models(*entries: dict[str, Any]) -> dict[str, Any]:
    return {"object": "list", "data": list(entries)}


async def test_a_real_page_and_models() -> None:
    """The metrics page of vLLM 0.32, as it was recorded."""
    routes = {
        "/health": "",
        "/version": {"version": "0.32.0"},
        "/v1/models": models(
            {"id": "tiny", "root": "/models/tiny", "parent": None, "max_model_len": 2048},
            {"id": "adapter", "root": "/lora", "parent": "tiny"},
        ),
        "/metrics": (DATA / "metrics_decode.txt").read_bytes(),
    }
    async with serving(routes) as url:
        engine = await ask(url)
    assert engine.live is not None
    assert (engine.live.health.ok, engine.live.metrics.ok, engine.live.models) == (True, True, ("tiny",))
    assert "vllm:nixl_xfer_time_seconds" in engine.live.families
    assert (engine.value("group_block_size"), engine.value("kv_cache_dtype"), engine.value("kv_layout")) == (32, "auto", None)
    assert (engine.value("model"), engine.value("max_model_len"), engine.value("version")) == ("/models/tiny", 2048, "0.32.0")
    assert engine.value("revision") is None
    assert engine.host == "127.0.0.1"


async def test_another_programs_version_is_no_engines() -> None:
    async with serving({"/health": "", "/version": {"version": "2.42.0"}, "/metrics": b"prometheus_build_info 1\n"}) as url:
        engine = await ask(url)
    assert engine.value("version") is None


async def test_server_info_as_vllm_0_32_makes_it() -> None:
    """Read a recorded server info page of vLLM 0.32.

    It was recorded with the functions that answer the route, for a producer with a lease of 8 s.
    """
    async with serving({"/health": "", "/server_info": (DATA / "server_info_0.32.json").read_bytes()}) as url:
        engine = await ask(url)
    fields = {
        name: engine.value(name)
        for name in ("model", "dtype", "kv_cache_dtype", "group_block_size", "tp", "hybrid", "max_model_len")
    }
    assert fields == {
        "model": "/models/tiny-qwen3",
        "dtype": "bfloat16",
        "kv_cache_dtype": "auto",
        "group_block_size": 32,
        "tp": 1,
        "hybrid": True,
        "max_model_len": 2048,
    }
    assert engine.connector is not None
    assert (engine.connector.name, engine.value("kv_role"), engine.value("lease_s")) == ("NixlConnector", "kv_producer", 8.0)
    assert (engine.value("side_host"), engine.value("side_port")) == ("127.0.0.1", 5600)
    assert engine.value("plugins") == ("handrail", "other")
    assert not engine.environment_known  # neither UCX_* nor HANDRAIL_SOCKET is reported


@pytest.mark.parametrize(
    "body", [b"", b"null", b"[]", b'"x"', b"{", b"\xff", b"[" * 50_000, b'{"data": 3, "vllm_config": [], "version": 7}']
)
async def test_nonsense_is_a_coarser_view(body: bytes) -> None:
    paths = ("/health", "/version", "/v1/models", "/metrics", "/server_info")
    async with serving(dict.fromkeys(paths, body)) as url:
        engine = await ask(url)
    assert engine.live is not None
    assert engine.live.health.ok
    assert (engine.setups, engine.live.models) == ((), ())


async def test_an_engine_that_is_not_there() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        engine = await ask(f"http://127.0.0.1:{bound.getsockname()[1]}")
    assert engine.live is not None
    assert "Connection refused" in engine.live.health.error
    assert engine.setups == ()


async def test_an_engine_that_hangs_costs_its_time_alone() -> None:
    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async with listening(hang) as port:
        engine = await ask(f"http://127.0.0.1:{port}", timeout_s=0.2)
    assert engine.live is not None
    assert engine.live.health.error == "no answer within 0.2 s"


async def test_an_answer_without_end_is_cut() -> None:
    async def endless(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        with contextlib.suppress(ConnectionError):
            while True:
                await response.write(b"#" * (1 << 20))
        return response

    async with serving({"/health": "", "/metrics": endless}) as url:
        engine = await ask(url)
    assert engine.live is not None
    assert engine.live.metrics.error == "the answer is larger than 16 MiB"
    assert engine.live.health.ok


async def test_a_redirect_is_not_followed() -> None:
    async def away(request: web.Request) -> web.StreamResponse:
        raise web.HTTPFound("http://127.0.0.1:1/")

    async with serving({"/health": away}) as url:
        engine = await ask(url)
    assert engine.live is not None
    assert engine.live.health.status == 302


async def test_the_date_header_bounds_the_clock() -> None:
    """The peer's clock is at or up to three seconds after the time of its Date header.

    The header is Thu, 01 Jan 1970 00:01:40.
    """
    now = 130 * SECOND
    routes = dict.fromkeys(("/health", "/version", "/v1/models", "/metrics", "/server_info"), "")
    async with serving(routes, headers={"Date": "Thu, 01 Jan 1970 00:01:40 GMT"}) as url:
        engine = await ask(url, now_unix_ns=lambda: now)
    assert engine.live is not None
    assert engine.live.clock == (-30 * SECOND, -27 * SECOND)
    async with serving(routes, headers={"Date": "yesterday"}) as url:
        engine = await ask(url)
    assert engine.live is not None
    assert engine.live.clock is None


# --- ports --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("greeting", "expected"),
    [
        (b"\xff" + bytes(8) + b"\x7f", Reach.OPEN),
        (b"HTTP/1.1 400 Bad Request\r\n", Reach.MUTE),
        (b"\xff\x00", Reach.MUTE),  # and closes the connection
        (b"", Reach.MUTE),
    ],
)
async def test_only_zeromq_counts_as_a_side_channel(greeting: bytes, expected: Reach) -> None:
    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(greeting)

    async with listening(greet) as port:
        assert (await connect("127.0.0.1", port, 60.0))[0] is expected


async def test_a_port_that_says_nothing() -> None:
    async def mute(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async with listening(mute) as port:
        assert await connect("127.0.0.1", port, 2.0) == (Reach.MUTE, "it sends nothing")


async def test_ports_that_cannot_be_reached() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        assert (await connect("127.0.0.1", bound.getsockname()[1], 10.0))[0] is Reach.REFUSED
    assert (await connect("127.0.0.1", 70_000, 10.0))[0] is Reach.ERROR
    assert (await connect("no-such-host.invalid", 80, 10.0))[0] in (Reach.UNRESOLVED, Reach.ERROR)


def test_which_hosts_are_this_one() -> None:
    assert is_local("127.0.0.1")
    assert is_local("localhost")
    assert not is_local("192.0.2.1")  # an address for documentation: no host has it
    assert not is_local("no-such-host.invalid")
    assert [is_loopback(host) for host in ("127.0.0.1", "::1", "localhost", "10.0.0.7")] == [True, True, True, False]


async def test_an_otlp_endpoint_that_takes_an_export_and_one_that_does_not() -> None:
    async with serving({"/v1/traces": b""}) as url:
        assert (await export_nothing("x", url, {})).problem == ""
        assert "HTTP 404" in (await export_nothing("x", f"{url}/wrong", {})).problem
    assert "scheme 'ftp' is not known" in (await export_nothing("x", "ftp://c", {})).problem


# --- a collector ----------------------------------------------------------------------------------------------------------------


def rows(count: int, **more: Any) -> list[dict[str, Any]]:
    return [
        {
            "started_unix_ns": number * SECOND,
            "prompt_tokens": 8000,
            "cached_tokens": 0,
            "ttft_token_ns": 700_000_000,
            "gap_p99_ns": 30_000_000,
            "phases": [{"phase": "prefill_compute", "duration_ns": 680_000_000}],
            **more,
        }
        for number in range(count)
    ]


def fetches(count: int, **more: Any) -> list[dict[str, Any]]:
    return [{"outcome": "ok", "bytes_moved": 470_000_000, "transfer_ns": 1_300_000_000, **more} for _ in range(count)]


def test_figures_of_traffic() -> None:
    seen = traffic(rows(241), fetches(40), "http://c")
    assert (seen.by, seen.requests, seen.fetches, seen.split) == ("http://c", 241, 40, True)
    assert seen.requests_per_s == pytest.approx(1.0)
    assert seen.busiest_over_mean == pytest.approx(1.0)
    assert (seen.prompt_tokens, seen.ttft_ns, seen.prefill_token_ns, seen.gap_p99_ns) == (8000, 700_000_000, 85_000.0, 30_000_000)
    assert seen.fetch_bytes_per_s == pytest.approx(361.5e6, rel=0.001)


def test_a_burst_is_seen() -> None:
    burst = rows(200) + [{"started_unix_ns": 100 * SECOND} for _ in range(1000)]
    seen = traffic(burst, [], "c")
    assert seen.busiest_over_mean is not None
    assert seen.busiest_over_mean > 2
    assert not seen.split


@pytest.mark.parametrize(
    ("prefill", "decode", "split"),
    [("p0:8000", "d0:8000", True), ("e0:8000", "e0:8000", False), ("p0:8000", None, False), (None, "d0:8000", False)],
)
def test_without_the_plugin_rows_tell_who_was_served_split(prefill: str | None, decode: str | None, split: bool) -> None:
    assert traffic(rows(30, prefill_instance=prefill, decode_instance=decode), [], "c").split is split


async def test_a_collector_that_relates_no_clocks_is_queried_all_the_same() -> None:
    answers = {"/api/v1/status": b"{}", "/api/v1/requests": b"{}", "/api/v1/fetches": b"{}"}
    async with serving(answers) as url:
        clocks, _, why = await ask_collector(url, 5.0)
    assert clocks == ()
    assert why.startswith(f"the collector at {url} knows no clock offset between two hosts")


@pytest.mark.parametrize(
    ("requests", "hand_offs"),
    [
        ([], []),
        (rows(19), fetches(19)),
        (rows(100, started_unix_ns=5), []),
        ([{} for _ in range(100)], [{} for _ in range(100)]),
        ([{"started_unix_ns": "x", "prompt_tokens": True, "phases": {}}] * 100, fetches(100, bytes_moved=10)),
        (rows(5), fetches(100, outcome="failed")),
    ],
)
def test_of_few_or_odd_rows_nothing_is_made(requests: Sequence[dict[str, Any]], hand_offs: Sequence[dict[str, Any]]) -> None:
    seen = traffic(requests, hand_offs, "c")
    assert (seen.requests_per_s, seen.fetch_bytes_per_s) == (None, None)


async def test_a_collector_is_queried() -> None:
    status = {
        "clocks": [
            {"from": "a", "to": "b", "low_ns": -5, "high_ns": 7},
            {"from": 3},
            "x",
            {"from": "a", "to": "c", "low_ns": None},
        ]
    }
    routes = {"/api/v1/status": status, "/api/v1/requests": {"requests": rows(30)}, "/api/v1/fetches": {"fetches": fetches(30)}}
    async with serving(routes) as url:
        clocks, seen, problem = await ask_collector(url, 10.0)
    assert problem == ""
    assert clocks == (
        ClockPair(source="a", target="b", low_ns=-5, high_ns=7, by=url),
        ClockPair(source="a", target="c", low_ns=None, high_ns=None, by=url),
    )
    assert seen is not None
    assert seen.fetch_bytes_per_s is not None


@pytest.mark.parametrize("status", [404, b"", b"[]", b"{"])
async def test_what_is_no_collector_is_a_reason(status: Any) -> None:
    routes = dict.fromkeys(("/api/v1/status", "/api/v1/requests", "/api/v1/fetches"), status)
    async with serving(routes) as url:
        clocks, seen, problem = await ask_collector(url, 10.0)
    assert (clocks, seen) == ((), None)
    assert url in problem
