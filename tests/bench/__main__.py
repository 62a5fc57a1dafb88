"""Run the benchmarks and print each figure with its budget.

``--json`` prints one object a line.
A benchmark is a module ``bench_<name>.py`` with ``run() -> list[dict]``; a figure is {name, value, unit, budget, ratio, met}.
``ratio`` is value over budget (for rates too); ``met`` says whether the budget holds.
Run them on idle cores: a figure from a busy machine says little, so the load average is printed.
``--write`` puts a benchmark's figures into the page of docs/ that has ``<!-- figures NAME -->`` and ``<!-- /figures -->``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent
DOCS = HERE.parents[1] / "docs"
_PLACE = "<!-- figures {name} -->"
_END = "<!-- /figures -->"
NAMES = tuple(sorted(file.stem.removeprefix("bench_") for file in HERE.glob("bench_*.py")))


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0 when every measured budget holds, else 1."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__.split("\n", 1)[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which to run (default: all of {', '.join(NAMES)})")
    parser.add_argument("--json", action="store_true", help="one object a line on standard output")
    parser.add_argument("--write", action="store_true", help="put the figures into the pages of docs/ that have a place for them")
    given = parser.parse_args(arguments)
    unknown = set(given.names) - set(NAMES)
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}; valid are {', '.join(NAMES)}")
    say = Console(stderr=True)
    load = os.getloadavg()[0]
    machine = platform.processor() or platform.machine()
    where = f"{machine}, {os.cpu_count()} cores, Python {platform.python_version()}, load {load:.1f}"
    say.print(where)
    if load > 0.5:
        say.print("[yellow]the machine is not idle: wait for it, or take these figures as worse than they are[/yellow]")
    figures: list[dict[str, Any]] = []
    for name in given.names or NAMES:
        started = time.monotonic()
        with say.status(f"{name} …"):
            rows = run(name)
        say.print(f"{name}: {time.monotonic() - started:.0f} s")
        figures += rows
        if given.write and rows:
            for page in pages(name):
                page.write_text(written(page.read_text("utf-8"), name, rows, where), "utf-8")
                say.print(f"{name}: written to {page}")
        if given.json:
            for row in rows:
                print(json.dumps(row), flush=True)
    if not given.json:
        out = Console()
        out.print(table(figures), no_wrap=True, width=max(out.width, 110))
    return 0 if all(row["met"] is not False for row in figures) else 1


def run(name: str) -> list[dict[str, Any]]:
    """Run one benchmark in a process of its own.

    No benchmark inherits the heap or the threads of another. Raises ``CalledProcessError`` when the process fails.
    """
    code = f"import json, sys; from tests.bench.bench_{name} import run; json.dump(run(), sys.stdout)"
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True, cwd=HERE.parents[1])
    rows: list[dict[str, Any]] = json.loads(done.stdout)
    return rows


def pages(name: str) -> list[Path]:
    """Return the pages of docs/ that have a place for the figures of this benchmark."""
    return [page for page in sorted(DOCS.glob("*.md")) if _PLACE.format(name=name) in page.read_text("utf-8")]


def written(page: str, name: str, figures: Sequence[dict[str, Any]], where: str) -> str:
    """Return the page with these figures in their place.

    ``where``: the machine of the run, and its load.
    """
    begin, rest = page.split(_PLACE.format(name=name), 1)
    _, end = rest.split(_END, 1)
    rows = [f"| {row['name']} | {_with_unit(number(row['value']), row)} | {_judged(row)}|" for row in figures]
    lines = ["", f"| {where} | | budget |", "|---|---|---|", *rows, ""]
    return begin + _PLACE.format(name=name) + "\n".join(lines) + _END + end


def _judged(row: dict[str, Any]) -> str:
    if row["met"] is None:
        return ""
    return f"{_with_unit(budget(row), row)}, {'met' if row['met'] else '**missed**'} "


def _with_unit(report: str, row: dict[str, Any]) -> str:
    return f"{report} {row['unit']}".rstrip()


def table(figures: Sequence[dict[str, Any]]) -> Table:
    """Return the figures as a table for a person."""
    made = Table(box=None, pad_edge=False)
    for column, justify in (
        ("figure", "left"),
        ("value", "right"),
        ("unit", "left"),
        ("budget", "right"),
        ("ratio", "right"),
        ("", "left"),
    ):
        made.add_column(column, justify=justify)  # type: ignore[arg-type]
    for row in figures:
        met = {True: "[green]met[/green]", False: "[red]missed[/red]", None: ""}[row["met"]]
        made.add_row(row["name"], number(row["value"]), row["unit"], budget(row), number(row["ratio"]), met)
    return made


def budget(row: dict[str, Any]) -> str:
    """Return the budget as text: a number, or the range that ``published`` gives."""
    least, most = row.get("published", (row["budget"], row["budget"]))
    return number(least) if least == most else f"{number(least)}–{number(most)}"


def number(value: float | None) -> str:
    """Format a number with three significant digits, or all digits if large and whole."""
    if value is None:
        return "–"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


if __name__ == "__main__":
    sys.exit(main())
