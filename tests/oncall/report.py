"""Verdicts as a table, and in docs/oncall.md."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from rich.table import Table

from oncall.judge import Verdict
from oncall.quantiles import Reading, mean_error

_HEAD: Final = (
    "| fault | what is done | alert | `for` | late | after the fault | pages with it | tickets with it | |",
    "|---|---|---|---|---|---|---|---|---|",
)
PAGE: Final = Path(__file__).parents[2] / "docs" / "oncall.md"


def table(verdicts: Iterable[Verdict]) -> Table:
    """Return a table with one line for each fault."""
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


def markdown(verdicts: Iterable[Verdict], before: str = "") -> str:
    """Return the page's table; rows of other faults in ``before`` stay.

    ``before``: the current table of the page.
    """
    rows = {}
    for each in verdicts:
        cells = (
            *(each.name, each.notified, each.alert, f"{each.wait_s:.0f} s", _seconds(each.late_s), _seconds(each.after_s)),
            *(", ".join(each.pages) or "–", ", ".join(each.tickets) or "–", "; ".join(each.wrong) or "ok"),
        )
        rows[each.name] = f"| {' | '.join(cells)} |"
    kept = [line for line in before.splitlines() if line.startswith("| ") and not line.startswith("| fault ")]
    names = dict.fromkeys((*(line.split(" | ")[0][2:] for line in kept), *rows))
    old = {line.split(" | ")[0][2:]: line for line in kept}
    return "\n".join([*_HEAD, *(rows.get(name) or old[name] for name in names)])


def quantile_table(readings: Sequence[Reading]) -> Table:
    """Return a line for each quantile, and the mean error."""
    title = f"quantiles that the boards show: mean error {mean_error(readings):.1%}, highest {max(r.error for r in readings):.1%}"
    shown = Table("of", "what", "", "raw", "shown", "error", title=title, title_justify="left", box=None)
    for each in readings:
        shown.add_row(each.of, each.what, each.share, f"{each.raw_s:.6g} s", f"{each.shown_s:.6g} s", f"{each.error:.1%}")
    return shown


def quantile_markdown(readings: Sequence[Reading]) -> str:
    """Return one line for each distribution.

    It has the raw and shown p50, p99 and p99.9, and the highest error of the three.
    """
    lines = ["| values | what | raw p50, p99, p99.9 | shown | highest error |", "|---|---|---|---|---|"]
    for of, what in dict.fromkeys((each.of, each.what) for each in readings):
        found = [each for each in readings if (each.of, each.what) == (of, what)]
        raw, shown = (
            ", ".join(f"{value:.4g}" for value in values) for values in zip(*((r.raw_s, r.shown_s) for r in found), strict=True)
        )
        lines.append(f"| {of}, {found[0].count:,} | {what} | {raw} s | {shown} s | {max(r.error for r in found):.1%} |")
    highest = max(each.error for each in readings)
    return "\n".join([*lines, "", f"Mean error of all {len(readings)}: {mean_error(readings):.1%}, highest {highest:.1%}."])


def write_page(verdicts: Sequence[Verdict], readings: Sequence[Reading], how: str) -> None:
    """Replace in docs/oncall.md what was measured now.

    Raises ``ValueError`` when the page has no place for it.
    """
    page = PAGE.read_text(encoding="utf-8")
    if verdicts:
        page = _replaced(page, "faults", f"Last measured {how}.\n\n{markdown(verdicts, _between(page, 'faults'))}")
    if readings:
        page = _replaced(page, "quantiles", quantile_markdown(readings))
    PAGE.write_text(page, encoding="utf-8")


def _between(page: str, name: str) -> str:
    begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    if begin not in page or end not in page:
        raise ValueError(f"{PAGE} has no {begin} and {end}")
    return page[page.index(begin) + len(begin) : page.index(end)]


def _replaced(page: str, name: str, text: str) -> str:
    return page.replace(f"<!-- {name} -->{_between(page, name)}", f"<!-- {name} -->\n{text}\n", 1)


def _seconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f} s"
