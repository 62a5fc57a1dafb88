"""Hold what is known of one request so far: joined evidence and published rows."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from handrail.records import EngineRequest, EngineTimes, Exchange, Finding, Role, RouterCall
from handrail_collector.stitch.evidence import Evidence

AMBIGUOUS = "ambiguous_request_id"
"""Finding kind: evidence fits several requests, so it was not joined to this one."""


class GroupState(str, Enum):
    """The state of a group in its life cycle."""

    OPEN = "open"
    DECIDED = "decided"  # its row is published; late evidence makes a new version


class Closing(str, Enum):
    """Why a request was decided when it was; becomes a metric label."""

    COMPLETE = "complete"  # every process known to report has reported
    WAITED = "waited"  # expected evidence did not arrive in time
    ORPHAN = "orphan"  # nothing claimed it for as long as a request may be open
    EVICTED = "evicted"  # memory or journal bound
    LATE = "late"  # a new version after late evidence


_OPENERS = (Role.EDGE, Role.ROUTER, Role.DECODE, Role.COLLOCATED, Role.UNKNOWN, Role.PREFILL)


@dataclass(slots=True)
class GroupCounts:
    """What was counted of a request already.

    A later version of the row then counts only what is new.
    ``edge``: whether it was counted as complete, as a request of an edge; None: not counted yet.
    ``joins``: span ids of the evidence whose joins were counted. ``findings``: counted kinds. ``ambiguous``: how many of that
    kind.
    """

    phases: bool = False
    joined: bool = False
    stalls: bool = False
    edge: bool | None = None
    joins: frozenset[str] = frozenset()
    findings: frozenset[str] = frozenset()
    ambiguous: int = 0

    def merge(self, other: GroupCounts) -> None:
        """Add the counts of another part of the request: counted in either is counted."""
        self.phases |= other.phases
        self.joined |= other.joined
        self.stalls |= other.stalls
        self.edge = other.edge if self.edge is None else self.edge  # two edges are never one request
        self.joins |= other.joins
        self.findings |= other.findings
        self.ambiguous = max(self.ambiguous, other.ambiguous)


@dataclass(slots=True, eq=False)
class RequestGroup:
    """The evidence of one request.

    The stitcher owns it; nothing outside changes it.
    """

    evidence: list[Evidence] = field(default_factory=list)
    edge: Evidence | None = None
    state: GroupState = GroupState.OPEN
    opened_unix_ns: int = 0
    changed: bool = False  # since the last decision
    decided_unix_ns: int = 0
    deadline_unix_ns: int = 0
    first_offset: int = 0
    row_id: tuple[str, str] | None = None  # (trace id, request id) once a row was decided
    version: int = 0
    counted: GroupCounts = field(default_factory=GroupCounts)
    contradicting: frozenset[str] = frozenset()  # span ids of the evidence that contradicts what was known of its host's clock
    stalls_reported: bool = False  # rows of its stalls are published
    superseded: list[tuple[str, str, int]] = field(default_factory=list)
    """Published rows of parts of this request that must be withdrawn.

    Each: (trace id, request id, version).
    """
    findings: list[Finding] = field(default_factory=list)
    merged_into: RequestGroup | None = None

    @property
    def root(self) -> RequestGroup:
        """The group that holds its evidence now."""
        group = self
        while group.merged_into is not None:
            group = group.merged_into
        return group

    def absorb(self, gone: RequestGroup) -> None:
        """Make ``gone`` a part of this request.

        Its published row stays: it becomes this request's row, or one that must be withdrawn.
        """
        self.evidence.extend(gone.evidence)
        self.findings.extend(gone.findings)
        self.superseded.extend(gone.superseded)
        self.stalls_reported |= gone.stalls_reported
        self.counted.merge(gone.counted)
        self.contradicting |= gone.contradicting
        self.opened_unix_ns = min(self.opened_unix_ns, gone.opened_unix_ns)
        self.first_offset = min(self.first_offset, gone.first_offset)
        if gone.row_id is not None and self.row_id is None:
            self.row_id, self.version = gone.row_id, gone.version
            self.state, self.decided_unix_ns = GroupState.DECIDED, gone.decided_unix_ns
        elif gone.row_id is not None:
            self.superseded.append((*gone.row_id, gone.version))
        gone.merged_into = self

    def role(self, *roles: Role) -> list[Evidence]:
        """Return the evidence of these roles, in order of arrival."""
        return [e for e in self.evidence if e.role in roles]

    @property
    def identity(self) -> tuple[str, str]:
        """Trace id and request id of the row.

        They stay as published. Before the first row they are those of the evidence that opens the request: the edge; without an
        edge,
        D's evidence before P's, and a proxy's before an engine's.
        """
        if self.row_id is not None:
            return self.row_id
        opener = self.edge or min(
            self.evidence, key=lambda e: (not e.trace_id, _OPENERS.index(e.role), _openness(e), e.offset, e.span)
        )
        return opener.trace_id, opener.span_id

    @property
    def is_request(self) -> bool:
        """Whether any process saw a request.

        Otherwise there is only a KV fetch, published KV or a log line that belongs to no known request.
        """
        return any(isinstance(e.record, Exchange | EngineRequest | EngineTimes | RouterCall) for e in self.evidence)

    @property
    def only_facts(self) -> bool:
        """Whether it holds only log lines about a request that nothing else reported."""
        return all(not e.trace_id for e in self.evidence)

    @property
    def sources(self) -> set[tuple[Role, str]]:
        """The (role, source) pairs that have reported all they report of this request."""
        return {(e.role, e.record.source.value) for e in self.evidence if e.tells_end}

    def has_decode_exchange(self) -> bool:
        """Whether a proxy beside D saw this request."""
        return any(isinstance(e.record, Exchange) for e in self.role(Role.DECODE, Role.COLLOCATED))

    def alone_at_prefill(self) -> bool:
        """Whether all evidence is of a prefill.

        Its decode, and an edge, may come minutes later.
        """
        return all(e.role is Role.PREFILL for e in self.evidence)


def _openness(evidence: Evidence) -> int:
    """Rank evidence by how well it opens a request; lower is better.

    An exchange comes before an engine's span, and that before the plugin's records.
    """
    if isinstance(evidence.record, Exchange):
        return 0
    if isinstance(evidence.record, EngineRequest | RouterCall):
        return 1
    return 2 if isinstance(evidence.record, EngineTimes) else 3
