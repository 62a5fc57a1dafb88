"""Report what happens to GPUs and NVML once, as a log line and as an event."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from handrail.records import Process, ProcessEvent, ProcessEventKind, Source
from handrail.records.devices import Device
from handrail_sidecar.gpu.devices import GpuDevice, NvmlUnavailable
from handrail_sidecar.gpu.failures import failure
from handrail_sidecar.gpu.nvml_calls import SamplerClock
from handrail_sidecar.gpu.state import SamplerState

log = logging.getLogger(__name__)

_XID_AGAIN_NS: Final = 60_000_000_000
"""Shortest time between two reports of one error on one GPU; some come in storms.

All of them are counted.
"""

Tell = Callable[[ProcessEvent], None]
"""Takes an event, in a thread of the sampler. Never blocks, never raises."""


class News:
    """Log lines and events of one sampler."""

    def __init__(self, process: Process, state: SamplerState, clock: SamplerClock, tell: Tell) -> None:
        self._process = process
        self._state = state
        self._clock = clock
        self._tell_event = tell
        self._xid_ns: dict[tuple[str, int], int] = {}

    def unavailable(self, problem: NvmlUnavailable) -> None:
        """Report that there is no session: once for each reason.

        Sends an event only when there was a session before.
        """
        before, self._state.problem = self._state.problem, problem
        if before is not None and before.code == problem.code:
            return
        log.warning(
            "no GPU metrics: %s (NVML code %d); the sidecar retries. Remedy: %s", problem.words, problem.code, problem.remedy
        )
        if self._state.sessions and before is None:
            self.event(ProcessEventKind.GPU_LOST, f"no session with NVML: {problem.words}")

    def opened(self, gpus: Sequence[GpuDevice], failed: Mapping[int, int], *, again: bool) -> None:
        """Report that a session has begun with these GPUs.

        ``failed``: return code by index of the GPUs that did not answer.
        """
        state, counts = self._state, Counter(each.device.product for each in gpus)
        for note in state.visible.notes:
            log.warning("GPUs: %s", note)
        named = ", ".join(f"{count} × {product}" for product, count in counts.items())
        log.info("GPUs: driver %s, %s", state.driver or "unknown", named or "none of the selected GPUs")
        for index, code in failed.items():
            self.lost(f"GPU {index}", code)
        if again:
            self.event(ProcessEventKind.GPU_BACK, f"NVML answers again: driver {state.driver}")

    def lost(self, who: str, code: int) -> None:
        """Report that a GPU does not answer."""
        reported_failure = failure(code)
        log.warning(
            "%s: %s (NVML code %d); the sidecar retries. Remedy: %s",
            who,
            reported_failure.words,
            code,
            reported_failure.remedy or "unknown",
        )
        self.event(ProcessEventKind.GPU_LOST, f"{who}: {reported_failure.words}")

    def stuck(self, hanging: Mapping[tuple[str, str], tuple[Device, int]]) -> None:
        """Report each call that has not returned for long, once.

        ``hanging``: by UUID and call, the reader and the time in ns.
        """
        before, self._state.stuck = self._state.stuck, frozenset(hanging)
        for key in self._state.stuck - before:
            device, ns = hanging[key]
            who = _who(device)
            log.warning("%s: %s has not returned for %.0f s; other reads continue", who, key[1], ns / 1e9)
            self.event(ProcessEventKind.GPU_STUCK, f"{who}: {key[1]} does not return")
        for uuid, call in before - self._state.stuck:
            log.info("GPU %s: %s has returned", uuid, call)

    def xid(self, device: Device, code: int) -> bool:
        """Report an Xid error; return False when it was reported a short while ago."""
        now, key = self._clock.mono_ns(), (device.key, code)
        if now - self._xid_ns.get(key, -_XID_AGAIN_NS) < _XID_AGAIN_NS:
            return False
        self._xid_ns[key] = now
        log.warning("%s: Xid %d", _who(device), code)
        self.event(ProcessEventKind.GPU_XID, f"{_who(device)}: Xid {code}")
        return True

    def event(self, kind: ProcessEventKind, detail: str) -> None:
        """Send an event to the record."""
        self._tell_event(
            ProcessEvent(process=self._process, source=Source.NVML, at_unix_ns=self._clock.unix_ns(), kind=kind, detail=detail)
        )


def _who(device: Device) -> str:
    return f"GPU {device.index} ({device.key})"
