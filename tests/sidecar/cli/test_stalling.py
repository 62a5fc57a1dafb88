"""Stalls under a waterfall: every word and figure is there at any width."""

from __future__ import annotations

import pytest

from handrail.cli.stalling import stall_lines
from handrail.cli.waterfall import MIN_WIDTH
from handrail_collector.rows import StallRow
from made_rows import MS, STARTED, TRACE, phase, request_row

ROW = request_row((phase("prefill_compute", 100, "prefill"),))
SAID = "a step of 1,192 ms, usual are 10 ms, computed 3,717 prompt tokens"


def stall(number: int, cause: str, **changes: object) -> StallRow:
    row = StallRow(
        started_unix_ns=STARTED + 400 * MS,
        trace_id=TRACE,
        request_id=ROW.request_id,
        version=1,
        number=number,
        offset_ns=(400 + number) * MS,
        gap_ns=491 * MS,
        median_ns=10_200_000,
        cause=cause,
        lift=40.1,
        doubt=0.012,
        evidence=(SAID,),
    )
    return StallRow(**{**{name: getattr(row, name) for name in StallRow.__slots__}, **changes})


@pytest.mark.parametrize("width", [MIN_WIDTH, 80, 100, 160])
@pytest.mark.parametrize("cause", ["prefill_coscheduled", "client_backpressure", "unknown"])
def test_nothing_is_cut_at_any_width(cause: str, width: int) -> None:
    stalls = [stall(0, cause), stall(1, "kv_landing", lift=None)]
    lines = [line.plain for line in stall_lines(ROW, stalls, width)]
    assert max(map(len, lines)) <= width
    assert "…" not in "".join(lines)
    whole = " ".join(" ".join(lines).split())
    assert "40.1 times as often as without a stall, by chance in 1 %" in whole
    assert "measured, no inference" in whole
    assert whole.count(SAID) == 2
    assert "D was busy with the KV load of another request" in whole
    assert not any(line != line.rstrip() for line in lines)


def test_a_stream_that_never_stood_still_has_no_section() -> None:
    assert list(stall_lines(ROW, [], 80)) == []
