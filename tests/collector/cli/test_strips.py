"""Distributions drawn as strips on one axis."""

from __future__ import annotations

import pytest

from handrail_cli.render.sparkline import OBJECTIVE, Strip, draw

MS = 1e6


def strip(name: str, *quantiles_ms: float) -> Strip:
    return Strip(name, dict(zip(("p10", "p50", "p90", "p99"), (each * MS for each in quantiles_ms), strict=True)))


def drawn(*strips: Strip, objective_ms: float | None = None, width: int = 80) -> list[str]:
    return [line.plain for line in draw("TTFT", strips, None if objective_ms is None else objective_ms * MS, width)]


def test_ranges_stand_in_order_and_in_proportion_on_a_logarithmic_axis() -> None:
    _, axis, line = drawn(strip("a", 10, 100, 1000, 10_000))
    cells = line.removeprefix("a  ")
    assert cells.strip() == cells.strip().replace(" ", "")
    lengths = [cells.count(glyph) for glyph in "▒█░"]
    assert max(lengths) - min(lengths) <= 2  # a decade each
    assert axis.index("10 ms") == line.index("▒")
    assert abs(axis.index("100 ms") - line.index("█")) <= 1


def test_equal_values_stand_below_each_other() -> None:
    _, _, one, other = drawn(strip("a", 10, 20, 30, 40), strip("longer", 20, 25, 26, 40))
    assert max(at for at, cell in enumerate(one) if cell == "░") == max(at for at, cell in enumerate(other) if cell == "░")


@pytest.mark.parametrize("objective_ms", [1, 25, 5000])
def test_the_objective_is_always_seen(objective_ms: float) -> None:
    lines = drawn(strip("a", 10, 20, 30, 40), strip("b", 100, 200, 300, 400), objective_ms=objective_ms)
    marks = {line.index(OBJECTIVE) for line in lines[2:]}
    assert len(marks) == 1
    assert all(len(line) <= 80 for line in lines)


def test_one_value_is_one_mark() -> None:
    assert drawn(strip("a", 7, 7, 7, 7))[2].count("░") == 1


def test_nothing_is_drawn_of_nothing() -> None:
    assert drawn(Strip("a", {})) == []
    assert len(drawn(Strip("a", {}), strip("b", 1, 2, 3, 4))) == 3
