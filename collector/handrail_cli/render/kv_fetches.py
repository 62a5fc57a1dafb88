"""Render KV fetches: as a table, and each in a few lines below its request.

The lines say from which engine to which, how much, how fast, with which outcome, and by which evidence.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from datetime import tzinfo
from typing import Final

from rich.console import RenderableType
from rich.text import Text

from handrail.durations import format_duration, format_time
from handrail.kv_outcomes import FAILURES, FetchOutcome
from handrail_cli import glossary
from handrail_cli.formatting import format_bytes
from handrail_cli.tables import Column, duration, table
from handrail_collector.rows import FetchRow

_INDENT: Final = "  "
_FAILED: Final = frozenset(outcome.value for outcome in FAILURES)
_SHORTEST_ID: Final = 20


def render_fetches(
    rows: Sequence[FetchRow], width: int, *, now_unix_ns: int | None = None, zone: tzinfo | None = None
) -> RenderableType:
    """Draw the rows in their order."""
    columns = [
        Column[FetchRow]("time", lambda row: Text(format_time(row.started_unix_ns, now_unix_ns, zone), style="dim"), 7),
        Column("request", lambda row: row.client_request_id or row.request_id, least=_SHORTEST_ID),
        Column("from", lambda row: Text(row.producer_instance or row.producer_address or "–", style="dim"), 6),
        Column("to", lambda row: Text(row.consumer_instance or "–", style="dim"), 6),
        Column("outcome", lambda row: Text(f"{row.outcome}{' (open)' if row.open else ''}", style=kv_tone(row))),
        Column("took", lambda row: duration(row.duration_ns), right=True),
        Column("handshake", lambda row: duration(row.handshake_ns or None), 3, right=True),
        Column("transfer", lambda row: duration(row.transfer_ns), 5, right=True),
        Column("bytes", lambda row: format_bytes(row.bytes_moved), 8, right=True),
        Column("rate", rate, 4, right=True),
        Column("lost", lambda row: duration(row.lost_ns), 4, right=True),
        Column("reason", lambda row: Text(row.reason or "", style="yellow"), 8),
    ]
    return table(columns, rows, width)


def handoff_lines(fetches: Sequence[FetchRow], width: int) -> Iterator[Text]:
    """Write a few lines for each KV fetch."""
    for fetch in fetches:
        line = Text(overflow="fold")
        line.append(f"{_ways(fetch)}  ")
        line.append(f" {fetch.outcome} ", style=f"bold reverse {kv_tone(fetch)}")
        reason = ", ".join(filter(None, (fetch.reason, fetch.error)))
        line.append(f" {reason}" if reason else "", style=kv_tone(fetch))
        line.append("  open" if fetch.open else "", style="yellow")
        yield line
        meaning = glossary.plain(fetch.outcome, glossary.KV_OUTCOME)
        yield from _wrapped(f"{meaning}{'; the answer cannot be trusted' if fetch.tainted else ''}", width, "")
        for text in (_amount(fetch), _times(fetch), _lease(fetch), _clocks(fetch)):
            if text:
                yield from _wrapped(text, width, "")
        for reported_text in fetch.evidence:
            yield from _wrapped(f"evidence: {reported_text}", width, "dim")


def kv_tone(fetch: FetchRow) -> str:
    """Return the colour of an outcome."""
    if fetch.outcome in _FAILED or fetch.tainted:
        return "red"
    return "green" if fetch.outcome == FetchOutcome.OK.value else "yellow"


def rate(fetch: FetchRow) -> str:
    """Format the bytes over the time of the transfer.

    Empty where either is unknown, or where a poll as long as the transfer saw its end.
    """
    took, bound = fetch.transfer_ns, fetch.transfer_bound_ns or 0
    if not took or fetch.bytes_moved is None or bound >= took:
        return ""
    return f"{fetch.bytes_moved / took:.2f} GB/s"


def _ways(fetch: FetchRow) -> str:
    producer = fetch.producer_instance or fetch.producer_address or fetch.producer_engine_id or "unknown"
    consumer = fetch.consumer_instance or "no consumer yet"
    back = fetch.direction == "d_to_p"
    names = ("D", "P") if back else ("P", "D")
    turn = "  (KV of an earlier turn)" if back else ""
    return f"{names[0]} {producer} → {names[1]} {consumer}{turn}"


def _amount(fetch: FetchRow) -> str:
    parts = [f"{format_bytes(fetch.bytes_moved)} moved" if fetch.bytes_moved is not None else ""]
    if fetch.bytes_expected is not None and fetch.bytes_expected != fetch.bytes_moved:
        parts.append(f"{format_bytes(fetch.bytes_expected)} expected")
    parts += [f"{fetch.blocks} blocks" if fetch.blocks is not None else "", f"{fetch.tokens} tokens" if fetch.tokens else ""]
    parts += [f"{fetch.tokens_local} tokens were already there" if fetch.tokens_local else "", rate(fetch)]
    parts += [fetch.mode or "", fetch.connector or ""]
    return ", ".join(filter(None, parts))


def _times(fetch: FetchRow) -> str:
    parts = []
    for name, took in (("waited", fetch.wait_ns), ("handshake", fetch.handshake_ns), ("transfer", fetch.transfer_ns)):
        if took is not None:
            known = name == "handshake" and took == 0
            parts.append("peer known, no handshake" if known else f"{name} {format_duration(took)}")
    if fetch.transfer_ns is not None and fetch.transfer_bound_ns:
        parts[-1] += f" (a poll saw its end: up to {format_duration(fetch.transfer_bound_ns)} less)"
    if fetch.notice_ns is not None:
        parts.append(f"seen by the scheduler {format_duration(fetch.notice_ns)} later")
    if fetch.lost_ns is not None:
        parts.append(f"lost {format_duration(fetch.lost_ns)}")
    return ", ".join(parts)


def _lease(fetch: FetchRow) -> str:
    """Describe the lease where it matters; a healthy hand-off gets no text."""
    if fetch.late_ns is not None:
        return f"read {format_duration(fetch.late_ns)} after its lease ended"
    if fetch.held_ns is not None and fetch.lease_ns and 2 * fetch.held_ns >= fetch.lease_ns:
        return (
            f"kept for at least {format_duration(fetch.held_ns)} before the read, of a lease of {format_duration(fetch.lease_ns)}"
        )
    return ""


def _clocks(fetch: FetchRow) -> str:
    if fetch.clock_bound_ns is None:
        return ""
    bound = format_duration(fetch.clock_bound_ns)
    return f"the clock offset of the two hosts is known within ±{bound}; only the time for which P kept the KV depends on it"


def _wrapped(text: str, width: int, style: str) -> Iterator[Text]:
    for line in textwrap.wrap(text, max(20, width - len(_INDENT))):
        yield Text(_INDENT + line, style=style)
