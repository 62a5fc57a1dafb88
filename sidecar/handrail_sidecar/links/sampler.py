"""Read links many times a second, off the event loop.

A driver that is slow or never answers delays no other device (``sampling/worker.py``) and nothing else of the sidecar.
A read of sysfs cannot be cancelled: at worst there is a thread for each device.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Final

from opentelemetry.trace import Tracer

from handrail.records import Process
from handrail.records.devices import DeviceSample
from handrail.telemetry.tracing import NO_TRACES
from handrail_sidecar.links.device_state import SECOND, DeviceState
from handrail_sidecar.links.reading import LinkReader
from handrail_sidecar.links.selection import MOST_DEVICES, SelectedLinks, choose
from handrail_sidecar.sampling.worker import Reading, Task, WorkerPool, trace_late

log = logging.getLogger(__name__)

_LEAST_LIMIT_NS: Final = 50_000_000
_LIMIT_PERIODS: Final = 2.5
"""Time that a read may take, in periods.

The other devices' counters lose nothing while they wait for that.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSamplerSettings:
    """Settings of the link sampler.

    ``interval_ns``: period of the bytes. ``slow_ns``: of everything else.
    ``look_ns``: period of the search for devices that came or went.
    ``hung_ns``: a read that has not returned for so long counts as hung.
    """

    root: Path = Path("/sys")
    wanted: tuple[str, ...] = ()
    interval_ns: int = 100_000_000
    slow_ns: int = 5 * SECOND
    look_ns: int = 10 * SECOND
    hung_ns: int = 2 * SECOND


class ReadState(str, Enum):
    """State of a device's reads."""

    READ = "read"
    HUNG = "hung"
    GONE = "gone"


class _LinkRead(Task):
    """One device that is read again and again.

    ``call`` returns whether it is still there.
    """

    __slots__ = ("_read", "state")

    def __init__(self, state: DeviceState, read: Callable[[DeviceState], bool], interval_ns: int) -> None:
        super().__init__(state.reader.key, interval_ns, max(_LEAST_LIMIT_NS, int(interval_ns * _LIMIT_PERIODS)))
        self.state = state
        self._read = read

    def call(self) -> bool:
        return self._read(self.state)


class LinkSampler:
    """Samples the links of this host.

    ``start`` begins to look for devices and to read them. ``take`` returns the samples since the last call. ``stop`` ends it.
    ``watches`` is by device key. All threads are daemons, since one that hangs in a driver would keep the process alive.
    """

    def __init__(
        self,
        settings: LinkSamplerSettings,
        process: Process,
        *,
        now_unix_ns: Callable[[], int] = time.time_ns,
        monotonic_ns: Callable[[], int] = time.monotonic_ns,
        tracer: Tracer = NO_TRACES,
    ) -> None:
        self.chosen: SelectedLinks | None = None  # None until the devices have been listed once
        self.watches: dict[str, DeviceState] = {}
        self.faults = 0  # our own errors, while devices were listed or read
        self._settings = settings
        self._process = process
        self._now = now_unix_ns
        self._monotonic = monotonic_ns
        self._tracer = tracer
        self._stop = threading.Event()
        self.pool = WorkerPool("handrail-links", self._taken, now_ns=monotonic_ns, most_hanging=MOST_DEVICES)
        self._tasks: dict[str, _LinkRead] = {}
        self._scanner = threading.Thread(target=self._scan, name="handrail-scan", daemon=True)

    def start(self) -> None:
        self.pool.start()
        self._scanner.start()

    def stop(self, timeout_s: float) -> bool:
        """Stop, and return whether every thread has ended.

        A thread that hangs in a driver is left behind.
        """
        self._stop.set()
        until = time.monotonic() + timeout_s
        threads = [*self.pool.threads(), self._scanner]
        self.pool.stop(0.0)
        for thread in threads:
            if thread.is_alive():
                thread.join(max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread in threads)

    def take(self) -> list[DeviceSample]:
        """Return the samples since the last call, of each device in order."""
        return [sample for watch in list(self.watches.values()) for sample in watch.take()]

    def state(self, watch: DeviceState) -> ReadState:
        """Return the state of a device's reads."""
        since = watch.reading_since_ns
        if since is not None and self._monotonic() - since >= self._settings.hung_ns:
            return ReadState.HUNG
        return ReadState.GONE if watch.gone else ReadState.READ

    def _scan(self) -> None:
        while True:
            try:
                chosen = choose(self._settings.root, self._settings.wanted)
                self._follow(chosen.readers)
                self.chosen = chosen
            except Exception:
                self._fault("listing the links of this host failed")
            if self._stop.wait(self._settings.look_ns / SECOND):
                return

    def _follow(self, readers: Sequence[LinkReader]) -> None:
        """Read each device that is not being read: a new one, or one that came back."""
        for reader in readers:
            watch = self.watches.get(reader.key) or DeviceState(reader, self._process)
            self.watches[reader.key] = watch
            if reader.key not in self._tasks:
                self._tasks[reader.key] = _LinkRead(watch, self._read, self._settings.interval_ns)
        self.pool.update(self._tasks[reader.key] for reader in readers)

    def _taken(self, readings: Sequence[Reading]) -> None:
        """Read devices no more that are gone; their samples wait in their states."""
        trace_late(self._tracer, "link", readings, self._now() - self._monotonic())
        self.pool.update(remove=[reading.task for reading in readings if reading.answer is False])

    def _read(self, watch: DeviceState) -> bool:
        everything = self._monotonic() >= watch.rest_due_ns
        if everything:
            watch.rest_due_ns = self._monotonic() + self._settings.slow_ns
        try:
            return watch.tick(everything=everything, now_unix_ns=self._now, monotonic_ns=self._monotonic)
        except Exception:
            self._fault(f"{watch.reader.key} could not be read")
            return True

    def _fault(self, what: str) -> None:
        """Count an error of ours, which must not end the sampling.

        Device files are input from outside; log only the first error.
        """
        self.faults += 1
        if self.faults == 1:
            log.exception("%s", what)
