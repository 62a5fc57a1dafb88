"""Engine steps and host events of a virtual fleet, as sidecars record them.

The sidecar's own code decides which steps are recorded in full.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Final

from handrail import conventions as names
from handrail.records import Iteration, Process, ProcessEvent, ProcessEventKind, Source
from handrail.records.devices import Device, DeviceKind, DeviceRun, Series
from handrail_sidecar.plugin_merge.bounds import MergeLimits
from handrail_sidecar.plugin_merge.engine import ObservedEngine
from handrail_sidecar.plugin_merge.steps import Steps
from handrail_sim.emulator.observe import HostClock
from handrail_sim.emulator.observe_engines import ClockObservation, StepObservation, gpu_clocks, pauses, steps
from handrail_sim.emulator.simulate import Ran
from handrail_sim.emulator.slowdown import WATCH_NS

CORE_PID: Final = 4711
SECOND_NS: Final = 1_000_000_000

EngineRecords = tuple[int, Iteration | ProcessEvent | DeviceRun]
"""The true time of the run at which it was reported, and the record."""


def engine_records(
    ran: Ran, processes: Mapping[str, Process], clocks: Mapping[str, HostClock], over_ns: int
) -> Iterator[EngineRecords]:
    """Yield all engine records of a run, in no order."""
    for host, ended in groupby(steps(ran.steps, clocks), key=lambda step: step.host):
        yield from _iterations(ended, processes[host], clocks[host].unix_ns(0))
    for pause in pauses(ran.hindered, clocks, over_ns):
        event = ProcessEvent(
            process=processes[pause.host],
            source=Source.PLUGIN,
            at_unix_ns=clocks[pause.host].unix_ns(0) + pause.due_ns,
            kind=ProcessEventKind.PAUSED,
            engine="vllm",
            pid=CORE_PID,
            process_kind="core",
            detail="held",
            at_bound_ns=WATCH_NS,
            duration_ns=pause.woke_ns - pause.due_ns,
        )
        yield pause.woke_ns, event
    readings = gpu_clocks(ran.hindered, clocks, over_ns)
    for (host, _), group in groupby(readings, key=lambda one: (one.host, one.at_ns // SECOND_NS)):
        clock_observations = list(group)
        yield clock_observations[-1].at_ns, _run(clock_observations, processes[host], clocks[host].unix_ns(0))


def _iterations(ended: Iterable[StepObservation], process: Process, offset_ns: int) -> Iterator[EngineRecords]:
    engine = ObservedEngine(process)
    made = Steps(engine, MergeLimits())
    at_ns = 0
    for step in ended:
        statement = {
            "begin_ns": step.begin_ns,
            "requests": step.requests,
            "prefill_requests": step.prefill_requests,
            "prefill_tokens": step.prefill_tokens,
            "decode_tokens": step.decode_tokens,
            "preemptions": step.preemptions,
            "running": None,
            "waiting": None,
            "landed": step.landed,
            "resumed_tokens": step.resumed_tokens,
        }
        at_ns = step.end_ns
        for iteration in made.step(process.instance, CORE_PID, offset_ns, at_ns, statement):
            yield at_ns, iteration
    for iteration in made.close_boot(process.instance):
        yield at_ns, iteration


def _run(clock_observations: Sequence[ClockObservation], process: Process, offset_ns: int) -> DeviceRun:
    """Build a device run of about a second of readings."""
    return DeviceRun(
        process=process,
        source=Source.NVML,
        device=Device(kind=DeviceKind.GPU, key=f"GPU-{process.host}", index=0, engine=process.instance),
        at=[offset_ns + one.at_ns for one in clock_observations],
        took_ns=[0] * len(clock_observations),
        series=[
            Series(names.GPU_CLOCK, "sm", 0, [one.hertz for one in clock_observations]),
            Series(names.GPU_THROTTLED, "hw_thermal", 0, [float(one.throttled) for one in clock_observations]),
        ],
    )
