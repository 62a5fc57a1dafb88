"""A real Prometheus that reads a sidecar's page.

Quantiles are within a tenth, exemplars are there, and every series is read.
"""

from __future__ import annotations

import asyncio
import json
import random
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager, suppress
from math import ceil
from pathlib import Path
from typing import Any

import pytest

from builders.plugin import fetch
from handrail.metrics.registry import Registry
from handrail.runtime.admin_http import AdminServer
from handrail_sidecar.catalogue import everything, sidecar_metrics
from handrail_sidecar.components import make_sidecar
from handrail_sidecar.sources.plugin_socket import PluginSource
from harness.alert_tools import needs_prometheus
from harness.ports import held_port
from harness.proxy import DEADLINE_S

pytestmark = needs_prometheus

S = 10**9


@asynccontextmanager
async def prometheus(folder: Path, target: str, port: int) -> AsyncIterator[str]:
    """Yield the address of a Prometheus that scrapes ``target``.

    It is ended by its own pid.
    """
    address = f"127.0.0.1:{port}"
    config = folder / "prometheus.yml"
    config.write_text(
        "global: {scrape_interval: 2s, scrape_timeout: 2s}\n"
        f"scrape_configs: [{{job_name: sidecar, static_configs: [{{targets: ['{target}']}}]}}]\n"
    )
    with (folder / "prometheus.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            "prometheus",
            f"--config.file={config}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address={address}",
            "--enable-feature=exemplar-storage",
            stdout=log,
            stderr=log,
        )
    try:
        yield address
    finally:
        with suppress(ProcessLookupError):
            process.terminate()
        try:
            await asyncio.wait_for(process.wait(), 60)
        except asyncio.TimeoutError:
            process.kill()
            await process.wait()


async def ask(address: str, path: str, **query: str) -> Any:
    def get() -> Any:
        with urllib.request.urlopen(f"http://{address}/api/v1/{path}?{urllib.parse.urlencode(query)}", timeout=60) as answer:
            return json.load(answer)["data"]

    return await asyncio.to_thread(get)


async def value(address: str, query: str) -> float:
    """Return the value of the one series, as soon as there is one."""

    async def found() -> float:
        while True:
            with suppress(OSError):
                result = (await ask(address, "query", query=query))["result"]
                if result:
                    (series,) = result
                    return float(series["value"][1])
            await asyncio.sleep(0.1)

    return await asyncio.wait_for(found(), 3 * DEADLINE_S)


async def test_a_real_prometheus_reads_the_page(tmp_path: Path) -> None:
    made, draw = make_sidecar(everything()), random.Random(7)
    raw = sorted(min(round(draw.lognormvariate(19.5, 1.5)), 100 * S) for _ in range(3000))
    for ttft_ns in draw.sample(raw, len(raw)):
        made.live.first_token("m", ttft_ns, "ab" * 16)
    gaps = sorted(max(1_000_001, round(draw.lognormvariate(17, 1))) for _ in range(5000))
    made.live.gaps_of("m").extend(gaps)
    plugin = made.find(PluginSource)
    assert plugin is not None
    plugin.hand_offs.take(fetch(0, failure="handshake_failed", done_ms=None, ranks_done=0, trace="t7"))
    admin = AdminServer("127.0.0.1", 0, Registry(made.metrics), lambda: "")
    await admin.start()
    held = ExitStack()
    try:
        async with prometheus(tmp_path, f"127.0.0.1:{admin.address[1]}", held.enter_context(held_port())) as address:
            assert await value(address, "handrail_ttft_seconds_count") == len(raw)
            for name, values in (("handrail_ttft_seconds", raw), ("handrail_stream_gap_seconds", gaps)):
                for q in (0.5, 0.99, 0.999):
                    exact = values[max(1, ceil(q * len(values) - 1e-9)) - 1] / S
                    read = await value(address, f"histogram_quantile({q}, sum by (le) ({name}_bucket))")
                    assert exact / 1.1 <= read <= exact * 1.1, (name, q)
            above = await value(
                address, '1 - handrail_ttft_seconds_bucket{le="0.5"} / on (model_name) handrail_ttft_seconds_count'
            )
            assert above == pytest.approx(sum(ns > S // 2 for ns in raw) / len(raw))
            known = set(await ask(address, "label/__name__/values"))
            names = {name for metric in sidecar_metrics() if metric.born for name in metric.series}
            assert names <= known | _DCGM
            now = (await ask(address, "query", query="time()"))["result"][0]
            window = {"start": str(float(now) - 10**9), "end": str(float(now) + 60)}
            shown = await ask(address, "query_exemplars", query="handrail_kv_fetches_total", **window)
            (failed,) = [each for each in shown if each["seriesLabels"].get("reason") == "handshake_failed"]
            assert failed["exemplars"][0]["labels"] == {"trace_id": b"t7".hex().rjust(32, "0")}
    finally:
        held.close()
        await admin.shutdown()


_DCGM = {"handrail_sidecar_gpu_scrapes_total", "handrail_sidecar_gpu_scrape_failures_total"}
"""Metrics of a sidecar that reads dcgm-exporter instead of NVML."""
