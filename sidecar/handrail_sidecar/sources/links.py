"""The source of link samples: passes on what the sampler's threads read.

It logs once what cannot be read and why.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from opentelemetry.trace import Tracer

from handrail.device_counters.link import BY_NAME, BYTES
from handrail.records import Process
from handrail.records.devices import DeviceSample
from handrail.telemetry.tracing import NO_TRACES
from handrail_sidecar.links.device_state import SECOND, DeviceState
from handrail_sidecar.links.sampler import LinkSampler, LinkSamplerSettings, ReadState
from handrail_sidecar.links.selection import SelectedLinks
from handrail_sidecar.links.sysfs import Why

log = logging.getLogger(__name__)

HAND_ON_S: Final = 0.5
_STOP_S: Final = 1.0
_MOST_HELD: Final = 20_000
_NAMED: Final = 8

Take = Callable[[Sequence[DeviceSample]], Awaitable[bool]]
"""Takes samples over; False when it cannot now.

The same samples are then offered again. It never raises.
"""


class LinkSource:
    """Source of links.

    A host without RDMA, or without anything to read, is no error: it is logged once.
    """

    def __init__(
        self,
        settings: LinkSamplerSettings,
        process: Process,
        take: Take,
        *,
        now_unix_ns: Callable[[], int] = time.time_ns,
        monotonic_ns: Callable[[], int] = time.monotonic_ns,
        tracer: Tracer = NO_TRACES,
    ) -> None:
        self.sampler = LinkSampler(settings, process, now_unix_ns=now_unix_ns, monotonic_ns=monotonic_ns, tracer=tracer)
        self.dropped = 0  # samples that were not taken over in time
        self._take = take
        self._monotonic = monotonic_ns
        self._held: list[DeviceSample] = []
        self._states: dict[str, ReadState] = {}
        self._hung_since: dict[str, int] = {}
        self._reported: SelectedLinks | None = None
        self._reported_missing: set[str] = set()
        self._task: asyncio.Task[None] | None = None
        self._stop = asyncio.Event()

    async def start(self) -> None:
        """Begin to sample; never fails: what cannot be read is a state, and logged."""
        self.sampler.start()
        self._task = asyncio.create_task(self._run())

    async def shutdown(self, drain_seconds: float) -> None:
        task, self._task = self._task, None
        if task is None:
            return
        self._stop.set()
        await task
        if not await asyncio.to_thread(self.sampler.stop, min(drain_seconds, _STOP_S)):
            log.warning("a read of a link has not returned; its thread stays behind")
        await self.hand_on()

    async def hand_on(self) -> None:
        """Pass on the samples since the last call, and log changes."""
        self._look()
        self._held += self.sampler.take()
        too_many = max(0, len(self._held) - _MOST_HELD)
        self.dropped += too_many
        del self._held[:too_many]
        if self._held and await self._take(self._held):
            self._held.clear()

    async def _run(self) -> None:
        while not self._stop.is_set():
            await self.hand_on()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._stop.wait(), HAND_ON_S)

    def _look(self) -> None:
        """Log what is read, and each change of state of a device, once."""
        chosen = self.sampler.chosen
        if chosen is not None and chosen != self._reported:
            log.info("%s", selection_text(chosen))
            self._reported = chosen
        for key, watch in list(self.sampler.watches.items()):
            self._tell_state(key, watch, self.sampler.state(watch))
            if key not in self._reported_missing and watch.stats.reads:
                self._reported_missing.add(key)
                self._tell_missing(key, watch)

    def _tell_state(self, key: str, watch: DeviceState, now: ReadState) -> None:
        before = self._states.get(key, ReadState.READ)
        self._states[key] = now
        if now is before:
            return
        if now is ReadState.HUNG:
            self._hung_since[key] = watch.reading_since_ns or self._monotonic()
            log.warning("link %s: a read of its counters does not return; the sidecar still reads the other links", key)
        elif now is ReadState.GONE:
            log.warning("link %s is gone", key)
        elif before is ReadState.HUNG:
            hung_s = (self._monotonic() - self._hung_since.pop(key, self._monotonic())) / SECOND
            log.info("the sidecar reads link %s again; a read hung for %.1f s", key, hung_s)
        else:
            log.info("link %s is back", key)

    def _tell_missing(self, key: str, watch: DeviceState) -> None:
        """Log a port whose bytes cannot be read.

        Nothing else shows what moved over it.
        """
        if any(name == BYTES for name, _ in watch.values):
            return
        reasons = sorted({why.value for why in watch.missing.values()})
        log.warning("link %s has no byte counters (%s): %s", key, ", ".join(reasons), BY_NAME[BYTES].absent)


def selection_text(chosen: SelectedLinks) -> str:
    """One line for a person: what is read, what is not, and how to get it."""
    keys = ", ".join(reader.key for reader in chosen.readers)
    parts = [f"links read: {keys}" if keys else "no links to read"]
    if chosen.rdma is not None:
        reasons = {Why.ABSENT: "no RDMA adapter or its driver is not loaded", Why.DENIED: "no permission to list RDMA adapters"}
        parts.append(reasons.get(chosen.rdma, f"RDMA adapters cannot be listed ({chosen.rdma.value})"))
    if chosen.nics is not None:
        parts.append(f"network interfaces cannot be listed ({chosen.nics.value}); is sysfs mounted? Set links.sysfs")
    if chosen.left_out:
        more = len(chosen.left_out) - _NAMED
        names = ", ".join(chosen.left_out[:_NAMED]) + (f" and {more} more" if more > 0 else "")
        parts.append(f"not read: {names} (links.devices selects what to read)")
    return "; ".join(parts)
