"""A whole sidecar process in front of an engine, while a stream is still open.

The tests check what it shows and sends.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric
from prometheus_client.parser import text_string_to_metric_families

from doubles.otlp import Keeping, until
from handrail.conventions import SCOPE_METRICS
from handrail.otlp.receiver.server import OtlpServer
from handrail.otlp.signals import Signal
from harness.proxy import SSE_HEAD, Peer, Upstream, chunk, client, event, post

MODEL, EDGE = ("model_name", "m"), ("role", "edge")


@contextlib.asynccontextmanager
async def sidecar(tmp_path: Path, upstream: int, backend: str) -> AsyncIterator[dict[str, str]]:
    """Yield the addresses of a sidecar with objectives of its own."""
    ready = tmp_path / "ready.json"
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "handrail_cli.main", "sidecar", "--role", "edge", "--listen", "127.0.0.1:0"),
        *("--upstream", f"http://127.0.0.1:{upstream}", "--collector", backend, "--ready-file", str(ready)),
        *("--otlp-metrics-endpoint", backend, "--otlp-metrics-interval", "1s", "--slo-ttft", "1ms", "--drain", "30s"),
    )
    try:
        while not ready.exists():
            assert child.returncode is None
            await asyncio.sleep(0.02)
        yield json.loads(ready.read_text())["addresses"]
    finally:
        child.send_signal(signal.SIGTERM)
        assert await child.wait() == 0


async def test_a_stream_that_is_not_over_is_on_the_page_and_in_what_is_sent(tmp_path: Path) -> None:
    async def endless(peer: Peer) -> None:
        await peer.request()
        await peer.send(SSE_HEAD)
        await asyncio.sleep(0.01)  # longer than slo.ttft
        for text in "abcd":
            await peer.send(chunk(event(text)))
            await asyncio.sleep(0.002)
        await peer.gone()

    kept = Keeping()
    server = OtlpServer(kept, http=("127.0.0.1", 0), loopback_only=True)
    await server.start()
    assert server.http_address is not None
    backend = f"http://127.0.0.1:{server.http_address[1]}"
    try:
        async with Upstream(endless) as upstream, sidecar(tmp_path, upstream.port, backend) as addresses:
            async with client(int(addresses["proxy"].rpartition(":")[2])) as peer:
                await peer.send(post(b'{"model":"m","prompt":"p","stream":true}'))
                await until(lambda: "handrail.stream_gap_seconds" in with_points(kept))
                gaps = ("handrail_stream_gap_seconds_count", frozenset({MODEL, EDGE}))
                while (page := await scraped(addresses["admin"])).get(gaps) != 3:  # noqa: ASYNC110 - upstream and sidecar may still be at it
                    await asyncio.sleep(0.02)
            assert page["handrail_ttft_seconds_count", frozenset({MODEL, EDGE, ("scope", "edge")})] == 1
            assert page["handrail_slo_requests_total", frozenset({MODEL, EDGE, ("slo", "ttft"), ("met", "false")})] == 1
            assert page["handrail_requests_total", frozenset({MODEL, EDGE, ("outcome", "ok")})] == 0
            assert page["handrail_requests_open", frozenset({EDGE})] == 1
            assert page["handrail_slo_threshold_seconds", frozenset({("slo", "ttft")})] == 0.001
        # the last one is sent when the sidecar ends, and holds what the cut stream came to
        (first,) = with_points(kept)["gen_ai.server.time_to_first_token"].exponential_histogram.data_points
        assert first.count == 1
        ended = with_points(kept)["handrail.requests"].sum.data_points
        assert sum(point.as_double for point in ended) == 1
    finally:
        await server.shutdown(1)


async def scraped(address: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    async with aiohttp.ClientSession() as session, session.get(f"http://{address}/metrics") as response:
        families = text_string_to_metric_families(await response.text())
        return {(each.name, frozenset(each.labels.items())): each.value for family in families for each in family.samples}


def with_points(kept: Keeping) -> dict[str, Metric]:
    """Return the newest of each metric that has points."""
    found: dict[str, Metric] = {}
    for kind, payload in kept.taken:
        if kind is Signal.METRICS:
            for entry in ExportMetricsServiceRequest.FromString(payload).resource_metrics:
                for scope in entry.scope_metrics:
                    if scope.scope.name == SCOPE_METRICS:
                        found |= {each.name: each for each in scope.metrics if each.ByteSize() and _points(each)}
    return found


def _points(metric: Metric) -> int:
    return len(metric.sum.data_points) + len(metric.gauge.data_points) + len(metric.exponential_histogram.data_points)
