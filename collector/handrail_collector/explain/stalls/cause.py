"""Decide why a stream stalled.

Each possible cause is weighed by how often its evidence is present without a stall. Pure.
A cause is named when it accounts for at least half of the stall's excess, and when the doubt that it was present by chance is
small. Take an engine's stalls that no other cause can account for. Let q be the share of them that this cause makes, and p how
often its evidence is present without a stall. Then it is present in f = q + (1 - q) p of them. Where it is present, it is so by
chance with the probability (1 - q) p / f (in epidemiology, one less the attributable fraction among the exposed).
q is learned from the stalls of the last minutes, from a sceptical prior: with ``PRIOR_NONE`` the cause makes none, otherwise any
share is equally likely. A cause whose times were shuffled is present in p of the stalls, so q goes to zero and nothing is named
(tests/bench/stalls).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from handrail_collector.explain.stalls.base_rate import OF_STEPS, Base
from handrail_collector.explain.stalls.evidence import Shares, StallCause, StallWindow
from handrail_collector.stitch.engine_activity import BaseRateSample, EngineTimeline

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
