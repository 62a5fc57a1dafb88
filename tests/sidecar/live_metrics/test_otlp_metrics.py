"""The metrics page as OTLP metrics: convention names and exponential buckets.

The tests include a backend that refuses everything.
"""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from math import log2
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.metrics.v1.metrics_pb2 import AggregationTemporality, Metric
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import ExponentialHistogram as SdkHistogram
from opentelemetry.sdk.metrics.export import InMemoryMetricReader, MetricExporter, MetricExportResult, MetricsData
from opentelemetry.sdk.metrics.view import ExponentialBucketHistogramAggregation, View
from opentelemetry.sdk.resources import Resource

from doubles.otlp import Keeping, until
from handrail.config.telemetry import OtlpMetricsConfig
from handrail.metrics.histogram import LATENCY, SCALE, ExponentialHistogram, Histogram
from handrail.metrics.registry import AnyMetricDef, HistogramDef, MetricDef
from handrail.otlp.endpoint import parse_endpoint
from handrail.otlp.receiver.server import OtlpServer
from handrail.otlp.security import ClientSecurity
from handrail.otlp.signals import Signal
from handrail.security.tokens import Authenticator, Denied
from handrail.telemetry.exporters import Outlet, metric_exporter
from handrail.telemetry.metrics import OtlpMetrics, otlp_metrics_rows
from handrail_sidecar.catalogue import everything
from handrail_sidecar.components import make_sidecar
from harness.rotel import missing, rotel
from harness.skips import MISSING

UNIX = 1_800_000_000 * 10**9
_NS = st.integers(1, 10**12)


@asynccontextmanager
async def serving(consumer: Keeping) -> AsyncIterator[OtlpServer]:
    server = OtlpServer(consumer, grpc=("127.0.0.1", 0), http=("127.0.0.1", 0), loopback_only=True)
    await server.start()
    try:
        yield server
    finally:
        await server.shutdown()


def address(server: OtlpServer, protocol: str) -> str:
    bound = server.grpc_address if protocol == "grpc" else server.http_address
    assert bound is not None
    return f"http://127.0.0.1:{bound[1]}"


class Backend(MetricExporter):
    """A backend that accepts everything, unless a test sets another answer."""

    def __init__(self, refusals: int = 0) -> None:
        super().__init__()
        self.requests: list[ExportMetricsServiceRequest] = []
        self.refusals = refusals
        self.closed = False

    @property
    def current(self) -> MetricExporter:
        return self

    def export(self, metrics_data: MetricsData, timeout_millis: float = 10_000, **_: Any) -> MetricExportResult:
        if self.refusals:
            self.refusals -= 1
            return MetricExportResult.FAILURE
        self.requests.append(encode_metrics(metrics_data))
        return MetricExportResult.SUCCESS

    def force_flush(self, timeout_millis: float = 10_000) -> bool:
        return True

    def shutdown(self, timeout_millis: float = 30_000, **_: Any) -> None:
        self.closed = True

    def close(self) -> None:
        self.shutdown()

    async def why(self) -> str:
        return "not yet"


def pushing(rows: Sequence[AnyMetricDef], backend: Backend | None = None, interval_s: float = 60.0) -> OtlpMetrics:
    found = backend or Backend()
    return OtlpMetrics(rows, Resource({}), lambda: found, interval_s, now_unix_ns=lambda: UNIX)


def encoded(pushed: OtlpMetrics) -> dict[str, Metric]:
    return metrics_of(encode_metrics(pushed.data()))


def metrics_of(request: ExportMetricsServiceRequest) -> dict[str, Metric]:
    return {
        metric.name: metric for entry in request.resource_metrics for scope in entry.scope_metrics for metric in scope.metrics
    }


def labels_of(point: object) -> dict[str, str]:
    return {each.key: each.value.string_value for each in point.attributes}  # type: ignore[attr-defined]


def test_numbers_keep_their_names_and_say_since_when_they_count() -> None:
    rows = [
        MetricDef("handrail_requests", "counter", "Requests", lambda: {("m", "ok"): 3.0}, ("model_name", "outcome")),
        MetricDef("handrail_requests_open", "gauge", "Open ones", lambda: 2.0),
    ]
    found = encoded(pushing(rows))
    counted, opened = found["handrail.requests"], found["handrail.requests_open"]
    assert counted.sum.is_monotonic
    assert counted.sum.aggregation_temporality == AggregationTemporality.AGGREGATION_TEMPORALITY_CUMULATIVE
    (point,) = counted.sum.data_points
    assert (point.as_double, point.start_time_unix_nano, point.time_unix_nano) == (3.0, UNIX, UNIX)
    assert labels_of(point) == {"model_name": "m", "outcome": "ok"}
    assert opened.gauge.data_points[0].as_double == 2.0


def test_a_sidecar_uses_the_conventional_names_where_there_are_some() -> None:
    made = make_sidecar(everything())
    made.live.first_token("m", 300_000_000, "ab" * 16)
    found = encoded(pushing(made.metrics))
    assert {name for name in found if not name.startswith("handrail.")} == {
        "gen_ai.server.time_to_first_token",
        "gen_ai.server.time_per_output_token",
        "gen_ai.server.request.duration",
    }
    first = found["gen_ai.server.time_to_first_token"]
    assert first.unit == "s"
    (point,) = first.exponential_histogram.data_points
    assert labels_of(point) == {"gen_ai.request.model": "m", "handrail.role": "decode", "handrail.scope": "decode"}
    assert (point.count, point.sum, point.scale, point.zero_count) == (1, 0.3, SCALE, 0)
    assert list(point.positive.bucket_counts) == [1]
    assert 2 ** (point.positive.offset / 16) < 0.3 <= 2 ** ((point.positive.offset + 1) / 16)
    assert [(each.trace_id.hex(), each.as_double) for each in point.exemplars] == [("ab" * 16, 0.3)]
    assert found["handrail.kv_fetch_bytes"].unit == "By"


@given(st.lists(st.integers(-5, 10**12), max_size=200))
def test_both_kinds_of_buckets_hold_every_value(values: list[int]) -> None:
    plain, both = Histogram(LATENCY), ExponentialHistogram(LATENCY)
    plain.extend(values)
    both.extend(values)
    assert (both.counts, both.total) == (plain.counts, plain.total)
    assert both.zero + sum(both.positive.values()) == len(values)
    assert both.zero == sum(value <= 0 for value in values)


@given(st.lists(_NS.filter(lambda ns: abs(log2(ns / 1e9) * 16 - round(log2(ns / 1e9) * 16)) > 1e-6), min_size=1, max_size=50))
def test_buckets_are_those_of_the_sdk(values: list[int]) -> None:
    """Buckets equal the SDK's, except for a value exactly on a bound.

    There the last digit of a logarithm decides.
    """
    reader = InMemoryMetricReader()
    aggregation = ExponentialBucketHistogramAggregation(max_size=1024, max_scale=SCALE)
    provider = MeterProvider(metric_readers=[reader], views=[View(instrument_name="x", aggregation=aggregation)])
    histogram = provider.get_meter("x").create_histogram("x")
    ours = ExponentialHistogram(LATENCY)
    for value in values:
        histogram.record(value / 1e9)
        ours.observe(value)
    data = reader.get_metrics_data()
    assert data is not None
    theirs = data.resource_metrics[0].scope_metrics[0].metrics[0].data
    assert isinstance(theirs, SdkHistogram)
    (point,) = theirs.data_points
    provider.shutdown()
    assert point.scale == SCALE
    assert ours.positive == {point.positive.offset + at: count for at, count in enumerate(point.positive.bucket_counts) if count}


async def test_it_is_sent_at_the_end_and_what_is_refused_or_fails_is_counted() -> None:
    def broken() -> float:
        raise ZeroDivisionError

    backend, broken_backend = Backend(refusals=1), Backend()
    steady = pushing([MetricDef("handrail_x", "gauge", "x", lambda: 1)], backend, interval_s=0.001)
    await steady.start()
    await until(lambda: bool(backend.requests))
    await steady.shutdown(5.0)
    await steady.shutdown(5.0)
    assert (steady.stats.failed, steady.stats.sent, backend.closed) == (1, len(backend.requests), True)
    faulty = pushing([MetricDef("handrail_x", "gauge", "x", broken)], broken_backend)
    await faulty.start()
    await faulty.shutdown(5.0)
    assert (faulty.stats.faults, broken_backend.requests) == (1, [])
    (row,) = otlp_metrics_rows(faulty.stats, "handrail_sidecar")
    assert row.read() == {("taken",): 0.0, ("failed",): 0.0, ("fault",): 1.0}


async def test_shutdown_without_start_and_a_backend_that_hangs() -> None:
    ended = threading.Event()

    class Hanging(Backend):
        def export(self, metrics_data: MetricsData, timeout_millis: float = 10_000, **_: Any) -> MetricExportResult:
            ended.wait()
            return MetricExportResult.FAILURE

    await pushing([]).shutdown(1.0)
    hanging = Hanging()
    stuck = pushing([], hanging, interval_s=0.001)
    await stuck.start()
    await stuck.shutdown(0.01)
    assert hanging.closed
    ended.set()


def test_counts_that_go_on_over_restarts_have_no_new_start_after_one() -> None:
    """A backend takes a new start time for a reset.

    It would count the whole total again.
    """
    rows: list[AnyMetricDef] = [
        MetricDef("handrail_collector_rows", "counter", "Rows", lambda: 7.0, kept=True),
        HistogramDef("handrail_phase_seconds", "Phases", lambda: {("prefill",): seconds(1, 2)}, LATENCY, ("phase",), kept=True),
    ]
    found = encoded(pushing(rows))
    assert found["handrail.collector_rows"].sum.data_points[0].start_time_unix_nano == 1
    (point,) = found["handrail.phase_seconds"].histogram.data_points
    assert (point.start_time_unix_nano, point.count, point.sum) == (1, 2, 3.0)
    assert list(point.explicit_bounds) == list(LATENCY.bounds)
    assert list(point.bucket_counts) == seconds(1, 2).counts


def seconds(*values: int) -> Histogram:
    made = Histogram(LATENCY)
    made.extend([value * 10**9 for value in values])
    return made


def one_outlet(endpoint: str, *, headers: dict[str, str] | None = None) -> Outlet[MetricExporter]:
    client = OtlpMetricsConfig(headers=headers or {}).client(endpoint)
    return Outlet(metric_exporter, client, ClientSecurity(parse_endpoint(endpoint), client), Signal.METRICS)


@pytest.mark.parametrize("protocol", ["grpc", "http"])
async def test_the_environment_of_an_engine_changes_nothing(monkeypatch: pytest.MonkeyPatch, protocol: str) -> None:
    """The engine's ``OTEL_*`` settings do not reach what a sidecar sends.

    They are its token, endpoint, certificate and kill switch.
    """
    for name, value in {
        "OTEL_SDK_DISABLED": "true",
        "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9",
        "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://127.0.0.1:9",
        "OTEL_EXPORTER_OTLP_HEADERS": "authorization=Bearer%20of-the-engine",
        "OTEL_EXPORTER_OTLP_CERTIFICATE": "/nonexistent",
        "OTEL_EXPORTER_OTLP_COMPRESSION": "none",
        "HTTP_PROXY": "http://127.0.0.1:9",
        "http_proxy": "http://127.0.0.1:9",
    }.items():
        monkeypatch.setenv(name, value)
    kept, guard = Keeping(), Recording("otlp")
    server = OtlpServer(
        kept, grpc=("127.0.0.1", 0), http=("127.0.0.1", 0), loopback_only=True, grpc_guard=guard, http_guard=guard
    )
    await server.start()
    pushed = OtlpMetrics([], Resource({}), lambda: one_outlet(address(server, protocol).replace("http", protocol)), 60.0)
    await pushed.start()
    await pushed.shutdown(20.0)
    await server.shutdown()
    assert (pushed.stats.sent, pushed.stats.failed, pushed.stats.faults) == (1, 0, 0)
    assert guard.seen == [[]]


class Recording(Authenticator):
    """Lets everyone in and keeps the tokens."""

    def __init__(self, listener: str) -> None:
        super().__init__(listener)
        self.seen: list[list[str]] = []

    @property
    def open(self) -> bool:
        return False

    def denial(self, authorization: Sequence[str], *, certified: bool = False) -> Denied | None:
        self.seen.append(list(authorization))
        return None


@pytest.mark.skipif(bool(missing()), reason=MISSING + missing())
@pytest.mark.parametrize("protocol", ["grpc", "http"])
async def test_a_real_collector_takes_them_and_passes_them_on(tmp_path: Path, protocol: str) -> None:
    """A whole sidecar's page goes through rotel to a receiver.

    Every metric, point and bucket arrives as it was sent.
    """
    kept = Keeping()
    made = make_sidecar(everything())
    for number in range(200):
        made.live.first_token("m", 10**6 * (number + 1), "ab" * 16)
        made.live.gaps_of("m").extend([10**6 * number])
    async with serving(kept) as server, rotel(tmp_path, address(server, protocol), protocol) as ports:
        port = ports.grpc_port if protocol == "grpc" else ports.http_port
        scheme = "grpc" if protocol == "grpc" else "http"
        pushed = OtlpMetrics(
            made.metrics, Resource({}), lambda: one_outlet(f"{scheme}://127.0.0.1:{port}"), 60.0, now_unix_ns=lambda: UNIX
        )
        sent = encoded(pushed)
        await pushed.start()
        await pushed.shutdown(20.0)
        assert (pushed.stats.sent, pushed.stats.failed, pushed.stats.faults) == (1, 0, 0)
        await until(lambda: len(arrived(kept)) >= len(sent), 40)
    got = arrived(kept)
    assert got.keys() == sent.keys()
    for name in ("gen_ai.server.time_to_first_token", "handrail.stream_gap_seconds", "handrail.requests"):
        assert got[name] == sent[name]


def arrived(kept: Keeping) -> dict[str, Metric]:
    found: dict[str, Metric] = {}
    for signal, payload in kept.taken:
        if signal is Signal.METRICS:
            found |= metrics_of(ExportMetricsServiceRequest.FromString(payload))
    return found
