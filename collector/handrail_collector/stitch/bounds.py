"""The difference of two clocks as a line through time that evidence bounds from above and below.

Two clocks run at nearly constant rates, so their offset is a line of unknown slope. What bounds the line is the convex hull of
the bounds seen lately; the hulls of both sides bound the slope too, so that a bound seen a minute ago has loosened by far less
than the worst two crystals may part. Method: Moon, Skelly and Towsley, "Estimation and removal of clock skew from network delay
measurements" (INFOCOM 1999), with both sides and an interval in the place of an estimate.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from handrail.clocks import DRIFT_PPM, OffsetInterval

WANDER_PPM: Final = 2.0
"""How much the rate of a clock may wander while its bounds are remembered: temperature."""

WINDOW_NS: Final = 600 * 10**9
MAX_POINTS: Final = 32

Point = tuple[int, int]
"""At this time the offset was at most, or at least, so much; both ns."""


@dataclass(slots=True)
class OffsetLine:
    """``sign`` 1 in arguments means the side of upper bounds, -1 that of lower ones."""

    _sides: dict[int, list[Point]] = field(default_factory=lambda: {1: [], -1: []})
    _slopes: tuple[float, float] | None = None  # ns a ns, least and most; None: to be computed anew

    def at(self, at_ns: int) -> OffsetInterval:
        """What the offset may be at this time."""
        least, most = self._slope()
        return OffsetInterval(self._bound(-1, at_ns, least, most), self._bound(1, at_ns, least, most), at_ns)

    @property
    def newest_ns(self) -> int:
        """Time of the newest bound that says something."""
        return max((points[-1][0] for points in self._sides.values() if points), default=0)

    def add(self, sign: int, at_ns: int, bound_ns: int) -> bool:
        """Learn one bound; False where it contradicts the other side, which is then forgotten, as all before it."""
        now = self.at(at_ns)
        own, other = (now.high_ns, now.low_ns) if sign > 0 else (now.low_ns, now.high_ns)
        if other is not None and sign * (bound_ns - other) < 0:
            self._sides = {sign: [(at_ns, bound_ns)], -sign: []}
            self._slopes = None
            return False
        if own is not None and sign * (bound_ns - own) >= 0:
            return True  # says nothing that is not known
        points = sorted([*self._sides[sign], (at_ns, bound_ns)])
        points = [p for p in points if p[0] >= points[-1][0] - WINDOW_NS][-MAX_POINTS:]
        self._sides[sign] = _hull(points, sign)
        self._slopes = None
        return True

    def _bound(self, sign: int, at_ns: int, least: float, most: float) -> int | None:
        found = []
        for then, bound in self._sides[sign]:
            slope = (most if at_ns >= then else least) if sign > 0 else (least if at_ns >= then else most)
            found.append(bound + round(slope * (at_ns - then)))
        if not found:
            return None
        return min(found) if sign > 0 else max(found)

    def _slope(self) -> tuple[float, float]:
        if self._slopes is None:
            worst, wander = DRIFT_PPM / 1e6, WANDER_PPM / 1e6
            least, most = -worst, worst
            for t, high in self._sides[1]:
                for u, low in self._sides[-1]:
                    if t > u:
                        most = min(most, (high - low) / (t - u))
                    elif t < u:
                        least = max(least, (low - high) / (u - t))
            if least > most:  # by the wander; a step is found where a bound comes in
                least = most = (least + most) / 2
            self._slopes = max(-worst, least - wander), min(worst, most + wander)
        return self._slopes


def _hull(points: list[Point], sign: int) -> list[Point]:
    """Of upper bounds the lower convex hull, of lower ones the upper: the others bound no line."""
    kept: list[Point] = []
    for at, bound in points:
        while len(kept) >= 2 and sign * _turn(kept[-2], kept[-1], (at, bound)) <= 0:
            kept.pop()
        if kept and kept[-1][0] == at:
            if sign * (bound - kept[-1][1]) >= 0:
                continue
            kept.pop()
        kept.append((at, bound))
    return kept


def _turn(a: Point, b: Point, c: Point) -> int:
    return (b[0] - a[0]) * (c[1] - a[1]) - (b[1] - a[1]) * (c[0] - a[0])
