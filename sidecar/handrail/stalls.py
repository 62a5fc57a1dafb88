"""Find the stalls of a stream: gaps far above the gaps around them.

See docs/stalls.md. A gap is a *stall* when it is ``FACTOR`` times the running median or more, and ``FLOOR_NS`` or more. The
running median is that of the gap's block of ``BLOCK`` gaps; a stream's last, shorter block is filled up with the gaps before it.
Chunks that came within ``APART_NS`` count as one arrival, so their gaps are left out of the median: a proxy that bundles chunks
on the way would otherwise make every bundle a stall. With fewer than ``LEAST_GAPS`` gaps there is no stall.
Per token only two numbers are kept; a block is examined when it is full (tests/bench/bench_stalls.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

FACTOR: Final = 3
FLOOR_NS: Final = 20_000_000
BLOCK: Final = 64
LEAST_GAPS: Final = 5
APART_NS: Final = 1_000_000
KEPT: Final = 16
"""Stalls of one stream that are reported one by one: the longest."""

TIMES_KEPT: Final = 512
"""Stalls of one stream whose times are reported: the first.

Stalls of other streams are compared with the time outside of these.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall:
    """One stall.

    ``end_ns``: when the chunk that ended it was read, from the request's arrival; ``index``: the gap's index in the stream.
    ``held_ns``: the part of it in which the observer did not read, since the client took nothing. ``turn``: the kind of content
    before and after it, where they differ (``reasoning>text``): a parser may have held text back there (case B24).
    """

    end_ns: int
    gap_ns: int
    median_ns: int
    index: int
    held_ns: int = 0
    turn: str = ""

    @property
    def begin_ns(self) -> int:
        """Time when the chunk before it was read."""
        return self.end_ns - self.gap_ns

    @property
    def excess_ns(self) -> int:
        """Length above the running median."""
        return self.gap_ns - self.median_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class Stalls:
    """Stalls of one stream: number, summed length, and the ``KEPT`` longest by time.

    ``times``: begin and end of each of the first ``TIMES_KEPT``, by ``pack_times``. ``held_ns``: the part of the whole stream in
    which the observer did not read, since the client took nothing.
    """

    count: int
    sum_ns: int
    longest: tuple[Stall, ...]
    times: bytes = b""
    held_ns: int = 0


class StallWatch:
    """Stall detector of one response. Its memory does not grow with the stream."""

    __slots__ = ("_before", "_count", "_ends", "_found", "_gaps", "_judged", "_sum_ns", "_times")

    def __init__(self) -> None:
        self._gaps: list[int] = []  # of the block that is not full yet
        self._ends: list[int] = []
        self._before: list[int] = []  # the block before it
        self._judged = 0
        self._found: list[Stall] = []
        self._times: list[tuple[int, int]] = []
        self._count = 0
        self._sum_ns = 0

    def extend(self, gaps_ns: Sequence[int], ends_ns: Sequence[int]) -> None:
        """Add gaps in the order of their ends, with those ends."""
        self._gaps.extend(gaps_ns)
        self._ends.extend(ends_ns)
        whole = len(self._gaps) - len(self._gaps) % BLOCK
        for first in range(0, whole, BLOCK):
            block, ends = self._gaps[first : first + BLOCK], self._ends[first : first + BLOCK]
            self._keep(judge(block, ends, block, self._judged))
            self._judged += BLOCK
            self._before = block
        if whole:
            del self._gaps[:whole], self._ends[:whole]

    def stalls(self) -> Stalls | None:
        """Stalls so far; None where there are none. More gaps may follow."""
        among = self._before[len(self._gaps) :] + self._gaps
        last = judge(self._gaps, self._ends, among, self._judged)
        count = self._count + len(last)
        if not count:
            return None
        longest = sorted(_longest([*self._found, *last]), key=lambda stall: (stall.end_ns, stall.index))
        times = [*self._times, *((stall.begin_ns, stall.end_ns) for stall in last)]
        return Stalls(
            count=count,
            sum_ns=self._sum_ns + sum(stall.gap_ns for stall in last),
            longest=tuple(longest),
            times=pack_times(times[:TIMES_KEPT]),
        )

    def _keep(self, found: list[Stall]) -> None:
        if not found:
            return
        self._count += len(found)
        self._sum_ns += sum(stall.gap_ns for stall in found)
        self._found = _longest([*self._found, *found])
        if len(self._times) < TIMES_KEPT:
            self._times += [(stall.begin_ns, stall.end_ns) for stall in found]


def judge(gaps_ns: Sequence[int], ends_ns: Sequence[int], among_ns: Sequence[int], first_index: int) -> list[Stall]:
    """Stalls among ``gaps_ns``, by the median of ``among_ns``."""
    if not gaps_ns or max(gaps_ns) < FLOOR_NS:
        return []
    arrivals = sorted(gap for gap in among_ns if gap >= APART_NS)
    if len(arrivals) < LEAST_GAPS:
        return []
    median = arrivals[(len(arrivals) - 1) // 2]
    least = max(FACTOR * median, FLOOR_NS)
    return [
        Stall(end_ns=end, gap_ns=gap, median_ns=median, index=first_index + place)
        for place, (gap, end) in enumerate(zip(gaps_ns, ends_ns, strict=True))
        if gap >= least
    ]


def marked(stalls: Stalls, held: Sequence[tuple[int, int]], turns: Sequence[tuple[int, str]]) -> Stalls:
    """Add further evidence to the stalls.

    ``held``: begin and end of each time in which the observer did not read, since the client took nothing. ``turns``: when
    content of another kind came, and which. Both count from the request's arrival.
    """
    if not held and not turns:
        return stalls
    turned = dict(turns)
    return replace(
        stalls,
        held_ns=sum(end - begin for begin, end in held),
        longest=tuple(
            replace(
                stall,
                held_ns=sum(max(0, min(end, stall.end_ns) - max(begin, stall.begin_ns)) for begin, end in held),
                turn=turned.get(stall.end_ns, ""),
            )
            for stall in stalls.longest
        ),
    )


def pack_times(times: Sequence[tuple[int, int]]) -> bytes:
    """Encode begins and ends, in order of their ends, as LEB128.

    Units are whole microseconds: the end since the end before, then the length.
    """
    out = bytearray()
    before = 0
    for begin, end in times:
        end_us, length_us = end // 1000, (end - begin) // 1000
        for value in (max(0, end_us - before), length_us):
            while value > 0x7F:
                out.append(value & 0x7F | 0x80)
                value >>= 7
            out.append(value)
        before = max(before, end_us)
    return bytes(out)


def unpack_times(data: bytes) -> list[tuple[int, int]]:
    """Decode the result of ``pack_times``, exact to a microsecond.

    Raises ``ValueError`` for anything else. At most ``TIMES_KEPT`` are read.
    """
    numbers: list[int] = []
    value = shift = 0
    for byte in data:
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            numbers.append(value)
            value = shift = 0
        elif shift > _MOST_BITS:
            raise ValueError("an overlong number")
    if shift or len(numbers) % 2:
        raise ValueError("cut off")
    found = []
    end = 0
    for since, length in zip(numbers[: 2 * TIMES_KEPT : 2], numbers[1 : 2 * TIMES_KEPT : 2], strict=True):
        end += since
        found.append(((end - length) * 1000, end * 1000))
    return found


_MOST_BITS: Final = 56


def _longest(stalls: list[Stall]) -> list[Stall]:
    return sorted(stalls, key=lambda stall: (-stall.gap_ns, stall.end_ns))[:KEPT] if len(stalls) > KEPT else stalls
