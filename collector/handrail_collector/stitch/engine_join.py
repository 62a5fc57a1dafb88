"""What belongs to one request because one engine says so: the same id in the engine's own form, at the same instance.

The engine's own id is unique within its life (vLLM ends it in eight random digits), so records that share it are one request.
What is left of it at the front end is the client's: it leads from those records to the proxy's exchange or the engine's span of
the same instance, where the time fits and no second one does.
"""

from __future__ import annotations

from handrail.records import EngineRequest, Exchange, LogFact
from handrail_collector.stitch.evidence import Evidence
from handrail_collector.stitch.index import CROWD

SLACK_NS = 50_000_000
_FRONT = "|key:"


class EngineIndex:
    """Evidence by its ``engine_keys``."""

    def __init__(self) -> None:
        self._table: dict[str, dict[str, Evidence]] = {}

    def add(self, evidence: Evidence) -> None:
        """Take it in."""
        for key in evidence.engine_keys:
            self._table.setdefault(key, {})[evidence.span] = evidence

    def drop(self, evidence: Evidence) -> None:
        """Forget it."""
        for key in evidence.engine_keys:
            found = self._table.get(key)
            if found is not None:
                found.pop(evidence.span, None)
                if not found:
                    del self._table[key]

    def same(self, evidence: Evidence) -> list[Evidence]:
        """Others of the same request by the engine's own id."""
        return [e for key in evidence.engine_keys if _FRONT not in key for e in self._at(key) if e.span != evidence.span]

    def inside(self, evidence: Evidence) -> list[Evidence]:
        """What the engine said that this exchange or engine span may hold."""
        return [e for e in self._front(evidence) if not _is_front(e) and _holds(evidence, e)] if _is_front(evidence) else []

    def around(self, evidence: Evidence) -> list[Evidence]:
        """The exchanges and engine spans that may hold what the engine said."""
        return [e for e in self._front(evidence) if _is_front(e) and _holds(e, evidence)] if not _is_front(evidence) else []

    def _front(self, evidence: Evidence) -> list[Evidence]:
        return [e for key in evidence.engine_keys if _FRONT in key for e in self._at(key)]

    def _at(self, key: str) -> list[Evidence]:
        found = self._table.get(key, {})
        return list(found.values()) if len(found) <= CROWD else []


def _is_front(evidence: Evidence) -> bool:
    return isinstance(evidence.record, Exchange | EngineRequest)


def _holds(front: Evidence, inner: Evidence) -> bool:
    """By time, where both are of one host; of what outlives a request only that it began after it."""
    if front.record.process.host != inner.record.process.host:
        return True
    start, end = front.start_unix_ns, front.end_unix_ns
    if isinstance(inner.record, LogFact):  # stamped by the second
        return not start or inner.record.last_unix_ns + inner.record.resolution_ns + SLACK_NS >= start
    if not start or end is None:
        return True
    return start - SLACK_NS <= inner.start_unix_ns <= end + SLACK_NS
