"""Every expression of every rule reads existing metrics and labels.

The linter and the catalogue of metrics say which exist.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from handrail.config.types import Duration
from handrail.durations import parse_duration_ns
from handrail_alerts.alert import Alert, Recording
from handrail_alerts.groups import files
from handrail_alerts.promql import PromMetric, Type, metrics, problems
from handrail_alerts.slo import load
from handrail_collector.metrics.registry import collector_metrics
from handrail_sidecar.catalogue import sidecar_metrics

SLO = load()
RULES = [rule for groups in files(SLO).values() for group in groups for rule in group.rules]
KNOWN = {each.name: PromMetric(Type(each.type), frozenset(each.labels)) for each in (*sidecar_metrics(), *collector_metrics())}
RECORDED = {
    rule.record: PromMetric(Type.GAUGE, frozenset({"slo", "model_name", "role"})) for rule in RULES if isinstance(rule, Recording)
}


def _id(rule: Alert | Recording) -> str:
    return "-".join((rule.name if isinstance(rule, Alert) else rule.record, *rule.labels.values()))


def test_every_rule_reads_what_exists_and_reads_it_right() -> None:
    known, scrape_s = {**KNOWN, **RECORDED}, SLO.prometheus.scrape_interval.seconds
    assert [(_id(rule), found) for rule in RULES if (found := problems(rule.expr, known, scrape_s=scrape_s))] == []


def test_D08_every_rule_reads_one_schema_and_no_engines_own_names() -> None:
    """A rule reads one schema and never an engine's own names.

    Old and new names of an engine are one series before rules see them. None is counted twice, none is missed.
    """
    names = [(_id(rule), name) for rule in RULES for name in metrics(rule.expr)]
    assert len(names) > len(RULES)
    assert [found for found in names if not found[1].startswith(("handrail_", "handrail:")) and found[1] != "up"] == []


@pytest.mark.parametrize("scrape", ["15s", "30s", "60s", "2m"])
def test_H06_windows_grow_with_the_scrape_interval(scrape: str) -> None:
    interval = Duration(parse_duration_ns(scrape))
    slo = replace(SLO, prometheus=replace(SLO.prometheus, scrape_interval=interval))
    for groups in files(slo).values():
        for rule in (rule for group in groups for rule in group.rules):
            assert problems(rule.expr, {**KNOWN, **RECORDED}, scrape_s=interval.seconds) == ()
