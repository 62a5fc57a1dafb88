"""Map NVML's return codes to whether a retry helps and what a person can do.

Source of the codes: ``nvmlReturn_enum`` in nvml.h.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from enum import Enum
from typing import Final


class Meaning(str, Enum):
    """Consequence of a failed call."""

    ABSENT = "absent"  # this device, driver or binding does not provide it: remembered, not tried again
    RETRY = "retry"  # may work the next time
    DEVICE_LOST = "device_lost"  # no call on this device will work
    SESSION_LOST = "session_lost"  # no call at all will


@dataclass(frozen=True, slots=True)
class Failure:
    """Meaning of one return code.

    ``name`` is nvml.h's. ``remedy``: what would help, '' when nothing is known.
    """

    code: int
    name: str
    meaning: Meaning
    words: str
    remedy: str = ""


BINDING_TOO_OLD: Final = -1
"""Not NVML's: the installed nvidia-ml-py has no such function or structure."""

UNKNOWN: Final = 999

HANGS: Final = -2
"""Not NVML's: the call has not returned."""

STANDS_STILL: Final = -3
"""Not NVML's: the value contradicts another counter of the same thing."""

_A, _R, _D, _S = Meaning.ABSENT, Meaning.RETRY, Meaning.DEVICE_LOST, Meaning.SESSION_LOST

FAILURES: Final = {
    each.code: each
    for each in (
        Failure(BINDING_TOO_OLD, "BINDING", _A, "nvidia-ml-py lacks it", "pip install -U nvidia-ml-py"),
        Failure(HANGS, "HANGS", _R, "the call does not return", "the driver hangs: look for Xid errors in the kernel's log"),
        Failure(
            STANDS_STILL,
            "STANDS_STILL",
            _A,
            "stays at 0 while another counter of the same traffic moves",
            "use the other counter",
        ),
        Failure(1, "UNINITIALIZED", _S, "NVML lost its session", "a restart of the driver ends it; the sidecar opens a new one"),
        Failure(2, "INVALID_ARGUMENT", _A, "not for this device"),
        Failure(3, "NOT_SUPPORTED", _A, "not supported"),
        Failure(4, "NO_PERMISSION", _A, "not permitted", "run with more privilege, or let DCGM read it"),
        Failure(6, "NOT_FOUND", _A, "not found"),
        Failure(7, "INSUFFICIENT_SIZE", _R, "more entries than the buffer holds"),
        Failure(
            9,
            "DRIVER_NOT_LOADED",
            _S,
            "the NVIDIA driver is not loaded",
            "load it (modprobe nvidia), or give the container the GPU (--gpus, nvidia.com/gpu)",
        ),
        Failure(10, "TIMEOUT", _R, "timed out"),
        Failure(11, "IRQ_ISSUE", _D, "the kernel has an interrupt problem with this GPU", "reset the GPU or reboot"),
        Failure(
            12,
            "LIBRARY_NOT_FOUND",
            _S,
            "libnvidia-ml.so.1 was not found",
            "install the NVIDIA driver; in a container set NVIDIA_DRIVER_CAPABILITIES=utility (or all), which mounts it",
        ),
        Failure(13, "FUNCTION_NOT_FOUND", _A, "this driver's NVML lacks the function", "install a newer driver"),
        Failure(14, "CORRUPTED_INFOROM", _R, "the board's infoROM is corrupted"),
        Failure(15, "GPU_IS_LOST", _D, "the GPU has fallen off the bus", "reset the GPU or reboot; look for Xid 79"),
        Failure(16, "RESET_REQUIRED", _D, "the GPU must be reset", "nvidia-smi --gpu-reset, or reboot"),
        Failure(17, "OPERATING_SYSTEM", _R, "the operating system blocked it"),
        Failure(
            18,
            "LIB_RM_VERSION_MISMATCH",
            _S,
            "the driver in the kernel and libnvidia-ml.so.1 have different versions",
            "after a driver upgrade: reload the kernel's driver or reboot; where the library is new, restart this sidecar",
        ),
        Failure(19, "IN_USE", _R, "in use"),
        Failure(20, "MEMORY", _R, "out of memory"),
        Failure(21, "NO_DATA", _R, "no data yet"),
        Failure(23, "INSUFFICIENT_RESOURCES", _R, "out of resources"),
        Failure(25, "ARGUMENT_VERSION_MISMATCH", _A, "this driver's NVML has another version of it", "install a newer driver"),
        Failure(26, "DEPRECATED", _A, "this driver no longer has it"),
        Failure(27, "NOT_READY", _R, "not ready yet"),
        Failure(28, "GPU_NOT_FOUND", _D, "no such GPU"),
        Failure(29, "INVALID_STATE", _R, "not in the state for it"),
        Failure(999, "UNKNOWN", _R, "an internal error of the driver"),
    )
}


def failure(code: int) -> Failure:
    """Return what is known of a code; an unknown code is tried again."""
    return FAILURES.get(code) or Failure(code, f"CODE_{code}", Meaning.RETRY, f"NVML's code {code}")


class NvmlFailed(Exception):  # noqa: N818 - carries a code; the word "error" is NVML's own for its exceptions
    """A call failed with ``code``."""

    def __init__(self, code: int) -> None:
        super().__init__(failure(code).words)
        self.code = code


def code_of(error: Exception) -> int:
    """Return the return code in an exception that ``pynvml`` raised.

    Raises ``error`` again when it comes neither from NVML nor from a binding that is too old.
    """
    if isinstance(error, NvmlFailed):
        return error.code
    value = getattr(error, "value", None)
    if isinstance(value, int) and type(error).__module__.partition(".")[0] == "pynvml":
        return value
    if isinstance(error, (AttributeError, TypeError, ctypes.ArgumentError)):
        return BINDING_TOO_OLD
    raise error
