"""Place the panels: rows from top to bottom, panels from left to right.

A panel that does not fit begins a new line.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from handrail_dashboards.panel import Panel, PanelRow

COLUMNS: Final = 24
HEADING: Final = 1


@dataclass(frozen=True, slots=True)
class GridPosition:
    """A place in columns and rows of Grafana's grid."""

    x: int
    y: int
    w: int
    h: int


def places(rows: Sequence[PanelRow]) -> Iterator[tuple[PanelRow | Panel, GridPosition]]:
    """Yield each row's heading and then its panels, in order.

    Raises ``ValueError`` for a panel that is wider than the grid.
    """
    y = 0
    for row in rows:
        yield row, GridPosition(0, y, COLUMNS, HEADING)
        y += HEADING
        x = line = 0
        for panel in row.panels:
            if not 0 < panel.width <= COLUMNS:
                raise ValueError(f"{panel.title}: width {panel.width} is not from 1 to {COLUMNS}")
            if x + panel.width > COLUMNS:
                x, y, line = 0, y + line, 0
            yield panel, GridPosition(x, y, panel.width, panel.height)
            x, line = x + panel.width, max(line, panel.height)
        y += line
