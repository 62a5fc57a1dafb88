"""What was counted of the traffic, so that no restart counts it again.

A count is shown once it is published: the totals go into the manifest together with the rows and spans that they count, and a
start takes them from there. So they neither fall behind what a scrape has seen, which a reader of counters takes for a restart
from nothing, nor count what a replay brings again (DESIGN section 7).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from enum import Enum


class Seen(str, Enum):
    """What is counted; the value is the key in the manifest. ``JOINS``, ``DECISIONS``, ``STALLS`` are by a word behind a dot."""

    SPANS = "spans"
    SPANS_STORED = "spans_stored"
    DUPLICATE_BATCHES = "duplicate_batches"
    DUPLICATE_SPANS = "duplicate_spans"
    UNREADABLE_SPANS = "unreadable_spans"
    AMBIGUOUS_JOINS = "ambiguous_joins"
    CLOCK_CONTRADICTIONS = "clock_contradictions"
    ROWS = "rows"
    EDGE_REQUESTS = "edge_requests"
    EDGE_JOINED = "edge_joined"
    JOINS = "joins"
    DECISIONS = "decisions"
    STALLS = "stalls"


class Observed:
    """Totals of one shard since its store began. Owned by the pipeline's loop."""

    def __init__(self, published: Mapping[str, int]) -> None:
        self.published: Mapping[str, int] = dict(published)
        self._since: Counter[str] = Counter()

    def __getitem__(self, seen: Seen) -> int:
        """Published by now."""
        return self.published.get(seen.value, 0)

    def by_word(self, seen: Seen) -> dict[str, int]:
        """Published by now, by what stands behind the dot."""
        beginning = f"{seen.value}."
        return {key[len(beginning) :]: n for key, n in self.published.items() if key.startswith(beginning)}

    def add(self, seen: Seen, count: int = 1, word: str = "") -> None:
        """Count something that goes into the next publish. Going back is allowed where a fact was taken back."""
        if count:
            self._since[f"{seen.value}.{word}" if word else seen.value] += count

    def take(self) -> Counter[str]:
        """What the publish that begins now is to add; what is counted from here on goes into the one after it."""
        taken, self._since = self._since, Counter()
        return taken

    def with_added(self, taken: Mapping[str, int]) -> dict[str, int]:
        """The totals that this publish is to store."""
        totals = dict(self.published)
        for key, count in taken.items():
            totals[key] = totals.get(key, 0) + count
        return totals

    def put_back(self, taken: Mapping[str, int]) -> None:
        """That publish failed: the next one adds it."""
        for key, count in taken.items():
            self._since[key] += count
