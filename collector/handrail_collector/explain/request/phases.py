"""Divide a request's time into phases that sum exactly.

Each process's part is by its own clock; one remainder lies between the processes.
The plugin's times of an engine (``engine_phases.py``) are preferred. Without them, vLLM gives three durations: queued to
scheduled, scheduled to first token, and the whole. What it counts as queue time on D includes the KV fetch. So that time is
``unattributed``, with the phases that it may hide, and never ``decode_queue``.

The time between the processes is router time and hops. With a router's spans no clocks are compared: its own clock shows how
long it worked before it called P, and when it called D; P's own clock shows the part of that inside P. The router's work between
P's answer and its call of D is part of ``prefill_hops``, because the ends of its client spans are unreliable.
Without such spans one part may be known: from the first token leaving D to the edge that sees it, where the clock bound of
the two hosts is narrow enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from handrail.phases import KV_AND_QUEUE, Phase, PhaseTime, Place, close_sum, path_order
from handrail.records import Exchange, KvPublish, Process, Role, RouterCall
from handrail_collector.explain.request.engine_phases import PLUGIN, Account, account
from handrail_collector.explain.request.path import Path, ProcessEvidence
from handrail_collector.stitch.clocks import HostClocks

ROUNDING_NS = 1_000
"""Resolution of vLLM's durations, which are floats of seconds.

They come from monotonic clocks.
"""

NARROW_NS: Final = 1_000_000
NARROW_SHARE: Final = 0.05
"""Widest bound of a part, as a share of all time between the processes.

A part is split off where its bound is within ``NARROW_NS`` or within this share.
"""

_PREFILL_ALL = (Phase.PREFILL_ADMISSION, Phase.PREFILL_QUEUE, Phase.PREFILL_COMPUTE, Phase.PREFILL_RESPOND)
_DECODE_ALL = (Phase.DECODE_ADMISSION, *KV_AND_QUEUE, Phase.FIRST_STEP, Phase.DECODE_RESPOND)
_UNATTRIBUTED = Phase.UNATTRIBUTED


@dataclass(frozen=True, slots=True)
class Breakdown:
    """The phases of one request.

    ``of``: what they sum to: "ttft", "total", or "" where the evidence does not allow a breakdown.
    """

    of: str
    total_ns: int
    phases: tuple[PhaseTime, ...]
    findings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Inside:
    total_ns: int
    phases: tuple[PhaseTime, ...]
    timed_by_proxy: bool  # False: the time excludes the HTTP front end and the response


def breakdown(path: Path, *, prefill_likely: bool, clocks: HostClocks) -> Breakdown:
    """Return the phases of ``path``.

    ``prefill_likely``: prefill engines exist in this fleet, so one that reported nothing may be on the path.
    Scope edge: up to the edge's first generated token; for a response that is not streamed, up to its end. Without an edge: D's
    phases alone, from D's arrival. Figures of different scope never mix.
    """
    decode = path.decode
    if path.edge is None:
        return _decode_scope(path)
    of, total = _goal(path.edge)
    if total is None:
        return Breakdown("", 0, ())
    pushed = _pushed(path)
    inside_d = _decode(decode, path.handed_off, pushed, first_token=of == "ttft") if decode is not None else None
    on_path = path.prefill if path.handed_off is not False else None
    inside_p = _prefill(on_path) if on_path is not None else None
    if inside_d is not None and inside_d.total_ns > total:
        # D's clock shows more than the client waited: D's phases are cut and their bounds widened
        inside_d = _Inside(total, close_sum(inside_d.phases, total, _rest(Place.DECODE, "", ())), inside_d.timed_by_proxy)
    spent_d = inside_d.total_ns if inside_d is not None else 0
    if inside_p is not None:
        inside_p = _before_d(inside_p, total - spent_d)
    if inside_p is not None and inside_p.total_ns > total - spent_d:
        # P and D overlapped: P is on the critical path only for the time that D leaves
        rest = _rest(Place.PATH, "edge", (Phase.ROUTER_AND_HOPS, *_PREFILL_ALL))
        phases = inside_d.phases if inside_d is not None else ()
        return Breakdown(of, total, path_order(close_sum(phases, total, rest)), ("prefill_decode_overlap",))
    known = (*(inside_p.phases if inside_p else ()), *(inside_d.phases if inside_d else ()))
    between = total - spent_d - (inside_p.total_ns if inside_p else 0)
    return Breakdown(of, total, path_order((*known, *_between(path, between, inside_p, inside_d, prefill_likely, clocks))))


def _before_d(inside: _Inside, room_ns: int) -> _Inside:
    """Cut the end of P's response that overlaps D.

    On a real pair, P's response ended a little after D was called: the API server stamps the end when it gets the processor
    again.
    """
    beside = inside.total_ns - room_ns
    respond = next((p for p in inside.phases if p.phase is Phase.PREFILL_RESPOND), None)
    if beside <= 0 or respond is None or beside > respond.duration_ns:
        return inside
    cut = replace(respond, duration_ns=respond.duration_ns - beside, bound_ns=respond.bound_ns + beside)
    return replace(inside, total_ns=room_ns, phases=tuple(cut if p is respond else p for p in inside.phases))


def _pushed(path: Path) -> KvPublish | None:
    """Return P's record of its own writes to D."""
    kept = [p for run in (path.prefill.runs if path.prefill is not None else ()) for p in run.publishes if p.done_ns is not None]
    return kept[-1] if kept else None


def _goal(exchange: Exchange) -> tuple[str, int | None]:
    if exchange.stream:
        return "ttft", exchange.ttft_token_ns
    return "total", exchange.duration_ns if exchange.stream is False and exchange.status and exchange.status < 400 else None


def _decode_scope(path: Path) -> Breakdown:
    decode = path.decode
    if decode is None:
        return Breakdown("", 0, ())
    streamed = decode.exchange.stream if decode.exchange is not None else True
    inside = _decode(decode, path.handed_off, _pushed(path), first_token=bool(streamed))
    if inside is None:
        return Breakdown("", 0, ())
    return Breakdown("ttft" if streamed else "total", inside.total_ns, path_order(inside.phases))


def _between(
    path: Path, between_ns: int, inside_p: _Inside | None, inside_d: _Inside | None, prefill_likely: bool, clocks: HostClocks
) -> tuple[PhaseTime, ...]:
    """Return the time between the processes, as phases.

    It is router and hops where every process on the path was timed from its arrival; otherwise it is unattributed.
    """
    if not between_ns:
        return ()
    may_be: list[Phase] = [Phase.ROUTER_AND_HOPS]
    if inside_p is None and path.handed_off is not False and (prefill_likely or path.handed_off):
        may_be.extend(_PREFILL_ALL)
    elif inside_p is not None and not inside_p.timed_by_proxy:
        may_be.extend((Phase.PREFILL_ADMISSION, Phase.PREFILL_RESPOND))
    if inside_d is None:
        may_be.extend(_DECODE_ALL)
    elif not inside_d.timed_by_proxy:
        may_be.extend((Phase.DECODE_ADMISSION, Phase.DECODE_RESPOND))
    if len(may_be) > 1:
        return (PhaseTime(_UNATTRIBUTED, between_ns, Place.PATH, "edge", 0, tuple(may_be)),)
    return _hops(path, between_ns, inside_p.total_ns if inside_p is not None else None, clocks)


def _prefill(visit: ProcessEvidence) -> _Inside | None:
    """Return P's phases, from the arrival at P to the complete response."""
    exchange, engine = visit.exchange, visit.engine
    own = _account(visit, Place.PREFILL, computes=True)
    span = _from_to(visit, own)
    if span is None:
        return None
    total = exchange.duration_ns if exchange is not None else span[1] - span[0]
    known: list[PhaseTime] = []
    if own is not None:
        known.extend(_doors(visit, own, span, (Phase.PREFILL_ADMISSION, Phase.PREFILL_RESPOND), Place.PREFILL))
    elif engine is not None:
        known.extend(_engine(Phase.PREFILL_QUEUE, engine.queue_ns, Place.PREFILL))
        known.extend(_engine(Phase.PREFILL_COMPUTE, engine.prefill_ns, Place.PREFILL))
        if exchange is not None and _one_clock(exchange.process, engine.process) and engine.start_unix_ns > 0:
            known.extend(_edge_part(Phase.PREFILL_ADMISSION, engine.start_unix_ns - exchange.arrival_unix_ns, Place.PREFILL))
            if engine.end_unix_ns is not None:
                after = exchange.arrival_unix_ns + exchange.duration_ns - engine.end_unix_ns
                known.extend(_edge_part(Phase.PREFILL_RESPOND, after, Place.PREFILL))
    may_be = _unmeasured(_PREFILL_ALL, known)
    phases = close_sum(known, total, _rest(Place.PREFILL, _teller(visit), may_be))
    return _Inside(total, _widen(phases), exchange is not None)


def _decode(visit: ProcessEvidence, handed_off: bool | None, pushed: KvPublish | None, *, first_token: bool) -> _Inside | None:
    """Return D's phases, from the arrival at D to the first token leaving D.

    For a response that is not streamed, to the end of the whole response.
    """
    exchange, engine = visit.exchange, visit.engine
    own = _account(visit, Place.DECODE, computes=handed_off is False, pushed=pushed)
    total = _decode_total(visit, own, first_token=first_token)
    if total is None:
        return None
    known: list[PhaseTime] = []
    if own is not None:
        span = _from_to(visit, own)
        begin = span[0] if span is not None else own.begin_unix_ns
        known.extend(_doors(visit, own, (begin, begin + total), (Phase.DECODE_ADMISSION, Phase.DECODE_RESPOND), Place.DECODE))
    elif engine is not None:
        if handed_off is False:
            known.extend(_engine(Phase.PREFILL_QUEUE, engine.queue_ns, Place.DECODE))
            known.extend(_engine(Phase.PREFILL_COMPUTE, engine.prefill_ns, Place.DECODE))
        else:
            if engine.queue_ns is not None:
                known.append(PhaseTime(_UNATTRIBUTED, engine.queue_ns, Place.DECODE, "otlp", ROUNDING_NS, KV_AND_QUEUE))
            known.extend(_engine(Phase.FIRST_STEP, engine.prefill_ns, Place.DECODE))
        if exchange is not None and _one_clock(exchange.process, engine.process) and engine.start_unix_ns > 0:
            known.extend(_edge_part(Phase.DECODE_ADMISSION, engine.start_unix_ns - exchange.arrival_unix_ns, Place.DECODE))
            if engine.ttft_ns is not None:
                after = exchange.arrival_unix_ns + total - engine.start_unix_ns - engine.ttft_ns
                known.extend(_edge_part(Phase.DECODE_RESPOND, after, Place.DECODE))
        elif exchange is None and not first_token and engine.ttft_ns is not None:
            known.extend(_engine(Phase.DECODE_RESPOND, total - engine.ttft_ns, Place.DECODE))
    own_prefill = (Phase.DECODE_ADMISSION, Phase.PREFILL_QUEUE, Phase.PREFILL_COMPUTE, Phase.DECODE_RESPOND)
    may_be = _unmeasured(own_prefill if handed_off is False else _DECODE_ALL, known)
    phases = close_sum(known, total, _rest(Place.DECODE, _teller(visit), may_be))
    return _Inside(total, _widen(phases), exchange is not None)


def _account(visit: ProcessEvidence, place: Place, *, computes: bool, pushed: KvPublish | None = None) -> Account | None:
    run = visit.first_run
    if run is None or run.times is None:
        return None
    return account(run.times, run.fetch, place, computes=computes, pushed=pushed)


def _teller(visit: ProcessEvidence) -> str:
    """Return the source of the whole time inside the process."""
    if visit.exchange is not None:
        return "proxy"
    return "otlp" if visit.engine is not None else PLUGIN


def _from_to(visit: ProcessEvidence, own: Account | None) -> tuple[int, int] | None:
    """Return arrival and end of response, by the wall clock of the outermost source.

    The source must have seen both.
    """
    exchange, engine, run = visit.exchange, visit.engine, visit.first_run
    if exchange is not None:
        return exchange.arrival_unix_ns, exchange.arrival_unix_ns + exchange.duration_ns
    if engine is not None and engine.end_unix_ns is not None and engine.start_unix_ns > 0:
        return engine.start_unix_ns, engine.end_unix_ns
    if own is None or run is None or run.times is None:
        return None
    times = run.times
    began = min(times.arrival_unix_ns or own.begin_unix_ns, own.begin_unix_ns)
    return began, max(own.first_unix_ns, times.queued_unix_ns + (times.finished_ns or 0))


def _doors(
    visit: ProcessEvidence, own: Account, span: tuple[int, int], doors: tuple[Phase, Phase], place: Place
) -> tuple[PhaseTime, ...]:
    """Return the engine's phases with the time before and after them.

    That needs one clock for the engine and for the source of ``span``.
    """
    exchange, run = visit.exchange, visit.first_run
    assert run is not None
    assert run.times is not None
    if exchange is not None and not _one_clock(exchange.process, run.times.process):
        return own.phases
    source = "proxy+plugin" if exchange is not None else PLUGIN
    before, after = own.begin_unix_ns - span[0], span[1] - own.first_unix_ns
    return (*_edge_part(doors[0], before, place, source), *own.phases, *_edge_part(doors[1], after, place, source))


def _decode_total(visit: ProcessEvidence, own: Account | None, *, first_token: bool) -> int | None:
    exchange, engine = visit.exchange, visit.engine
    if exchange is not None:
        return exchange.ttft_token_ns if first_token else exchange.duration_ns
    if first_token and own is not None:
        span = _from_to(visit, own)
        return own.first_unix_ns - min(span[0] if span is not None else own.begin_unix_ns, own.first_unix_ns)
    if engine is not None:
        if first_token:
            return engine.ttft_ns
        return engine.end_unix_ns - engine.start_unix_ns if engine.end_unix_ns is not None else None
    span = _from_to(visit, own)
    return span[1] - span[0] if span is not None else None


def _one_clock(one: Process, two: Process) -> bool:
    """Whether both are on one host, so that their wall stamps are comparable."""
    return bool(one.host) and one.host == two.host


def _engine(phase: Phase, duration_ns: int | None, place: Place) -> Sequence[PhaseTime]:
    return () if duration_ns is None else (PhaseTime(phase, duration_ns, place, "otlp", ROUNDING_NS),)


def _edge_part(phase: Phase, duration_ns: int, place: Place, source: str = "proxy+otlp") -> Sequence[PhaseTime]:
    """Return the part of a phase between the proxy's stamp and the engine's.

    Both are wall clock of one host. A few microseconds below zero come from stamps of neighbouring moments; the phase is then 0.
    """
    return (PhaseTime(phase, max(0, duration_ns), place, source, max(0, -duration_ns)),)


_AT_THE_DOORS = frozenset({Phase.PREFILL_ADMISSION, Phase.PREFILL_RESPOND, Phase.DECODE_ADMISSION, Phase.DECODE_RESPOND})
"""Phases of which only a part is measured.

The part lies between the proxy's stamp and the engine's; what the engine does before and after is not in it.
"""


def _unmeasured(every: Sequence[Phase], known: Sequence[PhaseTime]) -> tuple[Phase, ...]:
    """Return the phases that the unattributed rest of a process may hide.

    All of its phases except those that the engine measured whole.
    """
    measured = {p.phase for p in known} | {m for p in known for m in p.may_be}
    return tuple(phase for phase in every if phase in _AT_THE_DOORS or phase not in measured)


def _rest(place: Place, source: str, may_be: tuple[Phase, ...]) -> PhaseTime:
    return PhaseTime(_UNATTRIBUTED, 0, place, source, 0, may_be)


def _widen(phases: Sequence[PhaseTime]) -> tuple[PhaseTime, ...]:
    """Widen the bound of each phase that the unattributed rest may hide.

    The bound grows by the length of that rest.
    """
    doubt: dict[Phase, int] = {}
    for rest in phases:
        if rest.phase is _UNATTRIBUTED:
            for phase in rest.may_be:
                doubt[phase] = doubt.get(phase, 0) + rest.duration_ns
    return tuple(replace(p, bound_ns=p.bound_ns + doubt[p.phase]) if p.phase in doubt else p for p in phases)


def _hops(path: Path, between_ns: int, inside_p_ns: int | None, clocks: HostClocks) -> tuple[PhaseTime, ...]:
    """Return the time between the processes in parts.

    It is one part where no evidence splits it.
    ``inside_p_ns``: None without a prefill on the path.
    """
    found = _by_router(path, between_ns, inside_p_ns) or _by_clocks(path, between_ns, clocks)
    return found or (PhaseTime(Phase.ROUTER_AND_HOPS, between_ns, Place.PATH, "edge-proxy"),)


def _by_router(path: Path, between_ns: int, inside_p_ns: int | None) -> tuple[PhaseTime, ...]:
    server, to_p, to_d = _calls(path)
    first = to_p if inside_p_ns is not None else to_d
    if server is None or to_d is None or first is None:
        return ()
    router = first.start_unix_ns - server.start_unix_ns
    around_p = to_d.start_unix_ns - first.start_unix_ns - inside_p_ns if inside_p_ns is not None else 0
    rest = between_ns - router - around_p
    if min(router, around_p, rest) < 0:
        return ()  # spans of another attempt, or an unreliable end
    found = [PhaseTime(Phase.ROUTER, router, Place.PATH, "otlp", ROUNDING_NS)]
    if inside_p_ns is not None:
        found.append(PhaseTime(Phase.PREFILL_HOPS, around_p, Place.PATH, "otlp-proxy", ROUNDING_NS))
    return (*found, PhaseTime(Phase.DECODE_HOPS, rest, Place.PATH, "edge-proxy", ROUNDING_NS))


def _calls(path: Path) -> tuple[RouterCall | None, RouterCall | None, RouterCall | None]:
    """Return the router's server span, its last call of P and its last call of D.

    All are of one router; None where there is none, or several server spans.
    """
    servers = [call for call in path.calls if call.kind == "server"]
    if len(servers) != 1:
        return None, None, None
    own = [call for call in path.calls if call.process.instance == servers[0].process.instance and call.start_unix_ns > 0]
    return servers[0], _last(own, Role.PREFILL), _last(own, Role.DECODE)


def _last(calls: Sequence[RouterCall], phase: Role) -> RouterCall | None:
    return max((call for call in calls if call.phase is phase), key=lambda call: call.start_unix_ns, default=None)


def _by_clocks(path: Path, between_ns: int, clocks: HostClocks) -> tuple[PhaseTime, ...]:
    edge, d = path.edge, path.decode.exchange if path.decode is not None else None
    if edge is None or d is None:
        return ()
    seen, left = _first(edge), _first(d)
    if seen is None or left is None:
        return ()
    offset = clocks.between(edge.process.host, d.process.host, seen)
    if offset is None:
        return ()  # one host: the hop is too short to split off
    if offset.low_ns is None or offset.high_ns is None:
        return ()
    least, most = max(0, seen - left + offset.low_ns), min(between_ns, seen - left + offset.high_ns)
    if most < least or most - least > max(NARROW_NS, NARROW_SHARE * between_ns):
        return ()
    hops, bound = (least + most) // 2, (most - least + 1) // 2
    return (
        PhaseTime(Phase.ROUTER_AND_HOPS, between_ns - hops, Place.PATH, "edge-proxy", bound),
        PhaseTime(Phase.DECODE_HOPS, hops, Place.PATH, "clocks", bound),
    )


def _first(exchange: Exchange) -> int | None:
    """Return when the first token, or the whole response, left; by its host's clock."""
    if exchange.stream:
        return exchange.arrival_unix_ns + exchange.ttft_token_ns if exchange.ttft_token_ns is not None else None
    return exchange.arrival_unix_ns + exchange.duration_ns
