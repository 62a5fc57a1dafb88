"""Index evidence by key; add, drop and look-up are one step each.

The cost does not depend on how many requests share a key.
The keys of an engine's own evidence are its request ids. An engine's own id is unique within the engine's life (vLLM ends it in
eight random digits), so records that share it at one instance are one request. The id without its ending is the client's id at
the front end. It leads from those records to the proxy's exchange or the engine's span of the same instance, where the time fits
and only one fits.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from handrail.records import EngineRequest, Exchange, LogFact
from handrail_collector.stitch.evidence import Evidence

SLACK_NS: Final = 50_000_000
"""How far a record of an engine may lie outside of the exchange or span that contains it."""

_FRONT: Final = "|key:"

CROWD: Final = 64
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


class EngineIndex:
    """An index of evidence by its ``engine_keys``."""

    def __init__(self) -> None:
        self._table: dict[str, dict[str, Evidence]] = {}

    def add(self, evidence: Evidence) -> None:
        """Add evidence."""
        for key in evidence.engine_keys:
            self._table.setdefault(key, {})[evidence.span] = evidence

    def drop(self, evidence: Evidence) -> None:
        """Remove evidence."""
        for key in evidence.engine_keys:
            found = self._table.get(key)
            if found is not None:
                found.pop(evidence.span, None)
                if not found:
                    del self._table[key]

    def same(self, evidence: Evidence) -> list[Evidence]:
        """Return other evidence with the same engine request id."""
        return [e for key in evidence.engine_keys if _FRONT not in key for e in self._at(key) if e.span != evidence.span]

    def inside(self, evidence: Evidence) -> list[Evidence]:
        """Return the engine's records that this exchange or engine span may contain."""
        return [e for e in self._front(evidence) if not _is_front(e) and _holds(evidence, e)] if _is_front(evidence) else []

    def around(self, evidence: Evidence) -> list[Evidence]:
        """Return the exchanges and engine spans that may contain this engine record."""
        return [e for e in self._front(evidence) if _is_front(e) and _holds(e, evidence)] if not _is_front(evidence) else []

    def _front(self, evidence: Evidence) -> list[Evidence]:
        return [e for key in evidence.engine_keys if _FRONT in key for e in self._at(key)]

    def _at(self, key: str) -> list[Evidence]:
        found = self._table.get(key, {})
        return list(found.values()) if len(found) <= CROWD else []


def _is_front(evidence: Evidence) -> bool:
    return isinstance(evidence.record, Exchange | EngineRequest)


def _holds(front: Evidence, inner: Evidence) -> bool:
    """Whether ``front`` contains ``inner`` in time.

    Times are compared only on one host. A log fact may outlive its request: it must only end after ``front`` began.
    """
    if front.record.process.host != inner.record.process.host:
        return True
    start, end = front.start_unix_ns, front.end_unix_ns
    if isinstance(inner.record, LogFact):  # log timestamps have a resolution of a second
        return not start or inner.record.last_unix_ns + inner.record.resolution_ns + SLACK_NS >= start
    if not start or end is None:
        return True
    return start - SLACK_NS <= inner.start_unix_ns <= end + SLACK_NS
