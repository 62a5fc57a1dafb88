"""Judge every case and print the scores.

``--json`` prints one object a line. The seeds are fresh and printed; ``--seed`` repeats them.
A case runs with several seeds and its requests are counted together: the score is then a rate and not the luck of one run.
"""

from __future__ import annotations

import argparse
import json
import random
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # as pytest does, so that ``bench`` is one package for both

from rich.console import Console

from bench.truth.cases import CASES, TRACES, Case
from bench.truth.judge import Counts, Score
from bench.truth.report import missed, table, write_page
from bench.truth.run import Referee
from handrail.runtime.process import freeze_gc

WIDTH = 150
ENOUGH = 600
"""Slow requests of a case after which no further seed is run.

With so many, a share of nine tenths differs visibly from 87 % or 93 %.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0 when every goal is met, else 1."""
    parser = argparse.ArgumentParser(prog="make bench-truth", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="SCENARIO", help="which to judge (default: all)")
    parser.add_argument("--json", action="store_true", help="one object a scenario on standard output")
    parser.add_argument("--seed", type=int, help="repeat the runs of this seed and those after it (default: a fresh one)")
    parser.add_argument("--runs", type=int, default=3, help=f"seeds a case, fewer where {ENOUGH} requests were slow (default 3)")
    parser.add_argument("--requests", type=int, default=2000, help="of each run (default 2000)")
    parser.add_argument(
        "--traces",
        type=Path,
        default=TRACES,
        help="folder of the published traces (default: their first lines, tests/data/request_traces; played again and again)",
    )
    parser.add_argument("--plugin", action="store_true", help="the engines have the plugin: every phase and outcome is evidence")
    parser.add_argument("--write", action="store_true", help="put the table into docs/truth.md")
    given = parser.parse_args(arguments)
    unknown = set(given.names) - {case.name for case in CASES}
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}; valid are {', '.join(case.name for case in CASES)}")
    seed = random.SystemRandom().randrange(1 << 31) if given.seed is None else given.seed
    say = Console(stderr=True)
    again = _again(given, seed)
    say.print(f"again with: make bench-truth ARGS='{again}'", highlight=False)
    chosen = [case for case in CASES if not given.names or case.name in given.names]
    began = time.monotonic()
    seeds = range(seed, seed + given.runs)
    referees = [Referee(given.requests, one, given.traces, plugin=given.plugin) for one in seeds]
    scores = _judge(referees, chosen, say, as_json=given.json)
    say.print(f"{len(scores)} cases judged in {time.monotonic() - began:.0f} s", highlight=False)
    if not given.json:
        wide = max(Console().width, WIDTH)
        Console(width=wide).print(table(scores))
    wrong = missed(scores, plugin=given.plugin)
    for line in wrong:
        say.print(f"[yellow]{line}[/yellow]", highlight=False)
    if given.write:
        write_page(scores, chosen, again, plugin=given.plugin)
    return 1 if wrong else 0


def _again(given: argparse.Namespace, seed: int) -> str:
    """Return the arguments that repeat this run, even if the defaults change."""
    traces = [] if given.traces == TRACES else ["--traces", str(given.traces)]
    plugin = ["--plugin"] if given.plugin else []
    return shlex.join([f"--seed={seed}", f"--requests={given.requests}", f"--runs={given.runs}", *traces, *plugin, *given.names])


def _judge(referees: Sequence[Referee], chosen: Sequence[Case], say: Console, *, as_json: bool) -> list[Score]:
    freeze_gc(young=50_000)
    scores = []
    for case in chosen:
        with say.status(f"{case.name} …"):
            scores.append(_pooled(referees, case))
        if as_json:
            print(json.dumps(scores[-1].plain()), flush=True)
    return scores


def _pooled(referees: Sequence[Referee], case: Case) -> Score:
    counts = Counts()
    for referee in referees:
        counts += referee.counts(case)
        if counts.slow >= ENOUGH:
            break
    return Score.of(case.name, counts)


if __name__ == "__main__":
    sys.exit(main())
