"""Explain a request's stalls and pauses by its engine's activity.

The stalls are those that the outermost observer of the stream saw, as are the gaps of the request's row.
The engine's activity is found by the engine's own clock: the stream since its first token is the same there as here, so no
clocks of two hosts are compared.

A pause of the engine's process before the first token shows up in whatever phase it falls into: a load that starts late, an end
that is noticed late, a longer step. So the row keeps it beside the phases. Its cause is weighed as for stalls
(``evidence.attribute_time``): a pause without a reason may belong to a long step that held the interpreter's lock.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Final

from handrail.records import Exchange
from handrail.stalls import Stall, unpack_times
from handrail_collector.explain.request.path import Path, ProcessEvidence, path_of
from handrail_collector.explain.stalls.cause import AROUND_NS, Base, StallVerdict, accounting, base_of, verdict
from handrail_collector.explain.stalls.evidence import Interval, Shares, StallCause, StallWindow, attribute_time
from handrail_collector.rows import NO_STALLS, RequestRow, StallRow
from handrail_collector.stitch.engine_activity import LEAST_TOKENS, Activity, EngineTimeline, StreamInterval
from handrail_collector.stitch.group import RequestGroup

ALIKE_NS: Final = 50_000_000
"""Most difference between two observers' times of one stall.

Times count from the stream's first content.
"""

BASE_KEPT_NS: Final = 5_000_000_000
"""How long the comparison data serve for nearby stalls.

A new computation takes some milliseconds; 60 for a busy engine.
"""

BASES: Final = 256
DECODE, ON_PATH = "decode", "path"


@dataclass(frozen=True, slots=True)
class WitnessedStall:
    """One stall of a request: the observed gap, its time and evidence, its place."""

    stall: Stall
    suspect: StallWindow
    at: str


@dataclass(slots=True)
class StallDesk:
    """Explain stalls by engine activity, and remember them for later comparison."""

    activity: Activity = field(default_factory=Activity)
    _bases: OrderedDict[tuple[int, int], _CachedBase] = field(default_factory=OrderedDict)  # by id of the activity, and time slot

    def with_pauses(self, group: RequestGroup, row: RequestRow) -> RequestRow:
        """Return ``row`` with its engines' pauses before the first token."""
        return with_pauses(row, path_of(group), self.activity) if has_pause_data(row, self.activity) else row

    def explain(self, group: RequestGroup, row: RequestRow) -> list[StallRow]:
        """Return the rows of ``row``'s stalls, in its version.

        Each request's stalls are learned once; later versions do not add to the base rates.
        """
        path = path_of(group)
        seen = list(stalls_seen(path, self.activity))
        found = [attribute_time(each.suspect) for each in seen]
        if not group.stalls_reported:
            for each, of in zip(seen, found, strict=True):
                learn(each.suspect, of)
            remember_stream(path, self.activity)
        rows = [
            _row(row, path, number, each, self._verdict(each.suspect, of))
            for number, (each, of) in enumerate(zip(seen, found, strict=True))
        ]
        if not rows and group.stalls_reported:
            rows.append(no_stalls(row, row.trace_id, row.request_id, row.version))
        return rows

    def _verdict(self, suspect: StallWindow, of: Shares) -> StallVerdict:
        doings = suspect.doings or suspect.observer
        if doings is None or not accounting(of, suspect.excess_ns):
            return verdict(suspect, of, None, None, None)
        compared = suspect if suspect.doings is not None else replace(suspect, begin=suspect.seen[0], end=suspect.seen[1])
        own = doings.trials.get(compared.begin // 1_000_000_000)
        return verdict(compared, of, self._base(doings, compared.begin), doings, own)

    def _base(self, doings: EngineTimeline, begin: int) -> Base:
        """Return cached comparison data for about this time.

        They are recomputed where many relevant reports arrived since.
        """
        slot = begin // BASE_KEPT_NS
        key = id(doings), slot
        known = self._bases.get(key)
        if known is not None and known.doings is doings:
            whole = known.reported_until > (slot + 1) * BASE_KEPT_NS + AROUND_NS
            if whole or doings.newest_unix_ns - known.reported_until < BASE_KEPT_NS:
                return known.base
        base = base_of(doings, (2 * slot + 1) * BASE_KEPT_NS // 2)
        self._bases[key] = _CachedBase(doings, doings.newest_unix_ns, base)
        self._bases.move_to_end(key)
        if len(self._bases) > BASES:
            self._bases.popitem(last=False)
        return base


@dataclass(frozen=True, slots=True)
class _CachedBase:
    """``reported_until``: the latest report of the engine when the base was made."""

    doings: EngineTimeline
    reported_until: int
    base: Base


def remember_stream(path: Path, activity: Activity) -> None:
    """Remember when a stream ran and when it stalled, at its engine and at the edge.

    Stalls are compared with the time between stalls.
    """
    decode, outer = path.decode, path.edge
    inner = decode.exchange if decode is not None else None
    if outer is not None and outer.gaps is not None:
        _remember(activity.at(outer.process.instance), outer, outer.arrival_unix_ns)
    if decode is None or not decode.instance:
        return
    if inner is not None and inner.gaps is not None:
        _remember(activity.at(decode.instance), inner, inner.arrival_unix_ns)
    elif outer is not None and outer.gaps is not None:
        first, shown = _first_at(decode), _first(outer)
        if first is not None and shown is not None:
            _remember(activity.at(decode.instance), outer, first - shown)


def _remember(doings: EngineTimeline, seen: Exchange, origin_unix_ns: int) -> None:
    """Add the stream's interval and its stalls to ``doings``.

    ``origin_unix_ns``: when the exchange began, by the clock of ``doings``.
    """
    begin = _first(seen)
    if begin is not None and seen.gaps is not None:
        end = seen.last_content_ns if seen.last_content_ns is not None else begin + seen.gaps.sum_ns
        doings.streams.put(StreamInterval(origin_unix_ns + begin, origin_unix_ns + end))
    if seen.stalls is not None:
        with contextlib.suppress(ValueError):
            for first, last in unpack_times(seen.stalls.times):
                doings.stalls.put(StreamInterval(origin_unix_ns + first, origin_unix_ns + last))


def learn(suspect: StallWindow, of: Shares) -> None:
    """Count a stall in the sample of the process where it happened."""
    doings, at = (suspect.doings, suspect.begin) if suspect.doings is not None else (suspect.observer, suspect.seen[0])
    if doings is None:
        return
    trial = doings.trial(at)
    trial.stalls += 1
    suspects = accounting(of, suspect.excess_ns)
    if len(suspects) < 2:
        only = suspects[0].value if suspects else ""
        trial.alone[only] = trial.alone.get(only, 0) + 1


def no_stalls(row: RequestRow, trace_id: str, request_id: str, version: int) -> StallRow:
    """Return the row that withdraws the stalls published under a request row."""
    return StallRow(
        started_unix_ns=row.started_unix_ns, trace_id=trace_id, request_id=request_id, version=version, number=NO_STALLS
    )


def stalls_seen(path: Path, activity: Activity) -> Iterator[WitnessedStall]:
    """Yield the stalls of the stream, each with the evidence of its time.

    A hand-off in a stream's first gap is no stall.
    """
    decode = path.decode
    inner = decode.exchange if decode is not None else None
    witness = next((each for each in (path.edge, inner) if each is not None and each.gaps is not None), None)
    if witness is None or witness.stalls is None:
        return
    doings = activity.of(decode.instance) if decode is not None else None
    outside = witness is not inner
    observer = activity.of(witness.process.instance) if outside else None
    for stall in witness.stalls.longest:
        if outside and stall.index == 0 and decode is not None and _hides_handoff(witness, stall, path, decode):
            continue
        suspect = StallWindow(
            begin=witness.arrival_unix_ns + stall.begin_ns,
            end=witness.arrival_unix_ns + stall.end_ns,
            median_ns=stall.median_ns,
            observer=observer,
            seen=(witness.arrival_unix_ns + stall.begin_ns, witness.arrival_unix_ns + stall.end_ns),
            preempted=_preempted(decode),
            held_ns=stall.held_ns,
        )
        at = DECODE
        if not outside:
            suspect = replace(suspect, doings=doings)
        elif inner is not None and inner.gaps is not None:
            same = _same(witness, stall, inner)
            at = DECODE if same is not None else ON_PATH
            if same is not None:
                begin, end = (inner.arrival_unix_ns + offset for offset in (same.begin_ns, same.end_ns))
                suspect = replace(suspect, begin=begin, end=end, doings=doings)
        elif (first := _first_at(decode)) is not None and (shown := _first(witness)) is not None:
            begin, end = (first + offset - shown for offset in (stall.begin_ns, stall.end_ns))
            suspect = replace(suspect, begin=begin, end=end, doings=doings)
        yield WitnessedStall(stall, suspect, at)


def _first(exchange: Exchange) -> int | None:
    """Return when the first content came, in ns from the exchange's begin."""
    return exchange.ttft_text_ns if exchange.ttft_text_ns is not None else exchange.ttft_token_ns


def _first_at(decode: ProcessEvidence | None) -> int | None:
    """Return when D made the first token, by its own clock."""
    run = decode.first_run if decode is not None else None
    times = run.times if run is not None else None
    return times.queued_unix_ns + times.first_token_ns if times is not None and times.first_token_ns is not None else None


def _same(outer: Exchange, stall: Stall, inner: Exchange) -> Stall | None:
    """Return the same stall as D's own observer saw it; None where D did not stall.

    Where both counted equally many gaps, it is the gap with the same index, because a late first chunk shifts all times.
    Otherwise it
    is matched by time.
    A stall too short to be among D's reported ones is derived from the outer one.
    """
    here, there = _first(outer), _first(inner)
    if here is None or there is None:
        return None
    stalls = inner.stalls.longest if inner.stalls is not None else ()
    end = stall.end_ns - here
    alike = outer.gaps is not None and inner.gaps is not None and outer.gaps.count == inner.gaps.count
    near = [each for each in stalls if alike and each.index == stall.index]
    near = near or [each for each in stalls if abs(each.end_ns - there - end) <= max(ALIKE_NS, stall.gap_ns // 4)]
    found = max(near, key=lambda each: each.gap_ns, default=None)
    if found is not None:
        return found if 2 * found.gap_ns >= stall.gap_ns else None
    cut = inner.stalls is not None and inner.stalls.count > len(stalls) and stall.gap_ns < min(each.gap_ns for each in stalls)
    return replace(stall, end_ns=there + end) if cut else None


def _hides_handoff(edge: Exchange, stall: Stall, path: Path, decode: ProcessEvidence) -> bool:
    """Whether the gap after the first token is the hand-off, not a stall.

    P made the first token, and the gap holds all that D needed for its own (case B16).
    D's first token cannot reach the edge before P and D have taken their time for it, one after the other.
    """
    own = decode.exchange.ttft_token_ns if decode.exchange is not None else None
    if own is None and decode.first_run is not None and decode.first_run.times is not None:
        own = decode.first_run.times.first_token_ns
    shown = _first(edge)
    if own is None or shown is None or 5 * stall.gap_ns < 4 * own:
        return False
    before = path.prefill.exchange.duration_ns if path.prefill is not None and path.prefill.exchange is not None else 0
    return shown < before + own


def _preempted(decode: ProcessEvidence | None) -> tuple[tuple[int, int], ...]:
    """Return when the request was preempted at D, by D's clock."""
    found = []
    for run in decode.runs if decode is not None else ():
        if run.times is not None:
            queued, marks = run.times.queued_unix_ns, run.times.preempted
            found += [(queued + first, queued + last) for first, last in zip(marks[::2], marks[1::2], strict=False)]
    return tuple(found)


def _row(row: RequestRow, path: Path, number: int, each: WitnessedStall, found: StallVerdict) -> StallRow:
    stall, decode = each.stall, path.decode
    inner = decode.exchange if decode is not None else None
    witness = path.edge if path.edge is not None and path.edge.gaps is not None else inner
    assert witness is not None
    evidence = found.evidence
    if stall.turn:
        evidence = (*evidence, f"content turns from {stall.turn.replace('>', ' to ')} here: a parser may have delayed it")
    if found.cause is StallCause.UNKNOWN and not evidence:
        evidence = (_nothing(each),)
    return StallRow(
        started_unix_ns=witness.arrival_unix_ns + stall.begin_ns,
        trace_id=row.trace_id,
        request_id=row.request_id,
        version=row.version,
        number=number,
        client_request_id=row.client_request_id,
        scope=row.scope,
        model=row.model,
        witness=witness.process.instance,
        at=each.at,
        instance=row.decode_instance,
        host=row.decode_host,
        offset_ns=witness.arrival_unix_ns + stall.begin_ns - row.started_unix_ns,
        gap_ns=stall.gap_ns,
        median_ns=stall.median_ns,
        index=stall.index,
        cause=found.cause.value,
        accounted_ns=found.accounted_ns,
        lift=found.lift,
        doubt=found.doubt,
        evidence=evidence,
        first_offset=row.first_offset,
        last_offset=row.last_offset,
    )


def _nothing(each: WitnessedStall) -> str:
    """Return why no cause is suspected."""
    if each.at == ON_PATH:
        return "the engine's own stream continued: the delay is between the engine and the observer"
    doings = each.suspect.doings
    if doings is None or not (doings.seconds or doings.steps):
        return "the content of the engine's steps is unknown: the plugin reports it"
    steps = list(doings.steps.during(each.suspect.begin, each.suspect.end))
    if any(step.prefill_tokens + step.resumed_tokens >= LEAST_TOKENS for step in steps):
        return "the work of the engine's steps does not explain it"
    if steps:
        return "a step took long, without unusual work"
    return "the engine's steps were no longer than usual"


def with_pauses(row: RequestRow, path: Path, activity: Activity) -> RequestRow:
    """Return ``row`` with the pauses of the engines' processes on ``path``."""
    return replace(
        row,
        prefill_paused_ns=_paused_ns(path.prefill, activity.of(row.prefill_instance or "")),
        decode_paused_ns=_paused_ns(path.decode, activity.of(row.decode_instance or "")),
    )


def has_pause_data(row: RequestRow, activity: Activity) -> bool:
    """Whether an engine of ``row`` has ever reported a pause.

    Without one there is nothing to look for.
    """
    at = (activity.of(instance) for instance in (row.prefill_instance, row.decode_instance) if instance)
    return any(doings is not None and len(doings.pauses) > 0 for doings in at)


def _paused_ns(visit: ProcessEvidence | None, doings: EngineTimeline | None) -> int | None:
    window = _window(visit) if visit is not None and doings is not None else None
    if window is None or doings is None or not any(doings.pauses.during(*window)):
        return None
    return attribute_time(StallWindow(begin=window[0], end=window[1], median_ns=0, doings=doings)).ns.get(StallCause.HOST_PAUSE)


def _window(visit: ProcessEvidence) -> Interval | None:
    """Return the time from arrival to first token there; at P to its answer.

    By that host's wall clock; None where unknown.
    """
    exchange, run, engine = visit.exchange, visit.first_run, visit.engine
    begin, lasted = 0, None
    if exchange is not None:
        begin, lasted = exchange.arrival_unix_ns, exchange.ttft_token_ns
        lasted = exchange.duration_ns if lasted is None else lasted
    elif run is not None and run.times is not None:
        begin, lasted = run.times.queued_unix_ns, run.times.first_token_ns
    elif engine is not None:
        begin, lasted = engine.start_unix_ns, engine.ttft_ns
    return (begin, begin + lasted) if begin and lasted else None
