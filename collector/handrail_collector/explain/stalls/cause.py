"""Decide why a stream stalled.

Each possible cause is weighed by how often its evidence is present without a stall. Pure.
A cause is named when it accounts for at least half of the stall's excess, and when the doubt that it was present by chance is
small. Take an engine's stalls that no other cause can account for. Let q be the share of them that this cause makes, and p how
often its evidence is present without a stall. Then it is present in f = q + (1 - q) p of them. Where it is present, it is so by
chance with the probability (1 - q) p / f (in epidemiology, one less the attributable fraction among the exposed).
q is learned from the stalls of the last minutes, from a sceptical prior: with ``PRIOR_NONE`` the cause makes none, otherwise any
share is equally likely. A cause whose times were shuffled is present in p of the stalls, so q goes to zero and nothing is named
(tests/bench/stalls).

p, the base rate, comes from windows as long as the stall, of the same process. They are drawn from the time in which streams of
the process ran, less the time in which they stalled. Where stalls fill much of the time (a processor quota, a long prompt in
chunks), windows from all of it would show the cause as often as the stalls do, and no cause could ever be named.
Evidence that is merely frequent is frequent in these windows too: that is why they are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from handrail_collector.explain.stalls.cumulative import CumulativeTotal, Stretches, curve_of, stretches
from handrail_collector.explain.stalls.evidence import LATE_NS, Shares, StallCause, StallWindow, slow_times
from handrail_collector.stitch.engine_activity import BaseRateSample, EngineTimeline, LongStep, Second

ENOUGH: Final = 0.5
"""Share of a stall's excess that a cause must account for."""

DOUBT: Final = 0.05
"""Most doubt with which a cause is named."""

PRIOR_NONE: Final = 0.7
PRIOR_NONE_OF_STEPS: Final = 0.5
"""Prior probability that a cause inside steps makes no stalls here.

It is lower, because what made a step long was in that step. With it, a first stall is named where the evidence is present by
chance at most 1.7 % of the time. So of stalls with other causes, no more than that share is misnamed.
"""

AROUND_NS: Final = 120_000_000_000
"""How far from a stall windows are drawn."""

WINDOWS: Final = 256
HIT: Final = 0.7
"""Share of the stall's evidence that a window needs to count as a hit."""

OF_STEPS: Final = frozenset({StallCause.PREFILL_COSCHEDULED, StallCause.PREEMPTION})
"""Causes that are work of a step beside the stream's own tokens.

Their evidence appears at the end of that step.
"""

_INFERRED: Final = (
    StallCause.PREFILL_COSCHEDULED,
    StallCause.PREEMPTION,
    StallCause.KV_LANDING,
    StallCause.HOST_PAUSE,
    StallCause.GPU_THROTTLED,
)

Amount = tuple[float, float, float]
"""Evidence in an interval: (begin, end, amount)."""

Floats = NDArray[np.float64]

_SHARES: Final = np.concatenate([[0.0], (np.arange(20) + 0.5) / 20])


@dataclass(frozen=True, slots=True)
class StallVerdict:
    """The named cause of a stall, with its evidence.

    ``lift``: how many times as often the evidence is present in the engine's stalls that nothing else accounts for (this one
    included) as in windows without a stall; None where the cause is measured, not inferred.
    ``doubt``: the probability that the evidence was present by chance.
    ``accounted_ns``: how much of the stall the cause accounts for.
    """

    cause: StallCause
    accounted_ns: int = 0
    lift: float | None = None
    doubt: float | None = None
    evidence: tuple[str, ...] = ()


def accounting(found: Shares, excess_ns: int) -> list[StallCause]:
    """Return the causes that account for enough of a stall, largest first."""
    enough = [cause for cause, ns in found.ns.items() if ns >= ENOUGH * excess_ns]
    return sorted(enough, key=lambda cause: -found.ns[cause])


def verdict(
    of: StallWindow, found: Shares, base: Base | None, doings: EngineTimeline | None, own: BaseRateSample | None
) -> StallVerdict:
    """Return the verdict on one stall.

    ``base`` and ``doings`` are of the engine; ``own`` is the sample that already counts this stall.
    """
    weighed = [_weighed(cause, of, found, base, doings, own) for cause in accounting(found, of.excess_ns)]
    named = next((each for each in weighed if each.doubt is not None and each.doubt <= DOUBT), None)
    if named is not None:
        return named
    return StallVerdict(StallCause.UNKNOWN, evidence=tuple(_rejected(each) for each in weighed))


def _weighed(
    cause: StallCause,
    of: StallWindow,
    found: Shares,
    base: Base | None,
    doings: EngineTimeline | None,
    own: BaseRateSample | None,
) -> StallVerdict:
    lines = (found.words[cause],)
    if cause is StallCause.CLIENT_BACKPRESSURE or (
        cause is StallCause.PREEMPTION and of.preempted and _own_preemption(of, found)
    ):
        # measured, not inferred: nothing arrives while nothing is read, and a preempted request makes no token
        return StallVerdict(cause, found.ns[cause], None, 0.0, lines)
    chance = base.chance(cause, of, doings) if base is not None and doings is not None else 1.0
    trials = doings.trials.values() if doings is not None else ()
    others = [trial for trial in trials if trial is not own and trial.stalls]
    present = sum(trial.alone.get(cause.value, 0) / trial.stalls for trial in others)
    stalls = present + sum(trial.alone.get("", 0) / trial.stalls for trial in others)
    doubt = _doubt(chance, present, stalls, PRIOR_NONE_OF_STEPS if cause in OF_STEPS else PRIOR_NONE)
    lift = (present + 1) / (stalls + 1) / chance
    return StallVerdict(cause, found.ns[cause], round(lift, 1), round(doubt, 4), lines)


def _own_preemption(of: StallWindow, found: Shares) -> bool:
    pause = sum(max(0, min(last, of.end) - max(first, of.begin)) for first, last in of.preempted)
    return pause >= ENOUGH * of.excess_ns


def _doubt(chance: float, present: float, stalls: float, none: float) -> float:
    """Return the probability that the evidence was present by chance.

    ``chance``: how often it is present without a stall. It was present in ``present`` of the other ``stalls``.
    ``none``: the prior probability that the cause makes no stalls here.
    """
    there = np.minimum(_SHARES + (1 - _SHARES) * chance, 1 - 1e-9)
    prior = np.concatenate([[none], np.full(20, (1 - none) / 20)])
    weights = np.log(prior) + present * np.log(there) + (stalls - present) * np.log1p(-there)
    weights = np.exp(weights - weights.max())
    by_chance = (1 - _SHARES) * chance / there
    return float((weights * by_chance * there).sum() / (weights * there).sum())


def _rejected(each: StallVerdict) -> str:
    assert each.lift is not None  # a measured cause is always named
    assert each.doubt is not None
    how = f"{each.lift:.3g} times as often as without a stall, by chance in {100 * each.doubt:.2g} %"
    return f"{each.evidence[0]}, but that may be chance ({how})"


@dataclass(frozen=True, slots=True)
class Base:
    """An engine's evidence around some time, and the ordinary time to compare with.

    ``curves``: the running total of each cause's evidence.
    """

    origin_ns: int
    curves: dict[StallCause, CumulativeTotal]
    ordinary: Stretches

    def chance(self, cause: StallCause, of: StallWindow, doings: EngineTimeline) -> float:
        """Return the share of windows without a stall that hold as much of ``cause``.

        A window counts if it holds at least ``HIT`` of what ``doings`` had during the stall.
        Windows are as long as the stall; for a step's work, as long as the time in which the stall's last step must have ended.
        The share is never 0, because little time proves little: a Beta prior of a half each, over as many windows as do not
        overlap.
        It is 1 where nothing can be compared.
        """
        begin, end = of.last_steps if cause in OF_STEPS else (of.begin - LATE_NS, of.end)
        length = float(end - begin)
        total = self.ordinary.total_ns
        here = curve_of(_amounts(cause, doings, begin, end), begin).within(0, end - begin)
        if total < length or here <= 0:
            return 1.0
        found = 0
        if (curve := self.curves.get(cause)) is not None:
            starts: Floats = (np.arange(WINDOWS, dtype=np.float64) + 0.5) * ((total - length) / WINDOWS)
            found = np.count_nonzero(self.ordinary.amounts(curve, starts, length) >= HIT * here)
        share, apart = found / WINDOWS, total / length
        return (share * apart + 0.5) / (apart + 1)


def base_of(doings: EngineTimeline, at_unix_ns: int) -> Base:
    """Return the comparison data of an engine around a time, from all reports so far."""
    first, last = at_unix_ns - AROUND_NS, at_unix_ns + AROUND_NS
    ran = [(max(first, s.begin_unix_ns), min(last, s.end_unix_ns)) for s in doings.streams.during(first, last)]
    stalled = [(s.begin_unix_ns - LATE_NS, s.end_unix_ns + LATE_NS) for s in doings.stalls.during(first, last)]
    curves = ((cause, _amounts(cause, doings, first, last)) for cause in _INFERRED)
    return Base(
        origin_ns=first,
        curves={cause: curve_of(amounts, first) for cause, amounts in curves if amounts},
        ordinary=stretches(ran, stalled, first),
    )


def _amounts(cause: StallCause, doings: EngineTimeline, first: int, last: int) -> list[Amount]:
    """Return the evidence of a cause: how much of it there was, and when."""
    if cause is StallCause.PREFILL_COSCHEDULED:
        return _tokens(doings, first, last, lambda each: each.prefill_tokens)
    if cause is StallCause.PREEMPTION:
        return _tokens(doings, first, last, lambda each: each.resumed_tokens)
    if cause is StallCause.KV_LANDING:
        return [(x.begin_unix_ns, x.begin_unix_ns, float(x.tokens)) for x in doings.landings.during(first, last)]
    if cause is StallCause.HOST_PAUSE:
        return [(p.begin_unix_ns, p.end_unix_ns, p.end_unix_ns - p.begin_unix_ns) for p in doings.pauses.during(first, last)]
    return list(_lost(doings, first, last)) if cause is StallCause.GPU_THROTTLED else []


def _tokens(doings: EngineTimeline, first: int, last: int, tokens: Callable[[LongStep | Second], int]) -> list[Amount]:
    """Return the tokens of steps as evidence over time.

    A long step's tokens count at its end; those of other steps are spread over their second.
    """
    seconds = list(doings.seconds.during(first, last))
    if seconds:
        first, last = min(first, seconds[0].begin_unix_ns), max(last, seconds[-1].end_unix_ns)
    steps = list(doings.steps.during(first, last))
    found = [(float(s.end_unix_ns), float(s.end_unix_ns), float(tokens(s))) for s in steps if tokens(s)]
    place = 0
    for second in seconds:
        rest = tokens(second)
        while place < len(steps) and steps[place].begin_unix_ns < second.begin_unix_ns:
            place += 1
        at = place
        while at < len(steps) and steps[at].end_unix_ns <= second.end_unix_ns:
            rest -= tokens(steps[at])
            at += 1
        if rest > 0:
            found.append((float(second.begin_unix_ns), float(second.end_unix_ns), float(rest)))
    return found


def _lost(doings: EngineTimeline, first: int, last: int) -> Iterator[Amount]:
    for gpu in doings.gpus.values():
        for begin, end, share, _ in slow_times(gpu, first, last):
            yield begin, end, (end - begin) * (1 - share)
