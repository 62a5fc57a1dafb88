"""Render the scores for a person and for a script, and list missed goals."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from rich.table import Table

from bench.stalls.referee import Score

PAGE: Final = Path(__file__).parents[3] / "docs" / "stalls.md"
MARK: Final = "<!-- scores -->"
RIGHT: Final = 0.9
SHUFFLED: Final = 0.02
LEAST: Final = 30
"""Fewest stalls from which a share is judged."""

_HEADINGS: Final = (
    ("\nscene", "left"),
    ("\nstalls", "right"),
    ("with one\ntrue cause", "right"),
    ("named\nright", "right"),
    ("left\nunknown", "right"),
    ("named\nanother", "right"),
    ("no single\ncause: named", "right"),
    ("moved in\ntime: named", "right"),
)


def table(scores: Sequence[Score]) -> Table:
    """Return a table with one line for each scene."""
    made = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for heading, justify in _HEADINGS:
        made.add_column(heading, justify=justify)  # type: ignore[arg-type]
    for score in scores:
        made.add_row(*_cells(score))
    return made


def _cells(score: Score) -> list[str]:
    return [
        score.name,
        f"{score.reported:,}",
        f"{score.clear:,}",
        _percent(score.right, score.clear),
        _percent(score.unknown, score.clear),
        _percent(score.wrong, score.reported),
        f"{score.none_named} of {score.none}",
        _percent(score.shuffled_named, score.shuffled),
    ]


def plain(score: Score) -> dict[str, Any]:
    """Return one object for JSON; a share is None when there is nothing to judge."""
    return {
        "scene": score.name,
        "stalls": score.reported,
        "one_true_cause": score.clear,
        "right": _share(score.right, score.clear),
        "unknown": _share(score.unknown, score.clear),
        "wrong": _share(score.wrong, score.reported),
        "no_single_cause": score.none,
        "no_single_cause_named": score.none_named,
        "shuffled": score.shuffled,
        "shuffled_named": _share(score.shuffled_named, score.shuffled),
        "by_cause": dict(sorted(score.by_cause.items())),
    }


def missed(scores: Sequence[Score]) -> list[str]:
    """Return the goals that a run missed, in words.

    A run with too few stalls to judge also misses its goal.
    """
    found = []
    for score in scores:
        for name, part, whole, goal, least in (
            ("named right", score.right, score.clear, RIGHT, True),
            ("named though moved in time", score.shuffled_named, score.shuffled, SHUFFLED, False),
        ):
            if whole < LEAST:
                found.append(f"{score.name}: {whole} stalls are too few to judge; send more requests (--requests)")
            elif (part / whole < goal) if least else (part / whole > goal):
                bound = "at least" if least else "at most"
                found.append(f"{score.name}: {name} {part / whole:.1%}; the goal is {bound} {goal:.0%}")
    return found


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _percent(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "–"


def write_page(scores: Sequence[Score], again: str) -> None:
    """Replace the table in docs/stalls.md.

    ``again``: the arguments that repeat the run.
    """
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(f"{MARK}\n")
    after = rest[rest.index("\n#") :]
    names = [" ".join(heading.split()) for heading, _ in _HEADINGS]
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    lines += ["| " + " | ".join(_cells(score)) + " |" for score in scores]
    goals = "; ".join(missed(scores)) or "none"
    output = f"\n`make bench-stalls ARGS='{again} --write'` wrote this.\n\n" + "\n".join(lines)
    PAGE.write_text(f"{before}{MARK}\n{output}\n\nGoals missed in this run: {goals}.\n{after}", encoding="utf-8")
