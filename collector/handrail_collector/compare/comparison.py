"""Compare the requests of two or three arms, and report each arm.

The report of an arm says what it is, its figures, what limits them, and how its layout was found.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import sqrt
from typing import Final

import numpy as np

from handrail.phases import Phase
from handrail_collector.compare import verdict as words
from handrail_collector.compare.bootstrap import CONFIDENCE, BootstrapEstimate, difference
from handrail_collector.compare.figures import SIMULTANEOUS, TOGETHER, Measured, estimate, measure
from handrail_collector.compare.formatting import rate
from handrail_collector.compare.goodput import FEWEST_JUDGED, goodput
from handrail_collector.compare.load import StorePeriod, read_sample, scope_counts
from handrail_collector.compare.report import ArmReport, Change, Comparison, Estimate, PairReport, SloTargets
from handrail_collector.compare.sample import Sample
from handrail_collector.compare.ttft_breakdown import losses
from handrail_collector.compare.workload import cached_share, unknown, unlike
from handrail_collector.store.filters import SCOPES

FEWEST_ARMS: Final = 2
MOST_ARMS: Final = 3
SEED: Final = 20240701
"""Seed of the first arm's draws; the other arms' seeds follow from it.

The same rows give the same intervals.
"""

SMALL: Final = 0.01
"""Least relative difference that counts.

A smaller one is none, however certain: sketches have no finer resolution. It is relative to the first arm's figure.
"""

ALIKE: Final = 0.2
"""Widest bounds of "no difference", relative to the figure.

Wider bounds that include zero show nothing.
"""

_SPLIT_NAMES: Final = ("split", "disagg", "pd")
_COLLOCATED_NAMES: Final = ("plain", "chunked", "collocated", "aggregated", "baseline")

_AS_VERB: Final = {
    words.BETTER: "is better than",
    words.WORSE: "is worse than",
    words.MIXED: "is better in some and worse in other figures than",
    words.NO_DIFFERENCE: "does not differ from",
    words.CANNOT_TELL: "cannot be distinguished from",
}

Side = tuple[ArmReport, Sample, Measured]


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """Input of a comparison under one ``name``: periods of one or more runs.

    ``gpus`` 0: as many GPUs as engines are seen.
    """

    name: str
    stretches: tuple[StorePeriod, ...]
    gpus: int = 0


class CompareError(Exception):
    """There is nothing to compare.

    ``what`` is wrong, ``where``, and what would be ``valid``.
    """

    def __init__(self, what: str, where: str, valid: str) -> None:
        super().__init__(what)
        self.what, self.where, self.valid = what, where, valid


def compare(arms: Sequence[Arm], objectives: SloTargets, *, scope: str | None = None, model: str | None = None) -> Comparison:
    """Compare two or three arms, the first of which is the baseline arm.

    Raises ``CompareError`` and ``StoreDamagedError``.
    """
    scope = _common_scope(arms, scope, model)
    return side_by_side(arms, [read_sample(arm.stretches, scope, model) for arm in arms], objectives)


def side_by_side(arms: Sequence[Arm], samples: Sequence[Sample], objectives: SloTargets) -> Comparison:
    """Compare samples that are already read. Pure."""
    measured = [measure(sample, objectives, SEED + place) for place, sample in enumerate(samples)]
    reports = [_arm_report(*each, objectives) for each in zip(arms, samples, measured, strict=True)]
    sides = list(zip(reports, samples, measured, strict=True))
    pairs = [
        _pair(*_in_order(sides[of], sides[to]), objectives)
        for of, to in combinations(range(len(arms)), 2)
        if of == 0 or _opposed(reports[of], reports[to])
    ]
    word, headline = _summary(reports, pairs)
    return Comparison(
        objectives=objectives,
        confidence=CONFIDENCE,
        simultaneous=SIMULTANEOUS,
        word=word,
        headline=headline,
        arms=tuple(reports),
        pairs=tuple(pairs),
    )


def _common_scope(arms: Sequence[Arm], scope: str | None, model: str | None) -> str:
    """Return the widest scope that every arm has."""
    counts = [scope_counts(arm.stretches, model) for arm in arms]
    for arm, count in zip(arms, counts, strict=True):
        if not count:
            whose = f" of model {model!r}" if model else ""
            where = ", ".join(each.where for each in arm.stretches)
            raise CompareError(
                f"{arm.name}: no request{whose} began in that time", where, "a period or a folder with requests in it"
            )
    candidates = SCOPES if scope is None else (scope,)
    for each in candidates:
        if all(each in count for count in counts):
            return each
    seen = "; ".join(f"{arm.name}: {', '.join(count)}" for arm, count in zip(arms, counts, strict=True))
    what = (
        f"no requests of scope {scope} in every arm"
        if scope
        else "the arms share no scope, and figures of different scopes never mix"
    )
    raise CompareError(what, seen, "arms observed from the same place")


def _in_order(of: Side, to: Side) -> tuple[Side, Side]:
    """Put a split arm second: differences then read as the effect of the split."""
    turned = of[0].layout == words.SPLIT and to[0].layout == words.COLLOCATED
    return (to, of) if turned else (of, to)


def _opposed(of: ArmReport, to: ArmReport) -> bool:
    return {of.layout, to.layout} == {words.SPLIT, words.COLLOCATED}


def _pair(of: Side, to: Side, objectives: SloTargets) -> PairReport:
    same_unit = of[0].gap_unit == to[0].gap_unit
    changes = tuple(
        _change(name, of[2].figures[name], to[2].figures[name])
        for name in of[2].figures
        if same_unit or not name.startswith("gap")
    )
    changes = (*changes, *(() if same_unit else _incomparable_gaps(of[0], to[0])), _failed(of[2], to[2]))
    why_not = unlike(of[1], to[1])
    if _opposed(of[0], to[0]):
        found = words.split_against(of[0], to[0], changes, why_not, objectives, losses(of[2], to[2]))
    else:
        found = words.same_layout(of[0], to[0], changes, why_not)
    return PairReport(
        of=of[0].name,
        to=to[0].name,
        word=found.word,
        word_tpot=found.word_tpot,
        short=found.short,
        reasons=found.reasons,
        unlike=why_not,
        changes=changes,
        phases=tuple(_phases(of[2], to[2])),
    )


def _change(name: str, of: BootstrapEstimate, to: BootstrapEstimate) -> Change:
    moved = estimate(difference(of, to), TOGETHER)
    known = (estimate(of).value, estimate(to).value)
    return Change(figure=name, of=known[0], to=known[1], difference=moved, says=_says(known[0], moved))


def _says(of: float | None, moved: Estimate, least: float = 0.0) -> str:
    """Classify a difference; every figure is better when smaller.

    ``least``: a difference in the figure's unit that is small whatever ``of`` is.
    """
    if of is None or moved.value is None or moved.low is None or moved.high is None:
        return words.CANNOT_TELL
    if abs(moved.value) >= SMALL * abs(of) and not moved.low <= 0 <= moved.high:
        return words.BETTER if moved.high < 0 else words.WORSE
    return words.NO_DIFFERENCE if max(-moved.low, moved.high) <= ALIKE * abs(of) + least else words.CANNOT_TELL


def _failed(of: Measured, to: Measured) -> Change:
    """Compute the difference of the failed shares from their intervals.

    It uses Newcombe's method, which accepts any interval of each share.
    """
    a, b = of.failed_together, to.failed_together
    if a.value is None or b.value is None or a.low is None or a.high is None or b.low is None or b.high is None:
        moved = Estimate(None, None, None)
    else:
        moved = Estimate(
            b.value - a.value,
            b.value - a.value - sqrt((b.value - b.low) ** 2 + (a.high - a.value) ** 2),
            b.value - a.value + sqrt((b.high - b.value) ** 2 + (a.value - a.low) ** 2),
        )
    enough = min(len(side.judged.judged) for side in (of, to)) >= FEWEST_JUDGED
    says = _says(a.value, moved, SMALL) if enough else words.CANNOT_TELL
    return Change(figure="failed_share", of=a.value, to=b.value, difference=moved, says=says)


def _incomparable_gaps(of: ArmReport, to: ArmReport) -> Iterator[Change]:
    """Return the gap changes where the units differ: tokens against chunks."""
    for name in ("gap_p50_ns", "gap_p99_ns"):
        values = of.figures[name].value, to.figures[name].value
        yield Change(figure=name, of=values[0], to=values[1], difference=Estimate(None, None, None), says=words.CANNOT_TELL)


def _phases(of: Measured, to: Measured) -> Iterator[Change]:
    """Return the changes of the phases' mean contributions to TTFT.

    A phase that one arm does not have took no time there.
    """
    for name in [phase.value for phase in Phase if phase.value in of.phases or phase.value in to.phases]:
        both = [side.phases[name] for side in (of, to) if name in side.phases]
        nothing = BootstrapEstimate(0.0, np.zeros_like(both[0].draws), both[0].df)
        yield _change(name, of.phases.get(name, nothing), to.phases.get(name, nothing))


def _summary(reports: Sequence[ArmReport], pairs: Sequence[PairReport]) -> tuple[str, str]:
    """Sum up all pairs in one word and one line."""
    layouts = {arm.name: arm.layout for arm in reports}
    opposed = [pair for pair in pairs if {layouts[pair.of], layouts[pair.to]} == {words.SPLIT, words.COLLOCATED}]
    if not opposed:
        text = "; ".join(f"{pair.to} {_AS_VERB[pair.word]} {pair.of}" for pair in pairs)
        return pairs[0].word if len({pair.word for pair in pairs}) == 1 else words.MIXED, text
    word = words.together([pair.word for pair in opposed])
    if len({(pair.word, pair.short) for pair in opposed}) == 1:
        against = f" against {' and '.join(pair.of for pair in opposed)}" if len(opposed) > 1 else ""
        return word, f"{word}{against}{_because(opposed[0])}"
    return word, "; ".join(f"against {pair.of}: {pair.word}{_because(pair)}" for pair in opposed)


def _because(pair: PairReport) -> str:
    """Return the reasons in a few words; the first in full for "cannot tell"."""
    short = ", ".join(pair.short) or (pair.reasons[0] if pair.reasons else "")
    return f": {short}" if short else ""


def _arm_report(arm: Arm, sample: Sample, measured: Measured, objectives: SloTargets) -> ArmReport:
    """Report one arm: what it is, its figures, and what limits them."""
    layout, reported_by = _layout(arm.name, sample)
    gpus = arm.gpus or max(1, len(sample.engines))
    seen = "engines seen, counted as one GPU each" if sample.engines else "the rows name no engine; counted as one GPU"
    seconds = sum(level.seconds for level in measured.levels)
    known = sample.handed_off
    return ArmReport(
        name=arm.name,
        where=tuple(dict.fromkeys(span.where for span in sample.spans)),
        layout=layout,
        layout_source=reported_by,
        begin_unix_ns=min(span.begin_unix_ns for span in sample.spans),
        end_unix_ns=max(span.end_unix_ns for span in sample.spans),
        scope=sample.scope,
        requests=len(sample),
        rate=max(0, len(sample) - len(sample.spans)) / seconds if seconds > 0 else 0.0,
        failed=measured.failed,
        left=int(sample.left.sum()),
        engines=len(sample.engines),
        gpus=gpus,
        gpus_source="--gpus" if arm.gpus else seen,
        gap_unit=sample.gap_unit,
        gaps=int(sample.gap_counts.sum()),
        prompt_tokens=_mean(sample, "prompt_tokens"),
        output_tokens=_mean(sample, "output_tokens"),
        cached_share=cached_share(sample),
        models=tuple(sample.models),
        figures={name: estimate(figure) for name, figure in measured.figures.items()},
        quantiles_ns=measured.quantiles_ns,
        phases_ns={name: estimate(figure) for name, figure in measured.phases.items()},
        goodput=goodput(measured.rates, objectives, gpus),
        goodput_tpot=goodput(measured.rates_tpot, objectives, gpus),
        handoff=measured.handoff if known else None,
        notes=tuple(_notes(arm.name, layout, sample, measured)),
    )


def _layout(name: str, sample: Sample) -> tuple[str, str]:
    """Return the layout and the evidence for it.

    The evidence is the rows where they name an engine, else the arm's name.
    """
    handed, requests = sample.handed_off, len(sample)
    if handed or sample.engines:
        text = f"{handed:,} of {requests:,} requests show a hand-off"
        return words.SPLIT if handed >= requests / 2 else words.COLLOCATED, text
    for layout, names in ((words.SPLIT, _SPLIT_NAMES), (words.COLLOCATED, _COLLOCATED_NAMES)):
        if name.lower().startswith(names):
            return layout, "known only by its name: the rows name neither P nor D"
    return words.UNKNOWN, "the rows name neither P nor D"


def _notes(name: str, layout: str, sample: Sample, measured: Measured) -> Iterator[str]:
    """Return notes on what limits the arm's figures."""
    lowered = name.lower()
    if (lowered.startswith(_SPLIT_NAMES) and layout == words.COLLOCATED) or (
        lowered.startswith(_COLLOCATED_NAMES) and layout == words.SPLIT
    ):
        yield f"named {name}, but by its rows it is {layout}"
    if sample.other_scopes:
        text = ", ".join(f"{count:,} of scope {scope}" for scope, count in sample.other_scopes.items())
        yield f"omitted, because scopes never mix: {text}"
    if sample.other_units:
        yield f"gaps of {sample.other_units:,} requests have another unit, and the gap figures omit them"
    judged = int(measured.judged.judged.sum())
    if judged < len(sample):
        yield (
            f"{len(sample) - judged:,} requests cannot be judged (not streamed, refused, or ended by the client "
            "before a first token was due)"
        )
    if len(measured.levels) > len(sample.spans):
        rates = ", ".join(rate(level.rate) for level in measured.levels)
        yield f"the rate changes: {rates}"
    if any(level.drifts for level in measured.levels):
        yield "its figures drift through the whole period (a growing queue?), so intervals may be too narrow"
    yield from unknown(sample)


def _mean(sample: Sample, name: str) -> float | None:
    values = getattr(sample, name)
    known = values[values == values]
    return float(known.mean()) if len(known) else None
