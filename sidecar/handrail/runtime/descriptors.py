"""File descriptors of this process: limit, use, and room for connections.

Every connection is a descriptor, and so is every file that the journal, the spool and the store open. A budget keeps a reserve
for the files, so that peers that only connect cannot take the last descriptor.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

MOST_DESCRIPTORS: Final = 1_048_576
"""Highest soft limit that the process sets: the default of Linux's ``fs.nr_open``."""

CROWDED_SHARE: Final = 0.9
RECOUNT_S: Final = 0.25
_FOLDERS: Final = ("/proc/self/fd", "/dev/fd")


@dataclass(frozen=True, slots=True)
class DescriptorLimit:
    """RLIMIT_NOFILE of this process.

    It holds the soft limit ``before`` and after it was raised (``soft``), and the ``hard`` one. An unlimited value reads
    ``MOST_DESCRIPTORS``.
    """

    before: int
    soft: int
    hard: int

    def __str__(self) -> str:
        """Text for the log line at start."""
        raised = f"raised from {self.before}" if self.soft > self.before else f"unchanged; hard limit {self.hard}"
        return f"descriptors {self.soft} ({raised})"


def raise_limit() -> DescriptorLimit:
    """Raise the soft limit of descriptors to the hard one.

    It is at most ``MOST_DESCRIPTORS`` and never lowered. A system that refuses leaves the limit as it is; the result shows that.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    raised = wanted_limit(soft, hard)
    if raised != soft:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
        except (OSError, ValueError):
            raised = soft
    return DescriptorLimit(_finite(soft), _finite(raised), _finite(hard))


def wanted_limit(soft: int, hard: int) -> int:
    """Soft limit that a process should have.

    Both limits are as ``getrlimit`` gives them.
    """
    if soft == resource.RLIM_INFINITY:
        return soft
    return max(soft, min(_finite(hard), MOST_DESCRIPTORS))


def _finite(limit: int) -> int:
    return MOST_DESCRIPTORS if limit == resource.RLIM_INFINITY else limit


def open_descriptors() -> int | None:
    """Number of descriptors that this process has open.

    None where that cannot be read, as when not one more can be opened.
    """
    return next((counted for counted in map(_opened, _FOLDERS) if counted is not None), None)


def _opened(folder: str) -> int | None:
    try:
        # Linux 6.2 and later gives the count as the folder's size: that takes no descriptor, and no walk
        counted = os.stat(folder).st_size if folder.startswith("/proc/") else 0
        return counted or len(os.listdir(folder)) - 1
    except OSError:
        return None


class DescriptorBudget:
    """Free part of ``limit`` descriptors when ``reserved`` are reserved for files.

    One loop owns it. ``count`` is called at most every ``recount_s`` on ``clock`` (seconds); in between, descriptors that are
    taken and given back are added. An unreadable count means that all of the limit is used: reading it takes a descriptor on
    older systems. A reserve of more than half of the limit is cut to half.
    """

    def __init__(
        self,
        limit: int,
        reserved: int,
        *,
        clock: Callable[[], float] = time.monotonic,
        count: Callable[[], int | None] = open_descriptors,
        recount_s: float = RECOUNT_S,
    ) -> None:
        self.limit = limit
        self.reserved = min(reserved, limit // 2)
        self._clock = clock
        self._count = count
        self._recount_s = recount_s
        self._counted = 0
        self._counted_at: float | None = None
        self._taken = 0

    @classmethod
    def of_process(cls, reserved: int) -> DescriptorBudget:
        """Budget of this process, by its current soft limit."""
        return cls(_finite(resource.getrlimit(resource.RLIMIT_NOFILE)[0]), reserved)

    def in_use(self) -> int:
        """Open descriptors: the last count and those taken since."""
        now = self._clock()
        if self._counted_at is None or now - self._counted_at >= self._recount_s:
            counted = self._count()
            self._counted = self.limit if counted is None else counted
            self._counted_at, self._taken = now, 0
        return max(0, self._counted + self._taken)

    def free(self) -> int:
        """Number of connections that still fit beside the reserve; never negative."""
        return max(0, self.limit - self.reserved - self.in_use())

    def take(self, descriptors: int = 1) -> None:
        """Note that descriptors are opened now, ahead of the next count."""
        self._taken += descriptors

    def give_back(self, descriptors: int = 1) -> None:
        """Note that descriptors were closed."""
        self._taken -= descriptors

    @property
    def crowded(self) -> bool:
        """Whether 90 % of the limit is used, or no connection fits beside the reserve."""
        return self.in_use() >= CROWDED_SHARE * self.limit or not self.free()

    def problem(self) -> str:
        """One line for /readyz, or '' while there is room."""
        if not self.crowded:
            return ""
        return (
            f"{self.in_use()} of {self.limit} descriptors are in use ({self.reserved} are reserved for "
            "files): new connections wait "
            "or are refused; raise the hard limit (ulimit -Hn, LimitNOFILE=) or find out who connects"
        )
