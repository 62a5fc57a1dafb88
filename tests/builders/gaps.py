"""A row's histogram of gaps, from a sketch and back."""

from __future__ import annotations

from typing import Any

from handrail.metrics.exponential_histogram import GapSketch
from handrail_collector.rows import RequestRow

NO_GAPS: dict[str, Any] = {"gap_sum_ns": None, "gap_min_ns": None, "gap_buckets": (), "gap_counts": ()}


def gap_fields(gaps: GapSketch) -> dict[str, Any]:
    """Return the fields of a row that hold ``gaps``, its largest gap aside."""
    buckets = gaps.buckets()
    return {
        "gap_sum_ns": gaps.sum_ns,
        "gap_min_ns": gaps.min_ns,
        "gap_buckets": tuple(buckets),
        "gap_counts": tuple(buckets.values()),
    }


def gaps_of(row: RequestRow) -> GapSketch:
    """Return the gaps of a row."""
    counts = dict(zip(row.gap_buckets, row.gap_counts, strict=True))
    return GapSketch.of_counts(counts, sum_ns=row.gap_sum_ns or 0, min_ns=row.gap_min_ns or 0, max_ns=row.gap_max_ns or 0)
