"""Gather samples of devices for a second before they go to the exporter.

A series then costs its names once, not ten times.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final

from opentelemetry.proto.resource.v1.resource_pb2 import Resource

from handrail import conventions as names
from handrail.metrics.registry import MetricDef, by_label
from handrail.otlp.signals import Rejected, Retryable, Signal
from handrail.records.devices import DeviceSample
from handrail.wire.device_samples import DeviceMetrics, Tables, devices_request

MOST_WAITING: Final = 8192
"""Most samples in one batch, of all devices; later ones are dropped.

It holds 10 s of 8 GPUs at 100 Hz, in case the loop hangs so long.
"""


@dataclass(slots=True)
class DeviceBatchStats:
    """Counts of samples since start.

    ``overrun``: more than a batch holds; ``no_room``: the spool is kept for the records of requests.
    """

    taken: int = 0
    sent: int = 0
    overrun: int = 0
    no_room: int = 0
    rejected: int = 0
    faults: int = 0  # samples that make no metrics: errors of the sidecar


class DeviceBatches:
    """Gathers samples; ``sample`` takes one from any thread.

    Call ``start`` and ``shutdown`` in the loop that ``take`` belongs to.
    ``take`` is ``Exporter.take``; ``room``: whether samples may go into the spool now.
    """

    def __init__(
        self,
        resource: Resource,
        tables: Tables,
        take: Callable[[Signal, bytes], Awaitable[None]],
        room: Callable[[], bool],
        every_s: float = 1.0,
    ) -> None:
        self.stats = DeviceBatchStats()
        self._resource = resource
        self._tables = tables
        self._take = take
        self._room = room
        self._every_s = every_s
        self._guard = threading.Lock()  # guards the open batch
        self._open = DeviceMetrics(tables)
        self._stop = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def sample(self, sample: DeviceSample) -> None:
        """Take one sample; those of one device come oldest first.

        It never raises; it takes about a microsecond a value.
        """
        with self._guard:
            self.stats.taken += 1
            if self._open.samples >= MOST_WAITING:
                self.stats.overrun += 1
                return
            try:
                self._open.add(sample)
            except Exception:  # an error must not end a sampler's thread
                self.stats.faults += 1

    async def samples(self, samples: Sequence[DeviceSample]) -> bool:
        """Several at once; always takes them."""
        for sample in samples:
            self.sample(sample)
        return True

    async def start(self) -> None:
        """Begin to send."""
        self._task = asyncio.create_task(self._run())

    async def shutdown(self, drain_seconds: float = 0.0) -> None:
        """Send what waits. Works without ``start`` and twice."""
        self._stop.set()
        task, self._task = self._task, None
        if task is not None:
            await task

    async def flush(self) -> None:
        """Pass on what waits now.

        What the exporter does not take is counted and dropped: newer samples have more to show.
        """
        with self._guard:
            batch, self._open = self._open, DeviceMetrics(self._tables)
        if not batch.samples:
            return
        if not self._room():
            self.stats.no_room += batch.samples
            return
        try:
            await self._take(Signal.METRICS, devices_request(self._resource, batch))
        except Retryable:
            self.stats.no_room += batch.samples
        except Rejected:
            self.stats.rejected += batch.samples
        else:
            self.stats.sent += batch.samples

    async def _run(self) -> None:
        stopping = False
        while not stopping:
            with contextlib.suppress(asyncio.TimeoutError):
                stopping = await asyncio.wait_for(self._stop.wait(), self._every_s)
            await self.flush()


def device_rows(batches: DeviceBatches) -> list[MetricDef]:
    """Return the metrics of ``export/device_batches.py``."""
    prefix, stats = f"{names.METRIC_SIDECAR}_device_samples", batches.stats

    def dropped() -> dict[str, int]:
        return {"overrun": stats.overrun, "no_room": stats.no_room, "rejected": stats.rejected, "fault": stats.faults}

    return [
        MetricDef(prefix, "counter", "Samples of GPUs and links accepted", lambda: stats.taken),
        MetricDef(f"{prefix}_sent", "counter", "Samples passed to the exporter", lambda: stats.sent),
        MetricDef(
            f"{prefix}_dropped",
            "counter",
            "Samples that the sidecar did not send: more than a batch holds; the spool has room for requests only; never "
            "fits; a fault of Handrail",
            lambda: by_label(dropped()),
            ("reason",),
        ),
    ]
