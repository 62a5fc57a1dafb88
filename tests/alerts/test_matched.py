"""Detection of rules whose selectors match nothing (case H15).

They are found before a night in which they should have fired.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from handrail_alerts.groups import files
from handrail_alerts.promql import metrics
from handrail_alerts.selector_check import Read, read_selectors, selectors
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
    lines: list[str] = []

    def has_result(query: str) -> bool:
        lines.append(query)
        return 'job="kubernetes-pods"' in query

    wrong = replace(SLO, prometheus=replace(SLO.prometheus, selector='job="pd-sidecar"'))
    found = [each for each in read_selectors(wrong) if not has_result(each.query)]
    assert len(found) == len(lines) == len(set(lines)), "each selector is asked of once"
    assert {"KvFetchFailed", "HandrailAbsent", "EngineHung"} <= {reader for each in found for reader in each.readers}
    right = replace(SLO, prometheus=replace(SLO.prometheus, selector='job="kubernetes-pods"'))
    assert all(has_result(each.query) for each in read_selectors(right))


def test_a_selector_is_listed_with_who_reads_it() -> None:
    assert Read("handrail_gpu_lost", ("GpuLost",)) in read_selectors(SLO)
