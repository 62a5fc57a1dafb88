"""Decide what a comparison of two arms means; pure rules over their reports.

A split arm against one that is not split: ``split pays``, ``split does not pay`` or ``cannot tell``.
The first rule that fits decides:

1. The workloads are not alike, or too few requests can be judged: cannot tell.
2. The goodput per GPU of one arm is at least X, that of the other below X (bounds at 95 %): the first arm wins.
3. At a rate per GPU that both arms had, the interval of one arm's share that meets both objectives lies wholly below the goal
   and wholly below the other's interval: the other arm wins at that rate, whether or not it reaches the goal itself.
4. Anything else: cannot tell.

A lower share of one arm makes the verdict for the other more certain. A higher share of the other never makes it less certain.

Two arms of one layout: ``better``, ``worse``, ``mixed``, ``no difference`` or ``cannot tell``.
The figures whose intervals exclude zero decide (all at once at 95 %).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from handrail_collector.compare.formatting import bounds, changed, label, portion, rate, signed
from handrail_collector.compare.goodput import FEWEST_JUDGED
from handrail_collector.compare.report import TPOT, ArmReport, Change, Estimate, RateLevel, SloTargets
from handrail_collector.compare.ttft_breakdown import IN_THE_HANDOFF, Losses

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
"""Factor below which two rates per GPU count as the same."""


@dataclass(frozen=True, slots=True)
class ComparisonVerdict:
    """Verdict of this module with its reasons.

    The word is one of this module's. The reasons are in plain words, most important first.
    ``short``: the reasons in a few words each.
    ``word_tpot``: the word by DistServe's goodput, for a split arm against one that is not split.
    """

    word: str
    reasons: tuple[str, ...]
    short: tuple[str, ...] = ()
    word_tpot: str | None = None


def same_layout(of: ArmReport, to: ArmReport, changes: Sequence[Change], unlike: Sequence[str]) -> ComparisonVerdict:
    """Compare before and after: what is better, worse, or not different."""
    if problems := [*_other_work(unlike), *_other_rate(of, to)]:
        return ComparisonVerdict(CANNOT_TELL, tuple(problems))
    report = {word: [change for change in changes if change.says == word] for word in (BETTER, WORSE, NO_DIFFERENCE, CANNOT_TELL)}
    reasons = [f"{change.says}: {changed(change, of.gap_unit)}" for word in (WORSE, BETTER) for change in report[word]]
    if report[BETTER] or report[WORSE]:
        return ComparisonVerdict(
            MIXED if report[BETTER] and report[WORSE] else BETTER if report[BETTER] else WORSE, tuple(reasons)
        )
    if report[NO_DIFFERENCE]:
        names = ", ".join(label(change.figure, of.gap_unit) for change in report[NO_DIFFERENCE])
        return ComparisonVerdict(NO_DIFFERENCE, (f"no difference beyond chance: {names}",))
    return ComparisonVerdict(CANNOT_TELL, (f"too few requests: {of.requests:,} in {of.name}, {to.requests:,} in {to.name}",))


def split_against(
    base: ArmReport, split: ArmReport, changes: Sequence[Change], unlike: Sequence[str], goal: SloTargets, lost: Losses
) -> ComparisonVerdict:
    """Compare a split arm with one that is not split.

    ``lost``: where the mean TTFT of ``split`` is longer than that of ``base``.
    """
    if problems := [*_other_work(unlike), *_too_few(base, split)]:
        return ComparisonVerdict(CANNOT_TELL, tuple(problems))
    by_figure = {change.figure: change for change in changes}
    gaps, first = by_figure["gap_p99_ns"], by_figure["ttft_p50_ns"]
    tail, start = _tail(gaps, goal), _first_token(first, split, goal, lost)
    why = [f"{tail}: {changed(gaps, split.gap_unit)}", f"{start}: {changed(first)}", *_where_lost(start, lost)]
    why += [f"so the loads differed: {each}" for each in _other_rate(base, split)]
    comparison_verdict = _decided(base, split, goal)
    paper = _by_tpot(base, split, goal)
    if goal.itl_of != TPOT:
        why.append(f"by DistServe's goodput (mean time per output token instead of the gaps): {paper.word}; {paper.reasons[0]}")
    short = comparison_verdict.short if comparison_verdict.word == CANNOT_TELL else (tail, start)
    return ComparisonVerdict(comparison_verdict.word, (*comparison_verdict.reasons, *why), short, paper.word)


def _by_tpot(base: ArmReport, split: ArmReport, goal: SloTargets) -> ComparisonVerdict:
    """Apply the same rules to DistServe's goodput.

    Its second objective is about the mean time per output token (TPOT).
    """
    ours, theirs = (replace(arm, goodput=arm.goodput_tpot) for arm in (base, split))
    return _decided(ours, theirs, goal)


def _decided(base: ArmReport, split: ArmReport, goal: SloTargets) -> ComparisonVerdict:
    """Apply rules 2 to 4."""
    comparison_verdict = _by_goodput(base, split)
    if comparison_verdict.word != CANNOT_TELL:
        return comparison_verdict
    shares = _by_share(base, split, goal)
    reasons = shares.reasons if shares.word != CANNOT_TELL else (*comparison_verdict.reasons, *shares.reasons)
    return ComparisonVerdict(shares.word, reasons, comparison_verdict.short or shares.short)


def together(verdicts: Sequence[str]) -> str:
    """Combine the verdicts of a split arm against several others into one word.

    A split pays only where it pays against each.
    """
    return next(word for word in (DOES_NOT_PAY, CANNOT_TELL, PAYS) if word in verdicts)


def _other_work(unlike: Sequence[str]) -> Iterator[str]:
    yield from (f"the work differed: {each}" for each in unlike)


def _other_rate(of: ArmReport, to: ArmReport) -> Iterator[str]:
    rates = [arm.rate / arm.gpus for arm in (of, to)]
    if min(rates) > 0 and max(rates) / min(rates) >= SAME_RATE:
        yield f"the load differed: {of.name} {rate(rates[0])}, {to.name} {rate(rates[1])} per GPU"


def _too_few(*arms: ArmReport) -> Iterator[str]:
    for arm in arms:
        if not arm.goodput.levels:
            yield f"too few requests of {arm.name} can be judged by the objectives: {FEWEST_JUDGED} are needed"


def _by_goodput(base: ArmReport, split: ArmReport) -> ComparisonVerdict:
    lines = (f"goodput per GPU: {base.name} {bounds(base.goodput)}, {split.name} {bounds(split.goodput)}",)
    for word, winner, loser in ((PAYS, split, base), (DOES_NOT_PAY, base, split)):
        floor, ceiling = winner.goodput.at_least, loser.goodput.below
        odd = winner.goodput.contradicts or loser.goodput.contradicts
        if floor is None or ceiling is None or odd:
            continue
        if floor / winner.goodput.gpus * SAME_RATE > ceiling / loser.goodput.gpus:
            return ComparisonVerdict(word, lines)
    if base.goodput.at_least is not None and split.goodput.at_least is not None:
        short = "both meet the objectives at the rates in the data"
        return ComparisonVerdict(CANNOT_TELL, (*lines, f"{short}: only higher rates would show a difference"), (short,))
    return ComparisonVerdict(CANNOT_TELL, lines)


def _by_share(base: ArmReport, split: ArmReport, goal: SloTargets) -> ComparisonVerdict:
    """Decide by the shares at each rate that both arms had.

    The highest rate with a verdict decides, unless another rate shows the opposite.
    """
    pairs = _same_rates(base, split)
    if not pairs:
        short = "no rate per GPU occurs in both arms"
        return ComparisonVerdict(CANNOT_TELL, (f"{short}, so their shares cannot be compared",), (short,))
    comparison_verdicts = [_at_one_rate(base, split, pair, goal) for pair in pairs]
    decided = [each for each in comparison_verdicts if each.word != CANNOT_TELL]
    if len({each.word for each in decided}) > 1:
        short = "one is better at one rate, the other at another"
        return ComparisonVerdict(CANNOT_TELL, (*(each.reasons[0] for each in decided), short), (short,))
    return decided[0] if decided else comparison_verdicts[0]


def _at_one_rate(base: ArmReport, split: ArmReport, pair: tuple[RateLevel, RateLevel], goal: SloTargets) -> ComparisonVerdict:
    """Decide at one rate.

    The lower share must miss the goal and lie below the other, each with certainty.
    """
    ours, theirs = pair
    at = f"at {rate(ours.rate / base.gpus)} per GPU"
    shares = f"both objectives met {at}: {base.name} {portion(ours.met)}, {split.name} {portion(theirs.met)}"
    a, b = _bounds_of(ours.met), _bounds_of(theirs.met)
    if a[0] <= b[1] and b[0] <= a[1]:
        return ComparisonVerdict(CANNOT_TELL, (shares,), (f"neither goodputs nor shares {at} differ",))
    word, winner, loser, high, low = (PAYS, split, base, b, a) if b[0] > a[1] else (DOES_NOT_PAY, base, split, a, b)
    if low[1] >= goal.attain:
        return ComparisonVerdict(CANNOT_TELL, (shares,), (f"{loser.name} may reach the goal too {at}",))
    if high[1] < goal.attain:
        return ComparisonVerdict(word, (shares, "neither reaches the goal at this rate; the data have no lower rate"))
    sure = "reaches" if high[0] >= goal.attain else "may reach"
    return ComparisonVerdict(
        word, (shares, f"{winner.name} {sure} the goal of {goal.attain:.0%} at this rate, {loser.name} misses it")
    )


def _bounds_of(share: Estimate) -> tuple[float, float]:
    """Return the bounds of a share; 0 and 1 where there is no interval."""
    return 0.0 if share.low is None else share.low, 1.0 if share.high is None else share.high


def _same_rates(base: ArmReport, split: ArmReport) -> list[tuple[RateLevel, RateLevel]]:
    """Return pairs of levels with the same rate per GPU, highest first."""
    pairs = [
        (ours, theirs)
        for ours in base.goodput.levels
        for theirs in split.goodput.levels
        if 1 / SAME_RATE < (ours.rate / base.gpus) / max(theirs.rate / split.gpus, 1e-12) < SAME_RATE
    ]
    return sorted(pairs, key=lambda pair: -pair[0].rate)


def _tail(change: Change, goal: SloTargets) -> str:
    if change.says == BETTER and change.of is not None and change.to is not None:
        return "ITL tail fixed" if change.of > goal.itl_ns >= change.to else "ITL tail shorter"
    return {WORSE: "ITL tail longer", NO_DIFFERENCE: "ITL tail no different"}.get(change.says, "ITL tail not known to differ")


LOST: Final = "TTFT lost"
NOT_WORTH_TELLING: Final = 0.05
"""Least part of the loss, as an absolute value, that a reason names.

Smaller places are left out of the reasons; the hand-off never is.
"""


def _first_token(change: Change, split: ArmReport, goal: SloTargets, lost: Losses) -> str:
    if change.says != WORSE or change.of is None or change.to is None:
        return {BETTER: "TTFT shorter", NO_DIFFERENCE: "TTFT no different"}.get(change.says, "TTFT not known to differ")
    if all(each.met_ttft.low is not None and each.met_ttft.low >= goal.attain for each in split.goodput.levels):
        return "TTFT longer but within its objective"
    return f"{LOST} {lost.main}" if lost.main else LOST


def _where_lost(start: str, lost: Losses) -> Iterator[str]:
    whole = lost.all_ns.value
    if not start.startswith(LOST) or whole is None:
        return
    lines = [
        f"{_named(each.place, lost.measured)} {signed(each.more_ns)}"
        for each in lost.places
        if each.place == IN_THE_HANDOFF or abs(each.more_ns.value or 0.0) >= NOT_WORTH_TELLING * abs(whole)
    ]
    yield f"of {signed(lost.all_ns)} in the mean TTFT: {'; '.join(lines)}"


def _named(place: str, measured: bool) -> str:
    """Name the place; the hand-off with the time that cannot be separated from it."""
    hidden = place == IN_THE_HANDOFF and not measured
    return f"{place} (unattributed time at D, which may hold D's queue as well)" if hidden else place
