"""Compute what each reason added to one gap of a stream.

It computes every step of the gap again without that reason (the step's own twin).
This serves fleets with several reasons at once: there a whole run without one reason moves the effects of all others.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import replace
from itertools import accumulate

from handrail_collector.explain.stalls.evidence import StallCause
from handrail_sim.emulator.core import StepEnded
from handrail_sim.emulator.costs import Costs
from handrail_sim.emulator.host import Hindrance, hindered_ns
from handrail_sim.emulator.scenario import Scenario
from handrail_sim.emulator.simulate import Flight, Ran


class Parts:
    """The parts of all gaps of one run."""

    def __init__(self, scenario: Scenario, ran: Ran, seed: int) -> None:
        self._scenario = scenario
        self._ran = ran
        self._seeds = {host: seed * 1009 + place for place, host in enumerate(ran.steps)}
        self._ends = {host: [end for end, _ in steps] for host, steps in ran.steps.items()}

    def of(self, flight: Flight, index: int) -> dict[StallCause, float]:
        """Return the ns that each reason added to gap ``index`` of the flight's stream."""
        host = flight.plan.decode_host
        assert flight.first_token_ns is not None
        times = list(accumulate(flight.gaps_ns, initial=flight.first_token_ns))
        begin, end = times[index], times[index + 1]
        found: dict[StallCause, float] = {}
        for first, last in flight.preempted:
            pause = min(end, last if last is not None else end) - max(begin, first)
            if pause > 0:
                found[StallCause.PREEMPTION] = found.get(StallCause.PREEMPTION, 0.0) + pause
        place = bisect_right(self._ends[host], begin)
        while place < len(self._ends[host]) and self._ends[host][place] <= end:
            ended_ns, step = self._ran.steps[host][place]
            if not any(first <= step.begin_ns and (last is None or ended_ns <= last) for first, last in flight.preempted):
                for cause, ns in self._step(host, ended_ns, step).items():
                    found[cause] = found.get(cause, 0.0) + ns
            place += 1
        return {cause: ns for cause, ns in found.items() if ns > 0}

    def _step(self, host: str, ended_ns: int, step: StepEnded) -> dict[StallCause, float]:
        took_ns, begin_ns, batch = ended_ns - step.begin_ns, step.begin_ns, step.batch
        by = self._ran.hindered[host]
        every = [each for some in by.values() for each in some]
        costs = Costs(self._scenario, self._seeds[host], lambda: begin_ns)
        alone = costs.step_ns(batch)
        bare = costs.step_ns(replace(batch, prefill_tokens=0, prefill_pairs=0))
        posting = took_ns - hindered_ns(begin_ns, alone, every)
        work = alone + posting if not _hindered(every, begin_ns, ended_ns) else alone
        prompts = took_ns - hindered_ns(begin_ns, max(1, work - (alone - bare)), every)
        tokens = max(1, step.prefill_tokens + step.resumed_tokens)
        return {
            StallCause.KV_LANDING: posting if posting > 0 else 0.0,
            StallCause.PREFILL_COSCHEDULED: prompts * step.prefill_tokens / tokens,
            StallCause.PREEMPTION: prompts * step.resumed_tokens / tokens,
            StallCause.GPU_THROTTLED: took_ns - hindered_ns(begin_ns, work, by.get("host_pause", []))
            if "gpu_throttled" in by
            else 0.0,
            StallCause.HOST_PAUSE: took_ns - hindered_ns(begin_ns, work, by.get("gpu_throttled", []))
            if "host_pause" in by
            else 0.0,
        }


def _hindered(by: list[Hindrance], begin_ns: int, end_ns: int) -> bool:
    return any(first < end_ns and last > begin_ns for each in by for first, last in each.times(begin_ns, end_ns))
