"""Histograms on the process's own page, as any scraper reads them."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_open_metrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_open_metrics
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar as ClientExemplar
from prometheus_client.utils import floatToGoString

from handrail.metrics.histogram import LATENCY, SIZE, Exemplar, Histogram
from handrail.metrics.registry import AnyMetricDef, HistogramDef, MetricDef, Registry
from handrail.printable import is_printable, printable
from harness.alert_tools import needs_promtool

PLAIN = "text/plain;version=0.0.4"
OPEN = "application/openmetrics-text;version=1.0.0"
HELP = 'Wait for the first token: "as it comes" \\ 10 %'

Series = Mapping[tuple[str, ...], Histogram]


def page_of(series: Series, accept: str, labels: tuple[str, ...] = ("model_name", "role")) -> str:
    rows: list[AnyMetricDef] = [
        MetricDef("handrail_x", "counter", "Something", lambda: 1),
        HistogramDef("handrail_wait_seconds", HELP, lambda: series, LATENCY, labels),
    ]
    return Registry(rows).expose(accept)[0].decode()


class _Client(Collector):
    """The same series as prometheus_client would show them."""

    def __init__(self, series: Series, labels: tuple[str, ...]) -> None:
        self.series, self.labels = series, labels

    def collect(self) -> list[Metric]:
        family = HistogramMetricFamily("handrail_wait_seconds", HELP, labels=self.labels)
        for values, histogram in self.series.items():
            buckets: list[Any] = []
            running = 0
            for at, count in enumerate(histogram.counts):
                running += count
                bound = floatToGoString(LATENCY.bounds[at]) if at < len(LATENCY.bounds) else "+Inf"  # type: ignore[no-untyped-call]
                held = histogram.exemplars.get(at)
                reports = held and ClientExemplar({"trace_id": held.trace_id}, held.value / 1e9, held.unix_ns / 1e9)
                buckets.append((bound, running, reports) if reports else (bound, running))
            family.add_metric(values, buckets, histogram.total / 1e9)
        return [family]


def read_modern(page: str) -> Any:
    return read_open_metrics(page)  # type: ignore[no-untyped-call]


def samples(families: Any) -> dict[tuple[str, frozenset[tuple[str, str]]], tuple[float, Any]]:
    return {
        (sample.name, frozenset(sample.labels.items())): (sample.value, sample.exemplar)
        for family in families
        for sample in family.samples
    }


def some() -> dict[tuple[str, ...], Histogram]:
    histogram = Histogram(LATENCY)
    histogram.extend([0, 10**6, 123_456_789, 5 * 10**9, 10**12])
    histogram.exemplars[histogram.observe(2 * 10**9)] = Exemplar("a" * 32, 2 * 10**9, 1_700_000_000_125_000_000)
    return {("m", "edge"): histogram, ("other", "edge"): Histogram(LATENCY)}


def test_it_reads_as_what_prometheus_client_shows() -> None:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Client(some(), ("model_name", "role")))
    ours = samples(text_string_to_metric_families(page_of(some(), PLAIN)))
    assert ours.pop(("handrail_x_total", frozenset())) == (1.0, None)
    assert ours == samples(text_string_to_metric_families(generate_latest(registry).decode()))
    modern = samples(read_modern(page_of(some(), OPEN)))
    del modern["handrail_x_total", frozenset()]
    assert modern == samples(read_modern(generate_open_metrics(registry).decode()))  # type: ignore[no-untyped-call]


def test_exemplars_are_in_open_metrics_alone() -> None:
    assert "trace_id" not in page_of(some(), PLAIN)
    (line,) = [line for line in page_of(some(), OPEN).splitlines() if "trace_id" in line]
    assert 'le="2.0"' in line
    assert line.endswith(f'# {{trace_id="{"a" * 32}"}} 2.0 1700000000.125')
    assert page_of(some(), OPEN).endswith("\n# EOF\n")
    assert page_of(some(), OPEN).count("# EOF") == 1


def test_a_counter_points_to_the_last_that_was_counted_in_open_metrics_alone() -> None:
    held: dict[tuple[str, ...], Exemplar] = {("b", "a"): Exemplar("c" * 32, 1, 1_700_000_000_125_000_000)}
    row = MetricDef("handrail_y", "counter", "Ends", lambda: {("a", "b"): 2, ("b", "a"): 3}, ("one", "two"), lambda: held)
    modern, plain = (Registry([row]).expose(accept)[0].decode() for accept in (OPEN, PLAIN))
    (line,) = [line for line in modern.splitlines() if "trace_id" in line]
    assert line == f'handrail_y_total{{one="b",two="a"}} 3.0 # {{trace_id="{"c" * 32}"}} 1.0 1700000000.125'
    assert "trace_id" not in plain
    assert list(read_modern(modern))


@given(st.text(max_size=20), st.text(max_size=20))
def test_any_label_value_comes_back_printable(model: str, role: str) -> None:
    page = page_of({(model, role): Histogram(LATENCY)}, OPEN)
    found = {
        (sample.labels["model_name"], sample.labels["role"])
        for family in read_modern(page)
        for sample in family.samples
        if sample.name == "handrail_wait_seconds_bucket"
    }
    assert found == {(printable(model), printable(role))}


def test_a_histogram_without_labels_or_series() -> None:
    assert 'handrail_wait_seconds_bucket{le="+Inf"} 0.0' in page_of({(): Histogram(LATENCY)}, PLAIN, ())
    assert "handrail_wait_seconds_count 0.0" in page_of({(): Histogram(LATENCY)}, PLAIN, ())
    assert "# TYPE handrail_wait_seconds histogram" in page_of({}, PLAIN)


def test_sizes_are_in_bytes() -> None:
    histogram = Histogram(SIZE)
    histogram.observe(1 << 20)
    row = HistogramDef("handrail_b_bytes", "Bytes", lambda: {(): histogram}, SIZE)
    page = Registry([row]).expose(PLAIN)[0].decode()
    assert 'handrail_b_bytes_bucket{le="1.048576e+06"} 1.0' in page
    assert "handrail_b_bytes_sum 1.048576e+06" in page


@needs_promtool
def test_promtool_accepts_it() -> None:
    done = subprocess.run(
        ["promtool", "check", "metrics"], input=page_of(some(), PLAIN), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr


FOREIGN = "a\x1b[31m\u202eb\u200b\U000e0041\ud800"


def one(value: int) -> Histogram:
    histogram = Histogram(LATENCY)
    histogram.observe(value)
    return histogram


@pytest.mark.parametrize("accept", [PLAIN, OPEN])
def test_names_of_others_stand_escaped_in_every_kind_of_row(accept: str) -> None:
    rows: list[AnyMetricDef] = [
        MetricDef("handrail_x", "counter", "X", lambda: {(FOREIGN,): 1, (printable(FOREIGN),): 2}, ("peer",)),
        MetricDef("handrail_y", "gauge", "Y", lambda: {(FOREIGN,): 3}, ("peer",)),
        HistogramDef("handrail_z_seconds", "Z", lambda: {(FOREIGN,): one(5), (printable(FOREIGN),): one(7)}, LATENCY, ("peer",)),
    ]
    text = Registry(rows).expose(accept)[0].decode()
    assert [line for line in text.split("\n") if not is_printable(line)] == []
    read = read_open_metrics if accept == OPEN else text_string_to_metric_families
    series = [(sample.name, tuple(sorted(sample.labels.items()))) for family in read(text) for sample in family.samples]
    assert len(series) == len(set(series))
    peers = {dict(labels)["peer"] for _, labels in series}
    assert printable(FOREIGN) in peers
    assert len(peers) == 2  # a hash distinguishes the one with the same spelling


@pytest.mark.parametrize("accept", [PLAIN, OPEN])
def test_a_number_beyond_all_doubles_does_not_cost_the_page(accept: str) -> None:
    rows: list[AnyMetricDef] = [
        MetricDef("handrail_x", "counter", "X", lambda: 10**400),
        HistogramDef("handrail_z_seconds", "Z", lambda: {(): one(10**400)}, LATENCY),
    ]
    text = Registry(rows).expose(accept)[0].decode()
    assert "handrail_x_total +Inf" in text
    assert "handrail_z_seconds_sum +Inf" in text
