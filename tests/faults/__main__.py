"""Put Handrail's real processes under every fault that they promise to withstand.

Prints one row for each trial: what was expected and what happened. The exit code is 1 when a trial is not as expected.
The short form takes 15 minutes at most, ``--long`` an hour and a half.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # as pytest has it

from rich.console import Console

from faults import battery, table
from faults.battery import Verdict

WIDTH = 158


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0 when every trial is as expected, else 1."""
    parser = argparse.ArgumentParser(prog="make test-faults", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one object a trial on standard output")
    parser.add_argument("--long", action="store_true", help="the long form: an hour and a half")
    parser.add_argument("--only", action="append", default=[], metavar="PATTERN", help="trials of this name, group or glob")
    parser.add_argument("--list", action="store_true", help="print the trials and what they expect, run none")
    parser.add_argument("--seed", type=int, help="of everything left to chance (default: another each time)")
    parser.add_argument("--write", action="store_true", help="put the rows into docs/reliability.md")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the trials' files and logs here")
    for hidden, kind in (("--one", str), ("--result", Path), ("--folder", Path), ("--seconds", float)):
        parser.add_argument(hidden, type=kind, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    seed = given.seed if given.seed is not None else random.SystemRandom().randrange(2**32)
    if given.one:
        return battery.child(given.one, given.result, given.folder, seed, given.long, given.seconds)
    wanted = battery.chosen(battery.trials(), given.only)
    if not wanted:
        parser.error(f"no trial is called {', '.join(given.only)}; --list shows them")
    shown = Console(width=WIDTH, highlight=False)
    if given.list:
        for trial in wanted:
            shown.print(f"{trial.name:28} {trial.estimate_s(given.long):4.0f} s  {trial.expected}", soft_wrap=True)
        return 0
    if not given.json:
        table.show_head(shown)

    def report(verdict: Verdict) -> None:
        if given.json:
            print(json.dumps(verdict.line(), ensure_ascii=False), flush=True)
        else:
            table.show(shown, verdict)

    began_s = time.monotonic()
    verdicts = asyncio.run(battery.Runner(seed, given.long, report, given.keep).run(wanted))
    seconds = time.monotonic() - began_s
    Console(stderr=True, highlight=False).print(table.summary(verdicts, seconds, seed), soft_wrap=True)
    if given.write:
        table.write_page(verdicts, seconds, seed, given.long)
    return int(any(not verdict.ok for verdict in verdicts))


if __name__ == "__main__":
    sys.exit(main())
