"""Write the explanation of a period as a few plain sentences, and as JSON.

The sentences are for an engineer on call. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any, Final

from handrail.durations import format_duration
from handrail.phases import Phase
from handrail_collector.explain.period.concentration import PLACES, Concentration
from handrail_collector.explain.period.report import (
    LEAST_LONGER_NS,
    NEEDED,
    TIMES_LONGER,
    CauseShare,
    PeriodAnswer,
    ScopeAnswer,
    Tail,
    TailVerdict,
    standing,
)
from handrail_collector.explain.period.tail import PhaseMore, TailCause

_MAX_CAUSES: Final = 3  # causes, phases or places in one sentence
_LITTLE: Final = 0.005
_MOST: Final = 0.6

WHERE: Final = {
    "prefill_host": "prefill host {}",
    "decode_host": "decode host {}",
    "link": "the link {}",
    "model": "the model {}",
    "outcome": "the outcome {}",
    "kv_outcome": "the KV outcome {}",
}


def summary(scope: ScopeAnswer) -> list[str]:
    """Return the sentences of a scope, most important first."""
    times, failed = [*_ttft(scope), *_gaps(scope), *_stalls(scope)], _failed(scope)
    lines = [*failed, *times] if mostly_failed(scope) else [*times, *failed]
    if scope.requests and scope.complete < scope.requests:
        missing = scope.requests - scope.complete
        lines.append(f"{_count(missing)} ({_percent(missing / scope.requests)}) lack evidence from a process on their path.")
    return lines


def mostly_failed(scope: ScopeAnswer) -> bool:
    """Whether failures are the main news.

    Then the waiting time of the other requests is of little interest.
    """
    return scope.failures.requests > 0 and 2 * scope.failures.requests >= scope.requests


def to_json(answer: PeriodAnswer) -> dict[str, Any]:
    """Return every field by its name, enums as values, and each scope's ``summary``."""
    plain = asdict(answer)
    for scope, made in zip(plain["scopes"], answer.scopes, strict=True):
        scope["summary"] = summary(made)
        for name, tail in (("ttft", made.ttft), ("gap", made.gap)):
            if tail is not None:
                scope[name] |= {"measure": tail.measure.value, "verdict": tail.verdict.value, "excess_ns": tail.excess_ns}
                for phase, of in zip(scope[name]["phases"], tail.phases, strict=True):
                    phase["excess_ns"] = of.excess_ns
    return plain


def _ttft(scope: ScopeAnswer) -> list[str]:
    tail = scope.ttft
    if tail is None:
        return ["No request of this scope has a time to first token."]
    if tail.verdict is TailVerdict.CANNOT_TELL:
        return [
            f"Cannot tell why the slowest are slow: {_count(scope.timed)} with a time to first token; {NEEDED:,} are needed, "
            "so that the slowest 1 % are ten."
        ]
    slow = (
        f"the slowest 1 % ({_count(tail.requests)}, TTFT {format_duration(tail.from_ns)} or more) waited "
        f"{format_duration(tail.excess_ns)} longer than the middle half"
    )
    if tail.verdict is TailVerdict.NOTHING:
        return [f"Nothing stands out: {slow}{_nowhere(tail)}.", *_spread(tail)]
    lines = [f"{slow[0].upper()}{slow[1:]}."]
    if tail.causes is not None and tail.causes.named:
        lines.append(_named(tail))
    lines += [_place(contrast) for contrast in standing(tail.concentrations)[:_MAX_CAUSES]]
    if tail.causes is None or not tail.causes.named:
        lines += _spread(tail)
    elif tail.unattributed_share is not None and tail.unattributed_share > _LITTLE:
        lines.append(f"{_percent(tail.unattributed_share)} of the extra time is unattributed: no evidence says what it was.")
    return lines


def _nowhere(tail: Tail) -> str:
    """Return where the slowest were although nothing stands out.

    It agrees with the table below the sentences.
    """
    if not tail.much_longer:
        least = format_duration(LEAST_LONGER_NS[tail.measure])
        return f"; that is too little to explain (Handrail explains from {TIMES_LONGER} times as long and {least} more on)"
    hints = [contrast for contrast in tail.concentrations if contrast.above_chance]
    if hints:
        first = hints[0]
        where = WHERE[first.dimension].format(first.value)
        shares = f"{_percent(first.cases_share)} against {_percent(first.controls_share)}"
        return f"; {where} has more of them ({shares}), but not by enough to name it as the cause"
    if any(contrast.dimension in PLACES for contrast in tail.concentrations):
        return ", and no host or link has clearly more of the slow ones"
    return "" if tail.located else "; their hosts are unknown"


def _named(tail: Tail) -> str:
    assert tail.causes is not None
    causes = tail.causes
    parts = [f"{_percent(each.share)} {_cause(each)}" for each in causes.named[:_MAX_CAUSES]]
    more = sum(each.requests for each in causes.named[_MAX_CAUSES:])
    rest = [f"{_percent(more / causes.slow)} other causes listed below"] if more else []
    if causes.ambiguous:
        rest.append(f"{_percent(causes.ambiguous / causes.slow)} two phases that grew equally")
    if causes.at_base_rate:
        rest.append(f"{_percent(causes.at_base_rate / causes.slow)} nothing out of the ordinary")
    text = "; ".join([*parts, *rest])
    return f"All of them: {text.partition(' % ')[2]}." if len(parts) == 1 and not rest else f"Of them: {text}."


def _cause(named: TailCause) -> str:
    where = f" at {named.place}" if named.place else ""
    if named.why:
        phases = f", in {_either(named.phases)}" if named.phases else ""
        return f"{named.why}{where} (the engine's process paused for {format_duration(named.excess_ns)} on average{phases})"
    hidden = f", which may hide {_either(named.may_be)}" if named.may_be and named.phase == Phase.UNATTRIBUTED.value else ""
    return f"{named.phase}{where} (+{format_duration(named.excess_ns)} on average{hidden})"


def _spread(tail: Tail) -> list[str]:
    """Return which phases make up the difference."""
    grown = [phase for phase in tail.phases if phase.excess_ns > 0 and phase.share >= _LITTLE][:_MAX_CAUSES]
    if not grown:
        return []
    text = ", ".join(f"{_percent(phase.share)} {_phase(phase)}" for phase in grown)
    size = tail.causes.by_size_ns if tail.causes is not None else 0
    longer = f" Longer prompts account for {format_duration(size)} of it." if size > _LITTLE * tail.excess_ns else ""
    return [f"The difference is {text}.{longer}"]


def _phase(phase: PhaseMore) -> str:
    return f"{phase.phase} ({phase.place})" if phase.place else phase.phase


def _place(contrast: Concentration, others: str = "middle half") -> str:
    what = WHERE[contrast.dimension].format(contrast.value)
    return f"{_percent(contrast.cases_share)} of them have {what}, but {_percent(contrast.controls_share)} of the {others}."


def _gaps(scope: ScopeAnswer) -> list[str]:
    tail = scope.gap
    if tail is None or tail.verdict is not TailVerdict.STANDS_OUT:
        return []
    lines = [f"The longest stream gaps ({format_duration(tail.from_ns)} or more, {_count(tail.requests)}):"]
    lines += [_place(contrast) for contrast in standing(tail.concentrations)[:_MAX_CAUSES]]
    return [" ".join(lines)]


def _stalls(scope: ScopeAnswer) -> list[str]:
    found = scope.stalls
    if found is None:
        return []
    text = ", ".join(f"{_percent(each.share)} {each.cause}{_at(each)}" for each in found.causes[:_MAX_CAUSES])
    more = sum(each.stalls for each in found.causes[_MAX_CAUSES:])
    rest = f", {_percent(more / found.stalls)} others" if more else ""
    times = f"{found.stalls:,} time{'s' if found.stalls > 1 else ''}"
    sentences = [f"Streams stalled {times}, {format_duration(found.gap_ns)} in all: {text}{rest}."]
    longest = sorted((each for each in found.causes if each.longest), key=lambda each: -each.longest)[:_MAX_CAUSES]
    if longest and found.longest < found.stalls and scope.gap is not None:
        parts = ", ".join(f"{_percent(each.longest_share or 0.0)} {each.cause}" for each in longest)
        sentences.append(f"Of those of {format_duration(scope.gap.from_ns)} or more: {parts}.")
    return [" ".join(sentences)]


def _at(each: CauseShare) -> str:
    """Return the number of events and the main host of a cause's stalls.

    Events only where one event stalls several streams; the host only where it has most of the stalls.
    """
    parts = []
    if each.events < each.stalls:
        every = f", one every {format_duration(each.every_ns)}" if each.every_ns is not None else ""
        parts.append(f"{each.events:,} event{'s' if each.events > 1 else ''}{every}")
    if each.host and each.host_share > _MOST:
        parts.append(f"most at {each.host}")
    return f" ({'; '.join(parts)})" if parts else ""


def _failed(scope: ScopeAnswer) -> list[str]:
    failures = scope.failures
    if not failures.requests:
        return ["No request failed."]
    kinds = ", ".join(f"{count:,} {name}" for name, count in list(failures.by_outcome.items())[:_MAX_CAUSES])
    text = f"{_count(failures.requests)} failed ({_percent(failures.requests / scope.requests)}): {kinds}."
    places = [_place(contrast, "others") for contrast in standing(failures.concentrations)[:_MAX_CAUSES]]
    return [" ".join([text, *places])]


def _count(requests: int) -> str:
    return f"{requests:,} request" if requests == 1 else f"{requests:,} requests"


def _percent(share: float) -> str:
    per_cent = 100 * share
    if 0 < per_cent < 0.1:
        return "<0.1 %"
    return f"{per_cent:.1f} %" if per_cent < 9.95 and round(per_cent, 1) != round(per_cent) else f"{per_cent:.0f} %"


def _either(names: Iterable[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} or {last}" if first else last
