"""The catalogue of the collector's metrics, and its part of docs/metrics.md.

``pytest --update`` rewrites the list in the page.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from handrail.metrics.catalogue import CatalogueMetric
from handrail_collector.metrics.registry import collector_metrics
from harness.alert_tools import needs_promtool
from harness.metric_names import naming_problems

PAGE = Path(__file__).parents[3] / "docs" / "metrics.md"
BEGIN, END = "<!-- collector -->\n", "<!-- /collector -->"
METRICS = collector_metrics()


def table(metrics: Sequence[CatalogueMetric]) -> str:
    lines = ["| metric | type | labels | unit | what it is | at start |", "|---|---|---|---|---|---|"]
    for metric in metrics:
        labels = ", ".join(metric.labels) or "–"
        text = metric.help.replace("|", "\\|")
        lines.append(
            f"| `{metric.name}` | {metric.type} | {labels} | {metric.unit or '–'} | {text} | {'yes' if metric.born else '–'} |"
        )
    return "\n".join(lines) + "\n"


def test_the_page_has_every_metric(request: pytest.FixtureRequest) -> None:
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    kept, _, after = rest.partition(END)
    if request.config.getoption("--update"):
        PAGE.write_text(before + BEGIN + table(METRICS) + END + after, encoding="utf-8")
        return
    assert kept == table(METRICS), "docs/metrics.md differs from the rows: run this test with --update"


def test_names_and_labels_are_as_prometheus_wants_them() -> None:
    assert [problem for metric in METRICS for problem in naming_problems(metric)] == []


def test_no_name_twice_and_what_counts_failures_is_there_from_the_start() -> None:
    metrics = {metric.name: metric for metric in METRICS}
    assert len(metrics) == len(METRICS)
    for name in ("findings", "stalls", "joined_requests", "counted_requests", "collector_faults", "collector_publish_failures"):
        assert metrics[f"handrail_{name}_total"].born, name
    assert not metrics["handrail_trace_coverage_ratio"].born
    assert not metrics["handrail_link_slow"].born


@needs_promtool
def test_promtool_accepts_every_name_and_help() -> None:
    sample = {"counter": "{0} 0\n", "gauge": "{0} 0\n", "histogram": '{0}_bucket{{le="+Inf"}} 0\n{0}_sum 0\n{0}_count 0\n'}
    page = "".join(f"# HELP {m.name} {m.help}\n# TYPE {m.name} {m.type}\n{sample[m.type].format(m.name)}" for m in METRICS)
    done = subprocess.run(["promtool", "check", "metrics"], input=page.encode(), capture_output=True, timeout=300)
    assert done.returncode == 0, (done.stdout + done.stderr).decode()
