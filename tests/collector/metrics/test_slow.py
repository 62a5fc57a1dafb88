"""The slow requests are one in a hundred, by those just before them."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from handrail_collector.metrics.slow_requests import LEAST, MOST_WINDOWS, SHARE, WINDOW, SlowRequests


def test_one_in_a_hundred_is_slow_whatever_the_model_serves() -> None:
    rng = random.Random(3)
    slow = SlowRequests()
    times = [round(rng.lognormvariate(19, 0.7)) for _ in range(20_000)]
    share = sum(slow.slow("m", "edge", each) for each in times) / len(times)
    assert 0.008 < share < 0.012


def test_few_requests_have_no_slow_ones() -> None:
    slow = SlowRequests()
    assert not any(slow.slow("m", "edge", n) for n in range(LEAST))
    assert slow.slow("m", "edge", 10**9)


def test_models_and_scopes_are_not_mixed() -> None:
    slow = SlowRequests()
    for _ in range(LEAST):
        slow.slow("fast", "edge", 1)
        slow.slow("long", "edge", 100)
        slow.slow("fast", "decode", 0)
    assert [slow.slow("fast", "edge", 50), slow.slow("long", "edge", 50), slow.slow("fast", "decode", 1)] == [True, False, True]


def test_what_became_usual_is_slow_no_more() -> None:
    slow = SlowRequests()
    for _ in range(WINDOW):
        slow.slow("m", "edge", 10)
    assert slow.slow("m", "edge", 20)
    for n in range(WINDOW):
        slow.slow("m", "edge", 20 + n % 7)
    assert not slow.slow("m", "edge", 21)


def test_the_windows_are_bounded() -> None:
    slow = SlowRequests()
    for n in range(MOST_WINDOWS + 50):
        slow.slow(f"m{n}", "edge", n)
    assert len(slow._windows) == MOST_WINDOWS


@given(st.lists(st.integers(0, 50), min_size=LEAST, max_size=3 * LEAST))
def test_it_is_the_percentile_of_exactly_those_before(times: list[int]) -> None:
    slow = SlowRequests()
    reports = [slow.slow("m", "edge", each) for each in times]
    for at, each in enumerate(times):
        before = sorted(times[max(0, at - WINDOW) : at])
        assert reports[at] is (len(before) >= LEAST and each >= before[int(SHARE * len(before))])
