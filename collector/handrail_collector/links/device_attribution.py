"""Attribute the fetched KV to the devices whose counters grew with it. Pure.

A device carried the KV when its counters grew by about the fetched bytes, at the time of the fetches.

Windows are a second or longer, from reading to reading. At 10 Hz, a counter cannot show one fetch of 66 ms.
Over many windows the growth with the fetches separates from the constant traffic.
Least squares splits the bytes of a device in a window into three parts:
a steady part, a part in step with this link's fetches, and a part in step with those of the host's other links.
For a device that carries the link, its own part is about one byte for each byte fetched (headers add a few per cent).
For any other device, it is about zero.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

import numpy as np

from handrail_collector.links.devices import SECOND, DeviceBytes, DeviceCounts, Medium
from handrail_collector.links.handoffs import Flow

LEAST_WINDOWS: Final = 8
LEAST_BYTES: Final = 16 * 2**20
"""Smallest number of bytes that can be attributed.

Less is lost in the other traffic of a host.
"""

FIRST_WINDOW_NS: Final = SECOND
TIMES_LONGER: Final = 4
"""How many times longer than most transfers a window is, where time allows.

The pace within one transfer is not known.
"""

MOST_WINDOWS: Final = 20_000
MOST_SHIFTS: Final = 20
CARRIES: Final = (0.8, 1.3)
CARRIES_NOT: Final = 0.15
SIGMAS: Final = 2.0
MOST_DOUBT: Final = 0.4
"""Largest error of a part, in bytes for each byte fetched.

Beyond it, zero and one cannot be distinguished.
"""

OWN_SHARE: Final = 0.25
"""Least share of a host's link bytes for a joint verdict to hold for one link.

A joint verdict is about all links of a host together.
"""


class MediumVerdict(str, Enum):
    """What the counters of one medium show."""

    CARRIED = "carried"
    PART = "part"  # it moved with the fetches, but by fewer bytes
    NOT = "not"
    CANNOT_TELL = "cannot_tell"


@dataclass(frozen=True, slots=True, kw_only=True)
class Carried:
    """One medium of one host in one direction.

    ``share``: bytes that it moved for each byte fetched; None: not known.
    ``devices``: those that carried the KV, with their shares, largest first.
    ``others``: further devices of the medium that are up.
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
    """Fetches over one link (``own``) and over the host's other links.

    Times are by the host's clock.
    ``doubt_ns``: bound of these times; within it, the shift with the best fit to the counters is used.
    """

    own: Flow
    others: Flow
    doubt_ns: int = 0


def carried(link_fetches: LinkFetches, devices: Iterable[DeviceCounts], host: str, direction: str) -> list[Carried]:
    """Return what each medium of ``host`` shows for the fetches."""
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
    """Choose the window length.

    It is longer than most transfers and their bounds, where that leaves enough windows.
    """
    every = link_fetches.own.and_also(link_fetches.others)
    if not len(every):
        return FIRST_WINDOW_NS
    lengths = np.maximum(every.end_ns - every.begin_ns, every.bound_ns)
    span = int(every.end_ns.max() - every.begin_ns.min())
    wanted = TIMES_LONGER * int(np.quantile(lengths, 0.9))
    return max(FIRST_WINDOW_NS, min(wanted, span // (3 * LEAST_WINDOWS)), span // MOST_WINDOWS)


class _DeviceFit:
    """Fit of one device's bytes by window to the fetches."""

    def __init__(self, link_fetches: LinkFetches, curve: DeviceBytes, window_ns: int) -> None:
        edges, moved = curve.windows(window_ns, *_time(link_fetches, window_ns))
        self.windows = len(moved)
        self.moved = float(moved.sum())
        self.fetched = 0.0
        self.apart: tuple[float, float] | None = None  # the link's own part and its error
        self.all: tuple[float, float] | None = None  # the part of all links of the host, and its error
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
    """Return the time from just before the first fetch to just after the last."""
    every = link_fetches.own.and_also(link_fetches.others)
    around = 2 * window_ns + link_fetches.doubt_ns
    return int(every.begin_ns.min()) - around, int(every.end_ns.max()) + around


def _shifts(doubt_ns: int, window_ns: int) -> list[int]:
    """Return the shifts within the doubt, a quarter of a window apart, zero first."""
    steps = min(MOST_SHIFTS, 4 * doubt_ns // window_ns)
    return [0, *(sign * doubt_ns * step // steps for step in range(1, steps + 1) for sign in (1, -1))]


def _least_squares(parts: Sequence[Any], moved: Any) -> tuple[tuple[float, float] | None, float]:
    """Fit ``moved`` to ``parts``; return the first part's factor and the residual.

    The factor comes with its standard error. It is None where the other parts hide it.
    """
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
    """Return the verdict, the share, and the share of each device.

    They come from this link alone, else from all links of the host, else from the sums.
    """
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
    if verdict is MediumVerdict.PART:  # the medium is busy with other traffic too, or carried only a part
        return cannot
    return verdict, sum(shares), shares


def _verdict(share: float) -> MediumVerdict:
    if share < CARRIES_NOT:
        return MediumVerdict.NOT
    low, high = CARRIES
    return MediumVerdict.CARRIED if low <= share <= high else MediumVerdict.PART
