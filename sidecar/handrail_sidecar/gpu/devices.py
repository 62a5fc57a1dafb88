"""Open NVML and list GPUs, MIG devices and what their links can carry."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from handrail.records.devices import Device, DeviceKind
from handrail_sidecar.gpu.failures import UNKNOWN, Meaning, NvmlFailed, code_of, failure

log = logging.getLogger(__name__)

MOST_DEVICES: Final = 256  # GPUs and MIG devices of one host: the bound of labels
_MOST_MIG: Final = 16  # of one GPU; 7 in any product so far
_PCIE_LANE_BYTES: Final = {1: 0.25e9, 2: 0.5e9, 3: 128e9 / 130, 4: 256e9 / 130, 5: 512e9 / 130, 6: 8e9, 7: 16e9}
"""PCIe bytes per second, lane and direction, by generation.

Source: PCI-SIG specifications.
Encoding: 8b/10b for 1 and 2, 128b/130b for 3 to 5, then flits.
"""

_UNKNOWN_PCIE_BYTES: Final = 16 * _PCIE_LANE_BYTES[6]  # for a link that is not reported: as fast as any today
_UNKNOWN_NVLINK_BYTES: Final = 18 * 50e9 * 2

Nvml = Any
"""The module ``pynvml``, untyped; ``code_of`` decodes what its functions raise."""


class NvmlUnavailable(Exception):  # noqa: N818 - a state of the host, not a fault
    """There is no NVML session.

    ``code`` is NVML's, or ``MISSING_BINDING`` when nvidia-ml-py is not installed.
    """

    def __init__(self, code: int, words: str, remedy: str) -> None:
        super().__init__(words)
        self.code = code
        self.words = words
        self.remedy = remedy


MISSING_BINDING: Final = -10


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuDevice:
    """One GPU or MIG device.

    ``handle`` is pynvml's and belongs to one session. ``*_line_bytes``: most bytes per second and direction.
    """

    device: Device
    handle: Any
    mig_index: int | None = None
    mig_mode: bool | None = None  # None: the product has none
    pcie_line_bytes: float = _UNKNOWN_PCIE_BYTES
    nvlink_line_bytes: float = _UNKNOWN_NVLINK_BYTES
    pcie_known: bool = False
    nvlink_known: bool = False

    @property
    def is_mig(self) -> bool:
        return self.mig_index is not None


def open_nvml() -> Nvml:
    """Load the library and begin a session.

    Raises ``NvmlUnavailable`` when there is no library, driver or binding.
    """
    try:
        import pynvml
    except ImportError as error:
        raise NvmlUnavailable(
            MISSING_BINDING, f"nvidia-ml-py is not installed ({error})", "pip install 'handrail[gpu]'"
        ) from None
    try:
        pynvml.nvmlInit()
    except Exception as error:
        reported_failure = failure(code_of(error))
        raise NvmlUnavailable(reported_failure.code, reported_failure.words, reported_failure.remedy) from None
    return pynvml


def versions(nvml: Nvml) -> tuple[str, str]:
    """Return the versions of driver and NVML; '' for one that is not reported."""
    return _text(nvml.nvmlSystemGetDriverVersion), _text(nvml.nvmlSystemGetNVMLVersion)


Ask = Callable[..., Any]
"""Calls a function with its arguments, under a key; see ``sampling.worker.TimedCalls``."""


def list_gpus(
    nvml: Nvml, ask: Ask = lambda key, function, *arguments: function(*arguments)
) -> tuple[list[GpuDevice], dict[int, int]]:
    """Return every GPU, each followed by its MIG devices, and the GPUs that failed.

    The failures are return codes by index. Raises ``NvmlFailed`` when GPUs cannot be counted.
    """
    count = ask("count", _called, nvml.nvmlDeviceGetCount)
    found: list[GpuDevice] = []
    failed: dict[int, int] = {}
    for index in range(min(count, MOST_DEVICES)):
        try:
            found += ask(f"GPU {index}", gpu_at, nvml, index)
        except NvmlFailed as problem:  # noqa: PERF203 - one GPU must not hide the others
            if failure(problem.code).meaning is not Meaning.ABSENT:  # else: it belongs to another container or does not exist
                failed[index] = problem.code
    if len(found) > MOST_DEVICES:
        log.warning("%d GPUs and MIG devices; the first %d are sampled", len(found), MOST_DEVICES)
    return found[:MOST_DEVICES], failed


def gpu_at(nvml: Nvml, index: int) -> list[GpuDevice]:
    """Return the GPU at NVML's index and its MIG devices.

    Raises ``NvmlFailed`` when the GPU does not answer.
    """
    handle = _called(nvml.nvmlDeviceGetHandleByIndex, index)
    uuid = str(_called(nvml.nvmlDeviceGetUUID, handle))
    product = _text(nvml.nvmlDeviceGetName, handle)
    pci = _maybe(nvml.nvmlDeviceGetPciInfo, handle)
    bus = _decoded(getattr(pci, "busId", b"")).lower()
    pcie, nvlink = _pcie_line_bytes(nvml, handle), _nvlink_line_bytes(nvml, handle)
    mode = _maybe(nvml.nvmlDeviceGetMigMode, handle)
    gpu = GpuDevice(
        device=Device(kind=DeviceKind.GPU, key=uuid, index=index, product=product, pci=bus),
        handle=handle,
        mig_mode=bool(mode[0]) if mode else None,
        pcie_line_bytes=pcie or _UNKNOWN_PCIE_BYTES,
        nvlink_line_bytes=nvlink or _UNKNOWN_NVLINK_BYTES,
        pcie_known=pcie is not None,
        nvlink_known=nvlink is not None,
    )
    return [gpu, *_mig_devices(nvml, gpu)]


def mig_keys(nvml: Nvml, gpu: GpuDevice) -> tuple[str, ...]:
    """Return the UUIDs of the GPU's MIG devices now; they change while it runs."""
    return tuple(each.device.key for each in _mig_devices(nvml, gpu, always=True))


def _mig_devices(nvml: Nvml, gpu: GpuDevice, *, always: bool = False) -> list[GpuDevice]:
    if not gpu.mig_mode and not (
        always and gpu.mig_mode is not None and (_maybe(nvml.nvmlDeviceGetMigMode, gpu.handle) or [0])[0]
    ):
        return []
    found = []
    for place in range(min(_maybe(nvml.nvmlDeviceGetMaxMigDeviceCount, gpu.handle) or 0, _MOST_MIG)):
        handle = _maybe(nvml.nvmlDeviceGetMigDeviceHandleByIndex, gpu.handle, place)
        uuid = _text(nvml.nvmlDeviceGetUUID, handle) if handle is not None else ""
        if uuid:
            device = Device(
                kind=DeviceKind.GPU,
                key=uuid,
                index=gpu.device.index,
                product=_text(nvml.nvmlDeviceGetName, handle) or gpu.device.product,
                pci=gpu.device.pci,
                parent=gpu.device.key,
            )
            found.append(GpuDevice(device=device, handle=handle, mig_index=place))
    return found


def _pcie_line_bytes(nvml: Nvml, handle: Any) -> float | None:
    generation = _maybe(nvml.nvmlDeviceGetMaxPcieLinkGeneration, handle)
    width = _maybe(nvml.nvmlDeviceGetMaxPcieLinkWidth, handle)
    lane = _PCIE_LANE_BYTES.get(generation) if generation else None
    return lane * width if lane and width else None


def _nvlink_line_bytes(nvml: Nvml, handle: Any) -> float | None:
    """Multiply the links by their common speed.

    Source: NVML fields 91 and 90 (megabytes per second and direction).
    """
    values = _maybe(nvml.nvmlDeviceGetFieldValues, handle, [91, 90])
    if not values or any(each.nvmlReturn for each in values):
        return None
    links, speed = values[0].value.uiVal, values[1].value.uiVal
    return links * speed * 1e6 or None


def _called(function: Any, *arguments: Any) -> Any:
    try:
        return function(*arguments)
    except UnicodeDecodeError:  # pynvml decodes the driver's text
        raise NvmlFailed(UNKNOWN) from None
    except Exception as error:
        raise NvmlFailed(code_of(error)) from None


def _maybe(function: Any, *arguments: Any) -> Any:
    """Return None when the call fails with any NVML code."""
    try:
        return _called(function, *arguments)
    except NvmlFailed:
        return None


def _text(function: Any, *arguments: Any) -> str:
    return _decoded(_maybe(function, *arguments))


def _decoded(given: Any) -> str:
    if isinstance(given, bytes):
        return given.split(b"\0", 1)[0].decode("utf-8", "replace")
    return given if isinstance(given, str) else ""
