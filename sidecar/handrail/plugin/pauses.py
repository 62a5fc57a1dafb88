"""Detect pauses of this process, and their reason.

The evidence is late wake-ups of a thread that sleeps, and the garbage collector's long passes. A thread that wakes late had no
processor, or did not get the interpreter's lock; nor, most likely, did the others of its process.
The kernel gives the reason: ``/proc/thread-self/schedstat`` (how long this thread was ready to run and waited;
Documentation/scheduler/sched-stats.rst) and the ``cpu.stat`` of its cgroup (how long its processor quota was used up;
admin-guide/cgroup-v2.rst, cgroup-v1 calls it ``throttled_time``). Where neither is readable, the reason is ``held``.
"""

from __future__ import annotations

import contextlib
import gc
import os
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from handrail.plugin.events import PAUSED, Event

SLEEP_S: Final = 0.1
"""Sleep before each wake-up; a pause may begin this long before a wake-up is due.

A wake-up takes 0.1 ms of a busy processor, and each of an engine's three processes has this thread: twenty a second cost 0.6 % of
the time of a small model's engines (``make bench-overhead``).
"""

LATE_NS: Final = 20_000_000
COLLECTED_NS: Final = 5_000_000

GC: Final = "gc"
THROTTLED: Final = "throttled"  # its cgroup had used up its processor quota
QUEUED: Final = "queued"  # ready to run, and no processor was free for it
HELD: Final = "held"  # the process was stopped, or a thread of it kept the interpreter's lock


class PauseWatch:
    """Pauses of one process.

    ``begin`` and ``woke`` belong to the thread that sleeps. Nothing here raises.
    """

    def __init__(self, record: Callable[[Event], None], clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._record = record
        self._clock = clock
        self._waits: int | None = None  # descriptors
        self._quota: int | None = None
        self._waited_ns = 0
        self._throttled_ns = 0
        self._collecting_ns: int | None = None

    def begin(self) -> None:
        """Start; the thread that will sleep calls this once."""
        self._waits = _opened("/proc/thread-self/schedstat")
        self._quota = _opened(_quota_path())
        self._waited_ns, self._throttled_ns = self._read()

    def end(self) -> None:
        """Close the files that ``begin`` opened."""
        for descriptor in (self._waits, self._quota):
            if descriptor is not None:
                with contextlib.suppress(OSError):
                    os.close(descriptor)
        self._waits = self._quota = None

    def woke(self, due_ns: int) -> None:
        """Handle the wake-up that was due at ``due_ns``."""
        now = self._clock()
        waited_ns, throttled_ns = self._read()
        late_ns, without_quota_ns = now - due_ns, throttled_ns - self._throttled_ns
        if late_ns >= LATE_NS or without_quota_ns >= LATE_NS:
            half, longest_ns = late_ns // 2, late_ns + round(SLEEP_S * 1e9)
            lasted_ns = late_ns
            if without_quota_ns >= half:  # it may have begun and ended while this thread slept anyway
                reason = THROTTLED
                lasted_ns = max(late_ns, min(without_quota_ns, longest_ns))  # each processor's queue counts for itself
            else:
                reason = QUEUED if waited_ns - self._waited_ns >= half else HELD
            self._record((PAUSED, now, now - lasted_ns, reason, longest_ns - lasted_ns))
        self._waited_ns, self._throttled_ns = waited_ns, throttled_ns

    def watch_collector(self) -> None:
        """Start to observe the garbage collector's passes."""
        gc.callbacks.append(self._collected)

    def unwatch_collector(self) -> None:
        """Stop observing the garbage collector. Works twice."""
        with contextlib.suppress(ValueError):
            gc.callbacks.remove(self._collected)

    def _collected(self, phase: str, info: Mapping[str, Any]) -> None:
        if phase == "start":
            self._collecting_ns = self._clock()
            return
        begin_ns, self._collecting_ns = self._collecting_ns, None
        if begin_ns is not None and (now := self._clock()) - begin_ns >= COLLECTED_NS:
            self._record((PAUSED, now, begin_ns, GC, 0))

    def _read(self) -> tuple[int, int]:
        """Waits so far: of this thread for a processor, of its cgroup for its quota.

        Each is 0 where it is not readable.
        """
        return _waited(_content(self._waits)), _throttled(_content(self._quota))


def _waited(schedstat: bytes) -> int:
    """Second number of ``schedstat``: time spent waiting on a runqueue, ns."""
    parts = schedstat.split()
    return int(parts[1]) if len(parts) >= 2 and parts[1].isdigit() else 0


def _throttled(stat: bytes) -> int:
    for line in stat.splitlines():
        name, _, number = line.partition(b" ")
        if name == b"throttled_usec" and number.isdigit():
            return int(number) * 1000
        if name == b"throttled_time" and number.isdigit():
            return int(number)
    return 0


def _quota_path() -> str:
    """Path of this process's ``cpu.stat``; '' where its cgroup is not visible.

    In a container with a cgroup namespace of its own the path reads ``/`` and its files are at the mount's root.
    """
    try:
        with open("/proc/self/cgroup", encoding="utf-8", errors="replace") as file:
            lines = file.read(65536).splitlines()
    except OSError:
        return ""
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            roots = [f"/sys/fs/cgroup{path}"]
        elif "cpu" in controllers.split(","):
            roots = [f"/sys/fs/cgroup/{controllers}{path}", f"/sys/fs/cgroup/cpu{path}"]
        else:
            continue
        for root in (*roots, "/sys/fs/cgroup"):
            if os.access(found := f"{root.rstrip('/')}/cpu.stat", os.R_OK):
                return found
    return ""


def _opened(path: str) -> int | None:
    if not path:
        return None
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None


def _content(descriptor: int | None) -> bytes:
    if descriptor is None:
        return b""
    try:
        return os.pread(descriptor, 4096, 0)
    except OSError:
        return b""
