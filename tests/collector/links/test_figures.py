"""A link's rate: bytes over the union of its transfers.

The bound is what the poll interval leaves open.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from builders.links import BEGAN, MS, P0_D0, S, fetch_row, hand_off
from handrail_collector.links.handoffs import EngineLink, HandOff, Piece
from handrail_collector.links.handoffs import hand_offs as of_rows
from handrail_collector.links.throughput import by_link, figures, times, union_ns
from handrail_collector.rows import FetchRow

REPLAY = Path(__file__).parents[2] / "data/replay"


def test_one_transfer() -> None:
    found = figures([hand_off(0.0, 1.3)])
    assert found.rate == pytest.approx(470e6 / 1.3)
    assert (found.hand_offs, found.timed, found.moved_bytes, found.busy_ns) == (1, 1, 470_000_000, 1_300_000_000)


def test_transfers_that_overlap_share_their_time() -> None:
    """Two transfers run side by side for two seconds.

    The link moved 470 MB a second, and each transfer half of it.
    """
    found = figures([hand_off(0.0, 2.0), hand_off(0.0, 2.0)])
    assert found.rate == pytest.approx(470e6)
    assert found.transfer is not None
    assert found.transfer.p50_ns == 2 * S


def test_time_between_transfers_is_not_theirs() -> None:
    found = figures([hand_off(0.0, 1.0), hand_off(100.0, 1.0)])
    assert found.rate == pytest.approx(470e6)


def test_what_a_poll_leaves_open_is_reported() -> None:
    """The poll that sees the end comes at 100 ms, 60 ms after the one before.

    So the transfer ended between 40 and 100 ms.
    """
    found = figures([hand_off(0.0, 0.1, 100_000_000, bound_s=0.06)])
    assert found.rate_low == pytest.approx(1e9)
    assert found.rate_high == pytest.approx(2.5e9)
    assert found.rate == pytest.approx(10 / 7 * 1e9)


def test_a_poll_as_long_as_the_transfer_gives_no_upper_bound() -> None:
    found = figures([hand_off(0.0, 0.1, 100_000_000, bound_s=0.1)])
    assert found.rate_low == pytest.approx(1e9)
    assert (found.rate_high, found.rate) == (None, None)


def test_B19_the_wire_rate_and_the_effective_rate_are_two_figures() -> None:
    """The wire rate and the effective rate differ for four chunks of one hand-off.

    They move at 40 GB/s each, and at 3.08 GB/s from the first to the last. No figure is 160 or 0.2.
    """
    case = json.loads((REPLAY / "join/B19_chunked_transfer.json").read_text())
    pieces = tuple(Piece(BEGAN + round(c["start_s"] * S), BEGAN + round(c["end_s"] * S), c["bytes"]) for c in case["chunks"])
    request = round((case["request_completion_s"] - case["queue_entry_s"]) * S)
    found = figures([HandOff(link=P0_D0, started_unix_ns=BEGAN, pieces=pieces, outcome="ok", taken_ns=request)])
    assert found.rate is not None
    assert found.effective_rate is not None
    assert found.rate / 1e9 == pytest.approx(case["expected"]["busy_gb_s"], rel=1e-6)
    assert found.effective_rate / 1e9 == pytest.approx(case["expected"]["effective_gb_s"], rel=1e-3)


def test_B19_an_abort_without_an_end_gives_no_time_and_no_rate() -> None:
    row = FetchRow(
        started_unix_ns=BEGAN,
        trace_id="1" * 32,
        request_id="2" * 16,
        version=1,
        number=0,
        span_id="3" * 16,
        consumer_instance="d0:8000",
        producer_instance="p0:8000",
        outcome="aborted",
        posted_ns=5 * MS,
        bytes_expected=10**9,
    )
    found = figures(of_rows([row]))
    assert (found.hand_offs, found.timed, found.moved_bytes) == (1, 0, 0)
    assert (found.rate_low, found.rate_high, found.effective_rate, found.transfer) == (None, None, None, None)


def test_B02_470_MB_in_1_3_s() -> None:
    case = json.loads((REPLAY / "join/B02_l40s_no_p2p.json").read_text())
    run = [hand_off(4.0 * n, case["handoff_s"], case["bytes"]) for n in range(case["n"])]
    found = figures(run)
    assert found.rate is not None
    assert found.rate / 1e9 == pytest.approx(case["expected"]["bandwidth_gb_s"], abs=1e-4)


def test_B08_a_cold_start_is_listed_apart_and_in_no_percentile() -> None:
    run = [hand_off(0.0, 38.1, handshake_ns=38 * S), *(hand_off(40.0 + n, 0.06) for n in range(49))]
    found = figures(run)
    assert found.cold_ns == (38_100_000_000,)
    assert found.whole is not None
    assert (found.whole.count, found.whole.p99_ns) == (49, 60_000_000)
    assert found.rate == pytest.approx(470e6 / 0.06)


def test_B08_without_handshake_times_only_the_very_first_can_be_one() -> None:
    slow = hand_off(0.0, 38.1, handshake_ns=None)
    rest = [hand_off(40.0 + n, 0.06, handshake_ns=None) for n in range(20)]
    assert figures([slow, *rest]).cold_ns == (38_100_000_000,)
    assert figures([rest[0], slow, *rest[1:]]).cold_ns == ()


def test_B08_one_whose_peer_was_known_is_no_cold_start() -> None:
    run = [hand_off(0.0, 38.1, handshake_ns=0), *(hand_off(40.0 + n, 0.06) for n in range(20))]
    assert figures(run).cold_ns == ()


def test_B08_ends_at_300_s_are_a_time_limit() -> None:
    run = [hand_off(n, 300.0 + (n % 3 - 1) * 0.4, outcome="timed_out", moved=False) for n in range(12)]
    found = figures(run)
    assert (found.stuck, found.stuck_at_ns) == (12, 300 * S)


def test_B08_failures_of_all_lengths_are_no_time_limit() -> None:
    run = [hand_off(n, 2.0 + 7.0 * n, outcome="failed", moved=False) for n in range(12)]
    assert figures(run).stuck_at_ns is None


def test_a_failed_one_counts_and_moves_nothing_it_does_not_know_of() -> None:
    found = figures([hand_off(0.0, 0.1), hand_off(1.0, 5.0, outcome="failed", moved=False)])
    assert (found.hand_offs, found.failed, found.timed) == (2, 1, 1)
    assert found.whole is not None
    assert found.whole.max_ns == 100 * MS


def test_rows_of_the_store_become_hand_offs() -> None:
    (one,) = of_rows([fetch_row(1)])
    begin = BEGAN + S + 20 * MS
    assert one.link == EngineLink("p0:8000", "d0:8000", "p0", "d0")
    assert one.pieces == (Piece(begin, begin + 30 * MS, 10**8, 5 * MS),)
    assert one.counted


def test_bytes_that_were_not_counted_are_derived_from_the_blocks_and_marked_so() -> None:
    found = figures(of_rows([fetch_row(1, bytes_moved=None, bytes_expected=5 * 10**7)]))
    assert (found.moved_bytes, found.counted) == (5 * 10**7, False)


def test_what_is_open_or_withdrawn_moves_nothing() -> None:
    found = of_rows([fetch_row(1, open=True, outcome="unknown", bytes_moved=None, bytes_expected=10), fetch_row(2, number=-1)])
    assert [one.pieces for one in found] == [()]


def test_a_keeper_that_gave_no_evidence_is_named_by_its_side_channel() -> None:
    (one,) = of_rows([fetch_row(1, producer_instance=None, producer_host=None, producer_address="10.0.0.4:5600")])
    assert (one.link.producer, one.link.hosts) == ("10.0.0.4:5600", "")


def test_each_pair_and_direction_is_a_link() -> None:
    rows = [
        fetch_row(1),
        fetch_row(2, producer_instance="p1:8000"),
        fetch_row(3, direction="d_to_p", producer_instance="d0:8000", consumer_instance="p0:8000"),
    ]
    assert list(by_link(of_rows(rows))) == [
        ("p0:8000", "d0:8000", False),
        ("p1:8000", "d0:8000", False),
        ("d0:8000", "p0:8000", True),
    ]


INTERVALS = st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 1000)), max_size=30)


@settings(max_examples=200, deadline=None)
@given(INTERVALS)
def test_the_union_is_the_number_of_instants_that_are_covered(intervals: list[tuple[int, int]]) -> None:
    covered = {at for begin, end in intervals for at in range(begin, end)}
    assert union_ns(intervals) == len(covered)


def test_percentiles_by_nearest_rank() -> None:
    found = times(range(1, 101))
    assert found is not None
    assert (found.p50_ns, found.p99_ns, found.max_ns, found.count) == (50, 99, 100, 100)
    assert times([]) is None
