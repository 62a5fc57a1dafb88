"""Turn raw hardware counters into growing totals, with wraps undone.

A total restarts at 0 where its growth cannot be known; growth is never guessed.
A 32-bit counter at PCIe 5 x16 (63 GB/s) wraps every 68 ms.
So two readings show the growth only when the link cannot have carried a whole turn between them.
The line rate is the bound: it decides how often to read (``due_within_ns``), whether a smaller reading is a wrap or a restart of
the driver, and when growth is unknown.
"""

from __future__ import annotations

from typing import Final

_NS: Final = 1_000_000_000
_NARROW: Final = 1 << 32
_WIDE: Final = 1 << 64
_MARGIN: Final = 0.75  # of the time of one turn; the rest allows for late readings
_ABSURD: Final = 8  # times the line rate: more growth than any link could carry


class Growth:
    """Total of one byte counter that wraps, counted from ``since_unix_ns``.

    ``unit_bytes``: bytes per count. ``bits`` 32: known to be that wide; 0: not known, and 32 until a reading shows more.
    """

    __slots__ = ("_began_ns", "_last", "bits", "lost", "since_unix_ns", "total", "unit_bytes")

    def __init__(self, unit_bytes: int = 1, bits: int = 0) -> None:
        self.unit_bytes = unit_bytes
        self.bits = bits
        self.total = 0
        self.since_unix_ns = 0
        self.lost = 0  # times that the total had to restart
        self._last: int | None = None
        self._began_ns = 0

    def follow(self, raw: int, began_ns: int, ended_ns: int, at_unix_ns: int, line_bytes: float) -> None:
        """Take one reading of a call from ``began_ns`` to ``ended_ns`` (monotonic).

        ``line_bytes``: what the link can carry per second and direction.
        """
        if began_ns < self._began_ns:
            return  # an answer that arrives after a later one
        if raw >= _NARROW:
            self.bits = 64
        last, elapsed = self._last, ended_ns - self._began_ns  # at most this long since the last one
        self._last, self._began_ns = raw, began_ns
        if last is None:
            self.since_unix_ns = at_unix_ns
            return
        turn = _WIDE if self.bits == 64 else _NARROW
        most = line_bytes * elapsed / _NS / self.unit_bytes
        grew = (raw - last) % turn
        unsure = turn == _NARROW and most >= turn
        if unsure or grew > (most if raw < last else most * _ABSURD):
            self.lost += 1
            self.total, self.since_unix_ns = 0, at_unix_ns
            return
        self.total += grew * self.unit_bytes

    def due_within_ns(self, line_bytes: float) -> int | None:
        """Return how soon to read again to miss no wrap; None when it never wraps."""
        if self.bits == 64 or not line_bytes:
            return None
        return int(_NARROW * self.unit_bytes / line_bytes * _NS * _MARGIN)


class Standing:
    """One counter that does not wrap (errors, energy), as the device reports it.

    A smaller reading means that the counter restarted.
    """

    __slots__ = ("_last", "lost", "since_unix_ns", "total")

    def __init__(self) -> None:
        self.total: float = 0
        self.since_unix_ns = 0
        self.lost = 0
        self._last: float | None = None

    def follow(self, raw: float, at_unix_ns: int) -> None:
        """Take one reading."""
        if self._last is None or raw < self._last:
            self.lost += self._last is not None
            self.since_unix_ns = at_unix_ns
        self._last = self.total = raw
