"""Render hand-offs as a table that fits its width.

Columns that matter less go first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import tzinfo
from typing import Final

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from handrail.durations import format_duration, format_time
from handrail_cli.formatting import format_bytes
from handrail_cli.render.handoff import kv_tone, rate
from handrail_collector.rows import FetchRow

_GAP: Final = 2


@dataclass(frozen=True, slots=True)
class _FetchColumn:
    title: str
    keep: int  # columns with the highest value get space first; 9 is always shown
    cell: Callable[[FetchRow], Text]
    right: bool = False


def render_fetches(
    rows: Sequence[FetchRow], width: int, *, now_unix_ns: int | None = None, zone: tzinfo | None = None
) -> RenderableType:
    """Draw the rows in their order."""
    columns = _columns(now_unix_ns, zone)
    cells = {column.title: [column.cell(row) for row in rows] for column in columns}
    columns = [
        column for column in columns if column.keep == 9 or any(cell.plain not in ("", "–") for cell in cells[column.title])
    ]
    left = width
    for column in sorted(columns, key=lambda column: -column.keep):
        taken = max(len(column.title), *(cell.cell_len for cell in cells[column.title])) + _GAP
        if column.keep < 9 and taken > left + _GAP:
            columns.remove(column)
        else:
            left -= taken
    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold", collapse_padding=True)
    for column in columns:
        table.add_column(column.title, no_wrap=True, overflow="ellipsis", justify="right" if column.right else "left")
    for index in range(len(rows)):
        table.add_row(*(cells[column.title][index] for column in columns))
    return table


def _columns(now_unix_ns: int | None, zone: tzinfo | None) -> list[_FetchColumn]:
    return [
        _FetchColumn("time", 7, lambda row: Text(format_time(row.started_unix_ns, now_unix_ns, zone), style="dim")),
        _FetchColumn("request", 9, lambda row: Text(row.client_request_id or row.request_id)),
        _FetchColumn("from", 6, lambda row: Text(row.producer_instance or row.producer_address or "–", style="dim")),
        _FetchColumn("to", 6, lambda row: Text(row.consumer_instance or "–", style="dim")),
        _FetchColumn("outcome", 9, lambda row: Text(f"{row.outcome}{' (open)' if row.open else ''}", style=kv_tone(row))),
        _FetchColumn("took", 9, lambda row: _time(row.duration_ns), right=True),
        _FetchColumn("handshake", 3, lambda row: _time(row.handshake_ns or None), right=True),
        _FetchColumn("transfer", 5, lambda row: _time(row.transfer_ns), right=True),
        _FetchColumn("bytes", 8, lambda row: Text(format_bytes(row.bytes_moved)), right=True),
        _FetchColumn("rate", 4, lambda row: Text(rate(row)), right=True),
        _FetchColumn("lost", 4, lambda row: _time(row.lost_ns), right=True),
        _FetchColumn("reason", 8, lambda row: Text(row.reason or "", style="yellow")),
    ]


def _time(duration_ns: int | None) -> Text:
    return Text("–", style="dim") if duration_ns is None else Text(format_duration(duration_ns))
