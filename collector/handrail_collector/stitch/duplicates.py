"""Recognise batches and spans that at-least-once senders repeat.

There are two generations of keys. They swap when the younger one is full or old: a key is remembered for at least half the
window, and memory is bounded.
A batch is identified by (sender, sequence, scope), a span by a 64-bit hash of its bytes. Case G12.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable
from dataclasses import dataclass, field


@dataclass(slots=True)
class DuplicateWindow:
    """The keys of the last ``window_ns``, or of at least half of it.

    Holds at most ``2 * max_keys`` keys.
    """

    window_ns: int
    max_keys: int
    _young: set[Hashable] = field(default_factory=set)
    _old: set[Hashable] = field(default_factory=set)
    _since_unix_ns: int = 0

    def seen(self, key: Hashable, now_unix_ns: int) -> bool:
        """Return whether ``key`` was seen before, and remember it."""
        if now_unix_ns - self._since_unix_ns > self.window_ns // 2 or len(self._young) >= self.max_keys:
            self._old, self._young, self._since_unix_ns = self._young, set(), now_unix_ns
        if key in self._young or key in self._old:
            return True
        self._young.add(key)
        return False


class Duplicates:
    """The duplicate detection of one shard."""

    def __init__(self, window_ns: int = 240 * 10**9, max_batches: int = 50_000, max_spans: int = 1_000_000) -> None:
        self.batches = 0
        self.spans = 0
        self._batches = DuplicateWindow(window_ns, max_batches)
        self._spans = DuplicateWindow(window_ns, max_spans)

    def batch(self, sender: str, seq: int | None, scope: str, now_unix_ns: int) -> bool:
        """Return whether this sender has delivered this batch before.

        False for batches without a sender or number.
        """
        if not sender or seq is None or not self._batches.seen((sender, seq, scope), now_unix_ns):
            return False
        self.batches += 1
        return True

    def span(self, encoded: bytes, now_unix_ns: int) -> bool:
        """Return whether a span with these bytes was seen before."""
        if not self._spans.seen(hashlib.blake2b(encoded, digest_size=8).digest(), now_unix_ns):
            return False
        self.spans += 1
        return True
