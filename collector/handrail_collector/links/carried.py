"""Which devices carried the KV: those whose counters grew by about the bytes that were fetched, when they were fetched. Pure.

Windows of a second or more: at 10 Hz a counter says nothing of a fetch of 66 ms, but over many windows what grows with the
fetches is told from what is always there. The slope of bytes counted over bytes fetched is about 1 for what carries them (headers
make it a few per cent more), about 0 for what does not.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

import numpy as np

from handrail_collector.links.devices import SECOND, Counted, Medium
from handrail_collector.links.handoffs import Piece

LEAST_WINDOWS: Final = 6
LEAST_BYTES: Final = 16 * 2**20
"""Less is lost among everything else that a host sends."""

FIRST_WINDOW_NS: Final = SECOND
MOST_WINDOWS: Final = 20_000
MOST_SHIFTS: Final = 20
CARRIES: Final = (0.8, 1.3)
"""Slopes of what carries all of it: headers of small packets make up to 1.2 of 1, a fetch that is not told of more."""

CARRIES_NOT: Final = 0.15
SIGMAS: Final = 2.0
MOST_DOUBT: Final = 0.4  # so many bytes for one fetched a slope may be off: more than that, and 0 and 1 are not told apart
LEAST_VARIED: Final = 0.1
"""Where fetched bytes vary less from window to window, relative to their mean, a slope says nothing: then only the sums do."""


class Verdict(str, Enum):
    """What the counters of one medium say."""

    CARRIED = "carried"
    PART = "part"  # it moved with the fetches, but not by as much
    NOT = "not"
    CANNOT_TELL = "cannot_tell"


@dataclass(frozen=True, slots=True, kw_only=True)
class Carried:
    """One medium of one host in one direction. ``share``: of the fetched bytes, what it moved because of them.

    ``devices``: those that did, with their shares, most first. ``others``: further devices of the medium that are up.
    ``fetched_bytes`` in ``windows`` of ``window_ns``.
    """

    host: str
    direction: str
    medium: Medium
    verdict: Verdict
    share: float | None
    error: float | None
    devices: tuple[tuple[Counted, float], ...]
    others: tuple[Counted, ...]
    fetched_bytes: int
    windows: int
    window_ns: int


def carried(
    pieces: Sequence[Piece], devices: Iterable[Counted], host: str, direction: str, *, doubt_ns: int = 0
) -> list[Carried]:
    """What each medium of ``host`` says of ``pieces``, all that was fetched to (or from) it and may have gone this way.

    Their times are the host's own, right within ``doubt_ns``; within it the shift is taken by which they fit the counters best.
    """
    here = [each for each in devices if each.host == host and direction in each.curves]
    found = []
    for medium in dict.fromkeys(each.medium for each in here):
        of_medium = [each for each in here if each.medium is medium]
        found.append(_medium(pieces, of_medium, (host, direction, medium), doubt_ns))
    return found


def _medium(pieces: Sequence[Piece], devices: Sequence[Counted], which: tuple[str, str, Medium], doubt_ns: int) -> Carried:
    host, direction, medium = which
    edges, window_ns = _edges(pieces)
    known, devices, moved = _seen(devices, direction, edges)
    fits = []
    for shift_ns in _shifts(doubt_ns, window_ns) if len(moved) else ():
        fetched = fetched_between(pieces, edges - shift_ns)[known]
        fits.append((*_slopes(fetched, moved), int(fetched.sum())))
    slopes, error, total = min(fits, key=lambda fit: np.inf if fit[1] is None else fit[1], default=(None, None, 0))
    share = float(sum(slopes)) if slopes is not None else None
    verdict = _verdict(share, error, total)
    order = sorted(zip(devices, slopes or (), strict=False), key=lambda each: -each[1])
    telling = [(each, slope) for each, slope in order if slope >= 0.05 and verdict in (Verdict.CARRIED, Verdict.PART)]
    named = {id(each) for each, _ in telling}
    return Carried(
        host=host,
        direction=direction,
        medium=medium,
        verdict=verdict,
        share=share,
        error=error,
        devices=tuple(telling),
        others=tuple(each for each in devices if id(each) not in named and each.up),
        fetched_bytes=total,
        windows=int(known.sum()),
        window_ns=window_ns,
    )


def fetched_between(pieces: Sequence[Piece], edges_ns: Any) -> Any:
    """Bytes fetched from each edge to the next, each piece at an even rate over its time."""
    begin = np.array([piece.begin_ns for piece in pieces], np.int64)
    length = np.array([max(1_000_000, piece.end_ns - piece.begin_ns) for piece in pieces], np.int64)
    rate = np.array([piece.bytes for piece in pieces], np.float64) / length
    return np.diff(_moved_by(begin, rate, edges_ns) - _moved_by(begin + length, rate, edges_ns))


def _moved_by(begin_ns: Any, rate: Any, edges_ns: Any) -> Any:
    """At each edge: what ramps of ``rate`` that begin at ``begin_ns`` have come to."""
    order = np.argsort(begin_ns, kind="stable")
    base = edges_ns[0]
    began, rates = (begin_ns[order] - base).astype(np.float64), rate[order]
    slope, lead = np.concatenate([[0.0], np.cumsum(rates)]), np.concatenate([[0.0], np.cumsum(rates * began)])
    running = np.searchsorted(began, (edges_ns - base).astype(np.float64), side="right")
    return slope[running] * (edges_ns - base) - lead[running]


def _edges(pieces: Sequence[Piece]) -> tuple[Any, int]:
    """Whole windows of the time in which there were fetches, with a little before and after it; and the windows' length."""
    if not pieces:
        return np.zeros(0, np.int64), FIRST_WINDOW_NS
    window_ns = max(FIRST_WINDOW_NS, *(4 * piece.bound_ns for piece in pieces))
    first = min(piece.begin_ns for piece in pieces) - 2 * window_ns
    last = max(piece.end_ns for piece in pieces) + 2 * window_ns
    window_ns = max(window_ns, (last - first) // MOST_WINDOWS)
    return np.arange(first, last + 1, window_ns, dtype=np.int64), window_ns


def _shifts(doubt_ns: int, window_ns: int) -> list[int]:
    """Shifts within the doubt, a quarter of a window apart, the one of nothing first."""
    steps = min(MOST_SHIFTS, 4 * doubt_ns // window_ns)
    return [0, *(sign * doubt_ns * step // steps for step in range(1, steps + 1) for sign in (1, -1))]


def _seen(devices: Sequence[Counted], direction: str, edges: Any) -> tuple[Any, list[Counted], Any]:
    """Which windows every device was looked at in, those devices, and what each of them moved in these windows.

    One that was looked at for less than half as long as others (it hung, it came late) is left out: with it little would be left.
    """
    if len(edges) < 2:
        return np.zeros(0, bool), [], np.zeros((0, 0))
    moved = [each.curves[direction].between(edges) for each in devices]
    seen = [int((~np.isnan(each)).sum()) for each in moved]
    kept = [place for place, count in enumerate(seen) if count and 2 * count >= max(seen)]
    if not kept:
        return np.zeros(len(edges) - 1, bool), [], np.zeros((0, 0))
    table = np.array([moved[place] for place in kept])
    known = ~np.isnan(table).any(axis=0)
    return known, [devices[place] for place in kept], table[:, known]


def _slopes(fetched: Any, moved: Any) -> tuple[list[float] | None, float | None]:
    """Of each device, how many bytes it counts for one that is fetched; and the error of their sum."""
    if len(fetched) < LEAST_WINDOWS or not fetched.any():
        return None, None
    spread = float(fetched.std())
    if spread < LEAST_VARIED * float(fetched.mean()):
        shares = [float(each.sum() / fetched.sum()) for each in moved]
        return shares, None
    off = fetched - fetched.mean()
    slopes = [float((off * each).sum() / (off**2).sum()) for each in moved]
    rest = moved.sum(axis=0) - moved.sum() / len(fetched) - sum(slopes) * off
    return slopes, float(np.sqrt((rest**2).sum() / (len(fetched) - 2) / (off**2).sum()))


def _verdict(share: float | None, error: float | None, total: int) -> Verdict:
    """Without an error (fetches at an even pace all the time) what moved less is not it, and what moved as much may be."""
    if share is None or total < LEAST_BYTES:
        return Verdict.CANNOT_TELL
    doubt = SIGMAS * (error or 0.0)
    low, high = CARRIES
    if doubt > MOST_DOUBT:
        return Verdict.CANNOT_TELL
    if share < CARRIES_NOT:
        return Verdict.NOT
    if low <= share <= high:
        return Verdict.CARRIED
    if share > high and error is None:
        return Verdict.CANNOT_TELL  # busy with other things too
    return Verdict.PART
