"""Join evidence into requests.

Joins, strongest first: ancestor spans, and what one engine reported, at once; connector keys and request keys later.
A trace id alone joins nothing, because one agent trace holds many concurrent calls. Two edge exchanges are never one request.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from handrail.clock_offset import contains
from handrail.identity import JoinKind
from handrail.records import Exchange, Finding, Hint
from handrail_collector.stitch.clocks import HostClocks
from handrail_collector.stitch.evidence import Evidence
from handrail_collector.stitch.group import AMBIGUOUS, Closing, GroupState, RequestGroup
from handrail_collector.stitch.index import EngineIndex, Index

SLACK_NS: Final = 50_000_000
"""How long after its caller's end a callee may stamp its own end.

A proxy passes the last bytes on before it accounts for them.
"""

MOST_FOREIGN: Final = 16
"""Longest chain of foreign spans that a join crosses; no serving stack has a longer one."""


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


class Joins:
    """The evidence of one shard's requests, by everything that joins it.

    The stitcher owns it.
    ``absorbed`` is called with a group and the group that has just become a part of it.
    """

    def __init__(
        self, stats: StitchStats, clocks: HostClocks, max_links: int, absorbed: Callable[[RequestGroup, RequestGroup], None]
    ) -> None:
        self._stats = stats
        self._clocks = clocks
        self._max_links = max_links
        self._absorbed = absorbed
        self._by_span: dict[str, RequestGroup] = {}
        self._waiting = Index()  # parent span not seen yet -> evidence below it
        self._waits_for: dict[str, str] = {}  # the other way round
        self._links: OrderedDict[str, str] = OrderedDict()  # foreign span -> its parent, to follow chains through
        self._published = Index()  # connector key -> P's evidence that it published the KV
        self._reading = Index()  # connector key -> D's evidence that it was to read the KV
        self._by_key = Index()  # request key -> evidence that carries it
        self._engines = EngineIndex()

    def group_of(self, span: str) -> RequestGroup | None:
        """Return the group with the evidence of this span."""
        return self._by_span.get(span)

    def add(self, group: RequestGroup, evidence: Evidence) -> RequestGroup:
        """Join ``group``, made of one new piece of evidence.

        Returns the group that it is part of afterwards.
        """
        self.enter(group, evidence)
        group = self._join_ancestors(group, evidence)
        group = self._join_in_engine(group, evidence)
        for one in group.evidence:  # span context confirms what a weaker join added before
            if one.how is not JoinKind.ANCESTOR and one is not group.edge and self._by_span.get(one.parent) is group:
                one.how = JoinKind.ANCESTOR
        return group

    def enter(self, group: RequestGroup, evidence: Evidence) -> None:
        """Make evidence of ``group`` known by its span and keys."""
        self._by_span[evidence.span] = group
        self._enter_keys(evidence)

    def replace(self, group: RequestGroup, old: Evidence, new: Evidence) -> RequestGroup:
        """Replace the evidence of one span by a later state.

        Returns the group that it is part of afterwards.
        """
        self._leave_keys(old)
        self._enter_keys(new)
        if new.parent and new.parent != old.parent:
            if (waited := self._waits_for.pop(new.span, None)) is not None:
                self._waiting.drop((waited,), new.span)
            group = self._await_parent(group, new.span, new.parent)
        return group

    def forget(self, group: RequestGroup) -> None:
        """Forget all evidence of ``group``."""
        for evidence in group.evidence:
            self._by_span.pop(evidence.span, None)
            self._leave_keys(evidence)
            if (parent := self._waits_for.pop(evidence.span, None)) is not None:
                self._waiting.drop((parent,), evidence.span)

    def _enter_keys(self, evidence: Evidence) -> None:
        self._by_key.add(evidence.keys, evidence.span)
        self._published.add(evidence.connector_out, evidence.span)
        self._reading.add(evidence.connector_in, evidence.span)
        self._engines.add(evidence)

    def _leave_keys(self, evidence: Evidence) -> None:
        self._by_key.drop(evidence.keys, evidence.span)
        self._published.drop(evidence.connector_out, evidence.span)
        self._reading.drop(evidence.connector_in, evidence.span)
        self._engines.drop(evidence)

    def _named(self, spans: Iterable[str]) -> list[RequestGroup]:
        """Return the groups of these spans, each once."""
        return list({id(g): g for g in map(self._by_span.__getitem__, spans)}.values())

    def edges_of(self, evidence: Evidence) -> list[RequestGroup]:
        """Return the requests with an edge that share a request key with this evidence."""
        return [g for key in evidence.keys for g in self._named(self._by_key.spans(key)) if g.edge is not None]

    # --- ancestors -------------------------------------------------------------------------------------------------------

    def link(self, span: str, parent: str) -> Iterator[RequestGroup]:
        """Remember a foreign span's parent, so that parent chains can cross it.

        Bounded; oldest out. Yields each group that grows by it.
        """
        self._links[span] = parent
        if len(self._links) > self._max_links:
            self._links.popitem(last=False)
            self._stats.links_dropped += 1
        for child in self._waiting.take(span):
            group = self._by_span[child]
            size = len(group.evidence)
            group = self._await_parent(group, child, parent)
            if len(group.evidence) != size:
                yield group

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
            group = self._union(group.root, self._by_span[other.span], JoinKind.ENGINE_ID)
        for inner in (evidence, *self._engines.inside(evidence)):
            fronts = self._named(e.span for e in self._engines.around(inner))
            if len(fronts) == 1:
                group = self._union(fronts[0], self._by_span[inner.span], JoinKind.ENGINE_ID)
        return self._by_span[evidence.span]

    def _await_parent(self, group: RequestGroup, span: str, parent: str) -> RequestGroup:
        """Join ``group`` to the request of this parent span, or wait for the parent.

        ``span`` is the evidence in ``group`` that has the parent.
        """
        for _ in range(MOST_FOREIGN):
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
        self._stats.joins[how.value] += len(gone.evidence)
        self._stats.merged_after_decision += keep.row_id is not None and gone.row_id is not None
        keep.absorb(gone)
        self._absorbed(keep, gone)
        if keep.edge is not None and how is not JoinKind.REQUEST_KEY:  # an id alone is too weak to bound clocks
            for evidence in gone.evidence:
                if evidence.within_request and self._clocks.learn(keep.edge, evidence):
                    keep.contradicting |= {evidence.span_id}
        return keep

    # --- connector keys and request keys ---------------------------------------------------------------------------------

    def by_keys(self, group: RequestGroup, *, final: bool) -> None:
        """Join ``group`` by connector key and request key, where the times allow it.

        Ambiguity becomes a finding only when the decision is ``final``: later evidence may still resolve it.
        """
        self._join_connectors(group)
        if group.merged_into is None and group.edge is not None:
            self._join_by_key(group, group.edge, final)

    def finally_by_keys(self, group: RequestGroup) -> RequestGroup:
        """Join ``group`` by its keys, right before its decision.

        It may become the inner part of a request.
        Returns the group that it is part of after that.
        """
        self.by_keys(group, final=True)
        group = group.root
        if group.edge is None:
            for edge_group in {id(g): g for e in group.evidence for g in self.edges_of(e)}.values():
                if group.merged_into is None and edge_group.edge is not None:
                    self._join_by_key(edge_group, edge_group.edge, final=edge_group.state is GroupState.DECIDED)
        return group.root

    def _join_connectors(self, group: RequestGroup) -> None:
        for evidence in list(group.evidence):
            for key in evidence.connector_in:
                for other in self._named(self._published.spans(key)):
                    if other is not group.root:
                        self._match_connector(group.root, other, evidence, key)
            for key in evidence.connector_out:
                for other in self._named(self._reading.spans(key)):
                    if other is not group.root:
                        reader = next(e for e in other.evidence if key in e.connector_in)
                        self._match_connector(group.root, other, reader, key)

    def _match_connector(self, group: RequestGroup, other: RequestGroup, reader: Evidence, key: str) -> None:
        """Join the publisher's and the reader's request for one connector key.

        ``reader`` was to read what ``key`` names. Where other evidence disagrees, nothing is joined; some cases add a finding.
        """
        publisher_group, reader_group = (other, group) if reader in group.evidence else (group, other)
        publisher = next((e for e in publisher_group.evidence if key in e.connector_out), None)
        if publisher is None:
            return
        if publisher_group.edge is not None and reader_group.edge is not None:
            self._find(reader_group, "wrong_request", "D read KV that P published for another request", publisher, reader)
            return
        taken = next((e for e in publisher_group.evidence if key in e.connector_in), None)
        if (
            taken is not None
            and taken is not reader
            and not _one_reader(taken, reader)
            and not set(publisher.keys) & set(reader.keys)
        ):
            self._find(reader_group, "wrong_request", "D read KV again that another request had already read", publisher, reader)
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
                self._find(
                    group, "request_id_reused", "very many open requests share one request id: it joins none of them", edge
                )
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
                guessing = twice or not self._clocks.related(edge, first)
                if (guessing and labels.count(first.label) > 1) or any(self._group_within(r, other, 0) for r in rivals):
                    if final:
                        self._find(group, AMBIGUOUS, f"{first.label} fits several requests", first)
                elif guessing and not final:
                    continue  # with unrelated clocks it may belong to the next request of this id: wait for that
                else:
                    if not self._clocks.related(edge, first):
                        self._find(group, "clocks_unknown", f"{first.label} joined only by its id", first)
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
        return contains(outer, inner_interval, self._clocks.offset(edge, inner))

    def _find(self, group: RequestGroup, kind: str, detail: str, *evidence: Evidence) -> None:
        finding = Finding(kind, detail, tuple(e.span for e in evidence))
        if finding not in group.findings:
            group.findings.append(finding)


def _one_reader(one: Evidence, two: Evidence) -> bool:
    """Whether both records show one read: the proxy's request at D, and D's own fetch."""
    return one.record.process.instance == two.record.process.instance and bool(set(one.keys) & set(two.keys))


def _keys_of(group: RequestGroup) -> tuple[set[str], set[str]]:
    """Return the connector keys that the group published and those it was to read."""
    return {k for e in group.evidence for k in e.connector_out}, {k for e in group.evidence for k in e.connector_in}
