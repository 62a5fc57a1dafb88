"""Inject each fault into a fleet of its own and wait for its alert at a pager.

The alert passes a real Prometheus, Alertmanager and webhook.
Every fleet runs the shipped rules and inhibitions; only the objectives are those of fleets on two cores (slo.yaml beside this).
Exits with 1 when an alert did not come in time or something else paged.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # as pytest does, so that ``oncall`` is one package for both

from rich.console import Console
from rich.markup import escape

from handrail_cli.subprocesses import ChildError
from harness.real_fleet import can_build_gpus
from oncall.alarm import alarm
from oncall.cases import CASES, HEALTHY, HERE
from oncall.quantiles import measure, wrong
from oncall.report import quantile_table, table, write_page
from oncall.run import Bench

WIDTH = 150
QUANTILES = "quantiles"


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0 when every case is right, else 1."""
    parser = argparse.ArgumentParser(prog="make test-oncall", description=__doc__)
    parser.add_argument(
        "names", nargs="*", metavar="FAULT", help="which to inject (default: all, a healthy fleet, and quantiles)"
    )
    parser.add_argument("--healthy-minutes", type=float, default=20.0, help="how long the healthy fleet runs (default 20)")
    parser.add_argument("--at-once", type=int, default=14, help="fleets at any time; each wants a tenth of a core (default 14)")
    parser.add_argument("--interval", type=int, default=15, metavar="SECONDS", help="of scrapes and evaluations (default 15)")
    parser.add_argument("--folder", type=Path, help="keep logs, rules and notifications here (default: a temporary folder)")
    parser.add_argument("--json", action="store_true", help="one object a case on standard output")
    parser.add_argument("--write", action="store_true", help="put the table into docs/oncall.md")
    given = parser.parse_args(arguments)
    every = {case.name: case for case in (HEALTHY, *CASES)}
    unknown = set(given.names) - {*every, QUANTILES}
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}; valid are {', '.join((*every, QUANTILES))}")
    if given.folder and given.folder.exists() and any(given.folder.iterdir()):
        parser.error(f"--folder {given.folder} is not empty: name a new one")
    names = dict.fromkeys(given.names or (*every, QUANTILES))
    chosen = [every[name] for name in names if name in every]
    say = Console(stderr=True, highlight=False)
    began, load = time.monotonic(), os.getloadavg()[0]

    def progress(line: str) -> None:
        minutes, seconds = divmod(round(time.monotonic() - began), 60)
        say.print(f"[dim]{minutes:2d}:{seconds:02d}[/dim] {escape(line)}", soft_wrap=True)

    with tempfile.TemporaryDirectory(prefix="handrail-oncall-") as temporary:
        folder = given.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        progress(f"{len(chosen)} fleets, {given.at_once} at once; files in {folder}")
        if without := can_build_gpus(folder / "nvml"):
            progress(f"faults of GPUs are left out, since the NVML double cannot be had here: {without}")
            chosen = [case for case in chosen if not case.shape.gpus]
        try:
            with alarm(folder, HERE / "slo.yaml", given.interval) as running:
                bench = Bench(running, folder, given.interval, progress)
                verdicts = bench.run(chosen, given.at_once, given.healthy_minutes * 60)
                readings = measure(running, folder, given.interval, progress) if QUANTILES in names else []
        except (ChildError, FileNotFoundError) as error:
            say.print(f"[red]{escape(str(error))}[/red]")
            return 1
    if given.json:
        for line in (*map(asdict, verdicts), *map(asdict, readings)):
            print(json.dumps(line))
    else:
        shown = Console(width=WIDTH)
        if verdicts:
            shown.print(table(verdicts))
        if readings:
            shown.print(quantile_table(readings))
    if given.write:
        write_page(
            verdicts, readings, f"with scrapes and evaluations every {given.interval} s; load average {load:.1f} at the start"
        )
    return int(any(verdict.wrong for verdict in verdicts) or bool(wrong(readings)))


if __name__ == "__main__":
    sys.exit(main())
