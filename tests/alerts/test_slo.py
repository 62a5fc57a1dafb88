"""The file of objectives: what it means, and its error messages."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import promql_parser
import pytest
from hypothesis import given
from hypothesis import strategies as st

from handrail.config.schema import ConfigError, default_text, keys
from handrail.config.types import Duration
from handrail.metrics.histogram import LATENCY_SECONDS
from handrail_alerts.bucket_bounds import moved, nearest_bound
from handrail_alerts.burn import groups, matchers_of
from handrail_alerts.burn_windows import BURNS, unreachable_target
from handrail_alerts.context import Context
from handrail_alerts.groups import alerts, files
from handrail_alerts.limits import AlertLimits
from handrail_alerts.objective import ServiceObjective
from handrail_alerts.selector_check import selectors
from handrail_alerts.slo import DEFAULT, Prometheus, SloFile, load, read

ONE = "{signal: ttft, role: edge, threshold: 2s, target_percent: 99}"


def slo_of(*objectives: str, top: str = "") -> SloFile:
    return read(f"{top}\nobjectives:\n" + "".join(f"  - {each}\n" for each in objectives), "slo.yaml")


def problems_of(*objectives: str, top: str = "") -> str:
    with pytest.raises(ConfigError) as caught:
        slo_of(*objectives, top=top)
    return str(caught.value)


def test_the_file_that_comes_with_handrail_is_valid_and_moves_no_threshold() -> None:
    slo = load()
    assert [objective.name for objective in slo.objectives] == [
        "ttft-edge",
        "stream_gap-edge",
        "stream_gap-decode",
        "success-edge",
        "kv_fetch",
    ]
    assert list(moved(slo)) == []


@pytest.mark.parametrize(
    ("objective", "output"),
    [
        ("{signal: tftt, role: edge, threshold: 2s, target_percent: 99}", "did you mean ttft?"),
        ("{signal: ttft, role: edges, threshold: 2s, target_percent: 99}", "did you mean edge?"),
        ("{signal: ttft, threshold: 2s, target_percent: 99}", "objectives[0].role: must be given"),
        ("{signal: ttft, role: edge, target_percent: 99}", "threshold: must be given for ttft"),
        ("{signal: ttft, role: edge, threshold: 2, target_percent: 99}", "did you mean 2s?"),
        ("{signal: ttft, role: edge, threshold: 2s}", "target_percent: must be given"),
        ("{signal: ttft, role: edge, threshold: 2s, target_percent: 100}", "must be at most 99.999"),
        ("{signal: ttft, role: edge, threshold: 2s, target_percent: 93}", "above 93.06"),
        ("{signal: success, role: edge, threshold: 2s, target_percent: 99}", "has no meaning for success"),
        ("{signal: kv_fetch, role: decode, target_percent: 99}", "must be left out"),
        ("{signal: kv_fetch, target_percent: 99, modles: [a]}", "did you mean models?"),
        ("17", "objectives[0]: must be a mapping"),
    ],
)
def test_mistake_is_reported_with_its_line_and_valid_values(objective: str, output: str) -> None:
    reported_output = problems_of(objective)
    assert output in reported_output
    assert "slo.yaml:3" in reported_output
    assert "valid: " in reported_output


def test_D01_a_threshold_above_the_last_bucket_is_refused() -> None:
    """p99 would be pinned at the last bucket.

    Above it every request is only known to be above it.
    """
    assert "must be at most 100s" in problems_of("{signal: ttft, role: edge, threshold: 101s, target_percent: 99}")


def test_every_mistake_is_reported_at_once() -> None:
    reported_output = problems_of(
        "{signal: tftt, role: edge, threshold: 2s, target_percent: 99}", "17", top="window: 3d\nlimits: {clock_bond: 1s}"
    )
    assert "4 problems" in reported_output
    assert "did you mean clock_bound?" in reported_output


def test_a_list_under_another_name_is_found() -> None:
    with pytest.raises(ConfigError, match="did you mean objectives"):
        read(f"objective:\n  - {ONE}\n", "slo.yaml")


@pytest.mark.parametrize(
    "text", ["", "[1, 2]", "objectives: {a: b}", "objectives: []", "window: [", "objectives:\n- a: &x [*x]\n"]
)
def test_what_is_no_such_file_is_refused_and_not_a_fault(text: str) -> None:
    with pytest.raises(ConfigError):
        read(text, "slo.yaml")


def test_two_promises_of_one_thing_are_refused() -> None:
    assert "objectives[0] already promises ttft of every other model" in problems_of(ONE, ONE)
    named = "{signal: ttft, role: edge, threshold: 3s, target_percent: 99, models: [llama], name: NAME}"
    reported_output = problems_of(ONE, named.replace("NAME", "a"), named.replace("NAME", "b"))
    assert "objectives[1] already promises ttft of llama" in reported_output


def test_an_objective_without_models_is_of_those_that_no_other_names() -> None:
    slo = slo_of(ONE, "{signal: ttft, role: edge, threshold: 5s, target_percent: 99, models: [llama.3, 'q\"x'], name: big}")
    rest, big = (matchers_of(Context(slo), objective) for objective in slo.objectives)
    assert rest == ('role="edge"', r'model_name!~"llama\\.3|q\"x"')
    assert big == ('role="edge"', r'model_name=~"llama\\.3|q\"x"')


def test_the_factors_are_those_of_the_workbook_for_thirty_days() -> None:
    assert [burn.factor(load().window) for burn in BURNS] == pytest.approx([14.4, 6, 1])
    assert unreachable_target(load().window) == pytest.approx(100 * (1 - 1 / 14.4))


@given(st.integers(min_value=10**6, max_value=100 * 10**9))
def test_H13_a_threshold_is_a_bound_of_the_buckets_at_most_5_percent_off(threshold_ns: int) -> None:
    bound = nearest_bound(Duration(threshold_ns))
    assert bound.seconds in LATENCY_SECONDS
    assert abs(bound.seconds * 1e9 / threshold_ns - 1) < 0.0501
    assert bound.moved is (round(bound.seconds * 1e9) != threshold_ns)


@given(st.lists(st.floats(min_value=0, max_value=9), min_size=200, max_size=400))
def test_H13_p99_over_a_bound_is_more_than_one_percent_above_it(values: list[float]) -> None:
    bound, ordered = 5.0, sorted(values)
    share = sum(value > bound for value in values) / len(values)
    p99 = ordered[-(-99 * len(ordered) // 100) - 1]  # the smallest that at least 99 % do not exceed
    assert (p99 > bound) is (share > 0.01)


def test_a_rule_says_which_bound_a_threshold_was_moved_to() -> None:
    slo = slo_of("{signal: ttft, role: edge, threshold: 2100ms, target_percent: 99}")
    assert list(moved(slo)) == ["ttft-edge: threshold 2100ms is judged at 2200ms, the nearest bound of the histogram's buckets"]
    rules = [rule for group in groups(Context(slo)) for rule in group.rules]
    assert 'le="2.2"' in rules[0].expr
    assert "2200ms (the bucket bound nearest to 2100ms)" in "".join(alert.description for alert in alerts(slo))


def test_H15_the_selector_stands_in_every_series_of_every_rule() -> None:
    slo = load()
    slo = replace(slo, prometheus=replace(slo.prometheus, selector='job="pd-sidecar"'))
    for made in files(slo).values():
        for rule in (rule for group in made for rule in group.rules):
            assert all('{job="pd-sidecar"' in selector for selector in selectors(rule.expr)), rule.expr


def test_labels_of_a_fleet_are_in_every_aggregation() -> None:
    slo = load()
    slo = replace(slo, prometheus=replace(slo.prometheus, group_by=("cluster", "namespace")))
    assert "sum by (cluster, namespace, model_name, role)" in "".join(rule.expr for g in groups(Context(slo)) for rule in g.rules)


def test_the_default_is_also_below_alerts() -> None:
    link = DEFAULT.parents[1] / "slo.yaml"
    assert link.resolve() == DEFAULT.resolve()


def test_every_key_and_limit_with_its_default_is_on_the_page() -> None:
    page = (Path(__file__).parents[2] / "docs/alerts.md").read_text("utf-8")
    for key in keys(AlertLimits):
        default = default_text(key).removesuffix(".0")
        assert f"| `{key.path}` | {default} |" in page
    for key in keys(Prometheus):
        assert f"| `prometheus.{key.path}` |" in page
    for key in keys(ServiceObjective):
        assert f"| `{key.path}` |" in page


@pytest.mark.parametrize(
    ("prometheus", "output"),
    [
        ("selector: job=handrail", "prometheus.selector"),
        ("selector: job=handrail", "(slo.yaml:1)"),
        ("selector: '{job=\"x\"}'", "without braces"),
        ("selector: 'job='", "prometheus.selector"),
        ("selector: 'model=~\"a(b\"'", "no valid regular expression (RE2): missing ): a(b"),
        ("selector: 'model=~\"a(?=b)\"'", "invalid perl operator: (?="),
        ("selector: 'model=~\"a\\.b\"'", "has the escape \\., which PromQL does not know"),
        ("group_by: [pod-name]", "letters, digits and _"),
        ("group_by: [cluster, role]", "prometheus.group_by"),
        ("scrape_interval: 10m", "prometheus.scrape_interval"),
    ],
)
def test_what_prometheus_would_refuse_or_not_see_is_a_problem_of_the_file(prometheus: str, output: str) -> None:
    assert output in problems_of(ONE, top=f"prometheus: {{{prometheus}}}")


@pytest.mark.parametrize(
    "selector",
    ['job="handrail"', """job=~'a|b', env!="x" """, 'job="a\\"b"', "job=`a`", ""],
    ids=["one", "two", "escaped", "raw", "none"],
)
def test_matchers_as_promql_writes_them_are_taken(selector: str) -> None:
    slo = replace(load(), prometheus=Prometheus(selector=selector))
    assert list(slo.prometheus.problems()) == []
    for alert in alerts(slo):
        promql_parser.parse(alert.expr)


def test_a_name_that_templates_would_read_is_a_problem() -> None:
    assert "objectives[0].name" in problems_of("{signal: ttft, role: edge, threshold: 2s, target_percent: 99, name: 'a b{{'}")
