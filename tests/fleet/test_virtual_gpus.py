"""The GPUs of a virtual fleet.

The samples fit what the engines did, and are read as such to the end.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from handrail import conventions as names
from handrail_collector.batch import STORE, publish, publish_samples, rows_of
from handrail_collector.explain.devices.timeline_samples import tracked
from handrail_collector.explain.period.answer import answered
from handrail_collector.explain.period.question import Question
from handrail_collector.rows import ClockPairRow
from handrail_collector.store.filters import RequestFilter
from handrail_collector.store.read import StoreReader
from handrail_sim.emulator import scenario as scenarios
from handrail_sim.emulator import virtual_run
from handrail_sim.emulator.core import StepEnded
from handrail_sim.emulator.costs import ForwardPass
from handrail_sim.emulator.faults import parse
from handrail_sim.emulator.observe import clocks
from handrail_sim.emulator.simulate import Ran, over_ns
from handrail_sim.emulator.virtual_run import VirtualRunSettings
from handrail_sim.virtual.engines import SAMPLE_NS, SHARES, activity, gpu_activity, gpu_evidence
from handrail_sim.virtual.observers import arrivals

H100 = scenarios.load("h100-70b-split")
MS = 1_000_000
STARTED = 1_796_000_000 * 10**9


def worked(begin_ns: int, end_ns: int, batch: ForwardPass) -> tuple[int, StepEnded]:
    """Build a step with its end."""
    counts = dict.fromkeys(("requests", "prefill_requests", "prefill_tokens", "resumed_tokens", "preemptions"), 0)
    return end_ns, StepEnded(tokens=1, begin_ns=begin_ns, landed=False, batch=batch, **counts)


def test_a_prompt_keeps_the_tensor_pipes_busy_and_decoding_the_memory() -> None:
    tensor, dram = activity(H100, ForwardPass(decoding=0, prefill_tokens=10_000, running=1, prefill_pairs=50_000_000))
    assert tensor > 2 * dram
    tensor, dram = activity(H100, ForwardPass(decoding=64, prefill_tokens=0, running=64, context_tokens=64 * 10_000))
    assert dram > 5 * tensor
    assert all(0 <= share <= 1 for shares in SHARES.values() for share in shares)


def test_each_sample_tells_of_the_time_since_the_one_before() -> None:
    step = ForwardPass(decoding=1, prefill_tokens=0, running=1, context_tokens=1000)
    steps = [worked(50 * MS, 120 * MS, step), worked(150 * MS, 180 * MS, step)]
    samples = list(gpu_activity(H100, steps, 290 * MS))
    assert [round(busy, 6) for _, busy, _, _ in samples] == [0.5, 0.5, 0.0]
    assert [at_ns for at_ns, *_ in samples] == [100 * MS, 200 * MS, 300 * MS]
    faults = (parse("clock_offset:d0:0.000000007", H100.hosts()),)
    (run,) = gpu_evidence(H100, Ran([], {"d0": steps}, {}), faults, STARTED, 290 * MS)
    assert run.at == [STARTED + 7 + at_ns for at_ns, *_ in samples]


@given(st.lists(st.tuples(st.integers(0, 300 * MS), st.integers(1, 400 * MS)), max_size=20))
def test_busy_time_adds_up_to_the_steps(lengths: list[tuple[int, int]]) -> None:
    steps, at = [], 0
    for idle, length in lengths:
        at += idle
        steps.append(worked(at, at + length, ForwardPass(decoding=1, prefill_tokens=0, running=1)))
        at += length
    busy_ns = sum(busy for _, busy, _, _ in gpu_activity(H100, steps, at)) * SAMPLE_NS
    assert busy_ns == pytest.approx(sum(length for _, length in lengths), abs=10)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pair of H100 nodes, 60 requests, with the samples of its GPUs."""
    folder = tmp_path_factory.mktemp("pair")
    ran = virtual_run.ran(VirtualRunSettings(scenario=H100, requests=60, seed=1))
    came = arrivals(H100, ran.flights, (), seed=1, started_unix_ns=STARTED)
    related: list[ClockPairRow] = []
    publish(folder, rows_of(((o.received_unix_ns, o.record) for o in came), clocks=related), clocks=related)
    publish_samples(folder, gpu_evidence(H100, ran, (), STARTED, over_ns(ran.flights)))
    return folder


def test_the_emulated_pair_is_compute_bound_at_p_and_memory_bound_at_d(pair: Path) -> None:
    reader = StoreReader(pair / STORE)
    question = Question(since_unix_ns=STARTED, until_unix_ns=STARTED + 3600 * 10**9)
    pools = {each["role"]: each for each in answered(reader, question, STARTED + 3600 * 10**9)["pools"]}
    reader.close()
    assert (pools["prefill"]["bound"], pools["prefill"]["gpus"], pools["prefill"]["how"]) == ("compute_bound", 2, "measured")
    assert (pools["decode"]["bound"], pools["decode"]["gpus"]) == ("memory_bound", 1)


def test_a_trace_of_the_emulated_pair_shows_what_its_gpus_did(pair: Path) -> None:
    reader = StoreReader(pair / STORE)
    (row,) = reader.requests(RequestFilter(sort="ttft", limit=1))
    hardware = tracked(reader, row, ())
    reader.close()
    p, d = hardware["places"]
    assert p["chosen"] == "engine"
    for place in (p, d):  # no spans are kept of a virtual run: hosts go by their names
        offset, by_host = place["offset"], clocks(H100, (), STARTED)
        true_ns = by_host[place["host"]].unix_ns(0) - by_host["edge"].unix_ns(0)
        assert offset["bound_ns"] is not None
        assert abs(offset["shift_ns"] - true_ns) <= offset["bound_ns"] < 50 * MS
    assert {track["name"] for device in d["devices"] for track in device["tracks"]} == {
        names.GPU_BUSY,
        names.GPU_TENSOR_ACTIVE,
        names.GPU_DRAM_ACTIVE,
    }
    compute = next(phase for phase in row.phases if phase.phase == "prefill_compute")
    (device,) = p["devices"]
    tensor = next(track for track in device["tracks"] if track["name"] == names.GPU_TENSOR_ACTIVE)
    assert max(tensor["values"]) > 0.5
    assert compute.duration_ns > 3 * SAMPLE_NS


def test_a_gpu_that_is_throttled_says_so_beside_what_it_did() -> None:
    faults = (parse("gpu_throttled:d0:3@2-6", H100.hosts()),)
    ran = virtual_run.ran(VirtualRunSettings(scenario=H100, requests=30, seed=1, faults=faults))
    runs = {run.process.host: run for run in gpu_evidence(H100, ran, faults, STARTED, 10 * 10**9)}
    series = {(one.name, one.label): one.values for one in runs["d0"].series}
    throttled = [value for value in series[names.GPU_THROTTLED, "hw_thermal"] if value is not None]
    assert 0 < sum(throttled) < len(throttled)
    clear = next(one.values for one in runs["p0"].series if one.name == names.GPU_THROTTLED)
    assert sum(value for value in clear if value is not None) == 0


def test_a_host_that_ran_nothing_is_idle() -> None:
    still = replace(H100, step_ns=0)
    assert list(gpu_activity(still, [], 250 * MS)) == [(at * MS, 0.0, 0.0, 0.0) for at in (100, 200, 300)]
    assert activity(still, ForwardPass(decoding=0, prefill_tokens=0, running=0)) == (0.0, 0.0)
