"""Compute paired differences: what the plugin adds, run by run.

A difference is a share of the run without the plugin, with a 95 % interval.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median, stdev
from typing import Final

from bench.overhead.arms import Arm, Measured

LIMIT: Final = 0.01
_T95: Final = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131),
    *(2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
"""Student's t, two-sided 95 %, for 1 to 30 degrees of freedom."""


def quantile(values: Sequence[float], share: float) -> float:
    """Interpolate linearly between the two nearest values.

    Raises ``ValueError`` when there is no value.
    """
    if not values:
        raise ValueError("a quantile of nothing")
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


@dataclass(frozen=True, slots=True)
class Figure:
    """One quantity; ``limited`` says whether its interval's upper end has a budget."""

    name: str
    unit: str
    of: Callable[[Measured], float]
    limited: bool = False


FIGURES: Final = (
    Figure("TTFT p50", "ms", lambda m: quantile(m.ttft_ns, 0.5) / 1e6),
    Figure("TTFT p99", "ms", lambda m: quantile(m.ttft_ns, 0.99) / 1e6),
    Figure("gap p50", "ms", lambda m: quantile(m.gap_ns, 0.5) / 1e6, limited=True),
    Figure("time per output token", "ms", lambda m: fmean(m.token_ns) / 1e6),
    Figure("gap p99", "ms", lambda m: quantile(m.gap_ns, 0.99) / 1e6),
    Figure("engine CPU per request", "ms", lambda m: m.engine_cpu_s / m.requests * 1e3, limited=True),
)


@dataclass(frozen=True, slots=True)
class Difference:
    """The paired difference of one quantity.

    ``low`` to ``high`` is the 95 % interval of ``mean``. All are shares of the arm without the plugin. NaN when there are too
    few runs.
    """

    figure: Figure
    off: float  # median over the runs
    on: float
    mean: float
    low: float
    high: float
    each: tuple[float, ...]

    @property
    def met(self) -> bool | None:
        return self.high <= LIMIT if self.figure.limited else None


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the mean and its 95 % interval.

    Raises ``ValueError`` for fewer than two values.
    """
    if len(values) < 2:
        raise ValueError("an interval needs two runs")
    half = _T95[min(len(values) - 2, len(_T95) - 1)] * stdev(values) / len(values) ** 0.5
    mean = fmean(values)
    return mean, mean - half, mean + half


def differences(runs: Sequence[Mapping[Arm, Measured]]) -> list[Difference]:
    """Return the difference of every figure over the runs."""
    found = []
    for figure in FIGURES:
        pairs = [(figure.of(run[Arm.OFF]), figure.of(run[Arm.ON])) for run in runs]
        each = tuple((on - off) / off for off, on in pairs)
        mean, low, high = interval(each)
        found.append(Difference(figure, median(o for o, _ in pairs), median(n for _, n in pairs), mean, low, high, each))
    return found
