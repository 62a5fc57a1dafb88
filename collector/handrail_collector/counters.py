"""What was counted of the traffic, so that no restart counts it again.

A count is shown once it is published: the totals go into the manifest together with the rows and spans that they count, and a
start takes them from there. So they neither fall behind what a scrape has seen, which a reader of counters takes for a restart
from nothing, nor count what a replay brings again (DESIGN section 7). What is counted by model, and durations by bucket, are too
many to be said in total each time: a publish says what it adds to them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from handrail_collector.metrics.durations import LAYOUT, Durations
from handrail_collector.store.counter_totals import Added

KEPT = "as of the last publish, over restarts"
"""Help of what is counted in the store itself: a replay counts nothing of it again."""


class CounterKey(str, Enum):
    """What is counted; the value is the key in the manifest. Those with words are counted by words behind dots; only the last
    word may hold a dot."""

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
    STALLS = "stalls"  # cause.model; before models were told apart the cause alone
    SLOW_REQUESTS = "slow_requests"  # model
    SLOW_NS = "slow_ns"  # phase.model
    JOINED = "joined"  # outcome.model
    COUNTED = "counted"  # edge | engine
    FINDINGS = "findings"  # kind


BY_MODEL: Final = frozenset({CounterKey.STALLS, CounterKey.SLOW_REQUESTS, CounterKey.SLOW_NS, CounterKey.JOINED})
"""Of a fleet of many models too many to be said in total at each publish: what it adds is said, as of durations."""


class Timed(str, Enum):
    """What durations are kept of, by words as above."""

    PHASES = f"phases@{LAYOUT}"  # phase.model


@dataclass(slots=True)
class CounterDelta:
    """What one publish adds."""

    counts: Counter[str] = field(default_factory=Counter)
    by_model: Counter[str] = field(default_factory=Counter)
    durations: dict[str, Durations] = field(default_factory=dict)

    def added(self) -> Added:
        """As the store takes it."""
        counts = {name: (0, count) for name, count in self.by_model.items()}
        return counts | {name: durations.flat() for name, durations in self.durations.items()}


class DurableCounters:
    """Totals of one shard since its store began. Owned by the pipeline's loop."""

    def __init__(self, published: Mapping[str, int], added: Added | None = None) -> None:
        self.published: Mapping[str, int] = dict(published)
        durations = tuple(f"{timed.value}." for timed in Timed)
        self._durations = {name: Durations.of(flat) for name, flat in (added or {}).items() if name.startswith(durations)}
        by_model = tuple(f"{seen.value}." for seen in BY_MODEL)
        self._by_model = Counter({name: flat[1] for name, flat in (added or {}).items() if name.startswith(by_model)})
        self._counts: Counter[tuple[CounterKey, str]] = Counter()  # since the last publish; names are made when one begins
        self._timed: dict[tuple[Timed, tuple[str, ...]], Durations] = {}
        self._left = CounterDelta()  # of a publish that failed

    def __getitem__(self, seen: CounterKey) -> int:
        """Published by now."""
        return self.published.get(seen.value, 0)

    def by_word(self, seen: CounterKey) -> dict[str, int]:
        """Published by now, by all that stands behind the first dot."""
        beginning = f"{seen.value}."
        found = Counter({key[len(beginning) :]: n for key, n in self.published.items() if key.startswith(beginning)})
        found.update({key[len(beginning) :]: n for key, n in self._by_model.items() if key.startswith(beginning)})
        return dict(found)

    def by_words(self, seen: CounterKey, words: int) -> dict[tuple[str, ...], int]:
        """As ``by_word``, by each of so many words; what has fewer has them empty at its end."""
        found: Counter[tuple[str, ...]] = Counter()
        for key, n in self.by_word(seen).items():
            found[_words(key, words)] += n
        return found

    def durations(self, timed: Timed, words: int) -> dict[tuple[str, ...], Durations]:
        """Published by now, by words."""
        beginning = f"{timed.value}."
        return {
            _words(name[len(beginning) :], words): found for name, found in self._durations.items() if name.startswith(beginning)
        }

    def add(self, seen: CounterKey, count: int = 1, word: str = "") -> None:
        """Count something that goes into the next publish. Going back is allowed where a fact was taken back."""
        if count:
            self._counts[seen, word] += count

    def time(self, timed: Timed, words: tuple[str, ...], duration_ns: int, trace_id: str = "", at_unix_ns: int = 0) -> None:
        """One duration, of that trace and decided then, for the next publish."""
        key = timed, words
        found = self._timed.get(key)
        if found is None:
            found = self._timed[key] = Durations()
        found.add(duration_ns, trace_id, at_unix_ns)

    def take(self) -> CounterDelta:
        """What the publish that begins now is to add; what is counted from here on goes into the one after it."""
        taken, self._left = self._left, CounterDelta()
        for (seen, word), count in self._counts.items():
            into = taken.by_model if seen in BY_MODEL else taken.counts
            into[f"{seen.value}.{word}" if word else seen.value] += count
        _merge(taken.durations, {".".join((timed.value, *words)): found for (timed, words), found in self._timed.items()})
        self._counts, self._timed = Counter(), {}
        return taken

    def with_added(self, taken: CounterDelta) -> dict[str, int]:
        """The totals that this publish is to store."""
        totals = dict(self.published)
        for key, count in taken.counts.items():
            totals[key] = totals.get(key, 0) + count
        return totals

    def put_back(self, taken: CounterDelta) -> None:
        """That publish failed: the next one adds it. There is one publish at a time."""
        self._left = taken

    def done(self, totals: Mapping[str, int], taken: CounterDelta) -> None:
        """That publish is in the store, with these totals."""
        self.published = totals
        self._by_model.update(taken.by_model)
        _merge(self._durations, taken.durations)


def _words(text: str, count: int) -> tuple[str, ...]:
    found = text.split(".", count - 1)
    return *found, *("",) * (count - len(found))


def _merge(into: dict[str, Durations], more: Mapping[str, Durations]) -> None:
    for name, durations in more.items():
        into.setdefault(name, Durations()).merge(durations)
