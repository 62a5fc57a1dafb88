"""How many streams the proxy takes: each costs two descriptors, its client's and its upstream's.

A client connection is admitted as a stream when both fit into the budget. One that is not admitted may still stand, so that it
gets an answer; of those a few at a time. Beyond that, who connects waits in the system's queue.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final

from handrail.runtime.connections import QUIET_S, Refusal
from handrail.runtime.descriptors import CROWDED_SHARE, DescriptorBudget

log = logging.getLogger(__name__)

REFUSALS: Final = 32
"""Connections at a time that are no stream: in a TLS handshake, or about to get a 503."""

KEPT: Final = REFUSALS + 32
"""Descriptors that no stream gets beside the budget's reserve: for refusals, and so that /readyz can still say that all are in
use. Of a small limit a quarter."""

DESCRIPTORS_EACH: Final = 2


class Admission:
    """Counts client connections, and which of them are streams. Owned by one event loop. An ``accepting.Entry``.

    Without a ``budget`` and ``most`` every connection is a stream. ``clock``: seconds.
    """

    def __init__(
        self,
        budget: DescriptorBudget | None = None,
        most: int | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.streams = 0
        self.connections = 0  # accepted and not closed, streams among them
        self.pauses = 0  # times that nothing was accepted for want of room
        self._budget = budget
        self._most = most
        self._kept = 0 if budget is None else min(KEPT, (budget.limit - budget.reserved) // 4)
        self._owed = 0  # upstream connections that admitted streams have not opened yet
        self._clock = clock
        self._paused_at: float | None = None

    # --- streams ----------------------------------------------------------------------------------------------------------

    def free_streams(self) -> int | None:
        """How many more streams fit; None where nothing limits them."""
        limits = []
        if self._budget is not None:
            limits.append(max(0, self._free(self._budget)) // DESCRIPTORS_EACH)
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

    def stream(self) -> bool:
        """Make an accepted connection a stream, if its upstream connection fits too."""
        if (self._budget is not None and self._free(self._budget) < 1) or (self._most is not None and self.streams >= self._most):
            return False
        self.stream_anyway()
        return True

    def stream_anyway(self) -> None:
        """The same in place of a stream that is being closed."""
        self.streams += 1
        self._owed += 1

    def withdrawn(self) -> None:
        """A stream that has sent no request is one no more; its connection is about to get a 503."""
        self.streams -= 1
        self._owed -= 1

    def connected(self) -> None:
        """The upstream connection of a stream is open.

        It is owed until then: a count of descriptors between the decision to open one and its opening would not see it.
        """
        self._owed -= 1
        if self._budget is not None:
            self._budget.take()

    def disconnected(self) -> None:
        """The upstream connection of a stream is closed."""
        if self._budget is not None:
            self._budget.give_back()

    def closed(self, *, stream: bool, owed: bool) -> None:
        """A client connection is closed; it was a ``stream``, and its upstream connection still ``owed``."""
        self.connections -= 1
        self.streams -= stream
        self._owed -= owed
        if self._budget is not None:
            self._budget.give_back()

    def _free(self, budget: DescriptorBudget) -> int:
        return budget.free() - self._kept - self._owed

    # --- accepting.Entry --------------------------------------------------------------------------------------------------

    def has_room(self) -> bool:
        """Whether one more connection may be accepted: for a stream, or for a 503."""
        undecided = self.connections - self.streams  # in a handshake, or refused; the former are to be streams
        if undecided < REFUSALS:  # those may use half of the reserve: a 503 is better than silence
            return self._budget is None or self._budget.limit - self._budget.in_use() > self._budget.reserved // 2
        if self._most is not None and self.streams + undecided >= self._most:
            return False
        return self._budget is None or self._free(self._budget) - undecided >= DESCRIPTORS_EACH

    def shortage(self) -> str:
        """For the log."""
        return f"{self.streams} streams are open and {self.connections - self.streams} connections are being refused"

    def admit(self, _peer: str) -> Refusal | None:
        """One client connection was accepted. The proxy has no bound for one peer: a router may be its only one."""
        self.connections += 1
        if self._budget is not None:
            self._budget.take()
        return None

    def pause(self, why: str) -> None:
        """Count; log where it did not pause for a minute."""
        self.pauses += 1
        now = self._clock()
        if self._paused_at is None or now - self._paused_at >= QUIET_S:
            log.warning("proxy accepts no connections for now: %s; who connects waits", why)
        self._paused_at = now

    def resume(self) -> None:
        """Nothing to be done."""
