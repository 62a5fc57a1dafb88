"""The offset of two clocks through time: every course of it that the evidence leaves, and between which bounds they run.

Two clocks run at nearly constant rates, so their offset is nearly a line through time. A message from one to the other says that
the line passes below a point, one the other way that it passes above one. What is left is a convex region of (rate, offset), and
the bounds at any time are those of its highest and its lowest line: the solution of the linear programme, so nothing that holds
for every course that the evidence allows is narrower. With the quickest message there and the quickest back in it, it is as wide
as the two took together, however often others were asked for: no evidence tells where between the two the truth lies.

Method: Moon, Skelly and Towsley, "Estimation and removal of clock skew from network delay measurements" (INFOCOM 1999), with
both sides and all feasible lines in the place of the best; the region is carried through time as a set-membership filter's
(Schweppe, "Recursive state estimation: unknown but bounded errors and system inputs", IEEE TAC 1968).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from handrail.clock_offset import DRIFT_PPM, OffsetInterval

WANDER_PPM: Final = 2.0
"""How far apart the rates of two clocks may be at two times of the memory: temperature, and the discipline of NTP at rest."""

WINDOW_NS: Final = 600 * 10**9
"""A rate is remembered for at least so long, and for at most twice that; what is known of the offset then begins a new memory."""

MAX_CORNERS: Final = 32
MAX_LATE: Final = 256
"""So many messages in a row from before the memory mean that both clocks were set back together."""

ROUNDING_NS: Final = 2
FINE: Final = 256
"""What would narrow the bounds by less than this part of their width is not worth keeping."""

_MOST_RATE: Final = DRIFT_PPM / 1e6
_WOBBLE: Final = WANDER_PPM / 2 / 1e6
_FAR_NS: Final = 1e14
"""Where no evidence bounds the offset: a day from the first bound; floats keep hundredths of a ns there."""

Line = tuple[float, float]
"""A course of the offset: its rate in ns a ns, and where it is at the region's time, in ns from the region's origin."""


@dataclass(slots=True)
class Region:
    """The lines that are left: the corners of a convex polygon, counter-clockwise, rate to the right and offset up.

    A line is what the offset keeps to within ``WANDER_PPM``: the region is let out by that as time goes on.
    """

    at_ns: int
    origin_ns: int
    since_ns: int  # what the rates were learned from is not older
    lines: list[Line]

    @classmethod
    def between(cls, at_ns: int, origin_ns: int, low: float, high: float) -> Region:
        """Any rate; an offset within ``low`` and ``high``, in ns from ``origin_ns``."""
        corners = [(-_MOST_RATE, low), (_MOST_RATE, low), (_MOST_RATE, high), (-_MOST_RATE, high)]
        return cls(at_ns, origin_ns, at_ns, corners)

    @classmethod
    def unknown(cls, at_ns: int, origin_ns: int) -> Region:
        return cls.between(at_ns, origin_ns, -_FAR_NS, _FAR_NS)

    def bounds(self, at_ns: int) -> tuple[float, float]:
        """Least and most that the offset may be then, in ns from the origin."""
        low, high, loose = self._reach(at_ns)
        return low - loose, high + loose

    def interval(self, at_ns: int) -> OffsetInterval:
        """As ``bounds``, as others know it."""
        low, high = self.bounds(at_ns)
        return OffsetInterval(
            self.origin_ns + math.floor(low) if low > -_FAR_NS / 2 else None,
            self.origin_ns + math.ceil(high) if high < _FAR_NS / 2 else None,
            at_ns,
        )

    def forgetful(self, at_ns: int) -> Region:
        """What is known of the offset then, and nothing of its rate."""
        return Region.between(at_ns, self.origin_ns, *self.bounds(at_ns))

    def take(self, sign: int, at_ns: int, bound_ns: int) -> bool:
        """The offset was at most (``sign`` 1), or at least (-1), ``bound_ns`` then. False: no line is left that allows it."""
        bound = float(bound_ns - self.origin_ns) + sign * ROUNDING_NS
        low, high, loose = self._reach(at_ns)
        nearest, farthest = (low, high) if sign > 0 else (high, low)
        if sign * (bound - nearest) < -loose:
            return False
        away = at_ns - self.at_ns
        cut = sign * (farthest - bound) + (loose if away > 0 else -loose)
        width = high - low
        if cut <= (width / FINE if width < _FAR_NS / 2 else 0) or away < -WINDOW_NS:
            return True  # says nothing, or little, that is not known
        if away > 0:
            self._advance(at_ns)
            away = 0
        else:
            bound += sign * loose
        lines = list(_beyond(self.lines, sign, away, bound))
        if len(lines) <= MAX_CORNERS:
            self.lines = lines
        return bool(lines)

    def _reach(self, at_ns: int) -> tuple[float, float, float]:
        """Least and most of the lines then, and how far the offset may be from its line; out of the window that is no line."""
        away = at_ns - self.at_ns
        near = max(-WINDOW_NS, min(WINDOW_NS, away))
        offsets = [offset + rate * near for rate, offset in self.lines]
        return min(offsets), max(offsets), _WOBBLE * abs(near) + _MOST_RATE * abs(away - near)

    def _advance(self, at_ns: int) -> None:
        away = at_ns - self.at_ns
        if away > WINDOW_NS:
            later = self.forgetful(at_ns)
            self.since_ns, self.lines = later.since_ns, later.lines
        else:
            self.lines = _let_out([(rate, offset + rate * away) for rate, offset in self.lines], _WOBBLE * away)
        self.at_ns = at_ns


@dataclass(slots=True)
class OffsetLine:
    """One pair of clocks. Until the first bound there is nothing; memory is bounded by ``MAX_CORNERS`` of two regions."""

    newest_ns: int = 0
    """Time of the newest bound."""

    _kept: Region | None = None
    _next: Region | None = None  # takes the place of ``_kept`` when that remembers too much
    _late: int = field(default=0)

    def at(self, at_ns: int) -> OffsetInterval:
        """What the offset may be at this time."""
        return self._kept.interval(at_ns) if self._kept is not None else OffsetInterval(None, None, at_ns)

    def add(self, sign: int, at_ns: int, bound_ns: int) -> bool:
        """Learn one bound; ``sign`` 1: the offset was at most that, -1: at least.

        False where it contradicts what was known: a clock was stepped, and all is forgotten but this bound.
        """
        kept = self._kept
        if kept is None:
            return self._begin(sign, at_ns, bound_ns)
        self._late = self._late + 1 if at_ns < kept.at_ns - WINDOW_NS else 0
        if self._late > MAX_LATE:
            return self._begin(sign, at_ns, bound_ns)
        if not all(region.take(sign, at_ns, bound_ns) for region in (kept, self._next) if region is not None):
            self._begin(sign, at_ns, bound_ns)
            return False
        self.newest_ns = max(self.newest_ns, at_ns)
        self._forget(kept)
        return True

    def _begin(self, sign: int, at_ns: int, bound_ns: int) -> bool:
        self._kept, self._next, self._late, self.newest_ns = Region.unknown(at_ns, bound_ns), None, 0, at_ns
        return self._kept.take(sign, at_ns, bound_ns)

    def _forget(self, kept: Region) -> None:
        """Begin a second memory beside one that is full, and go on with that alone once it is full too."""
        now = self.newest_ns
        newest = self._next or kept
        if now - newest.since_ns > WINDOW_NS:
            self._kept, self._next = newest, newest.forgetful(now)


def _beyond(lines: list[Line], sign: int, away: int, bound: float) -> Iterator[Line]:
    """The polygon without the lines that at ``away`` ns from its time are above (``sign`` 1) or below (-1) ``bound``."""
    over = [sign * (offset + rate * away - bound) for rate, offset in lines]
    for i, here in enumerate(lines):
        if over[i - 1] * over[i] < 0:
            (rate, offset), share = lines[i - 1], over[i - 1] / (over[i - 1] - over[i])
            yield rate + share * (here[0] - rate), offset + share * (here[1] - offset)
        if over[i] <= 0:
            yield here


def _let_out(lines: list[Line], by: float) -> list[Line]:
    """The polygon with its upper side ``by`` higher and its lower side as much lower."""
    rates, offsets = [rate for rate, _ in lines], [offset for _, offset in lines]
    if min(rates) == max(rates):
        return [(rates[0], min(offsets) - by), (rates[0], max(offsets) + by)]
    found: list[Line] = []
    for i, (rate, offset) in enumerate(lines):
        came, goes = rate - rates[i - 1], rates[(i + 1) % len(rates)] - rate
        lower, upper = (rate, offset - by), (rate, offset + by)
        if came < 0 < goes:  # farthest left: from the upper side to the lower
            found += [upper, lower]
        elif came > 0 > goes:
            found += [lower, upper]
        elif came > 0 or goes > 0:
            found.append(lower)
        elif came < 0 or goes < 0:
            found.append(upper)
    return found
