"""What sidecars record of a virtual fleet's engines and GPUs.

That is steps, pauses, clocks and activity.
The sidecar's own code decides which steps are recorded in full. The records contain nothing that a real host cannot see.
A GPU's activity comes from the work of each step: a prompt's matrices keep the tensor pipes busy, reading weights and KV keeps
the memory busy. ``SHARES`` are a simplification of our own, of the size that dense models show on Hopper. They are good for
telling a prefill from a decode, and for nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Final

from handrail import conventions as names
from handrail.records import Iteration, Process, ProcessEvent, ProcessEventKind, Role, Source
from handrail.records.devices import Device, DeviceKind, DeviceRun, Series
from handrail_sidecar.plugin_merge.bounds import MergeLimits
from handrail_sidecar.plugin_merge.engine import ObservedEngine
from handrail_sidecar.plugin_merge.steps import Steps
from handrail_sim.emulator.core import StepEnded
from handrail_sim.emulator.costs import ForwardPass
from handrail_sim.emulator.faults import Fault
from handrail_sim.emulator.host import WATCH_NS, Hindrance, late_wakes
from handrail_sim.emulator.observe import HostClock, clocks
from handrail_sim.emulator.scenario import Scenario
from handrail_sim.emulator.simulate import Ran

SAMPLE_NS: Final = 100_000_000
CLOCK_HERTZ: Final = 1_980_000_000.0
SHARES: Final = {
    "weights": (0.12, 0.72),  # weights, read once a step
    "requests": (0.15, 0.30),
    "context": (0.04, 0.85),  # KV to which tokens attend
    "prompt": (0.78, 0.25),
    "pairs": (0.55, 0.15),  # attention within a prompt
}
"""Share of busy tensor pipes and memory interface, for each part of a step's time."""

_CORE_PID: Final = 4711
_SECOND_NS: Final = 1_000_000_000
_DIGITS: Final = 4


def processes(scenario: Scenario) -> dict[str, Process]:
    """Return the edge, the router and the engines, by host."""
    hosts = scenario.hosts()
    roles = dict.fromkeys(hosts.prefill, Role.COLLOCATED if hosts.collocated else Role.PREFILL)
    roles |= {} if hosts.collocated else dict.fromkeys(hosts.decode, Role.DECODE)
    roles |= {"edge": Role.EDGE, "router": Role.ROUTER}
    return {host: Process(role=role, instance=f"{host}:8000", host=host, host_name=host) for host, role in roles.items()}


EngineRecord = Iteration | ProcessEvent | DeviceRun


def engine_records(
    ran: Ran, processes: Mapping[str, Process], clocks: Mapping[str, HostClock], over_ns: int
) -> Iterator[tuple[int, EngineRecord]]:
    """Yield all records of a run that belong to no single request, in no order.

    Each with the time of its report, by its host's monotonic clock since the run began.
    """
    for host, steps in ran.steps.items():
        yield from _iterations(steps, processes[host], clocks[host])
    for host, by in ran.hindered.items():
        yield from _pauses(by.get("host_pause", ()), processes[host], clocks[host], over_ns)
    for host, readings in clock_readings(ran.hindered, over_ns).items():
        yield from _clock_runs(readings, processes[host], clocks[host])


def _iterations(steps: Sequence[tuple[int, StepEnded]], process: Process, clock: HostClock) -> Iterator[tuple[int, EngineRecord]]:
    made = Steps(ObservedEngine(process), MergeLimits())
    shown = clock.elapsed_ns
    at_ns = 0
    for ended_ns, step in steps:
        fields = {
            "begin_ns": shown(step.begin_ns),
            "requests": step.requests,
            "prefill_requests": step.prefill_requests,
            "prefill_tokens": step.prefill_tokens,
            "decode_tokens": step.tokens - step.prefill_tokens - step.resumed_tokens,
            "preemptions": step.preemptions,
            "running": None,
            "waiting": None,
            "landed": step.landed,
            "resumed_tokens": step.resumed_tokens,
        }
        at_ns = shown(ended_ns)
        for iteration in made.step(process.instance, _CORE_PID, clock.unix_ns(0), at_ns, fields):
            yield at_ns, iteration
    for iteration in made.close_boot(process.instance):
        yield at_ns, iteration


def _pauses(by: Sequence[Hindrance], process: Process, clock: HostClock, over_ns: int) -> Iterator[tuple[int, EngineRecord]]:
    """Yield the late wake-ups of a thread in the engine's process."""
    for due, woke in late_wakes(by, 0, over_ns):
        event = ProcessEvent(
            process=process,
            source=Source.PLUGIN,
            at_unix_ns=clock.unix_ns(due),
            kind=ProcessEventKind.PAUSED,
            engine="vllm",
            pid=_CORE_PID,
            process_kind="core",
            detail="held",
            at_bound_ns=WATCH_NS,
            duration_ns=clock.elapsed_ns(woke) - clock.elapsed_ns(due),
        )
        yield clock.elapsed_ns(woke), event


def clock_readings(hindered: Mapping[str, Mapping[str, Sequence[Hindrance]]], over_ns: int) -> dict[str, list[tuple[int, float]]]:
    """Return the readings of each host's GPU clock.

    A reading is the true time and the share of the full clock.
    A host has a sampler in a run in which a GPU is throttled; the result is empty in other runs.
    """
    if not any("gpu_throttled" in by for by in hindered.values()):
        return {}
    return {host: _clock_shares(by.get("gpu_throttled", ()), over_ns) for host, by in hindered.items()}


def _clock_shares(by: Sequence[Hindrance], over_ns: int) -> list[tuple[int, float]]:
    slow = [(begin, end, each.share) for each in by for begin, end in each.times(0, over_ns)]
    found, place = [], 0
    for at_ns in range(0, over_ns, SAMPLE_NS):
        while place < len(slow) and slow[place][1] <= at_ns:
            place += 1
        found.append((at_ns, slow[place][2] if place < len(slow) and slow[place][0] <= at_ns else 1.0))
    return found


def _clock_runs(readings: Sequence[tuple[int, float]], process: Process, clock: HostClock) -> Iterator[tuple[int, EngineRecord]]:
    """Yield a device run for each second of readings."""
    for _, group in groupby(readings, key=lambda reading: clock.elapsed_ns(reading[0]) // _SECOND_NS):
        of_second = list(group)
        run = DeviceRun(
            process=process,
            source=Source.NVML,
            device=_gpu(process),
            at=[clock.unix_ns(at_ns) for at_ns, _ in of_second],
            took_ns=[0] * len(of_second),
            series=_clock_series([share for _, share in of_second]),
        )
        yield clock.elapsed_ns(of_second[-1][0]), run


def _gpu(process: Process) -> Device:
    return Device(kind=DeviceKind.GPU, key=f"GPU-{process.host}", index=0, engine=process.instance)


def _clock_series(shares: Sequence[float | None]) -> list[Series]:
    """Build the series of the clock and of its throttling.

    None: the clock was not read.
    """
    return [
        Series(names.GPU_CLOCK, "sm", 0, [None if share is None else CLOCK_HERTZ * share for share in shares]),
        Series(names.GPU_THROTTLED, "hw_thermal", 0, [None if share is None else float(share < 1.0) for share in shares]),
    ]


def gpu_evidence(scenario: Scenario, ran: Ran, faults: Sequence[Fault], started_unix_ns: int, over_ns: int) -> list[DeviceRun]:
    """Build the device runs that a collector stores of a run's GPUs.

    They are the activity, and the clock where it was read.
    """
    by_host, here = clocks(scenario, faults, started_unix_ns), processes(scenario)
    readings = clock_readings(ran.hindered, over_ns)
    made = []
    for host, steps in ran.steps.items():
        samples = list(gpu_activity(scenario, steps, over_ns))
        series = [
            Series(name, "", 0, [round(sample[place], _DIGITS) for sample in samples])
            for place, name in enumerate((names.GPU_BUSY, names.GPU_TENSOR_ACTIVE, names.GPU_DRAM_ACTIVE), 1)
        ]
        if readings:
            shares = dict(readings[host])
            series += _clock_series([shares.get(at_ns) for at_ns, *_ in samples])
        made.append(
            DeviceRun(
                process=here[host],
                source=Source.NVML,
                device=replace(_gpu(here[host]), product="Emulated GPU"),
                at=[by_host[host].unix_ns(at_ns) for at_ns, *_ in samples],
                took_ns=[1_000_000] * len(samples),
                series=series,
            )
        )
    return made


def gpu_activity(
    scenario: Scenario, steps: Sequence[tuple[int, StepEnded]], over_ns: int
) -> Iterator[tuple[int, float, float, float]]:
    """Yield samples of one GPU until the run is over.

    A sample is the true time, then shares of 1 of the time since the sample before.
    The shares are those of a busy GPU, of its tensor pipes and of its memory interface. ``steps``: in order, each with its end.
    """
    first = 0
    for at_ns in range(SAMPLE_NS, over_ns + SAMPLE_NS, SAMPLE_NS):
        begin_ns = at_ns - SAMPLE_NS
        while first < len(steps) and steps[first][0] <= begin_ns:
            first += 1
        busy = tensor = dram = 0.0
        for place in range(first, len(steps)):
            ended_ns, step = steps[place]
            if step.begin_ns >= at_ns:
                break
            length = (min(ended_ns, at_ns) - max(step.begin_ns, begin_ns)) / SAMPLE_NS
            of_tensor, of_dram = activity(scenario, step.batch)
            busy, tensor, dram = busy + length, tensor + length * of_tensor, dram + length * of_dram
        yield at_ns, min(1.0, busy), min(1.0, tensor), min(1.0, dram)


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
