"""``handrail links`` over a store, by its API and off-line, and its layout."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from handrail_cli.main import main
from handrail_collector.api.server import ApiServer
from handrail_collector.rows import FetchRow, LinkFactRow, RequestRow
from handrail_collector.store.publish import StorePublisher
from handrail_collector.store.read import StoreReader
from handrail_collector.store.schema import Table

Capture = pytest.CaptureFixture[str]
Golden = Callable[[Path | str, str], None]

MS = 10**6
S = 10**9
BEGAN = 1_796_000_000 * S  # 2026-11-30 00:53:20 UTC
NOW = BEGAN + 1200 * S
PERIOD = ("--since", str(BEGAN // S), "--until", str(BEGAN // S + 600))


def fetch(place: int, at_s: float, took_ms: float, size: int, p: str = "p0", d: str = "d0", **changed: Any) -> FetchRow:
    base = FetchRow(
        started_unix_ns=BEGAN + round(at_s * S),
        trace_id=f"{place:032x}",
        request_id=f"{place:016x}",
        version=1,
        number=0,
        span_id=f"{place:016x}",
        direction="p_to_d",
        mode="pull",
        connector="NixlConnector",
        consumer_instance=f"{d}:8000",
        producer_instance=f"{p}:8000",
        consumer_host=d,
        producer_host=p,
        outcome="ok",
        duration_ns=round((took_ms + 12) * MS),
        handshake_ns=0,
        posted_ns=4 * MS,
        transfer_ns=round(took_ms * MS),
        transfer_bound_ns=2 * MS,
        bytes_moved=size,
        descriptors=2048,
    )
    return replace(base, **changed)


def rows() -> list[FetchRow]:
    """Return rows of four links.

    One is slow (UCX on TCP on one host), one is fast, one has no timed transfer, and a later version withdraws one.
    """
    slow = [fetch(n, 4.0 * n, 1300, 470_000_000) for n in range(60)]
    fast = [fetch(100 + n, 3.0 * n, 26, 470_000_000, "p1") for n in range(120)]
    slow[0] = replace(slow[0], duration_ns=38_100 * MS, handshake_ns=36 * S)
    fast[5] = replace(fast[5], outcome="failed", bytes_moved=None, transfer_ns=None, reason="transfer_failed")
    dark = fetch(300, 9.0, 0, 0, "p2", "d1", posted_ns=None, transfer_ns=None, bytes_moved=None, outcome="unknown")
    taken_back = [fetch(400, 5.0, 9, 10**12), fetch(400, 5.0, 9, 0, version=2, number=-1)]
    return [*slow, *fast, dark, *taken_back, fetch(401, 6.0, 26, 470_000_000, "p1")]


def lane(instance: str, transport: str, nic: str) -> LinkFactRow:
    return LinkFactRow(
        at_unix_ns=BEGAN + S,
        key=f"{abs(len(instance + transport)):016x}",
        offset=1,
        instance=instance,
        host=instance.partition(":")[0],
        recogniser="ucx.lanes",
        rank="",
        lane=transport,
        nic=nic,
        reach="inter-node",
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("links")
    publisher = StorePublisher(root / "store")
    publisher.open()
    publisher.publish(0, 10, 10, (), (), flat={Table.KV_FETCHES: rows(), Table.LINK_FACTS: [lane("p0:8000", "tcp", "eth0")]})
    publisher.close()
    return root


def links_json(folder: Path, capsys: Capture, *flags: str) -> dict[str, Any]:
    assert main(["links", "--data", str(folder), *PERIOD, "--json", *flags]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_each_link_with_its_figures(folder: Path, capsys: Capture) -> None:
    answer = links_json(folder, capsys)
    assert [(link["producer"], link["consumer"]) for link in answer["links"]] == [
        ("p1:8000", "d0:8000"),
        ("p0:8000", "d0:8000"),
        ("p2:8000", "d1:8000"),
    ]
    fast, slow, dark = answer["links"]
    assert (fast["kv_fetches"], fast["failed"], fast["timed"]) == (121, 1, 120)
    assert slow["rate"] == pytest.approx(0.3618e9, rel=0.001)
    assert slow["cold_starts_ns"] == [38_100_000_000]
    assert (slow["transport"], slow["slow"]) == ("tcp", True)
    assert (dark["rate"], dark["transfer"], dark["transport"]) == (None, None, "unknown")
    assert answer["other"] is None


@pytest.mark.parametrize("width", [80, 130])
def test_as_it_looks(folder: Path, capsys: Capture, golden: Golden, monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    monkeypatch.setattr("handrail_cli.commands.links.time.time_ns", lambda: NOW)
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TZ", "UTC")
    assert main(["links", "--data", str(folder), *PERIOD]) == 0
    golden(f"cli/links_{width}.txt", capsys.readouterr().out)


def test_the_links_that_moved_less_are_one_line(folder: Path, capsys: Capture) -> None:
    answer = links_json(folder, capsys, "--limit", "1")
    assert len(answer["links"]) == 1
    assert answer["other"] == {"links": 2, "kv_fetches": 61, "moved_bytes": 60 * 470_000_000, "slow": 1}
    assert main(["links", "--data", str(folder), *PERIOD, "--limit", "1"]) == 0
    assert "and 2 more (--limit), 1 of them slow: 61 KV fetches" in capsys.readouterr().out


def test_one_peer(folder: Path, capsys: Capture) -> None:
    assert [link["producer"] for link in links_json(folder, capsys, "--peer", "p2")["links"]] == ["p2:8000"]


def test_where_there_is_none(folder: Path, tmp_path: Path, capsys: Capture) -> None:
    assert main(["links", "--data", str(folder), "--until", str(BEGAN // S - 5000)]) == 0
    assert "try an earlier --since" in capsys.readouterr().out
    publisher = StorePublisher(tmp_path / "store")
    publisher.open()
    publisher.close()
    assert main(["links", "--data", str(tmp_path)]) == 0
    assert "The plugin in the engines reports KV fetches" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "output"),
    [
        (("--limit", "0"), "limit: 0 is not between 1 and 1000"),
        (("--since", "14:00", "--until", "14:00"), "since: must be before until"),
        (("--since", "lately"), "lately"),
        (("--peers", "p0"), "did you mean --peer"),
    ],
)
def test_a_wrong_flag_says_what_is_valid(folder: Path, capsys: Capture, flags: tuple[str, ...], output: str) -> None:
    assert main(["links", "--data", str(folder), *flags]) == 2
    assert output in capsys.readouterr().err


def test_names_from_outside_paint_no_screen(tmp_path: Path, capsys: Capture) -> None:
    publisher = StorePublisher(tmp_path / "store")
    publisher.open()
    evil = replace(fetch(1, 1.0, 30, 10**8), producer_instance="p0\x1b[2J:8000", connector="Nixl\x07Connector")
    publisher.publish(0, 10, 10, (), (), flat={Table.KV_FETCHES: [evil]})
    publisher.close()
    assert main(["links", "--data", str(tmp_path), *PERIOD]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "\x07" not in out


class NoLive:
    """A pipeline that holds ``handed``."""

    def __init__(self, *handed: FetchRow) -> None:
        self.handed = handed

    def rows(self) -> list[RequestRow]:
        return []

    def stalls(self) -> tuple[()]:
        return ()

    def fetches(self) -> tuple[FetchRow, ...]:
        return self.handed


async def test_by_the_API_with_what_is_not_stored_yet(folder: Path, capsys: Capture) -> None:
    newer = replace(fetch(1, 4.0, 1300, 470_000_000), version=2, outcome="failed", bytes_moved=None, transfer_ns=None)
    live = NoLive(newer, fetch(900, 7.0, 26, 470_000_000, "p1"))
    server = ApiServer(StoreReader(folder / "store"), live, dict, "127.0.0.1", 0, now_unix_ns=lambda: NOW)
    await server.start()
    try:
        host, port = server.address
        url = f"http://{host}:{port}"
        assert await asyncio.to_thread(main, ["links", "--api", url, *PERIOD, "--json"]) == 0
        answer = json.loads(capsys.readouterr().out)
        assert [(link["kv_fetches"], link["failed"]) for link in answer["links"][:2]] == [(122, 1), (60, 1)]
        assert await asyncio.to_thread(main, ["links", "--api", url, "--limit", "x"]) == 2
    finally:
        await server.shutdown()
