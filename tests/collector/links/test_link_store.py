"""From sidecars' bytes to findings on a link, through pipeline and store.

The input is hand-offs and log lines.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from builders.links import fetch_row
from builders.plugin import fact, fetch, publish, times
from builders.records import EPOCH, MS, process
from doubles.sysfs import FakeSysfs
from handrail.device_counters.link import BYTES, COUNTERS, TRANSMIT
from handrail.otlp.signals import Signal
from handrail.records import LogKind, Role
from handrail.wire.device_samples import named
from handrail_collector.links.answer import answered, period
from handrail_collector.links.devices import Medium, counted
from handrail_collector.links.question import LinksQuestion
from handrail_collector.rows import LinkFactRow
from handrail_collector.stitch.stitcher import SECOND
from handrail_collector.store.filters import SampleFilter
from handrail_collector.store.publish import StorePublisher
from handrail_collector.store.read import StoreReader
from handrail_collector.store.schema import Table
from handrail_sidecar.export.device_batches import DeviceBatches
from handrail_sidecar.export.resource import own_resource
from handrail_sidecar.links.sampler import LinkSamplerSettings
from handrail_sidecar.sources.links import LinkSource
from harness.pipelines import Clock, log_batch, plugin_batch, proxies, running, send, sweep, taken

LANE = (("transport", "tcp"), ("nic", "eth0"), ("reach", "intra-node"))
READER, KEEPER = "cmpl-req-a-0-0000dddd", "cmpl-req-a-0-0000aaaa"


def reader(root: Path) -> StoreReader:
    return StoreReader(root / "store", threads=1)


def a_request(mode: str = "pull") -> tuple[list[Any], list[Any]]:
    edge, p, d = proxies("req-a", "t1", 0)
    pushed: dict[str, Any] = {"posted_ns": 7 * MS, "done_ns": 47 * MS, "bytes_moved": 10**8} if mode == "push" else {}
    at_p = [times(Role.PREFILL, 12, 20, 92, 93, rid=KEEPER, parent=p), publish(105, rid=KEEPER, parent=p, mode=mode, **pushed)]
    at_d = [
        times(Role.DECODE, 133, 110, 150, 850, rid=READER, parent=d),
        fetch(134, rid=READER, peer=KEEPER, parent=d, mode=mode),
    ]
    return [edge, p, d], [at_p, at_d]


async def link_report(root: Path, mode: str = "pull") -> dict[str, Any]:
    clock = Clock()
    seen, plugin = a_request(mode)
    async with running(root, clock) as (journal, pipeline):
        await send(journal, seen)
        for seq, of_process in enumerate(plugin, 1):
            await journal.consume(Signal.TRACES, plugin_batch(of_process, seq))
        line = fact(LogKind.TRANSPORT, Role.DECODE, 0, None, recogniser="ucx.lanes", words=LANE)
        await journal.consume(Signal.LOGS, log_batch([line, replace(line, lines=2, revision=1)], 1))
        await taken(pipeline, journal)
        sweep(pipeline, clock.now + 20 * SECOND)
    with_reader = reader(root)
    try:
        return answered(with_reader, LinksQuestion(since_unix_ns=EPOCH - SECOND, until_unix_ns=EPOCH + 10 * SECOND), EPOCH)
    finally:
        with_reader.close()


async def test_a_pull_and_a_line_of_ucx_become_a_link(tmp_path: Path) -> None:
    answer = await link_report(tmp_path)
    (link,) = answer["links"]
    assert (link["producer"], link["consumer"], link["kv_fetches"], link["timed"]) == ("prefill:8000", "decode:8000", 1, 1)
    assert (link["busy_ns"], link["moved_bytes"]) == (59 * MS, 64 * 32768)
    assert link["transport"] == "tcp"
    assert link["evidence"] == ["the log of decode:8000 names tcp on eth0 as the lane of remote reads (ucx.lanes)"]


async def test_a_repeated_line_is_one_row(tmp_path: Path) -> None:
    await link_report(tmp_path)
    with_reader = reader(tmp_path)
    (row,) = with_reader.events(Table.LINK_FACTS, 0, 1 << 62)
    with_reader.close()
    assert isinstance(row, LinkFactRow)
    assert (row.lane, row.nic, row.reach, row.instance) == ("tcp", "eth0", "intra-node", "decode:8000")


async def test_what_was_pushed_moved_by_the_clock_of_P(tmp_path: Path) -> None:
    """Bytes are posted 7 ms after P published at 105 ms.

    That is 22 ms before D knew of the load.
    """
    await link_report(tmp_path, "push")
    with_reader = reader(tmp_path)
    ((row,), _) = with_reader.recent_fetches(0, 1 << 62, 10)
    with_reader.close()
    assert row.posted_ns is not None
    assert row.started_unix_ns + row.posted_ns == EPOCH + 112 * MS
    assert (row.transfer_ns, row.mode) == (40 * MS, "push")


def test_a_longer_period_is_limited_to_its_last_fetches(tmp_path: Path) -> None:
    publisher = StorePublisher(tmp_path / "store")
    publisher.open()
    publisher.publish(0, 10, 10, (), (), flat={Table.KV_FETCHES: [fetch_row(n) for n in range(1, 30)]})
    publisher.close()
    with_reader = reader(tmp_path)
    found = period(with_reader, 0, 1 << 62, most=20)
    with_reader.close()
    assert (found.limited, found.hand_offs) == (True, 20)
    assert found.lines[0].figures.first_unix_ns == fetch_row(10).started_unix_ns


@pytest.mark.parametrize("most", [1, 100])
def test_of_a_requests_hand_offs_those_of_its_last_version_count(tmp_path: Path, most: int) -> None:
    publisher = StorePublisher(tmp_path / "store")
    publisher.open()
    publisher.publish(
        0, 10, 10, (), (), flat={Table.KV_FETCHES: [fetch_row(1), fetch_row(1, version=2, outcome="failed", bytes_moved=None)]}
    )
    publisher.close()
    with_reader = reader(tmp_path)
    rows, _ = with_reader.recent_fetches(0, 1 << 62, most)
    with_reader.close()
    assert most == 1 or [each.version for each in rows] == [2]


async def test_readings_of_a_port_come_back_from_the_store(tmp_path: Path) -> None:
    """Port samples pass sampler, batches, journal, pipeline and store.

    Bytes arrive exactly, and a counter that began again is reported.
    """
    sysfs = FakeSysfs(tmp_path / "sys")
    sysfs.add_port(sent=4 * 2**40, received=8)
    of_sidecar = process(Role.DECODE)
    clock = Clock()
    async with running(tmp_path, clock) as (journal, pipeline):
        batches = DeviceBatches(own_resource(of_sidecar), named(link=COUNTERS), journal.consume, lambda: True, 3600.0)
        settings = LinkSamplerSettings(root=sysfs.root, interval_ns=5 * MS, slow_ns=10 * MS)
        source = LinkSource(settings, of_sidecar, batches.samples)
        await source.start()
        for sent in (4 * 2**40, 4 * 2**40 + 400, 12):
            sysfs.move_port(sent, 8)
            before = source.sampler.watches["mlx5_0/1"].stats.reads if source.sampler.watches else 0
            for _ in range(10_000):
                await asyncio.sleep(0.002)
                if source.sampler.watches and source.sampler.watches["mlx5_0/1"].stats.reads > before + 3:
                    break
        await source.shutdown(5.0)
        await batches.flush()
        await taken(pipeline, journal)
    with_reader = reader(tmp_path)
    samples = with_reader.samples(Table.LINK_SAMPLES, SampleFilter(since_unix_ns=0, until_unix_ns=1 << 62))
    with_reader.close()
    sent_of = [
        (value.value, value.start_unix_ns)
        for sample in samples
        for value in sample.values
        if (value.name, value.label) == (BYTES, TRANSMIT)
    ]
    assert sent_of[0][0] == 4 * 2**40
    assert sent_of[-1][0] == 12
    assert len({start for _, start in sent_of}) == 2
    (device,) = counted(samples)
    assert device.curves[TRANSMIT].moved[-1] == 412
    assert (device.medium, device.up, device.line_rate) == (Medium.RDMA, True, 50_000_000_000)
