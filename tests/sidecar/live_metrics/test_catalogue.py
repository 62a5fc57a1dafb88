"""Every metric as data, and docs/metrics.md, which lists them.

``pytest --update`` rewrites the list.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_open_metrics
from prometheus_client.parser import text_string_to_metric_families

from handrail.kv_outcomes import FetchOutcome
from handrail.metrics.catalogue import CatalogueMetric
from handrail.metrics.registry import Registry
from handrail.records import Outcome
from handrail_sidecar.catalogue import everything, sidecar_metrics
from handrail_sidecar.components import make_sidecar
from harness.alert_tools import needs_promtool
from harness.metric_names import RESERVED_LABELS, naming_problems

PAGE = Path(__file__).parents[3] / "docs" / "metrics.md"
BEGIN, END = "<!-- sidecar -->\n", "<!-- /sidecar -->"


def fresh() -> Registry:
    return Registry(make_sidecar(everything()).metrics)


def test_the_page_has_every_metric(request: pytest.FixtureRequest) -> None:
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    kept, _, after = rest.partition(END)
    if request.config.getoption("--update"):
        PAGE.write_text(before + BEGIN + table(sidecar_metrics()) + END + after, encoding="utf-8")
        return
    assert kept == table(sidecar_metrics()), "docs/metrics.md differs from the rows: run this test with --update"


def table(metrics: Sequence[CatalogueMetric]) -> str:
    lines = ["| metric | type | labels | unit | what it is | at start |", "|---|---|---|---|---|---|"]
    for metric in metrics:
        labels = ", ".join(metric.labels) or "–"
        born = "yes" if metric.born else "–"
        text = metric.help.replace("|", "\\|")
        lines.append(f"| `{metric.name}` | {metric.type} | {labels} | {metric.unit or '–'} | {text} | {born} |")
    return "\n".join(lines) + "\n"


def test_names_and_labels_are_as_prometheus_wants_them() -> None:
    assert [problem for metric in sidecar_metrics() for problem in naming_problems(metric, RESERVED_LABELS | {"host"})] == []


def test_no_name_twice_and_series_as_promql_names_them() -> None:
    metrics = sidecar_metrics()
    assert len({metric.name for metric in metrics}) == len(metrics)
    by_name = {metric.name: metric for metric in metrics}
    assert by_name["handrail_ttft_seconds"].series[0] == "handrail_ttft_seconds_bucket"
    assert by_name["handrail_requests_total"].series == ("handrail_requests_total",)


def test_H01_what_counts_failures_is_there_from_the_start() -> None:
    metrics = {metric.name: metric for metric in sidecar_metrics()}
    for name in (
        "handrail_requests_total",
        "handrail_kv_fetches_total",
        "handrail_kv_publishes_total",
        "handrail_slo_requests_total",
        "handrail_engine_restarts_total",
        "handrail_engine_process_events_total",
        "handrail_kv_fetches_hung",
        "handrail_engine_hung",
    ):
        assert metrics[name].born, name
    page = fresh().expose("text/plain")[0].decode()
    samples = {
        (sample.name, sample.labels.get("outcome"))
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.value == 0
    }
    assert {("handrail_requests_total", outcome.value) for outcome in Outcome if outcome is not Outcome.TAINTED} <= samples
    fetch_outcomes = (FetchOutcome.OK, FetchOutcome.FAILED, FetchOutcome.RECOMPUTED, FetchOutcome.ABORTED, FetchOutcome.UNKNOWN)
    assert {("handrail_kv_fetches_total", outcome.value) for outcome in fetch_outcomes} <= samples


def test_the_whole_page_is_read_by_both_parsers() -> None:
    metrics = fresh()
    assert list(text_string_to_metric_families(metrics.expose("text/plain")[0].decode()))
    assert list(read_open_metrics(metrics.expose("application/openmetrics-text")[0].decode()))  # type: ignore[no-untyped-call]


@needs_promtool
def test_promtool_accepts_the_whole_page() -> None:
    page = fresh().expose("text/plain")[0]
    done = subprocess.run(["promtool", "check", "metrics"], input=page, capture_output=True, timeout=300)
    assert done.returncode == 0, (done.stdout + done.stderr).decode()
