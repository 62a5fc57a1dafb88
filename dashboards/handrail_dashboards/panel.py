"""A panel as the boards describe it, before it is Grafana's.

Only kinds whose components Grafana publishes are there, so that every panel is rendered in a test: time series, stat, bar gauge,
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
"""Where no series is: what it means is not 0. The description says who would export it."""


class PanelType(str, Enum):
    """Grafana's panel types."""

    SERIES = "timeseries"
    STAT = "stat"
    BARS = "bargauge"
    TABLE = "table"
    TEXT = "text"


@dataclass(frozen=True, slots=True)
class PanelQuery:
    """One query. ``legend``: in Grafana's ``{{label}}`` form; in a table, the column. ``once``: asked for the end only."""

    expr: str
    legend: str = ""
    exemplars: bool = False
    once: bool = False
    unit: str = ""  # of its column, where it is not the panel's
    steps: Steps = ()  # of its column


Steps = Sequence[tuple[float, str]]
"""Thresholds: from this value on, this colour. Below the first: green where the first is red or orange, else red."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """``unit``: an id of Grafana's units. ``width`` in 24ths of the page, ``height`` in rows of 38 pixels.

    ``no_value``: what stands for nothing. ``steps``: thresholds, drawn as lines and as the colour of a number. ``colours``: by a
    series' name. ``labels``: a table's columns that are labels, and their titles. ``to_requests``: a point's menu leads to the
    requests of the time that is looked at.
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
    sort: str = ""  # a column; from the highest down with a - before it
    legend_right: bool = False
    names: bool = False  # of a stat: what the number is of stands beside it
    text: str = ""
    to_requests: bool = False


@dataclass(frozen=True, slots=True)
class PanelRow:
    """Panels under a heading. They fill lines from left to right, each as high as its highest."""

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
    """One number, with what it was before behind it unless it is of the whole range. ``legend``: shown beside it."""
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
    """Lines over time."""
    return Panel(kind=PanelType.SERIES, title=title, description=description, unit=unit, queries=queries, **more)  # type: ignore[arg-type]


def bars(title: str, description: str, unit: str, *queries: PanelQuery, **more: object) -> Panel:
    """One bar a series, of the whole range."""
    return Panel(kind=PanelType.BARS, title=title, description=description, unit=unit, queries=queries, **more)  # type: ignore[arg-type]


def table(title: str, description: str, labels: Mapping[str, str], *columns: PanelQuery, **more: object) -> Panel:
    """A row for each set of ``labels``."""
    panel_queries = tuple(PanelQuery(c.expr, c.legend, once=True, unit=c.unit, steps=c.steps) for c in columns)
    return Panel(kind=PanelType.TABLE, title=title, description=description, queries=panel_queries, labels=labels, **more)  # type: ignore[arg-type]


def text(title: str, description: str, body: str, **more: object) -> Panel:
    """Markdown."""
    return Panel(kind=PanelType.TEXT, title=title, description=description, text=body, **more)  # type: ignore[arg-type]
