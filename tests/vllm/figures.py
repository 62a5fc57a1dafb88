"""Collect the figures of a test session and print them as tables at its end.

The output can be quoted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class Figures:
    """Lines by title, in order of arrival."""

    tables: dict[str, list[str]] = field(default_factory=dict)

    def add(self, title: str, line: str) -> None:
        lines = self.tables.setdefault(title, [])
        if line not in lines:  # tests that share a run may add the same line
            lines.append(line)


def nearest_rank(values: Iterable[float], share: float) -> float:
    """Return the smallest value that at least ``share`` of the values do not exceed.

    Raises ``ValueError`` when there is no value.
    """
    ordered = sorted(values)
    if not ordered:
        raise ValueError("a quantile of nothing")
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def spread(values: Sequence[float], unit: str = "ms") -> str:
    """Describe p50, p99 and maximum in words."""
    p50, p99 = nearest_rank(values, 0.5), nearest_rank(values, 0.99)
    return f"p50 {p50:.2f} {unit}, p99 {p99:.2f} {unit}, max {max(values):.2f} {unit} (n={len(values)})"
