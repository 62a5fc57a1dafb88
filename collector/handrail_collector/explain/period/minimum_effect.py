"""Define the smallest difference worth a report.

Statistics alone find tenths of a millisecond among enough requests. Pure.
"""

from __future__ import annotations

from typing import Final

from handrail_collector.store.queries.period import Measure

TIMES_LONGER: Final = 1.5
LEAST_LONGER_NS: Final = {Measure.TTFT: 50_000_000, Measure.GAP: 20_000_000}


def much_longer(measure: Measure, slow_from_ns: int, baseline_mean_ns: int) -> bool:
    """Whether even the shortest of the slowest is much longer than usual.

    Much: by both ``TIMES_LONGER`` and ``LEAST_LONGER_NS``.
    """
    return slow_from_ns >= TIMES_LONGER * baseline_mean_ns and slow_from_ns - baseline_mean_ns >= LEAST_LONGER_NS[measure]
