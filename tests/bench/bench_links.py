"""Measure what links cost the sidecar and the collector.

The sidecar reads 17 devices ten times a second. The collector attributes an hour of hand-offs by the counters of their hosts.
The files lie in memory: the counter of a real adapter asks its firmware, which takes wall time and hardly any CPU time.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from random import Random
from typing import Any

TESTS = Path(__file__).parents[1]
_SECONDS = 10.0
_HAND_OFFS = 20_000
_BUDGET_CORE = 1.0
_BUDGET_EVENTS_S = 2.0


def run() -> list[dict[str, Any]]:
    """Return the figures: percent of a core, and seconds."""
    sys.path.insert(0, str(TESTS))
    return [*_sampler(), *_fetch_events()]


def _sampler() -> list[dict[str, Any]]:
    from builders.links import process
    from doubles.sysfs import FakeSysfs
    from handrail_sidecar.links.sampler import LinkSampler, LinkSamplerSettings

    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        sysfs = FakeSysfs(Path(folder))
        for number in range(8):
            sysfs.add_port(f"mlx5_{number}")
            sysfs.add_nic(f"eth{number}")
        sysfs.add_loopback()
        figures = []
        for root, name in ((sysfs.root, "17 devices"), (Path("/sys"), "the interfaces of this host")):
            sampler = LinkSampler(LinkSamplerSettings(root=root), process("h"))
            sampler.start()
            time.sleep(2.0)
            began, cpu = time.monotonic(), time.process_time()
            while time.monotonic() - began < _SECONDS:
                time.sleep(0.5)
                sampler.take()
            used = 100 * (time.process_time() - cpu) / (time.monotonic() - began)
            sampler.stop(1.0)
            budget = _BUDGET_CORE if root == sysfs.root else None
            figures.append(_figure(f"links: {name} at 10 Hz", used, "% of a core", budget))
    return figures


def _fetch_events() -> list[dict[str, Any]]:
    from builders.links import ETH, RDMA, Host, S, devices, hand_off
    from handrail_collector.links.handoffs import EngineLink
    from handrail_collector.links.report import link_lines

    random = Random(1)
    links = [EngineLink(f"p{p}:8000", f"d{d}:8000", f"p{p}", f"d{d}") for p in range(4) for d in range(4)]
    made = [hand_off(3600 * random.random(), 0.07, link=random.choice(links)) for _ in range(_HAND_OFFS)]
    hosts = [
        Host(host=f"{role}{number}", device=device, sent=lambda at: 1e6 * at, received=lambda at: 1e6 * at)
        for role in "pd"
        for number in range(4)
        for device in (RDMA, ETH)
    ]
    read = devices(hosts, 3600.0, every_s=1.0)
    assert read[0].curves["receive"].at_ns[-1] - read[0].curves["receive"].at_ns[0] == 3600 * S
    began = time.process_time()
    lines = link_lines(sorted(made, key=lambda one: one.started_unix_ns), read)
    return [
        _figure(
            f"links: {len(lines)} told by {_HAND_OFFS:,} hand-offs of an hour", time.process_time() - began, "s", _BUDGET_EVENTS_S
        )
    ]


def _figure(name: str, value: float, unit: str, budget: float | None) -> dict[str, Any]:
    return {
        "name": name,
        "value": round(value, 3),
        "unit": unit,
        "budget": budget,
        "ratio": None if budget is None else round(value / budget, 3),
        "met": None if budget is None else value <= budget,
    }
