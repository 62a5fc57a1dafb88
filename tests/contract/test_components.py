"""The life of every component of a sidecar, and the one entry that adds a source."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from handrail.config.types import Address, Duration, Url
from handrail.metrics.registry import MetricDef, Registry
from handrail.records import Role, Sink
from handrail.runtime.process import start
from handrail_sidecar.app import start_components
from handrail_sidecar.catalogue import everything
from handrail_sidecar.components import COMPONENTS, ComponentSpec, Sidecar, make_sidecar
from handrail_sidecar.settings import GpuConfig, LogConfig, Sampling, SidecarConfig

ENTRIES = {entry.name: entry for entry in COMPONENTS}


def config(folder: Path) -> SidecarConfig:
    """Every component at an edge; its files are in ``folder`` and no port is fixed."""
    (folder / "engine.log").touch()
    return replace(
        everything(),
        role=Role.EDGE,
        plugin_socket=folder / "engine.sock",
        log=LogConfig(files=(str(folder / "engine.log"),)),
        otlp_http=Address("127.0.0.1", 0),
        admin=Address("127.0.0.1", 0),
    )


def component(name: str, folder: Path) -> Any:
    wanted = config(folder)
    if name == "dcgm":
        wanted = replace(wanted, gpu=GpuConfig(sample=Sampling.ON, dcgm_url=Url("http://127.0.0.1:9/metrics")))
    if name == "links":
        wanted = replace(wanted, links=replace(wanted.links, sample=Sampling.ON, sysfs=folder))
    return next(each for entry, each in make_sidecar(wanted).components if entry.name == name)


@pytest.mark.parametrize("name", ENTRIES)
async def test_shutdown_works_without_start_and_twice(name: str, tmp_path: Path) -> None:
    made = component(name, tmp_path)
    await made.shutdown(0.0)
    await made.shutdown(0.0)


@pytest.mark.parametrize("name", ENTRIES)
async def test_a_started_component_ends_and_leaves_no_task(name: str, tmp_path: Path) -> None:
    before = asyncio.all_tasks()
    made = component(name, tmp_path)
    await made.start()
    await made.shutdown(0.0)
    await made.shutdown(0.0)
    await asyncio.sleep(0)  # a cancelled task ends at the loop's next turn
    assert asyncio.all_tasks() == before


def test_creation_needs_no_event_loop_and_binds_nothing(tmp_path: Path) -> None:
    made = make_sidecar(config(tmp_path))
    assert not (tmp_path / "engine.sock").exists()
    assert [entry.name for entry, _ in made.components] == [name for name in ENTRIES if name not in ("dcgm", "links")]


@dataclass
class ClockSource:
    """A source as someone would add it.

    It makes a record at its start and one at its end.
    """

    sink: Sink
    life: list[str] = field(default_factory=list)

    async def start(self) -> None:
        self.life.append("start")

    async def shutdown(self, drain_seconds: float) -> None:
        self.life.append(f"shutdown {drain_seconds:g}")


async def test_a_source_is_added_by_one_entry(tmp_path: Path) -> None:
    def make(sidecar: Sidecar) -> ClockSource:
        return ClockSource(sidecar.exporter.sink)

    def rows(_: Sidecar, source: ClockSource) -> list[MetricDef]:
        return [MetricDef("handrail_clock_starts", "counter", "Starts", lambda: float(len(source.life)))]

    entry = ComponentSpec("clock", make, rows, lambda source: {"clock": "here"})
    sidecar = make_sidecar(replace(config(tmp_path), drain=Duration(10_000_000)), (*COMPONENTS, entry))
    source = sidecar.find(ClockSource)
    assert source is not None
    async with AsyncExitStack() as stack:
        addresses = await start_components(stack, sidecar)
        page = Registry(sidecar.metrics).expose("text/plain")[0].decode()
        assert "handrail_clock_starts_total 1.0" in page
        assert addresses["clock"] == "here"
    assert source.life == ["start", "shutdown 0.01"]


async def test_a_component_that_fails_to_start_ends_those_before_it_in_reverse() -> None:
    life: list[str] = []

    @dataclass
    class Part:
        name: str
        fails: str = ""

        async def start(self) -> None:
            if self.fails == "start":
                raise OSError("port taken")
            life.append(f"{self.name} started")

        async def shutdown(self, drain_seconds: float) -> None:
            life.append(f"{self.name} ended")
            if self.fails == "shutdown":
                raise RuntimeError("does not end cleanly")

    async def run() -> None:
        async with AsyncExitStack() as stack:
            for part in (Part("a"), Part("b", "shutdown"), Part("c"), Part("d", "start")):
                await start(stack, part.name, part, 1.0)

    with pytest.raises(OSError, match="port taken"):
        await run()
    assert life == ["a started", "b started", "c started", "c ended", "b ended", "a ended"]
