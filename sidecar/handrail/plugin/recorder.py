"""Keep the hooks' events until a thread has sent them to the sidecar.

There is one recorder a process. ``record`` is the hot path: one append to a bounded deque (tests/bench/bench_guest.py). The
thread starts with the first event of a process that will not fork any more (``start``). It sends datagrams, and survives a
sidecar that is absent or starts again. A fork resets the state: no thread, no events, another boot.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Final

from handrail.plugin.events import ALIVE, FACTS, LOG, STOPPING, UNKNOWN, Event, datagrams
from handrail.plugin.pauses import SLEEP_S, PauseWatch

ALIVE_EVERY_TICKS: Final = 10  # a tick: pauses.SLEEP_S
FACTS_EVERY_TICKS: Final = 600
ABSENT_TICKS: Final = 10  # between attempts while nobody listens
MAX_EVENTS: Final = 16_384
FAULT_NS: Final = 30 * 10**9  # an error that was logged with its traceback so shortly before the end counts as its cause
MAX_BATCH: Final = 2_048  # events encoded in one go: 5 ms of the engine's interpreter lock at most


class Recorder:
    """Buffer and sender of events.

    Any thread may call ``record``, ``start`` and ``say``. Only a bug here raises into the caller.
    """

    def __init__(
        self,
        path: str,
        *,
        clock: Callable[[], int] = time.monotonic_ns,
        wall: Callable[[], int] = time.time_ns,
        max_events: int = MAX_EVENTS,
    ) -> None:
        self.path = path
        self.kind = UNKNOWN
        self.life: Callable[[], tuple[int | None, int | None]] | None = None  # when it last stepped, requests it holds
        self.each_second: Callable[[], None] | None = None  # called by the thread once a second
        self._clock = clock
        self._wall = wall
        self._max_events = max_events
        self._lock = threading.Lock()  # guards the start of the thread and ``flush``
        self._begin_anew()

    def _begin_anew(self) -> None:
        """Set the state of a process without events."""
        self.lost = 0
        self.boot = os.urandom(6).hex()
        self._events: deque[Event] = deque(maxlen=self._max_events)
        self._outbox: deque[bytes] = deque()
        self._facts: dict[str, Any] = {}
        self._facts_due = False
        self._faulted_ns: int | None = None
        self._stopping = False
        self._sequence = 1
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._pauses: PauseWatch | None = None
        self._socket: socket.socket | None = None
        self._listener: tuple[int, int] | None = None

    def after_fork(self) -> None:
        """Reset in a forked child: the thread is absent and the events are the parent's."""
        self._lock = threading.Lock()
        self.kind = UNKNOWN
        self.life = None
        if self._socket is not None:
            self._socket.close()
        if self._pauses is not None:
            self._pauses.unwatch_collector()
        self._begin_anew()

    @property
    def running(self) -> bool:
        return self._thread is not None

    def record(self, event: Event) -> None:
        """Keep ``event``; where there is no room, drop and count the oldest."""
        events = self._events
        if len(events) == self._max_events:
            self.lost += 1
        events.append(event)

    def start(self, kind: str) -> None:
        """Set this process's ``kind`` and begin to send its events."""
        with self._lock:
            if self.kind == UNKNOWN:
                self.kind = kind
            if self._thread is None:
                self._pauses = PauseWatch(self.record, self._clock)
                self._pauses.watch_collector()
                self._thread = threading.Thread(target=self._run, name="handrail-guest", daemon=True)
                self._thread.start()

    def say(self, facts: Mapping[str, Any]) -> None:
        """Send facts about the engine.

        They go out now, every minute, and to every sidecar that begins to listen.
        """
        self._facts = {**self._facts, **facts}
        self._facts_due = True

    def say_line(self, level: str, line: str, *, at_once: bool) -> None:
        """Send a log line.

        ``at_once``: a process without a thread (it may still fork) sends it itself.
        """
        self.record((LOG, self._clock(), level, line))
        if at_once and self._thread is None:
            self.flush()

    def fault_logged(self) -> None:
        """Note that the engine has logged an exception."""
        self._faulted_ns = self._clock()

    def say_stopping(self) -> None:
        """Report that the engine ends this process; only the first call counts.

        It is sent at once, since no thread may live to do so. The end is not clean while an exception other than one for ending
        is on its way, nor just after one was logged.
        """
        if self._stopping:
            return
        self._stopping = True
        raised = sys.exc_info()[0]
        now = self._clock()
        failed = self._faulted_ns is not None and now - self._faulted_ns <= FAULT_NS
        clean = not failed and (raised is None or issubclass(raised, (SystemExit, KeyboardInterrupt)))
        self.record((STOPPING, now, clean))
        self.flush(wait=False)  # a signal handler may interrupt the thread that is flushing

    def flush(self, *, wait: bool = True) -> bool:
        """Send all events; False where no sidecar takes them now.

        Never blocks on the socket. ``wait``: wait for another flush that is in progress; else leave these events to it.
        """
        if not self._lock.acquire(blocking=wait):
            return False
        try:
            self._look_who_listens()
            while True:
                if not self._outbox:
                    self._encode()
                while self._outbox:
                    if not self._send(self._outbox[0]):
                        return False
                    self._outbox.popleft()
                if not self._events:
                    return True
        finally:
            self._lock.release()

    def stop(self) -> None:
        """End the thread after a last flush; for tests and the end of the interpreter."""
        thread, self._thread = self._thread, None
        self._stop.set()
        if thread is not None:
            thread.join(2.0)
        if self._pauses is not None:
            self._pauses.unwatch_collector()
        self.flush()
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _run(self) -> None:
        pauses = self._pauses
        assert pauses is not None
        pauses.begin()
        try:
            self._tick_until_stopped(pauses)
        finally:
            pauses.end()

    def _tick_until_stopped(self, pauses: PauseWatch) -> None:
        stop, clock, sleep_ns = self._stop, self._clock, round(SLEEP_S * 1e9)
        tick = absent = 0
        due_ns = clock() + sleep_ns
        while not stop.wait(SLEEP_S):
            pauses.woke(due_ns)
            tick += 1
            absent = self._tick(tick, absent)
            due_ns = clock() + sleep_ns

    def _tick(self, tick: int, absent: int) -> int:
        """Send, ten times a second.

        ``absent``: the number of attempts without a listener; the new number is returned.
        """
        if absent and tick % ABSENT_TICKS:
            return absent
        if tick % FACTS_EVERY_TICKS == 0 or absent:
            self._facts_due = True
        try:
            if tick % ALIVE_EVERY_TICKS == 0 and self.each_second is not None:
                self.each_second()
            if tick % ALIVE_EVERY_TICKS == 0 or absent:
                self._say_alive()
            return 0 if self.flush() else absent + 1
        except Exception:
            self.lost += len(self._outbox) + 1  # a bug of ours: what could not be encoded must not stop the rest
            self._outbox.clear()
            return absent

    def _say_alive(self) -> None:
        life = self.life
        try:
            stepped, unfinished = life() if life is not None else (None, None)
        except Exception:
            stepped = unfinished = None
        self.record((ALIVE, self._clock(), stepped, unfinished))

    def _encode(self) -> None:
        """Move events into the outbox as datagrams, with the current clocks."""
        events = []
        if self._facts_due and self._facts:
            self._facts_due = False
            events.append((FACTS, self._clock(), self._facts))
        source = self._events
        while source and len(events) < MAX_BATCH:
            events.append(source.popleft())
        if not events:
            return
        made, self.lost = datagrams(
            events,
            boot=self.boot,
            pid=os.getpid(),
            kind=self.kind,
            sequence=self._sequence,
            monotonic_ns=self._clock(),
            unix_ns=self._wall(),
            lost=self.lost,
        )
        self._sequence += len(made)
        self._outbox.extend(made)

    def _look_who_listens(self) -> None:
        """Mark the facts as due where a sidecar has started since the last flush.

        It needs them although no send failed in between.
        """
        try:
            found = os.stat(self.path)
        except OSError:
            return
        listener = (found.st_ino, found.st_ctime_ns)
        if listener != self._listener:
            self._listener = listener
            self._facts_due = True

    def _send(self, data: bytes) -> bool:
        """Send one datagram; False where there is no sidecar, or it is behind.

        Then the datagram is kept. The path is looked up each time, since a sidecar that starts again binds a new socket there.
        """
        try:
            if self._socket is None:
                self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
            self._socket.sendto(data, self.path)
        except OSError:
            return False
        return True
