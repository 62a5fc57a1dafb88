"""Which evidence carries a key: adding, dropping and looking are each one step, however many requests share the key."""

from __future__ import annotations

from collections.abc import Iterable

CROWD = 64
"""More than this under one request id at once, and the id says nothing: a constant header, a counter."""


class Index:
    """Keys to the spans of the evidence that carries them, oldest first."""

    def __init__(self) -> None:
        self._table: dict[str, dict[str, None]] = {}

    def add(self, keys: Iterable[str], span: str) -> None:
        """``span`` carries ``keys``."""
        for key in keys:
            self._table.setdefault(key, {})[span] = None

    def drop(self, keys: Iterable[str], span: str) -> None:
        """``span`` does not carry ``keys`` any more, or is forgotten."""
        for key in keys:
            spans = self._table.get(key)
            if spans is not None:
                spans.pop(span, None)
                if not spans:
                    del self._table[key]

    def take(self, key: str) -> tuple[str, ...]:
        """The spans of ``key``, which then has none."""
        return tuple(self._table.pop(key, ()))

    def spans(self, key: str) -> tuple[str, ...]:
        """The spans of ``key``; none of a crowded one."""
        spans = self._table.get(key)
        return tuple(spans) if spans is not None and len(spans) <= CROWD else ()

    def crowded(self, key: str) -> bool:
        """Too many carry it for it to name anything."""
        return len(self._table.get(key, ())) > CROWD

    def __len__(self) -> int:
        return len(self._table)
