"""Compute bytes moved over time as columns, to compare with counters. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from handrail_collector.links.handoffs import Piece

LEAST_NS = 1_000_000
"""Least duration of a piece; a shorter one is spread over this time."""


@dataclass(frozen=True, slots=True)
class Flow:
    """Pieces of transfers as columns of equal length.

    Each piece has its begin and end by one clock, its bytes, and how much earlier it may have ended.
    """

    begin_ns: Any  # int64
    end_ns: Any
    size: Any  # float64
    bound_ns: Any

    @staticmethod
    def of(pieces: Sequence[Piece]) -> Flow:
        """Build columns from pieces, in their order."""
        columns = [(piece.begin_ns, piece.end_ns, piece.bytes, piece.bound_ns) for piece in pieces]
        begin, end, size, bound = zip(*columns, strict=True) if columns else ((), (), (), ())
        return Flow(np.array(begin, np.int64), np.array(end, np.int64), np.array(size, np.float64), np.array(bound, np.int64))

    def __len__(self) -> int:
        return len(self.begin_ns)

    @property
    def bytes(self) -> float:
        """Bytes of all pieces."""
        return float(self.size.sum())

    def only(self, chosen: Any) -> Flow:
        """Return the pieces that the mask selects."""
        return Flow(self.begin_ns[chosen], self.end_ns[chosen], self.size[chosen], self.bound_ns[chosen])

    def and_also(self, more: Flow) -> Flow:
        """Return the pieces of both flows."""
        pairs = (
            (self.begin_ns, more.begin_ns),
            (self.end_ns, more.end_ns),
            (self.size, more.size),
            (self.bound_ns, more.bound_ns),
        )
        return Flow(*(np.concatenate(pair) for pair in pairs))

    def between(self, edges_ns: Any) -> Any:
        """Return the bytes from each edge to the next.

        Each piece moves at an even rate over its time.
        """
        if not len(self):
            return np.zeros(max(0, len(edges_ns) - 1))
        length = np.maximum(LEAST_NS, self.end_ns - self.begin_ns)
        rate = self.size / length
        return np.diff(_ramps(self.begin_ns, rate, edges_ns) - _ramps(self.begin_ns + length, rate, edges_ns))


def _ramps(begin_ns: Any, rate: Any, edges_ns: Any) -> Any:
    """Return, at each edge, the sum of ramps of ``rate`` from ``begin_ns`` on."""
    order = np.argsort(begin_ns, kind="stable")
    base = edges_ns[0]
    began, rates = (begin_ns[order] - base).astype(np.float64), rate[order]
    slope, lead = np.concatenate([[0.0], np.cumsum(rates)]), np.concatenate([[0.0], np.cumsum(rates * began)])
    running = np.searchsorted(began, (edges_ns - base).astype(np.float64), side="right")
    return slope[running] * (edges_ns - base) - lead[running]
