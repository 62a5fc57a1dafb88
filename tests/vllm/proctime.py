"""Processor time of a child and of everything that it started."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from vllm.child import Child

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def cpu_seconds(child: Child) -> float:
    """Return user and system time of all live processes of its group, in seconds.

    The kernel's resolution is a hundredth of a second for each.
    """
    ticks = 0
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            if int(fields[2]) == child.pid:
                ticks += int(fields[11]) + int(fields[12])
    return ticks / _TICKS_PER_S
