"""Faults by name: what parses, which errors are shown, where and when one holds."""

from __future__ import annotations

import pytest

from handrail_sim.emulator.faults import FAULTS, Active, Fault, FaultError, Hosts, parse

SPLIT = Hosts(("p0", "p1"), ("d0", "d1"))
COLLOCATED = Hosts(("e0",), ("e0",))


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("slow_prefill:p1:3", Fault("slow_prefill", "p1", 3.0)),
        ("slow_link:p0>d1:4@60-120", Fault("slow_link", "p0>d1", 4.0, 60_000_000_000, 120_000_000_000)),
        ("router_slow:router:0.2@1.5-", Fault("router_slow", "router", 0.2, 1_500_000_000)),
        ("fetch_failed:*:1", Fault("fetch_failed", "*", 1.0)),
        ("clock_offset:edge:-2", Fault("clock_offset", "edge", -2.0)),
    ],
)
def test_a_fault_is_read(text: str, fault: Fault) -> None:
    assert parse(text, SPLIT) == fault


@pytest.mark.parametrize(
    ("text", "hosts", "says"),
    [
        ("slow_prefill:p1", SPLIT, "write NAME:place:size"),
        ("slow:p1:2", SPLIT, "valid: slow_prefill, "),
        ("slow_prefill:d0:2", SPLIT, "valid: [*], p0, p1"),
        ("slow_link:p0:2", SPLIT, "p0>d0, p0>d1"),
        ("slow_prefill:p1:fast", SPLIT, "could not convert"),
        ("slow_prefill:p1:0.5", SPLIT, "outside 1 to inf"),
        ("slow_prefill:p1:nan", SPLIT, "outside"),
        ("slow_prefill:p1:inf", SPLIT, "outside"),
        ("fetch_failed:*:1.5", SPLIT, "outside 0 to 1"),
        ("slow_prefill:p1:2@9-3", SPLIT, "ends before it begins"),
        ("slow_link:*:2", COLLOCATED, "no place for it"),
    ],
)
def test_a_wrong_fault_is_refused_with_what_is_valid(text: str, hosts: Hosts, says: str) -> None:
    with pytest.raises(FaultError, match=says):
        parse(text, hosts)


def test_a_fault_holds_at_its_place_from_its_beginning_to_before_its_end() -> None:
    fault = parse("slow_prefill:p1:3@1-2", SPLIT)
    assert [fault.at("p1", second * 500_000_000) for second in range(5)] == [False, False, True, True, False]
    assert not fault.at("p0", 1_500_000_000)
    assert Fault("slow_prefill", "*", 3.0).at("p0", 0)


def test_factors_multiply_and_edges_are_all_the_times_of_change() -> None:
    active = Active([parse("slow_prefill:p1:3@1-2", SPLIT), parse("slow_prefill:*:2", SPLIT)])
    assert active.factor("slow_prefill", "p1", 1_500_000_000) == 6.0
    assert active.factor("slow_prefill", "p0", 1_500_000_000) == 2.0
    assert active.factor("bad_host", "p0", 0) == 1.0
    assert active.edges() == [0, 1_000_000_000, 2_000_000_000]


def test_every_fault_says_what_its_size_is_and_what_it_does() -> None:
    assert all(kind.size and kind.effect and kind.least < kind.most for kind in FAULTS.values())
