"""Threads that read, and the watch over them: a call that hangs keeps its thread, and everything else goes on in a new one.

A lane is a thread that reads its jobs one round after the other. All GPUs begin in one lane, since a thread that wakes pays more
for cold caches than for what it reads; where one lane cannot keep up, each GPU gets its own. A call inside the driver cannot be
cancelled. The watch looks at what every lane is doing; a call that takes longer than ``limit_ns`` is given up: its thread keeps
that call alone, and a new lane takes the rest, from the step after it. So the number of threads is bounded by the number of calls
and by ``MOST_GIVEN_UP``. When the call returns, its thread goes on reading only that; after ``QUIET_ROUNDS`` quick rounds the
call rejoins the others and the thread ends. A batch of fields that hangs is read field by field from then on, so that only the
field at fault stays alone.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from handrail.gpu.counters import Pace
from handrail.gpu.failures import HANGS, Meaning, NvmlFailed, failure
from handrail.gpu.halt import Halt
from handrail.gpu.reader import DeviceReader, Job
from handrail.gpu.steps import Clock, GivenUp, Step
from handrail.hardware import DeviceSample, DeviceValue

log = logging.getLogger(__name__)

MOST_GIVEN_UP: Final = 32  # threads inside calls that do not return
MOST_GIVEN_UP_A_DEVICE: Final = 6
QUIET_ROUNDS: Final = 50
FIRST_CALL_NS: Final = 1_000_000_000  # a driver may have to wake a GPU for the first call of a kind
_LONGEST_PAUSE_NS: Final = 60_000_000_000
_FIRST_PAUSE_NS: Final = 1_000_000_000
_RETRIES_AT_ONCE: Final = 2
_SHARE_OVER_NS: Final = 2_000_000_000
_MOST_SHARE: Final = 0.6  # of its time that a lane may read: above it, it cannot keep up
_IDLE_LOOK_NS: Final = 250_000_000
_LEAST_LOOK_NS: Final = 2_000_000

Deliver = Callable[[DeviceSample], None]
"""Takes a sample, in the thread that read it. Never blocks, never raises."""


@dataclass(slots=True)
class LaneStats:
    """Counts since start, over all lanes."""

    samples: int = 0
    missed: int = 0  # periods of a job in which it was not read
    faults: int = 0  # faults of ours in reading
    failures: dict[int, int] = field(default_factory=dict)  # calls that failed, by code
    given_up: int = 0
    not_replaced: int = 0  # hanging calls for which there was no thread left: the device's other counters wait


class Guard:
    """What one lane is doing: which step, inside a call since when. The watch gives it up; the call then raises ``GivenUp``."""

    __slots__ = ("_clock", "_lock", "given_up", "inside", "since_ns", "step")

    def __init__(self, clock: Clock) -> None:
        self.step: Step | None = None
        self.inside = False
        self.since_ns = 0
        self.given_up = False
        self._clock = clock
        self._lock = threading.Lock()  # guards given_up against a call that returns just now

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> Any:
        began = self.since_ns = self._clock.mono_ns()
        self.inside = True
        try:
            return function(*arguments)
        finally:
            took = self._clock.mono_ns() - began
            step = self.step
            with self._lock:
                self.inside = False
                if self.given_up:
                    raise GivenUp
            if step is not None:
                step.warm = True
                step.calls += 1
                step.spent_ns += took
                if took > step.longest_ns:
                    step.longest_ns = took

    def give_up(self, since_ns: int) -> bool:
        """Take everything but the running call from this lane; False where the call that began at ``since_ns`` has returned."""
        with self._lock:
            if not self.inside or self.since_ns != since_ns:
                return False
            self.given_up = True
            return True

    def renew(self) -> None:
        """The thread that was given up goes on with what it kept."""
        with self._lock:
            self.given_up = False


@dataclass(slots=True)
class Round:
    """One reading of a job, as far as it has come."""

    job: Job
    at_unix_ns: int
    began_ns: int
    values: list[DeviceValue] = field(default_factory=list)
    next_step: int = 0


class Lane:
    """One thread and its jobs. ``reader``: of the device that it reads now. ``alone``: left with the call that hung."""

    def __init__(self, lanes: Lanes, name: str, jobs: Iterable[Job], *, limit_ns: int, going_on: Round | None = None) -> None:
        self.name = name
        self.jobs = list(jobs)
        self.reader = self.jobs[0].reader
        self.limit_ns = limit_ns
        self.alone = False
        self.guard = Guard(lanes.clock)
        self.round = going_on
        self.quiet = 0
        self.busy_ns = 0  # reading, of the time since
        self.since_ns = lanes.clock.mono_ns()
        self.due_ns = 0  # when it wakes, while it sleeps
        self.not_replaced_ns = 0  # the call, by when it began, for which there was no thread left
        self.ending = False
        self._lanes = lanes
        self.thread = threading.Thread(target=self._run, name=f"gpu {name}", daemon=True)

    def hangs_ns(self, now_ns: int) -> int:
        """How long it has been inside its present call; 0 outside."""
        guard = self.guard
        return max(0, now_ns - guard.since_ns) if guard.inside else 0

    def _run(self) -> None:
        lanes = self._lanes
        try:
            while not self.ending and self.jobs and not lanes.stopping.is_set():
                job = self.round.job if self.round is not None else min(self.jobs, key=lambda each: each.next_ns)
                if self.round is None:
                    wait_ns = job.next_ns - lanes.clock.mono_ns()
                    if wait_ns > 0:
                        self.due_ns = job.next_ns
                        if lanes.stopping.wait(wait_ns / 1e9):
                            break
                        self.due_ns = 0
                    self.round = Round(job, lanes.clock.unix_ns(), lanes.clock.mono_ns())
                self.reader = job.reader
                try:
                    self._read(self.round)
                except GivenUp:
                    if not self._keep():
                        break
                except NvmlFailed as lost:
                    self._lost(lost.code)
        finally:
            lanes.ended(self)

    def _lost(self, code: int) -> None:
        """The device of this round answers nothing more: its jobs end; with the session all do."""
        index = self.reader.gpu.device.index
        self.round = None
        whole = failure(code).meaning is Meaning.SESSION_LOST
        self.jobs = [] if whole else [each for each in self.jobs if each.reader.gpu.device.index != index]
        self._lanes.on_lost(self.reader, code)

    def _read(self, round_: Round) -> None:
        job, guard = round_.job, self.guard
        while round_.next_step < len(job.steps):
            step = job.steps[round_.next_step]
            round_.next_step += 1
            guard.step = step
            if step.resume_ns <= round_.began_ns:
                round_.values += self._values(step)
        guard.step = None
        self._finish(round_)

    def _values(self, step: Step) -> list[DeviceValue]:
        stats = self._lanes.stats
        try:
            values = step.read(self.guard)
            step.failures = 0
        except NvmlFailed as problem:
            stats.failures[problem.code] = stats.failures.get(problem.code, 0) + 1
            if failure(problem.code).meaning is not Meaning.RETRY:
                raise
        except GivenUp:
            raise
        except Exception:  # a fault of ours in one step must not end the reading of the others
            stats.faults += 1
            if stats.faults == 1:
                log.exception("a GPU counter could not be read: %s", step.name)
        else:
            return values
        step.failures += 1
        if step.failures > _RETRIES_AT_ONCE:
            pause = _FIRST_PAUSE_NS << min(step.failures - _RETRIES_AT_ONCE - 1, 10)
            step.resume_ns = self._lanes.clock.mono_ns() + min(pause, _LONGEST_PAUSE_NS)
        return []

    def _finish(self, round_: Round) -> None:
        lanes, job = self._lanes, round_.job
        now = lanes.clock.mono_ns()
        changed = job.reader.settle(job)
        self.round = None
        if round_.values:
            lanes.stats.samples += 1
            lanes.deliver(job.reader.sample(round_.values, round_.at_unix_ns, now - round_.began_ns, job.pace))
        lanes.stats.missed += job.plan_next(now)
        self.busy_ns += now - round_.began_ns
        if self.alone:
            self.ending = not job.steps
            self._perhaps_rejoin(now - round_.began_ns)
        elif changed:
            self.jobs = [each for each in self.jobs if each.reader is not job.reader or each.pace is Pace.SNAPSHOT]
            self.jobs += [] if job.pace is Pace.SNAPSHOT else job.reader.lane_jobs()
        elif now - self.since_ns > _SHARE_OVER_NS:
            if self.busy_ns > _MOST_SHARE * (now - self.since_ns):
                lanes.spread(self)
            self.busy_ns, self.since_ns = 0, now

    def _keep(self) -> bool:
        """After the call that hung has returned: go on with it alone; False where its parts are read elsewhere."""
        if not self._lanes.left_alone(self):
            return False
        job, now = self.jobs[0], self._lanes.clock.mono_ns()
        self._lanes.stats.missed += (now - self.guard.since_ns) // job.period_ns
        job.next_ns = now
        self.quiet = 0
        self.guard.renew()
        return True

    def _perhaps_rejoin(self, took_ns: int) -> None:
        self.quiet = self.quiet + 1 if took_ns < self.limit_ns // 4 else 0
        if not self.ending and self.quiet >= QUIET_ROUNDS:
            self.ending = self._lanes.rejoin(self)


class Lanes:
    """All lanes of a session. ``deliver`` and ``on_lost`` are called in the lanes' threads."""

    def __init__(
        self,
        clock: Clock,
        deliver: Deliver,
        on_lost: Callable[[DeviceReader, int], None],
        *,
        limit_ns: int,
        stats: LaneStats | None = None,
    ) -> None:
        self.clock = clock
        self.deliver = deliver
        self.on_lost = on_lost
        self.stopping = Halt()
        self.stats = stats if stats is not None else LaneStats()
        self.limit_ns = limit_ns
        self._lock = threading.Lock()  # guards the list, and handing steps from one lane to another
        self._lanes: list[Lane] = []

    def start(self, name: str, jobs: Iterable[Job], *, limit_ns: int | None = None) -> Lane:
        """A thread for these jobs, which are due from now on."""
        now = self.clock.mono_ns()
        lane = Lane(self, name, jobs, limit_ns=self.limit_ns if limit_ns is None else limit_ns)
        for job in lane.jobs:
            job.next_ns = job.next_ns or now
        with self._lock:
            self._lanes.append(lane)
        lane.thread.start()
        return lane

    def all(self) -> list[Lane]:
        """The lanes now."""
        with self._lock:
            return list(self._lanes)

    def look(self) -> int:
        """The watch: give up calls that take too long. How many ns may pass until it must look again."""
        now = self.clock.mono_ns()
        next_ns, soonest_ns = now + _IDLE_LOOK_NS, now + 2 * self.limit_ns
        for lane in self.all():
            guard, step = lane.guard, lane.guard.step
            if lane.alone or guard.given_up:
                continue
            if not guard.inside or step is None:
                next_ns = min(next_ns, max(soonest_ns, (lane.due_ns or now) + lane.limit_ns))  # nothing hangs: once a period
                continue
            since = guard.since_ns
            limit = max(lane.limit_ns, 0 if step.warm else FIRST_CALL_NS)
            if now - since > limit:
                self._give_up(lane, step, since)
                next_ns = min(next_ns, now + lane.limit_ns)
            else:
                next_ns = min(next_ns, since + limit)
        return max(_LEAST_LOOK_NS, next_ns - now)

    def spread(self, lane: Lane) -> None:
        """A lane that cannot keep up, in its own thread: it keeps its first GPU, each other one gets a lane of its own."""
        by_gpu: dict[int | None, list[Job]] = {}
        for job in lane.jobs:
            by_gpu.setdefault(job.reader.gpu.device.index, []).append(job)
        if len(by_gpu) < 2:
            return
        first, *others = by_gpu
        lane.jobs = by_gpu[first]
        log.info("GPUs: one thread cannot read all of them in time; each has its own now")
        for index in others:
            self.start(f"{lane.name}.{index}", by_gpu[index], limit_ns=lane.limit_ns)

    def hanging(self, now_ns: int, longer_than_ns: int) -> list[tuple[DeviceReader, str, int]]:
        """(device, call, ns) of every call that has not returned for so long."""
        found = []
        for lane in self.all():
            took, step = lane.hangs_ns(now_ns), lane.guard.step
            if took > longer_than_ns and step is not None:
                found.append((lane.reader, step.name, took))
        return found

    def stop(self, wait_s: float) -> bool:
        """End every lane; waits for those that are not inside a call that hangs. True where no call is left running."""
        self.stopping.set()
        for lane in self.all():
            if lane.hangs_ns(self.clock.mono_ns()) <= self.limit_ns:
                lane.thread.join(wait_s)
        return not any(lane.guard.inside for lane in self.all())

    def ended(self, lane: Lane) -> None:
        """A lane's thread is about to end."""
        with self._lock:
            if lane in self._lanes:
                self._lanes.remove(lane)

    def rejoin(self, lane: Lane) -> bool:
        """Give the one step of a lane that is well again back to its device's lane; False where there is none."""
        job = lane.jobs[0]
        fits = (job.pace, Pace.TICK) if job.pace is Pace.BYTES else (job.pace,)
        with self._lock:
            for home in self._lanes:
                there = next((each for each in home.jobs if each.reader is job.reader and each.pace in fits), None)
                if there is not None and not home.alone and not home.ending:
                    there.steps += job.steps
                    return True
        return False

    def left_alone(self, lane: Lane) -> bool:
        """Whether a lane whose call has returned keeps it; waits for the watch to have shared everything out."""
        with self._lock:
            return lane.alone

    def _give_up(self, lane: Lane, step: Step, since_ns: int) -> None:
        with self._lock:
            extra = [each for each in self._lanes if each.alone or each.guard.given_up]
            if len(extra) >= MOST_GIVEN_UP or sum(each.reader is lane.reader for each in extra) >= MOST_GIVEN_UP_A_DEVICE:
                self.stats.not_replaced += lane.not_replaced_ns != since_ns
                lane.not_replaced_ns = since_ns
                return
            if not lane.guard.give_up(since_ns):
                return
            self.stats.given_up += 1
            self.stats.failures[HANGS] = self.stats.failures.get(HANGS, 0) + 1
            rest = self._without(lane, step)
            if rest is None:
                return
            self._lanes.append(rest)
        rest.thread.start()

    def _without(self, lane: Lane, step: Step) -> Lane | None:
        """A new lane with everything that ``lane`` was to read but ``step``, and the round that it was in; None for nothing."""
        round_, jobs = lane.round, lane.jobs
        assert round_ is not None
        job = round_.job
        parts = job.reader.split(step)
        place = job.steps.index(step)
        job.steps[place : place + 1] = parts
        round_.next_step = place
        lane.alone, lane.jobs, lane.round = not parts, [] if parts else [job.alone(step)], None
        return Lane(self, lane.name, jobs, limit_ns=lane.limit_ns, going_on=round_) if jobs else None
