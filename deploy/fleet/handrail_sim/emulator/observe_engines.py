"""The engine records of a virtual fleet that belong to no single request.

They are each step, each thread that woke late because its process was paused, and the GPU's clock ten times a second.
All are by the hosts' own clocks, and contain nothing that a real host cannot see.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from handrail_sim.emulator.core import StepEnded
from handrail_sim.emulator.observe import HostClock
from handrail_sim.emulator.slowdown import Hindrance, late_wakes

SAMPLE_NS = 100_000_000
CLOCK_HERTZ = 1_980_000_000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepObservation:
    """One step of an engine, by its monotonic clock since the run began."""

    host: str
    begin_ns: int
    end_ns: int
    requests: int
    prefill_requests: int
    prefill_tokens: int
    resumed_tokens: int
    decode_tokens: int
    preemptions: int
    landed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PauseObservation:
    """A late wake-up of a thread in the engine's process.

    It was due at ``due_ns`` and happened at ``woke_ns``.
    """

    host: str
    due_ns: int
    woke_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockObservation:
    """A GPU's clock, and whether something held it down."""

    host: str
    at_ns: int
    hertz: float
    throttled: bool


EngineMoment = StepObservation | PauseObservation | ClockObservation


def steps(ran: Mapping[str, Sequence[tuple[int, StepEnded]]], clocks: Mapping[str, HostClock]) -> Iterator[StepObservation]:
    """Yield every step, host by host. ``ran``: steps by their end."""
    for host, ended in ran.items():
        shown = clocks[host].elapsed_ns
        for at_ns, step in ended:
            yield StepObservation(
                host=host,
                begin_ns=shown(step.begin_ns),
                end_ns=shown(at_ns),
                requests=step.requests,
                prefill_requests=step.prefill_requests,
                prefill_tokens=step.prefill_tokens,
                resumed_tokens=step.resumed_tokens,
                decode_tokens=step.tokens - step.prefill_tokens - step.resumed_tokens,
                preemptions=step.preemptions,
                landed=step.landed,
            )


def pauses(
    hindered: Mapping[str, Mapping[str, Sequence[Hindrance]]], clocks: Mapping[str, HostClock], over_ns: int
) -> Iterator[PauseObservation]:
    """Yield the wake-ups that came late."""
    for host, by in hindered.items():
        shown = clocks[host].elapsed_ns
        for due, woke in late_wakes(by.get("host_pause", ()), 0, over_ns):
            yield PauseObservation(host=host, due_ns=shown(due), woke_ns=shown(woke))


def gpu_clocks(
    hindered: Mapping[str, Mapping[str, Sequence[Hindrance]]], clocks: Mapping[str, HostClock], over_ns: int
) -> Iterator[ClockObservation]:
    """Yield the GPU clock samples of every host that has a sampler.

    A host has a sampler in a run in which a GPU is throttled.
    """
    if not any("gpu_throttled" in by for by in hindered.values()):
        return
    for host, by in hindered.items():
        slow = [(begin, end, each.share) for each in by.get("gpu_throttled", ()) for begin, end in each.times(0, over_ns)]
        place = 0
        for at_ns in range(0, over_ns, SAMPLE_NS):
            while place < len(slow) and slow[place][1] <= at_ns:
                place += 1
            share = slow[place][2] if place < len(slow) and slow[place][0] <= at_ns else 1.0
            yield ClockObservation(
                host=host, at_ns=clocks[host].elapsed_ns(at_ns), hertz=CLOCK_HERTZ * share, throttled=share < 1.0
            )
