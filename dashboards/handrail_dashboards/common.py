"""The parts that every board has around its panels: variables, annotations, links.

No uid of a data source, of a dashboard or of anything else is written out: a variable stands for each, so that a file works
wherever it is imported, provisioned or mounted (case H04).
"""

from __future__ import annotations

from typing import Final
from urllib.parse import quote

from grafana_foundation_sdk.builders import dashboard as build
from grafana_foundation_sdk.models import dashboard as model

from handrail_dashboards.query import own, rate, role

TAG: Final = "handrail"
DATASOURCE: Final = "datasource"
ALL: Final = ".*"
HANDRAIL_URL: Final = "http://127.0.0.1:4380"
JAEGER_URL: Final = "http://127.0.0.1:16686"
SINCE_UNTIL: Final = "since=${__from:date:iso}&until=${__to:date:iso}"


def source() -> model.DataSourceRef:
    """Return a reference to the Prometheus that the user has chosen."""
    return model.DataSourceRef(type_val="prometheus", uid=f"${{{DATASOURCE}}}")


def variables() -> list[build.QueryVariable | build.DatasourceVariable | build.TextBoxVariable]:
    """Build the variables in the order in which Grafana shows them.

    Variables that only links need are hidden.
    """
    return [
        build.DatasourceVariable(DATASOURCE).label("Prometheus").type("prometheus"),
        _queries("cluster", "Cluster", "label_values(handrail_sidecar_info, cluster)"),
        _queries("model", "Model", 'label_values(handrail_requests_total{cluster=~"$cluster"}, model_name)'),
        _queries("role", "Role", 'label_values(handrail_sidecar_info{cluster=~"$cluster"}, role)'),
        _queries("instance", "Sidecar", 'label_values(handrail_sidecar_info{cluster=~"$cluster", role=~"$role"}, instance)'),
        build.DatasourceVariable("tempo").label("Tempo").type("tempo").hide(model.VariableHide.HIDE_VARIABLE),
        _address("jaeger", "Jaeger", JAEGER_URL),
        _address("handrail", "Handrail's collector", HANDRAIL_URL),
    ]


def _queries(name: str, label: str, query: str) -> build.QueryVariable:
    return (
        build.QueryVariable(name)
        .label(label)
        .datasource(source())
        .query(query)
        .multi(True)
        .include_all(True)
        .all_value(ALL)
        .current(model.VariableOption(text="All", value="$__all"))
        .refresh(model.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(model.VariableSort.ALPHABETICAL_ASC)
    )


def _address(name: str, label: str, url: str) -> build.TextBoxVariable:
    return (
        build.TextBoxVariable(name)
        .label(label)
        .default_value(url)
        .current(model.VariableOption(text=url, value=url))
        .hide(model.VariableHide.HIDE_VARIABLE)
    )


ANNOTATIONS: Final = (
    (
        "Engine restarted",
        "red",
        f"max by (cluster, instance) ({rate(own('handrail_engine_restarts_total'))}) > 0",
        "engine restarted",
        "{{instance}}",
    ),
    (
        "Deployed",
        "blue",
        f"max by (cluster, instance, role, version) ({role('handrail_sidecar_info')}) "
        f"unless max by (cluster, instance, role, version) ({role('handrail_sidecar_info')[:-1]}}} offset 5m)",
        "new: a process that was not there 5 minutes before",
        "{{role}} {{instance}}, sidecar {{version}}",
    ),
)
"""Name, colour, query, title and text of each annotation.

Annotations show on every panel what changed.
"""


def changes() -> list[build.AnnotationQuery]:
    return [
        build.AnnotationQuery().name(name).datasource(source()).enable(True).hide(False).icon_color(colour).expr(expr)
        for name, colour, expr, _, _ in ANNOTATIONS
    ]


def board_links() -> list[build.DashboardLink]:
    """Build the links to the other boards and to the traces.

    Board links keep the same choices; the trace link keeps the time range.
    """
    return [
        build.DashboardLink("Handrail")
        .type(model.DashboardLinkType.DASHBOARDS)
        .tags([TAG])
        .as_dropdown(True)
        .include_vars(True)
        .keep_time(True),
        _outside("Slowest requests", REQUESTS, "Handrail's collector: the slowest requests of this time"),
        _outside("Tempo", TEMPO, "Tempo: requests of this time that took more than a second"),
        _outside("Jaeger", JAEGER, "Jaeger: traces of this time"),
    ]


def _outside(title: str, url: str, tooltip: str) -> build.DashboardLink:
    return (
        build.DashboardLink(title)
        .type(model.DashboardLinkType.LINK)
        .url(url)
        .tooltip(tooltip)
        .icon("external link")
        .target_blank(True)
        .include_vars(False)
        .keep_time(False)
    )


REQUESTS: Final = f"${{handrail}}/api/v1/requests?{SINCE_UNTIL}&sort=ttft&descending=true"
JAEGER: Final = "${jaeger}/search?start=${__from}000&end=${__to}000&lookback=custom&minDuration=1s"
_QUERY: Final = '{ name = "handrail.request" && duration > 1s }'
_PANES: Final = (
    '{"t":{"datasource":"${tempo}","queries":[{"refId":"A","datasource":{"type":"tempo","uid":"${tempo}"},"queryType":"traceql","query":'
    + '"'
    + _QUERY.replace('"', '\\"')
    + '"}],"range":{"from":"${__from}","to":"${__to}"}}}'
)
TEMPO: Final = "/explore?schemaVersion=1&panes=" + quote(_PANES, safe="${}:,[]_")
