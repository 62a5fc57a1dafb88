"""The HTTP API over a real store, with live rows beside it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from builders.store_rows import START_UNIX_NS, request_rows, spans_of_requests
from doubles.store_filters import matches, order
from handrail_collector.api.query import PARAMETERS
from handrail_collector.api.schema import row_from_json
from handrail_collector.api.server import MAX_WAITING, ApiServer
from handrail_collector.rows import FetchRow, RequestRow
from handrail_collector.store.filters import RequestFilter
from handrail_collector.store.manifest import MANIFEST
from handrail_collector.store.publish import StorePublisher
from handrail_collector.store.read import StoreReader

SECOND = 1_000_000_000
NOW = START_UNIX_NS + 3600 * SECOND
ROWS = [
    replace(row, started_unix_ns=START_UNIX_NS + 60 * index * SECOND, version=1, findings=("clock_bound_wide",) * (index % 2))
    for index, row in enumerate(request_rows(30))
]


@dataclass(slots=True)
class Live:
    """Live rows as a pipeline holds them."""

    held: list[RequestRow] = field(default_factory=list)
    handed: list[FetchRow] = field(default_factory=list)

    def rows(self) -> Sequence[RequestRow]:
        return self.held

    def stalls(self) -> tuple[()]:
        return ()

    def fetches(self) -> Sequence[FetchRow]:
        return self.handed


@dataclass(slots=True)
class Api:
    """A server with a store of ``ROWS``, and a client."""

    server: ApiServer
    live: Live
    publisher: StorePublisher
    root: Path
    session: aiohttp.ClientSession
    not_ready: list[str]

    async def get(self, path: str, **parameters: str) -> tuple[int, Any]:
        host, port = self.server.address
        async with self.session.get(f"http://{host}:{port}{path}", params=parameters) as answer:
            return answer.status, await (answer.json() if answer.content_type == "application/json" else answer.text())

    async def ids(self, **parameters: str) -> list[tuple[str, int, bool]]:
        """Return request id, version and provisional of each listed row."""
        status, body = await self.get("/api/v1/requests", **parameters)
        assert status == 200, body
        return [(row["request_id"], row["version"], row["provisional"]) for row in body["requests"]]


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[Api]:
    root = tmp_path / "store"
    publisher = StorePublisher(root)
    publisher.open()
    spans = spans_of_requests(1, proxies=True)
    first = replace(ROWS[0], trace_id=spans[0].trace_id, span_ids=(spans[2].span_id,))
    publisher.publish(0, 100, 0, spans, [first, *ROWS[1:]])
    live, not_ready = Live(), [""]
    server = ApiServer(
        StoreReader(root), live, lambda: {"rows": 7}, "127.0.0.1", 0, not_ready=lambda: not_ready[0], now_unix_ns=lambda: NOW
    )
    await server.start()
    async with aiohttp.ClientSession() as session:
        yield Api(server, live, publisher, root, session, not_ready)
    await server.shutdown()
    publisher.close()


async def test_rows_are_listed_latest_first(api: Api) -> None:
    assert await api.ids(limit="3") == [(row.request_id, 1, False) for row in ROWS[:-4:-1]]
    _, body = await api.get("/api/v1/requests", limit="1")
    assert row_from_json(body["requests"][0]) == ROWS[-1]


FILTERED: dict[str, tuple[dict[str, str], RequestFilter]] = {
    "since_relative": ({"since": "-50m"}, RequestFilter(since_unix_ns=NOW - 3000 * SECOND)),
    "since_rfc3339": (
        {"since": "2026-11-30T00:55:20Z", "until": "2026-11-30T01:58:20+01:00"},
        RequestFilter(since_unix_ns=START_UNIX_NS + 120 * SECOND, until_unix_ns=START_UNIX_NS + 300 * SECOND),
    ),
    "unix_ns": (
        {"since_unix_ns": str(START_UNIX_NS), "until_unix_ns": str(START_UNIX_NS + 180 * SECOND)},
        RequestFilter(until_unix_ns=START_UNIX_NS + 180 * SECOND),
    ),
    "sorted_by_phase": (
        {"sort": "prefill_compute", "descending": "false", "limit": "5"},
        RequestFilter(sort="prefill_compute", descending=False, limit=5),
    ),
    "min_ttft": ({"min_ttft": "150ms"}, RequestFilter(min_ttft_ns=150_000_000)),
    "min_ttft_ns": ({"min_ttft_ns": "150000000", "sort": "ttft"}, RequestFilter(min_ttft_ns=150_000_000, sort="ttft")),
    "words": ({"outcome": "ok", "scope": "edge", "model": "tiny"}, RequestFilter(outcome="ok", scope="edge", model="tiny")),
    "instance": ({"instance": "10.0.6.1:8100"}, RequestFilter(instance="10.0.6.1:8100")),
    "text": ({"text": "CMPL-"}, RequestFilter(text="cmpl-")),
    "finding": ({"finding": "clock_bound_wide"}, RequestFilter(finding="clock_bound_wide")),
}


@pytest.mark.parametrize(("parameters", "wanted"), FILTERED.values(), ids=FILTERED)
async def test_parameters_are_the_filter(api: Api, parameters: dict[str, str], wanted: RequestFilter) -> None:
    fitting = sorted((row for row in ROWS if matches(wanted, row)), key=lambda row: order(wanted, row))[: wanted.limit]
    assert fitting
    assert [request_id for request_id, _, _ in await api.ids(**parameters)] == [row.request_id for row in fitting]


REFUSED: dict[str, tuple[dict[str, str], str, list[str]]] = {
    "unknown_parameter": ({"srot": "ttft"}, "srot", ["sort"]),
    "unknown_sort": ({"sort": "kv_transfr"}, "sort", ["kv_transfer"]),
    "bad_time": ({"since": "yesterday"}, "since", []),
    "bad_duration": ({"min_ttft": "15"}, "min_ttft", []),
    "limit_too_high": ({"limit": "10001"}, "limit", []),
    "limit_of_words": ({"limit": "many"}, "limit", []),
    "bad_bool": ({"descending": "flase"}, "descending", ["false"]),
    "control_characters": ({"text": "a\x00"}, "text", []),
    "same_field_twice": ({"since": "-5m", "since_unix_ns": "1"}, "since", []),
    "turned_round": ({"since": "-5m", "until": "-10m"}, "since", []),
}


@pytest.mark.parametrize(("parameters", "named", "nearest"), REFUSED.values(), ids=REFUSED)
async def test_a_wrong_parameter_is_refused_with_what_is_valid(
    api: Api, parameters: dict[str, str], named: str, nearest: list[str]
) -> None:
    status, body = await api.get("/api/v1/requests", **parameters)
    assert status == 400
    assert named in body["error"]["what"]
    assert body["error"]["valid"]
    assert body["error"]["nearest"][: len(nearest)] == nearest


async def test_live_rows_lie_over_the_store(api: Api) -> None:
    newer = replace(ROWS[-1], version=2)
    still_open = replace(request_rows(1, seed=5)[0], started_unix_ns=NOW, version=0)
    api.live.held = [ROWS[-2], newer, still_open]
    assert await api.ids(limit="4") == [
        (still_open.request_id, 0, True),
        (newer.request_id, 2, False),
        (ROWS[-2].request_id, 1, False),
        (ROWS[-3].request_id, 1, False),
    ]


async def test_a_stored_row_that_a_live_one_replaces_is_not_listed_where_the_live_one_does_not_fit(api: Api) -> None:
    api.live.held = [replace(ROWS[-1], version=2, outcome="timed_out")]
    listed = await api.ids(outcome="ok", limit="2")
    assert ROWS[-1].request_id not in [request_id for request_id, _, _ in listed]
    assert len(listed) == 2


async def test_one_request_comes_with_its_spans(api: Api) -> None:
    status, body = await api.get(f"/api/v1/requests/cmpl-{ROWS[0].client_request_id}-0-0123abcd")
    assert (status, body["matches"], body["request"]["request_id"]) == (200, 1, ROWS[0].request_id)
    assert [span["name"] for span in body["spans"]] == ["handrail.request", "llm_request", "llm_request"]


async def test_a_live_request_is_found_by_its_id(api: Api) -> None:
    fresh = replace(request_rows(1, seed=5)[0], client_request_id="a/b c", version=0)
    api.live.held = [fresh]
    status, body = await api.get("/api/v1/requests/a%2Fb%20c")
    assert (status, body["request"]["request_id"], body["request"]["provisional"]) == (200, fresh.request_id, True)


async def test_an_id_of_several_requests_gives_the_candidates(api: Api) -> None:
    api.live.held = [replace(request_rows(1, seed=5)[0], client_request_id=ROWS[4].client_request_id, started_unix_ns=NOW)]
    status, body = await api.get(f"/api/v1/requests/{ROWS[4].client_request_id}")
    assert (status, body["matches"]) == (300, 2)
    assert [row["request_id"] for row in body["candidates"]] == [api.live.held[0].request_id, ROWS[4].request_id]


async def test_an_id_that_nobody_has_gives_the_nearest(api: Api) -> None:
    known = ROWS[4].client_request_id or ""
    status, body = await api.get(f"/api/v1/requests/{known[:-1]}x")
    assert status == 404
    assert known in body["error"]["nearest"]
    assert body["error"]["what"]
    assert body["error"]["where"]
    assert body["error"]["valid"]


@pytest.mark.parametrize(
    ("path", "status"),
    [("/api/v1/request", 404), ("/api/v1/requests/" + "x" * 600, 400), ("/api/v1/requests/abc?limit=1", 400)],
    ids=["endpoint", "long_id", "parameter_beside_an_id"],
)
async def test_a_missing_resource_is_reported_as_json(api: Api, path: str, status: int) -> None:
    found, body = await api.get(path)
    assert found == status
    assert set(body["error"]) == {"what", "where", "valid", "nearest"}


async def test_status_health_and_the_page(api: Api) -> None:
    assert await api.get("/api/v1/status") == (200, {"rows": 7})
    assert (await api.get("/healthz"))[0] == 200
    assert (await api.get("/readyz"))[0] == 200
    api.not_ready[0] = "the disk"
    assert await api.get("/readyz") == (503, "the disk\n")
    status, page = await api.get("/")
    assert status == 200
    assert all(name in page for name in (*PARAMETERS, "/api/v1/requests/{id}", "/metrics"))


async def test_a_damaged_store_is_reported(api: Api) -> None:
    (api.root / MANIFEST).write_bytes(b"00000000 {}\n" * 2)
    status, body = await api.get("/api/v1/requests")
    assert status == 500
    assert MANIFEST in body["error"]["what"]


class HeldReader(StoreReader):
    """A reader that answers only when the test lets it."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.go = threading.Event()

    def requests(self, wanted: RequestFilter, live: Sequence[RequestRow] = ()) -> list[RequestRow]:
        assert self.go.wait(90)
        return super().requests(wanted, live)


async def test_queries_beyond_the_bound_get_a_retry_time(tmp_path: Path) -> None:
    reader = HeldReader(tmp_path)
    server = ApiServer(reader, Live(), dict, "127.0.0.1", 0)
    await server.start()
    url = f"http://127.0.0.1:{server.address[1]}"
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def ask() -> int:
            async with session.get(f"{url}/api/v1/requests") as answer:
                return answer.status

        tasks = [asyncio.ensure_future(ask()) for _ in range(MAX_WAITING + 1)]
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED, timeout=90)
        assert [task.result() for task in done] == [503]
        async with session.get(f"{url}/healthz") as answer:
            assert answer.status == 200
        reader.go.set()
        assert sorted(await asyncio.gather(*tasks)) == [200] * MAX_WAITING + [503]
    await server.shutdown()


async def test_shutdown_works_without_start_and_twice(tmp_path: Path) -> None:
    server = ApiServer(StoreReader(tmp_path), Live(), dict, "127.0.0.1", 0)
    await server.shutdown()
    await server.shutdown()


async def test_line_that_is_too_long_is_answered_and_not_logged(api: Api, caplog: pytest.LogCaptureFixture) -> None:
    secret = b"do-not-log-this"
    reader, writer = await asyncio.open_connection(*api.server.address)
    writer.write(b"GET /api/v1/requests?text=" + secret * 1000 + b" HTTP/1.1\r\nHost: x\r\n\r\n")
    assert (await asyncio.wait_for(reader.read(), 60)).startswith(b"HTTP/1.0 400 ")
    writer.close()
    await writer.wait_closed()
    assert [record.getMessage() for record in caplog.records] == []
