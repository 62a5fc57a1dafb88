"""How long KV lay before its read, across two hosts' clocks.

The clocks are an hour apart and drift. The truth lies within the bounds.
"""

from __future__ import annotations

from typing import Any

import pytest

from builders.plugin import altered, fetch, publish
from builders.records import EPOCH, MS, split_request
from builders.stitched import stitched
from handrail_collector.stitch.stitcher import SECOND


def shown(record: Any, field: str, offset_s: float, ppm: float) -> Any:
    """Return ``record`` as stamped by a clock that is ahead and runs too fast.

    The clock is that far ahead at ``EPOCH``. The record is too short for its own duration to show the drift.
    """
    true_ns = getattr(record, field) - EPOCH
    return altered(record, **{field: EPOCH + true_ns + round(offset_s * SECOND + true_ns * ppm / 1e6)})


@pytest.mark.parametrize("offset_s", [-3600, 0, 3600])
@pytest.mark.parametrize("ppm", [-50, 50])
def test_the_time_that_kv_lay_is_bounded_on_the_right_clock(offset_s: float, ppm: float) -> None:
    """Each request's KV is kept at 105 ms and read from 134 + 11 ms on.

    Hosts answer within 20 ms; the bounds are that wide.
    """
    records: list[Any] = []
    for number in range(60):
        rid, at_ms = f"req-{number}", 1000.0 * number
        seen: dict[str, Any] = dict(split_request(rid, f"t{number}", at_ms, host_p="hp"))
        kept = publish(at_ms + 105, rid=f"cmpl-{rid}-0-0000aaaa", trace=f"t{number}", parent=seen["p"], host="hp", read_ms=104)
        load = fetch(
            at_ms + 134,
            rid=f"cmpl-{rid}-0-0000dddd",
            peer=f"cmpl-{rid}-0-0000aaaa",
            trace=f"t{number}",
            parent=seen["d"],
            host="hd",
        )
        d, load = (
            shown(altered(one, process=altered(one.process, host="hd")), field, offset_s, ppm)
            for one, field in ((seen["d"], "arrival_unix_ns"), (load, "known_unix_ns"))
        )
        records += [seen["edge"], seen["p"], d, kept, load]
    last = next(one for one in stitched(records).fetches if one.client_request_id == "req-59")
    assert last.held_ns is not None
    assert last.clock_bound_ns is not None
    assert last.held_ns <= 40 * MS + 100 <= last.held_ns + last.clock_bound_ns + 200
    assert last.clock_bound_ns <= 40 * MS
