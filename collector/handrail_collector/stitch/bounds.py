"""Bound the offset of two clocks through time, from the messages between them.

Two clocks run at nearly constant rates, so their offset is nearly a line through time. A message in one direction shows that
the line passes below a point; a message in the other direction shows that it passes above one. The lines that remain form a
convex region of (rate, offset). The bounds at any time are those of the highest and the lowest line: the solution of the linear
programme. No narrower bounds hold for every line that the evidence allows.
The interval is as wide as the quickest message in each direction took together, however many other messages there are: no
evidence shows where between the two the truth lies.
Method: Moon, Skelly and Towsley, "Estimation and removal of clock skew from network delay measurements" (INFOCOM 1999), with
both sides and all feasible lines instead of the best one. The region moves through time as in a set-membership filter
(Schweppe, "Recursive state estimation: unknown but bounded errors and system inputs", IEEE TAC 1968).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from handrail.clock_offset import DRIFT_PPM, OffsetInterval

WANDER_PPM: Final = 2.0
"""How much the relative rate of two clocks may change within the memory, in ppm.

Causes: temperature, and NTP's corrections at rest.
"""

WINDOW_NS: Final = 600 * 10**9
"""How long a rate is remembered at least; twice this is the most.

After that a new memory begins from the bounds of the offset.
"""

MAX_CORNERS: Final = 32
MAX_LATE: Final = 256
"""Messages in a row from before the memory that mean: both clocks were set back."""

ROUNDING_NS: Final = 2
FINE: Final = 256
"""Smallest useful improvement, as a part of the width (1 / ``FINE``).

A message that narrows the bounds by less is dropped.
"""

_MOST_RATE: Final = DRIFT_PPM / 1e6
_WOBBLE: Final = WANDER_PPM / 2 / 1e6
_FAR_NS: Final = 1e14
"""Offset bound where no evidence bounds it: about a day from the first bound.

At this distance floats still resolve hundredths of a ns.
"""

Line = tuple[float, float]
"""One possible line of the offset: (rate, offset).

Rate in ns per ns; offset at the region's time, in ns from the region's origin.
"""


@dataclass(slots=True)
class Region:
    """The lines that the evidence still allows, as a convex polygon of (rate, offset).

    Corners are counter-clockwise, rate to the right and offset up.
    The true offset follows a line to within ``WANDER_PPM``: the region grows by that as time passes.
    """

    at_ns: int
    origin_ns: int
    since_ns: int  # oldest evidence that the rates come from
    lines: list[Line]

    @classmethod
    def between(cls, at_ns: int, origin_ns: int, low: float, high: float) -> Region:
        """Create a region of any rate, with the offset from ``low`` to ``high``.

        Both are in ns from ``origin_ns``.
        """
        corners = [(-_MOST_RATE, low), (_MOST_RATE, low), (_MOST_RATE, high), (-_MOST_RATE, high)]
        return cls(at_ns, origin_ns, at_ns, corners)

    @classmethod
    def unknown(cls, at_ns: int, origin_ns: int) -> Region:
        return cls.between(at_ns, origin_ns, -_FAR_NS, _FAR_NS)

    def bounds(self, at_ns: int) -> tuple[float, float]:
        """Return the least and the greatest possible offset then, in ns from the origin."""
        low, high, loose = self._reach(at_ns)
        return low - loose, high + loose

    def interval(self, at_ns: int) -> OffsetInterval:
        """Return ``bounds`` as an ``OffsetInterval``."""
        low, high = self.bounds(at_ns)
        return OffsetInterval(
            self.origin_ns + math.floor(low) if low > -_FAR_NS / 2 else None,
            self.origin_ns + math.ceil(high) if high < _FAR_NS / 2 else None,
            at_ns,
        )

    def forgetful(self, at_ns: int) -> Region:
        """Return a region that keeps the offset's bounds at that time and no rate."""
        return Region.between(at_ns, self.origin_ns, *self.bounds(at_ns))

    def take(self, sign: int, at_ns: int, bound_ns: int) -> bool:
        """Cut the region by one bound of the offset.

        ``sign`` 1: the offset was at most ``bound_ns`` at that time; -1: at least.
        Returns False when no line is left that allows it.
        """
        bound = float(bound_ns - self.origin_ns) + sign * ROUNDING_NS
        low, high, loose = self._reach(at_ns)
        nearest, farthest = (low, high) if sign > 0 else (high, low)
        if sign * (bound - nearest) < -loose:
            return False
        away = at_ns - self.at_ns
        cut = sign * (farthest - bound) + (loose if away > 0 else -loose)
        width = high - low
        if cut <= (width / FINE if width < _FAR_NS / 2 else 0) or away < -WINDOW_NS:
            return True  # adds nothing, or little, to what is known
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
        """Return the lines' least and greatest offset then, and the slack around a line.

        Beyond the window the slack grows by the full drift rate, because a line is no evidence there.
        """
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
    """The offset of one pair of clocks.

    Before the first bound it is unknown. Memory: ``MAX_CORNERS`` corners of each of two regions.
    """

    newest_ns: int = 0
    """Time of the newest bound."""

    _kept: Region | None = None
    _next: Region | None = None  # replaces ``_kept`` when that has remembered for too long
    _late: int = field(default=0)

    def at(self, at_ns: int) -> OffsetInterval:
        """Return the interval of the offset at this time."""
        return self._kept.interval(at_ns) if self._kept is not None else OffsetInterval(None, None, at_ns)

    def add(self, sign: int, at_ns: int, bound_ns: int) -> bool:
        """Learn one bound of the offset.

        ``sign`` 1: the offset was at most ``bound_ns``; -1: at least.
        Returns False where it contradicts what was known: a clock was stepped, and everything but this bound is forgotten.
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
        """Begin a second memory beside a full one; keep only the second once it is full."""
        now = self.newest_ns
        newest = self._next or kept
        if now - newest.since_ns > WINDOW_NS:
            self._kept, self._next = newest, newest.forgetful(now)


def _beyond(lines: list[Line], sign: int, away: int, bound: float) -> Iterator[Line]:
    """Yield the polygon without the lines on the wrong side of ``bound``.

    The wrong side, at ``away`` ns from the polygon's time: above the bound (``sign`` 1) or below it (-1).
    """
    over = [sign * (offset + rate * away - bound) for rate, offset in lines]
    for i, here in enumerate(lines):
        if over[i - 1] * over[i] < 0:
            (rate, offset), share = lines[i - 1], over[i - 1] / (over[i - 1] - over[i])
            yield rate + share * (here[0] - rate), offset + share * (here[1] - offset)
        if over[i] <= 0:
            yield here


def _let_out(lines: list[Line], by: float) -> list[Line]:
    """Return the polygon with its upper side raised and its lower side lowered.

    Both sides move by ``by``.
    """
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
