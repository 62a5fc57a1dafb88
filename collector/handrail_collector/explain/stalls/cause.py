"""Why did a stream stand still? What can account for it, weighed by how often that is there when nothing stands still. Pure.

A cause is named when it can account for half of what the stall took too long, and when the doubt that it was there by chance is
small. Of an engine's stalls that no other cause can account for, let q be the share that this one makes, and p how often its
evidence is there without a stall. Then it is there in f = q + (1 - q) p of them, and where it is, by chance with the probability
(1 - q) p / f (in epidemiology, one less the attributable fraction among the exposed). q is learned from the stalls of the last
minutes, from a prior that doubts: with ``PRIOR_NONE`` the cause makes none, else any share is as likely. Causes whose times were
shuffled are there in p of the stalls, so q goes to none and nothing is named (tests/bench/stalls).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from handrail_collector.explain.stalls.base_rate import OF_STEPS, Base
from handrail_collector.explain.stalls.evidence import Shares, StallCause, StallWindow
from handrail_collector.stitch.engine_activity import BaseRateSample, EngineTimeline

ENOUGH: Final = 0.5
"""Of what a stall took too long, so much is to be accounted for."""

DOUBT: Final = 0.05
"""The most doubt with which a cause is named."""

PRIOR_NONE: Final = 0.7
PRIOR_NONE_OF_STEPS: Final = 0.5
"""What made a step long was in that step. With no more doubt than this a first stall is named where the evidence is there by
chance at most 1.7 % of the time, so of stalls that other things made no more than so many are."""

_SHARES: Final = np.concatenate([[0.0], (np.arange(20) + 0.5) / 20])


@dataclass(frozen=True, slots=True)
class StallVerdict:
    """``lift``: how much more often the evidence is there in the engine's stalls that nothing else accounts for, this one
    counted, than in windows without a stall; None where nothing is inferred. ``doubt``: the probability that it was there by
    chance. ``accounted_ns``: how much of the stall it can account for.
    """

    cause: StallCause
    accounted_ns: int = 0
    lift: float | None = None
    doubt: float | None = None
    evidence: tuple[str, ...] = ()


def accounting(found: Shares, excess_ns: int) -> list[StallCause]:
    """The causes that can account for enough, those that can for most first."""
    enough = [cause for cause, ns in found.ns.items() if ns >= ENOUGH * excess_ns]
    return sorted(enough, key=lambda cause: -found.ns[cause])


def verdict(
    of: StallWindow, found: Shares, base: Base | None, doings: EngineTimeline | None, own: BaseRateSample | None
) -> StallVerdict:
    """Of one stall. ``base`` and ``doings``: of the engine; ``own``: which of its trials this stall is of."""
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
        # no coincidence: while nothing was read nothing could come, and who stands preempted makes no token
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
    """That evidence, there without a stall so often, was there by chance; it was there in ``present`` of the other ``stalls``.

    ``none``: how likely it is from the start that the cause makes no stalls here.
    """
    there = np.minimum(_SHARES + (1 - _SHARES) * chance, 1 - 1e-9)
    prior = np.concatenate([[none], np.full(20, (1 - none) / 20)])
    weights = np.log(prior) + present * np.log(there) + (stalls - present) * np.log1p(-there)
    weights = np.exp(weights - weights.max())
    by_chance = (1 - _SHARES) * chance / there
    return float((weights * by_chance * there).sum() / (weights * there).sum())


def _rejected(each: StallVerdict) -> str:
    assert each.lift is not None  # what is measured is named
    assert each.doubt is not None
    how = f"{each.lift:.3g} times as often as without a stall, by chance in {100 * each.doubt:.2g} %"
    return f"{each.evidence[0]}, but that may be chance ({how})"
