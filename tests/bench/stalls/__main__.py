"""Judge the reported causes of stalls against their true causes.

It judges scene by scene (docs/stalls.md).
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

from bench.stalls.referee import judge
from bench.stalls.report import missed, plain, table, write_page
from bench.stalls.scenes import SCENES
from handrail.runtime.process import freeze_gc

WIDTH = 120


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0 when every goal is met, else 1."""
    parser = argparse.ArgumentParser(prog="make bench-stalls", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="SCENE", help="which to judge (default: all)")
    parser.add_argument("--json", action="store_true", help="one object a scene on standard output")
    parser.add_argument("--seed", type=int, help="repeat the runs of this seed (default: a fresh one)")
    parser.add_argument("--requests", type=int, default=500, help="of each run (default 500)")
    parser.add_argument("--write", action="store_true", help="put the table into docs/stalls.md")
    given = parser.parse_args(arguments)
    valid = [scene.name for scene in SCENES]
    if unknown := set(given.names) - set(valid):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; valid are {', '.join(valid)}")
    seed = random.SystemRandom().randrange(1 << 31) if given.seed is None else given.seed
    say = Console(stderr=True)
    again = shlex.join([f"--seed={seed}", f"--requests={given.requests}", *given.names])
    say.print(f"again with: make bench-stalls ARGS='{again}'", highlight=False)
    freeze_gc(young=50_000)
    began, scores = time.monotonic(), []
    for scene in SCENES:
        if given.names and scene.name not in given.names:
            continue
        with say.status(f"{scene.name} …"):
            scores.append(judge(scene, given.requests, seed))
        if given.json:
            print(json.dumps(plain(scores[-1])), flush=True)
    say.print(f"{len(scores)} scenes judged in {time.monotonic() - began:.0f} s", highlight=False)
    if not given.json:
        Console(width=max(Console().width, WIDTH)).print(table(scores))
    wrong = missed(scores)
    for line in wrong:
        say.print(f"[yellow]{line}[/yellow]", highlight=False)
    if given.write:
        write_page(scores, again)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
