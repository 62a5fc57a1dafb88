"""Clock bounds in a virtual fleet whose hosts are seconds apart and drift.

The bounds use only the evidence that sidecars really have.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from builders.clock_fleet import fly, known_offsets, right, widths
from handrail_collector.stitch.stitcher import SECOND
from handrail_sim.emulator import scenario as scenarios

US = 1_000
SPLIT = scenarios.load("split")
TRACED = replace(SPLIT, router_traces=True)


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 1 << 32),
    hop_ns=st.integers(1 * US, 30_000 * US),
    spread_ns=st.sampled_from([0, 50 * US, 2000 * US]),
    every_s=st.sampled_from([0.1, 1.0, 20.0]),
    traced=st.booleans(),
    plugin=st.booleans(),
)
def test_the_truth_lies_within_whatever_messages_take(
    seed: int, hop_ns: int, spread_ns: int, every_s: float, traced: bool, plugin: bool
) -> None:
    scenario = replace(SPLIT, hop_ns=hop_ns, hop_spread_ns=spread_ns, arrivals_per_s=1 / every_s, router_traces=traced)
    fleet = fly(scenario, seed, 60, plugin=plugin)
    step = max(1, round(60 * every_s) // 50)
    for now, known in known_offsets(fleet):
        if now // SECOND % step:
            continue
        for a, b in permutations(fleet.shows, 2):
            for ago_ns in (0, 10 * SECOND):
                interval = known.between(a, b, fleet.shows[a].unix_ns(max(0, now - ago_ns)))
                assert interval is not None
                assert not interval.contradictory
                assert right(fleet, (a, b), interval)


def test_a_router_that_tells_its_spans_is_bounded_too() -> None:
    for _, known in known_offsets(fly(TRACED, 1, 100, plugin=False)):
        last = known
    for host in ("edge", "p0", "p1", "d0", "d1"):
        pair = last.intervals()[min(host, "router"), max(host, "router")]
        assert pair.width_ns is not None
        assert pair.width_ns < 1_000 * US


FAR = {"hop_ns": 20_000 * US, "hop_spread_ns": 500 * US}


WIDTHS: dict[str, tuple[dict[str, int], bool, float, float, float]] = {
    "steady-plugin": ({}, True, 1.08, 1.03, 1.0),
    "steady": ({}, False, 1.08, 1.03, 1.0),
    "far-plugin": (FAR, True, 1.05, 1.02, 0.8),
    "far": (FAR, False, 1.05, 1.02, 0.8),
    "a-quarter-more-plugin": ({"hop_spread_ns": 50 * US}, True, 1.35, 1.12, 1.15),
    "a-quarter-more": ({"hop_spread_ns": 50 * US}, False, 1.35, 1.12, 1.15),
    "more-than-twice-plugin": ({"hop_spread_ns": 300 * US}, True, 2.0, 1.35, 1.6),
    "more-than-twice": ({"hop_spread_ns": 300 * US}, False, 2.0, 1.35, 1.6),
}
IN_SHORT = {("steady-plugin", 0), ("more-than-twice", 0)}
"""What every run checks; the others are for the eval runs."""


@pytest.mark.parametrize(
    ("changed", "plugin", "most", "usual", "of_twice", "seed"),
    [
        pytest.param(*case, seed, id=f"{name}-{seed}", marks=() if (name, seed) in IN_SHORT else pytest.mark.eval)
        for name, case in WIDTHS.items()
        for seed in range(3)
    ],
)
def test_the_width_is_little_more_than_the_quickest_round_trip(
    changed: dict[str, int], plugin: bool, most: float, usual: float, of_twice: float, seed: int
) -> None:
    """The width is little more than the quickest round trip.

    That is the quickest way there and the quickest way back together.
    Nothing narrower than both ways together always holds the truth. ``of_twice``: the width compared with twice the slower of
    the two ways.
    The fleet has about a request a second. In the first minutes the clocks' rates are not known yet.
    """
    fleet = fly(replace(SPLIT, **changed), seed, 720, plugin=plugin)  # type: ignore[arg-type]
    found = widths(fleet, from_ns=150 * SECOND)
    assert {each.pair for each in found} == {
        *((d, "edge") for d in ("d0", "d1")),
        *(("edge", p) for p in ("p0", "p1")),
        *((d, p) for d in ("d0", "d1") for p in ("p0", "p1")),
    }
    assert min(each.of_both for each in found) >= 1
    assert max(each.of_both for each in found) <= most
    assert median(each.of_both for each in found) <= usual
    assert max(each.of_twice for each in found) <= of_twice
