"""Phase sums that are exact whatever the parts are."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from handrail.phases import Phase, PhaseTime, Place, close_sum, path_order, total

REST = PhaseTime(Phase.UNATTRIBUTED, 0, Place.PREFILL, "proxy")


@given(st.lists(st.integers(-(10**6), 10**12), max_size=6), st.integers(0, 10**12))
def test_the_sum_is_exact_and_nothing_is_negative(parts: list[int], whole: int) -> None:
    known = [PhaseTime(Phase.PREFILL_QUEUE, ns, Place.PREFILL, "otlp") for ns in parts]
    closed = close_sum(known, whole, REST)
    if known or whole:
        assert total(closed) == (whole if any(p >= 0 for p in parts) or whole else 0)
    assert all(p.duration_ns >= 0 for p in closed)


def test_what_is_missing_is_unattributed() -> None:
    closed = close_sum([PhaseTime(Phase.PREFILL_QUEUE, 30, Place.PREFILL, "otlp")], 100, REST)
    assert [(p.phase, p.duration_ns) for p in closed] == [(Phase.PREFILL_QUEUE, 30), (Phase.UNATTRIBUTED, 70)]


def test_an_excess_shortens_the_largest_and_says_so() -> None:
    parts = [
        PhaseTime(Phase.PREFILL_QUEUE, 5, Place.PREFILL, "otlp"),
        PhaseTime(Phase.PREFILL_COMPUTE, 98, Place.PREFILL, "otlp", 1),
    ]
    closed = close_sum(parts, 100, REST)
    assert [(p.duration_ns, p.bound_ns) for p in closed] == [(5, 0), (95, 4)]


def test_path_order() -> None:
    shuffled = [
        PhaseTime(Phase.FIRST_STEP, 1, Place.DECODE, ""),
        PhaseTime(Phase.ROUTER_AND_HOPS, 1, Place.PATH, ""),
        PhaseTime(Phase.UNATTRIBUTED, 1, Place.PREFILL, ""),
        PhaseTime(Phase.PREFILL_QUEUE, 1, Place.PREFILL, ""),
    ]
    assert [p.phase.value for p in path_order(shuffled)] == ["prefill_queue", "unattributed", "router_and_hops", "first_step"]
