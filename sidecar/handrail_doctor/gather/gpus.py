"""Read GPUs, their NVLinks and their peer access from NVML, once.

It has what ``nvidia-smi topo -p2p r`` shows.
A refused call costs only its own fact (cases F01, F18). A driver that does not answer is a reason, not an error (case F05).
NVML may hang in the driver, so the caller must bound the time.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from typing import Any, Final, Protocol

from handrail_doctor.facts import GpuFacts, GpusFacts, P2p, P2pStatus

_MOST_GPUS: Final = 32  # GPUs of one host; the matrix grows with the square
_MOST_LINKS: Final = 36
_STATUS: Final = {
    0: P2pStatus.OK,
    1: P2pStatus.CHIPSET,
    2: P2pStatus.GPU,
    3: P2pStatus.TOPOLOGY,
    4: P2pStatus.REGKEY,
    5: P2pStatus.NOT_SUPPORTED,
}
# nvmlGpuP2PCapsIndex_t; not pynvml's own names: its NVML_P2P_CAPS_INDEX_READ is a tuple by a stray comma
_READ: Final = 0
_WRITE: Final = 1
_NVLINK: Final = 2
_NVLINK_SPEED: Final = 164  # NVML_FI_DEV_NVLINK_GET_SPEED, MB/s of the link in scopeId, one direction
_MISSING: Final = {
    "NVMLError_LibraryNotFound": (
        "no libnvidia-ml.so.1 here",
        "install the NVIDIA driver; in a container set NVIDIA_DRIVER_CAPABILITIES=utility",
    ),
    "NVMLError_DriverNotLoaded": ("the NVIDIA kernel driver is not loaded", "modprobe nvidia"),
    "NVMLError_LibRmVersionMismatch": (
        "driver and library are of different versions (an upgrade without a restart)",
        "restart the host, or the container after a reload of the driver",
    ),
    "NVMLError_NoPermission": (
        "no permission to use the driver",
        "give the container /dev/nvidiactl and /dev/nvidia*",
    ),
}


class P2pReader(Protocol):
    """A reader of the GPUs and of who may read whose memory."""

    def read(self) -> GpusFacts:
        """Read the GPUs. Never raises; may block as long as the driver does."""


class NvmlReader:
    """Reads with pynvml, which it imports at the first call.

    ``load`` returns the module; a test passes another one.
    """

    def __init__(self, load: Callable[[], Any] = lambda: importlib.import_module("pynvml")) -> None:
        self._load = load

    def read(self) -> GpusFacts:
        try:
            nvml = self._load()
        except ImportError:
            return GpusFacts(missing="pynvml is not installed", provide="pip install 'handrail[gpu]'")
        try:
            nvml.nvmlInit()
        except nvml.NVMLError as error:
            known = _MISSING.get(type(error).__name__)
            return GpusFacts(missing=known[0], provide=known[1]) if known else GpusFacts(missing=f"NVML: {error}")
        try:
            return _NvmlReading(nvml).gpus()
        except nvml.NVMLError as error:
            return GpusFacts(missing=f"NVML: {error}")
        finally:
            with contextlib.suppress(nvml.NVMLError):
                nvml.nvmlShutdown()


class _NvmlReading:
    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        self._refused: dict[str, str] = {}

    def gpus(self) -> GpusFacts:
        count = min(self._nvml.nvmlDeviceGetCount(), _MOST_GPUS)
        handles: dict[int, Any] = {}
        for index in range(count):
            handle = self._ask("nvmlDeviceGetHandleByIndex", index)
            if handle is not None:
                handles[index] = handle
        devices = tuple(self._gpu(index, handle) for index, handle in handles.items())
        pairs = tuple(self._pair(source, target, handles) for source in handles for target in handles if source != target)
        driver = _text(self._ask("nvmlSystemGetDriverVersion"))
        refused = tuple(f"{name}: {reason}" for name, reason in self._refused.items())
        return GpusFacts(driver=driver, devices=devices, p2p=pairs, refused=refused)

    def _gpu(self, index: int, handle: Any) -> GpuFacts:
        mig = self._ask("nvmlDeviceGetMigMode", handle, note=False)
        links = self._links(handle)
        return GpuFacts(
            index=index,
            uuid=_text(self._ask("nvmlDeviceGetUUID", handle)),
            name=_text(self._ask("nvmlDeviceGetName", handle)),
            mig=None if mig is None else bool(mig[0]),
            nvlinks=None if links is None else (sum(links.values()), len(links)),
            nvlink_bytes_per_s=self._nvlink_rate(handle, [link for link, up in (links or {}).items() if up]),
            pcie_now=self._pcie(handle, "Curr"),
            pcie_most=self._pcie(handle, "Max"),
        )

    def _links(self, handle: Any) -> dict[int, bool] | None:
        """Return whether each NVLink is up; {} on a GPU without any."""
        if not hasattr(self._nvml, "nvmlDeviceGetNvLinkState"):
            return None
        found: dict[int, bool] = {}
        for link in range(_MOST_LINKS):
            up = self._ask("nvmlDeviceGetNvLinkState", handle, link, note=False)
            if up is None:  # the first link that the GPU lacks
                break
            found[link] = bool(up)
        return found

    def _nvlink_rate(self, handle: Any, up: list[int]) -> int | None:
        if not up or not hasattr(self._nvml, "nvmlDeviceGetFieldValues"):
            return None
        try:
            values = self._nvml.nvmlDeviceGetFieldValues(handle, [(_NVLINK_SPEED, link) for link in up])
            speeds = [value.value.uiVal for value in values if value.nvmlReturn == 0]
        except (self._nvml.NVMLError, AttributeError, TypeError):
            return None
        return sum(speeds) * 10**6 if speeds and len(speeds) == len(up) else None

    def _pcie(self, handle: Any, which: str) -> tuple[int, int] | None:
        generation = self._ask(f"nvmlDeviceGet{which}PcieLinkGeneration", handle)
        lanes = self._ask(f"nvmlDeviceGet{which}PcieLinkWidth", handle)
        return None if generation is None or lanes is None else (int(generation), int(lanes))

    def _pair(self, source: int, target: int, handles: dict[int, Any]) -> P2p:
        def status(capability: int) -> P2pStatus | None:
            found = self._ask("nvmlDeviceGetP2PStatus", handles[source], handles[target], capability)
            return None if found is None else _STATUS.get(int(found), P2pStatus.UNKNOWN)

        return P2p(source=source, target=target, read=status(_READ), write=status(_WRITE), nvlink=status(_NVLINK))

    def _ask(self, name: str, *arguments: Any, note: bool = True) -> Any:
        """Make one NVML call.

        Returns None where the driver or an old binding refuses it, and notes that once.
        """
        call = getattr(self._nvml, name, None)
        if call is None:
            self._refused.setdefault(name, "not in this pynvml")
            return None
        try:
            return call(*arguments)
        except self._nvml.NVMLError as error:
            if note:
                self._refused.setdefault(name, str(error))
            return None


def _text(value: Any) -> str:
    """Return a text, since old bindings return bytes."""
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    return value if isinstance(value, str) else ""
