"""Compute every figure of one arm, with its interval and its draws.

The draws give the intervals of differences.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import isnan
from typing import Final

import numpy as np
from numpy.typing import NDArray

from handrail.metrics.exponential_histogram import MAX_BUCKETS, bucket_middle_ns
from handrail_collector.compare.bootstrap import BEYOND, CONFIDENCE, Bootstrap, BootstrapEstimate
from handrail_collector.compare.goodput import SloAttainment, judge, rate_levels, share
from handrail_collector.compare.rate_levels import Level, block_of_slice, levels_of
from handrail_collector.compare.report import TPOT, Estimate, HandoffOverhead, RateLevel, SloTargets
from handrail_collector.compare.sample import PHASES, Floats, HandoffSums, Sample

FIGURES: Final = ("ttft_p50_ns", "ttft_p90_ns", "ttft_p99_ns", "gap_p50_ns", "gap_p99_ns", "per_token_ns")
"""Figures with draws; the failed share is separate."""

SIMULTANEOUS: Final = len(FIGURES) + 1
"""Number of differences that are judged together.

Each gets an equal part of the 5 % that all together may err (Bonferroni).
"""

TOGETHER: Final = 1 - (1 - CONFIDENCE) / SIMULTANEOUS
SKETCH_ERROR: Final = 0.01
"""Relative error of gap quantiles (handrail.metrics.exponential_histogram)."""

DRAWN: Final = (0.1, 0.5, 0.9, 0.99)
"""Quantiles of the picture."""

_SHARES: Final = (0.5, 0.9, 0.99)
_MIDDLES: Final = np.array([bucket_middle_ns(bucket) for bucket in range(MAX_BUCKETS)], np.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Computed figures of one arm."""

    levels: tuple[Level, ...]
    judged: SloAttainment
    rates: tuple[RateLevel, ...]
    rates_tpot: tuple[RateLevel, ...]  # by DistServe's objective
    figures: Mapping[str, BootstrapEstimate]
    phases: Mapping[str, BootstrapEstimate]  # mean contribution to TTFT
    failed: Estimate
    failed_together: Estimate  # at ``TOGETHER``
    handoff: HandoffOverhead | None
    in_handoff: BootstrapEstimate  # mean of kv phases and unattributed time at D that may be those, as in ``phases``
    phased_share: float  # of the requests with a TTFT: those with ``phases``
    quantiles_ns: Mapping[str, Mapping[str, float]]


def measure(sample: Sample, objectives: SloTargets, seed: int) -> Measured:
    """Compute all figures; equal rows and seed give equal intervals."""
    levels = levels_of(sample)
    of_slice, level_of_block = block_of_slice(levels)
    bootstrap = Bootstrap(level_of_block, (seed,))
    block = of_slice[sample.slice_of]
    judged = judge(sample, objectives)

    def rates(each: SloAttainment) -> tuple[RateLevel, ...]:
        return rate_levels(sample, levels, block, level_of_block, each, (seed, 1))

    ended = ~sample.refused
    phases = {
        phase: bootstrap.ratio(
            _by_block(sample.phase_sums[:, at], of_slice, bootstrap), _by_block(sample.phased, of_slice, bootstrap)
        )
        for at, phase in enumerate(PHASES)
        if sample.phase_sums[:, at].any()
    }
    in_handoff = bootstrap.ratio(
        _by_block(sample.handoff.known_ns + sample.handoff.hidden_ns, of_slice, bootstrap),
        _by_block(sample.phased, of_slice, bootstrap),
    )
    timed = int((~np.isnan(sample.ttft_ns)).sum())
    return Measured(
        levels=levels,
        judged=judged,
        rates=rates(judged),
        rates_tpot=rates(judge(sample, replace(objectives, itl_of=TPOT))),
        figures=_figures(sample, block, of_slice, bootstrap),
        phases=phases,
        failed=share(sample.failed, ended, block, bootstrap),
        failed_together=share(sample.failed, ended, block, bootstrap, TOGETHER),
        handoff=_handoff(sample.handoff, of_slice, bootstrap),
        in_handoff=in_handoff,
        phased_share=float(sample.phased.sum()) / max(1, timed),
        quantiles_ns=_picture(sample),
    )


def estimate(figure: BootstrapEstimate, confidence: float = CONFIDENCE) -> Estimate:
    """Convert the figure to plain numbers; nan becomes None."""
    low, high = figure.interval(confidence)
    if isnan(low) or isnan(high):
        return Estimate(None if isnan(figure.value) else figure.value, None, None)
    return Estimate(figure.value, low, high)


def _figures(
    sample: Sample, block: NDArray[np.int64], of_slice: NDArray[np.int64], bootstrap: Bootstrap
) -> dict[str, BootstrapEstimate]:
    known = ~np.isnan(sample.ttft_ns)
    ttft = bootstrap.quantiles(sample.ttft_ns[known], block[known], _SHARES)
    enough = [_enough(figure, int(known.sum()), each) for figure, each in zip(ttft, _SHARES, strict=True)]
    gap_blocks = np.zeros((bootstrap.blocks, MAX_BUCKETS), np.int64)
    np.add.at(gap_blocks, of_slice, sample.gap_counts)
    read = bootstrap.counted_quantiles(gap_blocks, _MIDDLES, (0.5, 0.99))
    gaps = [replace(figure, error=SKETCH_ERROR * figure.value) for figure in read]
    streams = int((~np.isnan(sample.gap_p99_ns)).sum())
    timed = ~np.isnan(sample.per_token_ns)
    tokens = np.where(timed, sample.output_tokens - 1, 0.0)
    spent = np.where(timed, sample.per_token_ns * tokens, 0.0)
    per_token = bootstrap.ratio(*(_counted(block, each, bootstrap) for each in (spent, tokens)))
    figures = (*enough, *(_enough(figure, streams, 0.5) for figure in gaps), _enough(per_token, int(timed.sum()), 0.5))
    return dict(zip(FIGURES, figures, strict=True))


def _enough(figure: BootstrapEstimate, requests: int, of: float) -> BootstrapEstimate:
    """Remove the draws, so the interval, where too few requests lie beyond it."""
    if requests * (1 - of) >= BEYOND:
        return figure
    return replace(figure, draws=np.full(len(figure.draws), np.nan))


def _by_block(per_slice: Floats, of_slice: NDArray[np.int64], bootstrap: Bootstrap) -> Floats:
    return _counted(of_slice, per_slice, bootstrap)


def _counted(block: NDArray[np.int64], values: Floats, bootstrap: Bootstrap) -> Floats:
    return np.bincount(block, weights=values, minlength=bootstrap.blocks).astype(np.float64)


def _handoff(sums: HandoffSums, of_slice: NDArray[np.int64], bootstrap: Bootstrap) -> HandoffOverhead | None:
    def mean(numerator: Floats, denominator: Floats) -> BootstrapEstimate:
        return bootstrap.ratio(_by_block(numerator, of_slice, bootstrap), _by_block(denominator, of_slice, bootstrap))

    requests = float(sums.requests.sum())
    if not requests:
        return None
    measured = float(sums.measured.sum()) / requests
    most = sums.known_ns if measured == 1 else sums.known_ns + sums.hidden_ns + sums.unseen_ns
    ceiling = sums.prompted_known_ns if measured == 1 else sums.prompted_ceiling_ns
    return HandoffOverhead(
        requests=int(requests),
        measured=measured,
        at_least_ns=estimate(mean(sums.known_ns, sums.requests)),
        at_most_ns=estimate(mean(most, sums.requests)),
        at_least_per_1000_tokens_ns=estimate(mean(1000 * sums.prompted_known_ns, sums.prompt_tokens)),
        at_most_per_1000_tokens_ns=estimate(mean(1000 * ceiling, sums.prompt_tokens)),
        between_ns=estimate(mean(sums.hops_ns, sums.requests)),
    )


def _picture(sample: Sample) -> dict[str, dict[str, float]]:
    known = np.sort(sample.ttft_ns[~np.isnan(sample.ttft_ns)])
    drawn: dict[str, dict[str, float]] = {}
    if len(known):
        drawn["ttft"] = {_name(each): float(np.quantile(known, each, method="inverted_cdf")) for each in DRAWN}
    counts = sample.gap_counts.sum(axis=0)
    if counts.sum():
        below = np.cumsum(counts)
        drawn["gap"] = {_name(each): float(_MIDDLES[np.searchsorted(below, each * below[-1] - 1e-9)]) for each in DRAWN}
    return drawn


def _name(quantile: float) -> str:
    return f"p{quantile * 100:g}"
