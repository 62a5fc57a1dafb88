"""Bound the clock offset of each pair of hosts by causality.

An event on one host that caused an event on another host came before it: that bounds their offset from one side. Calls and KV
hand-offs bound it from both sides. Only evidence narrows an interval.
Bounds loosen with time because two clocks may drift apart (``bounds.py``). A bound that contradicts the other side means that a
clock was stepped; the newest evidence then starts anew.
Hosts without a direct message are related through a third host that exchanged messages with both.
Spans are never moved.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

from handrail.clock_offset import DRIFT_PPM, OffsetInterval
from handrail.records import Direction, KvFetch, KvPublish
from handrail_collector.stitch import happens_before
from handrail_collector.stitch.bounds import OffsetLine
from handrail_collector.stitch.evidence import Evidence, connector_key
from handrail_collector.stitch.group import RequestGroup
from handrail_collector.stitch.happens_before import Event

MAX_THROUGH: Final = 16
"""Most intermediate hosts that one relation is searched through."""

MAX_BACK: Final = 1024
"""Most hand-offs from D back to P of which only one side has arrived."""


@dataclass(slots=True)
class HostClocks:
    """The offset intervals of the fleet's pairs of hosts.

    At most ``max_pairs``; the pair with the oldest evidence is dropped first.
    """

    max_pairs: int = 4096
    _pairs: dict[tuple[str, str], OffsetLine] = field(default_factory=dict)  # a < b
    _spoke: dict[str, dict[str, None]] = field(default_factory=dict)
    _back: dict[str, tuple[Evidence | None, Evidence | None]] = field(default_factory=dict)  # kept, read; by connector key

    # --- queries ---------------------------------------------------------------------------------------------------------

    def offset(self, ours: Evidence, theirs: Evidence) -> OffsetInterval | None:
        """Return ``theirs`` minus ``ours``, as an interval.

        None when both share a clock; an interval open on both sides when nothing is known.
        """
        at = ours.end_unix_ns or ours.received_unix_ns
        return self.between(ours.record.process.host, theirs.record.process.host, at)

    def between(self, a: str, b: str, at_unix_ns: int) -> OffsetInterval | None:
        """Return the clock of host ``b`` minus that of ``a``, at a time on ``a``'s clock.

        The result is as in ``offset``.
        """
        if a and a == b:
            return None
        found = self._direct(a, b, at_unix_ns)
        for through in islice((h for h in self._spoke.get(a, ()) if h in self._spoke.get(b, ())), MAX_THROUGH):
            one = self._direct(a, through, at_unix_ns)
            two = _apart(self._direct(through, b, at_unix_ns + _middle(one)), _slack(one))
            both = found.narrowed(OffsetInterval(_sum(one.low_ns, two.low_ns), _sum(one.high_ns, two.high_ns), at_unix_ns))
            found = found if both.contradictory else both
        return found

    def related(self, ours: Evidence, theirs: Evidence) -> bool:
        """Whether times of the two can be compared.

        They can with one clock, or with an offset that evidence bounds on both sides.
        """
        offset = self.offset(ours, theirs)
        return offset is None or offset.width_ns is not None

    def intervals(self) -> dict[tuple[str, str], OffsetInterval]:
        """Return the offset interval of every pair that exchanged messages.

        Each is as of the pair's newest evidence and uses all hosts that relate the two. For metrics and the table of pairs.
        """
        known = {(a, b): self.between(a, b, line.newest_ns) for (a, b), line in self._pairs.items()}
        return {pair: interval for pair, interval in known.items() if interval is not None}

    # --- learning --------------------------------------------------------------------------------------------------------

    def before(self, cause: Event, effect: Event) -> bool:
        """Learn that ``cause`` came before ``effect``: a message went between them.

        Returns whether that contradicts what was known: a clock was stepped, or evidence was joined wrongly.
        """
        (a, sent), (b, received) = cause, effect
        if not a or not b or a == b:
            return False
        if a < b:
            return not self._of(a, b).add(1, sent, received - sent)
        return not self._of(b, a).add(-1, received, sent - received)

    def learn(self, caller: Evidence, callee: Evidence) -> bool:
        """Learn from one call.

        Returns whether it contradicts what was known, as ``before``.
        """
        if caller.ahead or callee.ahead:
            return False
        stepped = [self.before(cause, effect) for cause, effect in happens_before.of_call(caller, callee)]
        return any(stepped)

    def learn_request(self, group: RequestGroup) -> None:
        """Learn from all other cause-and-effect pairs in a request's evidence.

        Evidence that contradicts what was known is marked in the group.
        """
        evidence = [each for each in group.evidence if not each.ahead]
        reports = [*happens_before.within(evidence), *self._taken_back(evidence)]
        contradicting = {reported_evidence.span_id for reported_evidence, cause, effect in reports if self.before(cause, effect)}
        group.contradicting |= contradicting

    def _taken_back(self, evidence: Sequence[Evidence]) -> Iterator[tuple[Evidence, Event, Event]]:
        """Yield cause and effect for KV that D kept and P reads for the next turn.

        The two sides belong to two requests, which are decided at two times, and each perhaps again.
        """
        for each in evidence:
            record = each.record
            keeps = isinstance(record, KvPublish)
            if isinstance(record, KvPublish):
                keys = connector_key(record.engine_id, record.request_id)
            elif isinstance(record, KvFetch):
                keys = connector_key(record.peer_engine_id, record.peer_request_id)
            else:
                continue
            for key in keys if record.direction is Direction.D_TO_P else ():
                kept, read = self._back.pop(key, (None, None))
                kept, read = (each, read) if keeps else (kept, each)
                self._back[key] = kept, read
                if len(self._back) > MAX_BACK:
                    del self._back[next(iter(self._back))]
                if kept is not None and read is not None:
                    yield from ((read, cause, effect) for cause, effect in happens_before.of_transfer(kept, read))

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
        pair = self._pairs.get((a, b) if a < b else (b, a))
        if pair is None:
            return OffsetInterval(None, None, at_unix_ns)
        if a < b:
            return pair.at(at_unix_ns)
        found = pair.at(at_unix_ns - _middle(pair.at(at_unix_ns)))  # the stored line uses times on b's clock
        return _apart(OffsetInterval(_minus(found.high_ns), _minus(found.low_ns), at_unix_ns), _slack(found))


def _middle(offset: OffsetInterval) -> int:
    """Return the middle of the interval, the likeliest offset; 0 where it is unknown."""
    known = [bound for bound in (offset.low_ns, offset.high_ns) if bound is not None]
    return sum(known) // len(known) if known else 0


def _sum(one: int | None, two: int | None) -> int | None:
    return None if one is None or two is None else one + two


def _minus(value: int | None) -> int | None:
    return None if value is None else -value


def _slack(offset: OffsetInterval) -> int:
    """Return how much another offset may drift within this one's uncertainty, in ns.

    Needed when a time is moved to another clock by this offset.
    """
    return (offset.width_ns or 0) * DRIFT_PPM // 1_000_000 + 1


def _apart(offset: OffsetInterval, by_ns: int) -> OffsetInterval:
    low, high = offset.low_ns, offset.high_ns
    return OffsetInterval(None if low is None else low - by_ns, None if high is None else high + by_ns, offset.at_unix_ns)
