"""Render requests as a table."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import tzinfo
from typing import Final

from rich.console import RenderableType
from rich.text import Text

from handrail.durations import format_duration, format_time
from handrail.phases import Phase
from handrail_cli import glossary
from handrail_cli.render.phases import LOOKS, main_id, percent, phase_label, slowest, whole_ns
from handrail_cli.tables import NONE, Column, duration, table
from handrail_collector.rows import RequestRow

_SHORTEST_ID: Final = 20


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
    columns = [
        Column[RequestRow]("time", lambda row: Text(format_time(row.started_unix_ns, now_unix_ns, zone), style="dim"), 7),
        Column("id", main_id, least=_SHORTEST_ID),
        Column("TTFT", lambda row: duration(row.ttft_token_ns), right=True),
        Column("total", lambda row: duration(row.duration_ns), 5, right=True),
        Column("outcome", lambda row: Text(row.outcome, style=glossary.tone(row.outcome))),
        Column("P", lambda row: Text(row.prefill_instance or "–", style="dim"), 2),
        Column("D", lambda row: Text(row.decode_instance or "–", style="dim"), 3),
        Column("slowest phase", _slowest, 8),
        Column("took", _slowest_took, 4),
        Column("findings", _findings, 5),
    ]
    if any(row.scope != "edge" for row in rows):
        columns.insert(2, Column("scope", lambda row: row.scope, 6))
    if sort not in ("started", "ttft", "duration"):
        at = next(at for at, column in enumerate(columns) if column.title == "outcome")
        columns.insert(at, Column(sort, lambda row: duration(figure(row, sort)), right=True))
    if own_ids:
        columns.insert(0, Column("request", lambda row: row.request_id))
    return table(columns, rows, width)


def figure(row: RequestRow, sort: str) -> int | None:
    """Return the figure, in ns, that ``sort`` names."""
    fields = {"ttft_text": row.ttft_text_ns, "gap_max": row.gap_max_ns, "gap_p99": row.gap_p99_ns}
    if sort in fields:
        return fields[sort]
    durations = [phase.duration_ns for phase in row.phases if phase.phase == sort]
    return sum(durations) if durations else None


def _slowest(row: RequestRow) -> Text:
    phase = slowest(row)
    if phase is None:
        return NONE
    place = "unattributed" if phase.phase == Phase.UNATTRIBUTED.value else phase.process
    return Text(phase_label(phase), style=LOOKS[place].style if place in LOOKS else "")


def _slowest_took(row: RequestRow) -> Text:
    phase = slowest(row)
    if phase is None:
        return NONE
    return Text(f"{format_duration(phase.duration_ns):>7} {percent(phase.duration_ns, whole_ns(row)):>6}")


def _findings(row: RequestRow) -> Text:
    kinds = [finding.partition(":")[0] for finding in row.findings]
    if row.kv_outcome not in (None, "ok", "unknown"):
        kinds.insert(0, f"kv_{row.kv_outcome}")
    if not row.complete:
        kinds.append("incomplete")
    return Text(", ".join(dict.fromkeys(kinds)), style="yellow")
