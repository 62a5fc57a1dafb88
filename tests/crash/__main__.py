"""Print every crash point of journal and store and what was lost, doubled or torn.

``--json`` prints one object a line. The exit code is 1 when anything is not 0.
One life of a collector is recorded, crashed before each of its operations in every way, started again, and compared with what
was acknowledged. The starts are crashed too.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))  # as pytest sets it

from crash import faults
from crash.crashes import START, Crashes, Tally
from crash.recorded import JOURNAL, STORE, Recorder

MEMORY = Path("/dev/shm")
"""A file system in memory, which makes and removes thousands of folders faster."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0 when nothing was lost, doubled, torn or wrong, otherwise 1."""
    parser = argparse.ArgumentParser(prog="python -m tests.crash", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--all", action="store_true", help="crash the start after every crash, fail every operation (minutes)")
    parser.add_argument("--json", action="store_true", help="one object a line on standard output")
    given = parser.parse_args(arguments)
    logging.disable(logging.CRITICAL)  # the faults are intended, and logged by the hundred
    began = time.monotonic()
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as folder:
        recorded = Recorder(Path(folder) / "recorded").run()
        crashes = Crashes(recorded, Path(folder), again=1 if given.all else 7)
        crashes.run()
        tallies = crashes.tallies | faults.run(recorded, crashes, Path(folder), every=1 if given.all else 12)
    ordered = {name: tallies[name] for name in (*JOURNAL, *STORE, START, faults.FULL, faults.FAILED_SYNC)}
    wrong = [output for tally in ordered.values() for output in tally.messages] + recorded.torn_reads()
    if given.json:
        for name, tally in ordered.items():
            print(json.dumps(line(name, tally)))
    else:
        Console().print(table(ordered))
    say = Console(stderr=True, highlight=False)
    say.print("lost: acknowledged spans; twice: spans or rows; torn: reads of a state that never was; wrong: rows or counts")
    say.print(
        f"{len(recorded.inside)} reads by others before every operation of the life, {len(recorded.torn_reads())} torn "
        f"({recorded.rolled} states with rollups, their first answers held against the rows); "
        f"{crashes.starts} starts, each on another disk or after another acknowledgement; {time.monotonic() - began:.0f} s"
    )
    for output in wrong[:20]:
        say.print(output, style="red")
    return 1 if wrong else 0


def line(name: str, tally: Tally) -> dict[str, object]:
    """Return one row for a program."""
    return {
        "operation": name,
        "points": tally.points,
        "crashes": tally.crashes,
        "ways": dict(tally.ways),
        "acknowledged_spans_lost": tally.lost,
        "twice": tally.twice,
        "torn_reads": tally.torn,
        "wrong": tally.wrong,
    }


def table(tallies: dict[str, Tally]) -> Table:
    """Return all rows and their sum, for a person."""
    made = Table(box=None, header_style="bold", pad_edge=False)
    made.add_column("operation", no_wrap=True)
    for name in ("points", "crashes", "ways", "lost", "twice", "torn", "wrong"):
        made.add_column(name, justify="right")
    for name, tally in tallies.items():
        made.add_row(name, *map(str, figures(tally)))
    total = Tally()
    for tally in tallies.values():
        total.points += tally.points
        total.ways += tally.ways
        total.lost, total.twice = total.lost + tally.lost, total.twice + tally.twice
        total.torn, total.wrong = total.torn + tally.torn, total.wrong + tally.wrong
    made.add_section()
    made.add_row("all", *map(str, figures(total)), style="bold")
    return made


def figures(tally: Tally) -> tuple[int, ...]:
    """Return a tally's figures in the order of the table's columns."""
    return tally.points, tally.crashes, len(tally.ways), tally.lost, tally.twice, tally.torn, tally.wrong


if __name__ == "__main__":
    sys.exit(main())
