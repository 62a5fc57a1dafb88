"""Compare the statement about each request with what truly happened.

Pure. docs/truth.md has the definitions.
*slow*: by the twin run, the fault made the first token later by 50 ms and by a fifth. The shares of slow requests are:
*phase right*: the phase that truly grew most was named. If that phase hides in vLLM's queue time at D, ``unattributed`` with
that phase among its candidates is right.
*misnamed*: one phase was named, and it was the wrong one.
*host right*: the named place is where that phase truly is (its host, its link, the router), or the place of the fault.
*outcome right*: for requests that are slow or have another outcome, the client's outcome is reported correctly.
*false findings*: the share of all requests of the fault-free twin that a finding would cover. A finding is a cause that stands
out, or a value at which the slowest concentrate, by first token or by gap.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from handrail.phases import Phase
from handrail_collector.explain.period.attribution import Attribution, causes
from handrail_collector.explain.period.baseline import fit
from handrail_collector.explain.period.concentration import DIMENSIONS, CaseControlStratum, contrasts
from handrail_collector.explain.period.report import NEEDED, much_longer
from handrail_collector.explain.period.request_columns import PHASES, requests_of
from handrail_collector.rows import RequestRow
from handrail_collector.store.queries.period import Measure
from handrail_sim.emulator import truth
from handrail_sim.emulator.truth import Excess, RequestTruth

HIDDEN = frozenset({"kv_wait", "kv_handshake", "kv_transfer", "kv_notice", "decode_queue"})
_REPORTED = {  # the client's outcome, in the words of a row
    truth.TrueOutcome.OK: {"ok"},
    truth.TrueOutcome.FAILED: {"stream_error", "http_error", "upstream_disconnect"},
    truth.TrueOutcome.HUNG: {"client_disconnect", "timed_out"},
}
_FETCHED: dict[truth.FetchTruth, set[str | None]] = {
    truth.FetchTruth.OK: {"ok", "unknown"},
    truth.FetchTruth.FAILED: {"failed", "unknown"},
    truth.FetchTruth.RECOMPUTED: {"recomputed", "unknown"},
    truth.FetchTruth.EXPIRED: {"expired", "recomputed", "unknown"},
    truth.FetchTruth.STALE_READ: {"stale_read", "unknown"},
    truth.FetchTruth.NONE: {"unknown", None, "hung", "aborted"},
}


@dataclass(frozen=True, slots=True)
class Known:
    """One request: the truth, the effect of a fault, and what was reported.

    The effect is None in a run without a fault. The report is None when nothing was reported.
    """

    truth: RequestTruth
    excess: Excess | None
    row: RequestRow | None
    baseline: str


@dataclass(slots=True, kw_only=True)
class Counts:
    """Counts of requests of one run, or of several runs with their seeds.

    All but the first four count ``slow`` requests only.
    """

    requests: int = 0
    falsely_found: int = 0  # of those of the twin
    touched: int = 0  # slow, or with another outcome
    outcome_right: int = 0  # of ``touched``, as the next
    kv_outcome_wrong: int = 0
    slow: int = 0
    named: int = 0
    unattributed: int = 0
    open: int = 0
    placed: int = 0
    misnamed: int = 0
    found: int = 0
    baseline: int = 0
    baseline_misnamed: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(**{field.name: getattr(self, field.name) + getattr(other, field.name) for field in fields(self)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """The score of one case.

    Shares are 0 to 1, None when there is nothing to judge. ``named`` and ``unattributed`` add up to ``phase_right``.
    """

    scenario: str
    requests: int
    slow: int
    phase_right: float | None
    named: float | None
    unattributed: float | None
    open: float | None  # no phase was named: none is likely enough, or none grew
    host_right: float | None
    outcome_right: float | None
    kv_outcome_wrong: float | None
    misnamed: float | None
    found: float | None  # of the slow ones, those that a finding covers
    false_findings: float
    baseline_phase_right: float | None
    baseline_misnamed: float | None

    @classmethod
    def of(cls, scenario: str, counts: Counts) -> Score:
        slow, touched = counts.slow, counts.touched
        return cls(
            scenario=scenario,
            requests=counts.requests,
            slow=slow,
            phase_right=_share(counts.named + counts.unattributed, slow),
            named=_share(counts.named, slow),
            unattributed=_share(counts.unattributed, slow),
            open=_share(counts.open, slow),
            host_right=_share(counts.placed, slow),
            outcome_right=_share(counts.outcome_right, touched),
            kv_outcome_wrong=_share(counts.kv_outcome_wrong, touched),
            misnamed=_share(counts.misnamed, slow),
            found=_share(counts.found, slow),
            false_findings=_share(counts.falsely_found, counts.requests) or 0.0,
            baseline_phase_right=_share(counts.baseline, slow),
            baseline_misnamed=_share(counts.baseline_misnamed, slow),
        )

    def plain(self) -> dict[str, str | int | float | None]:
        """Return what ``--json`` prints."""
        lines = (
            "scenario",
            "requests",
            "slow",
            "phase_right",
            "host_right",
            "outcome_right",
            "misnamed",
            "false_findings",
            "baseline_phase_right",
        )
        return {name: getattr(self, name) for name in lines}


def found_in(rows: Sequence[RequestRow]) -> int:
    """Count the requests that findings would cover."""
    attribution = _causes(rows) if rows else None
    covered = attribution.significant.copy() if attribution is not None else np.zeros(len(rows), bool)
    for measure in (Measure.TTFT, Measure.GAP):
        covered |= _concentrated(rows, measure)
    return int(covered.sum())


def _concentrated(rows: Sequence[RequestRow], measure: Measure) -> NDArray[np.bool_]:
    """Return the slowest requests of each scope that share an over-represented value.

    These are values that ``handrail explain`` would report as more frequent among the slowest.
    """
    covered = np.zeros(len(rows), bool)
    for scope in {row.scope for row in rows}:
        timed = [(at, ns) for at, row in enumerate(rows) if row.scope == scope and (ns := _time_ns(row, measure)) is not None]
        if len(timed) < NEEDED:
            continue
        low, high, slow_from = (int(q) for q in np.quantile([ns for _, ns in timed], (0.25, 0.75, 0.99), method="inverted_cdf"))
        slow = [at for at, ns in timed if ns >= slow_from]
        usual = [(at, ns) for at, ns in timed if low <= ns <= high]
        counted = [Counter(_values(rows[at]) for at in part) for part in (slow, [at for at, _ in usual])]
        groups = [CaseControlStratum(values, counted[0][values], counted[1][values]) for values in counted[0] | counted[1]]
        telling = much_longer(measure, slow_from, round(np.mean([ns for _, ns in usual])))
        standing = {(each.dimension, each.value) for each in contrasts(groups, telling=telling) if each.stands_out}
        for at in slow:
            covered[at] = not standing.isdisjoint(zip(DIMENSIONS, _values(rows[at]), strict=True))
    return covered


def _time_ns(row: RequestRow, measure: Measure) -> int | None:
    if measure is Measure.GAP:
        return row.gap_max_ns
    return row.ttft_token_ns if row.phase_of == "ttft" else None


def _values(row: RequestRow) -> tuple[str | None, ...]:
    prefill, decode = row.prefill_host or row.prefill_instance, row.decode_host or row.decode_instance
    link = f"{prefill}>{decode}" if prefill and decode and prefill != decode else None
    return prefill, decode, link, row.model, row.outcome, row.kv_outcome


def _causes(rows: Sequence[RequestRow]) -> Attribution | None:
    requests = requests_of(rows)
    typical = fit(requests)
    return causes(requests, typical) if typical is not None else None


def judge(run: Sequence[Known], fault_place: str, falsely_found: int) -> Counts:
    """Compute the score of a case; ``falsely_found`` is the twin's ``found_in``."""
    rows = [known.row for known in run if known.row is not None]
    attribution = _causes(rows)
    at = {row.client_request_id: index for index, row in enumerate(rows)}
    counts = Counts(requests=len(run), falsely_found=falsely_found)
    for known in run:
        slow = _slow(known)
        if slow:
            _count(known, attribution, at.get(known.truth.request_id), fault_place, counts)
        if slow or (known.excess is not None and known.excess.outcome_changed):
            counts.touched += 1
            counts.outcome_right += _outcome_right(known)
            counts.kv_outcome_wrong += _kv_outcome_wrong(known)
    return counts


def _share(part: int, whole: int) -> float | None:
    return round(part / whole, 4) if whole else None


def _slow(known: Known) -> bool:
    excess, ttft_ns = known.excess, known.truth.ttft_ns
    return excess is not None and excess.ttft_ns is not None and ttft_ns is not None and excess.slow(ttft_ns - excess.ttft_ns)


def _count(known: Known, attribution: Attribution | None, index: int | None, fault_place: str, counts: Counts) -> None:
    excess = known.excess
    assert excess is not None
    assert excess.phase is not None
    true_phase = _in_words_of_a_row(excess.phase)
    counts.slow += 1
    counts.baseline += known.baseline == true_phase
    counts.baseline_misnamed += known.baseline not in ("", true_phase)
    if attribution is None or index is None:
        counts.open += 1
        return
    counts.found += bool(attribution.significant[index])
    counts.placed += attribution.place[index] in _places(excess, fault_place)
    if not attribution.clear[index]:
        counts.open += 1
        return
    phase = PHASES[attribution.leading[index]]
    if phase is Phase.UNATTRIBUTED:
        counts.unattributed += true_phase in HIDDEN & _may_be(known.row)
        return
    named = (Phase.ROUTER_AND_HOPS if phase in _BETWEEN else phase).value
    counts.named += named == true_phase
    counts.misnamed += named != true_phase


_BETWEEN = frozenset({Phase.ROUTER, Phase.PREFILL_HOPS, Phase.DECODE_HOPS})


def _in_words_of_a_row(phase: truth.TruePhase) -> str:
    """Return the truth in the words of a row: proxies alone merge router and network."""
    return Phase.ROUTER_AND_HOPS.value if phase in (truth.TruePhase.ROUTER, truth.TruePhase.HOPS) else phase.value


def _places(excess: Excess, fault_place: str) -> set[str | None]:
    return {"router" if excess.place == "network" else excess.place, fault_place}


def _may_be(row: RequestRow | None) -> set[str]:
    rests = [phase for phase in row.phases if phase.phase == Phase.UNATTRIBUTED.value] if row is not None else []
    return set(max(rests, key=lambda phase: phase.duration_ns).may_be) if rests else set()


def _outcome_right(known: Known) -> bool:
    """Tell whether the reported outcome is right.

    An answer from blocks that were given up is never a good one, whatever the client saw, since nobody can verify it.
    """
    if known.row is None:
        return False
    tainted = known.row.outcome == "tainted" and known.truth.fetch is truth.FetchTruth.STALE_READ
    return tainted or known.row.outcome in _REPORTED[known.truth.outcome]


def _kv_outcome_wrong(known: Known) -> bool:
    """Tell whether a wrong KV outcome was reported.

    ``unknown``, all that proxies and spans allow, is not wrong.
    """
    return known.row is not None and known.row.kv_outcome is not None and known.row.kv_outcome not in _FETCHED[known.truth.fetch]


def by_request(rows: Sequence[RequestRow]) -> Mapping[str, RequestRow]:
    """Index the rows by the client's id.

    If a request became several rows, the row of the outermost scope counts.
    """
    scopes = ("engine", "decode", "edge")
    ordered = sorted(rows, key=lambda row: scopes.index(row.scope))
    return {row.client_request_id or row.request_key or "": row for row in ordered}
