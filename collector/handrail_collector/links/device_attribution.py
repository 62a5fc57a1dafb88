"""Which devices carried the KV: those whose counters grew by about the bytes that were fetched, when they were fetched. Pure.

Windows of a second or more, from reading to reading: at 10 Hz a counter says nothing of a fetch of 66 ms, but over many windows
what grows with the fetches is told from what is always there. What a device moved in a window is taken apart by least squares:
a steady part, one in step with this link's fetches, one in step with those of the host's other links. Of what carries a link its
own part is about one byte for each byte fetched (headers make it a few per cent more), of what does not about none.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

import numpy as np

from handrail_collector.links.devices import SECOND, DeviceBytes, DeviceCounts, Medium
from handrail_collector.links.transfer_curve import Flow

LEAST_WINDOWS: Final = 8
LEAST_BYTES: Final = 16 * 2**20
"""Less is lost among everything else that a host sends."""

FIRST_WINDOW_NS: Final = SECOND
TIMES_LONGER: Final = 4
"""A window is so many times longer than most transfers, where there is time for it: at what pace one moved is not known."""

MOST_WINDOWS: Final = 20_000
MOST_SHIFTS: Final = 20
CARRIES: Final = (0.8, 1.3)
CARRIES_NOT: Final = 0.15
SIGMAS: Final = 2.0
MOST_DOUBT: Final = 0.4
"""So many bytes for one fetched a part may be off: beyond that, none and one are not told apart."""

OWN_SHARE: Final = 0.25
"""What is said of all links of a host together holds for one that has at least this share of their bytes."""


class MediumVerdict(str, Enum):
    """What the counters of one medium say."""

    CARRIED = "carried"
    PART = "part"  # it moved with the fetches, but not by as much
    NOT = "not"
    CANNOT_TELL = "cannot_tell"


@dataclass(frozen=True, slots=True, kw_only=True)
class Carried:
    """One medium of one host in one direction. ``share``: bytes that it moved for each byte fetched, None: cannot be told.

    ``devices``: those that did, with their shares, most first. ``others``: further devices of the medium that are up.
    """

    host: str
    direction: str
    medium: Medium
    verdict: MediumVerdict
    share: float | None
    devices: tuple[tuple[DeviceCounts, float], ...]
    others: tuple[DeviceCounts, ...]
    windows: int
    window_ns: int


@dataclass(frozen=True, slots=True)
class LinkFetches:
    """What was fetched over one link (``own``) and over the other links of the host, in the times of its clock.

    ``doubt_ns``: how far these may be off; within it the shift is taken by which they fit the counters best.
    """

    own: Flow
    others: Flow
    doubt_ns: int = 0


def carried(link_fetches: LinkFetches, devices: Iterable[DeviceCounts], host: str, direction: str) -> list[Carried]:
    """What each medium of ``host`` says of the fetches."""
    here = [each for each in devices if each.host == host and direction in each.curves]
    return [
        _medium(link_fetches, [each for each in here if each.medium is medium], (host, direction, medium))
        for medium in dict.fromkeys(each.medium for each in here)
    ]


def _medium(link_fetches: LinkFetches, devices: Sequence[DeviceCounts], which: tuple[str, str, Medium]) -> Carried:
    host, direction, medium = which
    window_ns = _window_ns(link_fetches)
    fits = [_DeviceFit(link_fetches, each.curves[direction], window_ns) for each in devices]
    usable = [(each, fit) for each, fit in zip(devices, fits, strict=True) if fit.windows >= LEAST_WINDOWS]
    verdict, share, shares = _together(link_fetches, [fit for _, fit in usable])
    order = sorted(zip((each for each, _ in usable), shares, strict=True), key=lambda each: -each[1])
    telling = [(each, part) for each, part in order if part >= 0.05 and verdict in (MediumVerdict.CARRIED, MediumVerdict.PART)]
    named = {id(each) for each, _ in telling}
    return Carried(
        host=host,
        direction=direction,
        medium=medium,
        verdict=verdict,
        share=share,
        devices=tuple(telling),
        others=tuple(each for each in devices if id(each) not in named and each.up),
        windows=max((fit.windows for fit in fits), default=0),
        window_ns=window_ns,
    )


def _window_ns(link_fetches: LinkFetches) -> int:
    """Longer than most transfers and their bounds, where enough windows are left."""
    every = link_fetches.own.and_also(link_fetches.others)
    if not len(every):
        return FIRST_WINDOW_NS
    lengths = np.maximum(every.end_ns - every.begin_ns, every.bound_ns)
    span = int(every.end_ns.max() - every.begin_ns.min())
    wanted = TIMES_LONGER * int(np.quantile(lengths, 0.9))
    return max(FIRST_WINDOW_NS, min(wanted, span // (3 * LEAST_WINDOWS)), span // MOST_WINDOWS)


class _DeviceFit:
    """One device's bytes by window, and how they go with the fetches."""

    def __init__(self, link_fetches: LinkFetches, curve: DeviceBytes, window_ns: int) -> None:
        edges, moved = curve.windows(window_ns, *_time(link_fetches, window_ns))
        self.windows = len(moved)
        self.moved = float(moved.sum())
        self.fetched = 0.0
        self.apart: tuple[float, float] | None = None  # its own part and the error of that
        self.all: tuple[float, float] | None = None  # the part of all links, likewise
        if self.windows < LEAST_WINDOWS:
            return
        steady, best = np.diff(edges).astype(np.float64), np.inf
        for shift_ns in _shifts(link_fetches.doubt_ns, window_ns):
            own, others = link_fetches.own.between(edges - shift_ns), link_fetches.others.between(edges - shift_ns)
            apart, rest = _least_squares([own, others, steady], moved)
            if rest < best or shift_ns == 0:
                best, self.apart = rest, apart
                self.all = _least_squares([own + others, steady], moved)[0]
                self.fetched = float((own + others).sum())


def _time(link_fetches: LinkFetches, window_ns: int) -> tuple[int, int]:
    """From a little before the first fetch to a little after the last."""
    every = link_fetches.own.and_also(link_fetches.others)
    around = 2 * window_ns + link_fetches.doubt_ns
    return int(every.begin_ns.min()) - around, int(every.end_ns.max()) + around


def _shifts(doubt_ns: int, window_ns: int) -> list[int]:
    """Shifts within the doubt, a quarter of a window apart, that of nothing first."""
    steps = min(MOST_SHIFTS, 4 * doubt_ns // window_ns)
    return [0, *(sign * doubt_ns * step // steps for step in range(1, steps + 1) for sign in (1, -1))]


def _least_squares(parts: Sequence[Any], moved: Any) -> tuple[tuple[float, float] | None, float]:
    """The first part's factor with its standard error, None where it cannot be told from the others; and what is left over."""
    used = [part for part in parts if part.any()]
    if not parts[0].any() or len(moved) <= len(used) + 2:
        return None, float("inf")
    scale = np.array([np.linalg.norm(part) for part in used])
    table = np.column_stack(used) / scale
    factors, _, rank, _ = np.linalg.lstsq(table, moved, rcond=1e-6)
    rest = float(((moved - table @ factors) ** 2).sum())
    if rank < len(used):
        return None, rest
    spread = np.linalg.inv(table.T @ table)[0, 0] * rest / (len(moved) - len(used))
    return (float(factors[0] / scale[0]), float(np.sqrt(spread) / scale[0])), rest


def _together(link_fetches: LinkFetches, fits: Sequence[_DeviceFit]) -> tuple[MediumVerdict, float | None, list[float]]:
    """Verdict, share and the share of each device: of this link alone, else of all links of the host, else by the sums."""
    cannot = MediumVerdict.CANNOT_TELL, None, [0.0] * len(fits)
    own, others = link_fetches.own.bytes, link_fetches.others.bytes
    if not fits or own < LEAST_BYTES:
        return cannot
    for parts, telling in (([fit.apart for fit in fits], True), ([fit.all for fit in fits], own >= OWN_SHARE * (own + others))):
        known = [part for part in parts if part is not None]
        if telling and len(known) == len(parts) and SIGMAS * float(np.hypot.reduce([error for _, error in known])) <= MOST_DOUBT:
            shares = [share for share, _ in known]
            return _verdict(sum(shares)), sum(shares), shares
    if own < OWN_SHARE * (own + others):
        return cannot
    shares = [fit.moved / fit.fetched if fit.fetched else 0.0 for fit in fits]
    verdict = _verdict(sum(shares))
    if verdict is MediumVerdict.PART:  # it is busy with other things too, or did a part of it
        return cannot
    return verdict, sum(shares), shares


def _verdict(share: float) -> MediumVerdict:
    if share < CARRIES_NOT:
        return MediumVerdict.NOT
    low, high = CARRIES
    return MediumVerdict.CARRIED if low <= share <= high else MediumVerdict.PART
