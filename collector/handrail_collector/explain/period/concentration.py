"""What some requests have more of than others: hosts, links, models, outcomes. Pure counting.

*Lift* is a value's share among the requests in question over its share among the others, with an interval. What *stands out* is
found one after the other: the value that tells the two groups apart best by likelihood (Kulldorff's scan statistic), then the
best of what is left without its requests, so that a slow link does not accuse both of its hosts. Requests come in bursts, so a
value has to be clearly more frequent, not only surely.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import exp, log, sqrt
from typing import Final

SIGMAS: Final = 3.3  # of an interval: one of a thousand lies outside
LEAST_TIMES: Final = 2.0  # how much more frequent the requests in question have to be with the value than without
LEAST_SHARE: Final = 0.05  # of the requests in question that have the value
LEAST_REQUESTS: Final = 5
MOST: Final = 6  # values that may stand out

PLACES: Final = ("prefill_host", "decode_host", "link")
DIMENSIONS: Final = (*PLACES, "model", "outcome", "kv_outcome")


@dataclass(frozen=True, slots=True)
class CaseControlStratum:
    """Requests alike in every dimension: how many of them are in question and how many are what they are compared with."""

    values: tuple[str | None, ...]  # in the order of DIMENSIONS; None: not known, which is no value
    cases: int
    controls: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Concentration:
    """One value of one dimension. ``lift``, ``low``, ``high``: None where none of the others have the value.

    ``perhaps``: enough requests in question have it, and more often than the interval leaves to chance; for a value that does not
    stand out this is a hint and no more.
    """

    dimension: str
    value: str
    asked: int
    asked_share: float
    others: int
    others_share: float
    lift: float | None
    low: float | None
    high: float | None
    stands_out: bool
    perhaps: bool


def contrasts(groups: Sequence[CaseControlStratum], *, telling: bool = True) -> list[Concentration]:
    """Every value of every dimension that has more than one, those that stand out first, then by how many are in question.

    Not ``telling``: the two groups hardly differ in what parts them, so that nothing stands out.
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
    return sorted(found, key=lambda c: (order.get((c.dimension, c.value), MOST), -c.asked, c.dimension, c.value))


def likelihood(query: int, others: int, all_requested: int, all_others: int) -> float:
    """By how much (ln) two rates of requests in question, with the value and without, fit better than one; 0 where it is less."""
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
    """What stands out, the best first."""
    found: list[tuple[str, str]] = []
    all_requested = sum(g.cases for g in groups)
    left = list(groups)
    while len(found) < MOST:
        counted = _counts(left)
        query, others = sum(g.cases for g in left), sum(g.controls for g in left)
        # so large that of this many values one of a thousand periods has one by chance (half of a chi square's quantile)
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
    """How much more frequent with the value than without; half a request is added on either side, so that none is infinite."""
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
        asked=a,
        asked_share=a / query,
        others=o,
        others_share=o / others,
        lift=lift,
        low=low,
        high=high,
        stands_out=stands_out,
        perhaps=a >= max(LEAST_REQUESTS, LEAST_SHARE * query) and (low is None or low > 1),
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
