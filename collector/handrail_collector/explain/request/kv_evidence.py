"""One hand-off with everything that is known about it, and the verdict on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from handrail.kv_outcomes import FetchOutcome
from handrail.records import Exchange, KvFetch, LogFact, LogKind, Outcome, ProcessEvent, Source
from handrail_collector.explain.request.kv_handoff import KvHandoff
from handrail_collector.explain.request.path import Path
from handrail_collector.stitch.engines import LinkFault

HUNG_NS: Final = 60 * 10**9
"""A fetch that is open for longer is hung, unless the configuration says otherwise."""

ANSWERED: Final = frozenset({Outcome.OK, Outcome.INCOMPLETE, Outcome.UNKNOWN_FINISH, Outcome.TRUNCATED})


@dataclass(frozen=True, slots=True)
class KvOutcome:
    """``evidence``: who said what, strongest first. ``tainted``: the answer rests on KV that cannot be trusted.

    ``lost_ns``: what the failure cost the request, by the reader's clock; ``late_ns``: how long after its lease KV was read.
    """

    outcome: FetchOutcome
    reason: str = ""
    evidence: tuple[str, ...] = ()
    tainted: bool = False
    lost_ns: int | None = None
    late_ns: int | None = None
    open: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class KvEvidence:
    """Everything that is known about one hand-off. ``wait_ns``: least and most that KV lay before its read began."""

    handoff: KvHandoff
    path: Path
    facts: tuple[LogFact, ...] = ()
    rests: bool = True  # the answer may rest on it: no later load of the same request is known
    wrong: str = ""  # why what was read is taken to be another request's
    lost: tuple[ProcessEvent, ...] = ()  # what happened to the two engines meanwhile
    link_fault: LinkFault | None = None
    wait_ns: tuple[int | None, int | None] = (None, None)
    lease_ns: int | None = None
    hung_ns: int = HUNG_NS

    def outcome_by(self, *kinds: LogKind) -> list[LogFact]:
        """Lines of these kinds about this request."""
        return [fact for fact in self.facts if fact.kind in kinds and fact.source is not Source.METRICS]

    def counted(self, *kinds: LogKind) -> list[LogFact]:
        """Failures of these kinds that an engine counted while no other request can have been meant."""
        return [fact for fact in self.facts if fact.kind in kinds and fact.source is Source.METRICS]

    @property
    def answer(self) -> Exchange | None:
        """What the proxy beside D saw, else the edge."""
        decode = self.path.decode
        return decode.exchange if decode is not None and decode.exchange is not None else self.path.edge

    @property
    def answered(self) -> bool:
        """Tokens came, and the answer ended as answers do; it rests on this hand-off."""
        if not self.rests:
            return False
        decode = self.path.decode
        seen = self.answer
        if seen is not None:
            return seen.outcome in ANSWERED and (seen.output_tokens != 0 or seen.ttft_token_ns is not None)
        return decode is not None and any(run.times is not None and run.times.first_token_ns is not None for run in decode.runs)


def load_went_well(fetch: KvFetch | None) -> bool:
    return fetch is not None and not load_failed(fetch) and fetch.noticed_ns is not None


def load_failed(fetch: KvFetch) -> bool:
    """The engine's policy came into play, or no rank has got its part: where only the word to P was lost, the KV is in."""
    return fetch.effect is not None or (fetch.failure is not None and not fetch.ranks_done)


_TRIED_AGAIN: Final = frozenset({FetchOutcome.FAILED, FetchOutcome.TIMED_OUT, FetchOutcome.RECOMPUTED})


def retried(verdict: KvOutcome, later: KvOutcome) -> KvOutcome:
    """Of a load before ``later`` of the same request: one that failed was tried again, if that went well."""
    if verdict.outcome not in _TRIED_AGAIN or later.outcome is not FetchOutcome.OK:
        return verdict
    return replace(verdict, outcome=FetchOutcome.RETRIED, evidence=(*verdict.evidence, *later.evidence[:1]), tainted=False)


def in_the_end(before: Sequence[KvOutcome], last: KvOutcome) -> KvOutcome:
    """What a request says of its KV: what became of its ``last`` load; ``retried`` where others had failed ``before`` it."""
    if not before or last.outcome is not FetchOutcome.OK:
        return last
    lost = [verdict.lost_ns for verdict in before if verdict.lost_ns is not None]
    return replace(before[-1], lost_ns=sum(lost) if lost else None)
