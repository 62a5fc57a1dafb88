"""Durations by bucket, as they are added up and as they lie in the manifest: only buckets that hold something."""

from __future__ import annotations

import zlib
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from handrail.metrics.histogram import LATENCY, Exemplar, Histogram

_EDGES: Final = LATENCY.edges

LAYOUT: Final = f"{zlib.crc32(repr(_EDGES).encode()):08x}"
"""Names the bounds that stored buckets belong to: those of another release's bounds mean something else and are left behind."""


@dataclass(slots=True)
class Durations:
    """``counts``: how many by bucket of ``handrail.metrics.histogram.LATENCY``; one past the last bound holds all above it.

    ``exemplars``: the last request of each bucket, by bucket; not stored.
    """

    sum_ns: int = 0
    counts: dict[int, int] = field(default_factory=dict)
    exemplars: dict[int, Exemplar] = field(default_factory=dict, compare=False)

    def add(self, duration_ns: int, trace_id: str = "", at_unix_ns: int = 0) -> None:
        """One more, of that trace. 0.4 us (tests/bench/bench_joined.py)."""
        bucket = bisect_left(_EDGES, duration_ns)
        self.sum_ns += duration_ns
        self.counts[bucket] = self.counts.get(bucket, 0) + 1
        if trace_id:
            self.exemplars[bucket] = Exemplar(trace_id, duration_ns, at_unix_ns)

    def merge(self, other: Durations) -> None:
        """All of ``other`` too, which came later."""
        self.exemplars |= other.exemplars
        self.sum_ns += other.sum_ns
        for bucket, count in other.counts.items():
            self.counts[bucket] = self.counts.get(bucket, 0) + count

    def flat(self) -> tuple[int, ...]:
        """As the store adds it up (``store/counter_totals.py``): place 0 is the sum, place 1 + bucket its count."""
        return 0, self.sum_ns, *(number for bucket, count in self.counts.items() for number in (1 + bucket, count))

    @classmethod
    def of(cls, flat: Sequence[int]) -> Durations:
        """What ``flat`` made, or the store of several."""
        amounts = dict(zip(flat[::2], flat[1::2], strict=True))
        return cls(amounts.pop(0, 0), {place - 1: count for place, count in amounts.items()})

    def histogram(self, oldest_unix_ns: int = 0) -> Histogram:
        """As it is exposed, with exemplars that are not older."""
        made = Histogram(LATENCY)
        made.exemplars = {bucket: each for bucket, each in self.exemplars.items() if each.unix_ns >= oldest_unix_ns}
        made.total = self.sum_ns
        for bucket, count in self.counts.items():
            made.counts[bucket] = count
        return made
