"""What is known of one request so far: the evidence that was joined, and what was said of it already."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from handrail.records import EngineRequest, EngineTimes, Exchange, Finding, Role, RouterCall
from handrail_collector.stitch.evidence import Evidence

AMBIGUOUS = "ambiguous_request_id"
"""Finding: evidence that fits several requests was not joined to this one."""


class GroupState(str, Enum):
    """Where a group is in its life."""

    OPEN = "open"
    DECIDED = "decided"  # its row is out; late evidence makes a new version


class Closing(str, Enum):
    """Why a request was decided when it was; becomes a metric label."""

    COMPLETE = "complete"  # every process known to report has reported
    WAITED = "waited"  # evidence that was expected did not come in time
    ORPHAN = "orphan"  # nobody claimed it for as long as a request may be open
    EVICTED = "evicted"  # memory or journal bound
    LATE = "late"  # a new version after late evidence


_OPENERS = (Role.EDGE, Role.ROUTER, Role.DECODE, Role.COLLOCATED, Role.UNKNOWN, Role.PREFILL)


@dataclass(slots=True)
class GroupCounts:
    """What was counted of a request, so that of its row's next version only what is new counts.

    ``edge``: complete or not, as a request of an edge; None: not counted as one yet. ``joins``: span ids of the evidence whose
    joins were; ``findings``: kinds; ``ambiguous``: how many of that kind.
    """

    phases: bool = False
    joined: bool = False
    stalls: bool = False
    edge: bool | None = None
    joins: frozenset[str] = frozenset()
    findings: frozenset[str] = frozenset()
    ambiguous: int = 0

    def merge(self, other: GroupCounts) -> None:
        """What was counted of either part was counted of the whole."""
        self.phases |= other.phases
        self.joined |= other.joined
        self.stalls |= other.stalls
        self.edge = other.edge if self.edge is None else self.edge  # two edges are never one request
        self.joins |= other.joins
        self.findings |= other.findings
        self.ambiguous = max(self.ambiguous, other.ambiguous)


@dataclass(slots=True, eq=False)
class RequestGroup:
    """Evidence of one request. Owned by the stitcher; nothing outside changes it."""

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
    stalls_reported: bool = False  # rows of its stalls are out
    superseded: list[tuple[str, str, int]] = field(default_factory=list)
    """Rows (trace id, request id, version) that were told of parts of this request and are to be withdrawn."""
    findings: list[Finding] = field(default_factory=list)
    merged_into: RequestGroup | None = None

    def role(self, *roles: Role) -> list[Evidence]:
        """Evidence of these roles, in order of arrival here."""
        return [e for e in self.evidence if e.role in roles]

    @property
    def identity(self) -> tuple[str, str]:
        """Trace id and request id of its row: what was said once stays; before that, of the evidence that opens it.

        Without an edge D's evidence opens it before P's, a proxy's before an engine's.
        """
        if self.row_id is not None:
            return self.row_id
        opener = self.edge or min(
            self.evidence, key=lambda e: (not e.trace_id, _OPENERS.index(e.role), _openness(e), e.offset, e.span)
        )
        return opener.trace_id, opener.span_id

    @property
    def is_request(self) -> bool:
        """Somebody saw a request; else there is a fetch, kept KV or a line of a log that nobody has claimed."""
        return any(isinstance(e.record, Exchange | EngineRequest | EngineTimes | RouterCall) for e in self.evidence)

    @property
    def only_facts(self) -> bool:
        """Lines of logs about a request that nobody has told of."""
        return all(not e.trace_id for e in self.evidence)

    @property
    def sources(self) -> set[tuple[Role, str]]:
        """Which sources have said all of this request that they say, as (role, source)."""
        return {(e.role, e.record.source.value) for e in self.evidence if e.tells_end}

    def has_decode_exchange(self) -> bool:
        """Whether a proxy beside D saw this request."""
        return any(isinstance(e.record, Exchange) for e in self.role(Role.DECODE, Role.COLLOCATED))

    def alone_at_prefill(self) -> bool:
        """Whether all evidence is of a prefill: its decode, and an edge, may come minutes later."""
        return all(e.role is Role.PREFILL for e in self.evidence)


def _openness(evidence: Evidence) -> int:
    """An exchange opens a request rather than an engine's span, that rather than the plugin's records."""
    if isinstance(evidence.record, Exchange):
        return 0
    if isinstance(evidence.record, EngineRequest | RouterCall):
        return 1
    return 2 if isinstance(evidence.record, EngineTimes) else 3
