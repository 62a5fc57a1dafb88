"""Read links many times a second, off the event loop.

A driver that is slow or never answers delays no other device (``workers.py``) and nothing else of the sidecar.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Final

from handrail.records import Process
from handrail.records.devices import DeviceSample
from handrail_sidecar.links.device_state import SECOND, DeviceState
from handrail_sidecar.links.reading import LinkReader
from handrail_sidecar.links.selection import SelectedLinks, choose
from handrail_sidecar.links.workers import LinkWorkers

log = logging.getLogger(__name__)

LOOK_S: Final = 0.25
"""Time between two checks for a device that hangs.

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
    ) -> None:
        self.chosen: SelectedLinks | None = None  # None until the devices have been listed once
        self.watches: dict[str, DeviceState] = {}
        self.faults = 0  # our own errors, while devices were listed or read
        self._settings = settings
        self._process = process
        self._now = now_unix_ns
        self._monotonic = monotonic_ns
        self._stop = threading.Event()
        self.lanes = LinkWorkers(self._read, settings.interval_ns, monotonic_ns, self._stop)
        self._own: list[threading.Thread] = []

    def start(self) -> None:
        for name, work in (("handrail-links", self._look_after), ("handrail-scan", self._scan)):
            thread = threading.Thread(target=work, name=name, daemon=True)
            self._own.append(thread)
            thread.start()

    def stop(self, timeout_s: float) -> bool:
        """Stop, and return whether every thread has ended.

        A thread that hangs in a driver is left behind.
        """
        self._stop.set()
        until = time.monotonic() + timeout_s
        threads = [*self._own, *self.lanes.threads()]
        for thread in threads:
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

    def _look_after(self) -> None:
        while not self._stop.wait(max(LOOK_S, self._settings.interval_ns / SECOND)):
            self.lanes.look()

    def _scan(self) -> None:
        while True:
            try:
                chosen = choose(self._settings.root, self._settings.wanted)
                self._follow(chosen.readers)
                self.chosen = chosen
            except Exception:
                self._fault("the links of this host could not be listed")
            if self._stop.wait(self._settings.look_ns / SECOND):
                return

    def _follow(self, readers: Iterable[LinkReader]) -> None:
        """Read each device that is not being read: a new one, or one that came back."""
        for reader in readers:
            watch = self.watches.get(reader.key) or DeviceState(reader, self._process)
            self.watches[reader.key] = watch
            self.lanes.add(watch)

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
