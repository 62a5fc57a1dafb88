"""A moment at which one thread wakes, and that others can put off without waking it.

A watch that sleeps with a timeout has to wake to learn that nothing hangs: ten times a second, 100 us of processor each where
caches went cold (measured here). Put off by the lane after each of its own wakings, it sleeps on. See timerfd_create(2).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import time
from typing import Final

_MONOTONIC: Final = 1  # CLOCK_MONOTONIC, which ``time.monotonic_ns`` reads
_ABSOLUTE: Final = 1  # TFD_TIMER_ABSTIME
_WITHOUT_S: Final = 0.05


class _Times(ctypes.Structure):
    """``struct itimerspec``: again after, then first at."""

    _fields_ = [(name, ctypes.c_long) for name in ("again_s", "again_ns", "at_s", "at_ns")]


class Alarm:
    """``set`` from any thread, ``wait`` in one. Before ``open``, and where there is no such timer, ``wait`` takes 50 ms."""

    def __init__(self) -> None:
        self._fd = -1
        self._libc = ctypes.CDLL(None)
        self._lock = threading.Lock()  # guards the two below, which are made once: ten settings a second, on cold caches
        self._times = _Times()
        self._at = ctypes.byref(self._times)

    def open(self) -> None:
        """Until it is set, it does not ring."""
        with contextlib.suppress(AttributeError):  # not Linux: no driver of NVIDIA's either
            self._fd = self._libc.timerfd_create(_MONOTONIC, os.O_CLOEXEC)

    def set(self, at_ns: int) -> None:
        """Ring at this time, monotonic, instead of the one before; at once where that is over."""
        if self._fd >= 0:
            with self._lock:
                self._times.at_s, self._times.at_ns = divmod(max(1, at_ns), 1_000_000_000)
                self._libc.timerfd_settime(self._fd, _ABSOLUTE, self._at, None)

    def wait(self) -> None:
        """Sleep until it rings."""
        if self._fd >= 0:
            os.read(self._fd, 8)
        else:
            time.sleep(_WITHOUT_S)

    def close(self) -> None:
        """Not while anybody waits."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
