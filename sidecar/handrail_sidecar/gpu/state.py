"""Settings of the GPU sampler, and the state of its session with NVML."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from handrail.records.devices import DeviceSample
from handrail_sidecar.gpu.devices import NvmlUnavailable
from handrail_sidecar.gpu.failures import HANGS
from handrail_sidecar.gpu.visible import Visible
from handrail_sidecar.sampling.worker import WorkerStats

Deliver = Callable[[DeviceSample], None]
"""Takes a sample, in the thread that read it. Never blocks, never raises."""


class SystemClock:
    """The clocks of this machine."""

    mono_ns = staticmethod(time.monotonic_ns)
    unix_ns = staticmethod(time.time_ns)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerSettings:
    """Settings of the sampler; a ``period_ns`` of 100 ms is 10 Hz.

    ``devices``: indices or UUIDs; () means those that the environment names, otherwise all.
    ``without``: names of counters that are not read.
    """

    period_ns: int = 100_000_000
    devices: tuple[str, ...] = ()
    without: frozenset[str] = frozenset()
    first_retry_s: float = 1.0
    answer_within_s: float = 10.0  # for a GPU that is looked for: a driver may have to wake it


@dataclass(slots=True)
class SamplerStats(WorkerStats):
    """Counts since start, over all sessions."""

    samples: int = 0
    missed: int = 0  # periods in which a device was not read
    failures: Counter[int] = field(default_factory=Counter)  # calls that returned and failed, by code

    def by_code(self) -> dict[int, int]:
        """Return the calls that failed, those that hang included."""
        return {**self.failures, **({HANGS: self.given_up} if self.given_up else {})}


@dataclass(slots=True)
class SamplerState:
    """Present state. ``problem``: why there is no session, None while there is one."""

    problem: NvmlUnavailable | None = None
    driver: str = ""
    nvml: str = ""
    sessions: int = 0
    lost: dict[int, int] = field(default_factory=dict)  # return code by index, of GPUs that do not answer
    visible: Visible = field(default_factory=lambda: Visible(keys=None))
    opening_since_ns: int = 0  # while NVML is being opened
    stuck: frozenset[tuple[str, str]] = frozenset()  # (UUID, call) that have not returned for long
