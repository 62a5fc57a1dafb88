"""Knows what was delivered before: at-least-once senders repeat batches and spans.

Two generations of keys, swapped when the younger is full or old: a key is remembered for at least half the window and memory is
bounded. A batch is known by (sender, sequence); a span by a 64-bit hash of its bytes. Case G12.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable
from dataclasses import dataclass, field


@dataclass(slots=True)
class DuplicateWindow:
    """Keys seen within the last ``window_ns`` (at least half of it), at most ``2 * max_keys`` of them."""

    window_ns: int
    max_keys: int
    _young: set[Hashable] = field(default_factory=set)
    _old: set[Hashable] = field(default_factory=set)
    _since_unix_ns: int = 0

    def seen(self, key: Hashable, now_unix_ns: int) -> bool:
        """Whether ``key`` was seen before; remembers it."""
        if now_unix_ns - self._since_unix_ns > self.window_ns // 2 or len(self._young) >= self.max_keys:
            self._old, self._young, self._since_unix_ns = self._young, set(), now_unix_ns
        if key in self._young or key in self._old:
            return True
        self._young.add(key)
        return False


class Duplicates:
    """The deduplication window of one shard."""

    def __init__(self, window_ns: int = 240 * 10**9, max_batches: int = 50_000, max_spans: int = 1_000_000) -> None:
        self.batches = 0
        self.spans = 0
        self._batches = DuplicateWindow(window_ns, max_batches)
        self._spans = DuplicateWindow(window_ns, max_spans)

    def batch(self, sender: str, seq: int | None, scope: str, now_unix_ns: int) -> bool:
        """True for a batch that this sender has delivered before; batches without a sender or number are never known."""
        if not sender or seq is None or not self._batches.seen((sender, seq, scope), now_unix_ns):
            return False
        self.batches += 1
        return True

    def span(self, encoded: bytes, now_unix_ns: int) -> bool:
        """True for a span whose bytes were seen before."""
        if not self._spans.seen(hashlib.blake2b(encoded, digest_size=8).digest(), now_unix_ns):
            return False
        self.spans += 1
        return True
