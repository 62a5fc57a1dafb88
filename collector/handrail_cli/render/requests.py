"""Render requests as a table that fits its width.

Columns that matter less go first; ids are shortened last.
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
from handrail.phases import Phase
from handrail_cli import glossary
from handrail_cli.render.waterfall import LOOKS, main_id, percent, phase_label, slowest, whole_ns
from handrail_collector.rows import RequestRow

_GAP: Final = 2  # columns between columns
_SHORTEST_ID: Final = 20


@dataclass(frozen=True, slots=True)
class RequestColumn:
    """One column; those with the highest ``keep`` get space first; 9 always shows."""

    title: str
    keep: int
    cell: Callable[[RequestRow], Text]
    right: bool = False


def render_requests(
    rows: Sequence[RequestRow],
    width: int,
    *,
    sort: str = "started",
    own_ids: bool = False,
    now_unix_ns: int | None = None,
    zone: tzinfo | None = None,
) -> RenderableType:
    """Draw the rows in their order.

    A column for ``sort`` is added where no other column shows it.
    ``own_ids`` puts the request's own id first, for rows that share every other id.
    """
    columns = [column for column in _columns(sort, now_unix_ns, zone) if _says_something(column, rows)]
    if own_ids:
        columns.insert(0, RequestColumn("request", 9, lambda row: Text(row.request_id)))
    cells = {column.title: [column.cell(row) for row in rows] for column in columns}

    def natural(column: RequestColumn) -> int:
        return max(len(column.title), *(cell.cell_len for cell in cells[column.title]), 0)

    left = width
    for column in sorted(columns, key=lambda column: -column.keep):
        taken = (min(natural(column), _SHORTEST_ID) if column.title == "id" else natural(column)) + _GAP
        if column.keep < 9 and taken > left + _GAP:
            columns.remove(column)
        else:
            left -= taken
    others = sum(natural(column) for column in columns if column.title != "id") + _GAP * (len(columns) - 1)
    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold", collapse_padding=True)
    for column in columns:
        at_most = max(_SHORTEST_ID, width - others) if column.title == "id" else None
        justify = "right" if column.right else "left"
        table.add_column(column.title, no_wrap=True, overflow="ellipsis", max_width=at_most, justify=justify)  # type: ignore[arg-type]
    for index in range(len(rows)):
        table.add_row(*(cells[column.title][index] for column in columns))
    return table


def _columns(sort: str, now_unix_ns: int | None, zone: tzinfo | None) -> list[RequestColumn]:
    columns = [
        RequestColumn("time", 7, lambda row: Text(format_time(row.started_unix_ns, now_unix_ns, zone), style="dim")),
        RequestColumn("id", 9, lambda row: Text(main_id(row))),
        RequestColumn("scope", 6, lambda row: Text(row.scope)),
        RequestColumn("TTFT", 9, lambda row: _figure(row.ttft_token_ns), right=True),
        RequestColumn("total", 5, lambda row: _figure(row.duration_ns), right=True),
        RequestColumn("outcome", 9, _outcome),
        RequestColumn("P", 2, lambda row: Text(row.prefill_instance or "–", style="dim")),
        RequestColumn("D", 3, lambda row: Text(row.decode_instance or "–", style="dim")),
        RequestColumn("slowest phase", 8, _slowest),
        RequestColumn("took", 4, _slowest_took),
        RequestColumn("findings", 5, _findings),
    ]
    if sort not in ("started", "ttft", "duration"):
        columns.insert(5, RequestColumn(sort, 9, lambda row: _figure(figure(row, sort)), right=True))
    return columns


def figure(row: RequestRow, sort: str) -> int | None:
    """Return the figure, in ns, that ``sort`` names."""
    fields = {"ttft_text": row.ttft_text_ns, "gap_max": row.gap_max_ns, "gap_p99": row.gap_p99_ns}
    if sort in fields:
        return fields[sort]
    durations = [phase.duration_ns for phase in row.phases if phase.phase == sort]
    return sum(durations) if durations else None


def _says_something(column: RequestColumn, rows: Sequence[RequestRow]) -> bool:
    """Whether a column is worth its place.

    It is not where all rows have one scope, or where no row has a finding.
    """
    if column.title == "scope":
        return len({row.scope for row in rows}) > 1 or any(row.scope != "edge" for row in rows)
    return column.title != "findings" or any(column.cell(row).plain for row in rows)


def _figure(duration_ns: int | None) -> Text:
    return Text("–", style="dim") if duration_ns is None else Text(format_duration(duration_ns))


def _outcome(row: RequestRow) -> Text:
    return Text(row.outcome, style=glossary.tone(row.outcome))


def _slowest(row: RequestRow) -> Text:
    phase = slowest(row)
    if phase is None:
        return Text("–", style="dim")
    place = "unattributed" if phase.phase == Phase.UNATTRIBUTED.value else phase.process
    return Text(phase_label(phase), style=LOOKS[place].style if place in LOOKS else "")


def _slowest_took(row: RequestRow) -> Text:
    phase = slowest(row)
    if phase is None:
        return Text("–", style="dim")
    return Text(f"{format_duration(phase.duration_ns):>7} {percent(phase.duration_ns, whole_ns(row)):>6}")


def _findings(row: RequestRow) -> Text:
    kinds = [finding.partition(":")[0] for finding in row.findings]
    if row.kv_outcome not in (None, "ok", "unknown"):
        kinds.insert(0, f"kv_{row.kv_outcome}")
    if not row.complete:
        kinds.append("incomplete")
    return Text(", ".join(dict.fromkeys(kinds)), style="yellow")
