"""Offsets between hosts from what caused what: the truth lies in the interval always, however the clocks differ and drift."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from builders import EPOCH, exchange
from handrail.records import Outcome, Role
from handrail_collector.stitch.clocks import HostClocks
from handrail_collector.stitch.evidence import evidence_of

US, SECOND = 1_000, 10**9


@dataclass(frozen=True, slots=True)
class Host:
    """A clock ``offset_ns`` ahead at the beginning, running ``ppm`` too fast."""

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
            slack = 2_000  # the time asked for is one host's; 2 s of offset at 100 ppm, and roundings
            assert known.low_ns is None or known.low_ns - slack <= true
            assert known.high_ns is None or true <= known.high_ns + slack


@pytest.mark.parametrize("apart_s", [-2, 0, 2])
def test_two_seconds_and_fifty_ppm_apart_the_width_is_at_most_twice_the_shortest_way(apart_s: int) -> None:
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
        widths.append((known.width_ns or 0) / max(shortest.values()))
    # two ways cost what the shortest of each took; what is beyond that is how far the clocks may have parted since
    assert sorted(widths[200:])[len(widths[200:]) // 2] <= 2.6


def test_a_clock_that_was_stepped_starts_anew_and_is_told_once() -> None:
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


@pytest.mark.parametrize("outcome", [Outcome.CLIENT_DISCONNECT, Outcome.TIMED_OUT], ids=str)
def test_G04_a_caller_that_did_not_hear_the_callee_out_bounds_one_side_only(outcome: Outcome) -> None:
    clocks = HostClocks()
    edge = evidence_of(exchange(Role.EDGE, 0, 100, host="e", outcome=outcome), 0, EPOCH)
    assert not clocks.learn(edge, evidence_of(exchange(Role.DECODE, 10, 5000, host="d"), 1, EPOCH))
    known = clocks.between("e", "d", EPOCH)
    assert known is not None
    assert known.low_ns is None
    assert known.high_ns == pytest.approx(10_000 * US, abs=2 * US)


def test_the_pairs_are_bounded() -> None:
    clocks = HostClocks(max_pairs=3)
    for name in "bcdefg":
        clocks.before(("a", EPOCH), (name, EPOCH + 1))
    assert len(clocks.intervals()) == 3
    assert clocks.between("a", "b", EPOCH).high_ns is None  # type: ignore[union-attr]
