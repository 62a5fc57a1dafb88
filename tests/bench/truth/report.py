"""Render the scores for a person and list the missed goals.

The same table goes to the terminal and to docs/truth.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from rich.table import Table

from bench.truth.cases import Case
from bench.truth.judge import Score

PAGE = Path(__file__).parents[3] / "docs" / "truth.md"
MARKS = {False: "<!-- scores -->", True: "<!-- scores with the plugin -->"}
RIGHT = {False: 0.9, True: 0.95}
"""Goals for phases: with proxies and vLLM's spans, and with the plugin."""

HOST_RIGHT = 0.9
OUTCOME_RIGHT = 0.95
MISNAMED = 0.02

_COLUMNS: tuple[tuple[str, Callable[[Score], float | None]], ...] = (
    ("phase right", lambda score: score.phase_right),
    ("of it named", lambda score: score.named),
    ("of it unattributed", lambda score: score.unattributed),
    ("open", lambda score: score.open),
    ("misnamed", lambda score: score.misnamed),
    ("host right", lambda score: score.host_right),
    ("outcome right", lambda score: score.outcome_right),
    ("found", lambda score: score.found),
    ("false findings", lambda score: score.false_findings),
    ("vLLM alone: right", lambda score: score.baseline_phase_right),
    ("misnamed", lambda score: score.baseline_misnamed),
)


_HEADINGS = (
    "phase\nright",
    "of it\nnamed",
    "of it\nunattr.",
    "\nopen",
    "mis-\nnamed",
    "host\nright",
    "outcome\nright",
    "\nfound",
    "false\nfindings",
    "vLLM alone\nright",
    "\nmisnamed",
)


def table(scores: Sequence[Score]) -> Table:
    """Return a table with one line for each case."""
    made = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    made.add_column("\nscenario")
    made.add_column("\nslow", justify="right")
    for heading in _HEADINGS:
        made.add_column(heading, justify="right")
    for score in scores:
        made.add_row(score.scenario, f"{score.slow:,}", *(percent(read(score)) for _, read in _COLUMNS))
    return made


def percent(share: float | None) -> str:
    """Format a share as percent with one decimal, or a dash for nothing to judge."""
    return "–" if share is None else f"{share:.1%}"


def missed(scores: Sequence[Score], *, plugin: bool = False) -> list[str]:
    """Return the goals that were missed, in words."""
    found = []
    for score in scores:
        goals = [
            ("misnamed", score.misnamed, MISNAMED, "at most"),
            ("KV outcome wrong", score.kv_outcome_wrong, 0.0, "at most"),
            ("false findings", score.false_findings, MISNAMED, "at most"),
            ("phase right", score.phase_right, RIGHT[plugin], "at least"),
            ("host right", score.host_right, HOST_RIGHT, "at least"),
            ("outcome right", score.outcome_right, OUTCOME_RIGHT, "at least"),
        ]
        for name, value, goal, bound in goals:
            if value is not None and (value > goal if bound == "at most" else value < goal):
                found.append(f"{score.scenario}: {name} {percent(value)}; the goal is {bound} {goal:.0%}")
    return found


def write_page(scores: Sequence[Score], cases: Sequence[Case], again: str, *, plugin: bool) -> None:
    """Replace the table of this mode in docs/truth.md.

    ``again``: the arguments that repeat the runs.
    """
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(f"{MARKS[plugin]}\n")
    after = rest[rest.index("\n## ") :]
    names = ("scenario", "fault", "slow", *(name for name, _ in _COLUMNS))
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    for score, case in zip(scores, cases, strict=True):
        fault = ", ".join(f"`{text}`" for text in (case.fault, *case.clocks)) if case.fault else "–"
        cells = [score.scenario, fault, str(score.slow), *(percent(read(score)) for _, read in _COLUMNS)]
        lines.append("| " + " | ".join(cells) + " |")
    output = f"\n`make bench-truth ARGS='{again} --write'` wrote this.\n\n" + "\n".join(lines) + "\n"
    goals = missed(scores, plugin=plugin)
    output += "\nGoals missed: " + ("; ".join(goals) if goals else "none") + ".\n"
    PAGE.write_text(f"{before}{MARKS[plugin]}\n{output}{after}", encoding="utf-8")
