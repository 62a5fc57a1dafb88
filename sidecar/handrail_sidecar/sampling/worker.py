"""Repeat calls in time, in threads that outlive a call that hangs.

One worker (a thread) makes all calls in turn, since each thread that wakes pays for cold caches.
A call inside a driver cannot be cancelled. So a monitor gives up a call that exceeds its limit: its worker keeps that call alone,
a second worker continues with the rest of the device, and a third one with the other devices.
A call that returned in time for ``WELL_NS`` rejoins the others. When one worker cannot keep up, each device gets its own.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeVar

from opentelemetry.trace import Tracer

from handrail import conventions as names
from handrail.telemetry.tracing import record_span

log = logging.getLogger(__name__)

T = TypeVar("T")

WELL_NS: Final = 10_000_000_000
"""Time without a slow call after which a worker's tasks rejoin the others."""

_IDLE_NS: Final = 250_000_000  # longest time between two checks
_LEAST_NS: Final = 2_000_000
_SPAN_NS: Final = 2_000_000_000  # over which a worker's share is measured
_MOST_SHARE: Final = 0.6  # of its time that a worker may be busy; above it, it cannot keep up
_SHARE_TOGETHER: Final = 0.4  # after two workers became one
_NEVER: Final = 1 << 63
_NO_ANSWER: Final = object()


class Task:
    """One call that is repeated at each whole multiple of ``period_ns``.

    ``device``: what it reads; when a call hangs, the tasks of its device leave those of other devices.
    ``limit_ns``: how long the call may take. ``group``: tasks of two groups never share a worker.
    """

    __slots__ = ("device", "group", "limit_ns", "next_ns", "period_ns", "worker")

    def __init__(self, device: str, period_ns: int, limit_ns: int, group: str = "") -> None:
        self.device = device
        self.group = group
        self.limit_ns = limit_ns
        self.period_ns = period_ns
        self.next_ns = 0  # due, monotonic
        self.worker: Worker | None = None  # the worker that makes the call; None when nobody does

    def call(self) -> Any:
        """Make the call; it may block for ever. One thread at a time does so."""
        raise NotImplementedError

    def plan(self, now_ns: int) -> int:
        """Plan the call after the present one; return the periods missed before it.

        Missed periods are not made up for.
        """
        missed = max(0, now_ns - self.next_ns) // self.period_ns if self.next_ns else 0
        self.next_ns = (now_ns // self.period_ns + 1) * self.period_ns
        return missed


class Reading(NamedTuple):
    """One call that returned in time.

    ``answer``: what it returned, or the exception that it raised. ``missed``: periods before it without a call.
    """

    task: Any  # a ``Task``, of the class that the owner of the pool added
    answer: Any
    began_ns: int
    ended_ns: int
    missed: int


def trace_late(tracer: Tracer, sampler: str, readings: Sequence[Reading], unix_offset_ns: int) -> None:
    """Make a span of the time by which the latest of ``readings`` was late.

    It makes none when no reading was late by whole periods.
    ``unix_offset_ns``: wall clock minus monotonic clock.
    """
    late = max(readings, key=lambda reading: reading.missed * reading.task.period_ns, default=None)
    if late is not None and late.missed:
        began_ns = late.began_ns + unix_offset_ns
        about: dict[str, str | int] = {names.OWN_SAMPLER: sampler, names.OWN_MISSED: late.missed}
        record_span(tracer, names.OWN_LATE, began_ns - late.missed * late.task.period_ns, began_ns, about)


@dataclass(slots=True)
class WorkerStats:
    """Counts since start."""

    given_up: int = 0  # calls that exceeded their limit
    not_replaced: int = 0  # hanging calls for which no thread was left: the device's other calls wait
    faults: int = 0  # our own errors


@dataclass(slots=True, eq=False)
class Worker:
    """One thread. Its tasks are those whose ``worker`` it is.

    All fields are guarded by the pool's lock.
    """

    name: str
    group: str
    well_since_ns: int  # since when no call was slow
    span_ns: int  # begin of the span in which the share is measured
    inside: Task | None = None  # whose call runs now
    since_ns: int = 0
    missed: int = 0  # periods before that call
    check_ns: int = 0  # when the monitor has to look
    limit_ns: int = 0  # the least one of its tasks
    readings: list[Reading] = field(default_factory=list)  # of the present round
    alone: Task | None = None  # the call that hung; the worker keeps no other
    given_up: bool = False  # the call that runs exceeded its limit
    not_replaced: bool = False
    share: float = 0.0
    busy_ns: int = 0
    thread: threading.Thread | None = None


class WorkerPool:
    """All workers of one sampler.

    ``deliver`` takes the readings of one round, in a thread of the pool; it never blocks.
    ``hangs`` is called once with a task whose call does not return, and may replace it by smaller ones.
    ``rejoined`` is called with tasks that share a worker again, ``checked`` after each look of the monitor.
    None of them is called with the pool's lock held.
    """

    def __init__(
        self,
        name: str,
        deliver: Callable[[Sequence[Reading]], None],
        *,
        now_ns: Callable[[], int] = time.monotonic_ns,
        stats: WorkerStats | None = None,
        hangs: Callable[[Any], None] = lambda task: None,
        rejoined: Callable[[Sequence[Any]], None] = lambda tasks: None,
        checked: Callable[[], None] = lambda: None,
        most_hanging: int = 32,
        most_hanging_a_device: int = 6,
    ) -> None:
        self.name = name
        self.stats = stats if stats is not None else WorkerStats()
        self.stopped = False
        self._deliver = deliver
        self._now = now_ns
        self._hangs = hangs
        self._rejoined = rejoined
        self._checked = checked
        self._most = most_hanging
        self._most_a_device = most_hanging_a_device
        self._lock = threading.Lock()  # guards the tasks, the workers and all that they hold
        self._changed = threading.Condition(self._lock)  # those who sleep must look again
        self._tasks: list[Task] = []  # by device
        self._workers: list[Worker] = []  # oldest first
        self._monitor = threading.Thread(target=self._watch, name=f"{name} monitor", daemon=True)

    def start(self) -> None:
        """Start the monitor; workers start with their tasks."""
        self._monitor.start()

    def update(self, add: Iterable[Task] = (), remove: Iterable[Task] = ()) -> None:
        """Make the calls of other tasks from now on.

        Does nothing for a task that is there already, or that is not.
        """
        with self._lock:
            gone = [task for task in remove if task.worker is not None]
            new = [task for task in add if task.worker is None and not self.stopped]
            if not gone and not new:
                return
            for task in gone:
                task.worker = None
            self._tasks = [task for task in self._tasks if task.worker is not None]
            for task in new:
                task.worker = self._home(task) or self._begin_worker(task.group)
                self._tasks.append(task)
            self._tasks.sort(key=lambda task: task.device)
            self._changed.notify_all()

    def workers(self) -> list[Worker]:
        """Return the present workers."""
        with self._lock:
            return list(self._workers)

    def threads(self) -> list[threading.Thread]:
        """Return the threads that run."""
        return [each for each in (self._monitor, *(worker.thread for worker in self.workers())) if each and each.is_alive()]

    def hanging(self, longer_than_ns: int = 0) -> list[tuple[Any, int]]:
        """Return (task, ns) for every call that exceeds its limit and this time."""
        with self._lock:
            calls = [(each.inside, self._now() - each.since_ns) for each in self._workers if each.inside is not None]
        return [(task, ns) for task, ns in calls if ns > max(task.limit_ns, longer_than_ns)]

    def stop(self, wait_s: float) -> bool:
        """End all threads; return True when no call is left running.

        Waits for none that hangs.
        """
        with self._lock:
            self.stopped = True
            self._changed.notify_all()
        hanging = {id(task.worker) for task, _ in self.hanging()}
        until = time.monotonic() + wait_s
        threads = [self._monitor, *(each.thread for each in self.workers() if id(each) not in hanging)]
        for thread in threads:
            if thread is not None and thread.is_alive() and thread is not threading.current_thread():
                thread.join(max(0.0, until - time.monotonic()))
        return all(worker.inside is None for worker in self.workers())

    # --- a worker -----------------------------------------------------------------------------------------------------------

    def _run(self, worker: Worker) -> None:
        while due := self._due(worker):
            began_ns = self._now()
            for task in due:
                if self._begin(worker, task):
                    try:
                        answer = task.call()
                    except Exception as error:  # one call must not hide the others
                        answer = error
                    self._end(worker, answer)
            with self._lock:
                readings, worker.readings = worker.readings, []
            self._hand_over(self._deliver, readings)
            self._hand_over(self._rejoined, self._look_back(worker, began_ns))

    def _due(self, worker: Worker) -> list[Task]:
        """Sleep until tasks are due and return them; [] when the worker ends."""
        with self._lock:
            while not self.stopped:
                mine = [task for task in self._tasks if task.worker is worker]
                if not mine:
                    break
                now, due_ns = self._now(), min([task.next_ns for task in mine])
                worker.limit_ns = min([task.limit_ns for task in mine])
                worker.check_ns = max(now, due_ns) + worker.limit_ns
                if due_ns <= now or not self._changed.wait((due_ns - now) / 1e9):
                    now = max(due_ns, self._now())
                    return [task for task in mine if task.next_ns <= now]
            self._workers.remove(worker)
            return []

    def _begin(self, worker: Worker, task: Task) -> bool:
        """Return whether the worker still has this task, and note that its call begins."""
        with self._lock:
            if task.worker is not worker or self.stopped:
                return False
            now = worker.since_ns = self._now()
            worker.missed = task.plan(max(now, task.next_ns))
            worker.inside, worker.check_ns = task, now + task.limit_ns
            return True

    def _end(self, worker: Worker, answer: Any) -> None:
        """Note that a call returned; the answer of one that was given up is too old."""
        ended_ns = self._now()
        with self._lock:
            task, began_ns = worker.inside, worker.since_ns
            assert task is not None
            if ended_ns - began_ns > task.limit_ns // 2:
                worker.well_since_ns = ended_ns
            if not worker.given_up:
                worker.readings.append(Reading(task, answer, began_ns, ended_ns, worker.missed))
            worker.inside, worker.given_up, worker.not_replaced = None, False, False

    def _hand_over(self, to: Callable[[Sequence[Any]], None], what: Sequence[Any]) -> None:
        try:
            if what:
                to(what)
        except Exception:  # an error in one round must not end all reading
            self._fault("passing on what was read failed")

    def _look_back(self, worker: Worker, began_ns: int) -> list[Task]:
        """After a round, check whether the worker has too much to do or is not needed.

        Returns the tasks that rejoined others.
        """
        with self._lock:
            now = self._now()
            worker.busy_ns += now - began_ns
            if now - worker.span_ns >= _SPAN_NS:
                worker.share = worker.busy_ns / (now - worker.span_ns)
                worker.busy_ns, worker.span_ns = 0, now
                if worker.share > _MOST_SHARE:
                    self._spread(worker)
            well = now - worker.well_since_ns >= WELL_NS
            return self._rejoin(worker) if well and (worker.alone is not None or len(self._workers) > 1) else []

    # --- who makes which calls; the caller holds the lock ---------------------------------------------------------------------

    def _begin_worker(self, group: str, tasks: Iterable[Task] = ()) -> Worker:
        now = self._now()
        worker = Worker(f"{self.name} {group}".strip(), group, now, now, check_ns=now)
        worker.thread = threading.Thread(target=self._run, args=(worker,), name=worker.name, daemon=True)
        for task in tasks:
            task.worker = worker
        self._workers.append(worker)
        worker.thread.start()
        return worker

    def _home(self, task: Task, other_than: Worker | None = None) -> Worker | None:
        """Return the worker for a task: the one of its device, otherwise the oldest."""
        shared = [each for each in self._workers if each.alone is None and each.group == task.group and each is not other_than]
        own = {id(each.worker) for each in self._tasks if each.device == task.device}
        return next((each for each in shared if id(each) in own), shared[0] if shared else None)

    def _spread(self, worker: Worker) -> None:
        """Give each device of a worker that cannot keep up its own one."""
        mine = [task for task in self._tasks if task.worker is worker]
        devices = list(dict.fromkeys(task.device for task in mine))
        if len(devices) > 1:
            log.info("%s: one thread cannot make all calls in time; each device now gets its own thread", worker.name)
        for device in devices[1:]:
            self._begin_worker(worker.group, [task for task in mine if task.device == device])

    def _rejoin(self, worker: Worker) -> list[Task]:
        mine = [task for task in self._tasks if task.worker is worker]
        home = self._home(mine[0], worker) if mine else None
        if home is None:
            worker.alone = None  # it is the only one
            return []
        if worker.alone is None:
            older = self._workers.index(home) < self._workers.index(worker)
            if not older or home.share + worker.share > _SHARE_TOGETHER:
                return []
        for task in mine:
            task.worker = home
        self._changed.notify_all()
        return mine

    # --- the monitor --------------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        while not self.stopped:
            wait_ns = _IDLE_NS
            try:
                wait_ns = self.check()
                self._checked()
            except Exception:  # an error must not end the watch over hanging calls
                self._fault("the watch for hanging calls failed; it continues")
            with self._lock:
                if not self.stopped:
                    self._changed.wait(wait_ns / 1e9)

    def check(self) -> int:
        """Give up calls that take too long; return in how many ns to look again."""
        readings: list[Reading] = []
        hanging: list[Task] = []
        with self._lock:
            now = self._now()
            again_ns = now + _IDLE_NS
            for worker in list(self._workers):
                task = worker.inside
                if task is not None and worker.check_ns <= now:
                    if worker.alone is not None:
                        worker.check_ns = _NEVER
                        hanging += [task] if task.worker is worker else []
                    else:
                        worker.check_ns = now + task.limit_ns
                        readings += self._give_up(worker, task)
                # while it makes no call, nothing hangs: a thread that wakes less often costs less
                least_ns = _LEAST_NS if task is not None else worker.limit_ns * 3 // 2
                again_ns = min(again_ns, max(worker.check_ns, now + least_ns))
        self._hand_over(self._deliver, readings)
        for task in hanging:
            self._hangs(task)
        return again_ns - now

    def _give_up(self, worker: Worker, task: Task) -> list[Reading]:
        """Leave a worker alone with its call; return what it read before."""
        alone = [each.alone.device for each in self._workers if each.alone is not None]
        if len(alone) >= self._most or alone.count(task.device) >= self._most_a_device:
            self.stats.not_replaced += not worker.not_replaced
            worker.not_replaced = True
            return []
        self.stats.given_up += 1
        worker.alone, worker.given_up = task, True
        rest = [each for each in self._tasks if each.worker is worker and each is not task]
        for same in (True, False):
            tasks = [each for each in rest if (each.device == task.device) is same]
            if tasks:
                self._begin_worker(worker.group, tasks)
        readings, worker.readings = worker.readings, []
        return readings

    def _fault(self, what: str) -> None:
        self.stats.faults += 1
        if self.stats.faults == 1:
            log.exception("%s: %s", self.name, what)


class TimedCalls:
    """Makes rare calls with a time limit, each in a thread that may be left behind.

    A call that has not returned is not made again until it has.
    """

    def __init__(self, name: str, within_s: float) -> None:
        self.within_s = within_s
        self._name = name
        self._running: dict[str, threading.Thread] = {}

    def __call__(self, key: str, function: Callable[..., T], *arguments: Any) -> T:
        """Return what ``function`` returns, or raise what it raises.

        ``key``: of calls that wait for each other. Raises ``TimeoutError`` when the call does not return in time.
        """
        before = self._running.get(key)
        if before is not None and before.is_alive():
            raise TimeoutError(key)
        answer: list[Any] = [_NO_ANSWER, None]

        def run() -> None:
            try:
                answer[0] = function(*arguments)
            except BaseException as error:
                answer[1] = error

        thread = self._running[key] = threading.Thread(target=run, name=f"{self._name} {key}", daemon=True)
        thread.start()
        thread.join(self.within_s)
        if answer[1] is not None:
            raise answer[1]
        if answer[0] is _NO_ANSWER:
            raise TimeoutError(key)
        result: T = answer[0]
        return result

    @property
    def hanging(self) -> int:
        """Number of calls that have not returned."""
        return sum(thread.is_alive() for thread in self._running.values())
