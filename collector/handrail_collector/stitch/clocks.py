"""What causality allows the clocks of two hosts to differ by: an interval a pair of hosts, which only evidence may narrow.

An event on one host that caused an event on another came before it: that bounds their offset from one side. Calls and hand-offs
of KV give both sides. Bounds loosen with time as two clocks may drift apart (``bounds.py``); a bound that contradicts the other
side means that a clock was stepped, and the newest evidence starts anew. Hosts that never spoke are related through one that both
did. Spans are never moved.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

from handrail.clocks import DRIFT_PPM, OffsetInterval
from handrail.identity import JoinKind
from handrail.records import Exchange, KvFetch, KvPublish, Outcome
from handrail_collector.stitch.bounds import OffsetLine
from handrail_collector.stitch.evidence import Evidence
from handrail_collector.stitch.group import Group

HEARD_OUT: Final = frozenset({Outcome.OK, Outcome.INCOMPLETE, Outcome.UNKNOWN_FINISH})
"""Outcomes of a caller whose end is after the callee's."""

MAX_THROUGH: Final = 16
"""Hosts that a relation is looked for through."""


@dataclass(slots=True)
class HostClocks:
    """Bounded: the pairs of a fleet, at most ``max_pairs``; the pair that was learned of least lately goes first."""

    max_pairs: int = 4096
    _pairs: dict[tuple[str, str], OffsetLine] = field(default_factory=dict)  # a < b
    _spoke: dict[str, dict[str, None]] = field(default_factory=dict)

    # --- questions -------------------------------------------------------------------------------------------------------

    def offset(self, ours: Evidence, theirs: Evidence) -> OffsetInterval | None:
        """``theirs`` minus ``ours``: None when they share a clock, an interval open on both sides when nothing is known."""
        at = ours.end_unix_ns or ours.received_unix_ns
        return self.between(ours.record.process.host, theirs.record.process.host, at)

    def between(self, a: str, b: str, at_unix_ns: int) -> OffsetInterval | None:
        """Clock of host ``b`` minus that of ``a``, at a time on ``a``'s clock, as ``offset``."""
        if a and a == b:
            return None
        found = self._direct(a, b, at_unix_ns)
        for through in islice((h for h in self._spoke.get(a, ()) if h in self._spoke.get(b, ())), MAX_THROUGH):
            one = self._direct(a, through, at_unix_ns)
            two = self._direct(through, b, at_unix_ns + _middle(one))
            both = found.narrowed(OffsetInterval(_sum(one.low_ns, two.low_ns), _sum(one.high_ns, two.high_ns), at_unix_ns))
            found = found if both.contradictory else both
        return found

    def related(self, ours: Evidence, theirs: Evidence) -> bool:
        """Whether times of the two can be compared at all: one clock, or an offset that evidence has bounded."""
        offset = self.offset(ours, theirs)
        return offset is None or offset.width_ns is not None

    def intervals(self) -> dict[tuple[str, str], OffsetInterval]:
        """Every pair that spoke, as of its newest evidence: for metrics and the table of pairs."""
        return {key: line.at(line.newest_ns) for key, line in self._pairs.items()}

    # --- learning --------------------------------------------------------------------------------------------------------

    def before(self, cause: tuple[str, int], effect: tuple[str, int]) -> bool:
        """What happened at (host, wall time) ``cause`` came before ``effect``: a message went from the one to the other.

        Whether that contradicts what was known. Then a clock was stepped, or evidence was joined wrongly.
        """
        (a, sent), (b, received) = cause, effect
        if not a or not b or a == b:
            return False
        if a < b:
            return not self._of(a, b).add(1, sent, received - sent)
        return not self._of(b, a).add(-1, received, sent - received)

    def learn(self, caller: Evidence, callee: Evidence) -> bool:
        """Use one call; whether it contradicts what was known, as ``before``.

        A caller that did not hear the callee out (a client left, a time limit) says when the call was sent and nothing of when
        it was answered: what is called may go on long after (case G04).
        """
        outer, inner = caller.interval, callee.interval
        if outer is None or inner is None:
            return False
        a, b = caller.record.process.host, callee.record.process.host
        heard = isinstance(caller.record, Exchange) and caller.record.outcome in HEARD_OUT
        if heard and inner[1] - inner[0] > (outer[1] - outer[0]) * (1 + DRIFT_PPM / 1e6) + 1:
            return False  # no clock can make that fit: not one call
        stepped = self.before((a, outer[0]), (b, inner[0]))
        return (heard and self.before((b, inner[1]), (a, outer[1]))) or stepped

    def learn_handoffs(self, group: Group) -> None:
        """P's answer before D's request, P's KV kept before D reads it, D's read done before P hears of it.

        Evidence that contradicts what was known is marked in the group.
        """
        sure = [e for e in group.evidence if e.how is not JoinKind.REQUEST_KEY]
        for reader, earlier, later in _causes(sure):
            if self.before(earlier, later):
                group.contradicting |= {reader.span_id}

    def _of(self, a: str, b: str) -> OffsetLine:
        pair = self._pairs.pop((a, b), None) or OffsetLine()
        self._pairs[a, b] = pair
        self._spoke.setdefault(a, {})[b] = None
        self._spoke.setdefault(b, {})[a] = None
        if len(self._pairs) > self.max_pairs:
            one, two = next(iter(self._pairs))
            del self._pairs[one, two]
            self._spoke[one].pop(two, None)
            self._spoke[two].pop(one, None)
        return pair

    def _direct(self, a: str, b: str, at_unix_ns: int) -> OffsetInterval:
        if a < b:
            pair = self._pairs.get((a, b))
            return pair.at(at_unix_ns) if pair is not None else OffsetInterval(None, None, at_unix_ns)
        turned = self._pairs.get((b, a))
        if turned is None:
            return OffsetInterval(None, None, at_unix_ns)
        found = turned.at(at_unix_ns)  # a time on b's clock is wanted: one step of the iteration leaves a part in ten thousand
        found = turned.at(at_unix_ns + _middle(OffsetInterval(_minus(found.high_ns), _minus(found.low_ns), at_unix_ns)))
        return OffsetInterval(_minus(found.high_ns), _minus(found.low_ns), at_unix_ns)


def _causes(evidence: list[Evidence]) -> Iterator[tuple[Evidence, tuple[str, int], tuple[str, int]]]:
    """D's evidence of a hand-off, and two events of it, the cause first."""
    for keeper in evidence:
        for reader in evidence:
            if not set(keeper.connector_out) & set(reader.connector_in):
                continue
            at_p, at_d = keeper.record.process.host, reader.record.process.host
            kept, load = keeper.record, reader.record
            if isinstance(kept, Exchange) and isinstance(load, Exchange) and kept.outcome in HEARD_OUT:
                yield reader, (at_p, kept.arrival_unix_ns + kept.duration_ns), (at_d, load.arrival_unix_ns)
            if isinstance(kept, KvPublish) and isinstance(load, KvFetch) and load.mode != "push":
                if load.posted_ns is not None:
                    yield reader, (at_p, kept.published_unix_ns), (at_d, load.known_unix_ns + load.posted_ns)
                if load.done_ns is not None and kept.read_ns is not None and kept.readers == 1:
                    done = load.known_unix_ns + load.done_ns - load.done_bound_ns
                    yield reader, (at_d, done), (at_p, kept.published_unix_ns + kept.read_ns)


def _middle(offset: OffsetInterval) -> int:
    """The likeliest offset; 0 where nothing is known."""
    known = [bound for bound in (offset.low_ns, offset.high_ns) if bound is not None]
    return sum(known) // len(known) if known else 0


def _sum(one: int | None, two: int | None) -> int | None:
    return None if one is None or two is None else one + two


def _minus(value: int | None) -> int | None:
    return None if value is None else -value
