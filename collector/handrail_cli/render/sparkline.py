"""Draw distributions side by side as strips on one logarithmic axis.

Each range of quantiles has a glyph besides the colour.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, floor, log10
from typing import Final

from rich.text import Text

from handrail.durations import format_duration

RANGES: Final = (("p10", "p50", "▒"), ("p50", "p90", "█"), ("p90", "p99", "░"))
"""First and last quantile of each range, and its glyph."""

OBJECTIVE: Final = "┆"
_STYLES: Final = ("cyan", "yellow", "green")
_APART: Final = 4  # columns between two marks of the axis


@dataclass(frozen=True, slots=True)
class Strip:
    """One line: its name and its quantiles in ns, by names such as ``p50``."""

    name: str
    quantiles_ns: Mapping[str, float]


def draw(title: str, strips: Sequence[Strip], objective_ns: float | None, width: int) -> Iterator[Text]:
    """Draw the strips, ``width`` columns wide, with the axis above them.

    Nothing where there are no values.
    """
    drawn = [strip for strip in strips if strip.quantiles_ns]
    if not drawn:
        return
    names = max(len(strip.name) for strip in drawn) + 2
    columns = width - names
    ends = [value for strip in drawn for value in strip.quantiles_ns.values()]
    marked = [*ends, *([objective_ns] if objective_ns else [])]
    low = max(1.0, min(marked)) / 1.15
    high = max(*marked, 2 * low) * 1.15
    per_decade = (columns - 1) / log10(high / low)

    def at(value_ns: float) -> int:
        return min(columns - 1, max(0, round(log10(max(value_ns, low) / low) * per_decade)))

    yield Text(title, style="bold")
    yield Text(" " * names + _axis(low, high, columns, at), style="dim")
    for place, strip in enumerate(drawn):
        cells = [" "] * columns
        for first, last, glyph in RANGES:
            begin, end = at(strip.quantiles_ns[first]), at(strip.quantiles_ns[last])
            cells[begin : end + 1] = [glyph] * (end + 1 - begin)
        if objective_ns:
            cells[at(objective_ns)] = OBJECTIVE
        line = Text(f"{strip.name:<{names}}")
        line.append("".join(cells).rstrip(), style=_STYLES[place % len(_STYLES)])
        yield line


def legend(objective: bool) -> Text:
    """Explain the glyphs."""
    parts = [f"{glyph}{glyph} {first} to {last}" for first, last, glyph in RANGES]
    return Text("   ".join([*parts, *([f"{OBJECTIVE} objective"] if objective else [])]), style="dim")


def _axis(low_ns: float, high_ns: float, columns: int, at: Callable[[float], int]) -> str:
    """Draw the marks: 1 of each decade, then 5, then 2, while there is room.

    A mark begins where its value lies.
    """
    axis = [" "] * columns
    for digit in (1, 5, 2):
        for power in range(floor(log10(low_ns)), ceil(log10(high_ns)) + 1):
            value = digit * 10.0**power
            text = _plain(value)
            start, end = at(value), at(value) + len(text)
            if low_ns <= value <= high_ns and end <= columns and not "".join(axis[max(0, start - _APART) : end + _APART]).strip():
                axis[start:end] = text
    return "".join(axis).rstrip()


def _plain(duration_ns: float) -> str:
    """Format ``50 ms``, ``1 s``; marks are round, so zeros after the point go."""
    number, _, unit = format_duration(round(duration_ns)).partition(" ")
    return f"{number.rstrip('0').rstrip('.') if '.' in number else number} {unit}"
