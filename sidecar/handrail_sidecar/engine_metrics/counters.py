"""Follow counters over time: start of counting, restarts and growth (case D18)."""

from __future__ import annotations

from dataclasses import dataclass

from handrail_sidecar.engine_metrics.page import Key


@dataclass(frozen=True, slots=True)
class Increase:
    """Growth of a counter.

    ``value`` None: unknown, since one end was not read. ``reset``: the counter began again in between.
    """

    value: float | None
    reset: bool = False


def increase(before: float | None, after: float | None) -> Increase:
    """Return the growth from one reading to the next; never negative.

    After a reset, the count since then is a lower bound.
    """
    if before is None or after is None:
        return Increase(None)
    return Increase(after, reset=True) if after < before else Increase(after - before)


class CounterTracks:
    """Keeps each counter's last value and since when it counts.

    Bounded by the reader's bound on labels.
    """

    def __init__(self) -> None:
        self.resets = 0
        self._last: dict[Key, float] = {}
        self._since: dict[Key, int] = {}
        self._scraped_unix_ns: int | None = None

    def grown(self, counters: dict[Key, float]) -> dict[Key, float]:
        """Return the growth of each counter that grew since the last scrape.

        Call it before ``follow``.
        A counter that was absent before has counted since then: engines expose some only once they count.
        For a counter that began again, the growth is its count since then.
        """
        if self._scraped_unix_ns is None:
            return {}
        found = {key: increase(self._last.get(key, 0.0), value).value for key, value in counters.items()}
        return {key: value for key, value in found.items() if value}

    @property
    def scraped_unix_ns(self) -> int | None:
        """Time when the last page was requested; None before the first."""
        return self._scraped_unix_ns

    def follow(self, counters: dict[Key, float], at_unix_ns: int, started_unix_ns: int | None) -> frozenset[Key]:
        """Take one scrape's counters; return the keys that began again.

        ``started_unix_ns``: since when the engine counts, by its own figure.
        """
        began_again = frozenset(key for key, value in counters.items() if value < self._last.get(key, 0.0))
        earliest = started_unix_ns if started_unix_ns is not None and started_unix_ns <= at_unix_ns else None
        for key, value in counters.items():
            if key in began_again:
                # after the last reading, which may have been the first: one start must not stand for two counts
                self._since[key] = earliest or (at_unix_ns if self._scraped_unix_ns is None else self._scraped_unix_ns + 1)
            elif key not in self._since:
                self._since[key] = earliest or at_unix_ns
            self._last[key] = value
        self.resets += len(began_again)
        self._scraped_unix_ns = at_unix_ns
        return began_again

    def since(self, key: Key) -> int:
        """Return since when a counter counts, as far as known; 0 if it was never followed."""
        return self._since.get(key, 0)
