"""Join one request's evidence inside one engine by the engine's request id.

The engine's own id is unique within the engine's life (vLLM ends it in eight random digits), so records that share it at one
instance are one request.
The id without its ending is the client's id at the front end. It leads from those records to the proxy's exchange or the
engine's span of the same instance, where the time fits and only one fits.
"""

from __future__ import annotations

from handrail.records import EngineRequest, Exchange, LogFact
from handrail_collector.stitch.evidence import Evidence
from handrail_collector.stitch.index import CROWD

SLACK_NS = 50_000_000
_FRONT = "|key:"


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
