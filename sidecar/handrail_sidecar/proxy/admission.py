"""Limit how many streams the proxy takes.

A stream costs two descriptors: its client connection and its upstream connection. A client connection is admitted as a
stream when both fit into the budget. A connection that is not admitted may still be accepted, so that it gets an answer;
only a few at a time are. Beyond that, connections wait in the system's queue.
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
"""Most connections at a time that are no stream: in a TLS handshake or refused.

A refused connection is about to get a 503.
"""

KEPT: Final = REFUSALS + 32
"""Descriptors that no stream gets, beside the budget's reserve.

They serve refusals, and /readyz while all others are in use. With a small limit it is a quarter of the limit.
"""

DESCRIPTORS_EACH: Final = 2


class Admission:
    """Count client connections and decide which of them are streams.

    One event loop owns it. It is an ``accepting.ConnectionGate``.
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
        self.connections = 0  # accepted and not closed, streams included
        self.pauses = 0  # times that accepting paused for lack of room
        self._budget = budget
        self._most = most
        self._kept = 0 if budget is None else min(KEPT, (budget.limit - budget.reserved) // 4)
        self._owed = 0  # upstream connections that admitted streams have not begun to open
        self._clock = clock
        self._paused_at: float | None = None

    # --- streams ----------------------------------------------------------------------------------------------------------

    def free_streams(self) -> int | None:
        """How many more streams fit; None without a limit."""
        limits = []
        if self._budget is not None:
            limits.append(max(0, self._free(self._budget)) // DESCRIPTORS_EACH)
        if self._most is not None:
            limits.append(max(0, self._most - self.streams))
        return min(limits, default=None)

    @property
    def capacity(self) -> int | None:
        """How many streams fit in all; None without a limit."""
        free = self.free_streams()
        return None if free is None else self.streams + free

    @property
    def crowded(self) -> bool:
        """True at 90 % of the capacity and above."""
        free = self.free_streams()
        return free is not None and self.streams >= CROWDED_SHARE * (self.streams + free)

    def problem(self) -> str:
        """One line for /readyz; '' while there is room."""
        if not self.crowded:
            return ""
        return (
            f"proxy: {self.streams} of {self.capacity} streams are open: further requests get 503; raise the hard limit "
            "of descriptors (ulimit -Hn, LimitNOFILE=) or proxy.max_streams"
        )

    def stream(self) -> bool:
        """Make an accepted connection a stream if its upstream connection fits too."""
        if (self._budget is not None and self._free(self._budget) < 1) or (self._most is not None and self.streams >= self._most):
            return False
        self.stream_anyway()
        return True

    def stream_anyway(self) -> None:
        """Make a connection a stream in place of one that is being closed."""
        self.streams += 1
        self._owed += 1

    def withdrawn(self) -> None:
        """Stop counting a stream that has sent no request.

        Its connection is about to get a 503.
        """
        self.streams -= 1
        self._owed -= 1

    def opening(self) -> None:
        """Note that the upstream connection of a stream is being opened.

        It counted as owed until now. From now on the count of descriptors sees its socket. A count during a slow connection would
        otherwise take it twice.
        """
        self._owed -= 1
        if self._budget is not None:
            self._budget.take()

    def disconnected(self) -> None:
        """Note that the upstream connection of a stream is closed, or could not be opened."""
        if self._budget is not None:
            self._budget.give_back()

    def closed(self, *, stream: bool, owed: bool) -> None:
        """Note that a client connection is closed.

        ``stream``: it was a stream. ``owed``: its upstream connection was not open yet.
        """
        self.connections -= 1
        self.streams -= stream
        self._owed -= owed
        if self._budget is not None:
            self._budget.give_back()

    def _free(self, budget: DescriptorBudget) -> int:
        return budget.free() - self._kept - self._owed

    # --- accepting.ConnectionGate ---------------------------------------------------------------------------------------

    def has_room(self) -> bool:
        """Whether one more connection may be accepted, for a stream or for a 503."""
        undecided = self.connections - self.streams  # in a handshake, or refused; those in a handshake become streams
        if undecided < REFUSALS:  # these may use half of the reserve: a 503 is better than no answer
            return self._budget is None or self._budget.limit - self._budget.in_use() > self._budget.reserved // 2
        if self._most is not None and self.streams + undecided >= self._most:
            return False
        return self._budget is None or self._free(self._budget) - undecided >= DESCRIPTORS_EACH

    def shortage(self) -> str:
        """Describe the shortage for the log."""
        return f"{self.streams} streams are open and {self.connections - self.streams} connections are being refused"

    def admit(self, _peer: str) -> Refusal | None:
        """Count one accepted client connection.

        The proxy sets no bound per peer: a router may be its only peer.
        """
        self.connections += 1
        if self._budget is not None:
            self._budget.take()
        return None

    def pause(self, why: str) -> None:
        """Count a pause of accepting; log it if the last one is more than a minute ago."""
        self.pauses += 1
        now = self._clock()
        if self._paused_at is None or now - self._paused_at >= QUIET_S:
            log.warning("proxy pauses accepting: %s; new connections wait", why)
        self._paused_at = now

    def resume(self) -> None:
        """Do nothing."""
