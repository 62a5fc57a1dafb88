"""Summarise why the streams of a period stalled: each cause's share.

The shares are of all stalls, and of those among the longest gaps. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc


@dataclass(frozen=True, slots=True, kw_only=True)
class CauseShare:
    """One cause of stalls.

    ``share``: of the stalls; ``longest_share``: of those among the longest gaps, None where there is none.
    ``events``: times in which streams of one host stalled for it; ``every_ns``: from one event to the next at the host with most.
    ``lift``: the median there. ``host``: the host with most of these stalls; ``host_share``: its share of them.
    """

    cause: str
    stalls: int
    share: float
    streams: int
    events: int
    every_ns: int | None
    gap_ns: int
    longest_gap_ns: int
    longest: int
    longest_share: float | None
    lift: float | None
    host: str
    host_share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Stalling:
    """All stalls of a scope that were reported singly: the longest of each stream."""

    stalls: int
    gap_ns: int
    longest: int  # among the longest gaps
    causes: tuple[CauseShare, ...]  # most stalls first


def stalling(counts: pa.Table) -> Stalling | None:
    """Summarise one scope's rows of ``stall_causes.sql``; None without stalls."""
    if not counts.num_rows:
        return None
    stalls, longest = _sum(counts, "stalls"), _sum(counts, "longest")
    causes = []
    for cause in dict.fromkeys(counts["cause"].to_pylist()):
        of = counts.filter(pc.equal(counts["cause"], cause)).sort_by([("stalls", "descending"), ("host", "ascending")])
        first = of.slice(0, 1).to_pylist()[0]
        causes.append(
            CauseShare(
                cause=cause,
                stalls=_sum(of, "stalls"),
                share=_sum(of, "stalls") / stalls,
                streams=_sum(of, "streams"),
                events=_sum(of, "events"),
                every_ns=first["every_ns"],
                gap_ns=_sum(of, "gap_sum_ns"),
                longest_gap_ns=int(pc.max(of["gap_max_ns"]).as_py()),
                longest=_sum(of, "longest"),
                longest_share=_sum(of, "longest") / longest if longest else None,
                lift=first["lift"],
                host=first["host"],
                host_share=first["stalls"] / _sum(of, "stalls"),
            )
        )
    causes.sort(key=lambda each: (-each.stalls, each.cause))
    return Stalling(stalls=stalls, gap_ns=_sum(counts, "gap_sum_ns"), longest=longest, causes=tuple(causes))


def _sum(table: pa.Table, name: str) -> int:
    return int(pc.sum(table[name]).as_py() or 0)
