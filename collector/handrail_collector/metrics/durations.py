"""Add up durations by bucket, in memory and as stored in the manifest.

Only buckets with a count are kept.
"""

from __future__ import annotations

import zlib
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from handrail.metrics.histogram import LATENCY, Exemplar, Histogram

_EDGES: Final = LATENCY.edges

LAYOUT: Final = f"{zlib.crc32(repr(_EDGES).encode()):08x}"
"""Identifier of the bucket bounds that stored counts belong to.

Counts with the bounds of another release mean something else and are dropped.
"""


@dataclass(slots=True)
class Durations:
    """Durations counted by bucket of ``handrail.metrics.histogram.LATENCY``.

    ``counts``: the bucket after the last bound holds all durations above it.
    ``exemplars``: the last request of each bucket, by bucket; not stored.
    """

    sum_ns: int = 0
    counts: dict[int, int] = field(default_factory=dict)
    exemplars: dict[int, Exemplar] = field(default_factory=dict, compare=False)

    def add(self, duration_ns: int, trace_id: str = "", at_unix_ns: int = 0) -> None:
        """Add one duration of a trace. Takes 0.4 us (tests/bench/bench_joined.py)."""
        bucket = bisect_left(_EDGES, duration_ns)
        self.sum_ns += duration_ns
        self.counts[bucket] = self.counts.get(bucket, 0) + 1
        if trace_id:
            self.exemplars[bucket] = Exemplar(trace_id, duration_ns, at_unix_ns)

    def merge(self, other: Durations) -> None:
        """Add all of ``other``, which is later."""
        self.exemplars |= other.exemplars
        self.sum_ns += other.sum_ns
        for bucket, count in other.counts.items():
            self.counts[bucket] = self.counts.get(bucket, 0) + count

    def flat(self) -> tuple[int, ...]:
        """Encode as increments that the store adds up (``store/counter_totals.py``).

        Place 0 is the sum in ns. Place 1 + bucket is the count of the bucket.
        """
        return 0, self.sum_ns, *(number for bucket, count in self.counts.items() for number in (1 + bucket, count))

    @classmethod
    def of(cls, flat: Sequence[int]) -> Durations:
        """Decode one result of ``flat``, or the sum of several."""
        amounts = dict(zip(flat[::2], flat[1::2], strict=True))
        return cls(amounts.pop(0, 0), {place - 1: count for place, count in amounts.items()})

    def histogram(self, oldest_unix_ns: int = 0) -> Histogram:
        """Return the histogram to expose, without exemplars before ``oldest_unix_ns``."""
        made = Histogram(LATENCY)
        made.exemplars = {bucket: each for bucket, each in self.exemplars.items() if each.unix_ns >= oldest_unix_ns}
        made.total = self.sum_ns
        for bucket, count in self.counts.items():
            made.counts[bucket] = count
        return made
