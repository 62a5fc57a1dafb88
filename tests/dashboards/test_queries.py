"""Every query of the boards, checked by the PromQL linter of the rules.

Checks that only a panel needs are added.
"""

from __future__ import annotations

import json
from typing import Any

from handrail_alerts.promql import problems
from handrail_dashboards.export import Choices, dashboards
from harness.known_metrics import known

BOARDS: dict[str, dict[str, Any]] = {name: json.loads(text) for name, text in dashboards(Choices()).items()}
QUERIES = [
    (f"{name}: {panel['title']} {target['refId']}", target["expr"], bool(target.get("instant")))
    for name, board in BOARDS.items()
    for panel in board["panels"]
    for target in panel.get("targets", ())
]
ANNOTATED = sorted({annotation["expr"] for board in BOARDS.values() for annotation in board["annotations"]["list"]})


def query_problems(expr: str, once: bool) -> list[str]:
    """Return what is wrong with a panel's query.

    ``once``: Grafana runs it once for the range.
    """
    found = list(problems(expr, known(), grafana=True))
    if "$__range" in expr and not once:
        found.append("a total of the whole range at every step of it: query it once, or use $__rate_interval")
    if "job=" in expr:
        found.append("the name of a scrape's job is the choice of whoever scrapes")
    return found


def test_every_query_is_sound_and_reads_metrics_that_exist() -> None:
    assert len(QUERIES) > 100
    assert [f"{where}: {found}: {expr}" for where, expr, once in QUERIES for found in query_problems(expr, once)] == []


def test_a_total_at_every_step_and_a_job_are_problems() -> None:
    assert query_problems("sum(increase(handrail_requests_total[$__range]))", once=True) == []
    assert len(query_problems('sum(increase(handrail_requests_total{job="a"}[$__range]))', once=False)) == 2


def test_every_annotation_is_sound() -> None:
    assert ANNOTATED
    assert [(expr, found) for expr in ANNOTATED if (found := problems(expr, known(), grafana=True))] == []


def test_variables_ask_for_labels_that_there_are() -> None:
    for board in BOARDS.values():
        for variable in board["templating"]["list"]:
            if variable["type"] == "query":
                selector, label = variable["query"].removeprefix("label_values(").removesuffix(")").rsplit(", ", 1)
                metric = known()[selector.partition("{")[0]]
                assert label in metric.labels | {"cluster", "instance"}, variable["query"]


def test_H03_every_quantile_is_of_buckets_summed_by_le() -> None:
    quantiles = [expr for _, expr, _ in QUERIES if "histogram_quantile" in expr]
    assert len(quantiles) > 20
    assert all("sum by (le" in expr for expr in quantiles)
    assert not any("avg" in expr for expr in quantiles), "a mean of quantiles is no quantile"


def test_H06_every_rate_follows_the_zoom() -> None:
    assert all("$__interval" not in expr for _, expr, _ in QUERIES)
    assert sum("[$__rate_interval]" in expr for _, expr, _ in QUERIES) > 50


def test_D19_shares_of_engines_are_not_added() -> None:
    shares = [expr for _, expr, _ in QUERIES if "kv_cache_usage_ratio" in expr]
    assert shares
    assert all("sum" not in expr for expr in shares)
