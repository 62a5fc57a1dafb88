"""Checks of a running sidecar's surroundings, each logged once.

Can the collector be reached, and does the engine send its spans?
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, Final

from handrail import conventions as names
from handrail.metrics.registry import MetricDef
from handrail.otlp.client import OtlpClient
from handrail_sidecar.proxy.stats import ProxyStats
from handrail_sidecar.sources.otlp_tap import OtlpTap

log = logging.getLogger(__name__)

CHECK_WINDOW_S: Final = 30.0
"""Length of one window of the check that the engine exports spans.

Requests in two of these windows and no span from the engine mean that its exporter is not set up (case C05).
"""


class _Check:
    """A check that runs beside the work, until it is done or the process stops."""

    def __init__(self) -> None:
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def shutdown(self, drain_seconds: float = 0.0) -> None:
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def _run(self) -> Coroutine[Any, Any, None]:
        raise NotImplementedError


class CollectorCheck(_Check):
    """Logs in one line at start why the collector cannot be reached.

    The exporter goes on trying.
    """

    def __init__(self, client: OtlpClient) -> None:
        super().__init__()
        self._client = client

    async def _run(self) -> None:
        try:
            problem = await self._client.check()
        finally:
            await self._client.close()
        if problem:
            log.warning("collector %s: %s (spans wait in the spool)", self._client.settings.endpoint, problem)


class SpanWatch(_Check):
    """Notices an engine that serves requests but sends no spans to a waiting tap."""

    def __init__(self, proxied: ProxyStats, tap: OtlpTap) -> None:
        super().__init__()
        self.silent_windows = 0
        self._proxied = proxied
        self._tap = tap
        self._requests = 0
        self._spans = 0

    def look(self, requests: int, spans: int) -> bool:
        """Take the running totals once a window.

        Returns True when the second silent window in a row has just ended.
        """
        silent = requests > self._requests and spans == self._spans
        self._requests, self._spans = requests, spans
        self.silent_windows = self.silent_windows + 1 if silent else 0
        return self.silent_windows == 2

    def rows(self) -> list[MetricDef]:
        """Rows of /metrics."""
        return [
            MetricDef(
                f"{names.METRIC_SIDECAR}_engine_silent",
                "gauge",
                "1 while requests pass and the engine's exporter sends no spans",
                lambda: float(self.silent_windows >= 2),
            )
        ]

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(CHECK_WINDOW_S)
            if self.look(self._proxied.requests - self._proxied.passed, self._tap.spans_seen):
                log.warning(
                    "the engine sends no spans: requests pass, but the tap receives nothing; start vLLM with "
                    "--otlp-traces-endpoint "
                    "(grpc://%s) and the packages that it needs for tracing; if clients send no traceparent, start the edge's "
                    "sidecar with --new-traces sampled",
                    self._tap.grpc_address or self._tap.http_address,
                )
