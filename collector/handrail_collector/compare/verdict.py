"""What two arms side by side mean: pure rules over their reports.

A split arm against one that is not: ``split pays``, ``split does not pay`` or ``cannot tell``. The rules, the first that fits:

1. the work was not alike, or too few requests can be judged: cannot tell
2. the goodput per GPU of one arm is at least X, that of the other below X (bounds at 95 %): that one wins
3. at a rate per GPU that both arms had, neither reaches the goal, and their intervals of the share that meets both objectives do
   not overlap: the higher share wins, at that rate
4. anything else: cannot tell

Two arms of one layout: ``better``, ``worse``, ``mixed``, ``no difference`` or ``cannot tell``, by the figures whose intervals
(all at once at 95 %) exclude zero.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from handrail_collector.compare.goodput import FEWEST_JUDGED
from handrail_collector.compare.report import ArmReport, Change, Estimate, Objectives, RateLevel
from handrail_collector.compare.telling import bounds, changed, label, portion, rate, signed

PAYS: Final = "split pays"
DOES_NOT_PAY: Final = "split does not pay"
CANNOT_TELL: Final = "cannot tell"
BETTER: Final = "better"
WORSE: Final = "worse"
MIXED: Final = "mixed"
NO_DIFFERENCE: Final = "no difference"
SPLIT: Final = "split"
COLLOCATED: Final = "collocated"
UNKNOWN: Final = "unknown"

SAME_RATE: Final = 1.15
"""Rates per GPU that differ by less than this factor are the same."""

IN_THE_HANDOFF: Final = 0.5
"""The share of a longer TTFT that lies in the hand-off, from which on it is called lost there."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """A word of this module and why, in plain words, most important first. ``short``: the reasons in a few words each."""

    word: str
    reasons: tuple[str, ...]
    short: tuple[str, ...] = ()


def same_layout(of: ArmReport, to: ArmReport, changes: Sequence[Change], unlike: Sequence[str]) -> Verdict:
    """Before and after: what is better, worse, or no different."""
    if problems := [*_other_work(unlike), *_other_rate(of, to)]:
        return Verdict(CANNOT_TELL, tuple(problems))
    told = {word: [change for change in changes if change.says == word] for word in (BETTER, WORSE, NO_DIFFERENCE, CANNOT_TELL)}
    reasons = [f"{change.says}: {changed(change, of.gap_unit)}" for word in (WORSE, BETTER) for change in told[word]]
    if told[BETTER] or told[WORSE]:
        return Verdict(MIXED if told[BETTER] and told[WORSE] else BETTER if told[BETTER] else WORSE, tuple(reasons))
    if told[NO_DIFFERENCE]:
        names = ", ".join(label(change.figure, of.gap_unit) for change in told[NO_DIFFERENCE])
        return Verdict(NO_DIFFERENCE, (f"no difference that chance does not explain: {names}",))
    return Verdict(CANNOT_TELL, (f"too few requests: {of.requests:,} in {of.name}, {to.requests:,} in {to.name}",))


def split_against(
    base: ArmReport, split: ArmReport, changes: Sequence[Change], unlike: Sequence[str], goal: Objectives, handoff: Estimate
) -> Verdict:
    """``handoff``: what the hand-off and what may hide it take more than the same phases of ``base``, mean per request in ns."""
    if problems := [*_other_work(unlike), *_too_few(base, split)]:
        return Verdict(CANNOT_TELL, tuple(problems))
    by_figure = {change.figure: change for change in changes}
    gaps, first = by_figure["gap_p99_ns"], by_figure["ttft_p50_ns"]
    tail, start = _tail(gaps, goal), _first_token(first, split, goal, handoff)
    why = [f"{tail} ({changed(gaps, split.gap_unit)})", f"{start} ({changed(first)})", *_where_lost(start, split, handoff)]
    why += [f"so they were not at the same load: {each}" for each in _other_rate(base, split)]
    told = _by_goodput(base, split)
    if told.word == CANNOT_TELL:
        shares = _by_share(base, split, goal)
        reasons = shares.reasons if shares.word != CANNOT_TELL else (*told.reasons, *shares.reasons)
        told = Verdict(shares.word, reasons, told.short or shares.short)
    return Verdict(told.word, (*told.reasons, *why), told.short if told.word == CANNOT_TELL else (tail, start))


def together(verdicts: Sequence[str]) -> str:
    """One word for a split arm against several others: it pays only where it pays against each."""
    return next(word for word in (DOES_NOT_PAY, CANNOT_TELL, PAYS) if word in verdicts)


def _other_work(unlike: Sequence[str]) -> Iterator[str]:
    yield from (f"the work was not the same: {each}" for each in unlike)


def _other_rate(of: ArmReport, to: ArmReport) -> Iterator[str]:
    rates = [arm.rate / arm.gpus for arm in (of, to)]
    if min(rates) > 0 and max(rates) / min(rates) >= SAME_RATE:
        yield f"the load was not the same: {of.name} {rate(rates[0])}, {to.name} {rate(rates[1])} per GPU"


def _too_few(*arms: ArmReport) -> Iterator[str]:
    for arm in arms:
        if not arm.goodput.levels:
            yield f"too few requests of {arm.name} can be judged by the objectives: {FEWEST_JUDGED} are needed"


def _by_goodput(base: ArmReport, split: ArmReport) -> Verdict:
    told = (f"goodput per GPU: {base.name} {bounds(base)}, {split.name} {bounds(split)}",)
    for word, winner, loser in ((PAYS, split, base), (DOES_NOT_PAY, base, split)):
        floor, ceiling = winner.goodput.at_least, loser.goodput.below
        odd = winner.goodput.contradicts or loser.goodput.contradicts
        if floor is None or ceiling is None or odd:
            continue
        if floor / winner.goodput.gpus * SAME_RATE > ceiling / loser.goodput.gpus:
            return Verdict(word, told)
    if base.goodput.at_least is not None and split.goodput.at_least is not None:
        short = "both meet the objectives at rates that were seen"
        return Verdict(CANNOT_TELL, (*told, f"{short}: only higher ones would tell them apart"), (short,))
    return Verdict(CANNOT_TELL, told)


def _by_share(base: ArmReport, split: ArmReport, goal: Objectives) -> Verdict:
    """At the highest rate that both had, where neither reaches the goal."""
    pair = _same_rate(base, split)
    if pair is None:
        short = "no rate per GPU was seen in both arms"
        return Verdict(CANNOT_TELL, (f"{short}, so their shares cannot be set side by side",), (short,))
    ours, theirs = pair
    at = f"at {rate(ours.rate / base.gpus)} per GPU"
    told = f"both objectives met {at}: {base.name} {portion(ours.met)}, {split.name} {portion(theirs.met)}"
    a, b = _bounds_of(ours.met), _bounds_of(theirs.met)
    if max(a[1], b[1]) >= goal.attain:
        return Verdict(CANNOT_TELL, (told,), (f"goodputs are not apart, and a share may reach the goal {at}",))
    if a[0] <= b[1] and b[0] <= a[1]:
        return Verdict(CANNOT_TELL, (told,), (f"neither reaches the goal {at}, and their shares are not apart",))
    below = "neither reaches the goal at this rate; what each serves at a lower one was not seen"
    return Verdict(PAYS if b[0] > a[1] else DOES_NOT_PAY, (told, below))


def _bounds_of(share: Estimate) -> tuple[float, float]:
    """All that a share can be where nothing bounds it."""
    return 0.0 if share.low is None else share.low, 1.0 if share.high is None else share.high


def _same_rate(base: ArmReport, split: ArmReport) -> tuple[RateLevel, RateLevel] | None:
    pairs = [
        (ours, theirs)
        for ours in base.goodput.levels
        for theirs in split.goodput.levels
        if 1 / SAME_RATE < (ours.rate / base.gpus) / max(theirs.rate / split.gpus, 1e-12) < SAME_RATE
    ]
    return max(pairs, key=lambda pair: pair[0].rate, default=None)


def _tail(change: Change, goal: Objectives) -> str:
    if change.says == BETTER and change.of is not None and change.to is not None:
        return "ITL tail fixed" if change.of > goal.itl_ns >= change.to else "ITL tail shorter"
    return {WORSE: "ITL tail longer", NO_DIFFERENCE: "ITL tail no different"}.get(change.says, "ITL tail not known to differ")


LOST: Final = "TTFT lost"
LOST_IN_HANDOFF: Final = "TTFT lost in the hand-off"


def _first_token(change: Change, split: ArmReport, goal: Objectives, handoff: Estimate) -> str:
    if change.says != WORSE or change.of is None or change.to is None:
        return {BETTER: "TTFT shorter", NO_DIFFERENCE: "TTFT no different"}.get(change.says, "TTFT not known to differ")
    if all(each.met_ttft.low is not None and each.met_ttft.low >= goal.attain for each in split.goodput.levels):
        return "TTFT longer but within its objective"
    inside = handoff.value is not None and handoff.value >= IN_THE_HANDOFF * (change.to - change.of)
    return LOST_IN_HANDOFF if inside else LOST


def _where_lost(start: str, split: ArmReport, handoff: Estimate) -> Iterator[str]:
    if start in (LOST, LOST_IN_HANDOFF) and handoff.value is not None:
        measured = split.handoff is not None and split.handoff.measured == 1
        what = "the hand-off" if measured else "unattributed time at D, router and hops, where the hand-off is,"
        yield f"of the mean TTFT, {what} took {signed(handoff)} against the same phases of the other arm"
