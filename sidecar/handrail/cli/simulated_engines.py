"""What virtual engines ran, and what their hosts did meanwhile, as the records that sidecars make of it: with the sidecar's own
code where it decides what is told (which steps are told in full)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from typing import Final

from handrail.hardware import Device, DeviceKind, DeviceSample, DeviceValue
from handrail.records import Iteration, Process, ProcessEvent, ProcessEventKind, Source
from handrail.sources.merging.bounds import MergeLimits
from handrail.sources.merging.engine import Engine
from handrail.sources.merging.steps import Steps
from handrail_fleet.observe import Clock
from handrail_fleet.observe_engines import WATCH_NS, ClockObservation, StepObservation, gpu_clocks, pauses, steps
from handrail_fleet.simulate import Ran

CORE_PID: Final = 4711

Said = tuple[int, Iteration | ProcessEvent | DeviceSample]
"""When it was said, by true time of the run, and what."""


def engine_records(ran: Ran, processes: Mapping[str, Process], clocks: Mapping[str, Clock], over_ns: int) -> Iterator[Said]:
    """All of a run, in no order."""
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
    for reading in gpu_clocks(ran.hindered, clocks, over_ns):
        yield reading.at_ns, _sample(reading, processes[reading.host], clocks[reading.host].unix_ns(0))


def _iterations(ended: Iterable[StepObservation], process: Process, offset_ns: int) -> Iterator[Said]:
    engine = Engine(process)
    made = Steps(engine, MergeLimits())
    at_ns = 0
    for step in ended:
        said = {
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
        for iteration in made.step(process.instance, CORE_PID, offset_ns, at_ns, said):
            yield at_ns, iteration
    for iteration in made.close_boot(process.instance):
        yield at_ns, iteration


def _sample(reading: ClockObservation, process: Process, offset_ns: int) -> DeviceSample:
    return DeviceSample(
        process=process,
        source=Source.NVML,
        device=Device(kind=DeviceKind.GPU, key=f"GPU-{process.host}", index=0, engine=process.instance),
        at_unix_ns=offset_ns + reading.at_ns,
        values=(
            DeviceValue(name="clock_hertz", value=reading.hertz, label="sm"),
            DeviceValue(name="throttled", value=float(reading.throttled), label="hw_thermal"),
        ),
    )
