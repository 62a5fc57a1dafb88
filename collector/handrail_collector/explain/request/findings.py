"""Find what is wrong or odd about a request and its hand-off.

Each finding is text for the request's row, ``kind: detail``: a kind from the closed list, and its evidence.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from handrail.identity import JoinKind
from handrail.kv_outcomes import FetchOutcome
from handrail.records import EngineRequest, Exchange, Hint, KvFetch, Outcome, ProcessEventKind, Role, RouterCall
from handrail.wire.engines.vllm import NEVER_SCHEDULED
from handrail_collector.explain.request.kv_outcome import JudgedHandoff, KvOutcome, RequestHandoffs
from handrail_collector.explain.request.path import Path
from handrail_collector.stitch.engines import EngineRegistry
from handrail_collector.stitch.group import RequestGroup

FINDINGS: Final = (
    "ambiguous_request_id",
    "answered_after_failure",
    "bad_attribute",
    "clocks_unknown",
    "context_lost",
    "duplicate_request_id",
    "engine_hung",
    "engine_lost",
    "engine_restarted",
    "engine_stopped",
    "fallback_local",
    "handoff_near_lease",
    "handoff_over_lease",
    "kv_bytes_short",
    "kv_mismatch",
    "model_mismatch",
    "no_handoff_data",
    "prefill_decode_overlap",
    "prefill_error",
    "prefill_retried",
    "request_id_reused",
    "return_failed",
    "stale_read",
    "unexplained_failures",
    "waiting_after_failure",
    "wrong_request",
)
"""Every kind, also of findings that belong to no request."""

NEAR_LEASE: Final = 0.8
"""Share of the lease after which a late read becomes a finding."""

PARKED_NS: Final = 30 * 10**9
"""Shortest wait after a failed load that cannot be prompt computation any more."""

_FAILED_LOADS: Final = frozenset({FetchOutcome.FAILED, FetchOutcome.TIMED_OUT, FetchOutcome.EXPIRED})
_REFUSED: Final = frozenset({Outcome.HTTP_ERROR, Outcome.STREAM_ERROR, Outcome.UPSTREAM_DISCONNECT})

_EVENTS: Final = {
    ProcessEventKind.DEAD: "engine_lost",
    ProcessEventKind.STOPPED: "engine_stopped",
    ProcessEventKind.RESTARTED: "engine_restarted",
    ProcessEventKind.HUNG: "engine_hung",
}


def findings(group: RequestGroup, path: Path, verdict: KvOutcome | None, more: Iterable[str], trace_id: str) -> tuple[str, ...]:
    """Return the findings of ``group``, each once.

    ``verdict``: the outcome of its hand-off; ``more``: findings from elsewhere; ``trace_id``: that of the row.
    """
    found = [f"{f.kind}: {f.detail}" if f.detail else f.kind for f in group.findings]
    found.extend(more)
    if path.edge is not None:
        lost = dict.fromkeys(
            e.role.value
            for e in group.evidence
            if isinstance(e.record, Exchange | EngineRequest | RouterCall)
            and e.how is not JoinKind.ANCESTOR
            and e.trace_id != trace_id
        )
        found.extend(f"context_lost: no trace context reached {role}" for role in lost)
    if len(path.prefills) > 1:
        abandoned = sum(1 for visit in path.prefills if visit is not path.prefill)
        found.append(f"prefill_retried: {len(path.prefills)} prefill attempts, {abandoned} abandoned")
    if path.handed_off is False and path.prefills:
        found.append("fallback_local: after an attempted prefill, decode got no KV parameters and computed the prompt itself")
    models = dict.fromkeys(m for e in group.evidence if (m := getattr(e.record, "model", None)) is not None)
    if len(models) > 1:
        found.append(f"model_mismatch: {', '.join(models)}")
    found.extend(_bad_attributes(group, verdict))
    if path.edge is not None and Hint.DUPLICATE_REQUEST_ID in path.edge.hints:
        found.append("duplicate_request_id: this id was in flight twice")
    return tuple(dict.fromkeys(found))


def _bad_attributes(group: RequestGroup, verdict: KvOutcome | None) -> Iterator[str]:
    """Yield findings for absurd attributes that were dropped (case C15).

    The exception: a load that failed ends its request before it was ever scheduled, and vLLM then computes the queue time from a
    stamp of 0. Where the failure is known, that is not reported, so that one fault does not read as two.
    """
    follows = NEVER_SCHEDULED if verdict is not None and verdict.outcome in _FAILED_LOADS else ()
    for each in group.evidence:
        if isinstance(each.record, EngineRequest):
            absurd = [name for name in each.record.dropped_attributes if each.role is Role.PREFILL or name not in follows]
            if absurd:
                yield f"bad_attribute: {each.role.value} sent absurd {', '.join(absurd)}"


def handoff_findings(path: Path, handed: RequestHandoffs, engines: EngineRegistry, *, prefill_likely: bool) -> Iterator[str]:
    """Yield the findings as ``kind: detail``.

    ``prefill_likely``: this fleet hands KV over.
    """
    if prefill_likely and _refused_bare(path):
        yield "no_handoff_data: decode was called without a prefill before it, and refused"
    yield from _parked(path)
    if handed.chosen is not None:
        yield from _of_chosen(path, handed.chosen)
    if path.prefill is not None and path.decode is not None:
        for what, at_p, at_d in engines.differences(path.prefill.instance, path.decode.instance):
            yield f"kv_mismatch: {what} is {at_p} at P and {at_d} at D"
    yield from _struck(path, handed, engines)
    if any(one.handoff.backwards and one.verdict.outcome is not FetchOutcome.OK and not one.verdict.open for one in handed.every):
        yield "return_failed: P did not fetch the KV of the earlier turn from D"


def _refused_bare(path: Path) -> bool:
    """Whether D refused a request that named no KV.

    That is a router's mistake, no failed KV fetch (case A26).
    """
    seen = path.decode.exchange if path.decode is not None else None
    if path.prefills or path.handed_off is not None or seen is None or seen.kv_in is not None:
        return False
    return seen.outcome in _REFUSED and seen.ttft_token_ns is None


def _parked(path: Path) -> Iterator[str]:
    """Find a request that waits after its load failed while nothing wakes the engine.

    Case A11.
    """
    run = path.decode.first_run if path.decode is not None else None
    times, fetch = (run.times, run.fetch) if run is not None else (None, None)
    if times is None or fetch is None or fetch.noticed_ns is None or (fetch.failure is None and fetch.effect is None):
        return
    until = next((at for at in (times.first_token_ns, times.finished_ns, times.seen_ns) if at is not None), None)
    waited = times.queued_unix_ns + until - fetch.known_unix_ns - fetch.noticed_ns if until is not None else 0
    if waited >= PARKED_NS:
        yield f"waiting_after_failure: {waited / 1e9:.1f} s after its load failed"


def _of_chosen(path: Path, one: JudgedHandoff) -> Iterator[str]:
    verdict = one.verdict
    if verdict.outcome is FetchOutcome.STALE_READ:
        late = f" {verdict.late_ns / 1e9:.1f} s" if verdict.late_ns is not None else ""
        yield f"stale_read: D read blocks{late} after P released them"
    if verdict.outcome is FetchOutcome.WRONG_REQUEST and not any("wrong_request" in word for word in verdict.evidence):
        yield "wrong_request: D read KV that P published for another request"
    if verdict.reason == "prefill_error":
        yield f"prefill_error: {_after_prefill(path)}"
    if verdict.outcome is FetchOutcome.FAILED and verdict.tainted and verdict.reason != "prefill_error":
        yield "answered_after_failure: the load failed, and D answered without computing the prompt"
    fetch = one.handoff.fetch
    if fetch is not None and verdict.outcome is FetchOutcome.OK and _short(fetch):
        yield f"kv_bytes_short: {fetch.bytes_moved} bytes moved of {fetch.bytes_expected}"
    least = one.evidence.wait_ns[0]
    if least is not None and one.evidence.lease_ns and least >= NEAR_LEASE * one.evidence.lease_ns:
        kind = "handoff_over_lease" if least > one.evidence.lease_ns else "handoff_near_lease"
        yield f"{kind}: KV waited {least / 1e9:.1f} s for its read, and P keeps it for {one.evidence.lease_ns / 1e9:.1f} s"


def _short(fetch: KvFetch) -> bool:
    moved, expected = fetch.bytes_moved, fetch.bytes_expected
    return moved is not None and expected is not None and moved < expected


def _after_prefill(path: Path) -> str:
    """Describe what D did after a failed prefill (case A21).

    It answered as if nothing had happened, failed too, or waited in vain.
    """
    decode = path.decode
    if decode is None:
        return "the prefill ended in an error, and no decode is known"
    seen = decode.exchange
    run = decode.first_run
    times = run.times if run is not None else None
    if seen is not None and seen.outcome is Outcome.OK:
        return "the prefill ended in an error, and the decode answered all the same"
    waited = seen.duration_ns if seen is not None else (times.seen_ns or times.finished_ns) if times is not None else None
    if waited is None or (seen is not None and seen.ttft_token_ns is not None):
        return "the prefill and the decode ended in an error"
    return f"the decode waited {waited / 1e9:.2f} s for a prefill that had failed"


def _struck(path: Path, handed: RequestHandoffs, engines: EngineRegistry) -> Iterator[str]:
    """Yield process events of both engines while this request was open and failed."""
    well = {FetchOutcome.OK, FetchOutcome.FALLBACK_LOCAL}
    if handed.chosen is not None and handed.chosen.verdict.outcome in well and not handed.chosen.verdict.open:
        return
    for visit in (path.prefill, path.decode):
        if visit is None:
            continue
        end = visit.ended_unix_ns
        for other in (path.prefill, path.decode):  # a peer's restart affects requests that still wait for it
            if other is not None and other.host == visit.host:
                end = max([end, *(e.end_unix_ns or 0 for e in other.evidence)])
        for event in engines.wrong(visit.instance, visit.began_unix_ns, end + 10**9):
            detail = f", {event.detail}" if event.detail else ""
            yield f"{_EVENTS[event.kind]}: {visit.instance}{detail}"
