"""Counters as they must be told: whole, growing, wraps undone; and where they cannot be known, begun anew instead of guessed.

A hardware counter of 32 bits at PCIe 5 x16 (63 GB/s) wraps every 68 ms, so two readings tell how much it grew only when the link
cannot have carried a whole turn between them. The line rate is the bound: it decides how often to read (``due_within_ns``),
whether a smaller reading is a wrap or a restart of the driver, and when growth is unknown.
"""

from __future__ import annotations

from typing import Final

_NS: Final = 1_000_000_000
_NARROW: Final = 1 << 32
_WIDE: Final = 1 << 64
_MARGIN: Final = 0.75  # of the time of one turn: the rest is for readings that come late
_ABSURD: Final = 8  # times the line rate: growth that no link of ours could have had


class Growth:
    """One counter of bytes that wraps. ``total`` counts from ``since_unix_ns``.

    ``unit_bytes``: of one count. ``bits`` 32: known to be that wide, 0: not known, taken for 32 until it has shown more.
    """

    __slots__ = ("_began_ns", "_last", "bits", "lost", "since_unix_ns", "total", "unit_bytes")

    def __init__(self, unit_bytes: int = 1, bits: int = 0) -> None:
        self.unit_bytes = unit_bytes
        self.bits = bits
        self.total = 0
        self.since_unix_ns = 0
        self.lost = 0  # times it had to begin anew
        self._last: int | None = None
        self._began_ns = 0

    def follow(self, raw: int, began_ns: int, ended_ns: int, at_unix_ns: int, line_bytes: float) -> None:
        """Take one reading, made at some moment of a call that lasted from ``began_ns`` to ``ended_ns`` (monotonic).

        ``line_bytes``: what the link can carry a second and direction.
        """
        if began_ns < self._began_ns:
            return  # an answer that is told after a later one
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
        """How soon it must be read again so that it cannot have turned unseen; None where it never will."""
        if self.bits == 64 or not line_bytes:
            return None
        return int(_NARROW * self.unit_bytes / line_bytes * _NS * _MARGIN)


class Standing:
    """One counter that does not wrap (errors, energy): as the device has it; a smaller reading began anew."""

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
