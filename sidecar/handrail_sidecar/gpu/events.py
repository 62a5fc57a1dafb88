"""What happens to GPUs and to NVML, said once each: a line for people, an event for the record."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from handrail.records import Process, ProcessEvent, ProcessEventKind, Source
from handrail.records.devices import Device
from handrail_sidecar.gpu.devices import GpuDevice, NvmlUnavailable
from handrail_sidecar.gpu.failures import failure
from handrail_sidecar.gpu.reader import DeviceReader
from handrail_sidecar.gpu.state import SamplerState
from handrail_sidecar.gpu.steps import SamplerClock

log = logging.getLogger(__name__)

_XID_AGAIN_NS: Final = 60_000_000_000
"""The same error of the same GPU is said again after so long at the earliest: some come in storms. All are counted."""

Tell = Callable[[ProcessEvent], None]
"""Takes an event, in a thread of the sampler. Never blocks, never raises."""


class News:
    """One sampler's."""

    def __init__(self, process: Process, state: SamplerState, clock: SamplerClock, tell: Tell) -> None:
        self._process = process
        self._state = state
        self._clock = clock
        self._tell_event = tell
        self._xid_ns: dict[tuple[str, int], int] = {}

    def unavailable(self, problem: NvmlUnavailable) -> None:
        """There is no session. Said once for each reason; an event where there was one."""
        before, self._state.problem = self._state.problem, problem
        if before is not None and before.code == problem.code:
            return
        log.warning(
            "no GPU metrics: %s (NVML code %d); looking again. To repair it: %s", problem.words, problem.code, problem.remedy
        )
        if self._state.sessions and before is None:
            self.event(ProcessEventKind.GPU_LOST, f"no session with NVML: {problem.words}")

    def opened(self, gpus: Sequence[GpuDevice], failed: Mapping[int, int], *, again: bool) -> None:
        """A session has begun with these GPUs; ``failed``: code by index of those that did not answer."""
        state, counts = self._state, Counter(each.device.product for each in gpus)
        for note in state.visible.notes:
            log.warning("GPUs: %s", note)
        named = ", ".join(f"{count} × {product}" for product, count in counts.items())
        log.info("GPUs: driver %s, %s", state.driver or "not told", named or "none of those asked for")
        for index, code in failed.items():
            self.lost(f"GPU {index}", code)
        if again:
            self.event(ProcessEventKind.GPU_BACK, f"NVML answers again: driver {state.driver}")

    def lost(self, who: str, code: int) -> None:
        """A GPU does not answer."""
        reported_failure = failure(code)
        log.warning(
            "%s: %s (NVML code %d); looking again. To repair it: %s",
            who,
            reported_failure.words,
            code,
            reported_failure.remedy or "not known",
        )
        self.event(ProcessEventKind.GPU_LOST, f"{who}: {reported_failure.words}")

    def stuck(self, hanging: Mapping[tuple[str, str], tuple[DeviceReader, int]]) -> None:
        """Calls that have not returned for long, by UUID and call, with the ns; each is said once."""
        before, self._state.stuck = self._state.stuck, frozenset(hanging)
        for key in self._state.stuck - before:
            reader, ns = hanging[key]
            who = _who(reader.gpu.device)
            log.warning("%s: %s has not returned for %.0f s; all else is read on", who, key[1], ns / 1e9)
            self.event(ProcessEventKind.GPU_STUCK, f"{who}: {key[1]} does not return")
        for uuid, call in before - self._state.stuck:
            log.info("GPU %s: %s has returned", uuid, call)

    def xid(self, device: Device, code: int) -> bool:
        """The driver reported an error; False where it was said a short while ago."""
        now, key = self._clock.mono_ns(), (device.key, code)
        if now - self._xid_ns.get(key, -_XID_AGAIN_NS) < _XID_AGAIN_NS:
            return False
        self._xid_ns[key] = now
        log.warning("%s: Xid %d", _who(device), code)
        self.event(ProcessEventKind.GPU_XID, f"{_who(device)}: Xid {code}")
        return True

    def event(self, kind: ProcessEventKind, detail: str) -> None:
        """For the record."""
        self._tell_event(
            ProcessEvent(process=self._process, source=Source.NVML, at_unix_ns=self._clock.unix_ns(), kind=kind, detail=detail)
        )


def _who(device: Device) -> str:
    return f"GPU {device.index} ({device.key})"
