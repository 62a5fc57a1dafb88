"""Samples over the HTTP API: those of a request, and those of a period."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from builders.device_timeline import ROW, S, ordinary, stored
from builders.request_rows import MS, STARTED
from handrail_collector.api.samples import MOST_POINTS
from handrail_collector.api.server import ApiServer
from handrail_collector.rows import FetchRow, RequestRow
from handrail_collector.store.read import StoreReader


class Nothing:
    """A pipeline without live rows."""

    def rows(self) -> list[RequestRow]:
        return []

    def stalls(self) -> tuple[()]:
        return ()

    def fetches(self) -> list[FetchRow]:
        return []


class Api:
    """A client of the HTTP API."""

    def __init__(self, session: aiohttp.ClientSession, address: tuple[str, int]) -> None:
        self._session = session
        self._address = address

    async def get(self, path: str, **parameters: str) -> tuple[int, Any]:
        host, port = self._address
        async with self._session.get(f"http://{host}:{port}{path}", params=parameters) as answer:
            return answer.status, await answer.json()


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[Api]:
    stored(tmp_path, ordinary())
    reader = StoreReader(tmp_path / "store")
    server = ApiServer(reader, Nothing(), dict, "127.0.0.1", 0, now_unix_ns=lambda: STARTED + 60 * S)
    await server.start()
    async with aiohttp.ClientSession() as session:
        yield Api(session, server.address)
    await server.shutdown()


async def test_a_request_has_what_gpus_and_links_did_meanwhile(api: Api) -> None:
    status, body = await api.get(f"/api/v1/requests/{ROW.request_id}")
    assert status == 200
    assert [(place["host"], len(place["devices"])) for place in body["hardware"]["places"]] == [("host-p", 3), ("host-d", 3)]


async def test_samples_of_a_time_by_device_and_counter(api: Api) -> None:
    status, body = await api.get("/api/v1/samples", kind="gpu", host="host-d", name="dram_active_ratio", since="-2m")
    assert (status, body["every_ns"]) == (200, 200 * MS)
    assert [(each["host"], each["instance"], each["kind"], each["index"]) for each in body["devices"]] == [
        ("host-d", "10.0.0.2:8200", "gpu", 0),
        ("host-d", "10.0.0.2:8200", "gpu", 1),
    ]
    (series,) = body["devices"][0]["series"]
    assert (series["name"], series["counting_since_unix_ns"], set(series["values"])) == ("dram_active_ratio", None, {0.62})
    assert len(series["values"]) == len(body["devices"][0]["at_unix_ns"])


async def test_a_short_time_has_every_sample_and_counters_say_since_when_they_count(api: Api) -> None:
    since, until = str(STARTED), str(STARTED + S)
    status, body = await api.get("/api/v1/samples", kind="link", host="id-p", since_unix_ns=since, until_unix_ns=until)
    assert (status, body["every_ns"], len(body["devices"][0]["at_unix_ns"])) == (200, 0, 10)
    (series,) = body["devices"][0]["series"]
    assert series["counting_since_unix_ns"] > 0
    assert all(isinstance(value, int) for value in series["values"])


async def test_of_a_long_time_there_are_not_more_points_than_that(api: Api) -> None:
    _, body = await api.get("/api/v1/samples", kind="gpu", since="-30d")
    assert body["every_ns"] * MOST_POINTS >= 30 * 86400 * S
    _, body = await api.get("/api/v1/samples", kind="gpu", since="-2m", every="10s")
    assert body["every_ns"] == 10 * S


@pytest.mark.parametrize(
    ("parameters", "what"),
    [
        ({}, "kind: missing"),
        ({"kind": "cpu"}, "kind: 'cpu' is not valid"),
        ({"kind": "gpu", "since": "-1m", "until": "-2m"}, "since: must be before until"),
        ({"kind": "gpu", "hosts": "p0"}, "unknown parameter 'hosts'"),
        ({"kind": "gpu", "every": "often"}, "every: 'often' is not valid"),
        ({"kind": "gpu", "name": "nope"}, "name: there is no gpu counter 'nope'"),
        ({"kind": "gpu", "name": "congestion_events"}, "name: 'congestion_events' is a counter of kind link"),
    ],
    ids=["no_kind", "another_kind", "backwards", "unknown", "no_duration", "no_counter", "counter_of_the_other_kind"],
)
async def test_a_question_that_makes_no_sense_is_refused(api: Api, parameters: dict[str, str], what: str) -> None:
    status, body = await api.get("/api/v1/samples", **parameters)
    assert (status, body["error"]["what"]) == (400, what)


async def test_an_unknown_counter_is_answered_with_the_known_ones(api: Api) -> None:
    status, body = await api.get("/api/v1/samples", kind="gpu", name="utilisation_ratio")
    assert (status, body["error"]["nearest"][0]) == (400, "utilization_ratio")
    assert "power_watts" in body["error"]["valid"]


async def test_a_known_counter_without_samples_is_no_mistake(api: Api) -> None:
    status, body = await api.get("/api/v1/samples", kind="gpu", name="power_watts", since="-1ms")
    assert (status, body["devices"]) == (200, [])
