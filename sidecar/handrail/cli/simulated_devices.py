"""What GPU samplers of a virtual fleet saw, as the runs of samples that a collector stores."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import Final

from handrail import conventions as names
from handrail.hardware import Device, DeviceKind, DeviceRun, Series
from handrail.records import Process, Source
from handrail_fleet.observe_devices import GpuObservation

PRODUCT: Final = "Emulated GPU"
_DIGITS: Final = 4
_TOOK_NS: Final = 1_000_000


def gpu_runs(said: Iterable[GpuObservation], processes: Mapping[str, Process]) -> list[DeviceRun]:
    """One for each host, whose samples follow one another in ``said``; ``processes`` by host."""
    return [_run(list(of_host), processes[host]) for host, of_host in groupby(said, key=lambda one: one.host)]


def _run(said: list[GpuObservation], process: Process) -> DeviceRun:
    figures = {
        names.GPU_BUSY: [round(one.busy, _DIGITS) for one in said],
        names.GPU_TENSOR_ACTIVE: [round(one.tensor, _DIGITS) for one in said],
        names.GPU_DRAM_ACTIVE: [round(one.dram, _DIGITS) for one in said],
    }
    return DeviceRun(
        process=process,
        source=Source.NVML,
        device=Device(kind=DeviceKind.GPU, key=f"GPU-{process.host}", index=0, product=PRODUCT, engine=process.instance),
        at=[one.at_unix_ns for one in said],
        took_ns=[_TOOK_NS] * len(said),
        series=[Series(name, "", 0, values) for name, values in figures.items()],
    )
