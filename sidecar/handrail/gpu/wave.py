"""What one lane is doing: inside which call since when, and which part of what was due it has read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from handrail.gpu.reader import Job
from handrail.gpu.steps import Clock, GivenUp, Step


class Guard:
    """What one lane is doing: which step, inside a call since when. The watch gives it up; the call then raises ``GivenUp``.

    A call has a ticket, and only one can take it: the call when it returns, or the watch. No lock: 400 calls are made a second.
    """

    __slots__ = ("_mono_ns", "given_up", "since_ns", "step", "ticket")

    def __init__(self, clock: Clock) -> None:
        self.step: Step | None = None
        self.since_ns = 0
        self.given_up = False
        self.ticket: list[int] = []
        self._mono_ns = clock.mono_ns

    def __call__(self, call: Callable[[], Any]) -> Any:
        began = self.since_ns = self._mono_ns()
        ticket = self.ticket = [began]
        try:
            answer = call()
        except Exception:
            self._leave(ticket)
            raise
        self._leave(ticket)
        step = self.step
        if step is not None:
            took = self._mono_ns() - began
            step.calls += 1
            step.read_ns = began
            step.spent_ns += took
            if took > step.longest_ns:
                step.longest_ns = took
        return answer

    @staticmethod
    def _leave(ticket: list[int]) -> None:
        try:
            ticket.pop()
        except IndexError:
            raise GivenUp from None

    @property
    def inside(self) -> bool:
        """Whether a call is running, given up or not."""
        return self.given_up or bool(self.ticket)

    def give_up(self) -> bool:
        """Take everything but the running call from this lane; False where it has just returned."""
        try:
            self.ticket.pop()
        except IndexError:
            return False
        self.given_up = True
        return True

    def renew(self) -> None:
        """The thread that was given up goes on with what it kept."""
        self.given_up = False


class Round:
    """One reading of a job, as far as it has come. ``asked``: steps whose calls have returned, and their answers."""

    __slots__ = ("asked", "at_unix_ns", "began_ns", "job", "next_step", "took_ns")

    def __init__(self, job: Job) -> None:
        self.job = job
        self.at_unix_ns = 0
        self.began_ns = 0
        self.took_ns = 0
        self.next_step = 0
        self.asked: list[tuple[Step, Any]] = []

    @property
    def index(self) -> int | None:
        """NVML's, of the GPU."""
        return self.job.reader.gpu.device.index


TELL_NS: Final = 450_000_000
"""No answer waits longer to be told: five rounds at 10 Hz."""

MOST_UNTOLD: Final = 128
"""Rounds that are told together, so that telling takes a few ms at most."""


@dataclass(slots=True)
class Wave:
    """What a lane reads: rounds whose calls are made (the first ``place``) and wait to be told, then those that are due.

    Calls are made in time and what they answered is told half a second of them at once: a call sleeps in the driver, and what
    the processor's caches held may be gone by then (64 samples told together take 19 us each on a busy host, 11 when told
    again and again; with the double). ``soon``: told as soon as what is due was asked: something is new, failed or hangs.
    """

    rounds: list[Round] = field(default_factory=list)
    place: int = 0
    soon: bool = False

    def is_to_tell(self, next_ns: int) -> bool:
        """Whether telling cannot wait for the next round, which is due at ``next_ns``."""
        if not self.place:
            return False
        return self.soon or self.place >= MOST_UNTOLD or next_ns - self.rounds[0].began_ns > TELL_NS

    def of(self, index: int | None, *, not_it: bool = False) -> Wave:
        """The part for one GPU, or for the others, as far as it has come."""
        kept = [(place, each) for place, each in enumerate(self.rounds) if (each.index == index) is not not_it]
        return Wave([each for _, each in kept], sum(place < self.place for place, _ in kept), soon=True)
