"""The samples of GPU activity that samplers beside virtual engines would take.

Times are by the hosts' own clocks. The activity comes from the work of each step: a prompt's matrices keep the tensor pipes busy,
reading weights and KV keeps the memory busy.
``SHARES`` are a simplification of our own, of the size that dense models show on Hopper. They are good for telling a prefill from
a decode, and for nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from handrail_sim.emulator.model import ForwardPass
from handrail_sim.emulator.observe import HostClock
from handrail_sim.emulator.scenario import Scenario

EVERY_NS = 100_000_000
SHARES = {
    "weights": (0.12, 0.72),  # weights, read once a step
    "requests": (0.15, 0.30),
    "context": (0.04, 0.85),  # KV to which tokens attend
    "prompt": (0.78, 0.25),
    "pairs": (0.55, 0.15),  # attention within a prompt
}
"""Share of busy tensor pipes and memory interface, for each part of a step's time."""


@dataclass(frozen=True, slots=True)
class Worked:
    """One step of an engine, in true times."""

    begin_ns: int
    end_ns: int
    batch: ForwardPass


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuObservation:
    """One sample: shares of 1 of the time since the sample before it.

    ``reported_ns``: true time.
    """

    host: str
    busy: float
    tensor: float
    dram: float
    at_unix_ns: int
    reported_ns: int


def observe_devices(
    scenario: Scenario, worked: Mapping[str, Sequence[Worked]], clocks: Mapping[str, HostClock], over_ns: int
) -> Iterator[GpuObservation]:
    """Sample ten times a second until the run is over, host by host.

    ``worked``: the steps of each host, in order.
    """
    for host, steps in worked.items():
        first = 0
        for at_ns in range(EVERY_NS, over_ns + EVERY_NS, EVERY_NS):
            begin_ns = at_ns - EVERY_NS
            while first < len(steps) and steps[first].end_ns <= begin_ns:
                first += 1
            busy = tensor = dram = 0.0
            for place in range(first, len(steps)):
                step = steps[place]
                if step.begin_ns >= at_ns:
                    break
                length = (min(step.end_ns, at_ns) - max(step.begin_ns, begin_ns)) / EVERY_NS
                of_tensor, of_dram = activity(scenario, step.batch)
                busy, tensor, dram = busy + length, tensor + length * of_tensor, dram + length * of_dram
            yield GpuObservation(
                host=host,
                busy=min(1.0, busy),
                tensor=min(1.0, tensor),
                dram=min(1.0, dram),
                at_unix_ns=clocks[host].unix_ns(at_ns),
                reported_ns=at_ns,
            )


def activity(scenario: Scenario, batch: ForwardPass) -> tuple[float, float]:
    """Return the shares of tensor pipes and memory over one step.

    Each part of the step counts by its duration.
    """
    parts = {
        "weights": float(scenario.step_ns),
        "requests": float(batch.decoding * scenario.decode_request_ns),
        "context": batch.context_tokens * scenario.decode_context_ps / 1000,
        "prompt": float(batch.prefill_tokens * scenario.prefill_token_ns),
        "pairs": batch.prefill_pairs * scenario.prefill_pair_ps / 1000,
    }
    whole = sum(parts.values()) or 1.0
    tensor = sum(SHARES[name][0] * took for name, took in parts.items()) / whole
    return tensor, sum(SHARES[name][1] * took for name, took in parts.items()) / whole
