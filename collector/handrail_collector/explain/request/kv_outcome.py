"""Decide the outcome of each hand-off of a request, and name the evidence for it.

Pure: a function of all joined evidence.
The order of ``_RULES`` matters: rules that make an answer untrustworthy come before failures, failures before open loads. A
hand-off is ``ok`` only where nothing contradicts it, and ``unknown`` where the evidence does not decide.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from handrail.kv_outcomes import FetchOutcome
from handrail.records import (
    ENGINE_GONE,
    ENGINE_LOST,
    ENGINE_STOPPED,
    FAILED_FETCH_KINDS,
    FetchEffect,
    KvFetch,
    LogFact,
    LogKind,
    Outcome,
    ProcessEventKind,
)
from handrail.records.log_events import COMPUTED_TOKENS, COUNTS, MIXED
from handrail_collector.explain.request.kv_handoff import (
    ANSWERED,
    KvEvidence,
    KvHandoff,
    evidence_on,
    evidence_without_records,
    handoffs,
    load_failed,
    load_went_well,
    on_path,
)
from handrail_collector.explain.request.path import Path
from handrail_collector.stitch.clocks import HostClocks
from handrail_collector.stitch.engines import EngineRegistry
from handrail_collector.stitch.group import RequestGroup

_TIMEOUT = re.compile(r"time(d)?[_ -]?out|status -80", re.I)
_EXPIRED = re.compile(r"expired|lease", re.I)
_KV_ERROR = re.compile(r"\bkv|kv_|transfer|hand_?-?off|sequence.?not.?found|disaggregat|bootstrap", re.I)
_TRIED_AGAIN: Final = frozenset({FetchOutcome.FAILED, FetchOutcome.TIMED_OUT, FetchOutcome.RECOMPUTED})


@dataclass(frozen=True, slots=True)
class KvOutcome:
    """The outcome of one hand-off.

    ``evidence``: what each source shows, strongest first. ``tainted``: the answer rests on KV that cannot be trusted.
    ``lost_ns``: what the failure cost the request, by the consumer's clock. ``late_ns``: from the end of its lease to the read.
    """

    outcome: FetchOutcome
    reason: str = ""
    evidence: tuple[str, ...] = ()
    tainted: bool = False
    lost_ns: int | None = None
    late_ns: int | None = None
    open: bool = False


@dataclass(frozen=True, slots=True)
class JudgedHandoff:
    """The evidence on a hand-off, and its outcome."""

    evidence: KvEvidence
    verdict: KvOutcome

    @property
    def handoff(self) -> KvHandoff:
        """The hand-off itself."""
        return self.evidence.handoff


@dataclass(frozen=True, slots=True)
class RequestHandoffs:
    """All hand-offs of a request.

    ``chosen``: the one that its answer rests on; None: there is no known hand-off.
    ``verdict``: the outcome of the request as a whole; that of ``chosen``, unless a load failed before it.
    """

    every: tuple[JudgedHandoff, ...]
    chosen: JudgedHandoff | None
    verdict: KvOutcome | None


Rule = Callable[[KvEvidence], KvOutcome | None]


def judge(group: RequestGroup, path: Path, engines: EngineRegistry, clocks: HostClocks, hung_ns: int) -> RequestHandoffs:
    """Decide the outcome of every hand-off of ``group``."""
    every = handoffs(path)
    chosen = on_path(path, every)
    wrong = next((f.detail or f.kind for f in group.findings if f.kind == "wrong_request"), "")
    cases = evidence_on(every, chosen, path, engines, clocks, wrong=wrong, hung_ns=hung_ns)
    judged = [JudgedHandoff(case, decide(case)) for case in cases]
    of_chosen = next((one for one in judged if one.handoff is chosen), None)
    if of_chosen is None and (path.prefills or path.handed_off or path.facts):
        case = evidence_without_records(path, engines, wrong)
        of_chosen = JudgedHandoff(case, decide(case))
    if of_chosen is None:
        return RequestHandoffs(tuple(judged), None, None)
    last = of_chosen.verdict
    judged = [
        replace(one, verdict=_retried(one.verdict, last)) if one.handoff.before(of_chosen.handoff) else one for one in judged
    ]
    before = [one.verdict for one in judged if one.verdict.outcome is FetchOutcome.RETRIED]
    return RequestHandoffs(tuple(judged), of_chosen, _in_the_end(before, last))


def _retried(verdict: KvOutcome, later: KvOutcome) -> KvOutcome:
    """Return the outcome of a load before ``later`` of the same request.

    A failed load becomes ``retried`` if the later one succeeded.
    """
    if verdict.outcome not in _TRIED_AGAIN or later.outcome is not FetchOutcome.OK:
        return verdict
    return replace(verdict, outcome=FetchOutcome.RETRIED, evidence=(*verdict.evidence, *later.evidence[:1]), tainted=False)


def _in_the_end(before: Sequence[KvOutcome], last: KvOutcome) -> KvOutcome:
    """Return the KV outcome of the whole request.

    It is that of its ``last`` load; ``retried`` where that succeeded after others in ``before`` had failed.
    """
    if not before or last.outcome is not FetchOutcome.OK:
        return last
    lost = [verdict.lost_ns for verdict in before if verdict.lost_ns is not None]
    return replace(before[-1], lost_ns=sum(lost) if lost else None)


def decide(case: KvEvidence) -> KvOutcome:
    """Return the outcome of the first rule that decides."""
    for rule in _RULES:
        verdict = rule(case)
        if verdict is not None:
            return verdict
    return KvOutcome(FetchOutcome.UNKNOWN)


def _wrong(case: KvEvidence) -> KvOutcome | None:
    return KvOutcome(FetchOutcome.WRONG_REQUEST, "other_request", (f"join: {case.wrong}",), True) if case.wrong else None


def _stale(case: KvEvidence) -> KvOutcome | None:
    publish, fetch = case.handoff.publish, case.handoff.fetch
    lines = case.outcome_by(LogKind.STALE_READ)
    evidence = [f"prefill:log stale_read ({fact.lines} lines, one request)" for fact in lines]
    late: int | None = None
    if publish is not None and publish.late_read_ns is not None:
        evidence.insert(0, "prefill:plugin read after the end of the lease")
        ended = publish.expired_ns if publish.expired_ns is not None else publish.lease_end_ns
        late = max(0, publish.late_read_ns - ended) if ended is not None else None
    if lines and late is None:
        seconds = dict(lines[0].numbers).get("since_expiry_s")
        late = round(seconds * 1e9) if seconds is not None else None
    expired = _expired(case)
    least = case.wait_ns[0]
    if (
        not evidence
        and expired
        and load_went_well(fetch)
        and least is not None
        and case.lease_ns is not None
        and least > case.lease_ns
    ):
        evidence = [
            *expired,
            f"clocks: its read began {least / 1e9:.1f} s after the publish, with a lease of {case.lease_ns / 1e9:.0f} s",
        ]
        late = least - case.lease_ns
    if not evidence:
        return None
    return KvOutcome(FetchOutcome.STALE_READ, "read_after_expiry", tuple(evidence), True, late_ns=late)


def _expired(case: KvEvidence) -> list[str]:
    publish = case.handoff.publish
    found = [f"prefill:log expired ({fact.lines} lines)" for fact in case.outcome_by(LogKind.EXPIRED)]
    found += [_counted_words(fact) for fact in case.counted(LogKind.EXPIRED)]
    if publish is not None and publish.expired_ns is not None:
        found.insert(0, f"prefill:plugin lease ended after {publish.expired_ns / 1e9:.1f} s, {publish.readers} readers")
    return found


def _expired_first(case: KvEvidence) -> bool:
    """Whether P freed the blocks before the read began, whatever the clocks' offset.

    Then the lease ended first, and not because the read failed.
    """
    publish, least = case.handoff.publish, case.wait_ns[0]
    ended = publish.expired_ns if publish is not None else case.lease_ns if case.outcome_by(LogKind.EXPIRED) else None
    return ended is not None and least is not None and least >= ended


def _left(case: KvEvidence) -> KvOutcome | None:
    """Return ``aborted`` where the request was aborted while its load was open.

    What happens to the load after that affects no request.
    This holds even where P reports a late read: D's clean-up tells P to free the blocks during the transfer (vLLM 0.32).
    """
    fetch = case.handoff.fetch
    if fetch is None or fetch.request_status != "aborted" or fetch.effect is not None or fetch.provisional:
        return None
    text = f"{fetch.process.role.value}:plugin the request was aborted while the load was open"
    return KvOutcome(FetchOutcome.ABORTED, "", (text,), lost_ns=fetch.ended_ns)


def _failed(case: KvEvidence) -> KvOutcome | None:
    fetch = case.handoff.fetch
    lines = case.outcome_by(*FAILED_FETCH_KINDS, LogKind.READ_DECLINED, LogKind.BAD_HANDOFF)
    failing = fetch is not None and load_failed(fetch)
    if not failing and not lines:
        return None
    evidence = (*_failure_words(fetch, lines), *_expired(case))
    reason = _reason(fetch, lines)
    words = " ".join(filter(None, (reason, fetch.failure_error if fetch else None, *(fact.reason for fact in lines))))
    declined = any(fact.kind is LogKind.READ_DECLINED for fact in lines) or bool(_EXPIRED.search(reason))
    recomputed = (fetch is not None and fetch.effect is FetchEffect.RECOMPUTED) or any(
        fact.kind is LogKind.RECOMPUTED for fact in lines
    )
    if declined or (_expired_first(case) and not recomputed):
        return KvOutcome(FetchOutcome.EXPIRED, reason or "lease_ended", evidence, lost_ns=_lost(case))
    if recomputed or (case.answered and fetch is not None and fetch.policy == "recompute"):
        return KvOutcome(FetchOutcome.RECOMPUTED, reason, evidence, lost_ns=_lost(case))
    if case.lost:
        return _engine_lost(case, evidence)
    outcome = FetchOutcome.TIMED_OUT if _TIMEOUT.search(words) else FetchOutcome.FAILED
    # an engine that answers after a failed load, without computing the prompt, has no valid KV
    return KvOutcome(outcome, reason, evidence, case.answered, lost_ns=_lost(case))


def _failure_words(fetch: KvFetch | None, lines: Sequence[LogFact]) -> tuple[str, ...]:
    found = []
    if fetch is not None and (fetch.failure or fetch.effect):
        what = ", ".join(filter(None, (fetch.failure, fetch.failure_error, fetch.effect.value if fetch.effect else None)))
        found.append(f"{fetch.process.role.value}:plugin load failed: {what}")
    for fact in lines:
        what = " ".join(filter(None, (fact.kind.value, fact.failure, fact.reason)))
        found.append(f"{fact.process.role.value}:log {what} ({fact.lines} lines)")
    return tuple(found)


def _reason(fetch: KvFetch | None, lines: Sequence[LogFact]) -> str:
    if fetch is not None and fetch.failure:
        return fetch.failure
    return next((fact.failure or fact.reason or fact.kind.value for fact in lines), "load_failed")


def _lost(case: KvEvidence) -> int | None:
    """Return the time that the failure cost, by the consumer's clock.

    Until the engine knew that the load had failed; until the first token where it then computed the prompt.
    """
    fetch, run = case.handoff.fetch, case.handoff.run
    if fetch is None:
        return None
    until = fetch.noticed_ns if fetch.noticed_ns is not None else fetch.ended_ns
    times = run.times if run is not None else None
    if fetch.effect is FetchEffect.RECOMPUTED and times is not None and times.first_token_ns is not None:
        until = times.queued_unix_ns + times.first_token_ns - fetch.known_unix_ns
    return max(0, until) if until is not None else None


def _prefill_error(case: KvEvidence) -> KvOutcome | None:
    """Return ``failed`` where P failed and D went on or waits in vain (case A21)."""
    prefills = case.path.prefills
    if not prefills or case.path.handed_off is False or not all(visit.failed for visit in prefills):
        return None
    exchange = prefills[-1].exchange
    what = (exchange.error_type or exchange.outcome.value) if exchange is not None else "ended in an error"
    evidence = (f"prefill:{'proxy' if exchange is not None else 'plugin'} {what}",)
    return KvOutcome(FetchOutcome.FAILED, "prefill_error", evidence, case.answered, open=_is_open(case))


def _engine_lost(case: KvEvidence, evidence: tuple[str, ...] = ()) -> KvOutcome | None:
    gone = [event for event in case.lost if event.kind is not ProcessEventKind.HUNG]
    if not gone or case.answered or load_went_well(case.handoff.fetch):
        return None
    words = tuple(f"{event.process.role.value}:{event.source.value} engine {event.kind.value}" for event in gone)
    kinds = {event.kind for event in gone}  # a new engine at the address does not show how the old one ended
    orderly = ProcessEventKind.STOPPED in kinds and ProcessEventKind.DEAD not in kinds
    return KvOutcome(FetchOutcome.FAILED, ENGINE_STOPPED if orderly else ENGINE_LOST, (*evidence, *words), lost_ns=_lost(case))


def _counted_words(fact: LogFact) -> str:
    mixed = ", including expiry" if (COUNTS, MIXED) in fact.words else ""
    what = fact.recogniser.removeprefix("metrics.")
    return f"{fact.process.role.value}:metrics {fact.lines} {what} counted while no other hand-off was open there{mixed}"


def _counted(case: KvEvidence) -> KvOutcome | None:
    """Decide by a failure that the engine counted and that only this load explains.

    It applies where nothing else shows how the load ended.
    Where D answered nevertheless, the tokens it computed meanwhile show whether it computed the prompt.
    """
    fetch, found = case.handoff.fetch, case.counted(LogKind.FETCH_FAILED, LogKind.HANDSHAKE_FAILED)
    if not found or case.path.handed_off is False or load_went_well(fetch) or (fetch is not None and fetch.provisional):
        return None
    evidence, lost = tuple(_counted_words(fact) for fact in found), _lost(case)
    if not case.answered:
        return KvOutcome(FetchOutcome.FAILED, "counted_failure", evidence, lost_ns=lost)
    computed = [tokens for fact in found for name, tokens in fact.numbers if name == COMPUTED_TOKENS]
    prompt = _prompt_tokens(case)
    if not computed or not prompt:
        return KvOutcome(FetchOutcome.UNKNOWN, "counted_failure", evidence)
    lines = (*evidence, f"decode:metrics {sum(computed):.0f} prompt tokens computed there meanwhile, of {prompt}")
    if 2 * sum(computed) >= prompt:
        return KvOutcome(FetchOutcome.RECOMPUTED, "counted_failure", lines, lost_ns=lost)
    return KvOutcome(FetchOutcome.FAILED, "counted_failure", lines, True, lost_ns=lost)


def _prompt_tokens(case: KvEvidence) -> int | None:
    run = case.handoff.run
    times = run.times if run is not None else None
    known = (case.answer.prompt_tokens if case.answer is not None else None, times.prompt_tokens if times is not None else None)
    return next((tokens for tokens in known if tokens is not None), None)


def _is_open(case: KvEvidence) -> bool:
    fetch, publish = case.handoff.fetch, case.handoff.publish
    if fetch is not None:
        return fetch.provisional
    return publish is not None and publish.provisional


def _unfinished(case: KvEvidence) -> KvOutcome | None:
    fetch = case.handoff.fetch
    if fetch is None or fetch.noticed_ns is not None or fetch.tokens_wanted == 0:
        return None
    where = f"{fetch.process.role.value}:plugin"
    seen = case.answer
    if seen is not None and seen.outcome is Outcome.CLIENT_DISCONNECT:
        return KvOutcome(FetchOutcome.ABORTED, "", (f"{where} the client left while the load was open",), lost_ns=fetch.ended_ns)
    if fetch.request_status is not None and fetch.request_status not in ("stopped", "length_capped", "finished", "lost"):
        return KvOutcome(FetchOutcome.FAILED, fetch.request_status, (f"{where} the request ended: {fetch.request_status}",))
    if fetch.request_status == "lost":
        return KvOutcome(FetchOutcome.UNKNOWN, "lost", (f"{where} the request's end is unknown",))
    age = fetch.seen_ns if fetch.seen_ns is not None else fetch.ended_ns
    if (fetch.provisional or fetch.ended_ns is None) and age is not None and age >= case.hung_ns:
        return KvOutcome(FetchOutcome.HUNG, "", (f"{where} open for {age / 1e9:.1f} s",), lost_ns=age, open=fetch.provisional)
    if fetch.provisional:
        return KvOutcome(FetchOutcome.UNKNOWN, "open", (f"{where} open for {(age or 0) / 1e9:.1f} s",), open=True)
    return None


def _link(case: KvEvidence) -> KvOutcome | None:
    """Return ``unknown`` under link errors that name no request (case A16).

    It applies while nothing shows that this load succeeded.
    """
    fault = case.link_fault
    if fault is None or not (case.handoff.fetch or case.path.handed_off):
        return None
    text = f"decode:log {fault.reason} since {fault.since_unix_ns / 1e9:.0f}, {fault.count} times, without a request's name"
    return KvOutcome(FetchOutcome.UNKNOWN, "link_failing", (text,), case.answered)


def _went_well(case: KvEvidence) -> KvOutcome | None:
    fetch, publish = case.handoff.fetch, case.handoff.publish
    read = publish is not None and publish.read_ns is not None
    evidence = []
    if fetch is not None:
        if fetch.tokens_wanted == 0:
            return KvOutcome(FetchOutcome.OK, "already_there", (f"{fetch.process.role.value}:plugin nothing to load",))
        if fetch.noticed_ns is not None:
            evidence.append(f"{fetch.process.role.value}:plugin loaded and seen by the scheduler")
            if fetch.failure is not None:
                evidence.append(f"{fetch.process.role.value}:plugin {fetch.failure} after that")
    if read:
        evidence.append("prefill:plugin its reader confirmed the read" if not case.handoff.backwards else "decode:plugin read")
    return KvOutcome(FetchOutcome.OK, "", tuple(evidence)) if evidence else None


def _published_and_unread(case: KvEvidence) -> KvOutcome | None:
    """Decide where only P's records or log show anything."""
    publish = case.handoff.publish
    if case.handoff.fetch is not None:
        return None
    if publish is not None and publish.failure in ENGINE_GONE:
        return KvOutcome(FetchOutcome.FAILED, publish.failure, ("prefill:plugin the producer's engine is gone",))
    if expired := _expired(case):
        # D answered without a read in time: from freed blocks, or it computed the prompt
        return KvOutcome(FetchOutcome.EXPIRED, "nobody_read_in_time", tuple(expired), case.answered)
    if publish is not None and publish.provisional and publish.seen_ns is not None:
        waits = f"prefill:plugin kept for {publish.seen_ns / 1e9:.1f} s, not read"
        hung = publish.seen_ns >= case.hung_ns
        return KvOutcome(FetchOutcome.HUNG if hung else FetchOutcome.UNKNOWN, "" if hung else "open", (waits,), open=True)
    return None


def _local(case: KvEvidence) -> KvOutcome | None:
    if case.path.handed_off is False and case.path.prefills:
        return KvOutcome(FetchOutcome.FALLBACK_LOCAL, "", ("decode:proxy the request named no KV to read",))
    return None


def _decode_error(case: KvEvidence) -> KvOutcome | None:
    """Decide by D's error text, where D reported no load and no first token.

    Only error types and codes about the hand-off count.
    """
    seen = case.answer
    if seen is None or case.path.handed_off is not True or seen.ttft_token_ns is not None or seen.outcome in ANSWERED:
        return None
    words = " ".join(filter(None, (seen.error_type, seen.error_code)))
    if _KV_ERROR.search(words):
        return KvOutcome(FetchOutcome.FAILED, words, (f"{seen.process.role.value}:{seen.source.value} {words}",), lost_ns=None)
    if seen.outcome is Outcome.CLIENT_DISCONNECT:
        return KvOutcome(FetchOutcome.ABORTED, "", (f"{seen.process.role.value}:{seen.source.value} the client left",))
    return None


_RULES: Final[tuple[Rule, ...]] = (
    _wrong,
    _left,
    _stale,
    _failed,
    _prefill_error,
    _engine_lost,
    _counted,
    _unfinished,
    _link,
    _went_well,
    _local,
    _published_and_unread,
    _decode_error,
)
