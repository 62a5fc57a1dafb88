"""Which evidence of a request lies on its path: the prefill whose KV was read, the decode that answered, and who saw them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from handrail.records import EngineRequest, Exchange, Outcome, Role
from handrail_collector.stitch.evidence import Evidence
from handrail_collector.stitch.group import Group


@dataclass(frozen=True, slots=True)
class Visit:
    """One request inside one process: what the proxy beside it saw, what the engine said, or both."""

    instance: str
    host: str
    exchange: Exchange | None
    engine: EngineRequest | None  # of several (batched prompts, choices), the one that finished last
    evidence: tuple[Evidence, ...]

    @property
    def failed(self) -> bool:
        """The proxy saw it end without an answer."""
        return self.exchange is not None and self.exchange.outcome not in (Outcome.OK, Outcome.UNKNOWN_FINISH, Outcome.INCOMPLETE)


@dataclass(frozen=True, slots=True)
class Path:
    """A request's way through the fleet. ``prefills``: all attempts; ``prefill``: the one on the path."""

    edge: Exchange | None
    prefill: Visit | None
    decode: Visit | None
    prefills: tuple[Visit, ...]
    decodes: tuple[Visit, ...]
    handed_off: bool | None
    """True: D was told to read KV, or a prefill worked; False: D is known to have computed the prompt; None: cannot tell."""


def path_of(group: Group) -> Path:
    """Sort a group's evidence into visits and choose those on the path."""
    edge = group.edge.record if group.edge is not None and isinstance(group.edge.record, Exchange) else None
    prefills = _visits(group.role(Role.PREFILL))
    decodes = _visits(group.role(Role.DECODE, Role.COLLOCATED))
    decode = _answering(decodes)
    prefill = _read_by(decode, prefills)
    return Path(edge, prefill, decode, prefills, decodes, _handed_off(prefills, decode))


def _visits(evidence: Sequence[Evidence]) -> tuple[Visit, ...]:
    """Pair the proxy's exchanges with the engine's requests of the same process.

    By parent span first (the proxy's span is the parent that the engine was given). An engine request without such a parent goes
    to the only exchange of its instance, else to the one whose interval holds it; one that fits none is a visit of its own.
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
    visits = [_visit(exchange, mine) for exchange, mine in zip(exchanges, engines, strict=True)]
    by_instance: dict[str, list[Evidence]] = {}
    for item in alone:
        by_instance.setdefault(item.record.process.instance, []).append(item)
    visits.extend(_visit(None, mine) for mine in by_instance.values())
    return tuple(sorted(visits, key=lambda v: v.evidence[0].start_unix_ns))


def _exchange_of(item: Evidence, exchanges: Sequence[Evidence]) -> int | None:
    for index, exchange in enumerate(exchanges):
        if item.parent == exchange.span:
            return index
    near = [i for i, e in enumerate(exchanges) if e.record.process.instance == item.record.process.instance]
    if len(near) > 1:
        near = [i for i in near if exchanges[i].start_unix_ns <= item.start_unix_ns <= (exchanges[i].end_unix_ns or 0)]
    return near[0] if len(near) == 1 else None


def _visit(exchange: Evidence | None, engines: Sequence[Evidence]) -> Visit:
    evidence = (*((exchange,) if exchange else ()), *engines)
    last = max(engines, key=lambda e: (e.end_unix_ns or 0, e.span), default=None)
    record = last.record if last is not None else None
    process = evidence[0].record.process
    return Visit(
        instance=process.instance,
        host=process.host_name or process.host,
        exchange=exchange.record if exchange is not None and isinstance(exchange.record, Exchange) else None,
        engine=record if isinstance(record, EngineRequest) else None,
        evidence=evidence,
    )


def _answering(decodes: Sequence[Visit]) -> Visit | None:
    """The decode that answered the client: the last one that produced tokens (a cache probe before it produced none)."""
    with_tokens = [v for v in decodes if _output_tokens(v)]
    candidates = with_tokens or decodes
    return candidates[-1] if candidates else None


def _output_tokens(visit: Visit) -> int:
    exchange, engine = visit.exchange, visit.engine
    tokens = exchange.output_tokens if exchange is not None else None
    if tokens is None and engine is not None:
        tokens = engine.output_tokens
    if tokens is None and exchange is not None and exchange.ttft_token_ns is not None:
        return 1
    return tokens or 0


def _read_by(decode: Visit | None, prefills: Sequence[Visit]) -> Visit | None:
    """The prefill whose KV the decode was told to read; without connector keys the last one that did not fail."""
    wanted = {k for e in decode.evidence for k in e.connector_in} if decode is not None else set()
    for visit in prefills:
        if wanted & {k for e in visit.evidence for k in e.connector_out}:
            return visit
    if wanted and any(e.connector_out for v in prefills for e in v.evidence):
        return None
    working = [v for v in prefills if not v.failed]
    return working[-1] if working else None


def _handed_off(prefills: Sequence[Visit], decode: Visit | None) -> bool | None:
    """Connectors over shared storage carry nothing in the request: a body without KV parameters alone proves no local prefill."""
    if decode is not None and decode.evidence[0].role is Role.COLLOCATED:
        return False
    exchange = decode.exchange if decode is not None else None
    if exchange is not None and exchange.kv_in is not None and (exchange.kv_in.do_remote_prefill or exchange.kv_in.keys()):
        return True
    if exchange is not None and exchange.inspected == "whole" and prefills:
        published = any(e.connector_out for v in prefills for e in v.evidence)
        if published or all(v.failed for v in prefills):
            return False
    return True if any(not v.failed for v in prefills) else None
