"""List the processes with a compute context on a GPU.

NVML reports pids of the host. In a container such a pid may belong to no process or to another one.
"""

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
    """One process with a compute context.

    ``seen_here``: a process of this pid is in our namespace and holds a GPU's device file.
    Otherwise the pid does not say which process it is.
    """

    gpu: str  # UUID
    pid: int
    memory_bytes: int | None  # None when the driver does not report it
    seen_here: bool
    name: str = ""  # only when ``seen_here``


def processes_of(nvml: Nvml, gpu: GpuDevice, proc: Path = Path("/proc")) -> list[GpuProcess]:
    """Return the compute processes that the driver lists. Raises ``NvmlFailed``."""
    try:
        listed = nvml.nvmlDeviceGetComputeRunningProcesses(gpu.handle)
    except Exception as error:
        raise NvmlFailed(code_of(error)) from None
    return [_process(each, gpu.device.key, proc) for each in listed]


def holds_a_gpu(pid: int, proc: Path = Path("/proc")) -> bool:
    """Return whether a process of this pid is in our namespace and has a GPU open.

    Also False when its open files may not be read.
    """
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
