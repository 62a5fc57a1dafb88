"""Rules whose selectors match nothing are found before a night in which they should have fired (case H15)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from handrail_alerts.groups import files
from handrail_alerts.matched import selectors, unmatched
from handrail_alerts.promql import metrics
from handrail_alerts.slo import load

SLO = load()


@pytest.mark.parametrize(
    ("expr", "found"),
    [
        ('rate(handrail_x_total{a="}",b=~"\\"}|c"}[5m])', ['handrail_x_total{a="}",b=~"\\"}|c"}']),
        ('label_replace(up, "lost", "handrail_x_total", "", "") unless handrail_y', ["up", "handrail_y"]),
        ("handrail:slo_errors:ratio_rate1h > 1", []),
    ],
)
def test_selectors_are_found_whole(expr: str, found: list[str]) -> None:
    assert list(selectors(expr)) == found


def test_selectors_are_those_that_the_parser_finds() -> None:
    for groups in files(SLO).values():
        for rule in (rule for group in groups for rule in group.rules):
            named = {selector.partition("{")[0] for selector in selectors(rule.expr)}
            assert named == {name for name in metrics(rule.expr) if ":" not in name}


def test_H15_a_selector_of_another_job_matches_nothing_and_is_listed_with_its_alerts() -> None:
    asked: list[str] = []

    def has_result(query: str) -> bool:
        asked.append(query)
        return 'job="kubernetes-pods"' in query

    wrong = replace(SLO, prometheus=replace(SLO.prometheus, selector='job="pd-sidecar"'))
    found = unmatched(wrong, has_result)
    assert len(found) == len(asked) == len(set(asked)), "each selector is asked of once"
    assert {"KvFetchFailed", "HandrailAbsent", "EngineHung"} <= {reader for each in found for reader in each.readers}
    right = replace(SLO, prometheus=replace(SLO.prometheus, selector='job="kubernetes-pods"'))
    assert unmatched(right, has_result) == ()


def test_what_matches_nothing_is_listed_alone() -> None:
    found = unmatched(SLO, lambda query: "handrail_gpu_lost" not in query)
    assert [(each.selector, each.readers) for each in found] == [("handrail_gpu_lost", ("GpuLost",))]
