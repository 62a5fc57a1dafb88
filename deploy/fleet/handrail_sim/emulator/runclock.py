"""Time in one process of a fleet over real sockets.

It gives the true time since the fleet's start, and what the host's own clock shows.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from handrail_sim.emulator.faults import Active, Fault
from handrail_sim.emulator.observe import HostClock, clock


@dataclass(frozen=True, slots=True)
class RunClock:
    """The clock of one process.

    ``began_ns``: the fleet's start on this process's monotonic clock. ``shows``: its host's clock with its faults.
    """

    began_unix_ns: int
    began_ns: int
    shows: HostClock

    @classmethod
    def of(cls, host: str, faults: Sequence[Fault], began_unix_ns: int | None) -> RunClock:
        """Build the clock; ``began_unix_ns``: None is now."""
        now_unix_ns, now_ns = time.time_ns(), time.monotonic_ns()
        began = now_unix_ns if began_unix_ns is None else began_unix_ns
        return cls(began, now_ns - (now_unix_ns - began), clock(host, faults))

    def active(self, faults: Sequence[Fault]) -> Active:
        """Return the faults with their times on the monotonic clock instead of the run's."""
        return Active(
            replace(
                fault,
                from_ns=fault.from_ns + self.began_ns,
                to_ns=None if fault.to_ns is None else fault.to_ns + self.began_ns,
            )
            for fault in faults
        )

    def run_ns(self, monotonic_ns: int) -> int:
        """Return the true time since the fleet's start."""
        return monotonic_ns - self.began_ns

    def unix_ns(self, true_unix_ns: int) -> int:
        """Return what the host's wall clock shows at that moment."""
        run_ns = true_unix_ns - self.began_unix_ns
        return true_unix_ns + self.shows.offset_ns + self.shows.elapsed_ns(run_ns) - run_ns
