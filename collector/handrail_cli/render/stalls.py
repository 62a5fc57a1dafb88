"""Render the stalls of a stream.

The text shows where they lie, how long they were, their cause, and how certain the cause is.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from typing import Final

from rich.text import Text

from handrail.durations import format_duration
from handrail_cli import glossary
from handrail_collector.rows import RequestRow, StallRow

SHOWN: Final = 8
MARKS: Final = {
    "prefill_coscheduled": "P",
    "kv_landing": "K",
    "preemption": "R",
    "gpu_throttled": "G",
    "host_pause": "H",
    "client_backpressure": "C",
    "unknown": "?",
}
"""Letter of each cause, on the line of the stream."""

_STYLES: Final = {"unknown": "magenta", "client_backpressure": "yellow"}
_LINE: Final = "─"
_MEANT: Final = 11  # columns before a stall's text


def stall_lines(row: RequestRow, stalls: Sequence[StallRow], width: int) -> Iterator[Text]:
    """Render the stream as a line with a letter at each stall, then a list.

    The list holds the longest stalls in the order of time.
    """
    if not stalls:
        return
    yield from _line(row, stalls, width)
    by_cause: dict[str, list[StallRow]] = {}
    for stall in stalls:
        by_cause.setdefault(stall.cause, []).append(stall)
    for cause, of in sorted(by_cause.items(), key=lambda each: -sum(stall.gap_ns for stall in each[1])):
        took = format_duration(sum(stall.gap_ns for stall in of))
        text = f"{len(of)} of {len(stalls)}, {took}: {glossary.plain(cause, glossary.STALL)}"
        yield from _headed(Text(f"{MARKS.get(cause, '?')} {cause}", style=_style(cause)), text, width)
    shown = sorted(sorted(stalls, key=lambda stall: -stall.gap_ns)[:SHOWN], key=lambda stall: stall.offset_ns)
    for stall in shown:
        yield from _stall(stall, width)
    if len(stalls) > len(shown):
        yield Text(f"  the {len(shown)} longest of {len(stalls)}; --json has all", style="dim")


def _line(row: RequestRow, stalls: Sequence[StallRow], width: int) -> Iterator[Text]:
    """Draw the line from the first token to the end."""
    begin = row.ttft_token_ns or 0
    whole = row.duration_ns - begin
    if whole <= 0:
        return
    ends = f"+{format_duration(begin)}", f"+{format_duration(row.duration_ns)}"
    columns = width - len(ends[0]) - len(ends[1]) - 6
    cells: list[tuple[str, str]] = [(_LINE, "dim")] * columns
    for stall in sorted(stalls, key=lambda stall: stall.gap_ns):  # the longest is drawn last
        middle = stall.offset_ns + stall.gap_ns // 2 - begin
        place = min(columns - 1, max(0, middle * columns // whole))
        cells[place] = MARKS.get(stall.cause, "?"), f"bold {_style(stall.cause)}"
    line = Text(f"  {ends[0]} ", style="dim")
    for glyph, style in cells:
        line.append(glyph, style=style)
    line.append(f" {ends[1]}", style="dim")
    yield line


def _stall(stall: StallRow, width: int) -> Iterator[Text]:
    head = Text("  ")
    head.append(f"+{format_duration(stall.offset_ns):<9}", style="dim")
    head.append(f"{format_duration(stall.gap_ns):>7}", style="bold")
    head.append(f" (gaps around it {format_duration(stall.median_ns)})  ")
    head.append(stall.cause, style=_style(stall.cause))
    lines, sure = stall.evidence, _sure(stall)
    if sure and head.cell_len + 2 + len(sure) <= width:
        head.append(f"  {sure}", style="dim")
    elif sure:
        lines = (sure, *lines)
    head.truncate(width, overflow="ellipsis")
    yield head
    for each in lines:
        for line in textwrap.wrap(each, width - _MEANT - 1, break_on_hyphens=False):
            yield Text(" " * (_MEANT + 1) + line, style="dim")


def _headed(head: Text, text: str, width: int) -> Iterator[Text]:
    """Put the head before the text, wrapped to as many lines as it takes."""
    first, *more = textwrap.wrap(text, max(20, width - head.cell_len - 4), break_on_hyphens=False)
    yield Text("  ").append_text(head).append(f"  {first}")
    for line in more:
        yield Text(" " * (head.cell_len + 4) + line)


def _sure(stall: StallRow) -> str:
    """Format ``28 times as often as without a stall; chance in 1 %``."""
    if stall.doubt is None:
        return ""
    if stall.lift is None:
        return "measured, not inferred"
    doubt = f"{100 * stall.doubt:.1g}" if stall.doubt >= 0.0005 else "<0.1"
    return f"{stall.lift:,.3g} times as often as without a stall, by chance in {doubt} %"


def _style(cause: str) -> str:
    return _STYLES.get(cause, "red")
