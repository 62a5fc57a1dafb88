"""Clock offsets as intervals that only evidence narrows."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from handrail.clock_offset import DRIFT_PPM, OffsetInterval, contains


@given(
    st.integers(-(10**10), 10**10),
    st.lists(st.tuples(*[st.integers(0, 10**9)] * 4), min_size=1, max_size=8),
)
def test_the_true_offset_is_always_inside(offset: int, calls: list[tuple[int, int, int, int]]) -> None:
    known = None
    for start, there, work, back in calls:
        sent, received = start, start + there + offset
        responded, answered = received + work, start + there + work + back
        seen = OffsetInterval(responded - answered, received - sent, answered)
        assert contains((sent, answered), (received, responded), seen)
        known = seen if known is None else known.narrowed(seen)
        assert not known.contradictory
        assert known.low_ns is not None
        assert known.high_ns is not None
        assert known.low_ns <= offset <= known.high_ns


def test_knowledge_ages_with_drift() -> None:
    aged = OffsetInterval(-1000, 1000, 0).aged(10**9)
    assert aged == OffsetInterval(-1000 - 1000 * DRIFT_PPM, 1000 + 1000 * DRIFT_PPM, 10**9)
    assert OffsetInterval(None, 5, 0).width_ns is None


def test_a_stepped_clock_contradicts() -> None:
    assert OffsetInterval(0, 10, 0).narrowed(OffsetInterval(10**9, 2 * 10**9, 1)).contradictory


def test_containment_needs_one_offset_for_both_ends() -> None:
    assert contains((0, 100), (10, 90), None)
    assert not contains((0, 100), (-1, 90), None)
    unknown = OffsetInterval(None, None, 0)
    assert contains((0, 100), (5000, 5090), unknown)
    assert not contains((0, 100), (5000, 5101), unknown)  # longer than its container, whatever the clocks show
    assert not contains((0, 100), (5000, 5090), OffsetInterval(0, 10, 0))
