"""The collector's metrics about itself: who reports, its progress, its backlog."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from builders.device_samples import START_UNIX_NS, busy_host, counter, flattened, port, sample
from builders.records import process
from handrail import __version__
from handrail.otlp.payload import with_batch_seq
from handrail.otlp.receiver.server import OtlpServer
from handrail.otlp.signals import Signal
from handrail.records import EngineSample, EngineValue, Role, Source
from handrail.wire.engine_samples import metrics_request
from handrail.wire.exchange import resource_of
from handrail_collector.config import CollectorConfig
from handrail_collector.counters import CounterKey
from handrail_collector.metrics.collector_metrics import own_rows
from handrail_collector.metrics.slow_links import SlowLinks
from handrail_collector.status import Running, collector_gates
from handrail_collector.stitch.stitcher import SECOND
from handrail_collector.store.maintenance import Upkeep, UpkeepSettings
from handrail_collector.store.read import StoreReader
from harness.pipelines import Clock, device_batch, proxies, running, send, sweep, taken


@contextmanager
def telling(root: Path, journal: Any, pipeline: Any, clock: Clock) -> Iterator[Any]:
    """Yield a function from a row's name to its value, and the collector's parts."""
    receiver = OtlpServer(journal, grpc=None, http=("127.0.0.1", 0), loopback_only=True)
    parts = Running(
        journal, pipeline, receiver, (), Upkeep(pipeline._publisher, UpkeepSettings()), 0, collector_gates(CollectorConfig())
    )
    reader = StoreReader(root / "store", threads=1)
    rows = {row.name: row for row in own_rows(parts, SlowLinks(reader), clock)}
    yield lambda name: rows[f"handrail_collector_{name}"].read(), parts
    reader.close()


def scraped(at_unix_ns: int, seq: int) -> bytes:
    engine_sample = EngineSample(
        process=process(Role.PREFILL),
        source=Source.METRICS,
        at_unix_ns=at_unix_ns,
        values=(EngineValue(name="requests_running", value=1.0),),
    )
    return with_batch_seq(metrics_request(resource_of(replace(engine_sample.process, sender="pages")), [engine_sample]), seq)


async def test_sources_of_samples_count_as_those_of_requests_do(tmp_path: Path) -> None:
    """Sources of samples count in ``reporting`` like sources of requests.

    Without them, a sidecar whose GPUs fell silent looked like one without GPUs.
    """
    clock = Clock()
    both = [*flattened(list(busy_host(1, gpus=1))), sample(port(), START_UNIX_NS, counter("bytes", 3))]
    for life in range(2):
        async with running(tmp_path, clock) as (journal, pipeline):
            if life == 0:
                await send(journal, proxies("req-a", "t1"))
                await journal.consume(Signal.METRICS, device_batch(both, 1))
                await journal.consume(Signal.METRICS, scraped(clock.now, 1))
            await taken(pipeline, journal)
            await pipeline.flush()
            clock.now += 7 * SECOND
            with telling(tmp_path, journal, pipeline, clock) as (of, _):
                assert of("samples") == {
                    ("engine", "metrics"): 1.0,
                    ("gpu", "nvml"): 10.0,
                    ("link", "nic"): 0.0,
                    ("link", "rdma"): 1.0,
                }
                silent = of("source_silent_seconds")
                assert {source for _, source in silent} == {"metrics", "nvml", "proxy", "rdma"}
                assert set(silent.values()) == {7.0 * (life + 1)}
                assert of("info") == {(__version__,): 1.0}
            names = {f"{role.value}:{source}" for role, source in pipeline.reporting(clock.now)}
            assert {"edge:proxy", "prefill:proxy", "decode:proxy", "prefill:metrics"} <= names
            assert {source for _, source in pipeline.reporting(clock.now)} == {"metrics", "nvml", "proxy", "rdma"}
            assert {source for _, source in pipeline.reporting(clock.now + 3600 * SECOND)} == set()


async def test_samples_do_not_change_the_metrics_of_requests(tmp_path: Path) -> None:
    """Reading a prefill engine's page does not show that this request went there."""
    clock = Clock()
    async with running(tmp_path, clock) as (journal, pipeline):
        await journal.consume(Signal.METRICS, scraped(clock.now, 1))
        await taken(pipeline, journal)
        assert not pipeline.fleet().has_prefill


async def test_waiting_work_is_exported_with_its_age(tmp_path: Path) -> None:
    clock = Clock()
    async with running(tmp_path, clock) as (journal, pipeline):
        with telling(tmp_path, journal, pipeline, clock) as (of, _):
            assert (of("journal_lag_seconds"), of("oldest_open_request_seconds")) == (0.0, 0.0)
            await send(journal, proxies("req-a", "t1"))
            await taken(pipeline, journal)
            clock.now += 5 * SECOND
            assert of("oldest_open_request_seconds") == 5.0
            assert of("unpublished_items") == {("event",): 0.0, ("row",): 0.0, ("span",): 3.0}
            clock.now += 20 * SECOND
            sweep(pipeline, clock.now)
            assert of("oldest_open_request_seconds") == 0.0
            assert of("unpublished_items")["row",] == 1.0
            await pipeline.flush()
            assert set(of("unpublished_items").values()) == {0.0}
            assert of("withdrawn_rows") == 0


async def test_status_says_who_reports_how_much_came_and_no_coverage_that_nobody_counted(tmp_path: Path) -> None:
    clock = Clock()
    async with running(tmp_path, clock) as (journal, pipeline):
        await send(journal, proxies("req-a", "t1"))
        await journal.consume(Signal.METRICS, scraped(clock.now, 1))
        await taken(pipeline, journal)
        clock.now += 20 * SECOND
        sweep(pipeline, clock.now)
        await pipeline.flush()
        with telling(tmp_path, journal, pipeline, clock) as (_, parts):
            status = parts.status()
        assert status["requests"] == {"rows": 1, "edge": 1, "joined": 1, "coverage": None, "open": 0}
        assert status["samples"] == {"engine:metrics": 1}
        assert pipeline.observed[CounterKey.ROWS] == 1
