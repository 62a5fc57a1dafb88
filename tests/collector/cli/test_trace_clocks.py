"""Clock bounds in output: a note on a trace's hand-off, a gauge of the collector."""

from __future__ import annotations

from typing import Any

import pytest

from builders.plugin import fetch, publish
from builders.records import EPOCH, MS, split_request
from builders.stitched import stitched
from handrail.conventions import METRIC_CLOCK_BOUND
from handrail_cli.render.kv_fetches import handoff_lines
from handrail_collector.metrics.request_metrics import CLOCK_PAIRS, clock_bounds
from handrail_collector.stitch.clocks import HostClocks


def note(host_d: str, **of_load: Any) -> str:
    """Return every line of the trace about the hand-off of a request."""
    seen = split_request(host_p="hp", host_d=host_d)
    kept = publish(105, parent=seen["p"], host="hp", read_ms=104)
    load = fetch(134, parent=seen["d"], **{"host": host_d} | of_load)
    (one,) = stitched([*seen.values(), kept, load]).fetches
    return " ".join(line.plain.strip() for line in handoff_lines([one], 100))


def test_a_hand_off_between_hosts_says_how_well_their_clocks_are_known() -> None:
    """P's answer takes at most 20 ms to reach D.

    D's message about its read reaches P 5 ms after D's own end of the read.
    """
    assert (
        "the clock offset of the two hosts is known within ±25.0 ms; only the time for which P kept the KV depends on it"
        in note("hd")
    )


def test_on_one_host_or_with_clocks_that_nothing_relates_there_is_no_such_note() -> None:
    assert "clocks" not in note("hp")
    assert "clocks" not in note("hd", posted_ms=None, done_ms=None)


def test_the_gauge_has_the_widest_pairs_in_seconds() -> None:
    known = HostClocks()
    for number in range(CLOCK_PAIRS + 10):
        there, back = EPOCH + number * MS, EPOCH + 2 * number * MS
        known.before(("edge", EPOCH), (f"d{number:02}", there))
        known.before((f"d{number:02}", back), ("edge", back + MS))
    known.before(("edge", EPOCH), ("nobody-answers", EPOCH))
    statement = clock_bounds(known)
    assert METRIC_CLOCK_BOUND == "handrail_clock_bound_seconds"
    assert len(statement) == CLOCK_PAIRS
    assert next(iter(statement)) == (f"d{CLOCK_PAIRS + 9}", "edge")
    assert statement["d20", "edge"] == pytest.approx(0.021, abs=1e-4)
    assert not any("nobody-answers" in pair for pair in statement)
