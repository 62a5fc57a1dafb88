"""The metrics page as OTLP metrics: convention names and exponential buckets.

The tests include a backend that refuses everything.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from math import log2
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.metrics.v1.metrics_pb2 import AggregationTemporality, Metric
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import ExponentialHistogram as SdkHistogram
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.metrics.view import ExponentialBucketHistogramAggregation, View

from doubles.otlp import Keeping, until
from handrail.metrics.histogram import LATENCY, SCALE, ExponentialHistogram, Histogram
from handrail.metrics.otlp_push import OtlpMetrics, otlp_metrics_rows
from handrail.metrics.registry import AnyMetricDef, MetricDef
from handrail.otlp.client import OtlpClient
from handrail.otlp.receiver.server import OtlpServer
from handrail.otlp.settings import ClientSettings
from handrail.otlp.signals import Accepted, ReceiverUnavailable, Signal
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


class Backend:
    """A backend that accepts everything, unless a test sets another answer."""

    def __init__(self, refusals: int = 0) -> None:
        self.requests: list[ExportMetricsServiceRequest] = []
        self.refusals = refusals
        self.closed = False

    async def send(self, signal: Signal, payload: bytes) -> Accepted:
        assert signal is Signal.METRICS
        if self.refusals:
            self.refusals -= 1
            raise ReceiverUnavailable("not yet", 1.0)
        self.requests.append(ExportMetricsServiceRequest.FromString(payload))
        return Accepted()

    async def close(self) -> None:
        self.closed = True


def pushing(rows: Sequence[AnyMetricDef], backend: Backend | None = None, interval_s: float = 60.0) -> OtlpMetrics:
    found = backend or Backend()
    return OtlpMetrics(rows, Resource(), lambda: found, interval_s, now_unix_ns=lambda: UNIX)


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
    found = metrics_of(pushing(rows).request())
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
    found = metrics_of(pushing(made.metrics).request())
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
    (row,) = otlp_metrics_rows(faulty.stats)
    assert row.read() == {("taken",): 0.0, ("failed",): 0.0, ("fault",): 1.0}


async def test_shutdown_without_start_and_a_backend_that_hangs() -> None:
    class Hanging(Backend):
        async def send(self, signal: Signal, payload: bytes) -> Accepted:
            await asyncio.Event().wait()
            raise AssertionError

    await pushing([]).shutdown(1.0)
    hanging = Hanging()
    stuck = pushing([], hanging, interval_s=0.001)
    await stuck.start()
    await stuck.shutdown(0.01)
    assert hanging.closed


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
            made.metrics,
            made.resource,
            lambda: OtlpClient(ClientSettings(endpoint=f"{scheme}://127.0.0.1:{port}")),
            60.0,
            now_unix_ns=lambda: UNIX,
        )
        sent = metrics_of(pushed.request())
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
