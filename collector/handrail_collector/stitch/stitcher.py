"""Hold the open requests of a shard, and decide when each request's row is made.

Evidence that belongs to one request is joined when it arrives, and once more by weaker keys at the decision (``joins.py``).
The caller passes the time in: the received time of journal entries on a replay, the clock otherwise. So a replay decides what
the first run decided.
One task owns a stitcher; nothing here locks.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from dataclasses import dataclass

from handrail.identity import JoinKind
from handrail.records import Exchange, KvPublish, LogFact, ProcessEvent, Role
from handrail_collector.stitch.clocks import HostClocks
from handrail_collector.stitch.engines import GONE
from handrail_collector.stitch.evidence import Evidence, Item, clean_up, evidence_of
from handrail_collector.stitch.group import Closing, GroupState, RequestGroup
from handrail_collector.stitch.joins import Joins, StitchStats

SECOND = 10**9

SCANNED_EACH = 32
"""Groups that a sweep may check for each decision that it may make: a decision is explained afterwards, which takes longer."""


@dataclass(frozen=True, slots=True)
class StitchSettings:
    """Times and limits that govern when a request is decided.

    ``engine_wait_ns``: engines export in batches (vLLM: every 5 s) after the request ended.
    """

    settle_ns: int = 2 * SECOND
    engine_wait_ns: int = 12 * SECOND
    max_open_ns: int = 3600 * SECOND
    late_window_ns: int = 120 * SECOND
    source_memory_ns: int = 600 * SECOND
    max_groups: int = 200_000
    max_links: int = 200_000


@dataclass(frozen=True, slots=True)
class Decision:
    """A group whose row is due now; again, where ``closing`` is LATE."""

    group: RequestGroup
    closing: Closing


class Stitcher:
    """The open requests of one shard."""

    def __init__(self, settings: StitchSettings | None = None) -> None:
        self.settings = settings or StitchSettings()
        self.stats = StitchStats()
        self.clocks = HostClocks()
        self._joins = Joins(self.stats, self.clocks, self.settings.max_links, self._absorbed)
        self._groups: OrderedDict[int, RequestGroup] = OrderedDict()  # by id(), oldest first
        self._unswept: deque[RequestGroup] = deque()  # what an unfinished sweep has still to check
        self._first_offsets: list[tuple[int, int]] = []  # a heap of (first offset, id()), with entries of groups that are gone
        self._seen_sources: dict[tuple[Role, str], int] = {}
        self._due: list[RequestGroup] = []
        self._first_unix_ns = 0
        self._now = 0
        self._expected: frozenset[tuple[Role, str]] = frozenset()  # sources that a request waits for; updated once a second
        self._expected_unix_ns = 0

    # --- intake ----------------------------------------------------------------------------------------------------------

    def add(self, record: Item, offset: int, received_unix_ns: int) -> None:
        """Take one record.

        The same span again is an update: the later one replaces the earlier, but a provisional one never replaces a final one.
        """
        self.stats.records += 1
        if clean_up(record):
            self.stats.clean_ups += 1
            return
        received_unix_ns = self._clock(received_unix_ns)
        self._first_unix_ns = self._first_unix_ns or received_unix_ns
        evidence = evidence_of(record, offset, received_unix_ns)
        if evidence.tells_end:
            self._seen_sources[evidence.role, record.source.value] = received_unix_ns
        known = self._joins.group_of(evidence.span)
        if known is not None:
            self._replace(known, evidence)
            return
        group = RequestGroup(
            evidence=[evidence],
            edge=evidence if _is_edge(evidence) else None,
            opened_unix_ns=received_unix_ns,
            first_offset=offset,
        )
        self._groups[id(group)] = group
        heapq.heappush(self._first_offsets, (offset, id(group)))
        group = self._joins.add(group, evidence)
        self._touch(group)
        if group.edge is None:
            self._offer(group, evidence)

    def _clock(self, given_unix_ns: int) -> int:
        """Return a time that never goes back: an earlier stamp counts as now."""
        self._now = max(self._now, given_unix_ns)
        return self._now

    def _offer(self, group: RequestGroup, evidence: Evidence) -> None:
        """Let requests retry their joins that may wait for this evidence.

        Requests that were decided without it retry too.
        """
        for edge_group in self._joins.edges_of(evidence):
            if edge_group.state is GroupState.OPEN:
                self._touch(edge_group)
            elif group.merged_into is None:
                self._joins.by_keys(edge_group, final=False)

    def engine_gone(self, event: ProcessEvent, received_unix_ns: int) -> None:
        """Shorten the wait of requests that were open in an engine that is gone.

        The engine reports nothing more about them, so they are decided soon with the evidence at hand.
        """
        if event.kind not in GONE:
            return
        now = self._clock(received_unix_ns)
        for group in self._groups.values():
            if group.state is GroupState.OPEN and any(
                e.provisional and e.record.process.instance == event.process.instance for e in group.evidence
            ):
                group.deadline_unix_ns = min(group.deadline_unix_ns, now + self.settings.settle_ns)

    def attach(self, group: RequestGroup, fact: LogFact, offset: int, received_unix_ns: int) -> None:
        """Add a log fact that names no request to the only request that it can concern."""
        now, group = self._clock(received_unix_ns), group.root
        evidence = evidence_of(fact, offset, now)
        if self._joins.group_of(evidence.span) is None:
            evidence.how = JoinKind.ONLY_ONE
            self.stats.joins[evidence.how.value] += 1
            group.evidence.append(evidence)
            self._joins.enter(group, evidence)
            self._touch(group)

    def link(self, span: str, parent: str, received_unix_ns: int) -> None:
        """Remember a foreign span's parent, so that parent chains can cross it.

        Bounded; oldest out.
        """
        self._clock(received_unix_ns)
        if parent:
            for group in self._joins.link(span, parent):
                self._touch(group)

    def _replace(self, group: RequestGroup, evidence: Evidence) -> None:
        for index, old in enumerate(group.evidence):
            if old.span == evidence.span:
                if old.record != evidence.record and _replaces(evidence, old):
                    self.stats.updates += 1
                    evidence.how = old.how
                    evidence.offset = min(old.offset, evidence.offset)
                    group.evidence[index] = evidence
                    if group.edge is old or (group.edge is None and _is_edge(evidence)):
                        group.edge = evidence if _is_edge(evidence) else None
                    group = self._joins.replace(group, old, evidence)
                    if group.state is GroupState.OPEN or not evidence.provisional:
                        self._touch(group)
                return

    def _absorbed(self, keep: RequestGroup, gone: RequestGroup) -> None:
        """Hold ``keep`` alone from now on.

        A request that was already decided is decided again, because the merge changes its row.
        """
        self._groups.pop(id(gone), None)
        if keep.first_offset == gone.first_offset:
            heapq.heappush(self._first_offsets, (keep.first_offset, id(keep)))
        if keep.state is GroupState.DECIDED:
            keep.changed = True
            keep.deadline_unix_ns = self._now + self.settings.settle_ns

    # --- deadlines -------------------------------------------------------------------------------------------------------

    def _touch(self, group: RequestGroup) -> None:
        group.changed = True
        settings, now = self.settings, self._now
        if group.state is GroupState.DECIDED:
            group.deadline_unix_ns = now + settings.settle_ns
        elif group.edge is not None:
            if self._all_reported(group, now):
                stalled = _stalled(group)
                group.deadline_unix_ns = now + (settings.settle_ns if stalled else 0)
                if not stalled:  # a stall needs the engine's activity, which arrives a little later
                    self._due.append(group)
            else:
                group.deadline_unix_ns = max(group.edge.received_unix_ns, now) + settings.engine_wait_ns
        elif group.only_facts:
            group.deadline_unix_ns = group.opened_unix_ns + settings.late_window_ns
        elif group.alone_at_prefill():
            group.deadline_unix_ns = group.opened_unix_ns + settings.max_open_ns
        else:
            group.deadline_unix_ns = now + settings.engine_wait_ns

    def _all_reported(self, group: RequestGroup, now: int) -> bool:
        """Whether every prefill and decode source that reports lately has reported."""
        if self._has_all(group, now):
            return True
        self._joins.by_keys(group, final=False)
        return self._has_all(group, now)

    def _has_all(self, group: RequestGroup, now: int) -> bool:
        if now - self._first_unix_ns < self.settings.engine_wait_ns:
            return False  # too early to know who reports at all
        if now - self._expected_unix_ns > SECOND or not self._expected:
            self._expected_unix_ns = now
            self._expected = frozenset(s for s in self.reporting(now) if s[0] in (Role.PREFILL, Role.DECODE))
        return bool(self._expected) and self._expected <= group.sources

    def advance(self, now: int) -> list[Decision]:
        """Return everything that is decided by ``now``.

        Decided groups stay for late evidence, then they are forgotten.
        """
        now = self._clock(now)
        decisions: list[Decision] = []
        due, self._due = self._due, []
        for group in due:
            # check the state for each: a group may be in the list twice
            if group.merged_into is None and group.state is GroupState.OPEN and group.deadline_unix_ns <= now:
                decisions.append(self._decide(group, Closing.COMPLETE, now))  # noqa: PERF401
        return decisions

    def sweep(self, now: int, most: int | None = None) -> list[Decision]:
        """As ``advance``, and check every deadline.

        It takes O(open requests): call it about once a second.
        With ``most`` it stops after about so many decisions, or ``SCANNED_EACH`` times as many groups, so that a caller can serve
        others in between. ``sweeping`` is true then, and the next call goes on where this one stopped.
        """
        decisions = self.advance(now)
        now = self._now
        if most is None or not self._unswept:
            self._unswept = deque(self._groups.values())
        scanned = 0
        while self._unswept:
            if most is not None and (len(decisions) >= most or scanned >= SCANNED_EACH * most):
                return decisions
            scanned += 1
            group = self._unswept.popleft()
            if self._groups.get(id(group)) is not group:  # absorbed or forgotten since
                continue
            if group.state is GroupState.DECIDED:
                if group.changed:
                    if group.deadline_unix_ns <= now:
                        decisions.append(self._decide(group, Closing.LATE, now))
                elif now - group.decided_unix_ns > self.settings.late_window_ns:
                    self._forget(group)
            elif group.deadline_unix_ns <= now:
                group = self._joins.finally_by_keys(group)
                if group.state is GroupState.OPEN:
                    decisions.append(self._decide(group, self._closing(group, now), now))
        excess = len(self._groups) - self.settings.max_groups
        if excess > 0:
            decisions.extend(self.evict(excess, now))
        return decisions

    @property
    def sweeping(self) -> bool:
        """Whether the last ``sweep`` stopped before it had checked every group."""
        return bool(self._unswept)

    def _closing(self, group: RequestGroup, now: int) -> Closing:
        if group.edge is None:
            return Closing.ORPHAN if group.alone_at_prefill() else Closing.WAITED
        return Closing.COMPLETE if _stalled(group) and self._has_all(group, now) else Closing.WAITED

    def evict(self, count: int, now: int) -> list[Decision]:
        """Decide and forget the ``count`` oldest groups, whatever they still wait for."""
        decisions = []
        for group in list(self._groups.values())[:count]:
            if group.state is GroupState.OPEN:
                decisions.append(self._decide(group, Closing.EVICTED, now))
            elif group.changed:
                decisions.append(self._decide(group, Closing.LATE, now))
            self._forget(group)
        return decisions

    def _decide(self, group: RequestGroup, closing: Closing, now: int) -> Decision:
        group.state = GroupState.DECIDED
        group.decided_unix_ns = now
        group.changed = False
        group.version += 1
        group.row_id = group.identity
        self.clocks.learn_request(group)
        self.stats.decided[closing.value] += 1
        return Decision(group, closing)

    def _forget(self, group: RequestGroup) -> None:
        self._groups.pop(id(group), None)
        self._joins.forget(group)

    # --- what is held ----------------------------------------------------------------------------------------------------

    def low_water(self) -> int | None:
        """Return the smallest journal offset that a replay needs for the held groups.

        None when nothing is held.
        """
        if len(self._first_offsets) > 2 * len(self._groups) + 1024:  # old groups keep entries in the heap
            self._first_offsets = sorted((group.first_offset, identity) for identity, group in self._groups.items())
        offsets = self._first_offsets
        while offsets:
            offset, identity = offsets[0]
            group = self._groups.get(identity)
            if group is not None and group.first_offset == offset:
                return offset
            heapq.heappop(offsets)  # forgotten or absorbed since
        return None

    def groups(self) -> list[RequestGroup]:
        """Return all held groups: open ones, and those decided recently."""
        return list(self._groups.values())

    def open_groups(self) -> list[RequestGroup]:
        """Return the groups that are not decided yet, oldest first."""
        return [g for g in self._groups.values() if g.state is GroupState.OPEN]

    def still_kept(self) -> list[Evidence]:
        """Return the evidence of KV that is published and, by the last report, still kept."""
        return [e for g in self._groups.values() for e in g.evidence if isinstance(e.record, KvPublish) and e.provisional]

    def reporting(self, now: int) -> set[tuple[Role, str]]:
        """Return the (role, source) pairs that sent evidence lately."""
        oldest = now - self.settings.source_memory_ns
        return {source for source, at in self._seen_sources.items() if at >= oldest}

    def last_reported(self) -> dict[tuple[Role, str], int]:
        """Return when each (role, source) last sent evidence, by time of receipt."""
        return dict(self._seen_sources)

    def oldest_open_unix_ns(self) -> int | None:
        """Return when the oldest open group's first evidence arrived.

        None where no group is open.
        """
        return next((g.opened_unix_ns for g in self._groups.values() if g.state is GroupState.OPEN), None)

    def __len__(self) -> int:
        return len(self._groups)


def _is_edge(evidence: Evidence) -> bool:
    return evidence.role is Role.EDGE and isinstance(evidence.record, Exchange)


def _stalled(group: RequestGroup) -> bool:
    return any(evidence.stalled for evidence in group.evidence)


def _replaces(new: Evidence, old: Evidence) -> bool:
    """Whether new evidence of the same span replaces the old.

    The later wins. A provisional state never replaces an end, nor an older revision of a log line a newer one.
    """
    if isinstance(new.record, LogFact) and isinstance(old.record, LogFact):
        return new.record.revision >= old.record.revision
    return old.provisional or not new.provisional
