"""A link between two hosts. No clock, no I/O.

Transfers under way share its bandwidth evenly, or are served in turn.
"""

from __future__ import annotations


class EmulatedLink:
    """The transfers of one link.

    Every method takes the same monotonic clock, which must not run backwards.
    """

    def __init__(self, bytes_per_s: float, *, in_turn: bool = False) -> None:
        self._bytes_per_s = bytes_per_s
        self._in_turn = in_turn
        self._left: dict[str, float] = {}  # bytes left, in the order of their starts
        self._at_ns = 0

    def set_rate(self, bytes_per_s: float, now_ns: int) -> None:
        """Set the bandwidth from now on."""
        self._move(now_ns)
        self._bytes_per_s = bytes_per_s

    def start(self, transfer: str, size_bytes: int, now_ns: int) -> None:
        self._move(now_ns)
        self._left[transfer] = float(size_bytes)

    def drop(self, transfer: str, now_ns: int) -> None:
        """Drop a transfer that nobody waits for; an unknown one does nothing."""
        self._move(now_ns)
        self._left.pop(transfer, None)

    def finished(self, now_ns: int) -> list[str]:
        """Remove and return the transfers that have arrived."""
        self._move(now_ns)
        bound = self._bytes_per_s * 1e-9  # bytes that move in a nanosecond: times are whole nanoseconds
        done = []
        for transfer, left in self._left.items():
            if left <= bound:
                done.append(transfer)
            elif self._in_turn:
                break  # even a transfer of no bytes waits for those before it
        for transfer in done:
            del self._left[transfer]
        return done

    def next_ns(self) -> int | None:
        """Return when the next transfer arrives if nothing changes; None: nothing moves."""
        if not self._left:
            return None
        shortest = next(iter(self._left.values())) if self._in_turn else min(self._left.values()) * len(self._left)
        return self._at_ns + max(1, round(shortest / self._bytes_per_s * 1e9))

    def _move(self, now_ns: int) -> None:
        if self._left:
            moving = [next(iter(self._left))] if self._in_turn else list(self._left)
            each = (now_ns - self._at_ns) * 1e-9 * self._bytes_per_s / len(moving)
            for transfer in moving:
                self._left[transfer] -= each
        self._at_ns = now_ns
