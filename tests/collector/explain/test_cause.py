"""Causes of slow requests, on made periods.

The hosts are p0, p1, d0 and d1. A request arrives every 100 ms.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from builders.period import Change, period, slower, usual
from builders.request_rows import KV_AND_QUEUE, MS
from handrail.phases import Phase
from handrail_collector.explain.period.attribution import cause_of, causes
from handrail_collector.explain.period.baseline import LEAST_REQUESTS, Baseline, fit
from handrail_collector.explain.period.request_columns import PHASES, requests_of
from handrail_collector.rows import PhaseRow, RequestRow


def typical_of(rows: Sequence[RequestRow]) -> Baseline:
    typical = fit(requests_of(rows))
    assert typical is not None
    return typical


FAULTS: dict[str, tuple[Change, Phase, str]] = {
    "compute": (lambda row: {"prefill_compute": 200} if row.prefill_host == "p1" else {}, Phase.PREFILL_COMPUTE, "p1"),
    "queue": (lambda row: {"prefill_queue": 200} if row.prefill_host == "p0" else {}, Phase.PREFILL_QUEUE, "p0"),
    "router": (lambda row: {"router_and_hops": 150}, Phase.ROUTER_AND_HOPS, "router"),
    "first step": (lambda row: {"first_step": 90} if row.decode_host == "d0" else {}, Phase.FIRST_STEP, "d0"),
    "decode host": (lambda row: {"unattributed": 300} if row.decode_host == "d1" else {}, Phase.UNATTRIBUTED, "d1"),
    "link": (
        lambda row: {"unattributed": 300} if (row.prefill_host, row.decode_host) == ("p0", "d1") else {},
        Phase.UNATTRIBUTED,
        "p0>d1",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_the_phase_and_its_place_are_named(name: str) -> None:
    change, expected, place = FAULTS[name]
    rows, touched = period(change)
    typical = typical_of(rows)
    found = [cause_of(rows[number], typical) for number in touched]
    assert {(cause.phase, cause.place) for cause in found} == {(expected, place)}
    assert all(cause.slow and cause.significant for cause in found)
    assert all(80 * MS < cause.excess_ns < 310 * MS for cause in found)
    assert {cause.may_be for cause in found} == {tuple(map(Phase, KV_AND_QUEUE)) if expected is Phase.UNATTRIBUTED else ()}


def test_a_healthy_period_has_nothing_that_stands_out() -> None:
    rows, _ = period()
    found = causes(requests_of(rows), typical_of(rows))
    assert not found.significant.any()
    assert not found.slow.any()


def test_two_that_grew_alike_leave_it_open_and_the_host_known() -> None:
    """Both phases grew by 900 ms.

    At any time either of them took between 0 and 100 ms more.
    """
    random = Random(3)
    rows, _ = period()
    touched = [number for number in range(400, 800) if rows[number].prefill_host == "p0"]
    more = [(random.uniform(0, 100), random.uniform(0, 100)) for _ in rows]
    for number in touched:
        more[number] = 950, 950
    rows = [
        slower(row, prefill_queue=queue - row.phases[0].duration_ns / MS, prefill_compute=compute)
        for row, (queue, compute) in zip(rows, more, strict=True)
    ]
    typical = typical_of(rows)
    found = [cause_of(rows[number], typical) for number in touched]
    left_open = [cause for cause in found if cause.phase is None]
    assert len(left_open) >= 5  # in the others one is a little more likely than the other
    assert {cause.place for cause in found} == {"p0"}
    assert {frozenset(cause.ambiguous) for cause in left_open} == {frozenset({Phase.PREFILL_QUEUE, Phase.PREFILL_COMPUTE})}


def test_two_at_different_hosts_that_grew_alike_have_no_place() -> None:
    rows, touched = period(lambda row: {"prefill_compute": 200, "first_step": 200})
    typical = typical_of(rows)
    found = [cause_of(rows[number], typical) for number in touched]
    assert {cause.place for cause in found if cause.phase is None} == {""}
    assert {cause.place for cause in found if cause.phase is Phase.FIRST_STEP} <= {"d0", "d1"}


def test_what_is_ordinary_there_is_not_the_cause() -> None:
    """A phase that is often long is not the cause.

    A quarter of all requests have a queue of 40 ms. Only the requests in question take 35 ms more at D.
    """
    rows, touched = period(lambda row: {"first_step": 35} if row.decode_host == "d0" else {})
    typical = typical_of(rows)
    queued = [rows[number] for number in touched if rows[number].phases[0].duration_ns == 40 * MS]
    assert len(queued) > 20
    named = Counter(cause_of(row, typical).phase for row in queued)
    assert named.keys() <= {Phase.FIRST_STEP, None}  # None: where the queue happened to be more frequent than elsewhere
    assert named[Phase.FIRST_STEP] > 0.7 * len(queued)


def test_a_long_prompt_is_not_slow_for_being_long() -> None:
    rows, _ = period()
    longest = max(rows, key=lambda row: row.prompt_tokens or 0)
    twice = replace(slower(longest, prefill_compute=(longest.prompt_tokens or 0) * 0.05), prompt_tokens=2 * longest.prompt_tokens)  # type: ignore[operator]
    assert not cause_of(twice, typical_of(rows)).slow


def test_what_was_found_in_the_cache_is_not_expected_to_take_time() -> None:
    rows, _ = period()
    row = rows[29]
    assert row.prompt_tokens == 3400
    cached = replace(slower(row, prefill_compute=-140), cached_tokens=2900)  # 500 tokens to compute, in the time of 600
    typical = typical_of(rows)
    late_ns = cause_of(cached, typical).late_ns
    assert late_ns is not None
    assert abs(late_ns) < 60 * MS


@pytest.mark.parametrize("requests", [0, 1, LEAST_REQUESTS - 1])
def test_too_few_have_nothing_typical(requests: int) -> None:
    assert fit(requests_of(period(requests=1200)[0][:requests])) is None


def test_requests_without_a_first_token_are_neither_learned_from_nor_named() -> None:
    rows, _ = period()
    failed = [replace(row, ttft_token_ns=None, phases=()) for row in rows[:600]]
    typical = typical_of(failed + rows[600:])
    cause = cause_of(failed[0], typical)
    assert (cause.phase, cause.late_ns, cause.slow, cause.place) == (None, None, False, "")


def test_a_place_that_was_not_there_when_it_was_learned_is_named_all_the_same() -> None:
    rows, _ = period()
    new = replace(slower(rows[5], prefill_compute=400), prefill_host="p9", decode_host="d9")
    cause = cause_of(new, typical_of(rows))
    assert (cause.phase, cause.place, cause.significant) == (Phase.PREFILL_COMPUTE, "p9", False)


def test_prompts_that_are_all_alike_make_one_band() -> None:
    rows = [replace(row, prompt_tokens=1000) for row in period()[0]]
    typical = typical_of(rows)
    assert len(typical.tokens) == 1
    assert causes(requests_of(rows), typical).late_ns.shape == (1200,)


durations = st.integers(0, 2_000_000_000)
odd_rows = st.builds(
    lambda phases, prompt, cached, ttft, p, d: replace(
        usual(0, Random(0)),
        phases=tuple(PhaseRow(phase=name, duration_ns=ns, process="decode", source="otlp", bound_ns=0) for name, ns in phases),
        prompt_tokens=prompt,
        cached_tokens=cached,
        ttft_token_ns=ttft,
        prefill_host=p,
        decode_host=d,
    ),
    st.lists(st.tuples(st.sampled_from([phase.value for phase in PHASES]), durations), max_size=6),
    st.none() | st.integers(1, 200_000),
    st.none() | st.integers(0, 1000),
    st.none() | durations,
    st.sampled_from([None, "p0", "p1", "x"]),
    st.sampled_from([None, "d0", "p0", "x"]),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(odd_rows, min_size=1, max_size=8))
def test_odd_rows_are_answered_and_alone_as_among_others(rows: list[RequestRow]) -> None:
    typical = TYPICAL
    together = causes(requests_of(rows), typical)
    for index, row in enumerate(rows):
        alone = cause_of(row, typical)
        phase = PHASES[together.leading[index]] if together.clear[index] else None
        assert (alone.phase, alone.place, alone.slow) == (phase, together.place[index], bool(together.slow[index]))
    assert fit(requests_of(rows * LEAST_REQUESTS)) is None or np.isfinite(together.excess_ns).all()


TYPICAL = typical_of(period(requests=200)[0])


def test_a_burst_like_others_does_not_hide_what_stands_out() -> None:
    """A longer queue happens now and then anywhere.

    Beside it a first step grew, only at that place and at that time.
    """
    rows, touched = period(FAULTS["first step"][0])
    bursts = set(range(0, len(rows), 37))
    rows = [slower(row, prefill_queue=200) if number in bursts else row for number, row in enumerate(rows)]
    typical = typical_of(rows)
    both = [cause_of(rows[number], typical) for number in touched if number in bursts]
    assert len(both) >= 3
    assert {cause.phase for cause in both} == {Phase.FIRST_STEP}
    alone = [cause_of(rows[number], typical) for number in touched if number not in bursts]
    assert {cause.phase for cause in alone} == {Phase.FIRST_STEP}


def test_luck_in_one_phase_does_not_hide_what_grew_in_another() -> None:
    def fault(row: RequestRow) -> dict[str, float]:
        return {"prefill_compute": 200} if row.prefill_host == "p1" else {}

    rows, touched = period(fault)
    rows = [slower(row, router_and_hops=300) if number not in touched else row for number, row in enumerate(rows)]
    typical = typical_of(rows)
    found = [cause_of(rows[number], typical) for number in touched]
    assert all(cause.late_ns is not None and cause.late_ns < 0 for cause in found)
    assert {(cause.phase, cause.place) for cause in found} == {(Phase.PREFILL_COMPUTE, "p1")}
    assert not any(cause.slow or cause.significant for cause in found)


def test_large_growths_stand_out_where_small_ones_are_common() -> None:
    random = Random(7)
    rows, touched = period(lambda row: {"prefill_queue": 1000} if row.prefill_host == "p0" else {})
    rows = [slower(row, prefill_queue=100) if random.random() < 0.45 else row for row in rows]
    found = causes(requests_of(rows), typical_of(rows))
    assert found.significant[touched].mean() > 0.9
    assert not found.significant[[number for number in range(len(rows)) if number not in touched]].any()
