"""Published figures on splitting prefill from decode, beside the scenarios' own.

See docs/experiment.md. Published: two L40S without a peer-to-peer path, Qwen2.5-7B, prompts of about 8,000 tokens.
Some points served to choose a scenario's figures (inputs); the others are predictions. A second set of scenarios, on H100, comes
from first principles alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from statistics import fmean, median

from handrail_sim.emulator.scenario import load
from handrail_sim.emulator.truth import RequestTruth, TruePhase
from handrail_sim.emulator.virtual_run import VirtualRunSettings, simulate

TOLERANCE = 0.1
NEAR_IDLE_PER_S = 0.1


class MeasureKind(str, Enum):
    """Whether a figure was an input or a prediction.

    ``INPUT``: it served to choose the scenario's figures.
    """

    INPUT = "input"
    PREDICTION = "prediction"


class ExperimentMeasure(str, Enum):
    """A figure that is computed over all requests of a run.

    ITL is over all gaps together. TPOT is a request's mean gap.
    The KV transfer is the fastest of a run, which waited for no other transfer.
    """

    TTFT_P50 = "TTFT p50"
    TTFT_P99 = "TTFT p99"
    GAP_P50 = "ITL p50"
    GAP_P99 = "ITL p99"
    TPOT_P50 = "TPOT p50"
    KV_P50 = "KV size p50"
    TRANSFER_LEAST = "KV transfer"

    @property
    def unit(self) -> str:
        return "MB" if self is ExperimentMeasure.KV_P50 else "ms"


@dataclass(frozen=True, slots=True)
class Point:
    """A published figure, or a range of them; times in ms, sizes in MB."""

    scenario: str
    arrivals_per_s: float
    figure: ExperimentMeasure
    kind: MeasureKind
    least: float
    most: float

    @property
    def name(self) -> str:
        return f"{self.scenario} at {self.arrivals_per_s:g}/s: {self.figure.value}"

    def nearest(self, value: float) -> float:
        """Return the published figure, or the point of its range nearest to ``value``."""
        return min(max(value, self.least), self.most)

    def ratio(self, value: float) -> float:
        """Return ``value`` over the published figure.

        For a range, divides by its nearer end; inside the range the ratio is 1.
        """
        return value / self.nearest(value)

    def fits(self, value: float) -> bool:
        """Test whether ``value`` is within a tenth of the published figure.

        A published range is widened by a tenth.
        """
        return self.least * (1 - TOLERANCE) <= value <= self.most * (1 + TOLERANCE)


def _point(
    scenario: str, rate: float, figure: ExperimentMeasure, kind: MeasureKind, least: float, most: float | None = None
) -> Point:
    return Point(scenario, rate, figure, kind, least, least if most is None else most)


_IN, _OUT = MeasureKind.INPUT, MeasureKind.PREDICTION
_COLLOCATED, _SPLIT = "l40s-chunked", "l40s-split"

POINTS: tuple[Point, ...] = (
    _point(_SPLIT, NEAR_IDLE_PER_S, ExperimentMeasure.KV_P50, _IN, 470),
    _point(_SPLIT, NEAR_IDLE_PER_S, ExperimentMeasure.TRANSFER_LEAST, _IN, 1300),
    _point(_COLLOCATED, NEAR_IDLE_PER_S, ExperimentMeasure.TTFT_P50, _IN, 700),
    _point(_COLLOCATED, NEAR_IDLE_PER_S, ExperimentMeasure.GAP_P99, _IN, 23),
    _point(_COLLOCATED, 0.4, ExperimentMeasure.GAP_P99, _IN, 169),
    _point(
        _SPLIT, 1, ExperimentMeasure.GAP_P99, _IN, 52
    ),  # the upper end of its range; the lower end and the course between are predicted
    _point(_COLLOCATED, 2, ExperimentMeasure.GAP_P99, _OUT, 263),
    _point(_COLLOCATED, NEAR_IDLE_PER_S, ExperimentMeasure.GAP_P50, _OUT, 21, 24),
    _point(_COLLOCATED, 0.4, ExperimentMeasure.GAP_P50, _OUT, 21, 24),
    _point(_COLLOCATED, 1, ExperimentMeasure.GAP_P50, _OUT, 21, 24),
    _point(_SPLIT, NEAR_IDLE_PER_S, ExperimentMeasure.TTFT_P50, _OUT, 2200),
    _point(_SPLIT, 0.4, ExperimentMeasure.TTFT_P50, _OUT, 2200),
    _point(_SPLIT, NEAR_IDLE_PER_S, ExperimentMeasure.GAP_P99, _OUT, 25, 52),
    _point(_SPLIT, 0.4, ExperimentMeasure.GAP_P99, _OUT, 25, 52),
    _point(_SPLIT, NEAR_IDLE_PER_S, ExperimentMeasure.GAP_P50, _OUT, 21, 24),
    _point(_SPLIT, 0.4, ExperimentMeasure.GAP_P50, _OUT, 21, 24),
    _point(_SPLIT, 1, ExperimentMeasure.GAP_P50, _OUT, 21, 24),
)


@dataclass(frozen=True, slots=True)
class LatencyObjective:
    """Objectives of one request: its TTFT, and the p99 of the gaps of its own stream."""

    ttft_ms: float
    gap_ms: float

    def met(self, truth: RequestTruth) -> bool:
        if truth.ttft_ns is None or not truth.gaps_ns:
            return False
        return truth.ttft_ns <= self.ttft_ms * 1e6 and _rank(sorted(truth.gaps_ns), 0.99) <= self.gap_ms * 1e6


OBJECTIVE = LatencyObjective(ttft_ms=2000, gap_ms=50)
H100_TRANSFER_MS = 66.0  # published: 3.3 GB over 400 Gb/s
H100_ARMS = ("h100-70b-plain", "h100-70b-chunked", "h100-70b-split")


def run(
    scenario: str, seed: int, requests: int, arrivals_per_s: float | None = None, batch_tokens: int | None = None
) -> list[RequestTruth]:
    """Run a bundled scenario once.

    ``arrivals_per_s`` and ``batch_tokens`` replace the scenario's own rate and step budget.
    """
    chosen = load(scenario)
    chosen = replace(
        chosen,
        arrivals_per_s=chosen.arrivals_per_s if arrivals_per_s is None else arrivals_per_s,
        batch_tokens=chosen.batch_tokens if batch_tokens is None else batch_tokens,
    )
    return [
        virtual_request.truth for virtual_request in simulate(VirtualRunSettings(scenario=chosen, requests=requests, seed=seed))
    ]


def figures(truths: Sequence[RequestTruth]) -> dict[ExperimentMeasure, float]:
    """Compute all figures of a run, each in its unit.

    The figures of a hand-off are left out where there was none.
    """
    gaps = sorted(gap_ns for truth in truths for gap_ns in truth.gaps_ns)
    ttft = sorted(truth.ttft_ns for truth in truths if truth.ttft_ns is not None)
    transfers = [truth.phases[TruePhase.KV_TRANSFER] for truth in truths if TruePhase.KV_TRANSFER in truth.phases]
    read = {
        ExperimentMeasure.TTFT_P50: _rank(ttft, 0.5),
        ExperimentMeasure.TTFT_P99: _rank(ttft, 0.99),
        ExperimentMeasure.GAP_P50: _rank(gaps, 0.5),
        ExperimentMeasure.GAP_P99: _rank(gaps, 0.99),
        ExperimentMeasure.TPOT_P50: median(fmean(truth.gaps_ns) for truth in truths if truth.gaps_ns),
    }
    if transfers:
        read |= {
            ExperimentMeasure.KV_P50: median(truth.kv_bytes for truth in truths),
            ExperimentMeasure.TRANSFER_LEAST: min(transfers),
        }
    return {figure: value / 1e6 for figure, value in read.items()}


def share_met(objective: LatencyObjective, truths: Sequence[RequestTruth]) -> float:
    """Return the share of all requests that meet the objective."""
    return sum(map(objective.met, truths)) / len(truths)


def _rank(ordered: Sequence[int], share: float) -> float:
    """Return the quantile by nearest rank."""
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]
