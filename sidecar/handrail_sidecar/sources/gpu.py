"""The GPU source: runs the sampler beside the event loop.

It logs once which values the GPUs do not provide and how to get them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Final

from handrail.records import Process, ProcessEvent
from handrail.records.devices import DeviceSample
from handrail_sidecar.gpu.sampler import Sampler
from handrail_sidecar.gpu.state import Deliver, SamplerSettings
from handrail_sidecar.gpu.view import Absent, absences

log = logging.getLogger(__name__)

LOOK_S: Final = 1.0
_SETTLED_LOOKS: Final = 3  # looks after which a GPU has shown which values it does not provide


class NvmlSource:
    """Source of NVML samples.

    No driver, no GPU and no nvidia-ml-py are states, not errors. Each is logged once and checked again.
    ``deliver`` takes samples in the threads that read them; ``tell`` takes events in the loop's thread.
    """

    def __init__(
        self,
        settings: SamplerSettings,
        process: Process,
        tell: Callable[[ProcessEvent], None],
        deliver: Deliver | None = None,
        *,
        sampler: Callable[..., Sampler] = Sampler,
    ) -> None:
        self.sampler = sampler(settings, process, deliver or _nobody, self._event)
        self._tell = tell
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._stop = asyncio.Event()
        self._reported: set[tuple[str, str]] = set()  # (counter, product)
        self._looks = 0
        self._session = 0

    async def start(self) -> None:
        """Begin to sample; never fails: the sampler reports what is missing."""
        self._loop = asyncio.get_running_loop()
        self.sampler.start()
        self._task = asyncio.create_task(self._run())

    async def shutdown(self, drain_seconds: float) -> None:
        task, self._task = self._task, None
        if task is None:
            return
        self._stop.set()
        await task
        await asyncio.to_thread(self.sampler.stop, min(drain_seconds, 1.0))

    def _event(self, event: ProcessEvent) -> None:
        """Take an event in a thread of the sampler."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._tell, event)

    async def _run(self) -> None:
        while not self._stop.is_set():
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._stop.wait(), LOOK_S)
            self._look()

    def _look(self) -> None:
        if self._session != self.sampler.state.sessions:
            self._session, self._looks = self.sampler.state.sessions, 0
        self._looks += 1
        if self._looks < _SETTLED_LOOKS:
            return
        for line in devices_text(absences(self.sampler.readers.values(), self.sampler.xid_watch), self._reported):
            log.info("%s", line)


def devices_text(absent: list[Absent], statements: set[tuple[str, str]]) -> list[str]:
    """One line for each counter and product, each once: ``statements`` remembers them."""
    lines = []
    for each in absent:
        if (each.counter, each.device.product) in statements:
            continue
        statements.add((each.counter, each.device.product))
        alike = [one for one in absent if (one.counter, one.device.product) == (each.counter, each.device.product)]
        which = ", ".join(str(one.device.index) for one in alike)
        lines.append(f"GPU {which} ({each.device.product}) gives no {each.counter}: {each.why}. Absent {each.instead}")
    return lines


def _nobody(_: DeviceSample) -> None:
    """Drop samples that are only shown on /metrics."""
