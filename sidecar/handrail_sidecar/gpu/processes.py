"""Who has a compute context on a GPU. NVML tells pids of the host: in a container they may be nobody's, or somebody else's."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from handrail_sidecar.gpu.devices import GpuDevice, Nvml
from handrail_sidecar.gpu.failures import NvmlFailed, code_of

_UNKNOWN_PIDS: Final = ((1 << 64) - 1, (1 << 32) - 1)
_DEVICE_FILES: Final = "/dev/nvidia"


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuProcess:
    """``seen_here``: a process of this pid is here and holds a GPU's device file; else the pid says nothing about who it is."""

    gpu: str  # UUID
    pid: int
    memory_bytes: int | None  # None where the driver does not tell
    seen_here: bool
    name: str = ""  # only where it is seen here


def processes_of(nvml: Nvml, gpu: GpuDevice, proc: Path = Path("/proc")) -> list[GpuProcess]:
    """Compute processes, as the driver lists them. Raises ``NvmlFailed``."""
    try:
        listed = nvml.nvmlDeviceGetComputeRunningProcesses(gpu.handle)
    except Exception as error:
        raise NvmlFailed(code_of(error)) from None
    return [_process(each, gpu.device.key, proc) for each in listed]


def holds_a_gpu(pid: int, proc: Path = Path("/proc")) -> bool:
    """Whether a process of this pid is in our namespace and has a GPU open. ``False`` too where it may not be looked at."""
    try:
        files = [os.readlink(each) for each in (proc / str(pid) / "fd").iterdir()]
    except OSError:
        return False
    return any(file.startswith(_DEVICE_FILES) for file in files)


def _process(listed: Any, uuid: str, proc: Path) -> GpuProcess:
    seen_here = holds_a_gpu(listed.pid, proc)
    used = listed.usedGpuMemory
    memory = None if used is None or used in _UNKNOWN_PIDS else int(used)
    return GpuProcess(
        gpu=uuid, pid=listed.pid, memory_bytes=memory, seen_here=seen_here, name=_name(listed.pid, proc) if seen_here else ""
    )


def _name(pid: int, proc: Path) -> str:
    try:
        return (proc / str(pid) / "comm").read_text(errors="replace").strip()
    except OSError:
        return ""
