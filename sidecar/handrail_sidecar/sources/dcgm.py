"""The DCGM source: reads dcgm-exporter's page instead of NVML.

It serves where the sidecar has no driver and a DaemonSet has one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from typing import Final

from handrail.records import Process, ProcessEvent, ProcessEventKind, Source
from handrail.records.devices import Device, DeviceSample, DeviceValue
from handrail_sidecar.gpu.dcgm import DcgmPage
from handrail_sidecar.gpu.state import Deliver
from handrail_sidecar.sources.engine_metrics import MetricsSettings, NoPageError, fetch_once

log = logging.getLogger(__name__)

_STALE: Final = 3  # intervals after which a value is no longer shown


class DcgmSource:
    """Source; an exporter that does not answer is a state, logged once."""

    def __init__(
        self,
        settings: MetricsSettings,
        process: Process,
        tell: Callable[[ProcessEvent], None],
        deliver: Deliver | None = None,
        *,
        now_unix_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self.page = DcgmPage(process, now_unix_ns())
        self.up = False
        self.scrapes = 0
        self.failures = 0
        self.samples: list[DeviceSample] = []
        self._settings = settings
        self._process = process
        self._tell = tell
        self._deliver = deliver
        self._now = now_unix_ns
        self._paused: set[str] = set()
        self._task: asyncio.Task[None] | None = None
        self._stop = asyncio.Event()

    async def start(self) -> None:
        """Begin to read; an exporter that is not there yet is a state, not an error."""
        self._task = asyncio.create_task(self._run())

    async def shutdown(self, drain_seconds: float) -> None:
        self._stop.set()
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def scrape(self) -> None:
        """Read the page once and record the result; skipped while the source reads itself."""
        self.scrapes += 1
        at = self._now()
        try:
            page = await fetch_once(self._settings)
        except NoPageError as problem:
            self.failures += 1
            if self.up or self.scrapes == 1:
                log.warning("no GPU metrics from %s: %s; the sidecar retries", self._settings.url, problem)
            self.up = False
            return
        self.samples, self.up = self.page.read(page, at), True
        for sample in self.samples:
            if self._deliver is not None:
                self._deliver(sample)
        for device, code in self.page.news:
            self._event(ProcessEventKind.GPU_XID, at, f"GPU {device.index} ({device.key}): Xid {code}")
        self._tell_paused()

    def fresh(self) -> list[tuple[Device, DeviceValue]]:
        """What the last page held; nothing once that is old."""
        oldest = self._now() - int(_STALE * self._settings.interval_s * 1e9)
        return [(sample.device, value) for sample in self.samples if sample.at_unix_ns > oldest for value in sample.values]

    async def _run(self) -> None:
        while not self._stop.is_set():
            try:
                await self.scrape()
            except Exception:  # a page is external input
                self.failures += 1
                log.exception("reading a page of dcgm-exporter failed")
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._stop.wait(), self._settings.interval_s)

    def _tell_paused(self) -> None:
        for key in self.page.paused.keys() - self._paused:
            paused = self.page.paused[key]
            after = f" after Xid {paused.xid}" if paused.xid else ""
            log.warning(
                "GPU %s: DCGM's profiling values have stopped%s while the others continue; restart the exporter", key, after
            )
        for key in self._paused - self.page.paused.keys():
            log.info("GPU %s: DCGM's profiling values are back", key)
        self._paused = set(self.page.paused)

    def _event(self, kind: ProcessEventKind, at_unix_ns: int, detail: str) -> None:
        self._tell(ProcessEvent(process=self._process, source=Source.DCGM, at_unix_ns=at_unix_ns, kind=kind, detail=detail))
