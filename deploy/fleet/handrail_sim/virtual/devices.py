"""GPU samples of a virtual fleet, as the device runs that a collector stores."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Final

from handrail import conventions as names
from handrail.records import Process, Role, Source
from handrail.records.devices import Device, DeviceKind, DeviceRun, Series
from handrail_sim.emulator.faults import Fault
from handrail_sim.emulator.observe import clocks
from handrail_sim.emulator.observe_devices import GpuObservation, Worked, observe_devices
from handrail_sim.emulator.observe_engines import ClockObservation, gpu_clocks
from handrail_sim.emulator.scenario import Scenario
from handrail_sim.emulator.simulate import Ran

PRODUCT: Final = "Emulated GPU"
_DIGITS: Final = 4
_TOOK_NS: Final = 1_000_000


def gpu_evidence(scenario: Scenario, ran: Ran, faults: Sequence[Fault], started_unix_ns: int, over_ns: int) -> list[DeviceRun]:
    """Build the device runs that a collector stores of a run's GPUs."""
    hosts = scenario.hosts()
    roles = dict.fromkeys(hosts.prefill, Role.COLLOCATED if hosts.collocated else Role.PREFILL)
    roles |= {} if hosts.collocated else dict.fromkeys(hosts.decode, Role.DECODE)
    processes = {host: Process(role=role, instance=f"{host}:8000", host=host, host_name=host) for host, role in roles.items()}
    by_host = clocks(scenario, faults, started_unix_ns)
    worked = {host: [Worked(step.begin_ns, at_ns, step.batch) for at_ns, step in steps] for host, steps in ran.steps.items()}
    gpu_observations = observe_devices(scenario, worked, by_host, over_ns)
    readings = {
        (reading.host, by_host[reading.host].unix_ns(0) + reading.at_ns): reading
        for reading in gpu_clocks(ran.hindered, by_host, over_ns)
    }
    return gpu_runs(gpu_observations, processes, readings)


def gpu_runs(
    gpu_observations: Iterable[GpuObservation],
    processes: Mapping[str, Process],
    readings: Mapping[tuple[str, int], ClockObservation] | None = None,
) -> list[DeviceRun]:
    """Build one device run for each host.

    The samples of one host must follow one another. ``processes``: by host. ``readings``: by host and time.
    """
    return [
        _run(list(of_host), processes[host], readings or {})
        for host, of_host in groupby(gpu_observations, key=lambda one: one.host)
    ]


def _run(
    gpu_observations: list[GpuObservation], process: Process, readings: Mapping[tuple[str, int], ClockObservation]
) -> DeviceRun:
    figures: dict[tuple[str, str], list[float | None]] = {
        (names.GPU_BUSY, ""): [round(one.busy, _DIGITS) for one in gpu_observations],
        (names.GPU_TENSOR_ACTIVE, ""): [round(one.tensor, _DIGITS) for one in gpu_observations],
        (names.GPU_DRAM_ACTIVE, ""): [round(one.dram, _DIGITS) for one in gpu_observations],
    }
    read = [readings.get((one.host, one.at_unix_ns)) for one in gpu_observations]
    if any(read):
        figures[names.GPU_CLOCK, "sm"] = [None if one is None else one.hertz for one in read]
        figures[names.GPU_THROTTLED, "hw_thermal"] = [None if one is None else float(one.throttled) for one in read]
    return DeviceRun(
        process=process,
        source=Source.NVML,
        device=Device(kind=DeviceKind.GPU, key=f"GPU-{process.host}", index=0, product=PRODUCT, engine=process.instance),
        at=[one.at_unix_ns for one in gpu_observations],
        took_ns=[_TOOK_NS] * len(gpu_observations),
        series=[Series(name, label, 0, values) for (name, label), values in figures.items()],
    )
