"""What plugins and GPU samplers beside the engines of a virtual fleet would have said of no single request.

Each step, a thread that woke late because its process stood still, and the GPU's clock ten times a second. By the hosts' own
clocks, and nothing that cannot be seen there.
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
    """A thread of the engine's process was to wake at ``due_ns`` and did at ``woke_ns``."""

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
    """Every step, host by host; ``ran``: by the end of each."""
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
    """The wake-ups that came late."""
    for host, by in hindered.items():
        shown = clocks[host].elapsed_ns
        for due, woke in late_wakes(by.get("host_pause", ()), 0, over_ns):
            yield PauseObservation(host=host, due_ns=shown(due), woke_ns=shown(woke))


def gpu_clocks(
    hindered: Mapping[str, Mapping[str, Sequence[Hindrance]]], clocks: Mapping[str, HostClock], over_ns: int
) -> Iterator[ClockObservation]:
    """Every sample of every host that has a sampler: all of a run in which one is throttled."""
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
