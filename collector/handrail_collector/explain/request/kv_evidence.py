"""Hold all evidence on one hand-off, and its outcome."""

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
"""How long an open KV fetch may last before it counts as hung; the default."""

ANSWERED: Final = frozenset({Outcome.OK, Outcome.INCOMPLETE, Outcome.UNKNOWN_FINISH, Outcome.TRUNCATED})


@dataclass(frozen=True, slots=True)
class KvOutcome:
    """The outcome of one hand-off.

    ``evidence``: what each source shows, strongest first. ``tainted``: the answer rests on KV that cannot be trusted.
    ``lost_ns``: what the failure cost the request, by the reader's clock; ``late_ns``: how long after its lease the KV was read.
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
    """All evidence on one hand-off.

    ``wait_ns``: the least and the most time from publish to the begin of the read.
    """

    handoff: KvHandoff
    path: Path
    facts: tuple[LogFact, ...] = ()
    rests: bool = True  # the answer may rest on it: the request has no later load
    wrong: str = ""  # why the KV that was read seems to be another request's
    lost: tuple[ProcessEvent, ...] = ()  # process events of the two engines meanwhile
    link_fault: LinkFault | None = None
    wait_ns: tuple[int | None, int | None] = (None, None)
    lease_ns: int | None = None
    hung_ns: int = HUNG_NS

    def outcome_by(self, *kinds: LogKind) -> list[LogFact]:
        """Return the log lines of these kinds about this request."""
        return [fact for fact in self.facts if fact.kind in kinds and fact.source is not Source.METRICS]

    def counted(self, *kinds: LogKind) -> list[LogFact]:
        """Return the counted failures of these kinds that only this request explains."""
        return [fact for fact in self.facts if fact.kind in kinds and fact.source is Source.METRICS]

    @property
    def answer(self) -> Exchange | None:
        """The exchange at the proxy beside D, else at the edge."""
        decode = self.path.decode
        return decode.exchange if decode is not None and decode.exchange is not None else self.path.edge

    @property
    def answered(self) -> bool:
        """Whether tokens came and the answer ended normally, based on this hand-off."""
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
    """Whether the load failed.

    True where the engine's failure policy took effect, or no rank got its part. Where only the notice to P was lost, the KV is
    there.
    """
    return fetch.effect is not None or (fetch.failure is not None and not fetch.ranks_done)


_TRIED_AGAIN: Final = frozenset({FetchOutcome.FAILED, FetchOutcome.TIMED_OUT, FetchOutcome.RECOMPUTED})


def retried(verdict: KvOutcome, later: KvOutcome) -> KvOutcome:
    """Return the outcome of a load before ``later`` of the same request.

    A failed load becomes ``retried`` if the later one succeeded.
    """
    if verdict.outcome not in _TRIED_AGAIN or later.outcome is not FetchOutcome.OK:
        return verdict
    return replace(verdict, outcome=FetchOutcome.RETRIED, evidence=(*verdict.evidence, *later.evidence[:1]), tainted=False)


def in_the_end(before: Sequence[KvOutcome], last: KvOutcome) -> KvOutcome:
    """Return the KV outcome of the whole request.

    It is that of its ``last`` load; ``retried`` where that succeeded after others in ``before`` had failed.
    """
    if not before or last.outcome is not FetchOutcome.OK:
        return last
    lost = [verdict.lost_ns for verdict in before if verdict.lost_ns is not None]
    return replace(before[-1], lost_ns=sum(lost) if lost else None)
