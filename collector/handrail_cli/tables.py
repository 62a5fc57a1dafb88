"""Draw tables that fit their width.

The columns that matter most get space first; then names are folded or cut. No figure is cut.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from handrail.durations import format_duration

GAP: Final = 2  # columns between columns
ALWAYS: Final = 9  # ``keep`` of a column that is always shown
NONE: Final = Text("–", style="dim")
T = TypeVar("T")


@dataclass(frozen=True)  # no slots: typing sets __orig_class__, which a frozen class with slots answers with TypeError
class Column(Generic[T]):
    """One column.

    ``keep``: columns with a higher value get space first; ``ALWAYS``: it is shown even where it says nothing in any row.
    ``right``: a column of figures. ``least``: its names may be cut to this many characters; 0: they are folded.
    """

    title: str
    cell: Callable[[T], Text | str]
    keep: int = ALWAYS
    right: bool = False
    least: int = 0


def table(columns: Sequence[Column[T]], rows: Sequence[T], width: int, *, indent: int = 0) -> RenderableType:
    """Draw the rows in their order, ``width`` columns wide, the indent included."""
    cells = [[Text.assemble(column.cell(row)) for row in rows] for column in columns]
    natural = [max(len(column.title), *(cell.cell_len for cell in of), 0) for column, of in zip(columns, cells, strict=True)]
    least = [min(wide, column.least or wide) for column, wide in zip(columns, natural, strict=True)]
    wanted = [at for at, column in enumerate(columns) if column.keep == ALWAYS or _says_something(cells[at])]
    room = width - indent
    shown: list[int] = []
    for at in sorted(wanted, key=lambda at: (-columns[at].keep, at)):
        if columns[at].keep == ALWAYS or _sum(least, [*shown, at]) <= room:
            shown.append(at)
    shown.sort()
    drawn = grid(header=True)
    for at in shown:
        title, cut = columns[at].title, columns[at].least
        if columns[at].right:
            drawn.add_column(title, justify="right", no_wrap=True, min_width=natural[at])
        elif cut:
            most = max(least[at], room - _sum(natural, shown) + natural[at])
            drawn.add_column(title, no_wrap=True, overflow="ellipsis", max_width=most)
        else:
            drawn.add_column(title, overflow="fold")
    for row in zip(*(cells[at] for at in shown), strict=True):
        drawn.add_row(*row)
    return Padding(drawn, (0, 0, 0, indent), expand=False) if indent else drawn


def grid(*, header: bool) -> Table:
    """Return an empty table in the style of all tables."""
    return Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="dim", show_header=header)


def duration(duration_ns: float | None) -> Text:
    """Return the cell of a duration; a dash where it is not known."""
    return NONE if duration_ns is None else Text(format_duration(round(duration_ns)))


def _says_something(cells: Sequence[Text]) -> bool:
    return any(cell.plain not in ("", NONE.plain) for cell in cells)


def _sum(widths: Sequence[int], shown: Sequence[int]) -> int:
    return sum(widths[at] + GAP for at in shown) - GAP
