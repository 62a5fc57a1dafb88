"""Render the battery's rows.

They go to the terminal as each trial ends, and to the page that keeps the last run.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from faults.battery import GROUPS, Verdict

PAGE: Final = Path(__file__).parents[2] / "docs" / "reliability.md"
_COLUMNS: Final = (("trial", 26), ("expected", 52), ("got", 60), ("s", 6), ("ok", 7))


def show_head(console: Console) -> None:
    """Print the columns' names."""
    console.print(_row(*(f"[dim]{name}[/dim]" for name, _ in _COLUMNS)))


def show(console: Console, verdict: Verdict) -> None:
    """Print one row."""
    word = (
        "[yellow]not run[/yellow]" if verdict.not_run and verdict.ok else "[green]ok[/green]" if verdict.ok else "[red]NO[/red]"
    )
    trial = verdict.trial
    console.print(_row(trial.name, escape(trial.expected), escape(verdict.got), f"{verdict.seconds:.0f}", word))


def summary(verdicts: Sequence[Verdict], seconds: float, seed: int) -> str:
    """Return the last line."""
    wrong = [verdict.trial.name for verdict in verdicts if not verdict.ok]
    skipped = sum(bool(verdict.not_run) for verdict in verdicts)
    counted = f"{len(verdicts)} trials in {seconds / 60:.1f} minutes (seed {seed}), {skipped} not run"
    return f"{counted}; not as expected: {', '.join(wrong)}" if wrong else f"{counted}; all as expected"


def write_page(verdicts: Sequence[Verdict], seconds: float, seed: int, long: bool) -> None:
    """Replace the rows of these trials in docs/reliability.md; keep the others.

    Raises ``ValueError`` when the page has no place for them.
    """
    page = PAGE.read_text(encoding="utf-8")
    begin, end = "<!-- faults -->\n", "<!-- /faults -->"
    if begin not in page or end not in page:
        raise ValueError(f"{PAGE.name} has no {begin.strip()} and {end}")
    at, to = page.index(begin) + len(begin), page.index(end)
    PAGE.write_text(page[:at] + markdown(verdicts, seconds, seed, long, page[at:to]) + page[to:], encoding="utf-8")


def markdown(verdicts: Sequence[Verdict], seconds: float, seed: int, long: bool, before: str = "") -> str:
    """Return the page's table; ``before`` is its current one."""
    rows = {_name(line): line for line in before.splitlines() if line.startswith("| `")}
    for each in verdicts:
        trial = each.trial
        word = "not run" if each.not_run else "ok" if each.ok else "**no**"
        rows[f"`{trial.name}`"] = (
            f"| `{trial.name}` | {_cell(trial.expected)} | {_cell(each.got)} | {each.seconds:.0f} s | {word} |"
        )
    order = list(GROUPS)
    lines = sorted(
        rows.values(), key=lambda line: order.index(group) if (group := _name(line)[1:].split(".")[0]) in order else 99
    )
    form = "long" if long else "short"
    machine = f"Python {platform.python_version()}, Linux {platform.release()}, {os.cpu_count()} cores"
    where = f"{machine}, load average {os.getloadavg()[1]:.1f}"
    output = f"Last run: {form} form, {len(verdicts)} trials in {seconds / 60:.1f} minutes, seed {seed}; {where}."
    return "\n".join([output, "", "| trial | expected | got | took | |", "|---|---|---|---|---|", *lines, ""])


def _name(line: str) -> str:
    return line.split(" | ")[0][2:]


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")


def _row(*cells: str) -> Table:
    row = Table.grid(padding=(0, 1))
    for (_, width), _cell_text in zip(_COLUMNS, cells, strict=True):
        row.add_column(width=width)
    row.add_row(*cells)
    return row
