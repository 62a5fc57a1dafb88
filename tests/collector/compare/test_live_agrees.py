"""Agreement of the sidecar's live judgement with that of ``handrail compare``.

An objective has one meaning for a live request and for its row.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from builders.compare_samples import sample
from builders.exchanges import exchange
from handrail.metrics.exponential_histogram import GapSketch
from handrail.records import Gaps, Outcome
from handrail_collector.compare import goodput, report
from handrail_collector.compare.load import _NOT_FAILED, _OF_THE_SERVER
from handrail_sidecar.live_metrics.slo import ALL, ITL, LEFT, TTFT, judge
from handrail_sidecar.live_metrics.slo import RequestObjectives as LiveObjectives

MS = 10**6
OBJECTIVES = LiveObjectives()


def test_the_defaults_are_the_same() -> None:
    assert (OBJECTIVES.ttft_ns, OBJECTIVES.itl_ns) == (report.DEFAULT_TTFT_NS, report.DEFAULT_ITL_NS)
    assert report.SloTargets().itl_of == "p99"


@given(
    outcome=st.sampled_from([outcome for outcome in Outcome if outcome is not Outcome.TAINTED]),
    ttft_ms=st.none() | st.integers(1, 2000),
    duration_ms=st.integers(1, 4000),
    gaps_ms=st.lists(st.integers(1, 100), max_size=20),
    status=st.sampled_from([200, 400, 404, 408, 429, 500, None]),
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_request_is_judged_alike(
    outcome: Outcome, ttft_ms: int | None, duration_ms: int, gaps_ms: list[int], status: int | None
) -> None:
    sketch = GapSketch()
    sketch.extend([gap * MS for gap in gaps_ms])
    gaps = (
        Gaps(
            unit="chunk", count=sketch.count, sum_ns=sketch.sum_ns, max_ns=sketch.max_ns or 0, max_at_ns=0, sketch=sketch.encode()
        )
        if gaps_ms
        else None
    )
    record = replace(
        exchange(),
        outcome=outcome,
        ttft_token_ns=None if ttft_ms is None else ttft_ms * MS,
        duration_ns=duration_ms * MS,
        gaps=gaps,
        status=status,
    )
    refused = status is not None and 400 <= status < 500 and status not in _OF_THE_SERVER
    row = sample(
        np.zeros(1),
        np.array([np.nan if ttft_ms is None else ttft_ms * MS], np.float64),
        duration_ns=np.array([duration_ms * MS], np.float64),
        gap_p99_ns=np.array([np.nan if not gaps_ms else sketch.quantile(0.99)], np.float64),
        failed=np.array([outcome.value not in _NOT_FAILED and not refused]),
        left=np.array([outcome in LEFT]),
        refused=np.array([refused]),
    )
    judged = goodput.judge(row, report.SloTargets())
    ours = dict(judge(record, OBJECTIVES, ttft_judged=False))
    if not judged.judged[0]:
        assert not {TTFT, ITL, ALL} & ours.keys()
    else:
        assert (ours[TTFT], ours[ITL], ours[ALL]) == (judged.ttft[0], judged.gaps[0], judged.both[0])
