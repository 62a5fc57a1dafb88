"""Combine the workers' parts of one KV load."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(slots=True)
class Rank:
    """One worker's part of a load."""

    load_ns: int | None = None
    posted_ns: int | None = None
    done_ns: int | None = None
    done_bound_ns: int = 0
    loaded_ns: int | None = None
    loaded_bound_ns: int = 0
    failed: bool = False
    moved: int | None = None
    descriptors: int | None = None


def last_done(ranks: list[Rank]) -> tuple[int | None, int]:
    """When the last rank's last transfer was seen done, and its bound.

    The bound is how much earlier it may have been. Without reported transfers the worker's report to the scheduler is the end.
    """
    ends = []
    for rank in ranks:
        if rank.done_ns is not None:
            ends.append((rank.done_ns, _since_begun(rank, rank.done_ns, rank.done_bound_ns)))
        elif rank.loaded_ns is not None and not rank.failed:
            ends.append((rank.loaded_ns, _since_begun(rank, rank.loaded_ns, rank.loaded_bound_ns)))
    return max(ends, default=(None, 0))


def _since_begun(rank: Rank, end_ns: int, bound_ns: int) -> int:
    """Limit a bound to the length of the transfer.

    The last poll may have been before the transfer began.
    """
    begun = rank.posted_ns if rank.posted_ns is not None else rank.load_ns
    return bound_ns if begun is None else min(bound_ns, max(0, end_ns - begun))


def least(known: int | None, at_ns: int) -> int:
    return at_ns if known is None else min(known, at_ns)


def added(known: int | None, more: int | None) -> int | None:
    return known if more is None else more + (known or 0)


def total(values: Iterable[int | None]) -> int | None:
    found = [value for value in values if value is not None]
    return sum(found) if found else None
