"""Verdicts as a table, and in docs/oncall.md."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from rich.table import Table

from oncall.judge import Verdict

PAGE: Final = Path(__file__).parents[2] / "docs" / "oncall.md"
_BEGIN, _END = "<!-- faults -->", "<!-- /faults -->"


def table(verdicts: Iterable[Verdict]) -> Table:
    """One line a fault."""
    shown = Table("fault", "alert", "for", "late", "after the fault", "with it", "", box=None)
    for each in verdicts:
        shown.add_row(
            each.name,
            each.alert,
            f"{each.wait_s:.0f} s",
            _seconds(each.late_s),
            _seconds(each.after_s),
            ", ".join((*each.pages, *each.tickets)),
            "; ".join(each.wrong) or "ok",
        )
    return shown


def markdown(verdicts: Iterable[Verdict]) -> str:
    """The page's table."""
    lines = [
        "| fault | what is done | alert | `for` | late | after the fault | pages with it | tickets with it | |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for each in verdicts:
        cells = (
            *(each.name, each.told, each.alert, f"{each.wait_s:.0f} s", _seconds(each.late_s), _seconds(each.after_s)),
            *(", ".join(each.pages) or "–", ", ".join(each.tickets) or "–", "; ".join(each.wrong) or "ok"),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def write_page(verdicts: Sequence[Verdict], interval_s: int, healthy_minutes: float) -> None:
    """Replace the table in docs/oncall.md."""
    page = PAGE.read_text(encoding="utf-8")
    said = f"Scraped and evaluated every {interval_s} s; the healthy fleet ran for {healthy_minutes:g} minutes."
    made = f"{_BEGIN}\n{said}\n\n{markdown(verdicts)}\n{_END}"
    PAGE.write_text(re.sub(f"{_BEGIN}.*{_END}", lambda _: made, page, flags=re.DOTALL), encoding="utf-8")


def _seconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f} s"
