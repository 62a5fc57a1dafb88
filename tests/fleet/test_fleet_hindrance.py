"""What hinders a host, when, and how long work takes then.

The tests also cover what a client that does not read does to the reads of a proxy.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from handrail.records import Iteration, ProcessEvent
from handrail.records.devices import DeviceRun
from handrail_sim.emulator import scenario as scenarios
from handrail_sim.emulator.delivery import AT_ONCE_NS, BUFFERED_TOKENS, delivered
from handrail_sim.emulator.faults import Active, parse
from handrail_sim.emulator.host import PAUSED_EVERY_NS, THROTTLED_NS, WATCH_NS, Hindrance, hindered_ns, hindrances
from handrail_sim.emulator.observe import HostClock
from handrail_sim.emulator.virtual_run import VirtualRunSettings
from handrail_sim.virtual.engines import CLOCK_HERTZ, SAMPLE_NS, engine_records, processes
from harness.virtual_runs import shared_run

MS = 1_000_000
S = 1000 * MS
SPLIT = replace(scenarios.load("split"), answer_tokens_min=100, answer_tokens_max=200)


def hindrance(
    share: float, every_ns: int = 4 * S, lasts_ns: int = 200 * MS, *, from_ns: int = 0, to_ns: int | None = None
) -> Hindrance:
    return Hindrance(7, share, every_ns, lasts_ns, from_ns, to_ns)


def test_it_comes_once_in_every_turn_at_no_fixed_moment() -> None:
    times = list(hindrance(0.0).times(0, 400 * S))
    assert len(times) == 100
    assert all(turn * 4 * S <= begin and end <= (turn + 1) * 4 * S for turn, (begin, end) in enumerate(times))
    assert len({begin % (4 * S) for begin, _ in times}) > 90
    assert list(hindrance(0.0).times(*times[3])) == [times[3]]


def test_it_begins_and_ends_with_its_fault() -> None:
    times = list(hindrance(0.0, from_ns=10 * S, to_ns=20 * S).times(0, 100 * S))
    assert 2 <= len(times) <= 3
    assert all(10 * S <= begin < 20 * S for begin, _ in times)


def speed(by: list[Hindrance], at: int) -> float:
    found = 1.0
    for each in by:
        for begin, end in each.times(at, at + 1):
            if begin <= at < end:
                found *= each.share
    return found


@given(st.integers(0, 20_000), st.integers(1, 3000), st.sampled_from([0.0, 0.25, 0.5]), st.booleans())
def test_work_takes_as_long_as_its_parts_do(begin: int, work: int, share: float, paused: bool) -> None:
    """Times are in units of a millisecond; the parts are done one by one."""
    by = [hindrance(share, 4000, 200)] + ([hindrance(0.0, 3000, 150)] if paused else [])
    took = hindered_ns(begin, work, by)
    done, at = 0.0, begin
    while done < work - 1e-9:
        done += speed(by, at)
        at += 1
    assert took == pytest.approx(at - begin, abs=1.001)


def test_nothing_hinders_where_there_is_nothing() -> None:
    assert hindered_ns(5, 12, []) == 12
    active = Active([parse("gpu_throttled:d0:4", SPLIT.hosts()), parse("host_pause:*:0.2", SPLIT.hosts())])
    assert sorted(hindrances("d0", active)) == ["gpu_throttled", "host_pause"]
    assert sorted(hindrances("p0", active)) == ["host_pause"]
    assert hindrances("d0", active)["gpu_throttled"][0].share == 0.25


@pytest.mark.parametrize(("fault", "excess_ns"), [("host_pause:d0:0.2", 150 * MS), ("gpu_throttled:d0:4", 20 * MS)])
def test_streams_of_that_host_stand_still_and_those_of_others_do_not(fault: str, excess_ns: int) -> None:
    settings = VirtualRunSettings(scenario=SPLIT, requests=80, seed=3)
    healthy = shared_run(settings)
    struck = shared_run(replace(settings, faults=(parse(fault, SPLIT.hosts()),)))
    at: dict[str, list[int]] = {"d0": [], "d1": []}
    for well, ill in zip(healthy.flights, struck.flights, strict=True):
        at[well.plan.decode_host].append(max(ill.gaps_ns) - max(well.gaps_ns))
    assert max(at["d0"]) > excess_ns
    assert max(at["d1"]) < 5 * MS


def test_what_is_seen_of_it() -> None:
    faults = (parse("host_pause:d0:0.2", SPLIT.hosts()), parse("gpu_throttled:d1:4", SPLIT.hosts()))
    run = shared_run(VirtualRunSettings(scenario=SPLIT, requests=80, seed=3, faults=faults))
    over = 60 * S
    records = [one for _, one in engine_records(run, processes(SPLIT), {host: HostClock() for host in run.steps}, over)]
    seen = [one for one in records if isinstance(one, ProcessEvent)]
    assert len(seen) == pytest.approx(over / PAUSED_EVERY_NS, abs=2)
    for pause in seen:
        assert pause.process.host == "d0"
        assert pause.duration_ns is not None
        assert 200 * MS - WATCH_NS <= pause.duration_ns <= 200 * MS
    series = [one.series for one in records if isinstance(one, DeviceRun) and one.process.host == "d1"]
    readings = [reading for hertz, throttled in series for reading in zip(hertz.values, throttled.values, strict=True)]
    assert len(readings) == over // SAMPLE_NS
    slow = [hertz for hertz, throttled in readings if throttled]
    assert len(slow) == pytest.approx(10 * THROTTLED_NS / SAMPLE_NS, abs=4)
    assert (set(slow), {hertz for hertz, throttled in readings if not throttled}) == ({CLOCK_HERTZ / 4}, {CLOCK_HERTZ})
    iterations = [one for one in records if isinstance(one, Iteration) and not one.full]
    for host, steps in run.steps.items():
        assert all(ended <= step.begin_ns for (ended, _), (_, step) in pairwise(steps))
        assert sum(one.steps for one in iterations if one.process.host == host) == len(steps)
    answered = sum(len(flight.gaps_ns) + 1 for flight in run.flights)
    of_d = [one for one in iterations if one.process.host.startswith("d")]
    assert sum(one.decode_tokens + one.prefill_requests for one in of_d) == answered
    of_p = [one for one in iterations if one.process.host.startswith("p")]
    assert sum(one.prefill_tokens for one in of_p) == sum(flight.plan.arrival.prompt_tokens for flight in run.flights)


def test_tokens_that_are_computed_again_are_counted_apart() -> None:
    fault = parse("preemption_storm:d0:2", SPLIT.hosts())
    run = shared_run(VirtualRunSettings(scenario=SPLIT, requests=60, seed=3, faults=(fault,)))
    steps = [(host, step) for host, ended in run.steps.items() for _, step in ended]
    assert sum(step.preemptions for _, step in steps) == sum(flight.preemptions for flight in run.flights) > 10
    assert all(host == "d0" for host, step in steps if step.resumed_tokens)
    assert max(step.resumed_tokens for _, step in steps) > 500
    for flight in run.flights:
        assert len(flight.preempted) == flight.preemptions
        assert all(last is not None and first <= last for first, last in flight.preempted)


# --- clients --------------------------------------------------------------------------------------------------------------


def test_a_client_that_reads_on_gets_every_token_when_it_comes() -> None:
    seen = delivered(100, [10, 20, 30], 0)
    assert (seen.reads_ns, seen.gaps_ns, seen.held_ns) == ((100, 110, 130, 160), (10, 20, 30), None)
    assert delivered(None, [], 5).reads_ns == ()


def test_what_fits_into_the_buffer_is_read_in_time() -> None:
    gaps = [10 * MS] * 400
    seen = delivered(0, gaps, 2 * S)  # 200 tokens come meanwhile
    assert seen.gaps_ns == tuple(gaps)
    assert seen.held_ns is None
    assert seen.paused_ns == (S, 3 * S)


def test_then_nothing_is_read_until_the_client_reads_again() -> None:
    gaps = [10 * MS] * 800
    seen = delivered(0, gaps, 5 * S)
    full = 200 + BUFFERED_TOKENS
    assert seen.held_ns == (full * 10 * MS, 7 * S)
    assert seen.gaps_ns[full] == 7 * S - full * 10 * MS + AT_ONCE_NS
    assert seen.reads_ns[-1] == 8 * S  # by then it has caught up
    assert all(read >= at * 10 * MS for at, read in enumerate(seen.reads_ns))
    assert sum(seen.gaps_ns) == sum(gaps)


def test_a_hung_engine_stands_once_from_the_faults_beginning_on() -> None:
    (once,) = hindrances("d0", Active([parse("engine_hung:d0:30@10-", SPLIT.hosts())]))["engine_hung"]
    second = 1_000_000_000
    assert hindered_ns(9 * second, MS, [once]) == MS
    assert hindered_ns(11 * second, MS, [once]) == 29 * second + MS
    assert hindered_ns(41 * second, MS, [once]) == MS
