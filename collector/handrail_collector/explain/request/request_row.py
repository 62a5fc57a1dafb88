"""Make the row of a request; a pure function of the joined evidence."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Final, TypeVar

from handrail.kv_outcomes import FetchOutcome
from handrail.metrics.exponential_histogram import GapSketch
from handrail.records import ENGINE_GONE, ENGINE_LOST, EngineRequest, Exchange, Gaps, Hint, Outcome, Role, RouterCall
from handrail_collector.explain.request.findings import findings, handoff_findings
from handrail_collector.explain.request.kv_fetch_rows import fetch_rows
from handrail_collector.explain.request.kv_handoff import ANSWERED, HUNG_NS
from handrail_collector.explain.request.kv_outcome import KvOutcome, RequestHandoffs, judge
from handrail_collector.explain.request.path import Path, path_of
from handrail_collector.explain.request.phases import breakdown
from handrail_collector.rows import FetchRow, JoinRow, PhaseRow, RequestRow
from handrail_collector.stitch.clocks import HostClocks
from handrail_collector.stitch.engines import EngineRegistry
from handrail_collector.stitch.group import RequestGroup

_T = TypeVar("_T")

LARGEST_COUNT: Final = 2**31 - 1
"""Largest count of a bucket that the store has room for; a sender may claim more."""


@dataclass(frozen=True, slots=True)
class Fleet:
    """What is known beside this request.

    ``reporting``: the (role, source) pairs that reported lately.
    """

    reporting: Collection[tuple[Role, str]] = ()
    engines: EngineRegistry = field(default_factory=EngineRegistry)
    clocks: HostClocks = field(default_factory=HostClocks)
    hung_ns: int = HUNG_NS

    @property
    def has_prefill(self) -> bool:
        """Whether prefill engines exist.

        If so, one may be on the path even if it reported nothing.
        """
        return any(role is Role.PREFILL for role, _ in self.reporting)


@dataclass(frozen=True, slots=True)
class Explained:
    """The rows of a group.

    ``row``: None where no process saw a request, only KV that was published or loaded.
    """

    row: RequestRow | None
    fetches: tuple[FetchRow, ...]


def explain(group: RequestGroup, fleet: Fleet) -> RequestRow:
    """Return the row of ``group``.

    A decided group keeps its row id and version; an open one gets the id that it would have now.
    """
    path = path_of(group)
    return _row(group, fleet, path, judge(group, path, fleet.engines, fleet.clocks, fleet.hung_ns))


def explain_all(group: RequestGroup, fleet: Fleet) -> Explained:
    """Return the row of ``group`` and the rows of its hand-offs."""
    path = path_of(group)
    handed = judge(group, path, fleet.engines, fleet.clocks, fleet.hung_ns)
    row = _row(group, fleet, path, handed) if group.is_request else None
    client = row.client_request_id if row is not None else None
    return Explained(row, fetch_rows(group, handed, group.version, client) if handed.every else ())


def _row(group: RequestGroup, fleet: Fleet, path: Path, handed: RequestHandoffs) -> RequestRow:
    parts = breakdown(path, prefill_likely=fleet.has_prefill, clocks=fleet.clocks)
    witness = path.edge or (path.decode.exchange if path.decode else None) or (path.prefill.exchange if path.prefill else None)
    engine = _engine_of(path)
    gaps = _gaps(path)
    sketch = _sketch(gaps)
    verdict = handed.verdict
    front = witness if path.decode is None or witness is path.edge or witness is path.decode.exchange else None
    outcome, error_type = _outcome(path, front, engine, verdict)
    exchanges = [e.record for e in group.evidence if isinstance(e.record, Exchange)]
    trace_id, request_id = group.identity
    started, duration = _times(group, witness, engine)
    return RequestRow(
        request_id=request_id,
        version=group.version,
        scope=_scope(path),
        trace_id=trace_id,
        other_trace_ids=tuple(dict.fromkeys(t for e in group.evidence if (t := e.trace_id) and t != trace_id)),
        client_request_id=_client_id(group, witness),
        request_key=_key(group),
        response_id=_first(x.response_id for x in exchanges),
        model=_first(x.model for x in exchanges) or (engine.model if engine else None),
        operation=_first(x.operation for x in exchanges),
        path=witness.path if witness else None,
        stream=witness.stream if witness else None,
        started_unix_ns=started,
        ttfb_ns=front.ttfb_ns if front else None,
        ttft_token_ns=front.ttft_token_ns if front else (engine.ttft_ns if engine and path.decode else None),
        ttft_text_ns=front.ttft_text_ns if front else None,
        duration_ns=duration,
        outcome=outcome.value,
        error_type=error_type,
        status=front.status if front else None,
        prompt_tokens=_first(x.prompt_tokens for x in exchanges) or (engine.prompt_tokens if engine else None),
        output_tokens=_answered_tokens(path, witness, engine),
        cached_tokens=_first(x.cached_tokens for x in exchanges),
        edge_instance=path.edge.process.instance if path.edge else None,
        router_instance=_first(e.record.process.instance or None for e in group.evidence if isinstance(e.record, RouterCall)),
        prefill_instance=path.prefill.instance if path.prefill else None,
        decode_instance=path.decode.instance if path.decode else None,
        prefill_host=path.prefill.host if path.prefill else None,
        decode_host=path.decode.host if path.decode else None,
        prefill_attempts=len(path.prefills),
        kv_outcome=_kv_outcome(path, verdict),
        kv_reason=verdict.reason or None if verdict is not None else None,
        kv_evidence=verdict.evidence if verdict is not None else (),
        kv_bytes=_kv_bytes(handed),
        kv_lost_ns=verdict.lost_ns if verdict is not None else None,
        kv_returned_tokens=_returned(handed),
        gap_unit=gaps.unit if gaps else None,
        gap_count=gaps.count if gaps else None,
        gap_max_ns=gaps.max_ns if gaps else None,
        gap_p50_ns=sketch.quantile(0.5) if sketch else None,
        gap_p99_ns=sketch.quantile(0.99) if sketch else None,
        gap_sum_ns=sketch.sum_ns if sketch else None,
        gap_min_ns=sketch.min_ns if sketch else None,
        gap_buckets=tuple(sketch.buckets()) if sketch else (),
        gap_counts=tuple(min(count, LARGEST_COUNT) for count in sketch.buckets().values()) if sketch else (),
        phase_of=parts.of,
        phases=tuple(
            PhaseRow(
                phase=p.phase.value,
                duration_ns=p.duration_ns,
                process=p.place.value,
                source=p.source,
                bound_ns=p.bound_ns,
                may_be=tuple(m.value for m in p.may_be),
            )
            for p in parts.phases
        ),
        joins=tuple(
            JoinRow(evidence=e.label, how=e.how.value, span_id=e.span_id)
            for e in sorted(group.evidence, key=lambda e: (e.offset, e.span))
        ),
        findings=findings(
            group,
            path,
            verdict,
            (*parts.findings, *handoff_findings(path, handed, fleet.engines, prefill_likely=fleet.has_prefill)),
            trace_id,
        ),
        hints=tuple(dict.fromkeys((*(h.value for x in exchanges for h in x.hints), *_probes(path)))),
        complete=_complete(path, fleet),
        span_ids=tuple(e.span_id for e in group.evidence),
        first_offset=min(e.offset for e in group.evidence),
        last_offset=max(e.offset for e in group.evidence),
    )


def _scope(path: Path) -> str:
    if path.edge is not None:
        return "edge"
    return "decode" if path.decode is not None and path.decode.exchange is not None else "engine"


def _engine_of(path: Path) -> EngineRequest | None:
    return (path.decode.engine if path.decode else None) or (path.prefill.engine if path.prefill else None)


def _times(group: RequestGroup, witness: Exchange | None, engine: EngineRequest | None) -> tuple[int, int]:
    """Return start and duration, by the process that gives the scope.

    An unknown start is the time of receipt.
    """
    if witness is not None:
        return witness.arrival_unix_ns, witness.duration_ns
    starts = [e.start_unix_ns for e in group.evidence if e.start_unix_ns]
    start = (engine.start_unix_ns if engine else 0) or min(starts, default=group.opened_unix_ns)
    if engine is not None and engine.end_unix_ns is not None:
        return start, engine.end_unix_ns - start if engine.start_unix_ns else engine.e2e_ns or 0
    ends = [e.end_unix_ns for e in group.evidence if e.end_unix_ns is not None]
    return start, max(0, max(ends, default=start) - start)


def _outcome(
    path: Path, witness: Exchange | None, engine: EngineRequest | None, verdict: KvOutcome | None
) -> tuple[Outcome, str | None]:
    """Return what the client got, as the outermost proxy saw it, and the error type.

    An inner failure keeps its error type.
    ``witness`` is None where no proxy before D saw the request. How P's own answer ended says nothing about a request that went
    on to D.
    An answer that ended well on KV that cannot be trusted is ``tainted``: no count of good requests may include it.
    """
    if witness is not None:
        inner = path.decode.exchange if path.decode else None
        error = witness.error_type or (inner.error_type if inner else None)
        if verdict is not None and verdict.tainted and witness.outcome in ANSWERED:
            return Outcome.TAINTED, error
        return witness.outcome, error
    outcome = engine.outcome if engine is not None else _of_engines(path)
    if verdict is not None and verdict.tainted and outcome is Outcome.OK:
        return Outcome.TAINTED, None
    if verdict is not None and verdict.reason in ENGINE_GONE and outcome is Outcome.UNKNOWN:
        return Outcome.UPSTREAM_DISCONNECT, verdict.reason
    if outcome is not Outcome.UPSTREAM_DISCONNECT:
        return outcome, None
    status = _status(path)
    return outcome, status if status in ENGINE_GONE else ENGINE_LOST


_ENDED = {
    "stopped": Outcome.OK,
    "length_capped": Outcome.OK,
    "repetition": Outcome.OK,
    "ignored": Outcome.ABORTED,
    "aborted": Outcome.ABORTED,
    "error": Outcome.STREAM_ERROR,
    **dict.fromkeys(ENGINE_GONE, Outcome.UPSTREAM_DISCONNECT),
}


def _of_engines(path: Path) -> Outcome:
    """Return the outcome that the plugin in D, else in P, reported."""
    return _ENDED.get(_status(path) or "", Outcome.UNKNOWN)


def _status(path: Path) -> str | None:
    visit = path.decode or path.prefill
    run = visit.first_run if visit is not None else None
    return run.times.status if run is not None and run.times is not None else None


def _kv_outcome(path: Path, verdict: KvOutcome | None) -> str | None:
    """Return the outcome of the hand-off; None where no hand-off is known.

    Proxies and spans cannot see a hand-off succeed: it is ``unknown`` until the plugin reports more.
    """
    if verdict is not None and (verdict.outcome is not FetchOutcome.UNKNOWN or path.handed_off):
        return verdict.outcome.value
    return FetchOutcome.UNKNOWN.value if path.handed_off else None


def _kv_bytes(handed: RequestHandoffs) -> int | None:
    chosen = handed.chosen.handoff if handed.chosen is not None else None
    found = [record.bytes_moved for record in (chosen.fetch, chosen.publish) if record is not None] if chosen is not None else []
    return _first(found)


def _returned(handed: RequestHandoffs) -> int | None:
    """Return how many tokens of earlier turns P fetched from D.

    P did not compute these.
    """
    back = [one.handoff.fetch for one in handed.every if one.handoff.backwards and one.verdict.outcome is FetchOutcome.OK]
    tokens = [fetch.tokens_wanted for fetch in back if fetch is not None and fetch.tokens_wanted is not None]
    return sum(tokens) if tokens else None


def _probes(path: Path) -> tuple[str, ...]:
    """Return a hint where another decode declined because its cache holds too little.

    This is llm-d's ``cache_hit_threshold`` (case A23).
    """
    for visit in path.decodes:
        if visit is not path.decode and visit.exchange is not None and "cache_threshold" in visit.exchange.finish_reasons:
            return (Hint.CACHE_PROBE.value,)
    return ()


def _gaps(path: Path) -> Gaps | None:
    for exchange in (path.edge, path.decode.exchange if path.decode else None):
        if exchange is not None and exchange.gaps is not None:
            return exchange.gaps
    return None


def _sketch(gaps: Gaps | None) -> GapSketch | None:
    """Decode the sketch of gaps; None where it is unreadable.

    That is a newer sidecar's sketch, or damage. Count and largest gap are still available.
    """
    try:
        return GapSketch.decode(gaps.sketch) if gaps is not None else None
    except ValueError:
        return None


def _answered_tokens(path: Path, witness: Exchange | None, engine: EngineRequest | None) -> int | None:
    inner = path.decode.exchange if path.decode else None
    known = [x.output_tokens for x in (witness, inner) if x is not None and x.output_tokens is not None]
    if known:
        return known[0]
    return engine.output_tokens if engine is not None and path.decode is not None else None


def _client_id(group: RequestGroup, witness: Exchange | None) -> str | None:
    """Return the client's own id.

    The edge's header, else what the router recorded, else the outermost proxy's header.
    """
    if group.edge is not None and witness is not None and witness.request_id is not None:
        return witness.request_id
    remembered = _first(e.record.request_id for e in group.evidence if isinstance(e.record, RouterCall))
    return remembered or (witness.request_id if witness else None)


def _key(group: RequestGroup) -> str | None:
    """Return the request key of this request: the edge's, where there is one."""
    ordered = sorted(group.evidence, key=lambda e: (e is not group.edge, e.offset, e.span))
    return _first(key for e in ordered for key in e.keys)


def _complete(path: Path, fleet: Fleet) -> bool:
    """Whether every process known to be on the path reported; never without a decode."""
    if path.decode is None:
        return False
    if path.handed_off is False:
        return True
    return path.prefill is not None or (path.handed_off is None and not fleet.has_prefill)


def _first(values: Iterable[_T | None]) -> _T | None:
    return next((v for v in values if v is not None), None)
