"""Draw tables that fit their width without cutting a figure or a name.

Columns that matter less go first, then names are folded.
The module also trims the blanks at the ends of an answer's lines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.padding import Padding
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

GAP: Final = 2  # columns between columns
INDENT: Final = 2
ALWAYS: Final = 9  # ``keep`` of a column that never goes


@dataclass(frozen=True, slots=True)
class FittedColumn:
    """One column.

    ``keep``: columns with a lower value go first. ``right``: a column of figures; only other columns are folded where space
    is short.
    """

    title: str
    keep: int = ALWAYS
    right: bool = True


def fitted(columns: Sequence[FittedColumn], rows: Sequence[Sequence[Text | str]], width: int) -> RenderableType:
    """Draw the rows as an indented table within ``width``.

    Every row has a cell for each column.
    """
    cells = [[Text(cell) if isinstance(cell, str) else cell for cell in row] for row in rows]
    natural = [max(len(column.title), *(row[at].cell_len for row in cells), 0) for at, column in enumerate(columns)]
    shown = list(range(len(columns)))
    for at in sorted(shown, key=lambda at: columns[at].keep):
        if columns[at].keep < ALWAYS and sum(natural[i] + GAP for i in shown) - GAP > width - INDENT:
            shown.remove(at)
    table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="dim")
    for at in shown:
        if columns[at].right:
            table.add_column(columns[at].title, justify="right", no_wrap=True, min_width=natural[at])
        else:
            table.add_column(columns[at].title, overflow="fold")
    for row in cells:
        table.add_row(*(row[at] for at in shown))
    return Padding(table, (0, 0, 0, INDENT), expand=False)


@dataclass(frozen=True, slots=True)
class Trimmed:
    """Content without blanks at the ends of lines.

    People can then paste and compare it.
    """

    inside: RenderableType

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for line in console.render_lines(self.inside, options, pad=False):
            while line and not line[-1].text.rstrip():
                line.pop()
            if line:
                line[-1] = Segment(line[-1].text.rstrip(), line[-1].style)
            yield from line
            yield Segment.line()
