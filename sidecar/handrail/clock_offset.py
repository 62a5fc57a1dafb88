"""Bound the offset between two hosts' wall clocks by causality.

The offset is an interval that only evidence narrows. Every hand-off gives two constraints: a call is received after it was sent,
and it is answered before its answer arrives. Handrail reports the interval and never moves spans.
Related: Cristian's algorithm. Unlike NTP's filter, this assumes nothing about symmetric delays.
Drift widens an old interval (as in RFC 5905 section 10, by more).
"""

from __future__ import annotations

from dataclasses import dataclass

DRIFT_PPM = 100
"""Largest drift between two free-running clocks, in parts per million.

Each clock may be off by 50 ppm either way, the figure that cheap crystals are sold with (RFC 5905: 15).
"""


@dataclass(frozen=True, slots=True)
class OffsetInterval:
    """Interval [low_ns, high_ns] of the peer's clock minus ours at ``at_unix_ns``.

    None means that there is no bound on that side.
    """

    low_ns: int | None
    high_ns: int | None
    at_unix_ns: int

    @property
    def width_ns(self) -> int | None:
        """Width of the interval; None while one side is open."""
        if self.low_ns is None or self.high_ns is None:
            return None
        return self.high_ns - self.low_ns

    @property
    def contradictory(self) -> bool:
        """Whether no offset satisfies all evidence.

        The cause is a clock that stepped, or evidence that was joined wrongly.
        """
        return self.low_ns is not None and self.high_ns is not None and self.low_ns > self.high_ns

    def aged(self, at_unix_ns: int) -> OffsetInterval:
        """Interval at a later time, each side widened by the possible drift since."""
        slack = abs(at_unix_ns - self.at_unix_ns) * DRIFT_PPM // 1_000_000
        return OffsetInterval(
            None if self.low_ns is None else self.low_ns - slack,
            None if self.high_ns is None else self.high_ns + slack,
            at_unix_ns,
        )

    def narrowed(self, other: OffsetInterval) -> OffsetInterval:
        """Intersection of both intervals, at the later of their times.

        The result may be contradictory.
        """
        at = max(self.at_unix_ns, other.at_unix_ns)
        a, b = self.aged(at), other.aged(at)
        lows = [x for x in (a.low_ns, b.low_ns) if x is not None]
        highs = [x for x in (a.high_ns, b.high_ns) if x is not None]
        return OffsetInterval(max(lows, default=None), min(highs, default=None), at)


def contains(outer: tuple[int, int], inner: tuple[int, int], offset: OffsetInterval | None) -> bool:
    """Whether ``inner`` (start, end; peer's clock) can lie within ``outer`` (ours).

    Without an offset the two share a clock. True when one offset within the interval puts both ends inside.
    An open side of the interval excludes nothing: without any bound, only an ``inner`` longer than ``outer`` is impossible.
    """
    if offset is None:
        return outer[0] <= inner[0] and inner[1] <= outer[1]
    low, high = inner[1] - outer[1], inner[0] - outer[0]
    if offset.low_ns is not None:
        low = max(low, offset.low_ns)
    if offset.high_ns is not None:
        high = min(high, offset.high_ns)
    return low <= high
