"""Counters that wrap: exact where the line rate allows it, else restarted."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from handrail_sidecar.gpu.monotonic import Growth, Standing

MS = 1_000_000
GEN5 = 63e9
TURN_MS = (1 << 32) / GEN5 * 1000  # 68


def followed(readings: list[tuple[int, int]], line: float = GEN5, **kind: int) -> Growth:
    growth = Growth(**kind)
    for at, raw in readings:
        growth.follow(raw, at, at, at, line)
    return growth


@given(
    st.integers(0, (1 << 32) - 1),
    st.lists(st.tuples(st.integers(1, int(TURN_MS) - 1), st.floats(0, 1)), min_size=1, max_size=60),
    st.sampled_from([0, 32]),
)
def test_growth_is_exact_over_wraps_while_the_link_cannot_have_carried_a_whole_turn(
    start: int, steps: list[tuple[int, float]], bits: int
) -> None:
    true, at = start, MS
    readings = [(at, true % (1 << 32))]
    for gap_ms, share in steps:
        at += gap_ms * MS
        true += int(GEN5 * gap_ms / 1000 * share)
        readings.append((at, true % (1 << 32)))
    growth = followed(readings, bits=bits)
    assert (growth.total, growth.lost) == (true - start, 0)


def test_a_gap_in_which_it_may_have_turned_unseen_begins_anew() -> None:
    growth = followed([(MS, 100), (MS + 30 * MS, 5_000), (MS + 130 * MS, 9_000)])
    assert (growth.total, growth.since_unix_ns, growth.lost) == (0, MS + 130 * MS, 1)


def test_it_is_read_before_it_can_turn() -> None:
    growth = followed([(MS, 100)])
    due = growth.due_within_ns(GEN5)
    assert due is not None
    assert 45 * MS < due < TURN_MS * MS
    assert growth.due_within_ns(31.5e9) > 100 * MS  # type: ignore[operator]  # PCIe 4: once a tick will do


def test_a_counter_that_has_shown_more_than_32_bits_needs_no_haste_and_survives_gaps() -> None:
    growth = followed([(MS, 1 << 33), (10_000 * MS, (1 << 33) + 5 * 10**11)])
    assert (growth.total, growth.due_within_ns(GEN5)) == (5 * 10**11, None)


def test_a_smaller_reading_that_no_wrap_explains_is_a_restart() -> None:
    growth = followed([(MS, 1 << 40), (101 * MS, (1 << 40) + 7), (201 * MS, 12)])
    assert (growth.total, growth.since_unix_ns, growth.lost) == (0, 201 * MS, 1)
    growth.follow(20, 301 * MS, 301 * MS, 301 * MS, GEN5)
    assert growth.total == 8


def test_64_bits_wrap_too() -> None:
    growth = followed([(MS, (1 << 64) - 10), (101 * MS, 30)])
    assert growth.total == 40


def test_growth_that_no_link_could_have_is_not_taken() -> None:
    growth = followed([(MS, 1 << 33), (101 * MS, 1 << 62)])
    assert (growth.total, growth.lost) == (0, 1)


def test_units_are_bytes() -> None:
    assert followed([(MS, 5), (101 * MS, 9)], unit_bytes=1024).total == 4096


def test_a_slow_read_counts_as_late_as_it_may_have_been_made() -> None:
    growth = Growth()
    growth.follow(100, MS, MS, 1, GEN5)
    growth.follow(200, 40 * MS, 90 * MS, 2, GEN5)  # the call took 50 ms: the counter may have wrapped
    assert growth.lost == 1


def test_a_counter_that_stays_is_reported_unchanged_and_notes_a_restart() -> None:
    standing = Standing()
    for at, raw in ((1, 7), (2, 9), (3, 2)):
        standing.follow(raw, at)
    assert (standing.total, standing.since_unix_ns, standing.lost) == (2, 3, 1)


def test_an_answer_that_arrives_after_a_later_one_changes_nothing() -> None:
    growth = Growth()
    for raw, began_ns in ((100, 10), (300, 30), (200, 20), (400, 40)):
        growth.follow(raw, began_ns, began_ns + 1, began_ns, 1e12)
    assert (growth.total, growth.lost) == (300, 0)
