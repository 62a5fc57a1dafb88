"""The lint of queries: each rule finds what it is for, and the boards break none."""

from __future__ import annotations

import json

import pytest

from handrail_dashboards.export import Choices, dashboards
from handrail_dashboards.lint import Known, Rule, lint
from known_metrics import known

SOME = {
    "x_seconds": Known("histogram", frozenset({"pod", "role"})),
    "vllm_time_per_output_token_seconds": Known("histogram", frozenset({"pod"})),
    "fetches_total": Known("counter", frozenset({"outcome"})),
    "cache_usage_perc": Known("gauge", frozenset({"pod"})),
    "queue": Known("gauge", frozenset({"pod", "role"})),
    "info": Known("gauge", frozenset({"role", "version"})),
}
ASKED = [
    (f"{name}: {panel['title']} {target['refId']}", target["expr"], bool(target.get("instant")))
    for name, text in dashboards(Choices()).items()
    for panel in json.loads(text)["panels"]
    for target in panel.get("targets", ())
]
ANNOTATED = {
    annotation["expr"] for text in dashboards(Choices()).values() for annotation in json.loads(text)["annotations"]["list"]
}


@pytest.mark.parametrize(("where", "expr", "once"), ASKED, ids=[where for where, _, _ in ASKED])
def test_a_query_of_a_board_breaks_no_rule(where: str, expr: str, once: bool) -> None:
    assert [str(problem) for problem in lint(expr, known(), once=once)] == [], expr


@pytest.mark.parametrize("expr", sorted(ANNOTATED))
def test_an_annotation_breaks_no_rule(expr: str) -> None:
    assert [str(problem) for problem in lint(expr, known())] == []


@pytest.mark.parametrize(
    ("expr", "rule"),
    [
        ("sum(rate(fetches_total[$__rate_interval])", Rule.SYNTAX),
        ("rate(fetches_total)", Rule.SYNTAX),
        ("histogram_quantile(0.9, rate(x_seconds_bucket[$__rate_interval]))", Rule.BY_LE),
        ("histogram_quantile(0.9, max by (le) (rate(x_seconds_bucket[$__rate_interval])))", Rule.BY_LE),
        ("fetches_total", Rule.COUNTER),
        ("sum by (outcome) (fetches_total) > 0", Rule.COUNTER),
        ("max_over_time(fetches_total[$__rate_interval])", Rule.COUNTER),
        ("x_seconds_count", Rule.COUNTER),
        ("rate(queue[$__rate_interval])", Rule.GAUGE),
        ("increase(queue[$__rate_interval])", Rule.GAUGE),
        ("rate(fetches_total[5m])", Rule.WINDOW),
        ("rate(fetches_total[$__range])", Rule.WINDOW),
        ("increase(fetches_total[$__range])", Rule.WINDOW),
        ("avg_over_time(queue[30s])", Rule.WINDOW),
        ("max_over_time(rate(fetches_total[$__rate_interval])[5m:1m])", Rule.WINDOW),
        ("rate(failures_total[$__rate_interval])", Rule.NAME),
        ("x_seconds", Rule.NAME),
        ('{__name__="queue"}', Rule.NAME),
        ('queue{pool="a"}', Rule.LABEL),
        ("sum by (pool) (queue)", Rule.LABEL),
        ("queue * on (pool) info", Rule.LABEL),
        ("queue * on (instance) group_left (pool) info", Rule.LABEL),
        ('queue{job="vllm"}', Rule.JOB),
        ("sum by (pod) (queue) / sum by (role) (queue)", Rule.MATCHING),
        ("queue / info", Rule.MATCHING),
    ],
)
def test_a_broken_rule_is_found(expr: str, rule: Rule) -> None:
    assert rule in [problem.rule for problem in lint(expr, SOME)], lint(expr, SOME)


@pytest.mark.parametrize(
    ("expr", "once"),
    [
        ("histogram_quantile(0.9, sum by (le, role) (rate(x_seconds_bucket[$__rate_interval]))) >= 0", False),
        (
            'histogram_quantile(0.9, sum by (le) (rate(x_seconds_bucket{role="a"}[$__rate_interval]))'
            " or sum by (le) (rate(x_seconds_bucket[$__rate_interval])))",
            False,
        ),
        ("rate(x_seconds_sum[$__rate_interval]) / rate(x_seconds_count[$__rate_interval])", False),
        ("increase(fetches_total[$__range])", True),
        ("sum by (version) (queue * on (instance, role) group_left (version) info)", False),
        ("avg(cache_usage_perc)", False),
        ("sum(queue) / (sum(info) > 0)", False),
        ("topk(3, queue) or vector(0)", False),
        ("resets(fetches_total[$__rate_interval])", False),
    ],
)
def test_a_sound_query_is_left_alone(expr: str, once: bool) -> None:
    assert lint(expr, SOME, once=once) == ()


@pytest.mark.parametrize(
    ("expr", "rule"),
    [
        ("histogram_quantile(0.99, sum(rate(vllm_time_per_output_token_seconds_bucket[5m])))", Rule.BY_LE),
        ("avg(histogram_quantile(0.99, rate(x_seconds_bucket[5m])))", Rule.MEAN_OF_QUANTILES),
        ("histogram_quantile(0.99, sum by (pod) (rate(x_seconds_bucket[5m])))", Rule.BY_LE),
    ],
)
def test_H03_quantiles_as_they_were_published_are_found(expr: str, rule: Rule) -> None:
    assert rule in [problem.rule for problem in lint(expr, SOME)]


@pytest.mark.parametrize("function", ["rate", "increase", "irate"])
def test_H06_the_step_is_no_window(function: str) -> None:
    (problem,) = lint(f"{function}(fetches_total[$__interval])", SOME)
    assert problem.rule is Rule.WINDOW
    assert "$__rate_interval" in problem.what


@pytest.mark.parametrize("expr", ["sum(cache_usage_perc)", "sum by (pod) (cache_usage_perc)", "sum(cache_usage_perc * 100)"])
def test_D19_two_pods_at_40_percent_are_not_80(expr: str) -> None:
    assert [problem.rule for problem in lint(expr, SOME)] == [Rule.SUM_OF_SHARES]
