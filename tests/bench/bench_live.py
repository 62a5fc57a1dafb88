"""Measure what live metrics cost: one counted value, and one scrape.

The page is that of a sidecar with 100 peers.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # as pytest has it

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.metrics.view import ExponentialBucketHistogramAggregation, View
from prometheus_client import CollectorRegistry
from prometheus_client import Histogram as ClientHistogram

from builders.exchanges import PROCESS, exchange
from handrail.metrics.histogram import LATENCY, LATENCY_SECONDS, ExponentialHistogram, Histogram
from handrail.metrics.registry import Registry
from handrail.records import KvFetch, Source
from handrail_sidecar.catalogue import everything
from handrail_sidecar.components import Sidecar, make_sidecar
from handrail_sidecar.live_metrics.requests import LiveRequests
from handrail_sidecar.sources.plugin_socket import PluginSource

_VALUES = 20_000
_REPEATS = 7
_PEERS = 100
_MODELS = 2
_A_READ = 16  # gaps that the proxy passes on in one call
_BUDGET_NS = 500  # a gap; the proxy's budget is 20 us a token
_BUDGET_MS = 20.0  # a longer scrape would be reported as a pause of this process's loop


def _ns(work: Callable[[list[int]], object], values: list[int]) -> float:
    taken = []
    for _ in range(_REPEATS):
        begin = time.process_time_ns()
        work(values)
        taken.append((time.process_time_ns() - begin) / len(values))
    return median(taken)


def _by_reads(histogram: Histogram) -> Callable[[list[int]], None]:
    def work(values: list[int]) -> None:
        for at in range(0, len(values), _A_READ):
            histogram.extend(values[at : at + _A_READ])

    return work


def _one_by_one(observe: Callable[[int], object]) -> Callable[[list[int]], None]:
    def work(values: list[int]) -> None:
        for value in values:
            observe(value)

    return work


def _client() -> Callable[[int], object]:
    histogram = ClientHistogram("x", "x", ("model_name", "role"), buckets=LATENCY_SECONDS, registry=CollectorRegistry())
    child = histogram.labels("m", "edge")
    return lambda value: child.observe(value / 1e9)


def _sdk() -> tuple[Callable[[int], object], MeterProvider]:
    view = View(instrument_name="x", aggregation=ExponentialBucketHistogramAggregation())
    provider = MeterProvider(metric_readers=[InMemoryMetricReader()], views=[view])
    histogram = provider.get_meter("x").create_histogram("x")
    labels = {"model_name": "m", "role": "edge"}
    return lambda value: histogram.record(value / 1e9, labels), provider


def busy() -> Sidecar:
    """Build the metrics of a decode sidecar with two models and 100 peers.

    No GPU and no link is read.
    """
    made = make_sidecar(everything())
    draw = random.Random(1)
    for model in (f"model-{number}" for number in range(_MODELS)):
        _requests(made.live, model, draw)
    plugin = made.find(PluginSource)
    assert plugin is not None
    for number in range(_PEERS * 20):
        record = _fetch(number, draw)
        plugin.hand_offs.take(record)
        plugin.peers.take(record)
    return made


def _requests(live: LiveRequests, model: str, draw: random.Random) -> None:
    live.models.serve(model)
    for _ in range(1000):
        live.first_token(model, int(draw.lognormvariate(19, 1)), f"{draw.getrandbits(128):032x}")
        live.engine_first_token(model, int(draw.lognormvariate(18, 1)), "")
        live.gaps_of(model).extend([int(draw.lognormvariate(17, 0.5)) for _ in range(20)])
        live.itl_of(model).extend([int(draw.lognormvariate(17, 0.5)) for _ in range(20)])
        live.ended(model, exchange(gaps=None, tpot_mean_ns=25_000_000), ttft_judged=True)


def _fetch(number: int, draw: random.Random) -> KvFetch:
    return KvFetch(
        process=PROCESS,
        source=Source.PLUGIN,
        ids=exchange().ids,
        engine="vllm",
        request_id=f"r{number}",
        known_unix_ns=1_800_000_000_000_000_000 + number * 1_000_000,
        peer_host=f"10.0.{number % _PEERS}.1",
        peer_port=5600,
        posted_ns=int(draw.lognormvariate(15, 1)),
        done_ns=int(draw.lognormvariate(18, 1)),
        noticed_ns=1,
        ranks_done=1,
        bytes_moved=1 << 26,
    )


def scrape(made: Sidecar, accept: str) -> dict[str, float]:
    """Return the cost of one page: ``ms`` of CPU, ``bytes``, ``series``."""
    metrics = Registry(made.metrics)
    page, _ = metrics.expose(accept)
    taken = []
    for _ in range(_REPEATS):
        begin = time.process_time_ns()
        metrics.expose(accept)
        taken.append((time.process_time_ns() - begin) / 1e6)
    series = sum(1 for line in page.splitlines() if not line.startswith(b"#"))
    return {"ms": median(taken), "bytes": len(page), "series": series}


def run() -> list[dict[str, Any]]:
    """Return the figures.

    They are nanoseconds a value, and milliseconds, bytes and series a scrape.
    """
    draw = random.Random(1)
    values = [int(draw.lognormvariate(17, 1)) for _ in range(_VALUES)]
    record, provider = _sdk()
    page = scrape(busy(), "text/plain")
    modern = scrape(busy(), "application/openmetrics-text")
    figures = [
        _figure("live: a gap, 16 at a time", _ns(_by_reads(Histogram(LATENCY)), values), "ns", _BUDGET_NS),
        _figure("live: a gap, sent by OTLP too", _ns(_by_reads(ExponentialHistogram(LATENCY)), values), "ns", None),
        _figure("live: a value alone", _ns(_one_by_one(Histogram(LATENCY).observe), values), "ns", None),
        _figure("live: a value, prometheus_client", _ns(_one_by_one(_client()), values), "ns", None),
        _figure("live: a value, opentelemetry-sdk", _ns(_one_by_one(record), values[:4000]), "ns", None),
        _figure("live: a scrape at 100 peers", page["ms"], "ms", _BUDGET_MS),
        _figure("live: the page", page["bytes"], "bytes", None),
        _figure("live: its series", page["series"], "series", None),
        _figure("live: a scrape in OpenMetrics", modern["ms"], "ms", _BUDGET_MS),
    ]
    provider.shutdown()
    return figures


def _figure(name: str, value: float, unit: str, budget: float | None) -> dict[str, Any]:
    return {
        "name": name,
        "value": round(value, 3),
        "unit": unit,
        "budget": budget,
        "ratio": None if budget is None else round(value / budget, 3),
        "met": None if budget is None else value <= budget,
    }
