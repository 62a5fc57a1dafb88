"""A panel as the boards describe it, before it becomes Grafana's.

There are only kinds whose components Grafana publishes, so that a test can render every panel: time series, stat, bar gauge,
table and text. Distributions are drawn as quantile series.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

RED: Final = "red"
ORANGE: Final = "orange"
GREEN: Final = "green"
BLUE: Final = "blue"
GREY: Final = "#8e8e8e"

NOT_EXPORTED: Final = "not exported"
"""The text where there is no series, which does not mean 0.

The panel's description says who would export it.
"""


class PanelType(str, Enum):
    """Grafana's panel types."""

    SERIES = "timeseries"
    STAT = "stat"
    BARS = "bargauge"
    TABLE = "table"
    TEXT = "text"


@dataclass(frozen=True, slots=True)
class PanelQuery:
    """One query of a panel.

    ``legend``: in Grafana's ``{{label}}`` form; in a table, the column. ``once``: evaluate it only at the end of the range.
    """

    expr: str
    legend: str = ""
    exemplars: bool = False
    once: bool = False
    unit: str = ""  # unit of its column, where it is not the panel's
    steps: Steps = ()  # thresholds of its column


Steps = Sequence[tuple[float, str]]
"""Thresholds: from this value on, this colour.

Below the first: green where the first is red or orange, else red.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One panel.

    ``unit``: an id of Grafana's units. ``width`` in 24ths of the page, ``height`` in rows of 38 pixels.
    ``no_value``: the text where there is no value. ``steps``: thresholds, drawn as lines and as the colour of a number.
    ``colours``: by a series' name. ``labels``: the label columns of a table, with their titles.
    ``to_requests``: a point's menu leads to the requests of the displayed time.
    """

    kind: PanelType
    title: str
    description: str
    unit: str = "short"
    queries: tuple[PanelQuery, ...] = ()
    width: int = 8
    height: int = 8
    steps: Steps = ()
    no_value: str = NOT_EXPORTED
    low: float | None = None
    high: float | None = None
    stacked: bool = False
    bars: bool = False
    log: bool = False
    decimals: int | None = None
    colours: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    sort: str = ""  # a column; descending with a - before it
    legend_right: bool = False
    names: bool = False  # for a stat: the text beside the number names what it measures
    text: str = ""
    to_requests: bool = False


@dataclass(frozen=True, slots=True)
class PanelRow:
    """Panels under a heading.

    They fill lines from left to right. Each line is as high as its highest panel.
    """

    title: str
    panels: tuple[Panel, ...]
    collapsed: bool = False


@dataclass(frozen=True, slots=True)
class Board:
    """One dashboard; ``file`` is its name without ``.json``."""

    file: str
    title: str
    description: str
    rows: tuple[PanelRow, ...]


def stat(
    title: str, description: str, unit: str, expr: str, *, once: bool = False, width: int = 4, legend: str = "", **more: object
) -> Panel:
    """Build a panel of one number.

    Its history is drawn behind it unless the number is of the whole range. ``legend``: shown beside it.
    """
    return Panel(
        kind=PanelType.STAT,
        title=title,
        description=description,
        unit=unit,
        queries=(PanelQuery(expr, legend, once=once),),
        names=bool(legend),
        width=width,
        height=4,
        **more,  # type: ignore[arg-type]
    )


def series(title: str, description: str, unit: str, *queries: PanelQuery, **more: object) -> Panel:
    """Build a panel of lines over time."""
    return Panel(kind=PanelType.SERIES, title=title, description=description, unit=unit, queries=queries, **more)  # type: ignore[arg-type]


def bars(title: str, description: str, unit: str, *queries: PanelQuery, **more: object) -> Panel:
    """Build a panel of one bar a series, over the whole range."""
    return Panel(kind=PanelType.BARS, title=title, description=description, unit=unit, queries=queries, **more)  # type: ignore[arg-type]


def table(title: str, description: str, labels: Mapping[str, str], *columns: PanelQuery, **more: object) -> Panel:
    """Build a table with a row for each set of ``labels``."""
    panel_queries = tuple(PanelQuery(c.expr, c.legend, once=True, unit=c.unit, steps=c.steps) for c in columns)
    return Panel(kind=PanelType.TABLE, title=title, description=description, queries=panel_queries, labels=labels, **more)  # type: ignore[arg-type]


def text(title: str, description: str, body: str, **more: object) -> Panel:
    """Build a panel of Markdown."""
    return Panel(kind=PanelType.TEXT, title=title, description=description, text=body, **more)  # type: ignore[arg-type]
