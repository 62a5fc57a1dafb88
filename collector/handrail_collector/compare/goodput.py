"""Compute the goodput of an arm as DistServe defines it.

Goodput is the highest request rate per GPU at which at least the wanted share of requests meets both latency objectives
(Zhong and others, OSDI 2024).

One rate only bounds the goodput: at least that rate where the share is reached, below it where the share is missed.
Where an arm has several rates, the share must not rise with the rate, and the goodput lies where it crosses the goal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isnan, sqrt
from statistics import NormalDist
from typing import Final

import numpy as np
from numpy.typing import NDArray

from handrail_collector.compare.bootstrap import CONFIDENCE, Bootstrap
from handrail_collector.compare.rate_levels import LEAST_CHANGE, Level
from handrail_collector.compare.report import Estimate, Goodput, RateLevel, SloTargets
from handrail_collector.compare.sample import Floats, Sample

FEWEST_JUDGED: Final = 100
"""Least number of judged requests for a share.

With fewer, the interval of a share of 90 % is wider than 12 points.
"""


@dataclass(frozen=True, slots=True)
class SloAttainment:
    """For each request: whether it can be judged, and which objectives it met."""

    judged: NDArray[np.bool_]
    ttft: NDArray[np.bool_]
    gaps: NDArray[np.bool_]

    @property
    def both(self) -> NDArray[np.bool_]:
        return self.ttft & self.gaps


def judge(sample: Sample, objectives: SloTargets) -> SloAttainment:
    """Judge each request by the objectives.

    A failed request meets no objective.
    A request whose client left is judged by what the client had received by then.
    It is a miss where the client waited longer than the objective. It is not judged where the client left earlier without a
    token.
    An invalid request that was refused is not judged, nor is an answer without a stream.
    An answer without gaps has no gap that is too long.
    """
    known = ~np.isnan(sample.ttft_ns)
    gave_up = sample.left & ~known & (sample.duration_ns > objectives.ttft_ns)
    judged = (sample.failed | known | gave_up) & ~sample.refused
    with np.errstate(invalid="ignore"):
        ttft = known & (sample.ttft_ns <= objectives.ttft_ns) & ~sample.failed
        gap_ns = gap_of(sample, objectives)
        gaps = ~sample.failed & ~gave_up & (np.isnan(gap_ns) | (gap_ns <= objectives.itl_ns))
    return SloAttainment(judged, ttft & judged, gaps & judged)


def gap_of(sample: Sample, objectives: SloTargets) -> Floats:
    """Return each request's figure that the ITL objective applies to."""
    return {"p99": sample.gap_p99_ns, "max": sample.gap_max_ns, "mean": sample.per_token_ns}[objectives.itl_of]


def share(
    good: NDArray[np.bool_], of: NDArray[np.bool_], block: NDArray[np.int64], bootstrap: Bootstrap, confidence: float = CONFIDENCE
) -> Estimate:
    """Estimate the share of ``good`` among ``of``.

    The interval is the bootstrap's, never narrower than Wilson's for independent requests.
    """
    among = np.bincount(block[of], minlength=bootstrap.blocks).astype(np.float64)
    hits = np.bincount(block[of & good], minlength=bootstrap.blocks).astype(np.float64)
    count, met = float(among.sum()), float(hits.sum())
    if not count:
        return Estimate(None, None, None)
    value = met / count
    low, high = bootstrap.ratio(hits, among).interval(confidence)
    wilson = _wilson(met, count, confidence)
    lows = [each for each in (low, wilson[0]) if not isnan(each)]
    highs = [each for each in (high, wilson[1]) if not isnan(each)]
    return Estimate(value, min(lows), max(highs))


def _wilson(met: float, count: float, confidence: float) -> tuple[float, float]:
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    middle = (met + z**2 / 2) / (count + z**2)
    half = z * sqrt(met * (count - met) / count + z**2 / 4) / (count + z**2)
    return max(0.0, middle - half), min(1.0, middle + half)


def rate_levels(
    sample: Sample,
    levels: Sequence[Level],
    block: NDArray[np.int64],
    level_of_block: NDArray[np.int64],
    judged: SloAttainment,
    seed: Sequence[int],
) -> tuple[RateLevel, ...]:
    """Compute the shares that met the objectives at each level, lowest rate first.

    Levels with too few requests are left out. ``block``: of each request.
    """
    found = []
    for index, level in enumerate(levels):
        mine = np.flatnonzero(level_of_block == index)
        here = (block >= mine[0]) & (block <= mine[-1]) & judged.judged
        if here.sum() < FEWEST_JUDGED:
            continue
        bootstrap = Bootstrap(np.zeros(len(mine), np.int64), (*seed, index))
        within = np.where(here, block - mine[0], 0)
        met = [share(each, here, within, bootstrap) for each in (judged.both, judged.ttft, judged.gaps)]
        found.append(
            RateLevel(
                rate=level.rate,
                requests=level.requests,
                judged=int(here.sum()),
                seconds=level.seconds,
                met=met[0],
                met_ttft=met[1],
                met_itl=met[2],
            )
        )
    return tuple(sorted(found, key=lambda each: each.rate))


def goodput(levels: Sequence[RateLevel], objectives: SloTargets, gpus: int) -> Goodput:
    """Bound the goodput by the intervals of the shares, and estimate it.

    The estimate lies where the share crosses the goal between two rates.
    """
    goal = objectives.attain
    reached = [each.rate for each in levels if each.met.low is not None and each.met.low >= goal]
    missed = [each.rate for each in levels if each.met.high is not None and each.met.high < goal]
    at_least = max(reached, default=None)
    below = min((rate for rate in missed if at_least is None or rate > at_least), default=None)
    return Goodput(
        levels=tuple(levels),
        at_least=at_least,
        below=below,
        estimate=_crossing(levels, goal),
        gpus=gpus,
        contradicts=at_least is not None and any(rate < at_least for rate in missed),
    )


def _crossing(levels: Sequence[RateLevel], goal: float) -> float | None:
    """Interpolate between the two rates whose fitted shares enclose the goal.

    None where no two rates do.
    """
    if len(levels) < 2 or levels[-1].rate < LEAST_CHANGE * levels[0].rate:
        return None
    rates = [each.rate for each in levels]
    fitted = _falling([each.met.value or 0.0 for each in levels], [each.judged for each in levels])
    for at in range(len(rates) - 1):
        high, low = fitted[at], fitted[at + 1]
        if high >= goal > low:
            return rates[at] + (rates[at + 1] - rates[at]) * (high - goal) / (high - low)
    return None


def _falling(shares: Sequence[float], weights: Sequence[int]) -> list[float]:
    """Return the nearest sequence that never rises (pool adjacent violators)."""
    pools: list[tuple[float, int, int]] = []  # mean, weight, length
    for value, weight in zip(shares, weights, strict=True):
        pools.append((value, weight, 1))
        while len(pools) > 1 and pools[-2][0] < pools[-1][0]:
            (first, heavy, long), (second, light, short) = pools[-2:]
            both = heavy + light
            pools[-2:] = [((first * heavy + second * light) / both, both, long + short)]
    return [mean for mean, _, length in pools for _ in range(length)]
