"""Build Grafana's JSON of the boards with ``grafana-foundation-sdk``.

The types are those of Grafana 11.6.
"""

from __future__ import annotations

import json
from typing import Any, Final

from grafana_foundation_sdk.builders import bargauge, prometheus, stat, table, timeseries
from grafana_foundation_sdk.builders import common as common_build
from grafana_foundation_sdk.builders import dashboard as build
from grafana_foundation_sdk.builders import text as text_build
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common
from grafana_foundation_sdk.models import dashboard as model
from grafana_foundation_sdk.models import prometheus as prometheus_model
from grafana_foundation_sdk.models import text as text_model

from handrail_dashboards.common import ANNOTATIONS, REQUESTS, TAG, board_links, changes, source, variables
from handrail_dashboards.layout import GridPosition, places
from handrail_dashboards.panel import GREEN, GREY, RED, Board, Panel, PanelQuery, PanelRow, PanelType, Steps

LIMIT: Final = "limit of the SLO"
_NARROW: Final = 60
_WIDE: Final = 140
_WIDE_LABELS: Final = frozenset({"instance", "peer", "source", "target", "phase"})
_LETTERS: Final = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def board_json(board: Board) -> str:
    """Return a board's file: keys sorted, two spaces, one newline at the end."""
    builder = (
        build.Dashboard(board.title)
        .description(board.description)
        .tags([TAG])
        .editable()
        .tooltip(model.DashboardCursorSync.CROSSHAIR)
        .time("now-1h", "now")
        .timezone("browser")
        .refresh("30s")
        .variables(list(variables()))
        .annotations(list(changes()))
        .links(list(board_links()))
    )
    for number, (item, place) in enumerate(places(board.rows), 1):
        if isinstance(item, PanelRow):
            builder.with_row(build.Row(item.title).id(number).grid_pos(_grid(place)))
        else:
            builder.with_panel(_panel(item, number, place))
    made = json.loads(JSONEncoder(sort_keys=True).encode(builder.build()))
    return json.dumps(_repaired(made), indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def _repaired(made: dict[str, Any]) -> dict[str, Any]:
    """Add what the SDK's types lack, and remove defaults that are not meant.

    The removed defaults are those of other kinds of variables and of footers.
    Newer Grafanas read an annotation's query from ``target``, older ones from ``expr``.
    """
    for annotation, (_, _, expr, title, text) in zip(made["annotations"]["list"], ANNOTATIONS, strict=True):
        annotation.update(titleFormat=title, textFormat=text, step="30s")
        annotation["target"] = {"expr": expr, "refId": "Anno", "interval": "30s"}
    for variable in made["templating"]["list"]:
        for default in ("auto", "auto_count", "auto_min"):
            variable.pop(default, None)
    for panel in made["panels"]:
        panel.get("options", {}).pop("footer", None)
    return made


def _grid(place: GridPosition) -> model.GridPos:
    return model.GridPos(x=place.x, y=place.y, w=place.w, h=place.h)


def _panel(panel: Panel, number: int, place: GridPosition) -> Any:
    made = _MAKE[panel.kind](panel)
    made.id(number).title(panel.title).description(panel.description).grid_pos(_grid(place))
    if isinstance(made, text_build.Panel):
        return made
    made.datasource(source()).unit(panel.unit).no_value(panel.no_value)
    if panel.low is not None:
        made.min(panel.low)
    if panel.high is not None:
        made.max(panel.high)
    if panel.decimals is not None:
        made.decimals(panel.decimals)
    made.thresholds(_thresholds(panel.steps))
    if panel.kind is PanelType.STAT:
        made.mappings([_nothing(panel.no_value)])
    for letter, query in zip(_LETTERS, panel.queries, strict=False):
        made.with_target(_target(query, letter, panel.kind))
    for name, colour in panel.colours.items():
        made.override_by_name(name, [_fixed(colour)])
    return made


def _nothing(words: str) -> model.SpecialValueMap:
    """Show unknown values in grey.

    An unknown value is neither good nor bad, so it must not have the colour of the lowest threshold.
    """
    result = model.ValueMappingResult(text=words, color=GREY, index=0)
    return model.SpecialValueMap(
        options=model.DashboardSpecialValueMapOptions(match=model.SpecialValueMatch.NULL_AND_NAN, result=result)
    )


def _target(query: PanelQuery, letter: str, kind: PanelType) -> prometheus.Dataquery:
    made = (
        prometheus.Dataquery()
        .expr(query.expr)
        .ref_id(letter)
        .datasource(source())
        .editor_mode(prometheus_model.QueryEditorMode.CODE)
    )
    made.format(
        prometheus_model.PromQueryFormat.TABLE if kind is PanelType.TABLE else prometheus_model.PromQueryFormat.TIME_SERIES
    )
    if query.once or kind is PanelType.BARS:
        made.instant()
    else:
        made.range()
    if query.exemplars:
        made.exemplar(True)
    if query.legend and kind is not PanelType.TABLE:
        made.legend_format(query.legend)
    return made


def _thresholds(steps: Steps) -> build.ThresholdsConfig:
    """Build thresholds; the first step is the colour of values below the second."""
    first = steps[0][1] if steps else GREEN
    found = [model.Threshold(value=None, color=first), *(model.Threshold(value=at, color=colour) for at, colour in steps[1:])]
    return build.ThresholdsConfig().mode(model.ThresholdsMode.ABSOLUTE).steps(found)


def _fixed(colour: str) -> model.DynamicConfigValue:
    return model.DynamicConfigValue(id_val="color", value={"mode": "fixed", "fixedColor": colour})


def _series(panel: Panel) -> timeseries.Panel:
    made = (
        timeseries.Panel()
        .line_width(1)
        .fill_opacity(30 if panel.stacked else 0)
        .show_points(common.VisibilityMode.AUTO)
        .color_scheme(build.FieldColor().mode(model.FieldColorModeId.PALETTE_CLASSIC))
        .legend(
            common_build.VizLegendOptions()
            .display_mode(common.LegendDisplayMode.LIST)
            .placement(common.LegendPlacement.RIGHT if panel.legend_right else common.LegendPlacement.BOTTOM)
            .show_legend(True)
            .calcs([])
        )
        .tooltip(common_build.VizTooltipOptions().mode(common.TooltipDisplayMode.MULTI).sort(common.SortOrder.DESCENDING))
    )
    if panel.stacked:
        made.stacking(common_build.StackingConfig().mode(common.StackingMode.NORMAL).group("A"))
    if panel.bars:
        made.draw_style(common.GraphDrawStyle.BARS).fill_opacity(80).line_width(0)
    if panel.log:
        made.scale_distribution(common_build.ScaleDistributionConfig().type(common.ScaleDistribution.LOG).log(10))
    if panel.steps:
        made.thresholds_style(common_build.GraphThresholdsStyleConfig().mode(common.GraphThresholdsStyleMode.DASHED))
    if any(query.legend == LIMIT for query in panel.queries):
        dashed = model.DynamicConfigValue(id_val="custom.lineStyle", value={"fill": "dash", "dash": [10, 10]})
        made.override_by_name(LIMIT, [_fixed(RED), dashed])
    if panel.to_requests:
        made.data_links([_to_requests()])
    return made


def _to_requests() -> build.DashboardLink:
    return build.DashboardLink("Slowest requests of this time (Handrail)").url(REQUESTS).target_blank(True)


def _reduced() -> common_build.ReduceDataOptions:
    return common_build.ReduceDataOptions().calcs(["lastNotNull"]).values(False)


def _stat(panel: Panel) -> stat.Panel:
    whole_range = all(query.once for query in panel.queries)
    return (
        stat.Panel()
        .reduce_options(_reduced())
        .color_mode(common.BigValueColorMode.BACKGROUND_SOLID if panel.steps else common.BigValueColorMode.VALUE)
        .graph_mode(common.BigValueGraphMode.NONE if whole_range else common.BigValueGraphMode.AREA)
        .text_mode(common.BigValueTextMode.VALUE_AND_NAME if panel.names else common.BigValueTextMode.AUTO)
        .justify_mode(common.BigValueJustifyMode.AUTO)
        .orientation(common.VizOrientation.AUTO)
    )


def _bars(panel: Panel) -> bargauge.Panel:
    return (
        bargauge.Panel()
        .reduce_options(_reduced())
        .orientation(common.VizOrientation.HORIZONTAL)
        .display_mode(common.BarGaugeDisplayMode.BASIC)
        .show_unfilled(True)
        .value_mode(common.BarGaugeValueMode.COLOR)
    )


def _table(panel: Panel) -> table.Panel:
    values = {f"Value #{letter}": query.legend for letter, query in zip(_LETTERS, panel.queries, strict=False)}
    if len(panel.queries) == 1:
        values = {"Value": panel.queries[0].legend}
    order = {name: place for place, name in enumerate((*panel.labels, *values))}
    made = (
        table.Panel()
        .show_header(True)
        .cell_height(common.TableCellHeight.SM)
        .min_width(_NARROW)
        .with_transformation(model.DataTransformerConfig(id_val="merge", options={}))
        .with_transformation(
            model.DataTransformerConfig(
                id_val="organize",
                options={"excludeByName": {"Time": True}, "indexByName": order, "renameByName": {**panel.labels, **values}},
            )
        )
    )
    if panel.sort:
        name = panel.sort.removeprefix("-")
        made.sort_by([common_build.TableSortByFieldState().display_name(name).desc(panel.sort.startswith("-"))])
    for label, title in panel.labels.items():
        if label in _WIDE_LABELS:
            made.override_by_name(title, [model.DynamicConfigValue(id_val="custom.minWidth", value=_WIDE)])
    for query in panel.queries:
        made.override_by_name(query.legend, _column(query))
    return made


def _column(query: PanelQuery) -> list[model.DynamicConfigValue]:
    found = [
        model.DynamicConfigValue(id_val="unit", value=query.unit or "none"),
        model.DynamicConfigValue(id_val="noValue", value="–"),
        model.DynamicConfigValue(id_val="decimals", value=0 if query.unit in ("", "none") else 1),
    ]
    if query.steps:
        first, *rest = query.steps
        steps = [{"value": None, "color": first[1]}, *({"value": at, "color": colour} for at, colour in rest)]
        found += [
            model.DynamicConfigValue(id_val="thresholds", value={"mode": "absolute", "steps": steps}),
            model.DynamicConfigValue(id_val="custom.cellOptions", value={"type": "color-text"}),
        ]
    return found


def _text(panel: Panel) -> text_build.Panel:
    return text_build.Panel().mode(text_model.TextMode.MARKDOWN).content(panel.text)


_MAKE: Final = {
    PanelType.SERIES: _series,
    PanelType.STAT: _stat,
    PanelType.BARS: _bars,
    PanelType.TABLE: _table,
    PanelType.TEXT: _text,
}
