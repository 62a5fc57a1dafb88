"""Report one arm: what it is, its figures, and what limits them.

The report also says how the layout of the arm was found.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from handrail_collector.compare import verdict as words
from handrail_collector.compare.figures import Measured, estimate
from handrail_collector.compare.formatting import rate
from handrail_collector.compare.goodput import goodput
from handrail_collector.compare.load import StorePeriod
from handrail_collector.compare.report import ArmReport, SloTargets
from handrail_collector.compare.sample import Sample
from handrail_collector.compare.workload import cached_share, unknown

_SPLIT_NAMES: Final = ("split", "disagg", "pd")
_COLLOCATED_NAMES: Final = ("plain", "chunked", "collocated", "aggregated", "baseline")


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """Input of a comparison under one ``name``: periods of one or more runs.

    ``gpus`` 0: as many GPUs as engines are seen.
    """

    name: str
    stretches: tuple[StorePeriod, ...]
    gpus: int = 0


def arm_report(arm: Arm, sample: Sample, measured: Measured, objectives: SloTargets) -> ArmReport:
    layout, reported_by = _layout(arm.name, sample)
    gpus = arm.gpus or max(1, len(sample.engines))
    seen = "engines seen, taken as one GPU each" if sample.engines else "no engine is named in the rows; taken as one"
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
            return layout, "told by its name alone: the rows name neither P nor D"
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
        yield f"left out, because scopes never mix: {text}"
    if sample.other_units:
        yield f"gaps of {sample.other_units:,} requests are of another unit and left out of the gap figures"
    judged = int(measured.judged.judged.sum())
    if judged < len(sample):
        yield f"{len(sample) - judged:,} requests cannot be judged (not streamed, refused, or left before a first token was due)"
    if len(measured.levels) > len(sample.spans):
        rates = ", ".join(rate(level.rate) for level in measured.levels)
        yield f"the rate changes: {rates}"
    if any(level.drifts for level in measured.levels):
        yield "its figures drift as slowly as the period is long (a queue that grows?), so intervals may be too narrow"
    yield from unknown(sample)


def _mean(sample: Sample, name: str) -> float | None:
    values = getattr(sample, name)
    known = values[values == values]
    return float(known.mean()) if len(known) else None
