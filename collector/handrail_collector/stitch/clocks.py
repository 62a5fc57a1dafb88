"""Offset intervals between hosts, learned from calls whose caller and callee are both known."""

from __future__ import annotations

from dataclasses import dataclass, field

from handrail.clocks import OffsetInterval, from_call
from handrail.records import Exchange, Outcome
from handrail_collector.stitch.evidence import Evidence

HEARD_OUT = frozenset({Outcome.OK, Outcome.INCOMPLETE, Outcome.UNKNOWN_FINISH})
"""Outcomes of a caller whose end is after the callee's."""


@dataclass(slots=True)
class HostClocks:
    """One interval a pair of hosts (caller's host, callee's host). Bounded: the pairs of a fleet, at most ``max_pairs``."""

    max_pairs: int = 4096
    _pairs: dict[tuple[str, str], OffsetInterval] = field(default_factory=dict)

    def offset(self, ours: Evidence, theirs: Evidence) -> OffsetInterval | None:
        """``theirs`` minus ``ours``: None when they share a clock, an interval open on both sides when nothing is known."""
        a, b = ours.record.process.host, theirs.record.process.host
        if a and a == b:
            return None
        known = self._pairs.get((a, b))
        if known is None:
            return OffsetInterval(None, None, ours.received_unix_ns)
        return known.aged(max(known.at_unix_ns, ours.end_unix_ns or 0))

    def related(self, ours: Evidence, theirs: Evidence) -> bool:
        """Whether times of the two can be compared at all: one clock, or an offset that evidence has bounded."""
        offset = self.offset(ours, theirs)
        return offset is None or offset.width_ns is not None

    def learn(self, caller: Evidence, callee: Evidence) -> bool:
        """Use one call; whether it contradicts what was known. Then a clock was stepped: the newest evidence starts anew.

        A caller that did not hear the callee out (a client left, a time limit) says when the call was sent and nothing of when
        it was answered: what is called may go on long after (case G04).
        """
        a, b = caller.record.process.host, callee.record.process.host
        outer, inner = caller.interval, callee.interval
        if not a or not b or a == b or outer is None or inner is None:
            return False
        seen = from_call(outer[0], outer[1], inner[0], inner[1])
        if not (isinstance(caller.record, Exchange) and caller.record.outcome in HEARD_OUT):
            seen = OffsetInterval(None, seen.high_ns, seen.at_unix_ns)
        if seen.contradictory:
            return False
        known = self._pairs.get((a, b))
        both = known.narrowed(seen) if known else seen
        stepped = both.contradictory
        if stepped:
            both = seen
        self._pairs.pop((a, b), None)
        self._pairs[a, b] = both  # at the end: the least recently learned pair goes first
        if len(self._pairs) > self.max_pairs:
            del self._pairs[next(iter(self._pairs))]
        return stepped

    def intervals(self) -> dict[tuple[str, str], OffsetInterval]:
        """A copy, for metrics and for the trace's note."""
        return dict(self._pairs)
