"""Clock bounds between hosts, from causes and effects.

The truth always lies in the interval, however the clocks differ and drift.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from random import Random
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from builders.records import EPOCH, exchange
from handrail.clock_offset import DRIFT_PPM
from handrail.records import Outcome, Role
from handrail_collector.stitch import bounds
from handrail_collector.stitch.bounds import MAX_CORNERS, MAX_LATE, WANDER_PPM, WINDOW_NS, OffsetLine
from handrail_collector.stitch.clocks import HostClocks
from handrail_collector.stitch.evidence import evidence_of

US, SECOND = 1_000, 10**9


@dataclass(frozen=True, slots=True)
class Host:
    """A clock that is ``offset_ns`` ahead at the beginning and runs ``ppm`` too fast."""

    name: str
    offset_ns: int
    ppm: float

    def at(self, true_ns: int) -> tuple[str, int]:
        return self.name, EPOCH + true_ns + self.offset_ns + round(true_ns * self.ppm / 1e6)

    def minus(self, other: Host, true_ns: int) -> int:
        return self.at(true_ns)[1] - other.at(true_ns)[1]


_hosts = st.tuples(st.integers(-2 * SECOND, 2 * SECOND), st.floats(-50, 50))
_messages = st.lists(
    st.tuples(st.integers(0, 3600 * SECOND), st.integers(50 * US, 20_000 * US), st.sampled_from(["ab", "ba", "bc", "cb"])),
    min_size=1,
    max_size=60,
)


@settings(max_examples=150, deadline=None)
@given(a=_hosts, b=_hosts, c=_hosts, messages=_messages)
def test_the_true_offset_always_lies_within(
    a: tuple[int, float], b: tuple[int, float], c: tuple[int, float], messages: list[tuple[int, int, str]]
) -> None:
    hosts = {name: Host(name, *clock) for name, clock in zip("abc", (a, b, c), strict=True)}
    clocks = HostClocks()
    for sent, took, way in sorted(messages):
        assert not clocks.before(hosts[way[0]].at(sent), hosts[way[1]].at(sent + took))
        now = sent + took
        for one, two in (("a", "b"), ("b", "a"), ("a", "c"), ("c", "b")):
            known = clocks.between(one, two, hosts[one].at(now)[1])
            assert known is not None
            true = hosts[two].minus(hosts[one], now)
            slack = 2  # stamps are rounded
            assert known.low_ns is None or known.low_ns - slack <= true
            assert known.high_ns is None or true <= known.high_ns + slack


@settings(max_examples=100, deadline=None)
@given(
    rate_ppm=st.floats(-DRIFT_PPM, DRIFT_PPM),
    wobbles=st.lists(st.floats(-WANDER_PPM / 2, WANDER_PPM / 2), min_size=1, max_size=20),
    every_s=st.integers(1, 400),
    seed=st.integers(0, 1 << 32),
)
def test_the_truth_lies_within_while_the_rate_wanders_and_messages_come_late(
    rate_ppm: float, wobbles: list[float], every_s: int, seed: int
) -> None:
    """The truth lies within while rates wander and messages arrive out of order.

    Each wobble lasts as long as the next, so the offset is no line. The test queries it before and after the messages.
    """
    random, line = Random(seed), OffsetLine()

    def offset(at_s: float) -> float:
        whole, rest = divmod(at_s / every_s, 1)
        passed = wobbles[: int(whole)] + [wobble * rest for wobble in wobbles[int(whole) : int(whole) + 1]]
        return (rate_ppm * at_s + sum(passed) * every_s) * 1e3

    times = sorted(random.uniform(0, every_s * len(wobbles)) for _ in range(60))
    for place, at_s in enumerate(times):
        late = random.random() < 0.2
        at_s = times[random.randrange(place + 1)] if late else at_s
        sign = random.choice([1, -1])
        took = 100_000 + random.expovariate(1) * 300_000
        assert line.add(sign, round(at_s * 1e9), round(offset(at_s) + sign * took))
        for ago_s in (-50, 0, 100, 2000):
            query = max(0.0, min(times[place] - ago_s, every_s * len(wobbles)))
            known = line.at(round(query * 1e9))
            assert known.low_ns is None or known.low_ns <= offset(query) + 1
            assert known.high_ns is None or offset(query) <= known.high_ns + 1


@settings(max_examples=150, deadline=None)
@given(
    rate_ppm=st.integers(-90, 90),
    messages=st.lists(st.tuples(st.integers(1, 20), st.sampled_from([1, -1]), st.integers(1, 2000)), min_size=2, max_size=8),
    requested_s=st.integers(0, 200),
)
def test_nothing_that_holds_for_all_courses_is_narrower(
    rate_ppm: int, messages: list[tuple[int, int, int]], requested_s: int
) -> None:
    """No narrower interval holds for all courses of the clocks.

    Rates do not wander here. A search over all lines finds, for every bound, one that no message forbids.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bounds, "_WOBBLE", 0.0)
        patch.setattr(bounds, "ROUNDING_NS", 0)
        patch.setattr(bounds, "FINE", 1e12)
        line, at_s, reports = OffsetLine(), 0, []
        for later_s, sign, took_us in messages:
            at_s += later_s
            reports.append((sign, at_s, rate_ppm * at_s * 1000 + sign * took_us * US))
            assert line.add(sign, at_s * SECOND, reports[-1][2])
        known = line.at(requested_s * SECOND)
    drift = DRIFT_PPM * 1000.0  # ns a second
    rates = {drift, -drift} | {(x[2] - y[2]) / (x[1] - y[1]) for x, y in combinations(reports, 2)}
    corners = [
        bound + rate * (requested_s - then)
        for rate in rates
        for _, then, bound in reports
        if abs(rate) <= drift + 1e-6 and all(s * (bound + rate * (t - then) - limit) <= 1e-3 for s, t, limit in reports)
    ]
    for sign, found in ((1, known.high_ns), (-1, known.low_ns)):
        if not any(s == sign for s, _, _ in reports):
            assert found is None
        else:
            assert found is not None
            assert found == pytest.approx(max(corners) if sign > 0 else min(corners), abs=2)


@pytest.mark.parametrize("apart_s", [-2, 0, 2])
def test_two_seconds_and_fifty_ppm_apart_the_width_is_little_more_than_the_shortest_way_there_and_back(apart_s: int) -> None:
    one, two = Host("p", 0, -25.0), Host("d", apart_s * SECOND, 25.0)
    clocks = HostClocks()
    shortest = {"there": 1 << 62, "back": 1 << 62}
    widths = []
    for number in range(2000):  # a hand-off every 50 ms, 300 us each way and up to 3 ms more
        sent = number * 50_000 * US
        there, back = 300 * US + (number * 7919) % 3000 * US, 300 * US + (number * 104729) % 3000 * US
        assert not clocks.before(one.at(sent), two.at(sent + there))
        assert not clocks.before(two.at(sent + there + 40_000 * US), one.at(sent + there + 40_000 * US + back))
        shortest = {"there": min(shortest["there"], there), "back": min(shortest["back"], back)}
        now = sent + there + 40_000 * US + back
        known = clocks.between("p", "d", one.at(now)[1])
        assert known is not None
        assert known.low_ns is not None
        assert known.high_ns is not None
        assert known.low_ns <= two.minus(one, now) <= known.high_ns
        widths.append((known.width_ns or 0) / sum(shortest.values()))
    assert min(widths) >= 1  # no evidence shows where between the two the truth lies
    assert median(widths[200:]) <= 1.2
    assert max(widths[200:]) <= 1.7


def test_a_clock_that_was_stepped_starts_anew_and_is_reported_once() -> None:
    before, after = Host("d", 0, 0), Host("d", 5 * SECOND, 0)
    one, clocks = Host("p", 0, 0), HostClocks()
    contradicted = []
    for host, start in ((before, 0), (after, 60 * SECOND)):
        for number in range(5):
            sent = start + number * SECOND
            contradicted.append(clocks.before(one.at(sent), host.at(sent + 1000 * US)))
            contradicted.append(clocks.before(host.at(sent + 2000 * US), one.at(sent + 3000 * US)))
    known = clocks.between("p", "d", one.at(66 * SECOND)[1])
    assert known is not None
    assert known.low_ns is not None
    assert known.high_ns is not None
    assert known.low_ns <= 5 * SECOND <= known.high_ns
    assert (known.width_ns or 0) < 4000 * US
    assert contradicted == [number == 11 for number in range(20)]


def quiet(line: OffsetLine, at_s: float, low_us: float = -100, high_us: float = 100) -> bool:
    """Return one message each way at this time."""
    at_ns = round(at_s * SECOND)
    return line.add(1, at_ns, round(high_us * US)) and line.add(-1, at_ns, round(low_us * US))


def test_without_evidence_the_bounds_part_as_fast_as_two_clocks_may() -> None:
    line = OffsetLine()
    for second in range(120):
        assert quiet(line, second)
    near, window_s = 119, WINDOW_NS / 1e9
    width = {ahead: line.at((near + ahead) * SECOND).width_ns or 0 for ahead in (0, 60, 600, 6000)}
    assert width[0] < 210 * US
    rate_ppm = (200 + 119 * WANDER_PPM) / 119  # the rate from two minutes of bounds 200 us apart, and its wander; either way
    assert width[60] < 210 * US + 60 * 1000 * (WANDER_PPM + 2 * rate_ppm)
    assert width[6000] - width[600] == pytest.approx((6000 - window_s) * 2 * DRIFT_PPM * 1000, rel=1e-3)
    assert line.at(-6000 * SECOND).width_ns == pytest.approx(width[6000], rel=0.1)


def test_a_rate_is_forgotten_when_it_is_old_and_the_offset_is_not() -> None:
    """A rate becomes too old to use; the offset does not.

    A clock ran at one rate for an hour and at another for the next. No message passed while it changed.
    """
    line, window_s = OffsetLine(), WINDOW_NS // 10**9

    def offset_us(at_s: float) -> float:
        turned_s = 3600 + window_s
        return 40 * min(at_s, turned_s) - 40 * max(0, at_s - turned_s)

    for at_s in (*range(0, 3600, 5), *range(3600 + 2 * window_s, 7200, 5)):
        assert quiet(line, at_s, offset_us(at_s) - 100, offset_us(at_s) + 100)
        known = line.at(at_s * SECOND)
        assert known.low_ns is not None
        assert known.high_ns is not None
        assert known.low_ns <= offset_us(at_s) * US <= known.high_ns
    assert (line.at(7195 * SECOND).width_ns or 0) < 250 * US


def test_evidence_from_before_the_memory_changes_nothing_unless_it_contradicts() -> None:
    """Old evidence changes nothing unless it contradicts.

    A stream of half an hour is reported when it is over. A clock that was set back by an hour is a contradiction.
    """
    line = OffsetLine()
    for at_s in range(0, 3600, 10):
        assert quiet(line, at_s)
    known = line.at(3600 * SECOND)
    assert quiet(line, 1800)
    assert line.at(3600 * SECOND) == known
    assert not line.add(1, 0, -3600 * SECOND)
    assert line.at(0).high_ns == pytest.approx(-3600 * SECOND, abs=10)
    assert line.at(0).low_ns is None


def test_clocks_that_were_set_back_together_are_learned_of_anew() -> None:
    line = OffsetLine()
    for at_s in range(7200, 7300):
        assert quiet(line, at_s)
    for at_s in range(MAX_LATE):
        assert quiet(line, at_s, 900, 1000)  # an hour earlier both say so: within the drift of the two clocks
    assert (line.at(MAX_LATE * SECOND).width_ns or 0) < 110 * US
    assert line.newest_ns == (MAX_LATE - 1) * SECOND


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 30), st.sampled_from([1, -1]), st.integers(0, 10**6)), max_size=400))
def test_memory_is_bounded_whatever_peers_say(messages: list[tuple[int, int, int]]) -> None:
    line, at_s = OffsetLine(), 0
    for later_s, sign, bound in messages:
        at_s += later_s
        line.add(sign, at_s * SECOND, sign * bound)
        assert all(region is None or len(region.lines) <= MAX_CORNERS for region in (line._kept, line._next))


@pytest.mark.parametrize("outcome", [Outcome.CLIENT_DISCONNECT, Outcome.TIMED_OUT], ids=str)
def test_G04_a_caller_that_did_not_hear_the_callee_out_bounds_one_side_only(outcome: Outcome) -> None:
    clocks = HostClocks()
    edge = evidence_of(exchange(Role.EDGE, 0, 100, host="e", outcome=outcome), 0, EPOCH)
    assert not clocks.learn(edge, evidence_of(exchange(Role.DECODE, 10, 5000, host="d"), 1, EPOCH))
    known = clocks.between("e", "d", EPOCH)
    assert known is not None
    assert known.low_ns is None
    assert known.high_ns == pytest.approx(10_000 * US, abs=2 * US)


def test_pairs_are_bounded_by_all_that_relates_them() -> None:
    """P hears nothing from the edge except through D."""
    clocks, ms = HostClocks(), 1000 * US
    for cause, effect in ((("e", 0), ("p", 1)), (("p", 100), ("d", 101)), (("d", 200), ("e", 201))):
        assert not clocks.before((cause[0], EPOCH + cause[1] * ms), (effect[0], EPOCH + effect[1] * ms))
    assert {pair: round((i.width_ns or 0) / ms, 1) for pair, i in clocks.intervals().items()} == {
        pair: pytest.approx(3, abs=0.2) for pair in (("d", "e"), ("d", "p"), ("e", "p"))
    }


def test_the_pairs_are_bounded() -> None:
    clocks = HostClocks(max_pairs=3)
    for name in "bcdefg":
        clocks.before(("a", EPOCH), (name, EPOCH + 1))
    assert len(clocks.intervals()) == 3
    assert clocks.between("a", "b", EPOCH).high_ns is None  # type: ignore[union-attr]
