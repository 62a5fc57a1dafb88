"""The source of link samples, and how the sidecar shows them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from builders.records import process
from doubles.sysfs import FakeSysfs
from handrail.device_counters.link import COUNTERS
from handrail.metrics.registry import Registry
from handrail.records import Role
from handrail.records.devices import DeviceSample
from handrail_sidecar.links.sampler import LinkSamplerSettings, ReadState
from handrail_sidecar.links.selection import choose
from handrail_sidecar.links.sysfs import Why
from handrail_sidecar.live_metrics.link_metrics import link_rows
from handrail_sidecar.sources.links import LinkSource, selection_text

SOON_S = 60.0
MILLISECOND = 10**6
HUNG_NS = 50 * MILLISECOND


class Taker:
    """A consumer that takes samples, or refuses them."""

    def __init__(self) -> None:
        self.samples: list[DeviceSample] = []
        self.willing = True

    async def __call__(self, samples: Sequence[DeviceSample]) -> bool:
        if self.willing:
            self.samples += samples
        return self.willing


@pytest.fixture
def sysfs(tmp_path: Path) -> FakeSysfs:
    return FakeSysfs(tmp_path)


@asynccontextmanager
async def source(sysfs: FakeSysfs, taker: Taker, clock: Callable[[], int] = lambda: 10**12) -> AsyncIterator[LinkSource]:
    """Run a link source whose clock stands, so that a slow read does not look hung."""
    settings = LinkSamplerSettings(
        root=sysfs.root,
        interval_ns=5 * MILLISECOND,
        slow_ns=20 * MILLISECOND,
        look_ns=20 * MILLISECOND,
        hung_ns=HUNG_NS,
    )
    made = LinkSource(settings, process(Role.DECODE), taker, monotonic_ns=clock)
    await made.start()
    try:
        yield made
    finally:
        sysfs.free()
        await made.shutdown(SOON_S)


async def until(condition: Callable[[], bool], made: LinkSource) -> None:
    async def wait() -> None:
        while not condition():
            await asyncio.sleep(0.002)
            await made.hand_on()

    await asyncio.wait_for(wait(), SOON_S)


def page(made: LinkSource) -> str:
    return Registry(link_rows(made)).expose("text/plain")[0].decode()


async def test_samples_are_handed_on_and_what_is_refused_is_given_again(sysfs: FakeSysfs) -> None:
    sysfs.add_port(sent=400)
    taker = Taker()
    taker.willing = False
    async with source(sysfs, taker) as made:
        await until(lambda: len(made._held) > 3, made)
        first = made._held[0]
        taker.willing = True
        await until(lambda: len(taker.samples) > 5, made)
    assert taker.samples[0] == first
    times = [sample.at_unix_ns for sample in taker.samples]
    assert times == sorted(set(times))


async def test_the_page_has_the_table_by_device(sysfs: FakeSysfs) -> None:
    sysfs.add_port(sent=4_000_000, counters={"symbol_error": 3}, hw_counters={"np_cnp_sent": 2})
    sysfs.add_nic(received=77)
    async with source(sysfs, Taker()) as made:
        await until(lambda: len([w for w in made.sampler.watches.values() if w.values]) == 2, made)
        text = page(made)
    families = {family.name: family for family in text_string_to_metric_families(text)}
    for counter in COUNTERS:
        assert f"handrail_link_{counter.name}" in families
    assert 'handrail_link_bytes_total{device="mlx5_0/1",direction="transmit",kind="rdma"} 4e+06' in text
    assert 'handrail_link_bytes_total{device="eth0",direction="receive",kind="nic"} 77.0' in text
    assert 'handrail_link_errors_total{device="mlx5_0/1",error="symbol_error",kind="rdma"} 3.0' in text
    assert 'handrail_link_line_rate_bytes_per_second{device="mlx5_0/1",kind="rdma"} 5e+10' in text
    assert 'handrail_sidecar_links{state="read"} 2.0' in text


async def test_a_device_that_hangs_or_is_gone_is_absent_not_old(sysfs: FakeSysfs, caplog: pytest.LogCaptureFixture) -> None:
    sysfs.add_port(sent=4_000_000)
    sysfs.add_nic()
    caplog.set_level(logging.INFO)
    now_ns = 10**12  # moved once the read hangs, while no other read is in progress
    async with source(sysfs, Taker(), lambda: now_ns) as made:
        await until(lambda: len([w for w in made.sampler.watches.values() if w.values]) == 2, made)
        hangs = sysfs.port() / "counters/port_rcv_data"
        sysfs.hang(hangs)
        watch = made.sampler.watches["mlx5_0/1"]
        await until(lambda: sysfs.caught(hangs), made)
        now_ns += HUNG_NS
        assert made.sampler.state(watch) is ReadState.HUNG
        await made.hand_on()
        assert 'device="mlx5_0/1"' not in page(made)
        assert 'handrail_sidecar_links{state="hung"} 1.0' in page(made)
        sysfs.let_go(hangs, 0)
        await until(lambda: made.sampler.state(watch) is ReadState.READ, made)
        await made.hand_on()
        sysfs.take_away(sysfs.root / "class/infiniband/mlx5_0")
        await until(lambda: made.sampler.state(watch) is ReadState.GONE, made)
        await made.hand_on()
        assert 'device="mlx5_0/1"' not in page(made)
        assert 'device="eth0"' in page(made)
    lines = [record.getMessage() for record in caplog.records]
    assert sum("mlx5_0/1: a read of its counters does not return" in each for each in lines) == 1
    assert sum("the sidecar reads link mlx5_0/1 again" in each for each in lines) == 1
    assert "link mlx5_0/1 is gone" in lines


async def test_a_port_whose_bytes_cannot_be_read_is_reported_once_with_the_cure(
    sysfs: FakeSysfs, caplog: pytest.LogCaptureFixture
) -> None:
    folder = sysfs.add_port()
    sysfs.take_away(folder / "counters")
    caplog.set_level(logging.INFO)
    async with source(sysfs, Taker()) as made:
        await until(lambda: bool(made.sampler.watches) and made.sampler.watches["mlx5_0/1"].stats.reads > 10, made)
    lines = [record.getMessage() for record in caplog.records if "has no byte counters" in record.getMessage()]
    assert len(lines) == 1
    assert "newer firmware" in lines[0]


async def test_shutdown_without_start_and_twice(sysfs: FakeSysfs) -> None:
    made = LinkSource(LinkSamplerSettings(root=sysfs.root), process(Role.DECODE), Taker())
    await made.shutdown(0.1)
    await made.start()
    await made.shutdown(SOON_S)
    await made.shutdown(SOON_S)


def test_the_sampled_links_are_logged_in_one_line(sysfs: FakeSysfs) -> None:
    assert "no RDMA adapter or its driver is not loaded" in selection_text(choose(sysfs.root))
    sysfs.add_nic()
    for number in range(12):
        sysfs.add_nic(f"veth{number:02d}", real=False)
    line = selection_text(choose(sysfs.root))
    assert line.startswith("links read: eth0; ")
    assert line.endswith("veth06, veth07 and 4 more (links.devices selects what to read)")


def test_a_class_that_may_not_be_listed(sysfs: FakeSysfs) -> None:
    chosen = choose(sysfs.root)
    assert chosen.rdma is Why.ABSENT
    assert "is sysfs mounted?" in selection_text(chosen)
