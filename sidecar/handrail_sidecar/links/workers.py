"""Read devices in turn, and isolate a device whose read does not return.

The thread of such a read keeps that device alone, and another thread goes on with the others.
So a driver that hangs delays the others by a moment, once.
A thread per device would also work, but costs more than the reads: each is woken ten times a second (17 devices took 1.6 to
3.6 % of a core that way, on a busy machine). A read of sysfs cannot be cancelled: there are at most as many threads as devices.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from handrail_sidecar.links.device_state import SECOND, DeviceState

LEAST_PATIENCE_NS: Final = 50_000_000
WELL_AGAIN_NS: Final = 10 * SECOND
"""Time that an isolated device must answer before it rejoins the others."""


@dataclass(slots=True)
class _Worker:
    """One thread and the devices that it reads.

    All fields are guarded by ``LinkWorkers._guard``.
    """

    watches: list[DeviceState]
    reading: DeviceState | None = None
    since_ns: int = 0
    alone_since_ns: int | None = None  # for a device that hung or hangs: since when it answers again
    thread: threading.Thread | None = None


class LinkWorkers:
    """Threads that read devices, each device in one thread at a time.

    ``add`` a device, ``look`` now and then, set ``stop`` at the end.
    ``read`` reads one device, and returns whether it is still there.
    """

    def __init__(
        self, read: Callable[[DeviceState], bool], interval_ns: int, monotonic_ns: Callable[[], int], stop: threading.Event
    ) -> None:
        self._read = read
        self._interval_ns = interval_ns
        self._monotonic = monotonic_ns
        self._stop = stop
        self._guard = threading.Lock()  # guards the lanes: which lane has a device, and what is being read
        self._lanes: list[_Worker] = []

    def add(self, watch: DeviceState) -> None:
        """Read a device from now on, until it is gone."""
        with self._guard:
            if any(watch in lane.watches for lane in self._lanes):
                return
            for lane in self._lanes:
                if lane.alone_since_ns is None:
                    lane.watches.append(watch)
                    return
            self._begin([watch])

    def look(self) -> None:
        """Move devices behind a hanging read to another thread.

        Brings back isolated devices that answer again.
        """
        now = self._monotonic()
        patience_ns = max(LEAST_PATIENCE_NS, self._interval_ns)
        with self._guard:
            for lane in list(self._lanes):
                stuck = lane.reading is not None and now - lane.since_ns >= patience_ns
                if lane.alone_since_ns is None:
                    if stuck and lane.reading is not None:
                        others = [watch for watch in lane.watches if watch is not lane.reading]
                        lane.watches, lane.alone_since_ns = [lane.reading], now
                        if others:
                            self._begin(others)
                elif stuck:
                    lane.alone_since_ns = now
                elif now - lane.alone_since_ns >= WELL_AGAIN_NS and lane.watches:
                    self._bring_back(lane)

    def threads(self) -> Sequence[threading.Thread]:
        """Return the threads that run."""
        with self._guard:
            return [lane.thread for lane in self._lanes if lane.thread is not None]

    def _bring_back(self, lane: _Worker) -> None:
        together = next((other for other in self._lanes if other.alone_since_ns is None), None)
        if together is None:
            lane.alone_since_ns = None
        elif lane.reading is None:
            together.watches += lane.watches
            lane.watches = []

    def _begin(self, watches: list[DeviceState]) -> None:
        lane = _Worker(watches)
        lane.thread = threading.Thread(target=self._run, args=(lane,), name="handrail-link", daemon=True)
        self._lanes.append(lane)
        lane.thread.start()

    def _run(self, lane: _Worker) -> None:
        """Read every device in turn until none is left.

        Rounds begin at whole multiples of the interval.
        """
        while not self._stop.is_set():
            with self._guard:
                turn = list(lane.watches)
            for watch in turn:
                with self._guard:
                    if watch not in lane.watches:  # another thread has it now
                        continue
                    lane.reading, lane.since_ns = watch, self._monotonic()
                there = self._read(watch)
                with self._guard:
                    lane.reading = None
                    if not there:
                        lane.watches.remove(watch)
            with self._guard:
                if not lane.watches:
                    self._lanes.remove(lane)
                    return
            self._stop.wait((self._interval_ns - self._monotonic() % self._interval_ns) / SECOND)
