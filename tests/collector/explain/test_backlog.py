"""Replays of arrivals: the waiting and computing that an engine would have had.

They are checked by hand, fitted to made periods, and held against the emulated fleet's truth.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.truth.cases import CASES
from handrail_collector.batch import newest, rows_of
from handrail_collector.explain.period.baseline import fit
from handrail_collector.explain.period.queue_replay import Arrivals, Floats, QueueReplay, replay
from handrail_collector.explain.period.request_columns import COMPUTE, QUEUE, RequestColumns, requests_of
from handrail_sim.emulator.observe import STARTED_UNIX_NS
from handrail_sim.emulator.simulate import Simulation, record
from handrail_sim.emulator.truth import RequestTruth, TruePhase
from handrail_sim.emulator.virtual_run import plan_requests
from handrail_sim.virtual.observers import arrivals

MS = 1e6
TOKEN_NS = 50_000.0


def visits(*arrivals: tuple[float, float], host: str = "p0") -> Arrivals:
    """Return the visits to one host: when each arrived, in ms, and its tokens."""
    times, tokens = (np.array(column) for column in zip(*arrivals, strict=True))
    count = len(times)
    return Arrivals(np.array([host] * count, object), times * MS, tokens, np.zeros(count), np.zeros(count, bool))


def replayed(came: Arrivals, budget: int) -> tuple[list[float], list[float]]:
    """Return each visit's waiting and computing time, in ms."""
    reported_replayed = replay(came, came.tokens * TOKEN_NS, budget, 1.0)["p0"]
    return [round(ns / MS, 3) for ns in reported_replayed.queue_ns], [round(ns / MS, 3) for ns in reported_replayed.compute_ns]


HAND: dict[str, tuple[Arrivals, int, list[float], list[float]]] = {
    "one after the other": (visits((0, 1000), (10, 1000), (20, 1000)), 1000, [0, 40, 80], [50, 50, 50]),
    "idle between": (visits((0, 1000), (200, 1000)), 1000, [0, 0], [50, 50]),
    "together in the next step": (visits((0, 1000), (10, 500), (20, 500)), 2048, [0, 40, 30], [50, 50, 50]),
    "taken up beside the last chunk": (visits((0, 3000), (10, 1000)), 2048, [0, 92.4], [200, 97.6]),
    "longer than many steps": (visits((0, 100_000), (10, 1000)), 1000, [0, 4990], [5000, 50]),
}


@pytest.mark.parametrize("name", HAND)
def test_what_an_engine_does_with_arrivals(name: str) -> None:
    came, budget, queue, compute = HAND[name]
    assert replayed(came, budget) == (queue, compute)


def test_a_visit_reported_twice_counts_once() -> None:
    once = visits((0, 1000), (10, 1000))
    twice = visits((0, 1000), (10, 1000), (0, 1000))
    assert replayed(twice, 1000) == replayed(once, 1000)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 5_000), st.integers(1, 200_000)), min_size=1, max_size=30, unique_by=lambda each: each[0]),
    st.sampled_from([256, 2048, 16_384]),
)
def test_all_work_is_done_in_order_and_none_twice(came: list[tuple[float, int]], budget: int) -> None:
    ordered = visits(*sorted(came))
    reported_replayed = replay(ordered, ordered.tokens * TOKEN_NS, budget, 1.0)["p0"]
    starts, ends = (
        reported_replayed.queued_ns + reported_replayed.queue_ns,
        reported_replayed.queued_ns + reported_replayed.queue_ns + reported_replayed.compute_ns,
    )
    assert (reported_replayed.queue_ns >= 0).all()
    assert (np.diff(starts) >= -1).all()  # a ns of rounding
    assert (np.diff(ends) >= -1).all()
    assert (reported_replayed.compute_ns >= ordered.tokens * TOKEN_NS - 1).all()
    busy_ns, idle_until = 0.0, 0.0
    for start, end in zip(starts, ends, strict=True):
        busy_ns += max(0.0, end - max(start, idle_until))
        idle_until = max(idle_until, end)
    assert busy_ns == pytest.approx(ordered.tokens.sum() * TOKEN_NS, rel=1e-6)


def made(count: int, seed: int) -> tuple[Arrivals, Floats, Floats]:
    """Return random arrivals at two hosts.

    The durations are those of an engine that computes 2048 tokens a step.
    """
    random = Random(seed)
    now, times = 0.0, []
    for _ in range(count):
        now += random.expovariate(1 / 60)
        times.append(now)
    came = visits(*[(at, random.randint(200, 3000)) for at in times])
    came = replace(came, hosts=np.array([f"p{random.randint(0, 1)}" for _ in times], object))
    queue, compute = np.zeros(count), np.zeros(count)
    for name, reported_replayed in replay(came, came.tokens * TOKEN_NS, 2048, 1.0).items():
        queue[came.hosts == name], compute[came.hosts == name] = reported_replayed.queue_ns, reported_replayed.compute_ns
    return came, queue, compute


def test_the_expected_queue_is_reported_whatever_the_outcome() -> None:
    came, queue, compute = made(1200, seed=4)
    fault = (came.hosts == "p0") & (np.arange(1200) > 400) & (np.arange(1200) < 800)
    backlog = QueueReplay.fit(came, queue + 500 * MS * fault, compute + 300 * MS * fault)
    assert backlog is not None
    reported_queue, reported_compute = backlog.expected_ns(came)
    assert np.quantile(np.abs(reported_queue - queue), 0.9) < 50 * MS
    assert np.quantile(np.abs(reported_compute - compute), 0.9) < 30 * MS


def test_queues_that_do_not_follow_from_arrivals_have_no_replay() -> None:
    came, queue, compute = made(1200, seed=5)
    shuffled = np.random.default_rng(1).permutation(queue)
    assert QueueReplay.fit(came, shuffled, compute) is None


def test_without_queues_there_is_nothing_to_replay() -> None:
    came, _, compute = made(300, seed=6)
    assert QueueReplay.fit(came, np.zeros(300), compute) is None
    assert QueueReplay.fit(replace(came, hosts=np.array([""] * 300, object)), np.ones(300), compute) is None


def test_a_thinned_sample_has_no_replay() -> None:
    came, queue, compute = made(6000, seed=7)
    few = np.arange(0, 6000, 8)
    assert QueueReplay.fit(came.at(few), queue[few], compute[few]) is None


def test_a_visit_outside_the_fit_gets_no_estimate() -> None:
    came, queue, compute = made(1200, seed=8)
    backlog = QueueReplay.fit(came, queue, compute)
    assert backlog is not None
    later = replace(came.at(np.array([5])), queued_ns=np.array([1.0]))
    elsewhere = replace(came.at(np.array([5])), hosts=np.array(["p9"], object))
    assert all(np.isnan(predicted).all() for odd in (later, elsewhere) for predicted in backlog.expected_ns(odd))


def test_a_moved_prompt_belongs_to_the_other_of_two_hosts() -> None:
    came, queue, compute = made(1200, seed=9)
    refused = (came.hosts == "p0") & (np.arange(1200) % 3 == 0)
    moved = replace(came, hosts=np.where(refused, "p1", came.hosts), moved=refused)
    backlog, unmoved = QueueReplay.fit(moved, queue, compute), QueueReplay.fit(came, queue, compute)
    assert backlog is not None
    assert unmoved is not None
    assert np.array_equal(backlog.expected_ns(moved), unmoved.expected_ns(came))


def test_of_more_hosts_nobody_knows_where_a_moved_prompt_would_have_been() -> None:
    came, queue, compute = made(1200, seed=9)
    moved = np.arange(1200) % 50 == 0
    hosts = np.where(np.arange(1200) % 3 == 2, "p2", came.hosts)
    for name, reported_replayed in replay(replace(came, hosts=hosts), came.tokens * TOKEN_NS, 2048, 1.0).items():
        queue[hosts == name], compute[hosts == name] = reported_replayed.queue_ns, reported_replayed.compute_ns
    backlog = QueueReplay.fit(replace(came, hosts=hosts, moved=moved), queue, compute)
    assert backlog is not None
    assert np.isnan(backlog.expected_ns(replace(came, hosts=hosts, moved=moved))[0][moved]).all()


@pytest.mark.parametrize("name", ["slow_prefill", pytest.param("mooncake_bad_host_p", marks=pytest.mark.eval)])
def test_in_the_emulated_fleet_it_is_what_the_run_without_the_fault_shows(name: str) -> None:
    case = next(case for case in CASES if case.name == name)
    run = case.settings(1200, seed=3)
    plans = plan_requests(run)
    faults = case.faults(plans)
    healthy = [record(run.scenario, flight) for flight in Simulation(run.scenario, plans, 3).run()]
    flights = Simulation(run.scenario, plans, 3, faults).run()
    timed_records = arrivals(run.scenario, flights, faults, seed=3, started_unix_ns=STARTED_UNIX_NS)
    rows = {row.client_request_id: row for row in newest(rows_of((one.received_unix_ns, one.record) for one in timed_records))}
    requests = requests_of([rows[truth.request_id] for truth in healthy])
    typical = fit(requests)
    assert typical is not None
    assert typical.backlog is not None
    expected = typical.expected_ns(requests)
    for column, phase in ((QUEUE, TruePhase.PREFILL_QUEUE), (COMPUTE, TruePhase.PREFILL_COMPUTE)):
        without = _took(healthy, phase)
        changed = np.abs(requests.phases_ns[:, column] - without).mean()
        assert np.abs(expected[:, column] - without).mean() < 0.2 * changed, phase
    assert _fewer(requests) is None


def _took(truths: list[RequestTruth], phase: TruePhase) -> Floats:
    return np.array([truth.phases[phase] for truth in truths], np.float64)


def _fewer(requests: RequestColumns) -> QueueReplay | None:
    """Return a model that learned from one request in ten."""
    few = np.arange(0, len(requests), 10)
    came, took = requests.visits().at(few), requests.phases_ns[few]
    return QueueReplay.fit(came, took[:, QUEUE], took[:, COMPUTE])
