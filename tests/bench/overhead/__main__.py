"""Measure what the plugin costs on a real pair.

Run it with ``make bench-overhead``; ``ARGS='--pairs N'`` sets the number of pairs. With 8 pairs or more it writes
docs/overhead.md.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # as pytest does, so that ``bench`` and ``vllm`` are one package for both

from rich.console import Console
from rich.table import Table

from bench import bench_guest
from bench.overhead.arms import Arm, Measured, measure, running_bed
from bench.overhead.page import PAGE, Result, alone, machine, page, rows
from bench.overhead.paired import differences
from vllm.pair import NotInstalledError, find_installation

PUBLISHED_PAIRS = 8
WIDTH = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0 when every budget is met, 1 when one is missed, 3 without an engine."""
    parser = argparse.ArgumentParser(prog="make bench-overhead", description=__doc__)
    parser.add_argument(
        "--pairs", type=int, default=PUBLISHED_PAIRS, help="paired runs, at least 2 (default 8: about 20 minutes)"
    )
    parser.add_argument("--without-middleware", action="store_true", help="the plugin alone")
    parser.add_argument("--json", action="store_true", help="one object on standard output, every run in it")
    given = parser.parse_args(arguments)
    if given.pairs < 2:
        parser.error("--pairs: an interval needs at least 2")
    say = Console(stderr=True)
    try:
        installation = find_installation()
    except NotInstalledError as error:
        say.print(str(error))
        return 3
    load = os.getloadavg()[0]
    where = machine(installation)
    say.print(f"{where}; load {load:.1f}", highlight=False)
    if load > 0.5:
        say.print("[yellow]the machine is not idle: wait for it, or take these figures as worse than they are[/yellow]")
    began = time.monotonic()
    isolated = bench_guest.run()
    runs: list[Mapping[Arm, Measured]] = []
    with tempfile.TemporaryDirectory(prefix="handrail-overhead-") as folder:
        for run in range(given.pairs):
            started = time.monotonic()
            with running_bed(installation, Path(folder) / str(run), middleware=not given.without_middleware) as bed:
                up = time.monotonic()
                runs.append(measure(bed, run))
                done = time.monotonic()
            say.print(f"run {run + 1}: engines up in {up - started:.0f} s, load {done - up:.0f} s", highlight=False)
    result = Result(
        differences=differences(runs),
        runs=runs,
        alone=isolated,
        middleware=not given.without_middleware,
        load=load,
        seconds=time.monotonic() - began,
        command=f"make bench-overhead ARGS='--pairs {given.pairs}{' --without-middleware' if given.without_middleware else ''}'",
    )
    _show(result, as_json=given.json)
    if given.pairs >= PUBLISHED_PAIRS and not given.without_middleware:
        PAGE.write_text(page(result, where), encoding="utf-8")
        say.print(f"wrote {PAGE.relative_to(Path.cwd()) if PAGE.is_relative_to(Path.cwd()) else PAGE}")
    else:
        say.print(f"docs/overhead.md is written by {PUBLISHED_PAIRS} pairs or more, with the middleware", highlight=False)
    return 0 if all(d.met is not False for d in result.differences) else 1


def _show(result: Result, *, as_json: bool) -> None:
    if as_json:
        found = [
            {"name": d.figure.name, "unit": d.figure.unit, "off": d.off, "on": d.on, "mean": d.mean, "low": d.low, "high": d.high}
            | {"each": d.each, "met": d.met}
            for d in result.differences
        ]
        print(json.dumps({"differences": found, "sidecar_cpu_ms": result.sidecar_ms, "isolation": list(result.alone)}))
        return
    out = Console(width=max(Console().width, WIDTH))
    table = Table(box=None, pad_edge=False)
    for column in ("figure", "without", "with", "difference", "95 % interval", "limit"):
        table.add_column(column, justify="left" if column in ("figure", "limit") else "right")
    for row in rows(result):
        table.add_row(*row)
    out.print(table)
    out.print(f"both sidecars together: {result.sidecar_ms:.2f} ms of CPU a request", highlight=False)
    for name, value, budget in alone(result):
        out.print(f"{name:54} {value:>14}  {budget}", highlight=False)


if __name__ == "__main__":
    sys.exit(main())
