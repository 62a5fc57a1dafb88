"""Count Xid errors from NVML's events.

NVML reports each error once, so this counts errors, not a last code that stays (case F13).
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final

from handrail_sidecar.gpu.devices import GpuDevice, Nvml
from handrail_sidecar.gpu.failures import Meaning, code_of, failure

log = logging.getLogger(__name__)

WAIT_MS: Final = 1000
_XID: Final = 0x8  # nvmlEventTypeXidCriticalError
_MOST_CODES: Final = 64
_TIMEOUT: Final = 10

OTHER: Final = -1
"""Code under which codes beyond the bound of labels are counted."""


class XidWatch:
    """Waits for events in a thread of its own.

    ``absent`` is by UUID: the return code where events are refused.
    ``counts`` is by UUID and code; it is the caller's and outlives the session. ``tell`` is called in this thread.
    """

    def __init__(
        self,
        nvml: Nvml,
        gpus: Sequence[GpuDevice],
        counts: Counter[tuple[str, int]],
        tell: Callable[[GpuDevice, int], None],
    ) -> None:
        self.counts = counts
        self.absent: dict[str, int] = {}
        self.faults = 0
        self._nvml = nvml
        self._gpus = {_address(gpu.handle): gpu for gpu in gpus if not gpu.is_mig}
        self._tell = tell
        self._stopping = threading.Event()
        self.thread = threading.Thread(target=self._run, name="gpu events", daemon=True)

    def start(self) -> None:
        self.thread.start()

    def stop(self, wait_s: float) -> bool:
        """End the thread, which takes up to ``WAIT_MS``; return whether it has ended."""
        self._stopping.set()
        self.thread.join(wait_s)
        return not self.thread.is_alive()

    def _run(self) -> None:
        try:
            events = self._nvml.nvmlEventSetCreate()
        except Exception as error:
            self._refused(list(self._gpus.values()), error)
            return
        watched = False
        for gpu in self._gpus.values():
            try:
                self._nvml.nvmlDeviceRegisterEvents(gpu.handle, _XID, events)
                watched = True
            except Exception as error:  # noqa: PERF203 - one GPU must not hide the others
                self._refused([gpu], error)
        while watched and not self._stopping.is_set():
            watched = self._wait(events)

    def _wait(self, events: Any) -> bool:
        """Wait once; return False when no event can come any more."""
        try:
            event = self._nvml.nvmlEventSetWait_v2(events, WAIT_MS)
        except Exception as error:
            code = code_of(error)
            if code != _TIMEOUT:
                self.faults += 1
                self._stopping.wait(1.0)  # a wait that fails at once must not spin
            return failure(code).meaning is not Meaning.SESSION_LOST
        gpu = self._gpus.get(_address(event.device))
        if gpu is not None and event.eventType & _XID:
            code = int(event.eventData)
            known = sum(uuid == gpu.device.key for uuid, _ in self.counts)
            key = (gpu.device.key, code)
            self.counts[key if key in self.counts or known < _MOST_CODES else (gpu.device.key, OTHER)] += 1
            self._tell(gpu, code)
        return True

    def _refused(self, gpus: Sequence[GpuDevice], error: Exception) -> None:
        code = code_of(error)
        self.absent |= {gpu.device.key: code for gpu in gpus}


def _address(handle: Any) -> int:
    return ctypes.cast(handle, ctypes.c_void_p).value or 0
