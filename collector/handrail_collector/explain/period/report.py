"""Explain a period: TTFT, gaps, stalls, and what its slowest requests share.

Each scope is explained by itself. "Slowest" means the slowest 1 %.
A pure function of the result of ``queries/period.py``. Figures of different scope never mix.
Where nothing stands out, or where there are too few requests, that is the answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from math import ceil, exp, log
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from handrail.metrics.exponential_histogram import GapSketch
from handrail.records import Outcome
from handrail_collector.explain.period.concentration import PLACES, CaseControlStratum, Concentration, contrasts
from handrail_collector.explain.period.tail import LEAST_SLOW, PhaseMore, TailCauses, causing, phases_more
from handrail_collector.store.queries.period import (
    DIMENSIONS,
    OTHER,
    PHASE_SUMS,
    RANKS,
    SLOW,
    SLOW_RANK,
    USUAL,
    Measure,
    PeriodData,
    Quantiles,
)
from handrail_collector.store.rollups import BIN_ERROR, BINS_PER_E

SHOWN: Final = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p99.9": 0.999}
NOT_FAILED: Final = frozenset(
    {
        Outcome.OK.value,
        Outcome.INCOMPLETE.value,
        Outcome.CLIENT_DISCONNECT.value,
        Outcome.UNKNOWN_FINISH.value,
        Outcome.UNKNOWN.value,
    }
)
"""Outcomes that are no failure of the server, or not known to be one."""

TIMES_LONGER: Final = 1.5
LEAST_LONGER_NS: Final = {Measure.TTFT: 50_000_000, Measure.GAP: 20_000_000}
"""What makes a difference worth a report: statistics alone find tenths of a millisecond among enough requests."""

NEEDED: Final = ceil(LEAST_SLOW / (1 - SLOW_RANK) - 1e-6)
"""Fewest requests with a first token for a statement on the slowest 1 %."""


class TailVerdict(str, Enum):
    """What can be concluded about the slowest 1 %."""

    STANDS_OUT = "stands_out"  # they are much longer, and some have a cause or concentrate somewhere
    NOTHING = "nothing_stands_out"
    CANNOT_TELL = "cannot_tell"  # too few requests


@dataclass(frozen=True, slots=True, kw_only=True)
class Tail:
    """The slowest 1 % of a measure against the middle half.

    ``excess_ns``: how much longer they took on average. ``located``: how many of them have a host.
    ``unattributed_share``: the share of that difference that no evidence explains.
    ``phases`` and ``causes`` only for ``ttft``; ``causes`` only in the exact answer, and only where they are much longer.
    """

    measure: Measure
    verdict: TailVerdict
    requests: int
    located: int
    from_ns: int
    baseline_requests: int
    baseline_from_ns: int
    baseline_to_ns: int
    baseline_mean_ns: int
    slow_mean_ns: int
    phases: tuple[PhaseMore, ...]
    unattributed_share: float | None
    concentrations: tuple[Concentration, ...]
    causes: TailCauses | None

    @property
    def excess_ns(self) -> int:
        """How much longer the slow ones took."""
        return self.slow_mean_ns - self.baseline_mean_ns

    @property
    def much_longer(self) -> bool:
        """Whether they took enough longer to look for a cause."""
        return much_longer(self.measure, self.from_ns, self.baseline_mean_ns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failures:
    """Requests that failed, by outcome, and where they concentrate."""

    requests: int
    by_outcome: Mapping[str, int]
    by_kv_outcome: Mapping[str, int]  # of all requests, without plain successes
    concentrations: tuple[Concentration, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CauseShare:
    """One cause of stalls.

    ``share``: of the stalls; ``longest_share``: of those among the longest gaps, None where there is none.
    ``events``: times in which streams of one host stalled for it; ``every_ns``: from one event to the next at the host with most.
    ``lift``: the median there. ``host``: the host with most of these stalls; ``host_share``: its share of them.
    """

    cause: str
    stalls: int
    share: float
    streams: int
    events: int
    every_ns: int | None
    gap_ns: int
    longest_gap_ns: int
    longest: int
    longest_share: float | None
    lift: float | None
    host: str
    host_share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Stalling:
    """All stalls of a scope that were reported singly: the longest of each stream."""

    stalls: int
    gap_ns: int
    longest: int  # among the longest gaps
    causes: tuple[CauseShare, ...]  # most stalls first


@dataclass(frozen=True, slots=True, kw_only=True)
class ScopeAnswer:
    """The explanation of one scope.

    ``timed``: requests with a TTFT and phases; ``complete``: requests with evidence of every process on their path.
    """

    scope: str
    requests: int
    complete: int
    timed: int
    streams: int  # with gaps
    gaps: int
    ttft_ns: Mapping[str, int]
    gap_ns: Mapping[str, int]
    failures: Failures
    ttft: Tail | None
    gap: Tail | None
    stalls: Stalling | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PeriodAnswer:
    """The explanation of a period.

    ``exact``: TTFT percentiles are exact; otherwise they are within ``ttft_error``. Gap percentiles are always within 1 %
    (sketches).
    """

    since_unix_ns: int
    until_unix_ns: int
    model: str | None
    exact: bool
    ttft_error: float
    rolled_hours: int
    scopes: tuple[ScopeAnswer, ...]


def explain(period_data: PeriodData) -> PeriodAnswer:
    """Return the explanation of the period."""
    assert period_data.of.since_unix_ns is not None
    assert period_data.of.until_unix_ns is not None
    scopes = sorted(set(period_data.ttft_cells["scope"].to_pylist()), key=_scope_order)
    return PeriodAnswer(
        since_unix_ns=period_data.of.since_unix_ns,
        until_unix_ns=period_data.of.until_unix_ns,
        model=period_data.of.model,
        exact=period_data.exact,
        ttft_error=0.0 if period_data.exact else BIN_ERROR,
        rolled_hours=period_data.rolled_hours,
        scopes=tuple(_scope(period_data, scope) for scope in scopes),
    )


def _scope_order(scope: str) -> tuple[int, str]:
    known = ("edge", "decode", "engine")
    return known.index(scope) if scope in known else len(known), scope


def _scope(period_data: PeriodData, scope: str) -> ScopeAnswer:
    ttft, gap = (cells.filter(pc.equal(cells["scope"], scope)) for cells in (period_data.ttft_cells, period_data.gap_cells))
    sketch = period_data.sketches.get(scope)
    quantiles = {
        measure: _quantiles(cells) if period_data.quantiles is None else period_data.quantiles[measure].get(scope)
        for measure, cells in ((Measure.TTFT, ttft), (Measure.GAP, gap))
    }
    tail_and_sample = (
        period_data.tail_and_sample.filter(pc.equal(period_data.tail_and_sample["scope"], scope))
        if period_data.tail_and_sample is not None
        else None
    )
    return ScopeAnswer(
        scope=scope,
        requests=_sum(ttft, "requests"),
        complete=_sum(ttft, "complete"),
        timed=_sum(ttft, "timed"),
        streams=_sum(gap, "requests"),
        gaps=sketch.count if sketch is not None else 0,
        ttft_ns=_shown(quantiles[Measure.TTFT]),
        gap_ns=_gap_quantiles(sketch),
        failures=_failures(ttft),
        ttft=_tail(Measure.TTFT, ttft, quantiles[Measure.TTFT], tail_and_sample),
        gap=_tail(Measure.GAP, gap, quantiles[Measure.GAP], None),
        stalls=stalling(period_data.stalls.filter(pc.equal(period_data.stalls["scope"], scope))),
    )


def _quantiles(cells: pa.Table) -> Quantiles | None:
    """Return quantiles from the bins: the middle of the bin of each rank."""
    counts: dict[int, int] = {}
    for place, requests in zip(cells["bin"].to_pylist(), cells["timed"].to_pylist(), strict=True):
        if place is not None:
            counts[place] = counts.get(place, 0) + requests
    total = sum(counts.values())
    if not total:
        return None
    values, seen, ordered = [], 0, iter(sorted(counts.items()))
    place = 0
    for rank in RANKS:
        while seen < max(1, ceil(rank * total - 1e-9)):
            place, requests = next(ordered)
            seen += requests
        values.append(round(exp((place + 0.5) / BINS_PER_E)))
    return Quantiles(counted=total, values_ns=tuple(values))


def _shown(quantiles: Quantiles | None) -> dict[str, int]:
    if quantiles is None:
        return {}
    at = dict(zip(RANKS, quantiles.values_ns, strict=True))
    return {name: at[rank] for name, rank in SHOWN.items()}


def _gap_quantiles(sketch: GapSketch | None) -> dict[str, int]:
    found = {name: sketch.quantile(rank) for name, rank in SHOWN.items()} if sketch is not None else {}
    return {name: value for name, value in found.items() if value is not None}


def _tail(measure: Measure, cells: pa.Table, quantiles: Quantiles | None, tail_and_sample: pa.Table | None) -> Tail | None:
    if quantiles is None:
        return None
    cells = _in_parts(cells, quantiles)
    parts = {part: cells.filter(pc.equal(cells["part"], part)) for part in (SLOW, USUAL)}
    slow, usual = parts[SLOW], parts[USUAL]
    slow_requests, baseline_requests = _sum(slow, "requests"), _sum(usual, "requests")
    cuts = quantiles.cuts
    enough = quantiles.counted >= NEEDED
    phases = _phases(usual, slow) if measure is Measure.TTFT else []
    telling = much_longer(measure, cuts.slow_from_ns, _mean(usual))
    groups = _groups(slow, usual)
    found = contrasts(groups, telling=telling) if enough else []
    causes = causing(tail_and_sample, standing(found)) if tail_and_sample is not None and enough and telling else None
    stands_out = bool(standing(found)) or bool(causes and causes.named)
    unattributed = sum(phase.share for phase in phases if phase.place) if phases else None
    return Tail(
        measure=measure,
        verdict=TailVerdict.CANNOT_TELL if not enough else TailVerdict.STANDS_OUT if stands_out else TailVerdict.NOTHING,
        requests=slow_requests,
        located=sum(group.cases for group in groups if any(group.values[: len(PLACES)])),
        from_ns=cuts.slow_from_ns,
        baseline_requests=baseline_requests,
        baseline_from_ns=cuts.baseline_from_ns,
        baseline_to_ns=cuts.baseline_to_ns,
        baseline_mean_ns=_mean(usual),
        slow_mean_ns=_mean(slow),
        phases=tuple(phases),
        unattributed_share=unattributed,
        concentrations=tuple(found),
        causes=causes,
    )


def much_longer(measure: Measure, slow_from_ns: int, baseline_mean_ns: int) -> bool:
    """Whether even the shortest of the slowest is much longer than usual.

    Much: by both ``TIMES_LONGER`` and ``LEAST_LONGER_NS``.
    """
    return slow_from_ns >= TIMES_LONGER * baseline_mean_ns and slow_from_ns - baseline_mean_ns >= LEAST_LONGER_NS[measure]


def _in_parts(cells: pa.Table, quantiles: Quantiles) -> pa.Table:
    """Return the cells with the column ``part``, as precise as the bins are."""
    if "part" in cells.column_names:
        return cells
    low, high, slow = (
        _bin(value) for value in (quantiles.cuts.baseline_from_ns, quantiles.cuts.baseline_to_ns, quantiles.cuts.slow_from_ns)
    )
    parts = [
        OTHER if place is None else SLOW if place >= slow else USUAL if low <= place <= high else OTHER
        for place in cells["bin"].to_pylist()
    ]
    return cells.append_column("part", pa.array(parts, pa.string()))


def _bin(middle_ns: int) -> int:
    return int(log(max(1, middle_ns)) * BINS_PER_E)


def _phases(usual: pa.Table, slow: pa.Table) -> list[PhaseMore]:
    names = (*PHASE_SUMS, "value_sum_ns")
    sums = [[_sum(part, name) for name in names] for part in (usual, slow)]
    return phases_more(sums[0], _sum(usual, "requests"), sums[1], _sum(slow, "requests"), names)


def _groups(query: pa.Table, others: pa.Table) -> list[CaseControlStratum]:
    found: dict[tuple[str | None, ...], list[int]] = {}
    for index, part in enumerate((query, others)):
        columns = [part[name].to_pylist() for name in (*DIMENSIONS[1:], "requests")]
        for model, prefill, decode, outcome, kv_outcome, requests in zip(*columns, strict=True):
            link = f"{prefill}>{decode}" if prefill and decode and prefill != decode else None
            found.setdefault((prefill, decode, link, model, outcome, kv_outcome), [0, 0])[index] += requests
    return [CaseControlStratum(values, *counts) for values, counts in found.items()]


def _failures(cells: pa.Table) -> Failures:
    failed = pc.invert(pc.is_in(cells["outcome"], value_set=pa.array(sorted(NOT_FAILED))))
    query, others = cells.filter(failed), cells.filter(pc.invert(failed))
    # the outcome defines the cases, so it cannot explain them
    groups = [
        CaseControlStratum((*group.values[:4], None, group.values[5]), group.cases, group.controls)
        for group in _groups(query, others)
    ]
    kv_outcomes = _by(cells, "kv_outcome")
    return Failures(
        requests=_sum(query, "requests"),
        by_outcome=_by(query, "outcome"),
        by_kv_outcome={name: count for name, count in kv_outcomes.items() if name not in ("ok", "unknown")},
        concentrations=tuple(contrasts(groups)),
    )


def _by(cells: pa.Table, name: str) -> dict[str, int]:
    found: dict[str, int] = {}
    for value, requests in zip(cells[name].to_pylist(), cells["requests"].to_pylist(), strict=True):
        if value is not None:
            found[value] = found.get(value, 0) + requests
    return dict(sorted(found.items(), key=lambda each: (-each[1], each[0])))


def _sum(cells: pa.Table, name: str) -> int:
    if not cells.num_rows:
        return 0
    return int(pc.sum(cells[name]).as_py() or 0)


def _mean(cells: pa.Table) -> int:
    return round(_sum(cells, "value_sum_ns") / max(1, _sum(cells, "requests")))


def standing(found: Iterable[Concentration]) -> list[Concentration]:
    """Return the values that stand out, clearest first."""
    return [contrast for contrast in found if contrast.stands_out]


def stalling(counts: pa.Table) -> Stalling | None:
    """Summarise one scope's rows of ``stall_causes.sql``; None without stalls."""
    if not counts.num_rows:
        return None
    stalls, longest = _sum(counts, "stalls"), _sum(counts, "longest")
    causes = []
    for cause in dict.fromkeys(counts["cause"].to_pylist()):
        of = counts.filter(pc.equal(counts["cause"], cause)).sort_by([("stalls", "descending"), ("host", "ascending")])
        first = of.slice(0, 1).to_pylist()[0]
        causes.append(
            CauseShare(
                cause=cause,
                stalls=_sum(of, "stalls"),
                share=_sum(of, "stalls") / stalls,
                streams=_sum(of, "streams"),
                events=_sum(of, "events"),
                every_ns=first["every_ns"],
                gap_ns=_sum(of, "gap_sum_ns"),
                longest_gap_ns=int(pc.max(of["gap_max_ns"]).as_py()),
                longest=_sum(of, "longest"),
                longest_share=_sum(of, "longest") / longest if longest else None,
                lift=first["lift"],
                host=first["host"],
                host_share=first["stalls"] / _sum(of, "stalls"),
            )
        )
    causes.sort(key=lambda each: (-each.stalls, each.cause))
    return Stalling(stalls=stalls, gap_ns=_sum(counts, "gap_sum_ns"), longest=longest, causes=tuple(causes))
