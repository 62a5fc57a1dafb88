"""Make the calls of one wake of a lane as one flat list, and keep their answers.

Each call sleeps in the driver and wakes on cold caches, so Python code between two calls is at its most expensive.
Everything is therefore laid out before the first call, and decoded up to half a second after the last (``worker.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

from handrail.device_counters.gpu import Pace
from handrail.records.devices import DeviceSample, DeviceValue
from handrail_sidecar.gpu.reader import Laid, ReadingJob
from handrail_sidecar.gpu.steps import NvmlStep, SamplerClock

TELL_NS: Final = 450_000_000
"""Longest time that an answer waits to be reported: five rounds at 10 Hz."""

MOST_UNTOLD: Final = 128
"""Most rounds reported together, so that reporting takes a few ms at most."""


class Round:
    """One reading of a job: its steps in a wave, from ``first`` to before ``past``."""

    __slots__ = ("first", "job", "past", "wave")

    def __init__(self, job: ReadingJob, wave: Wave, first: int, past: int) -> None:
        self.job = job
        self.wave = wave
        self.first = first
        self.past = past

    @property
    def began_ns(self) -> int:
        began: int = self.wave.out[2 * self.first]
        return began

    def add_call(self) -> Iterator[tuple[NvmlStep, Any, int, int]]:
        """Yield each step with what its call returned or raised, and its begin and end."""
        steps, out = self.wave.steps[self.first : self.past], self.wave.out[2 * self.first : 2 * self.past + 1]
        return zip(steps, out[1::2], out[:-1:2], out[2::2], strict=True)

    def sample(self, values: list[DeviceValue], last: Round) -> DeviceSample:
        """Build one record from this round up to round ``last`` of the same device.

        Both rounds belong to the same wave.
        """
        wave, began_ns = self.wave, self.began_ns
        return self.job.reader.sample(values, began_ns + wave.unix_offset_ns, wave.out[2 * last.past] - began_ns)


class Wave:
    """The calls of one wake: the lane makes them, the watch may take them away.

    ``calls`` alternates between the clock and a call, and begins and ends with the clock.
    ``out`` holds what each returned, or the exception that it raised.
    So the length of ``out`` shows which call is running, and its last entry shows since when.
    The lane iterates over ``todo``; once it is cleared, the lane begins no other call.
    Clearing is atomic and needs no lock, so each call is made by exactly one thread.
    """

    __slots__ = ("began_ns", "calls", "failed", "out", "rounds", "steps", "taken_at", "taken_ns", "todo", "unix_offset_ns")

    def __init__(self, clock: SamplerClock, due: Iterable[tuple[ReadingJob, Laid]]) -> None:
        self.rounds: list[Round] = []
        self.steps: list[NvmlStep] = []
        self.failed = False  # a call raised
        self.out: list[Any] = []
        now = clock.mono_ns
        self.calls: list[Callable[[], Any]] = [now]
        for job, laid in due:
            if laid.steps:
                first = len(self.steps)
                self.steps += laid.steps
                self.calls += laid.calls
                self.rounds.append(Round(job, self, first, len(self.steps)))
        self.todo = self.calls.copy()
        self.taken_at = 0  # the step whose call was running when the rest was taken
        self.taken_ns = 0  # when that call began
        self.began_ns: int = now()
        self.unix_offset_ns = clock.unix_ns() - self.began_ns

    def ask(self) -> bool:
        """Make the calls that are left.

        Returns True when all calls of the wave are made and none was taken away.
        """
        append = self.out.append
        for call in self.todo:
            try:
                append(call())
            except Exception as error:  # noqa: PERF203 - one call must not hide the others
                self.failed = True
                append(error)
        return len(self.out) == len(self.calls)

    def go_on(self) -> None:
        """Continue after calls were taken away that no other lane makes."""
        self.todo = self.calls[len(self.out) :]

    def inside(self) -> tuple[int, int] | None:
        """Return the step whose call is running and when it began; None between two calls."""
        done = len(self.out)
        return (done // 2, self.out[done - 1]) if done & 1 and done < len(self.calls) else None

    def take(self, since_ns: int) -> bool:
        """Take the calls not yet begun from a thread whose call began at ``since_ns``.

        Returns False when that call has just returned.
        """
        self.todo.clear()
        inside = self.inside()
        if inside is None or inside[1] != since_ns:
            return False
        self.taken_at, self.taken_ns = inside
        return True

    def job_at(self, place: int) -> ReadingJob:
        """Return the job that owns the step at this place."""
        return next(each.job for each in self.rounds if place < each.past)

    def done(self, place: int) -> list[Round]:
        """Return the rounds, or their beginnings, that lie before this step."""
        return [Round(each.job, self, each.first, min(each.past, place)) for each in self.rounds if each.first < place]

    def rest(self, place: int) -> list[tuple[ReadingJob, list[NvmlStep]]]:
        """Return the jobs and steps that are left to read from this step on."""
        return [(each.job, self.steps[max(each.first, place) : each.past]) for each in self.rounds if each.past > place]


def is_to_tell(untold: Sequence[Round], next_ns: int) -> bool:
    """Return whether the unreported rounds cannot wait for the round at ``next_ns``.

    ``untold``: unreported rounds, oldest first.
    """
    return bool(untold) and (len(untold) >= MOST_UNTOLD or next_ns - untold[0].began_ns > TELL_NS)


def read_round(job: ReadingJob, clock: SamplerClock) -> DeviceSample | None:
    """Read every step of a job once, in the caller's thread.

    Returns None when no value came. Raises ``NvmlFailed`` when the device is lost.
    """
    wave = Wave(clock, [(job, Laid(tuple(job.steps), clock.mono_ns))])
    wave.ask()
    values: list[DeviceValue] = []
    for round_ in wave.rounds:
        for step, answer, began_ns, ended_ns in round_.add_call():
            try:
                values += step.took(answer, began_ns, ended_ns, began_ns + wave.unix_offset_ns)
            except Exception as error:  # noqa: PERF203 - one step must not hide the others
                step.failed(error)
    if job.pace is Pace.RARE:
        values += job.reader.seldom()
    job.reader.settle(job)
    return wave.rounds[0].sample(values, wave.rounds[0]) if values else None
