"""The parts of the time between processes.

They come from the router's own spans or from clock bounds. Where neither is known, it stays one part.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from builders.clock_fleet import fly
from builders.plugin import altered
from builders.records import MS, ids, router, split_request
from builders.stitched import stitched
from handrail.records import Role
from handrail_collector.batch import newest, rows_of
from handrail_collector.rows import RequestRow
from handrail_collector.stitch.stitcher import SECOND
from handrail_sim.emulator import scenario as scenarios
from handrail_sim.emulator.faults import Fault
from handrail_sim.emulator.observe import STARTED_UNIX_NS
from handrail_sim.virtual.observers import arrivals

US = 1_000


def between(row: RequestRow) -> dict[str, float]:
    return {p.phase: p.duration_ns / MS for p in row.phases if p.process == "path"}


def routed(**of_calls: float) -> list[Any]:
    """Return a request that the router takes at 2 ms.

    It calls P at 6 ms and D at 118 ms.
    """
    seen: dict[str, Any] = dict(split_request())
    server = router(2, 990, parent=seen["edge"])
    at = {"p": 6.0, "d": 118.0} | of_calls
    calls = {
        name: altered(router(at[name], 0, parent=server, kind="client"), phase=role, end_unix_ns=None)
        for name, role in (("p", Role.PREFILL), ("d", Role.DECODE))
    }
    for name in ("p", "d"):
        seen[name] = altered(seen[name], ids=ids(parent=calls[name], span=seen[name].ids.span_id))
    return [*seen.values(), server, *calls.values()]


def test_a_routers_spans_part_what_lies_between_and_the_sum_is_exact() -> None:
    row = stitched(routed()).row("req-a")
    assert between(row) == {"router": 4, "prefill_hops": 12, "decode_hops": 24}
    assert sum(p.duration_ns for p in row.phases) == 300 * MS


def test_spans_that_cannot_be_of_this_way_part_nothing() -> None:
    row = stitched(routed(d=50.0)).row("req-a")  # D called before P was done
    assert between(row) == {"router_and_hops": 40}


def test_on_one_host_hops_are_not_split_without_a_router() -> None:
    assert between(stitched(split_request().values()).row("req-a")) == {"router_and_hops": 40}


def hosts(at_ms: float, number: int, skew_ms: float, hop_ms: float) -> list[Any]:
    """Return a request whose D runs on a host with another clock.

    D's answer takes that long to reach the edge.
    """
    seen: dict[str, Any] = dict(split_request(f"req-{number}", f"t{number}", at_ms))
    d = altered(
        seen["d"],
        process=altered(seen["d"].process, host="hd"),
        arrival_unix_ns=seen["d"].arrival_unix_ns + round(skew_ms * MS),
        duration_ns=round((870 - hop_ms) * MS),
        ttft_token_ns=round((170 - hop_ms) * MS),
    )
    early = altered(d, arrival_unix_ns=seen["edge"].arrival_unix_ns + round((0.2 + skew_ms) * MS), duration_ns=MS)
    return [seen["edge"], seen["p"], d, altered(early, ids=ids(f"t{number}", seen["edge"]), response_id=None, kv_in=None)]


def test_clocks_that_are_bounded_narrowly_tell_the_way_from_d_to_the_edge_with_its_bound() -> None:
    every = [one for number in range(5) for one in hosts(number * 2000, number, 5000, 0.5)]
    row = stitched(every).row("req-4")
    found = {p.phase: p for p in row.phases if p.process == "path"}
    hops = found["decode_hops"]
    assert hops.source == "clocks"
    assert 0 < hops.bound_ns <= MS
    assert abs(hops.duration_ns - 0.5 * MS) <= hops.bound_ns
    assert sum(p.duration_ns for p in row.phases) == 300 * MS


def test_clocks_that_nothing_bounds_narrowly_tell_nothing_apart() -> None:
    row = stitched(hosts(0, 0, 5000, 20)[:3]).row("req-0")
    assert "decode_hops" not in between(row)


@pytest.mark.parametrize("spread_ns", [0, 300_000], ids=["steady", "spread"])
@pytest.mark.parametrize("traced", [False, True], ids=["no-router-spans", "router-spans"])
def test_in_a_fleet_of_wrong_clocks_the_parts_are_right_to_within_their_bounds(spread_ns: int, *, traced: bool) -> None:
    """The parts are right within their bounds, with and without a router's spans.

    Hosts are two seconds apart and drift, and a router slows down. Its spans give all three parts and need no clocks.
    Clocks give one part, where more time lies between the processes than the quickest messages that bound them took.
    """
    scenario = replace(scenarios.load("split"), router_traces=traced, hop_spread_ns=spread_ns)
    slow = Fault("router_slow", "router", 0.2, from_ns=30 * SECOND)
    fleet = fly(scenario, 3, 240, plugin=True, faults=(slow,))
    made = arrivals(scenario, fleet.flights, fleet.faults, seed=3, started_unix_ns=STARTED_UNIX_NS, plugin=True)
    rows = {row.client_request_id: row for row in newest(rows_of((one.received_unix_ns, one.record) for one in made))}
    reported_apart = []
    for flight in fleet.flights:
        phase_rows = {p.phase: p for p in rows[flight.id].phases if p.process == "path"}
        assert flight.sent_ns is not None
        assert flight.edge_first_ns is not None
        if traced:
            assert set(phase_rows) == {"router", "prefill_hops", "decode_hops"}
            assert phase_rows["router"].duration_ns == pytest.approx(
                flight.router_ns, abs=phase_rows["router"].bound_ns + 20 * US
            )
        elif "decode_hops" in phase_rows:
            hops, true_ns = phase_rows["decode_hops"], flight.edge_first_ns - flight.sent_ns
            assert hops.source == "clocks"
            assert set(phase_rows) == {"router_and_hops", "decode_hops"}
            assert abs(hops.duration_ns - true_ns) <= hops.bound_ns + 100
            reported_apart.append(flight)
    if not traced:
        slowed = [flight for flight in fleet.flights if flight.router_ns > 100 * MS]
        assert len(slowed) > 50
        assert len([flight for flight in slowed if flight in reported_apart]) >= 0.9 * len(slowed)
