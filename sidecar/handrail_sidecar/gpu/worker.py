"""Run one thread that reads GPU counters.

The watch may inspect the thread and take its work."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from handrail.device_counters.gpu import Pace
from handrail.records.devices import DeviceSample, DeviceValue
from handrail_sidecar.gpu.call_batch import Round, Wave, is_to_tell
from handrail_sidecar.gpu.failures import Meaning, NvmlFailed, failure
from handrail_sidecar.gpu.halt import Halt
from handrail_sidecar.gpu.reader import DeviceReader, Laid, ReadingJob
from handrail_sidecar.gpu.steps import NvmlStep, SamplerClock

log = logging.getLogger(__name__)

QUIET_ROUNDS: Final = 50
"""Quick rounds after which a call that hung rejoins the others."""

_NEVER: Final = 1 << 63
_LONGEST_PAUSE_NS: Final = 60_000_000_000
_FIRST_PAUSE_NS: Final = 1_000_000_000
_RETRIES_AT_ONCE: Final = 2
_SHARE_OVER_NS: Final = 2_000_000_000
_MOST_SHARE: Final = 0.6  # of its time that a lane may read; above it, the lane cannot keep up
CALM_NS: Final = 60_000_000_000
"""Time without a hanging call after which a GPU's own lane rejoins another one."""

Deliver = Callable[[DeviceSample], None]
"""Takes a sample, in the thread that read it. Never blocks, never raises."""


@dataclass(slots=True)
class LaneStats:
    """Counts since start, over all lanes."""

    samples: int = 0
    missed: int = 0  # periods of a job in which it was not read
    faults: int = 0  # our own errors in reading
    failures: dict[int, int] = field(default_factory=dict)  # calls that failed, by code
    given_up: int = 0
    not_replaced: int = 0  # hanging calls for which no thread was left: the device's other counters wait


class Owner(Protocol):
    """What a lane needs from its owner; called in the lane's thread."""

    clock: SamplerClock
    deliver: Deliver
    stopping: Halt
    stats: LaneStats

    def lost(self, reader: DeviceReader, code: int) -> None: ...

    def spread(self, lane: Lane) -> None: ...

    def rejoin(self, lane: Lane) -> bool: ...

    def merge(self, lane: Lane) -> None: ...

    def well(self, lane: Lane, next_ns: int) -> None: ...

    def was_given_up(self, lane: Lane) -> bool: ...

    def left_alone(self, lane: Lane) -> ReadingJob | None: ...

    def ended(self, lane: Lane) -> None: ...


class Lane:
    """One thread and its jobs.

    ``reader``: of the device at whose call the lane was given up; ``alone``: it keeps only that call.
    Calls are made in time, and their answers are reported together every half second: a call sleeps in the driver, and the
    processor's caches may be cold afterwards. 64 samples reported together take 19 us each on a busy host, 11 us when reported
    repeatedly (with the double).
    """

    def __init__(
        self,
        owner: Owner,
        name: str,
        jobs: Iterable[ReadingJob],
        limit_ns: int,
        untold: Iterable[Round] = (),
        rest: Sequence[tuple[ReadingJob, Sequence[NvmlStep]]] = (),
    ) -> None:
        self.name = name
        self.jobs = list(jobs)
        self.reader = self.jobs[0].reader
        self.limit_ns = limit_ns  # for one call
        self.alone = False
        self.given_up = False  # by the watch, while it was inside a call
        self.wave: Wave | None = None  # while it makes calls
        self.untold = list(untold)  # rounds that were read and not reported, oldest first
        self.due_ns = 0  # when it wakes, while it sleeps
        self.not_replaced_ns = 0  # begin of the call for which no thread was left
        self.ending = False
        self.incoming: list[list[ReadingJob]] = []  # from a lane that ended
        self.share = 0.0  # of its time that it spends reading
        self.began_ns = owner.clock.mono_ns()
        self._rest = rest  # of a wave that another lane began
        self._soon = bool(untold)  # something is new, failed or hangs: report as soon as the due calls are made
        self._quiet = 0
        self._busy_ns = 0  # time spent reading since ``_since_ns``
        self._since_ns = self.began_ns
        self._owner = owner
        self.thread = threading.Thread(target=self._run, name=f"gpu {name}", daemon=True)

    def inside(self) -> tuple[NvmlStep, DeviceReader, int] | None:
        """Return the call that the lane is inside of: step, device, and begin."""
        wave = self.wave
        inside = wave.inside() if wave is not None else None
        if wave is None or inside is None:
            return None
        place, since_ns = inside
        return wave.steps[place], wave.job_at(place).reader, since_ns

    def _run(self) -> None:
        try:
            while (self.jobs or self.incoming) and not self.ending:
                try:
                    wave = self._due()
                    if wave is None:  # the sampler stops
                        self._tell()
                        return
                    self.wave = wave
                    if self._came_back(wave):
                        self._call(wave)
                    elif not self._keep(wave):
                        return
                except Exception:  # noqa: PERF203 - an error of ours in one wave must not end all reading
                    self._fault("reading GPU counters failed in %s", self.name)
                    self.wave = None
                    for job in self.jobs:
                        job.plan_next(self._owner.clock.mono_ns())
        finally:
            self._owner.ended(self)

    def _due(self) -> Wave | None:
        """Sleep until a job is due and return its wave; None when the sampler stops first."""
        owner = self._owner
        if self._rest:
            rest, self._rest, self._soon = self._rest, (), True
            return Wave(owner.clock, [(job, Laid(steps, owner.clock.mono_ns)) for job, steps in rest])
        while self.incoming:
            self.jobs += [job for job in self.incoming.pop() if job not in self.jobs]
        next_ns = min([job.next_ns for job in self.jobs])
        wait_ns = next_ns - owner.clock.mono_ns()
        if wait_ns > 0:
            self.due_ns = next_ns
            owner.well(self, next_ns)
            if owner.stopping.wait(wait_ns / 1e9):
                return None
            self.due_ns = 0
        elif owner.stopping.is_set():
            return None
        now = max(next_ns, owner.clock.mono_ns())
        due = [job for job in self.jobs if job.next_ns <= now]
        for job in due:
            self._soon = self._soon or job.is_new
            owner.stats.missed += job.plan_next(now)
        return Wave(owner.clock, [(job, job.laid_out(now, owner.clock.mono_ns)) for job in due])

    def _came_back(self, wave: Wave) -> bool:
        """Make the calls of a wave; return False when the watch took some of them."""
        while True:
            whole = wave.ask()
            if self._owner.was_given_up(self):
                return False
            if whole:
                return True
            wave.go_on()  # the watch looked just when a call returned

    def _call(self, wave: Wave) -> None:
        self.untold += wave.rounds
        self.wave = None
        self._soon = self._soon or wave.failed
        if self._soon or self.alone or is_to_tell(self.untold, min([job.next_ns for job in self.jobs], default=_NEVER)):
            self._tell()
        self._look_back(wave.began_ns)

    def _tell(self) -> None:
        """Decode the answers so far and deliver them.

        Each device gets one sample for everything that was read from it at one wake.
        """
        self._soon = False
        owner = self._owner
        while self.untold:
            rounds = [self.untold.pop(0)]
            first, reader = rounds[0], rounds[0].job.reader
            while self.untold and self.untold[0].wave is first.wave and self.untold[0].job.reader is reader:
                rounds.append(self.untold.pop(0))
            values: list[DeviceValue] = []
            lost: NvmlFailed | None = None
            last = first
            try:
                for last in rounds:
                    self._finish(last, values)
            except NvmlFailed as problem:
                lost = problem
            if values:
                owner.stats.samples += 1
                owner.deliver(first.sample(values, last))
            if lost is not None:
                self._lost(last, lost.code)

    def _look_back(self, began_ns: int) -> None:
        """After a wake, check whether this thread has too much to do or is not needed."""
        now = self._owner.clock.mono_ns()
        self._busy_ns += now - began_ns
        if self.alone:
            self.ending = not any(job.steps for job in self.jobs)
            self._perhaps_rejoin(now - began_ns)
        elif not self.untold and now - self._since_ns > _SHARE_OVER_NS:
            self._balance(now)

    def _finish(self, round_: Round, values: list[DeviceValue]) -> None:
        """Add the values of a round. Raises ``NvmlFailed`` when the device is lost."""
        job = round_.job
        unix_offset_ns = round_.wave.unix_offset_ns
        for step, answer, began_ns, ended_ns in round_.add_call():
            try:
                values += step.took(answer, began_ns, ended_ns, began_ns + unix_offset_ns)
                step.failures = 0
            except Exception as error:  # noqa: PERF203 - one step must not hide the others
                self._failed(job, step, error)
        if job.pace is Pace.RARE:
            values += job.reader.seldom()
        if job.reader.settle(job) and not self.alone:
            self.jobs = [each for each in self.jobs if each.reader is not job.reader or each.pace is Pace.SNAPSHOT]
            self.jobs += [] if job.pace is Pace.SNAPSHOT else job.reader.lane_jobs()

    def _failed(self, job: ReadingJob, step: NvmlStep, error: Exception) -> None:
        """Handle a failed step: its values move on, it is retried later, or all is lost."""
        try:
            step.failed(error)
        except NvmlFailed as problem:
            failures = self._owner.stats.failures
            failures[problem.code] = failures.get(problem.code, 0) + 1
            if failure(problem.code).meaning is not Meaning.RETRY:
                raise
            self._pause(job, step)
        except Exception:  # an error of ours in one step must not end the reading of the others
            self._fault("a GPU counter could not be read: %s", step.name)
            self._pause(job, step)

    def _pause(self, job: ReadingJob, step: NvmlStep) -> None:
        """Retry after a failure that may pass: at once at first, then with growing pauses."""
        step.failures += 1
        if step.failures > _RETRIES_AT_ONCE:
            pause = _FIRST_PAUSE_NS << min(step.failures - _RETRIES_AT_ONCE - 1, 10)
            step.resume_ns = self._owner.clock.mono_ns() + min(pause, _LONGEST_PAUSE_NS)
            job.paused_ns = max(job.paused_ns, step.resume_ns)

    def _balance(self, now_ns: int) -> None:
        """Give each GPU its own thread when one is too busy; merge threads that stay calm."""
        self.share = self._busy_ns / (now_ns - self._since_ns)
        self._busy_ns, self._since_ns = 0, now_ns
        if self.share > _MOST_SHARE:
            self._owner.spread(self)
        elif now_ns - self.began_ns > CALM_NS:
            self._owner.merge(self)

    def _keep(self, wave: Wave) -> bool:
        """Go on alone with a call that hung and has returned.

        Returns False when another lane reads it now.
        """
        job, now = self._owner.left_alone(self), self._owner.clock.mono_ns()
        if job is None:
            return False
        self._owner.stats.missed += (now - wave.taken_ns) // job.period_ns
        job.next_ns = now
        self._quiet = 0
        self.wave, self.given_up = None, False
        return True

    def _perhaps_rejoin(self, took_ns: int) -> None:
        self._quiet = self._quiet + 1 if took_ns < self.limit_ns // 4 else 0
        if not self.ending and self._quiet >= QUIET_ROUNDS:
            self.ending = self._owner.rejoin(self)

    def _lost(self, round_: Round, code: int) -> None:
        """End the jobs of a device that is lost; all jobs when the session is lost."""
        if failure(code).meaning is Meaning.SESSION_LOST:
            self.jobs, self.untold = [], []
        else:
            index = round_.job.index
            self.jobs = [each for each in self.jobs if each.index != index]
            self.untold = [each for each in self.untold if each.job.index != index]
        self._owner.lost(round_.job.reader, code)

    def _fault(self, words: str, what: object) -> None:
        self._owner.stats.faults += 1
        if self._owner.stats.faults == 1:
            log.exception(words, what)
