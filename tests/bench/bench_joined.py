"""Measure what it costs to count joined requests and to scrape the result.

The page of the collector has 100 peers and many models.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from builders.links import fetch_row
from builders.request_rows import phase, request_row
from handrail.metrics.histogram import LATENCY_SECONDS
from handrail.metrics.registry import Registry
from handrail.phases import Phase
from handrail.records import Outcome
from handrail_collector.counters import CounterKey, Durations, Timed
from handrail_collector.explain.stalls.evidence import StallCause
from handrail_collector.metrics.counting import Counting
from handrail_collector.metrics.request_metrics import joined_rows
from handrail_collector.metrics.slow_links import MOST_HAND_OFFS, MOST_PAIRS, WINDOW_NS, SlowLinks
from handrail_collector.stitch.clocks import HostClocks
from handrail_collector.stitch.group import Closing, RequestGroup
from handrail_collector.store.publish import StorePublisher
from handrail_collector.store.read import StoreReader
from handrail_collector.store.recovery import Recovered
from handrail_collector.store.schema import Table

ROWS = 20_000
PEERS = 100
SECOND = 10**9
START = 1_700_000_000 * SECOND
PHASES = tuple(each.value for each in Phase if each not in (Phase.ROUTER, Phase.PREFILL_HOPS, Phase.DECODE_HOPS))
OPEN_METRICS = "application/openmetrics-text; version=1.0.0"


def counting() -> Counting:
    return Counting(Recovered(end_offset=0, low_water_offset=0, evidence={}), 20 * SECOND)


def row_us() -> float:
    """Measure the cost of one row that has every phase, counted as the pipeline does."""
    rng = random.Random(5)
    rows = [
        request_row(
            tuple(phase(name, rng.lognormvariate(2, 1), "decode") for name in PHASES),
            model=f"org/model-{n % 3}",
            trace_id=f"{n:032x}",
        )
        for n in range(ROWS)
    ]
    counts = counting()
    groups = [RequestGroup() for _ in rows]
    begin = time.process_time_ns()
    for group, row in zip(groups, rows, strict=True):
        counts.row(group, row, Closing.COMPLETE, START)
    return (time.process_time_ns() - begin) / ROWS / 1000


def add_us() -> float:
    rng = random.Random(5)
    values = [round(rng.lognormvariate(17, 2)) for _ in range(ROWS)]
    durations = Durations()
    begin = time.process_time_ns()
    for value in values:
        durations.add(value)
    return (time.process_time_ns() - begin) / ROWS / 1000


def page(models: int) -> tuple[float, int, int]:
    """Return CPU ms, bytes and series of the joined part of a metrics page.

    The page covers ``PEERS`` hosts and every phase, cause and outcome.
    """
    rng = random.Random(5)
    counts = counting()
    for model in range(models):
        name = f"meta-llama/Llama-3.1-{model}B-Instruct"
        counts.models.serve(name)
        for each in PHASES:
            for _ in range(500):
                counts.observed.time(Timed.PHASES, (each, name), round(rng.lognormvariate(17, 2)))
        for outcome in Outcome:
            counts.observed.add(CounterKey.JOINED, rng.randrange(1, 10**6), f"{outcome.value}.{name}")
        for cause in StallCause:
            counts.observed.add(CounterKey.STALLS, rng.randrange(1, 10**6), f"{cause.value}.{name}")
    taken = counts.observed.take()
    counts.observed.done(counts.observed.with_added(taken), taken)
    clocks = HostClocks()
    for peer in range(PEERS):
        there, here = ("edge", START), (f"host-{peer}", START + 1000)
        clocks.before(there, here)
        clocks.before(here, ("edge", START + 5_000_000))
    with tempfile.TemporaryDirectory() as folder:
        links = SlowLinks(StoreReader(Path(folder), threads=1))
        links.found = {(f"10.0.0.{n}:8000", f"10.0.1.{n}:8000", "slow_path"): 1.0 for n in range(MOST_PAIRS)}
        metrics = Registry(joined_rows(counts, clocks, links))
        took = []
        for _ in range(7):
            begin = time.process_time_ns()
            text, _ = metrics.expose(OPEN_METRICS)
            took.append((time.process_time_ns() - begin) / 1e6)
    series = sum(not line.startswith(b"#") for line in text.splitlines())
    return median(took), len(text), series


def stored_bytes(requests: int) -> int:
    """Return the manifest bytes that one publish of so many requests adds for phases.

    All requests have one model.
    """
    rng = random.Random(5)
    counts = counting()
    for _ in range(requests):
        parts = tuple(phase(name, rng.lognormvariate(2, 1), "decode") for name in PHASES)
        counts.row(RequestGroup(), replace(request_row(parts)), Closing.COMPLETE, START)
    return sum(len(name) + 8 + len(",".join(map(str, flat))) for name, flat in counts.observed.take().added().items())


def look_ms() -> float:
    """Measure the CPU time of one search for slow links.

    The search sees as many hand-offs as it looks at, of ``PEERS`` pairs whose links are all slow.
    """
    now = START + 600 * SECOND
    every = WINDOW_NS // MOST_HAND_OFFS
    rows = [
        fetch_row(
            0,
            started_unix_ns=now - WINDOW_NS + n * every,
            trace_id=f"{n:032x}",
            request_id=f"{n:016x}",
            span_id=f"{n:016x}",
            producer_instance=f"10.0.0.{n % PEERS}:8000",
            producer_host=f"p{n % PEERS}",
            consumer_instance=f"10.0.1.{n % PEERS}:8000",
            consumer_host=f"d{n % PEERS}",
            transfer_ns=SECOND,
            duration_ns=2 * SECOND,
        )
        for n in range(MOST_HAND_OFFS)
    ]
    with tempfile.TemporaryDirectory() as folder:
        publisher = StorePublisher(Path(folder))
        publisher.open()
        publisher.publish(0, 1, 0, [], [], flat={Table.KV_FETCHES: rows})
        publisher.close()
        links = SlowLinks(StoreReader(Path(folder), threads=1), now_unix_ns=lambda: now)
        links.look()  # the first call also pays for its imports
        begin = time.process_time_ns()
        links.look()
        took = (time.process_time_ns() - begin) / 1e6
        if len(links.found) != MOST_PAIRS:
            raise AssertionError(f"{len(links.found)} slow links found, {links.failures} failures")
    return took


def run() -> list[dict[str, Any]]:
    """Return the figures; only the scrape has a budget."""
    figures = [
        _figure("joined: a row counted", row_us(), "us", None),
        _figure("joined: a duration counted", add_us(), "us", None),
        _figure(f"joined: a look at links, {PEERS} pairs, {MOST_HAND_OFFS} hand-offs", look_ms(), "ms", None),
        _figure("joined: manifest bytes of 1 request", stored_bytes(1), "B", None),
        _figure("joined: manifest bytes of 1000 requests", stored_bytes(1000), "B", None),
    ]
    for models in (1, 3, 32):
        took, size, series = page(models)
        what = f"joined: scrape, {PEERS} peers, {models} models"
        figures += [
            _figure(what, took, "ms", None),
            _figure(f"{what}, size", size, "B", None),
            _figure(f"{what}, series ({len(LATENCY_SECONDS) + 3} a histogram)", series, "", None),
        ]
    return figures


def _figure(name: str, value: float, unit: str, budget: float | None) -> dict[str, Any]:
    return {"name": name, "value": round(value, 3), "unit": unit, "budget": budget, "ratio": None, "met": None}
