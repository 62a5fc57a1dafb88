"""The line of ``handrail trace`` that compares a request with its neighbours.

The tests check its words, through the API and off-line.
"""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Callable
from dataclasses import replace
from datetime import timezone
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from builders.period import Change, period, slower
from builders.request_rows import MS, STARTED
from handrail_cli.main import main
from handrail_cli.render.waterfall import render_waterfall, slowness, standstill
from handrail_collector.api.schema import RequestAnswer
from handrail_collector.api.server import ApiServer
from handrail_collector.explain.period.baseline import LEAST_REQUESTS
from handrail_collector.explain.period.request_columns import requests_of
from handrail_collector.explain.period.request_comparison import against, to_json
from handrail_collector.rows import FetchRow, RequestRow
from handrail_collector.store.publish import StorePublisher
from handrail_collector.store.read import StoreReader

HOUR_NS = 3_600_000_000_000
CASES: dict[str, Change] = {
    "queue": lambda row: {"prefill_queue": 400} if row.prefill_host == "p0" else {},
    "alike": lambda row: {"prefill_queue": 900, "prefill_compute": 900} if row.prefill_host == "p0" else {},
    "link": lambda row: {"unattributed": 300} if (row.prefill_host, row.decode_host) == ("p0", "d1") else {},
    "router": lambda row: {"router_and_hops": 3000},
}


def slowness_text(row: RequestRow, rows: list[RequestRow]) -> dict[str, Any]:
    found = to_json(against(row, requests_of(rows), STARTED, STARTED + HOUR_NS))
    assert found is not None
    return found


def test_slowness_texts_are_the_golden_ones(golden: Callable[[str, str], None]) -> None:
    lines = []
    for name, change in CASES.items():
        rows, touched = period(change)
        lines.append(f"{name}: {slowness(slowness_text(rows[touched[5]], rows))}")
    rows, _ = period()
    lucky, touched = period(lambda row: {"prefill_compute": 200} if row.prefill_host == "p1" else {})
    lucky = [row if number in touched else slower(row, router_and_hops=300) for number, row in enumerate(lucky)]
    for name, row, others in (
        ("alone", slower(rows[5], first_step=200), rows),
        ("longer", slower(rows[4], first_step=5), rows),
        ("shorter", slower(rows[4], first_step=-5), rows),
        ("lucky elsewhere", lucky[touched[4]], lucky),
        ("size unknown", replace(rows[4], prompt_tokens=None), rows),
        ("too few", rows[4], rows[: LEAST_REQUESTS - 1]),
    ):
        lines.append(f"{name}: {slowness(slowness_text(row, others))}")
    golden("cli/slowness.txt", "\n".join(lines) + "\n")


def test_a_paused_process_is_named_instead_of_the_usual_time_of_a_phase() -> None:
    """A pause hides the usual hint about the phase.

    Somebody who looks for free KV blocks does not find out that the engine had no processor.
    """
    row = period()[0][0]
    waited = replace(slower(row, first_step=400), decode_paused_ns=380 * MS)
    for reported_row, expected in ((row, False), (waited, True), (replace(waited, decode_paused_ns=MS), False)):
        out = io.StringIO()
        Console(file=out, width=200, highlight=False).print(
            render_waterfall(RequestAnswer(row=reported_row), 200, zone=timezone.utc)
        )
        assert ("(host_pause): at D for 380 ms." in out.getvalue()) is expected
        assert ("while a process of that engine was paused." in out.getvalue()) is expected
    assert standstill(replace(waited, prefill_paused_ns=50 * MS)) == (
        "A process of the engine was paused before the first token (host_pause): at P for 50.0 ms and at D for 380 ms."
    )


@pytest.mark.parametrize("width", [80, 140])
def test_it_stands_below_the_sentence_on_where_the_time_went(width: int, golden: Callable[[str, str], None]) -> None:
    rows, touched = period(CASES["queue"])
    row = rows[touched[4]]
    out = io.StringIO()
    drawn = render_waterfall(RequestAnswer(row=row, baseline=slowness_text(row, rows)), width, zone=timezone.utc)
    Console(file=out, width=width, highlight=False).print(drawn)
    golden(f"cli/waterfall_compared_{width}.txt", "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    rows, _ = period(CASES["queue"])
    publisher = StorePublisher(tmp_path / "store")
    publisher.open()
    known = [
        replace(row, request_id=f"{number:016x}", trace_id=f"{number:032x}", span_ids=(f"{number:016x}",))
        for number, row in enumerate(rows)
    ]
    publisher.publish(0, 5000, 5000, [], known)
    publisher.close()
    return tmp_path


class Nothing:
    def rows(self) -> list[RequestRow]:
        return []

    def stalls(self) -> tuple[()]:
        return ()

    def fetches(self) -> list[FetchRow]:
        return []


@pytest.mark.parametrize("way", ["api", "data"])
async def test_a_store_is_queried_for_the_requests_around(way: str, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server = ApiServer(StoreReader(data / "store"), Nothing(), dict, "127.0.0.1", 0)
    await server.start()
    where = ["--api", f"http://{server.address[0]}:{server.address[1]}"] if way == "api" else ["--data", str(data)]
    try:
        assert await asyncio.to_thread(main, ["trace", "r600", *where]) == 0
        text = " ".join(capsys.readouterr().out.split())
        assert "ms longer than usual for 500-token prompts (1,200 around it): prefill_queue at p0 +388 ms" in text
        assert await asyncio.to_thread(main, ["trace", "r600", "--json", *where]) == 0
        usual = json.loads(capsys.readouterr().out)["baseline"]
        assert (usual["verdict"], usual["phase"], usual["place"], usual["compared"]) == ("slow", "prefill_queue", "p0", 1200)
    finally:
        await server.shutdown()
