"""Count traffic so that no restart counts it again.

A count is visible once it is published: the totals go into the manifest with the rows and spans that they count, and a
start restores them from there. Counts therefore never fall behind an earlier scrape, which Prometheus would take for a
counter reset, and a replay never counts twice.
Counts by model and durations by bucket are too many for totals in each publish, so a publish carries their increments.
"""

from __future__ import annotations

import zlib
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from handrail.metrics.histogram import LATENCY, Exemplar, Histogram
from handrail_collector.store.manifest import Added

KEPT = "as of the last publish, over restarts"
"""Help text for counts that the store keeps, which a replay does not count again."""

_EDGES: Final = LATENCY.edges

LAYOUT: Final = f"{zlib.crc32(repr(_EDGES).encode()):08x}"
"""Identifier of the bucket bounds that stored counts belong to.

Counts with the bounds of another release mean something else and are dropped.
"""


class CounterKey(str, Enum):
    """What is counted; the value is the key in the manifest.

    A counter with words has keys with the words behind dots. Only the last word may contain a dot.
    """

    SPANS = "spans"
    SPANS_STORED = "spans_stored"
    SAMPLES = "samples"  # kind.source
    DUPLICATE_BATCHES = "duplicate_batches"
    DUPLICATE_SPANS = "duplicate_spans"
    UNREADABLE_SPANS = "unreadable_spans"
    AMBIGUOUS_JOINS = "ambiguous_joins"
    CLOCK_CONTRADICTIONS = "clock_contradictions"
    ROWS = "rows"
    WITHDRAWN_ROWS = "withdrawn_rows"
    EDGE_REQUESTS = "edge_requests"
    EDGE_JOINED = "edge_joined"
    JOINS = "joins"  # how
    DECISIONS = "decisions"  # closing
    STALLS = "stalls"  # cause.model; the cause alone before models were distinguished
    SLOW_REQUESTS = "slow_requests"  # model
    SLOW_NS = "slow_ns"  # phase.model
    JOINED = "joined"  # outcome.model
    COUNTED = "counted"  # edge | engine
    FINDINGS = "findings"  # kind


BY_MODEL: Final = frozenset({CounterKey.STALLS, CounterKey.SLOW_REQUESTS, CounterKey.SLOW_NS, CounterKey.JOINED})
"""Counters by model, of which a publish carries increments, as for durations.

A fleet of many models has too many of them for totals in each publish.
"""


class Timed(str, Enum):
    """Durations that are counted, by words as above."""

    PHASES = f"phases@{LAYOUT}"  # phase.model


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
        """Encode as increments that the store adds up (``store/manifest.py``).

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


@dataclass(slots=True)
class CounterDelta:
    """The increments of one publish."""

    counts: Counter[str] = field(default_factory=Counter)
    by_model: Counter[str] = field(default_factory=Counter)
    durations: dict[str, Durations] = field(default_factory=dict)

    def added(self) -> Added:
        """Encode the increments for the store."""
        counts = {name: (0, count) for name, count in self.by_model.items()}
        return counts | {name: durations.flat() for name, durations in self.durations.items()}


class DurableCounters:
    """Totals of one shard since its store began. The pipeline's loop owns it."""

    def __init__(self, published: Mapping[str, int], added: Added | None = None) -> None:
        self.published: Mapping[str, int] = dict(published)
        durations = tuple(f"{timed.value}." for timed in Timed)
        self._durations = {name: Durations.of(flat) for name, flat in (added or {}).items() if name.startswith(durations)}
        by_model = tuple(f"{seen.value}." for seen in BY_MODEL)
        self._by_model = Counter({name: flat[1] for name, flat in (added or {}).items() if name.startswith(by_model)})
        self._counts: Counter[tuple[CounterKey, str]] = Counter()  # since the last publish; keys are made when one begins
        self._timed: dict[tuple[Timed, tuple[str, ...]], Durations] = {}
        self._left = CounterDelta()  # increments of a publish that failed

    def __getitem__(self, seen: CounterKey) -> int:
        """Return the published count."""
        return self.published.get(seen.value, 0)

    def by_word(self, seen: CounterKey) -> dict[str, int]:
        """Return published counts by the text behind the first dot."""
        beginning = f"{seen.value}."
        found = Counter({key[len(beginning) :]: n for key, n in self.published.items() if key.startswith(beginning)})
        found.update({key[len(beginning) :]: n for key, n in self._by_model.items() if key.startswith(beginning)})
        return dict(found)

    def by_words(self, seen: CounterKey, words: int) -> dict[tuple[str, ...], int]:
        """Return published counts by ``words`` words; missing last words are empty."""
        found: Counter[tuple[str, ...]] = Counter()
        for key, n in self.by_word(seen).items():
            found[_words(key, words)] += n
        return found

    def durations(self, timed: Timed, words: int) -> dict[tuple[str, ...], Durations]:
        """Return published durations by words."""
        beginning = f"{timed.value}."
        return {
            _words(name[len(beginning) :], words): found for name, found in self._durations.items() if name.startswith(beginning)
        }

    def add(self, seen: CounterKey, count: int = 1, word: str = "") -> None:
        """Count something for the next publish.

        A negative ``count`` is allowed when a fact is withdrawn.
        """
        if count:
            self._counts[seen, word] += count

    def time(self, timed: Timed, words: tuple[str, ...], duration_ns: int, trace_id: str = "", at_unix_ns: int = 0) -> None:
        """Add a duration of a trace, decided at that time, for the next publish."""
        key = timed, words
        found = self._timed.get(key)
        if found is None:
            found = self._timed[key] = Durations()
        found.add(duration_ns, trace_id, at_unix_ns)

    def take(self) -> CounterDelta:
        """Take the increments of the publish that begins now.

        Later counts go into the next publish.
        """
        taken, self._left = self._left, CounterDelta()
        for (seen, word), count in self._counts.items():
            into = taken.by_model if seen in BY_MODEL else taken.counts
            into[f"{seen.value}.{word}" if word else seen.value] += count
        _merge(taken.durations, {".".join((timed.value, *words)): found for (timed, words), found in self._timed.items()})
        self._counts, self._timed = Counter(), {}
        return taken

    def with_added(self, taken: CounterDelta) -> dict[str, int]:
        """Return the totals that this publish stores."""
        totals = dict(self.published)
        for key, count in taken.counts.items():
            totals[key] = totals.get(key, 0) + count
        return totals

    def put_back(self, taken: CounterDelta) -> None:
        """Return the increments of a failed publish, for the next one.

        Only one publish runs at a time.
        """
        self._left = taken

    def done(self, totals: Mapping[str, int], taken: CounterDelta) -> None:
        """Mark a publish as stored with these totals."""
        self.published = totals
        self._by_model.update(taken.by_model)
        _merge(self._durations, taken.durations)


def _words(text: str, count: int) -> tuple[str, ...]:
    found = text.split(".", count - 1)
    return *found, *("",) * (count - len(found))


def _merge(into: dict[str, Durations], more: Mapping[str, Durations]) -> None:
    for name, durations in more.items():
        into.setdefault(name, Durations()).merge(durations)
