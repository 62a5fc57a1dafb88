"""Pace TLS handshakes, so that one peer's flood delays no other peer.

A handshake takes a millisecond or two of the event loop. Thousands at once would block everything else for seconds.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Final

RATE: Final = 100.0
"""Handshakes that one process begins each second: a fifth to a third of a processor."""

BURST: Final = 4
"""Handshakes that begin at once after a time with fewer."""

Begin = Callable[[], bool]
"""Begin a handshake.

False: the connection has ended meanwhile, so nothing began.
"""


def _call_later(seconds: float, call: Callable[[], None]) -> object:
    return asyncio.get_running_loop().call_later(seconds, call)


class HandshakeQueue:
    """Begin ``rate`` handshakes a second, peers in turn.

    Those of one peer begin in the order in which they came. Only beginnings are paced: a sender that stalls in the middle of its
    handshake delays no other. The gates in front of the queue bound its length. It belongs to one event loop.
    """

    def __init__(
        self,
        *,
        rate: float = RATE,
        burst: int = BURST,
        clock: Callable[[], float] = time.monotonic,
        later: Callable[[float, Callable[[], None]], object] = _call_later,
    ) -> None:
        self._interval_s = 1.0 / rate
        self._slack_s = (burst - 1) * self._interval_s
        self._clock = clock
        self._later = later
        self._next_s = 0.0  # when the next may begin without a burst
        self._waiting: dict[str, deque[Begin]] = {}
        self._peers: deque[str] = deque()  # in turn; each is here once
        self._timed = False

    @property
    def waiting(self) -> int:
        """Number of connections whose handshake has not begun."""
        return sum(map(len, self._waiting.values()))

    def enter(self, peer: str, begin: Begin) -> None:
        """Call ``begin`` at its turn.

        That is now, where no other connection waits and the rate allows it.
        """
        queue = self._waiting.get(peer)
        if queue is None:
            queue = self._waiting[peer] = deque()
            self._peers.append(peer)
        queue.append(begin)
        if not self._timed:
            self._advance()

    def _advance(self) -> None:
        self._timed = False
        while self._peers:
            now_s = self._clock()
            wait_s = self._next_s - self._slack_s - now_s
            if wait_s > 0:
                self._timed = True
                self._later(wait_s, self._advance)
                return
            if self._pop()():
                self._next_s = max(self._next_s, now_s) + self._interval_s

    def _pop(self) -> Begin:
        peer = self._peers.popleft()
        queue = self._waiting[peer]
        begin = queue.popleft()
        if queue:
            self._peers.append(peer)
        else:
            del self._waiting[peer]
        return begin
