"""Make the rows of a request's hand-offs, and choose the one behind its answer.

Each row holds the hand-off's outcome. The chosen hand-off is the one that the answer rests on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from handrail.kv_outcomes import FetchOutcome
from handrail.records import KvFetch, KvPublish, LogFact, ProcessEvent
from handrail_collector.explain.request.kv_evidence import KvEvidence, KvOutcome, in_the_end, retried
from handrail_collector.explain.request.kv_handoff import KvHandoff, facts_of, handoffs, on_path
from handrail_collector.explain.request.kv_outcome import decide
from handrail_collector.explain.request.path import Path, ProcessEvidence
from handrail_collector.rows import FetchRow
from handrail_collector.stitch.clocks import HostClocks
from handrail_collector.stitch.engines import EngineRegistry, LinkFault
from handrail_collector.stitch.group import RequestGroup


@dataclass(frozen=True, slots=True)
class JudgedHandoff:
    """A hand-off and its outcome."""

    handoff: KvHandoff
    verdict: KvOutcome
    held_ns: tuple[int | None, int | None]
    lease_ns: int | None


@dataclass(frozen=True, slots=True)
class RequestHandoffs:
    """All hand-offs of a request.

    ``chosen``: the one that its answer rests on; None: there is no known hand-off.
    ``verdict``: the outcome of the request as a whole; that of ``chosen``, unless a load failed before it.
    """

    every: tuple[JudgedHandoff, ...]
    chosen: JudgedHandoff | None
    verdict: KvOutcome | None


def judge(group: RequestGroup, path: Path, engines: EngineRegistry, clocks: HostClocks, hung_ns: int) -> RequestHandoffs:
    """Decide the outcome of every hand-off of ``group``."""
    every = handoffs(path)
    chosen = on_path(path, every)
    wrong = next((f.detail or f.kind for f in group.findings if f.kind == "wrong_request"), "")
    judged = []
    for handoff in every:
        held, lease = _held(handoff, clocks), _lease(handoff, path.facts, engines)
        verdict = decide(
            KvEvidence(
                handoff=handoff,
                path=path,
                facts=facts_of(handoff, every, chosen, path.facts),
                rests=chosen is None or not handoff.before(chosen),
                wrong=_wrong(handoff, path, wrong if handoff is chosen else ""),
                lost=_lost(handoff, engines),
                link_fault=_link_fault(handoff.reader, engines),
                wait_ns=held,
                lease_ns=lease,
                hung_ns=hung_ns,
            )
        )
        judged.append(JudgedHandoff(handoff, verdict, held, lease))
    of_chosen = next((one for one in judged if one.handoff is chosen), None) if chosen is not None else None
    if of_chosen is None and (path.prefills or path.handed_off or path.facts):
        handoff = KvHandoff(None, None, path.decode, path.prefill, None)
        fault = _link_fault(path.decode, engines)
        case = KvEvidence(
            handoff=handoff, path=path, facts=path.facts, wrong=wrong, lost=_lost(handoff, engines), link_fault=fault
        )
        of_chosen = JudgedHandoff(handoff, decide(case), (None, None), None)
    if of_chosen is None:
        return RequestHandoffs(tuple(judged), None, None)
    last = of_chosen.verdict
    judged_handoffs = [
        replace(one, verdict=retried(one.verdict, last)) if one.handoff.before(of_chosen.handoff) else one for one in judged
    ]
    before = [one.verdict for one in judged_handoffs if one.verdict.outcome is FetchOutcome.RETRIED]
    return RequestHandoffs(tuple(judged_handoffs), of_chosen, in_the_end(before, last))


def fetch_rows(group: RequestGroup, handed: RequestHandoffs, version: int, client_request_id: str | None) -> tuple[FetchRow, ...]:
    """Return the rows of the hand-offs, in order and numbered."""
    trace_id, request_id = group.identity
    first, last = min(e.offset for e in group.evidence), max(e.offset for e in group.evidence)
    return tuple(
        _row(one, trace_id, request_id, version, number, client_request_id, first, last)
        for number, one in enumerate(handed.every)
    )


def _row(
    judged: JudgedHandoff, trace_id: str, request_id: str, version: int, number: int, client: str | None, first: int, last: int
) -> FetchRow:
    handoff, verdict = judged.handoff, judged.verdict
    fetch, publish = handoff.fetch, handoff.publish
    record = fetch or publish
    assert record is not None
    started = fetch.known_unix_ns if fetch is not None else publish.published_unix_ns if publish is not None else 0
    transfer, bound, posted_unix_ns = _transfer(fetch, publish)
    return FetchRow(
        started_unix_ns=started,
        trace_id=trace_id,
        request_id=request_id,
        version=version,
        number=number,
        span_id=record.ids.span_id,
        client_request_id=client,
        direction=record.direction.value if record.direction is not None else None,
        mode=record.mode,
        connector=record.connector,
        consumer_instance=handoff.reader.instance if handoff.reader is not None else None,
        producer_instance=handoff.keeper.instance if handoff.keeper is not None else None,
        consumer_host=handoff.reader.host if handoff.reader is not None else None,
        producer_host=handoff.keeper.host if handoff.keeper is not None else None,
        consumer_engine_id=fetch.engine_id if fetch is not None else None,
        producer_engine_id=publish.engine_id if publish is not None else fetch.peer_engine_id if fetch is not None else None,
        consumer_request=fetch.request_id if fetch is not None else None,
        producer_request=publish.request_id if publish is not None else fetch.peer_request_id if fetch is not None else None,
        producer_address=f"{fetch.peer_host}:{fetch.peer_port}" if fetch is not None and fetch.peer_host else None,
        outcome=verdict.outcome.value,
        reason=verdict.reason or None,
        error=(fetch.failure_error if fetch is not None else None) or (publish.failure_error if publish is not None else None),
        evidence=verdict.evidence,
        tainted=verdict.tainted,
        open=verdict.open,
        duration_ns=_duration(fetch, publish),
        wait_ns=_wait(fetch),
        handshake_ns=_handshake(fetch),
        posted_ns=posted_unix_ns - started if posted_unix_ns is not None else None,
        transfer_ns=transfer,
        transfer_bound_ns=bound,
        notice_ns=_between(fetch.done_ns, fetch.noticed_ns) if fetch is not None else None,
        held_ns=max(0, judged.held_ns[0]) if judged.held_ns[0] is not None else None,
        clock_bound_ns=_width(judged.held_ns),
        lease_ns=judged.lease_ns,
        late_ns=verdict.late_ns,
        lost_ns=verdict.lost_ns,
        tokens=fetch.tokens_wanted if fetch is not None else publish.tokens if publish is not None else None,
        tokens_local=fetch.tokens_local if fetch is not None else None,
        blocks=record.blocks,
        block_bytes=record.block_bytes,
        bytes_expected=fetch.bytes_expected if fetch is not None else publish.kv_bytes if publish is not None else None,
        bytes_moved=_moved(fetch, publish),
        descriptors=record.descriptors,
        ranks=fetch.ranks if fetch is not None else None,
        first_offset=first,
        last_offset=last,
    )


def _moved(fetch: KvFetch | None, publish: KvPublish | None) -> int | None:
    """Return the bytes moved, as counted by the side that moved them (P for a push)."""
    for record in (publish, fetch) if fetch is not None and fetch.mode == "push" else (fetch, publish):
        if record is not None and record.bytes_moved is not None:
            return record.bytes_moved
    return None


def _transfer(fetch: KvFetch | None, publish: KvPublish | None) -> tuple[int | None, int | None, int | None]:
    """Return the transfer's duration, its bound, and when it was posted.

    All by the clock of the side that moved the bytes.
    """
    for record in (publish, fetch) if fetch is None or fetch.mode == "push" else (fetch,):
        if (
            record is not None
            and record.posted_ns is not None
            and (took := _between(record.posted_ns, record.done_ns)) is not None
        ):
            began = record.known_unix_ns if isinstance(record, KvFetch) else record.published_unix_ns
            return took, record.done_bound_ns, began + record.posted_ns
    return None, None, None


def _wait(fetch: KvFetch | None) -> int | None:
    """Return the time until the transfer was posted or the handshake began.

    As the phase ``kv_wait``.
    """
    if fetch is None or (fetch.handshake_begin_ns is None and fetch.posted_ns is not None):
        return fetch.posted_ns if fetch is not None else None
    return fetch.load_started_ns


def _handshake(fetch: KvFetch | None) -> int | None:
    """Return the time of the handshake, until the engine posted the waiting transfer.

    As the phase ``kv_handshake``.
    """
    if fetch is None:
        return None
    if fetch.handshake_begin_ns is None:
        return 0 if fetch.posted_ns is not None or fetch.done_ns is not None else None
    began = fetch.load_started_ns if fetch.load_started_ns is not None else fetch.handshake_begin_ns
    return _between(began, fetch.posted_ns if fetch.posted_ns is not None else fetch.handshake_end_ns)


def _duration(fetch: KvFetch | None, publish: KvPublish | None) -> int | None:
    if fetch is not None:
        return next((at for at in (fetch.noticed_ns, fetch.ended_ns, fetch.done_ns, fetch.seen_ns) if at is not None), None)
    if publish is None:
        return None
    ends = (publish.freed_ns, publish.expired_ns, publish.read_ns, publish.seen_ns)
    return next((at for at in ends if at is not None), None)


def _between(begin_ns: int | None, end_ns: int | None) -> int | None:
    return max(0, end_ns - begin_ns) if begin_ns is not None and end_ns is not None else None


def _held(handoff: KvHandoff, clocks: HostClocks) -> tuple[int | None, int | None]:
    """Return the least and the most time that KV lay at P before its read began.

    It is an interval because the offset of two hosts' clocks is only bounded.
    """
    fetch, keeper = handoff.fetch, handoff.keeper
    if fetch is None or fetch.posted_ns is None or keeper is None:
        return None, None
    if handoff.publish is not None:
        kept_at = handoff.publish.published_unix_ns
    elif keeper.exchange is not None:
        kept_at = keeper.exchange.arrival_unix_ns + keeper.exchange.duration_ns
    else:
        return None, None
    read_at = fetch.known_unix_ns + fetch.posted_ns
    offset = clocks.between(fetch.process.host, keeper.evidence[0].record.process.host, read_at)
    if offset is None:
        return read_at - kept_at, read_at - kept_at
    return (
        None if offset.low_ns is None else read_at + offset.low_ns - kept_at,
        None if offset.high_ns is None else read_at + offset.high_ns - kept_at,
    )


def _width(held_ns: tuple[int | None, int | None]) -> int | None:
    least, most = held_ns
    return most - least if least is not None and most is not None and most != least else None


def _lease(handoff: KvHandoff, facts: Sequence[LogFact], engines: EngineRegistry) -> int | None:
    if handoff.publish is not None and handoff.publish.lease_end_ns is not None:
        return handoff.publish.lease_end_ns
    for fact in facts:
        seconds = dict(fact.numbers).get("timeout_s")
        if seconds is not None:
            return round(seconds * 1e9)
    return engines.lease_ns(handoff.keeper.instance) if handoff.keeper is not None else None


def _wrong(handoff: KvHandoff, path: Path, found: str) -> str:
    """Return why the KV seems to be another request's; '' without such evidence.

    The stitcher's finding, or: D read a key that this request's prefill did not publish.
    """
    if found or handoff.backwards or handoff.fetch is None or handoff.publish is not None or path.prefill is None:
        return found
    published = {key for e in path.prefill.evidence for key in e.connector_out}
    read = {key for e in _of(handoff.reader, handoff.fetch) for key in e}
    return "D read KV that this request's prefill did not publish" if published and read and not published & read else ""


def _of(visit: ProcessEvidence | None, fetch: KvFetch) -> Iterable[tuple[str, ...]]:
    return (e.connector_in for e in (visit.evidence if visit is not None else ()) if e.record is fetch)


def _lost(handoff: KvHandoff, engines: EngineRegistry) -> tuple[ProcessEvent, ...]:
    """Return the process events of both engines before the load ended.

    Later events cannot be why it failed.
    """
    found: list[ProcessEvent] = []
    fetch = handoff.fetch
    over = fetch.known_unix_ns + fetch.ended_ns + _MIN_REPORTED_NS if fetch is not None and fetch.ended_ns is not None else None
    for visit in (handoff.reader, handoff.keeper):
        if visit is not None:
            begin = min((e.start_unix_ns for e in visit.evidence if e.start_unix_ns), default=0)
            end = max((e.end_unix_ns or e.start_unix_ns for e in visit.evidence), default=0)
            until = end + _GRACE_NS
            found.extend(engines.wrong(visit.instance, begin, until if over is None else min(over, until)))
    return tuple(found)


_MIN_REPORTED_NS = 10**9
"""How much later than it happened the death of a process may be stamped."""

_GRACE_NS = 5 * 10**9
"""How long after an engine's last activity its death may be reported.

Surviving processes report it.
"""


def _link_fault(visit: ProcessEvidence | None, engines: EngineRegistry) -> LinkFault | None:
    if visit is None:
        return None
    begin = min((e.start_unix_ns for e in visit.evidence if e.start_unix_ns), default=0)
    return engines.link_fault(visit.instance, begin, max((e.end_unix_ns or e.start_unix_ns for e in visit.evidence), default=0))
