"""Samples of devices and engines' pages, from a sidecar's bytes to the store.

Each sample is stored once, whatever restarts and whatever comes again.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from builders.device_samples import START_UNIX_NS, S, busy_host, counter, flattened, gpu, port, sample
from builders.engine_samples import engine_sample
from handrail import conventions as names
from handrail.otlp.payload import with_batch_seq
from handrail.otlp.signals import Signal
from handrail.records.devices import DeviceSample, runs
from handrail.wire.engine_samples import metrics_request
from handrail_collector.store.filters import SampleFilter
from handrail_collector.store.read import StoreReader
from handrail_collector.store.schema import Table
from handrail_sidecar.export.resource import own_resource
from harness.pipelines import Clock, device_batch, proxies, running, send, stored, sweep, taken

EVERYTHING = SampleFilter(since_unix_ns=0, until_unix_ns=1 << 62)


def kept(root: Path, table: Table) -> list[Any]:
    reader = StoreReader(root / "store", threads=1)
    try:
        return reader.samples(table, EVERYTHING)
    finally:
        reader.close()


def links(seconds: int) -> list[list[DeviceSample]]:
    """Return a batch a second of two ports at 10 Hz."""
    return [
        [
            sample(port(n), START_UNIX_NS + second * S + tick * S // 10, counter("bytes", 1000 * second + tick, "receive"))
            for tick in range(10)
            for n in range(2)
        ]
        for second in range(seconds)
    ]


async def test_samples_are_stored_once_whatever_is_delivered_again_and_replayed(tmp_path: Path) -> None:
    clock = Clock()
    reports = links(3)
    for life in range(2):
        async with running(tmp_path, clock) as (journal, pipeline):
            for seq, batch in enumerate(reports, 1):
                await journal.consume(Signal.METRICS, device_batch(batch, seq))
            await taken(pipeline, journal)
            assert pipeline.intake.duplicates.batches == (
                0 if life == 0 else 4
            )  # one repeat in the first life, three in the second
            if life == 0:
                await pipeline.flush()
                await journal.consume(Signal.METRICS, device_batch(reports[0], 1))
    found = kept(tmp_path, Table.LINK_SAMPLES)
    assert sorted(found, key=lambda one: (one.at_unix_ns, one.device.key)) == [one for batch in reports for one in batch]
    assert kept(tmp_path, Table.GPU_SAMPLES) == []


async def test_one_request_may_bring_gpus_and_links_and_each_goes_to_its_table(tmp_path: Path) -> None:
    both = [*flattened(list(busy_host(1, gpus=1))), sample(port(), START_UNIX_NS)]
    async with running(tmp_path, Clock()) as (journal, pipeline):
        await journal.consume(Signal.METRICS, device_batch(both, 1))
        await taken(pipeline, journal)
        assert pipeline.stats.samples == 11
    assert len(kept(tmp_path, Table.GPU_SAMPLES)) == 10
    assert [one.device.key for one in kept(tmp_path, Table.LINK_SAMPLES)] == ["mlx5_0/1"]


async def test_a_scrape_of_an_engines_page_is_stored(tmp_path: Path) -> None:
    engine_samples = [engine_sample(at) for at in range(2)]
    async with running(tmp_path, Clock()) as (journal, pipeline):
        for seq, one in enumerate(engine_samples, 1):
            payload = metrics_request(own_resource(one.process), [one])
            await journal.consume(Signal.METRICS, with_batch_seq(payload, seq))
        await taken(pipeline, journal)
    found = kept(tmp_path, Table.ENGINE_SAMPLES)
    assert [(one.at_unix_ns, one.values, one.histograms) for one in found] == [
        (o.at_unix_ns, o.values, o.histograms) for o in engine_samples
    ]


async def test_metrics_of_others_and_damage_are_passed_over_and_requests_go_on(tmp_path: Path) -> None:
    foreign = ExportMetricsServiceRequest()
    scope = foreign.resource_metrics.add().scope_metrics.add()
    scope.scope.name = "otelcol/hostmetricsreceiver"
    scope.metrics.add(name="system.cpu.time").sum.data_points.add(as_double=1.0)
    ours = foreign.resource_metrics.add().scope_metrics.add()
    ours.scope.name = names.SCOPE_DEVICES
    ours.metrics.add(name="handrail_gpu_x").gauge.data_points.add(as_double=float("nan"))
    async with running(tmp_path, Clock()) as (journal, pipeline):
        await journal.consume(Signal.METRICS, foreign.SerializeToString())
        await send(journal, proxies("req-a", "t1"))
        await taken(pipeline, journal)
        sweep(pipeline, Clock().now + 20 * S)
        assert (pipeline.stats.samples, pipeline.stats.faults) == (0, 0)
    assert len(stored(tmp_path)) == 1


async def test_a_row_of_samples_that_no_column_takes_is_left_out_and_the_rest_is_stored(tmp_path: Path) -> None:
    async with running(tmp_path, Clock()) as (journal, pipeline):
        await journal.consume(Signal.METRICS, device_batch(links(1)[0], 1))
        await taken(pipeline, journal)
        pipeline.buffer.waiting.add(Table.GPU_SAMPLES, runs([sample(gpu(line_rate_bytes="fast"), START_UNIX_NS)])[0])
        await pipeline.flush()
        assert (pipeline.stats.faults, pipeline.stats.publish_failures) == (1, 0)
    assert len(kept(tmp_path, Table.LINK_SAMPLES)) == 20


@pytest.mark.parametrize("most", [10, 10_000])
async def test_many_samples_are_published_before_they_fill_the_memory(tmp_path: Path, most: int) -> None:
    async with running(tmp_path, Clock(), max_buffered_spans=most) as (journal, pipeline):
        for seq, batch in enumerate(links(20), 1):
            await journal.consume(Signal.METRICS, device_batch(batch, seq))
        await taken(pipeline, journal)
        assert (pipeline.stats.publishes > 0) == (most == 10)
    assert len(kept(tmp_path, Table.LINK_SAMPLES)) == 400
