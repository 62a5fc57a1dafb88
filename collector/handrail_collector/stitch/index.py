"""Index evidence by key; add, drop and look-up are one step each.

The cost does not depend on how many requests share a key.
"""

from __future__ import annotations

from collections.abc import Iterable

CROWD = 64
"""Most requests with one request id at once; above that, the id is ignored.

Such an id is a constant header or a counter.
"""


class Index:
    """A map from each key to the spans of the evidence with it, oldest first."""

    def __init__(self) -> None:
        self._table: dict[str, dict[str, None]] = {}

    def add(self, keys: Iterable[str], span: str) -> None:
        """Add ``span`` under ``keys``."""
        for key in keys:
            self._table.setdefault(key, {})[span] = None

    def drop(self, keys: Iterable[str], span: str) -> None:
        """Remove ``span`` from ``keys``."""
        for key in keys:
            spans = self._table.get(key)
            if spans is not None:
                spans.pop(span, None)
                if not spans:
                    del self._table[key]

    def take(self, key: str) -> tuple[str, ...]:
        """Remove ``key`` and return its spans."""
        return tuple(self._table.pop(key, ()))

    def spans(self, key: str) -> tuple[str, ...]:
        """Return the spans of ``key``; none for a crowded key."""
        spans = self._table.get(key)
        return tuple(spans) if spans is not None and len(spans) <= CROWD else ()

    def crowded(self, key: str) -> bool:
        """Whether too many spans have this key for it to identify a request."""
        return len(self._table.get(key, ())) > CROWD

    def __len__(self) -> int:
        return len(self._table)
