"""What a lane asks at one waking: one flat list of calls with the time between them, and what came of them.

Flat, since a call sleeps in the driver and wakes on cold caches: what stands between one call and the next is paid at its
dearest. So everything is laid out before the first call, and understood after the last (half a second later: ``worker.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

from handrail.device_counters.gpu import Pace
from handrail.records.devices import DeviceSample, DeviceValue
from handrail_sidecar.gpu.reader import Laid, ReadingJob
from handrail_sidecar.gpu.steps import NvmlStep, SamplerClock

TELL_NS: Final = 450_000_000
"""No answer waits longer to be told: five rounds at 10 Hz."""

MOST_UNTOLD: Final = 128
"""Rounds that are told together, so that telling takes a few ms at most."""


class Round:
    """One reading of a job: its part of a wave, from step ``first`` to before ``past``."""

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
        """Each step, what its call returned or raised, and when it began and ended."""
        steps, out = self.wave.steps[self.first : self.past], self.wave.out[2 * self.first : 2 * self.past + 1]
        return zip(steps, out[1::2], out[:-1:2], out[2::2], strict=True)

    def sample(self, values: list[DeviceValue], last: Round) -> DeviceSample:
        """The record of it and of what was asked after it of the same device, until ``last``, in the same wave."""
        wave, began_ns = self.wave, self.began_ns
        return self.job.reader.sample(values, began_ns + wave.unix_offset_ns, wave.out[2 * last.past] - began_ns)


class Wave:
    """Calls as a lane makes them, and as the watch sees and takes them.

    ``calls`` is the time, a call, the time, a call ... the time; ``out`` what each gave, an exception where it raised one. So the
    length of ``out`` says which call is running, and its last entry since when. ``todo`` is what the lane goes through: emptied,
    it begins no other call. That one step cannot be divided, and needs no lock: each call is made by one thread.
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
        self.taken_at = 0  # the step inside whose call the rest was taken
        self.taken_ns = 0  # since when it was inside
        self.began_ns: int = now()
        self.unix_offset_ns = clock.unix_ns() - self.began_ns

    def ask(self) -> bool:
        """Make the calls that are left; whether all are made now, and none was taken away."""
        append = self.out.append
        for call in self.todo:
            try:
                append(call())
            except Exception as error:  # noqa: PERF203 - one call must not hide the others
                self.failed = True
                append(error)
        return len(self.out) == len(self.calls)

    def go_on(self) -> None:
        """After calls were taken away that nobody else makes."""
        self.todo = self.calls[len(self.out) :]

    def inside(self) -> tuple[int, int] | None:
        """The step whose call is running, by its place, and since when; None between two calls."""
        done = len(self.out)
        return (done // 2, self.out[done - 1]) if done & 1 and done < len(self.calls) else None

    def take(self, since_ns: int) -> bool:
        """Take what has not begun from the thread that is inside a call since then; False where that has just returned."""
        self.todo.clear()
        inside = self.inside()
        if inside is None or inside[1] != since_ns:
            return False
        self.taken_at, self.taken_ns = inside
        return True

    def job_at(self, place: int) -> ReadingJob:
        """Whose step that is."""
        return next(each.job for each in self.rounds if place < each.past)

    def done(self, place: int) -> list[Round]:
        """Readings as far as they come before this step."""
        return [Round(each.job, self, each.first, min(each.past, place)) for each in self.rounds if each.first < place]

    def rest(self, place: int) -> list[tuple[ReadingJob, list[NvmlStep]]]:
        """What is left to ask from this step on."""
        return [(each.job, self.steps[max(each.first, place) : each.past]) for each in self.rounds if each.past > place]


def is_to_tell(untold: Sequence[Round], next_ns: int) -> bool:
    """Whether telling cannot wait for the next round, which is due at ``next_ns``. ``untold``: oldest first."""
    return bool(untold) and (len(untold) >= MOST_UNTOLD or next_ns - untold[0].began_ns > TELL_NS)


def read_round(job: ReadingJob, clock: SamplerClock) -> DeviceSample | None:
    """Every step of a job once, by a caller that waits; None where nothing came. Raises ``NvmlFailed`` for a lost device."""
    wave = Wave(clock, [(job, Laid(tuple(job.steps), clock.mono_ns))])
    wave.ask()
    values: list[DeviceValue] = []
    for round_ in wave.rounds:
        for step, answer, began_ns, ended_ns in round_.add_call():
            try:
                values += step.took(answer, began_ns, ended_ns, began_ns + wave.unix_offset_ns)
            except Exception as error:  # noqa: PERF203 - as above
                step.failed(error)
    if job.pace is Pace.RARE:
        values += job.reader.seldom()
    job.reader.settle(job)
    return wave.rounds[0].sample(values, wave.rounds[0]) if values else None
