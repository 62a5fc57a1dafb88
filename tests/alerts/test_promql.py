"""The linter of queries.

It finds each way to be silently wrong and accepts what is right.
"""

from __future__ import annotations

import pytest

from handrail_alerts.promql import PromMetric, Type, metrics, problems

KNOWN = {
    "handrail_ttft_seconds": PromMetric(Type.HISTOGRAM, frozenset({"model_name", "role", "scope"})),
    "handrail_kv_fetches_total": PromMetric(Type.COUNTER, frozenset({"outcome", "reason"})),
    "handrail_engine_kv_cache_usage_ratio": PromMetric(Type.GAUGE, frozenset({"engine"})),
    "handrail_sidecar_info": PromMetric(Type.GAUGE, frozenset({"version", "role"})),
}


@pytest.mark.parametrize(
    "expr",
    [
        pytest.param("histogram_quantile(0.99, sum by (le, role) (rate(handrail_ttft_seconds_bucket[5m])))", id="quantile"),
        pytest.param("histogram_quantile(0.99, sum without (instance) (rate(handrail_ttft_seconds_bucket[5m])))", id="without"),
        pytest.param(
            'sum by (role) (rate(handrail_ttft_seconds_bucket{le="2.0"}[5m])) '
            "/ sum by (role) (rate(handrail_ttft_seconds_count[5m]))",
            id="share",
        ),
        pytest.param(
            "increase(handrail_kv_fetches_total[10m]) > 0 "
            "or (handrail_kv_fetches_total unless handrail_kv_fetches_total offset 10m) > 0",
            id="also what is born with it",
        ),
        pytest.param(
            "handrail_engine_kv_cache_usage_ratio * on (instance) group_left (role) handrail_sidecar_info", id="role from info"
        ),
        pytest.param("up == 0 and on (instance) last_over_time(handrail_sidecar_info[1h])", id="existed"),
        pytest.param("handrail_sidecar_info unless on (instance) handrail_kv_fetches_total", id="a counter that is not there"),
        pytest.param('sum by (what) (label_replace(up, "what", "scrape", "", ""))', id="a label made"),
        pytest.param("max(handrail_engine_kv_cache_usage_ratio)", id="the highest share"),
        pytest.param('{__name__=~"handrail_sidecar_info|up"}', id="names listed"),
        pytest.param('absent(handrail_sidecar_info{role="edge"})', id="absent"),
        pytest.param("count by (outcome) (handrail_kv_fetches_total)", id="series counted"),
    ],
)
def test_what_is_right_is_let_through(expr: str) -> None:
    assert problems(expr, KNOWN) == ()


@pytest.mark.parametrize(
    ("expr", "output"),
    [
        ("rate(handrail_ttft_seconds_bucket[5m]", "is no PromQL"),
        ("rate(handrail_kv_fetchs_total[5m])", "did you mean handrail_kv_fetches_total"),
        ("sum by (le) (rate(handrail_ttft_seconds_bucket[5m])) > handrail_ttft_seconds", "is a histogram: its series are"),
        ('increase(handrail_kv_fetches_total{result="failed"}[5m])', "has no label result; it has outcome, reason"),
        ("sum by (model_name) (rate(handrail_kv_fetches_total[5m]))", "sum by (model_name): no such label"),
        ("up * on (instance) group_left (model_name) handrail_sidecar_info", "group_left (model_name): no such label"),
        ("up and on (role) handrail_sidecar_info", "on (role): no such label"),
        ("handrail_kv_fetches_total > 0", "only ever grows"),
        ("up unless (handrail_kv_fetches_total > 5)", "only ever grows"),
        ("rate(sum(handrail_kv_fetches_total)[5m:1m])", "only ever grows"),
        ("rate(handrail_engine_kv_cache_usage_ratio[5m])", "is a gauge"),
        ("sum(handrail_engine_kv_cache_usage_ratio)", "shares do not add up"),
        ("rate(handrail_kv_fetches_total[30s])", "at least 60 s"),
        ("rate(handrail_kv_fetches_total[$__rate_interval])", "variable of Grafana in a rule"),
        ("histogram_quantile(0.9, up)", "of what is no bucket"),
        ('{role="edge"}', "names no metric"),
    ],
)
def test_silently_wrong_query_is_reported(expr: str, output: str) -> None:
    found = problems(expr, KNOWN)
    assert any(output in each for each in found), found


@pytest.mark.parametrize(
    "expr",
    [
        "histogram_quantile(0.99, sum(rate(handrail_ttft_seconds_bucket[5m])))",
        "avg(histogram_quantile(0.99, rate(handrail_ttft_seconds_bucket[5m])))",
        "histogram_quantile(0.99, sum by (pod) (rate(handrail_ttft_seconds_bucket[5m])))",
    ],
)
def test_H03_the_three_published_quantiles_are_flagged(expr: str) -> None:
    assert any("sum by (le" in each for each in problems(expr, KNOWN))


def test_H03_an_average_of_quantiles_is_flagged_even_if_each_is_right() -> None:
    expr = "avg(histogram_quantile(0.99, sum by (le, instance) (rate(handrail_ttft_seconds_bucket[5m]))))"
    assert problems(expr, KNOWN) == ("avg of quantiles is no quantile: sum by (le) the buckets first, then take the quantile",)


@pytest.mark.parametrize(
    ("window", "output"),
    [
        ("$__rate_interval", ""),
        ("${__rate_interval}", ""),
        ("$__range", ""),
        ("$__interval", "use $__rate_interval"),
        ("5m", "a panel's follows the zoom"),
    ],
)
def test_H06_a_panels_window_follows_the_zoom(window: str, output: str) -> None:
    found = problems(f"sum(rate(handrail_kv_fetches_total[{window}]))", KNOWN, grafana=True)
    assert found == () if not output else output in found[0], found


@pytest.mark.parametrize(("scrape_s", "good"), [(15, True), (30, True), (31, False), (60, False)])
def test_H06_a_rules_window_holds_four_scrapes(scrape_s: float, good: bool) -> None:
    assert (problems("rate(handrail_kv_fetches_total[2m])", KNOWN, scrape_s=scrape_s) == ()) is good


def test_H10_published_rules_with_wrong_assumptions_are_flagged() -> None:
    assert any("always true" in each for each in problems("rate(handrail_kv_fetches_total[5m]) >= 0", KNOWN))
    assert any("no metric is called" in each for each in problems("rate(vllm_request_failure_total[5m])", KNOWN))


def test_names_are_those_that_a_query_writes() -> None:
    expr = 'sum(rate(a_bucket[$__rate_interval])) / b_total or {__name__=~"c|d"} unless e offset 5m'
    assert metrics(expr) == {"a_bucket", "b_total", "c", "d", "e"}
    with pytest.raises(ValueError, match="parenthesis"):
        metrics("sum(a")
