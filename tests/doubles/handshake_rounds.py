"""A handshake queue in which the test decides when each handshake begins."""

from __future__ import annotations

from collections.abc import Callable

from handrail.runtime.handshakes import HandshakeQueue

HELLO = b"\x16\x03\x01\x02\x00"  # the first bytes of a TLS handshake


class Rounds:
    """Control the pace of ``queue``, its handshake queue.

    The first handshake begins at once, each further one in ``pass_one``.
    """

    def __init__(self) -> None:
        self._now_s = 1000.0
        self._calls: list[Callable[[], None]] = []
        self.queue = HandshakeQueue(rate=1.0, burst=1, clock=lambda: self._now_s, later=self._later)

    def _later(self, _: float, call: Callable[[], None]) -> None:
        self._calls.append(call)

    def use_up(self) -> None:
        """Use up the one handshake that would begin at once."""
        before = self.queue.waiting
        self.queue.enter("127.0.0.9", lambda: True)
        assert self.queue.waiting == before == 0

    def pass_one(self) -> None:
        """Let the next handshake begin."""
        self._now_s += 1.0
        for call in [self._calls.pop() for _ in self._calls]:
            call()
