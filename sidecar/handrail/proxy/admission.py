"""How many streams the proxy takes: each costs two descriptors, its client's and its upstream's.

A client connection is admitted as a stream when both fit into the budget beside the reserve for files. One that is not admitted
may still stand, so that it gets an answer; of those a few at a time.
"""

from __future__ import annotations

from typing import Final

from handrail.descriptors import CROWDED_SHARE, DescriptorBudget

RESERVED: Final = 128
"""Descriptors that no stream gets: spool, logs, exporter, admin, plugin, tap, and ``REFUSALS``."""

REFUSALS: Final = 32
"""Connections at a time that are no stream: in a TLS handshake, or about to get a 503. Beyond, the kernel's backlog waits."""

DESCRIPTORS_EACH: Final = 2


class Admission:
    """Counts client connections, and which of them are streams. Owned by one event loop.

    Without a ``budget`` and ``most`` every connection is a stream.
    """

    def __init__(self, budget: DescriptorBudget | None = None, most: int | None = None) -> None:
        self.streams = 0
        self.connections = 0  # accepted and not closed, streams among them
        self._budget = budget
        self._most = most
        self._owed = 0  # upstream connections that admitted streams have not opened yet

    def free_streams(self) -> int | None:
        """How many more streams fit; None where nothing limits them."""
        limits = []
        if self._budget is not None:
            limits.append(max(0, self._budget.free() - self._owed) // DESCRIPTORS_EACH)
        if self._most is not None:
            limits.append(max(0, self._most - self.streams))
        return min(limits, default=None)

    @property
    def capacity(self) -> int | None:
        """How many streams fit in all; None where nothing limits them."""
        free = self.free_streams()
        return None if free is None else self.streams + free

    @property
    def crowded(self) -> bool:
        """True from 90 % of the capacity on."""
        free = self.free_streams()
        return free is not None and self.streams >= CROWDED_SHARE * (self.streams + free)

    def problem(self) -> str:
        """One line for /readyz, or '' while there is room."""
        if not self.crowded:
            return ""
        return (
            f"proxy: {self.streams} streams are open and {self.capacity} fit: beyond that requests get 503; raise the hard limit "
            "of descriptors (ulimit -Hn, LimitNOFILE=) or proxy.max_streams"
        )

    def room(self) -> bool:
        """Whether one more connection may be accepted: for a stream, or for a 503."""
        undecided = self.connections - self.streams  # in a handshake, or refused; the former are to be streams
        if undecided < REFUSALS:
            return True
        if self._most is not None and self.streams + undecided >= self._most:
            return False
        return self._budget is None or self._budget.free() - self._owed - undecided >= DESCRIPTORS_EACH

    def accepted(self) -> None:
        """One client connection was accepted."""
        self.connections += 1
        if self._budget is not None:
            self._budget.take()

    def admit(self) -> bool:
        """Make an accepted connection a stream, if its upstream connection fits too."""
        free = self._budget.free() - self._owed if self._budget is not None else 1
        if free < 1 or (self._most is not None and self.streams >= self._most):
            return False
        self.admit_anyway()
        return True

    def admit_anyway(self) -> None:
        """The same in place of a stream that is being closed."""
        self.streams += 1
        self._owed += 1

    def connecting(self) -> None:
        """The upstream connection of a stream is being opened."""
        self._owed -= 1
        if self._budget is not None:
            self._budget.take()

    def disconnected(self) -> None:
        """The upstream connection of a stream is closed, or was not opened."""
        if self._budget is not None:
            self._budget.give_back()

    def closed(self, *, stream: bool, owed: bool) -> None:
        """A client connection is closed; it was a ``stream``, and its upstream connection still ``owed``."""
        self.connections -= 1
        self.streams -= stream
        self._owed -= owed
        if self._budget is not None:
            self._budget.give_back()
