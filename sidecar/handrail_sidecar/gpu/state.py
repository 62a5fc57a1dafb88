"""Settings of the GPU sampler, and the state of its session with NVML."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Final

from handrail_sidecar.gpu.devices import NvmlUnavailable
from handrail_sidecar.gpu.visible import Visible

_S: Final = 1_000_000_000
_LEAST_LIMIT_NS: Final = 20_000_000
_MOST_LIMIT_NS: Final = _S


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

    @property
    def limit_ns(self) -> int:
        """How long one call may take before the others go on without it."""
        return min(max(self.period_ns // 2, _LEAST_LIMIT_NS), _MOST_LIMIT_NS)


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
