"""Find where cases concentrate: the hosts, links, models and outcomes they share.

Pure counting of cases (the requests in question) against controls.
*Lift* is a value's share among the cases over its share among the controls, with an interval.
Values that *stand out* are found one after another: the value that separates the two groups best by likelihood (Kulldorff's scan
statistic), then the best of the rest without that value's requests. So a slow link does not accuse both of its hosts.
Requests come in bursts, so a value must be clearly more frequent, not only significantly.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import exp, log, sqrt
from typing import Final

SIGMAS: Final = 3.3  # width of an interval: one of a thousand lies outside
LEAST_TIMES: Final = 2.0  # least ratio of the cases' rate with the value to that without it
LEAST_SHARE: Final = 0.05  # least share of the cases with the value
LEAST_REQUESTS: Final = 5
MOST: Final = 6  # values that may stand out

PLACES: Final = ("prefill_host", "decode_host", "link")
DIMENSIONS: Final = (*PLACES, "model", "outcome", "kv_outcome")


@dataclass(frozen=True, slots=True)
class CaseControlStratum:
    """Requests alike in every dimension: how many are cases and how many controls."""

    values: tuple[str | None, ...]  # in the order of DIMENSIONS; None: unknown, which counts as no value
    cases: int
    controls: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Concentration:
    """One value of one dimension, with its shares among cases and controls.

    ``cases``: cases with the value; ``controls``: controls with it.
    ``lift``, ``low``, ``high``: None where no control has the value.
    ``above_chance``: enough cases have it, and more often than the interval leaves to chance. Without
    ``stands_out`` it is only a hint.
    """

    dimension: str
    value: str
    cases: int
    cases_share: float
    controls: int
    controls_share: float
    lift: float | None
    low: float | None
    high: float | None
    stands_out: bool
    above_chance: bool


def contrasts(groups: Sequence[CaseControlStratum], *, telling: bool = True) -> list[Concentration]:
    """Return every value of each dimension that has more than one.

    Values that stand out come first, then those with the most cases.
    Not ``telling``: cases and controls hardly differ in the measure that separates them, so nothing stands out.
    """
    query, others = sum(g.cases for g in groups), sum(g.controls for g in groups)
    if not query or not others:
        return []
    counted = _counts(groups)
    standing = _standing(groups) if telling else []
    several = Counter(dimension for dimension, _ in counted)
    found = [
        _contrast(dimension, value, a, query, o, others, (dimension, value) in standing)
        for (dimension, value), (a, o) in counted.items()
        if several[dimension] > 1
    ]
    order = {key: place for place, key in enumerate(standing)}
    return sorted(found, key=lambda c: (order.get((c.dimension, c.value), MOST), -c.cases, c.dimension, c.value))


def likelihood(query: int, others: int, all_requested: int, all_others: int) -> float:
    """Return the log-likelihood ratio of two rates of cases over one common rate.

    The two rates are those with and without the value; natural logarithm. 0 where the rate with the value is not higher.
    """
    inside, outside = query + others, all_requested + all_others - query - others
    left = all_requested - query
    if not inside or not outside or query * outside <= left * inside:
        return 0.0
    rate = all_requested / (all_requested + all_others)
    return (
        _binomial(query, inside, query / inside)
        + _binomial(left, outside, left / outside)
        - _binomial(all_requested, inside + outside, rate)
    )


def _standing(groups: Sequence[CaseControlStratum]) -> list[tuple[str, str]]:
    """Return the values that stand out, best first."""
    found: list[tuple[str, str]] = []
    all_requested = sum(g.cases for g in groups)
    left = list(groups)
    while len(found) < MOST:
        counted = _counts(left)
        query, others = sum(g.cases for g in left), sum(g.controls for g in left)
        # with this many values, one of a thousand periods reaches it by chance (half of a chi square's quantile)
        least = log(1000 * max(1, len(counted)))
        best = max(
            (
                (likelihood(a, o, query, others), key)
                for key, (a, o) in counted.items()
                if a >= max(LEAST_REQUESTS, LEAST_SHARE * all_requested) and _times(a, o, query, others) >= LEAST_TIMES
            ),
            default=(0.0, ("", "")),
        )
        if best[0] <= least:
            break
        found.append(best[1])
        place = DIMENSIONS.index(best[1][0])
        left = [group for group in left if group.values[place] != best[1][1]]
    return found


def _times(query: int, others: int, all_requested: int, all_others: int) -> float:
    """Return the ratio of the cases' rates with the value and without it.

    Half a request is added on either side, so that no ratio is infinite.
    """
    outside = all_requested + all_others - query - others
    if not outside:
        return 1.0
    return (query + 0.5) / (query + others + 1) / ((all_requested - query + 0.5) / (outside + 1))


def _contrast(dimension: str, value: str, a: int, query: int, o: int, others: int, stands_out: bool) -> Concentration:
    lift = low = high = None
    if o:
        lift = (a / query) / (o / others)
        ratio = ((a + 0.5) / (query + 0.5)) / ((o + 0.5) / (others + 0.5))
        spread = SIGMAS * sqrt(max(0.0, 1 / (a + 0.5) - 1 / (query + 0.5) + 1 / (o + 0.5) - 1 / (others + 0.5)))
        low, high = ratio * exp(-spread), ratio * exp(spread)
    return Concentration(
        dimension=dimension,
        value=value,
        cases=a,
        cases_share=a / query,
        controls=o,
        controls_share=o / others,
        lift=lift,
        low=low,
        high=high,
        stands_out=stands_out,
        above_chance=a >= max(LEAST_REQUESTS, LEAST_SHARE * query) and (low is None or low > 1),
    )


def _counts(groups: Iterable[CaseControlStratum]) -> dict[tuple[str, str], tuple[int, int]]:
    found: dict[tuple[str, str], tuple[int, int]] = {}
    for group in groups:
        for dimension, value in zip(DIMENSIONS, group.values, strict=True):
            if value:
                a, o = found.get((dimension, value), (0, 0))
                found[dimension, value] = a + group.cases, o + group.controls
    return found


def _binomial(hits: int, tries: int, rate: float) -> float:
    return (hits * log(rate) if hits else 0.0) + ((tries - hits) * log(1 - rate) if tries > hits else 0.0)
