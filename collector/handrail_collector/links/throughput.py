"""Compute how fast a link moved KV. Pure.

A rate is bytes over the *union* of overlapping transfers.
The sum of the transfers' times would count one second several times.
The time to the request's end would count the decode (cases B19, D22).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Final

from handrail_collector.links.handoffs import EngineLink, HandOff, Piece

SECOND: Final = 10**9
COLD_TIMES: Final = 10.0
COLD_MORE_NS: Final = SECOND
"""Least excess of a cold start over the median handshake.

A first contact is a cold start when it takes a multiple of the others' median and also this much more.
UCX's cold start takes tens of seconds.
"""

CLUSTER: Final = 5
CLUSTER_WITHIN_NS: Final = SECOND // 2
CLUSTER_SHARE: Final = 0.8
CLUSTER_LEAST_NS: Final = SECOND


@dataclass(frozen=True, slots=True, kw_only=True)
class DurationPercentiles:
    """Percentiles of durations by nearest rank, in ns.

    With fewer than ten durations beyond it, ``p99`` is in doubt.
    """

    count: int
    p50_ns: int
    p99_ns: int
    max_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkThroughput:
    """Figures of one link; rates in bytes a second, None without timed transfers.

    The true rate while transferring lies between ``rate_low`` and ``rate_high``: a poll sees the end of a transfer late.
    ``effective_rate``: over the time from each hand-off's first byte to its last, pauses between pieces included.
    ``cold_ns``: first contacts, which no rate and no percentile includes.
    ``stuck_at_ns``: time after which hand-offs ended without their KV, where it was the same for all: a time limit, not a
    link fault.
    """

    link: EngineLink
    hand_offs: int
    failed: int
    open: int
    moved_bytes: int
    counted: bool  # by the transport; else at least a part comes from the size of the blocks
    timed: int  # hand-offs whose bytes and times are known
    busy_ns: int  # at most
    rate_low: float | None
    rate_high: float | None
    effective_rate: float | None
    transfer: DurationPercentiles | None
    whole: DurationPercentiles | None  # from known to the consumer until seen by its scheduler
    cold_ns: tuple[int, ...]
    stuck: int
    stuck_at_ns: int | None
    connectors: tuple[str, ...]
    modes: tuple[str, ...]
    backwards: bool
    descriptors: int | None  # of one hand-off, median
    first_unix_ns: int
    last_unix_ns: int

    @property
    def rate(self) -> float | None:
        """Middle of the rate's bounds; None where there is no upper bound."""
        if self.rate_low is None or self.rate_high is None:
            return None
        return 2 / (1 / self.rate_low + 1 / self.rate_high)


def by_link(hand_offs: Iterable[HandOff]) -> dict[tuple[str, str, bool], list[HandOff]]:
    """Group hand-offs by producer, consumer and direction.

    Groups come in the order of their first hand-off.
    """
    found: dict[tuple[str, str, bool], list[HandOff]] = {}
    for one in hand_offs:
        found.setdefault((one.link.producer, one.link.consumer, one.backwards), []).append(one)
    return found


def figures(hand_offs: Sequence[HandOff]) -> LinkThroughput:
    """Compute the figures of one link from its hand-offs, at least one."""
    cold = _cold(hand_offs)
    timed = [one for one in hand_offs if one.pieces and one not in cold]
    pieces = [piece for one in timed for piece in one.pieces]
    busy = union_ns((piece.begin_ns, piece.end_ns) for piece in pieces)
    surely_busy = union_ns((piece.begin_ns, max(piece.begin_ns, piece.end_ns - piece.bound_ns)) for piece in pieces)
    spans = [(one.pieces[0].begin_ns, max(piece.end_ns for piece in one.pieces)) for one in timed]
    moved = sum(piece.bytes for piece in pieces)
    warm = [one for one in hand_offs if one not in cold and not one.loaded and not one.open]
    stuck, stuck_at = _stuck(hand_offs)
    descriptors = sorted(one.descriptors for one in hand_offs if one.descriptors is not None)
    return LinkThroughput(
        link=max((one.link for one in hand_offs), key=lambda link: bool(link.producer_host) + bool(link.consumer_host)),
        hand_offs=len(hand_offs),
        failed=sum(one.failed for one in hand_offs),
        open=sum(one.open for one in hand_offs),
        moved_bytes=sum(one.bytes for one in hand_offs),
        counted=all(one.counted for one in hand_offs if one.pieces),
        timed=len(spans),
        busy_ns=busy,
        rate_low=_rate(moved, busy),
        rate_high=_rate(moved, surely_busy),
        effective_rate=_rate(moved, union_ns(spans)),
        transfer=times(_length(piece) for one in warm for piece in one.pieces),
        whole=times(one.taken_ns for one in warm if one.taken_ns is not None),
        cold_ns=tuple(one.taken_ns for one in cold if one.taken_ns is not None),
        stuck=stuck,
        stuck_at_ns=stuck_at,
        connectors=_words(one.connector for one in hand_offs),
        modes=_words(one.mode for one in hand_offs),
        backwards=hand_offs[-1].backwards,
        descriptors=descriptors[len(descriptors) // 2] if descriptors else None,
        first_unix_ns=hand_offs[0].started_unix_ns,
        last_unix_ns=hand_offs[-1].started_unix_ns,
    )


def union_ns(intervals: Iterable[tuple[int, int]]) -> int:
    """Return the time that at least one of the intervals covers.

    An interval that ends before it begins covers nothing.
    """
    covered, until = 0, None
    for begin, end in sorted(interval for interval in intervals if interval[1] > interval[0]):
        if until is None or begin > until:
            covered, until = covered + end - begin, end
        elif end > until:
            covered, until = covered + end - until, end
    return covered


def times(durations_ns: Iterable[int]) -> DurationPercentiles | None:
    """Compute percentiles of durations; None for no durations."""
    ordered = sorted(durations_ns)
    if not ordered:
        return None
    ranks = {share: ordered[max(1, ceil(share * len(ordered) - 1e-9)) - 1] for share in (0.5, 0.99)}
    return DurationPercentiles(count=len(ordered), p50_ns=ranks[0.5], p99_ns=ranks[0.99], max_ns=ordered[-1])


def _rate(moved: int, time_ns: int) -> float | None:
    return moved / time_ns * SECOND if moved and time_ns else None


def _length(piece: Piece) -> int:
    return max(0, piece.end_ns - piece.begin_ns)


def _cold(hand_offs: Sequence[HandOff]) -> list[HandOff]:
    """Return the first contacts that are far above the other hand-offs.

    A first contact is a hand-off with a timed handshake; where it was not timed, only the link's very first (case B08).
    """
    timed = [one for one in hand_offs if one.taken_ns is not None and not one.loaded and not one.open]
    others = times(one.taken_ns for one in timed[1:] if one.taken_ns is not None)
    if others is None:
        return []
    least = max(COLD_TIMES * others.p50_ns, others.p50_ns + COLD_MORE_NS)
    first = [one for place, one in enumerate(timed) if one.handshake_ns or (one.handshake_ns is None and not place)]
    return [one for one in first if (one.taken_ns or 0) >= least]


def _stuck(hand_offs: Sequence[HandOff]) -> tuple[int, int | None]:
    """Return how many hand-offs ended without KV after one same time, and the time.

    A faulty link fails at any time, a time limit always after the same time (case B08).
    """
    ended = (one.taken_ns for one in hand_offs if one.loaded and not one.open)
    lengths = sorted(length for length in ended if length is not None and length >= CLUSTER_LEAST_NS)
    if len(lengths) < CLUSTER:
        return 0, None
    middle = lengths[len(lengths) // 2]
    alike = sum(abs(length - middle) <= CLUSTER_WITHIN_NS for length in lengths)
    return (alike, middle) if alike >= max(CLUSTER, CLUSTER_SHARE * len(lengths)) else (0, None)


def _words(words: Iterable[str]) -> tuple[str, ...]:
    return tuple(word for word, _ in Counter(filter(None, words)).most_common())
