"""Join evidence into requests and decide when each request's row is made.

Joins, strongest first: ancestor spans at once; connector keys and request keys at decision time.
A trace id alone joins nothing, because one agent trace holds many concurrent calls. Two edge exchanges are never one request.
The caller passes the time in: the received time of journal entries on a replay, the clock otherwise. So a replay decides what
the first run decided.
One task owns a stitcher; nothing here locks.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from handrail.clock_offset import contains
from handrail.identity import JoinKind
from handrail.records import Exchange, Finding, Hint, KvPublish, LogFact, ProcessEvent, Role
from handrail_collector.stitch.clocks import HostClocks
from handrail_collector.stitch.engine_join import EngineIndex
from handrail_collector.stitch.engines import GONE
from handrail_collector.stitch.evidence import Evidence, Item, clean_up, evidence_of
from handrail_collector.stitch.group import AMBIGUOUS, Closing, GroupState, RequestGroup
from handrail_collector.stitch.index import Index

SECOND = 10**9

SCANNED_EACH = 32
"""Groups that a sweep may check for each decision that it may make: a decision is explained afterwards, which takes longer."""

SLACK_NS = 50_000_000
"""How long after its caller's end a callee may stamp its own end.

A proxy passes the last bytes on before it accounts for them.
"""


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


@dataclass(slots=True)
class StitchStats:
    """Counts since the start."""

    records: int = 0
    updates: int = 0
    joins: dict[str, int] = field(default_factory=lambda: {kind.value: 0 for kind in JoinKind})
    decided: dict[str, int] = field(default_factory=lambda: {closing.value: 0 for closing in Closing})
    merged_after_decision: int = 0
    clean_ups: int = 0  # requests that an engine made for itself
    links_dropped: int = 0  # links of foreign spans dropped at the limit: parent chains across them are lost


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
        self._groups: OrderedDict[int, RequestGroup] = OrderedDict()  # by id(), oldest first
        self._unswept: deque[RequestGroup] = deque()  # what an unfinished sweep has still to check
        self._first_offsets: list[tuple[int, int]] = []  # a heap of (first offset, id()), with entries of groups that are gone
        self._by_span: dict[str, RequestGroup] = {}
        self._waiting = Index()  # parent span not seen yet -> evidence below it
        self._waits_for: dict[str, str] = {}  # the other way round
        self._links: OrderedDict[str, str] = OrderedDict()  # foreign span -> its parent, to follow chains through
        self._published = Index()  # connector key -> P's evidence that it published the KV
        self._reading = Index()  # connector key -> D's evidence that it was to read the KV
        self._by_key = Index()  # request key -> evidence that carries it
        self._engines = EngineIndex()
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
        known = self._by_span.get(evidence.span)
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
        self._by_span[evidence.span] = group
        self._enter(evidence)
        group = self._join_ancestors(group, evidence)
        group = self._join_in_engine(group, evidence)
        for one in group.evidence:  # span context confirms what a weaker join added before
            if one.how is not JoinKind.ANCESTOR and one is not group.edge and self._by_span.get(one.parent) is group:
                one.how = JoinKind.ANCESTOR
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
        for edge_group in self._edges_of(evidence):
            if edge_group.state is GroupState.OPEN:
                self._touch(edge_group)
            elif group.merged_into is None:
                self._weak_joins(edge_group, final=False)

    def _edges_of(self, evidence: Evidence) -> list[RequestGroup]:
        """Return the requests with an edge that share a request key with this evidence."""
        return [g for key in evidence.keys for g in self._named(self._by_key.spans(key)) if g.edge is not None]

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
        now, group = self._clock(received_unix_ns), _root(group)
        evidence = evidence_of(fact, offset, now)
        if evidence.span not in self._by_span:
            evidence.how = JoinKind.ONLY_ONE
            self.stats.joins[evidence.how.value] += 1
            group.evidence.append(evidence)
            self._by_span[evidence.span] = group
            self._enter(evidence)
            self._touch(group)

    def link(self, span: str, parent: str, received_unix_ns: int) -> None:
        """Remember a foreign span's parent, so that parent chains can cross it.

        Bounded; oldest out.
        """
        self._clock(received_unix_ns)
        if parent:
            self._links[span] = parent
            if len(self._links) > self.settings.max_links:
                self._links.popitem(last=False)
                self.stats.links_dropped += 1
            for child in self._waiting.take(span):
                group = self._by_span[child]
                size = len(group.evidence)
                group = self._await_parent(group, child, parent)
                if len(group.evidence) != size:
                    self._touch(group)

    def _replace(self, group: RequestGroup, evidence: Evidence) -> None:
        for index, old in enumerate(group.evidence):
            if old.span == evidence.span:
                if old.record != evidence.record and _replaces(evidence, old):
                    self.stats.updates += 1
                    self._leave(old)
                    self._enter(evidence)
                    evidence.how = old.how
                    evidence.offset = min(old.offset, evidence.offset)
                    group.evidence[index] = evidence
                    if group.edge is old or (group.edge is None and _is_edge(evidence)):
                        group.edge = evidence if _is_edge(evidence) else None
                    if evidence.parent and evidence.parent != old.parent:
                        if (waited := self._waits_for.pop(evidence.span, None)) is not None:
                            self._waiting.drop((waited,), evidence.span)
                        group = self._await_parent(group, evidence.span, evidence.parent)
                    if group.state is GroupState.OPEN or not evidence.provisional:
                        self._touch(group)
                return

    def _enter(self, evidence: Evidence) -> None:
        self._by_key.add(evidence.keys, evidence.span)
        self._published.add(evidence.connector_out, evidence.span)
        self._reading.add(evidence.connector_in, evidence.span)
        self._engines.add(evidence)

    def _leave(self, evidence: Evidence) -> None:
        self._by_key.drop(evidence.keys, evidence.span)
        self._published.drop(evidence.connector_out, evidence.span)
        self._reading.drop(evidence.connector_in, evidence.span)
        self._engines.drop(evidence)

    def _named(self, spans: Iterable[str]) -> list[RequestGroup]:
        """Return the groups of these spans, each once."""
        return list({id(g): g for g in map(self._by_span.__getitem__, spans)}.values())

    # --- ancestors -------------------------------------------------------------------------------------------------------

    def _join_ancestors(self, group: RequestGroup, evidence: Evidence) -> RequestGroup:
        if evidence.parent:
            group = self._await_parent(group, evidence.span, evidence.parent)
        for child in self._waiting.take(evidence.span):
            self._waits_for.pop(child, None)
            group = self._union(group, self._by_span[child], JoinKind.ANCESTOR)
        return group

    def _join_in_engine(self, group: RequestGroup, evidence: Evidence) -> RequestGroup:
        """Join what one engine, or the proxy beside it, reported of the same request.

        It never joins two exchanges.
        """
        for other in self._engines.same(evidence):
            group = self._union(_root(group), self._by_span[other.span], JoinKind.ENGINE_ID)
        for inner in (evidence, *self._engines.inside(evidence)):
            fronts = self._named(e.span for e in self._engines.around(inner))
            if len(fronts) == 1:
                group = self._union(fronts[0], self._by_span[inner.span], JoinKind.ENGINE_ID)
        return self._by_span[evidence.span]

    def _await_parent(self, group: RequestGroup, span: str, parent: str) -> RequestGroup:
        """Join ``group`` to the request of this parent span, or wait for the parent.

        ``span`` is the evidence in ``group`` that has the parent.
        """
        for _ in range(16):  # no serving stack has a longer chain of foreign spans
            above = self._by_span.get(parent)
            if above is not None:
                self._waits_for.pop(span, None)
                return self._union(above, group, JoinKind.ANCESTOR)
            further = self._links.get(parent)
            if further is None:
                break
            parent = further
        self._waiting.add((parent,), span)
        self._waits_for[span] = parent
        return group

    def _union(self, one: RequestGroup, two: RequestGroup, how: JoinKind) -> RequestGroup:
        """Merge two groups into one and return it.

        Two edges stay two requests: the outer one caused the inner one, which is no part of it.
        A request that was already decided is decided again, because the merge changes its row.
        """
        if one is two or (one.edge is not None and two.edge is not None):
            return one
        keep, gone = (
            (one, two) if one.edge is not None or (two.edge is None and one.opened_unix_ns <= two.opened_unix_ns) else (two, one)
        )
        for evidence in gone.evidence:
            if evidence.how is JoinKind.OPENED:
                evidence.how = how
            self._by_span[evidence.span] = keep
        self.stats.joins[how.value] += len(gone.evidence)
        keep.evidence.extend(gone.evidence)
        keep.findings.extend(gone.findings)
        keep.superseded.extend(gone.superseded)
        keep.stalls_reported |= gone.stalls_reported
        keep.counted.merge(gone.counted)
        keep.contradicting |= gone.contradicting
        keep.opened_unix_ns = min(keep.opened_unix_ns, gone.opened_unix_ns)
        if gone.first_offset < keep.first_offset:
            keep.first_offset = gone.first_offset
            heapq.heappush(self._first_offsets, (keep.first_offset, id(keep)))
        if gone.row_id is not None:
            # the absorbed part has a published row: keep its identity, so that the joined row replaces it
            if keep.row_id is None:
                keep.row_id, keep.version = gone.row_id, gone.version
                keep.state, keep.decided_unix_ns = GroupState.DECIDED, gone.decided_unix_ns
            else:
                keep.superseded.append((*gone.row_id, gone.version))
                self.stats.merged_after_decision += 1
        if keep.state is GroupState.DECIDED:
            keep.changed = True
            keep.deadline_unix_ns = self._now + self.settings.settle_ns
        gone.merged_into = keep
        self._groups.pop(id(gone), None)
        if keep.edge is not None and how is not JoinKind.REQUEST_KEY:  # an id alone is too weak to bound clocks
            for evidence in gone.evidence:
                if evidence.within_request and self.clocks.learn(keep.edge, evidence):
                    keep.contradicting |= {evidence.span_id}
        return keep

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
        self._weak_joins(group, final=False)
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
        """As ``advance``, and check every deadline; O(open requests), so call it about once a second.

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
                group = self._last_joins(group)
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
        for evidence in group.evidence:
            self._by_span.pop(evidence.span, None)
            self._leave(evidence)
            if (parent := self._waits_for.pop(evidence.span, None)) is not None:
                self._waiting.drop((parent,), evidence.span)

    # --- connector keys and request keys ---------------------------------------------------------------------------------

    def _weak_joins(self, group: RequestGroup, *, final: bool) -> None:
        """Join by connector key and request key, where the times allow it.

        Ambiguity becomes a finding only when the decision is ``final``: later evidence may still resolve it.
        """
        self._join_connectors(group)
        if group.merged_into is None and group.edge is not None:
            self._join_by_key(group, group.edge, final)

    def _last_joins(self, group: RequestGroup) -> RequestGroup:
        """Try every weak join for ``group`` right before its decision.

        Returns the group that it is part of after that.
        """
        self._weak_joins(group, final=True)
        group = _root(group)
        if group.edge is None:
            for edge_group in {id(g): g for e in group.evidence for g in self._edges_of(e)}.values():
                if group.merged_into is None and edge_group.edge is not None:
                    self._join_by_key(edge_group, edge_group.edge, final=edge_group.state is GroupState.DECIDED)
        return _root(group)

    def _join_connectors(self, group: RequestGroup) -> None:
        for evidence in list(group.evidence):
            for key in evidence.connector_in:
                for other in self._named(self._published.spans(key)):
                    if other is not _root(group):
                        self._match_connector(_root(group), other, evidence, key)
            for key in evidence.connector_out:
                for other in self._named(self._reading.spans(key)):
                    if other is not _root(group):
                        reader = next(e for e in other.evidence if key in e.connector_in)
                        self._match_connector(_root(group), other, reader, key)

    def _match_connector(self, group: RequestGroup, other: RequestGroup, reader: Evidence, key: str) -> None:
        """Join the publisher's and the reader's request for one connector key.

        ``reader`` was to read what ``key`` names. Where other evidence disagrees, nothing is joined; some cases add a finding.
        """
        publisher_group, reader_group = (other, group) if reader in group.evidence else (group, other)
        publisher = next((e for e in publisher_group.evidence if key in e.connector_out), None)
        if publisher is None:
            return
        if publisher_group.edge is not None and reader_group.edge is not None:
            self._find(reader_group, "wrong_request", "the KV read here was published for another request", publisher, reader)
            return
        taken = next((e for e in publisher_group.evidence if key in e.connector_in), None)
        if (
            taken is not None
            and taken is not reader
            and not _one_reader(taken, reader)
            and not set(publisher.keys) & set(reader.keys)
        ):
            self._find(reader_group, "wrong_request", "KV read again that another request had already read", publisher, reader)
            return
        edge = publisher_group.edge or reader_group.edge
        inner = reader if publisher_group.edge is edge else publisher
        if edge is not None and not self._within(edge, inner, SLACK_NS) and not set(publisher.keys) & set(reader.keys):
            return  # neither time nor id supports it; with an equal id, the join reveals a stepped clock
        self._union(publisher_group, reader_group, JoinKind.CONNECTOR)

    def _join_by_key(self, group: RequestGroup, edge: Evidence, final: bool) -> None:
        """Join by request key.

        The other evidence must lie inside this edge's lifetime, and inside no other edge's with the same key.
        """
        twice = isinstance(edge.record, Exchange) and Hint.DUPLICATE_REQUEST_ID in edge.record.hints
        if twice and not final:
            return  # the other request's evidence may still come and make this match ambiguous
        for key in edge.keys:
            if self._by_key.crowded(key):
                self._find(group, "request_id_reused", "one request id on very many requests at once: not joined by it", edge)
                continue
            others = [g for g in self._named(self._by_key.spans(key)) if g is not group]
            if not others:
                continue
            rivals = [g.edge for g in others if g.edge is not None]
            fitting = [
                g
                for g in others
                if g.edge is None
                and (final or not self._awaits_parent(g))
                and self._key_fits(group, g)
                and self._inside(edge, rivals, g)
            ]
            labels = [e.label for e in group.evidence] + [g.evidence[0].label for g in fitting]
            for other in fitting:
                first = other.evidence[0]
                guessing = twice or not self.clocks.related(edge, first)
                if (guessing and labels.count(first.label) > 1) or any(self._group_within(r, other, 0) for r in rivals):
                    if final:
                        self._find(group, AMBIGUOUS, f"{first.label} fits several requests", first)
                elif guessing and not final:
                    continue  # with unrelated clocks it may belong to the next request of this id: wait for that
                else:
                    if not self.clocks.related(edge, first):
                        self._find(group, "clocks_unknown", f"{first.label} joined by its id alone", first)
                    self._union(group, other, JoinKind.REQUEST_KEY)

    def _awaits_parent(self, group: RequestGroup) -> bool:
        """Whether its context names a span that has not arrived yet.

        That span places the group better than a request id can.
        """
        return any(e.parent and e.parent not in self._by_span for e in group.evidence)

    def _inside(self, edge: Evidence, rivals: Sequence[Evidence], other: RequestGroup) -> bool:
        """Whether ``other`` lies strictly inside ``edge``, or within its slack only.

        Within the slack, it must lie strictly inside no rival.
        """
        if self._group_within(edge, other, 0):
            return True
        return self._group_within(edge, other, SLACK_NS) and not any(self._group_within(r, other, 0) for r in rivals)

    def _key_fits(self, group: RequestGroup, other: RequestGroup) -> bool:
        """Whether the connector keys that both sides name agree.

        The same request id with different connector keys is two requests.
        """
        published, read = _keys_of(group)
        other_published, other_read = _keys_of(other)
        return not (other_published and read and not other_published & read) and not (
            other_read and published and not other_read & published
        )

    def _group_within(self, edge: Evidence, group: RequestGroup, slack_ns: int) -> bool:
        inside = [e for e in group.evidence if e.within_request]
        return bool(inside) and all(self._within(edge, e, slack_ns) for e in inside)

    def _within(self, edge: Evidence, inner: Evidence, slack_ns: int) -> bool:
        outer_interval, inner_interval = edge.interval, inner.interval
        if outer_interval is None or inner_interval is None:
            return False
        outer = (outer_interval[0] - slack_ns, outer_interval[1] + slack_ns)
        return contains(outer, inner_interval, self.clocks.offset(edge, inner))

    def _find(self, group: RequestGroup, kind: str, detail: str, *evidence: Evidence) -> None:
        finding = Finding(kind, detail, tuple(e.span for e in evidence))
        if finding not in group.findings:
            group.findings.append(finding)

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


def _one_reader(one: Evidence, two: Evidence) -> bool:
    """Whether both records show one read: the proxy's request at D, and D's own fetch."""
    return one.record.process.instance == two.record.process.instance and bool(set(one.keys) & set(two.keys))


def _root(group: RequestGroup) -> RequestGroup:
    while group.merged_into is not None:
        group = group.merged_into
    return group


def _keys_of(group: RequestGroup) -> tuple[set[str], set[str]]:
    """Return the connector keys that the group published and those it was to read."""
    return {k for e in group.evidence for k in e.connector_out}, {k for e in group.evidence for k in e.connector_in}
