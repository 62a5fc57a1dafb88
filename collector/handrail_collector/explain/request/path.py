"""Choose the evidence on a request's path: prefill, decode, and observers.

The prefill is the one whose KV was read; the decode is the one that answered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from handrail.records import (
    ENGINE_GONE,
    EngineRequest,
    EngineTimes,
    Exchange,
    KvFetch,
    KvPublish,
    LogFact,
    Outcome,
    Role,
    RouterCall,
)
from handrail_collector.stitch.evidence import Evidence
from handrail_collector.stitch.group import RequestGroup

NO_ANSWER = frozenset({"error", "aborted"}) | ENGINE_GONE
"""Engine statuses of a request that ended without an answer."""


@dataclass(frozen=True, slots=True)
class EngineRun:
    """One request inside one engine, as the plugin reported it.

    The engine's own id identifies it. ``fetches``: in order of their start.
    """

    request_id: str
    times: EngineTimes | None
    fetches: tuple[KvFetch, ...]
    publishes: tuple[KvPublish, ...]
    evidence: tuple[Evidence, ...]

    @property
    def fetch(self) -> KvFetch | None:
        """The load that the first token rests on: the last one before it.

        Later loads belong to a preemption.
        """
        first = self.times.first_token_ns if self.times is not None else None
        if self.times is None or first is None:
            return self.fetches[-1] if self.fetches else None
        before = [fetch for fetch in self.fetches if fetch.known_unix_ns <= self.times.queued_unix_ns + first]
        return before[-1] if before else next(iter(self.fetches), None)


@dataclass(frozen=True, slots=True)
class ProcessEvidence:
    """One request inside one process: records of its proxy, engine and plugin.

    ``runs``: one per prompt or choice.
    """

    instance: str
    host: str
    exchange: Exchange | None
    engine: EngineRequest | None  # of several (batched prompts, choices), the one that finished last
    evidence: tuple[Evidence, ...]
    runs: tuple[EngineRun, ...] = ()

    @property
    def began_unix_ns(self) -> int:
        """When its first evidence began; 0: unknown."""
        return min((e.start_unix_ns for e in self.evidence if e.start_unix_ns), default=0)

    @property
    def ended_unix_ns(self) -> int:
        """When its last evidence ended; 0: unknown."""
        return max((e.end_unix_ns or e.start_unix_ns for e in self.evidence), default=0)

    @property
    def failed(self) -> bool:
        """Whether it ended without an answer, by the proxy's record or the engine's."""
        if self.exchange is not None:
            return self.exchange.outcome not in (Outcome.OK, Outcome.UNKNOWN_FINISH, Outcome.INCOMPLETE)
        return bool(self.runs) and all(run.times is not None and run.times.status in NO_ANSWER for run in self.runs)

    @property
    def reported(self) -> bool:
        """Whether any record shows the request there, not only KV that it left."""
        return self.exchange is not None or self.engine is not None or any(run.times is not None for run in self.runs)

    @property
    def first_run(self) -> EngineRun | None:
        """The run that made the first token; without one, the first that was queued."""
        timed = [run for run in self.runs if run.times is not None]
        return min(timed, key=_firstness, default=None)


@dataclass(frozen=True, slots=True)
class Path:
    """The processes that took part in a request.

    ``prefills``: all attempts; ``prefill``: the one on the path.
    """

    edge: Exchange | None
    prefill: ProcessEvidence | None
    decode: ProcessEvidence | None
    prefills: tuple[ProcessEvidence, ...]
    decodes: tuple[ProcessEvidence, ...]
    facts: tuple[LogFact, ...]
    calls: tuple[RouterCall, ...]
    handed_off: bool | None
    """Whether the KV came from a prefill engine.

    True: D was to read KV, or a prefill succeeded. False: D computed the prompt. None: the evidence does not show which.
    """


def path_of(group: RequestGroup) -> Path:
    """Group a request's evidence by process and choose the path."""
    edge = group.edge.record if group.edge is not None and isinstance(group.edge.record, Exchange) else None
    prefills = _visits(group.role(Role.PREFILL))
    decodes = _visits(group.role(Role.DECODE, Role.COLLOCATED))
    decode = _answering(decodes)
    prefill = _read_by(decode, prefills)
    facts = tuple(e.record for e in group.evidence if isinstance(e.record, LogFact))
    calls = tuple(e.record for e in group.evidence if isinstance(e.record, RouterCall))
    return Path(edge, prefill, decode, prefills, decodes, facts, calls, _handed_off(prefills, decode))


def _firstness(run: EngineRun) -> tuple[bool, int, str]:
    assert run.times is not None
    first = run.times.first_token_ns
    return first is None, run.times.queued_unix_ns + (first or 0), run.request_id


def _visits(evidence: Sequence[Evidence]) -> tuple[ProcessEvidence, ...]:
    """Pair the proxy's exchanges with the engine's requests of the same process.

    By parent span first: the engine got the proxy's span as its parent. An engine request without such a parent goes to the only
    exchange of its instance, else to the one whose interval contains it. One that fits none stands alone.
    """
    exchanges = sorted((e for e in evidence if isinstance(e.record, Exchange)), key=lambda e: (e.start_unix_ns, e.span))
    engines: list[list[Evidence]] = [[] for _ in exchanges]
    alone: list[Evidence] = []
    for item in evidence:
        if not isinstance(item.record, EngineRequest):
            continue
        index = _exchange_of(item, exchanges)
        if index is None:
            alone.append(item)
        else:
            engines[index].append(item)
    runs: list[list[EngineRun]] = [[] for _ in exchanges]
    runs_alone: dict[str, list[EngineRun]] = {}
    for run in _runs(evidence):
        index = next((i for e in run.evidence if (i := _exchange_of(e, exchanges)) is not None), None)
        if index is None:
            runs_alone.setdefault(run.evidence[0].record.process.instance, []).append(run)
        else:
            runs[index].append(run)
    visits = [_visit(*of) for of in zip(exchanges, engines, runs, strict=True)]
    by_instance: dict[str, list[Evidence]] = {}
    for item in alone:
        by_instance.setdefault(item.record.process.instance, []).append(item)
    without = dict.fromkeys((*by_instance, *runs_alone))
    visits.extend(_visit(None, by_instance.get(instance, []), runs_alone.get(instance, [])) for instance in without)
    return tuple(sorted(visits, key=lambda v: v.evidence[0].start_unix_ns))


def _runs(evidence: Sequence[Evidence]) -> list[EngineRun]:
    found: dict[tuple[str, str], list[Evidence]] = {}
    for item in evidence:
        if isinstance(item.record, EngineTimes | KvFetch | KvPublish):
            found.setdefault((item.record.process.instance, item.record.request_id), []).append(item)
    return [_run(request_id, items) for (_, request_id), items in sorted(found.items())]


def _run(request_id: str, items: Sequence[Evidence]) -> EngineRun:
    items = sorted(items, key=lambda e: (e.start_unix_ns, e.span))
    times = [e.record for e in items if isinstance(e.record, EngineTimes)]
    return EngineRun(
        request_id=request_id,
        times=times[-1] if times else None,
        fetches=tuple(e.record for e in items if isinstance(e.record, KvFetch)),
        publishes=tuple(e.record for e in items if isinstance(e.record, KvPublish)),
        evidence=tuple(items),
    )


def _exchange_of(item: Evidence, exchanges: Sequence[Evidence]) -> int | None:
    for index, exchange in enumerate(exchanges):
        if item.parent == exchange.span:
            return index
    near = [i for i, e in enumerate(exchanges) if e.record.process.instance == item.record.process.instance]
    if len(near) > 1:
        near = [i for i in near if exchanges[i].start_unix_ns <= item.start_unix_ns <= (exchanges[i].end_unix_ns or 0)]
    return near[0] if len(near) == 1 else None


def _visit(exchange: Evidence | None, engines: Sequence[Evidence], runs: Sequence[EngineRun]) -> ProcessEvidence:
    evidence = (*((exchange,) if exchange else ()), *engines, *(item for run in runs for item in run.evidence))
    last = max(engines, key=lambda e: (e.end_unix_ns or 0, e.span), default=None)
    record = last.record if last is not None else None
    process = evidence[0].record.process
    return ProcessEvidence(
        instance=process.instance,
        host=process.host_name or process.host,
        exchange=exchange.record if exchange is not None and isinstance(exchange.record, Exchange) else None,
        engine=record if isinstance(record, EngineRequest) else None,
        evidence=evidence,
        runs=tuple(runs),
    )


def _answering(decodes: Sequence[ProcessEvidence]) -> ProcessEvidence | None:
    """Return the decode that answered the client: the last one that produced tokens.

    A cache probe before it produced none.
    """
    with_tokens = [v for v in decodes if _output_tokens(v)]
    candidates = with_tokens or decodes
    return candidates[-1] if candidates else None


def _output_tokens(visit: ProcessEvidence) -> int:
    exchange, engine = visit.exchange, visit.engine
    tokens = exchange.output_tokens if exchange is not None else None
    if tokens is None and engine is not None:
        tokens = engine.output_tokens
    if tokens is None:
        made = [r.times.output_tokens for r in visit.runs if r.times is not None and r.times.output_tokens is not None]
        tokens = sum(made) if made else None
    if tokens is None and any(r.times is not None and r.times.first_token_ns is not None for r in visit.runs):
        return 1
    if tokens is None and exchange is not None and exchange.ttft_token_ns is not None:
        return 1
    return tokens or 0


def _read_by(decode: ProcessEvidence | None, prefills: Sequence[ProcessEvidence]) -> ProcessEvidence | None:
    """Return the prefill whose KV the decode was to read.

    Without connector keys it is the last one that did not fail.
    """
    wanted = {k for e in decode.evidence for k in e.connector_in} if decode is not None else set()
    for visit in prefills:
        if wanted & {k for e in visit.evidence for k in e.connector_out}:
            return visit
    if wanted and any(e.connector_out for v in prefills for e in v.evidence):
        return None
    working = [v for v in prefills if not v.failed]
    return working[-1] if working else None


def _handed_off(prefills: Sequence[ProcessEvidence], decode: ProcessEvidence | None) -> bool | None:
    """Return whether the KV came from a prefill engine, as ``Path.handed_off``.

    Connectors over shared storage put nothing into the request. So a body without KV parameters is no proof of a local prefill.
    """
    if decode is not None and decode.evidence[0].role is Role.COLLOCATED:
        return False
    if decode is not None and any(run.fetches for run in decode.runs):
        return True
    exchange = decode.exchange if decode is not None else None
    if exchange is not None and exchange.kv_in is not None and (exchange.kv_in.do_remote_prefill or exchange.kv_in.keys()):
        return True
    if exchange is not None and exchange.inspected == "whole" and prefills:
        published = any(e.connector_out for v in prefills for e in v.evidence)
        if published or all(v.failed for v in prefills):
            return False
    return True if any(not v.failed for v in prefills) else None
