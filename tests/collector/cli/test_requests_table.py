"""The table of requests at common terminal widths."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from datetime import timezone

import pytest
from rich.console import Console

from builders.request_rows import ROWS, STARTED, phase, request_row, spread
from handrail_cli.render.requests import render_requests
from handrail_collector.rows import RequestRow

MIXED = [ROWS[name] for name in sorted(ROWS)]


def table(rows: list[RequestRow], width: int, sort: str = "started", own_ids: bool = False) -> str:
    out = io.StringIO()
    renderable = render_requests(rows, width, sort=sort, own_ids=own_ids, now_unix_ns=STARTED, zone=timezone.utc)
    Console(file=out, width=width, highlight=False).print(renderable)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


@pytest.mark.parametrize(("width", "sort"), [(80, "started"), (100, "ttft"), (140, "gap_max"), (220, "kv_transfer")])
def test_the_table_is_drawn_as_before(width: int, sort: str, golden: Callable[[str, str], None]) -> None:
    golden(f"cli/requests_{width}.txt", table(MIXED, width, sort))


@pytest.mark.parametrize("width", range(60, 240, 7))
def test_no_line_is_wider_than_requested(width: int) -> None:
    lines = table(MIXED, width).splitlines()
    assert len(lines) == len(MIXED) + 1
    assert max(map(len, lines)) <= width


def test_scopes_are_shown_only_where_they_differ() -> None:
    assert "scope" not in table([ROWS["ordinary"]], 200)
    assert "scope" in table([ROWS["ordinary"], ROWS["edgeless"]], 80)


def test_the_figure_sorted_by_is_shown() -> None:
    slow = request_row((*spread(), phase("kv_transfer", 1300, "decode")))
    header, line = table([slow], 100, "kv_transfer").splitlines()
    assert "kv_transfer" in header
    assert "1.30 s" in line


def test_rows_that_share_an_id_are_distinguished_by_their_own() -> None:
    rows = [ROWS["ordinary"], replace(ROWS["ordinary"], request_id="aaaaaaaaaaaaaaaa")]
    lines = table(rows, 80, own_ids=True).splitlines()
    assert [line.split()[0] for line in lines] == ["request", "00f067aa0ba902b7", "aaaaaaaaaaaaaaaa"]
