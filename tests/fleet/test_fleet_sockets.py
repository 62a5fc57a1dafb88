"""Faults over real sockets in real time.

Each shows in the truth where it should, and as what an engine or a client would see.
Nothing here asserts that something is fast: durations are compared with what the model itself waits for.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

import pytest

from fleet.running import MODEL, SMALL, fleet
from handrail_sim.emulator import load
from handrail_sim.emulator.faults import FAULTS, parse
from handrail_sim.emulator.scenario import Scenario
from handrail_sim.emulator.truth import FetchTruth, RequestTruth, TrueOutcome, TruePhase

MS = 1_000_000
LOAD = load.LoadSettings(
    url="", requests=10, concurrency=4, model=MODEL, streaming_share=1.0, prompt_words=(150, 300), answer_tokens=(6, 12)
)


async def run(
    folder: Path, *faults: str, scenario: Scenario = SMALL, retries: int = 1, **fields: Any
) -> tuple[list[RequestTruth], list[load.SentRequest]]:
    sent: list[load.SentRequest] = []
    async with fleet(folder, *faults, scenario=scenario, retries=retries) as running:
        await load.run(replace(LOAD, url=running.url, **fields), sent.append)
    sent.sort(key=lambda each: each.index)
    truths = running.truths(sent)
    assert [truth.request_id for truth in truths] == [each.request_id for each in sent]
    for truth in truths:  # whatever goes wrong, each truth is complete
        assert all(ns >= 0 for ns in truth.phases.values()), truth
        assert sum(truth.phases.values()) == (truth.total_ns if truth.ttft_ns is None else truth.ttft_ns)
    return truths, sent


async def test_a_healthy_fleet_costs_what_the_model_says(tmp_path: Path) -> None:
    truths, sent = await run(tmp_path)
    assert {each.error for each in sent} == {None}
    for truth in truths:
        assert (truth.outcome, truth.fetch, truth.abandoned, truth.preemptions) == (TrueOutcome.OK, FetchTruth.OK, (), 0)
        phases = truth.phases
        assert phases[TruePhase.PREFILL_COMPUTE] >= SMALL.step_ns + truth.prompt_tokens * SMALL.prefill_token_ns
        assert truth.kv_bytes == truth.prompt_tokens * SMALL.kv_bytes_per_token
        assert phases[TruePhase.KV_TRANSFER] >= truth.kv_bytes / SMALL.link_bytes_per_s * 1e9
        assert phases[TruePhase.PREFILL_ADMISSION] >= 0.7 * SMALL.admission_ns
        assert phases[TruePhase.FIRST_STEP] >= SMALL.step_ns
        assert len(truth.gaps_ns) == truth.answer_tokens - 1
        assert min(truth.gaps_ns) >= SMALL.step_ns
    assert {truth.prefill_host for truth in truths} == {"p0", "p1"}
    assert max(truth.phases[TruePhase.KV_HANDSHAKE] for truth in truths) >= 0.9 * SMALL.handshake_ns  # the first one of a pair


@pytest.mark.parametrize(
    ("fault", "phase", "place", "least_ms"),
    [
        ("slow_prefill:p0:40", TruePhase.PREFILL_COMPUTE, "p0", 60),
        ("prefill_queue:p0:0.95", TruePhase.PREFILL_QUEUE, "p0", 10),
        ("slow_link:p0>d0:40", TruePhase.KV_TRANSFER, "p0>d0", 60),
        ("no_p2p:p0>d0:400000000", TruePhase.KV_TRANSFER, "p0>d0", 50),
        ("handshake_cold:p0>d0:0.3", TruePhase.KV_HANDSHAKE, "p0>d0", 60),
        ("decode_queue:d0:1", TruePhase.KV_WAIT, "d0", 12),
        ("router_slow:router:0.1", TruePhase.ROUTER, "router", 100),
        ("fetch_recomputed:p0>d0:1", TruePhase.KV_TRANSFER, "p0>d0", 50),
        ("bad_host:p1:30", TruePhase.PREFILL_COMPUTE, "p1", 60),
    ],
)
async def test_a_fault_shows_in_its_phase_at_its_place(
    tmp_path: Path, fault: str, phase: TruePhase, place: str, least_ms: int
) -> None:
    others = replace(SMALL, prompt_tokens_max=4000)  # whose prompts prefill_queue sends: two steps of 22 ms each
    truths, sent = await run(tmp_path, fault, scenario=others)
    assert {each.error for each in sent} == {None}
    hit = [truth for truth in truths if truth.place(phase) == place]
    assert len(hit) >= 4
    assert fmean(truth.phases[phase] for truth in hit) >= least_ms * MS


async def test_memory_that_others_take_makes_requests_wait(tmp_path: Path) -> None:
    tight = replace(SMALL, kv_blocks=400)
    free, _ = await run(tmp_path, scenario=tight)
    folder = tmp_path / "pressed"
    folder.mkdir()
    pressed, _ = await run(folder, "kv_pressure:d0:0.9", scenario=tight)  # room for one of them
    assert (
        max(truth.phases[TruePhase.KV_WAIT] for truth in pressed) > max(truth.answer_tokens for truth in pressed) * SMALL.step_ns
    )
    assert all(truth.outcome is TrueOutcome.OK for truth in (*free, *pressed))


async def test_a_storm_preempts_and_the_streams_go_on(tmp_path: Path) -> None:
    truths, sent = await run(tmp_path, "preemption_storm:d0:200", answer_tokens=(30, 40))
    assert sum(truth.preemptions for truth in truths) >= 5
    assert [each.error for each in sent] == [None] * 10
    assert [each.completion_tokens for each in sent] == [truth.answer_tokens for truth in truths]


async def test_a_host_that_stands_now_and_then_stalls_its_streams(tmp_path: Path) -> None:
    """The host runs for two seconds at most between two pauses.

    The streams are longer than that: a step takes two milliseconds at least.
    """
    truths, sent = await run(tmp_path, "host_pause:d0:3", requests=3, concurrency=3, answer_tokens=(1050, 1050))
    assert {each.error for each in sent} == {None}
    assert all(max(truth.gaps_ns) >= 2900 * MS for truth in truths)


async def test_an_engine_that_hangs_stalls_its_streams(tmp_path: Path) -> None:
    """The hang lasts two seconds from 4 s after the start, amid the streams.

    The streams take longer than 4 s to come that far. test_fleet_hindrance.py checks in virtual time that it hangs once: here
    the machine may pause too.
    """
    truths, sent = await run(tmp_path, "engine_hung:d0:2@4-", requests=2, concurrency=2, answer_tokens=(2050, 2050))
    assert {each.error for each in sent} == {None}
    for truth in truths:
        assert max(truth.gaps_ns) >= 1900 * MS


async def test_a_throttled_gpu_makes_single_steps_long(tmp_path: Path) -> None:
    """The throttling lasts 0.4 s from 3.6 s after the start.

    The streams begin before that and take longer.
    """
    truths, sent = await run(tmp_path, "gpu_throttled:d0:20", requests=2, concurrency=2, answer_tokens=(1850, 1850))
    assert {each.error for each in sent} == {None}
    for truth in truths:
        assert 2 * median(truth.gaps_ns) < max(truth.gaps_ns)
        assert max(truth.gaps_ns) >= 20 * SMALL.step_ns


async def test_a_client_that_reads_nothing_has_its_answer_later(tmp_path: Path) -> None:
    """One client in five is slow, the same ones in every run of a seed."""
    slow_clients_s = parse("client_slow:edge:3", SMALL.hosts()).size
    _, sent = await run(tmp_path, requests=20, concurrency=20, slow_clients_s=slow_clients_s)
    assert {each.error for each in sent} == {None}
    took = {each.index: each.duration_ns for each in sent}
    slow = [took.pop(index) for index in (10, 12, 18, 19)]
    assert min(slow) >= 3000 * MS > min(took.values())


async def test_failed_fetches_are_an_error_inside_200_and_counted(tmp_path: Path) -> None:
    truths, sent = await run(tmp_path, "fetch_failed:p0>d0:1")
    failed = [truth for truth in truths if truth.outcome is TrueOutcome.FAILED]
    assert {truth.prefill_host for truth in failed} == {"p0"}
    assert len(failed) >= 4
    for truth in failed:
        client = sent[truth.index]
        assert (client.status, client.error, client.ttft_token_ns) == (200, "InternalServerError", None)
        assert truth.fetch is FetchTruth.FAILED
        assert TruePhase.FIRST_STEP not in truth.phases


async def test_failed_fetches_that_are_recomputed_look_well_to_the_client(tmp_path: Path) -> None:
    truths, sent = await run(tmp_path, "fetch_recomputed:*:1")
    assert {each.error for each in sent} == {None}
    for truth in truths:
        assert truth.fetch is FetchTruth.RECOMPUTED
        assert truth.phases[TruePhase.FIRST_STEP] >= truth.prompt_tokens * SMALL.prefill_token_ns


@pytest.mark.parametrize(("fault", "fetch"), [("lease_expired", FetchTruth.EXPIRED), ("stale_read", FetchTruth.STALE_READ)])
async def test_kv_that_is_freed_too_early(tmp_path: Path, fault: str, fetch: FetchTruth) -> None:
    sent: list[load.SentRequest] = []
    async with fleet(tmp_path, f"{fault}:p0:0") as running:
        await load.run(replace(LOAD, url=running.url), sent.append)
        p0 = running.engines["p0"].metrics.render().decode()
        assert running.engines["p0"]._core.kv_usage == 0
    hit = [truth for truth in running.truths(sent) if truth.prefill_host == "p0"]
    assert {truth.fetch for truth in hit} == {fetch}
    assert {each.error for each in sent} == {None}
    count = float(len(hit))
    assert f'vllm:nixl_num_kv_expired_reqs_total{{engine="0",model_name="tiny"}} {count}' in p0
    late = count if fetch is FetchTruth.STALE_READ else 0.0
    assert f'vllm:nixl_num_notifications_after_expiry_total{{engine="0",model_name="tiny"}} {late}' in p0


async def test_a_refused_prompt_is_computed_elsewhere(tmp_path: Path) -> None:
    truths, sent = await run(tmp_path, "prefill_failed:p0:1")
    assert {each.error for each in sent} == {None}
    assert {truth.prefill_host for truth in truths} == {"p1"}
    retried = [truth for truth in truths if truth.abandoned]
    assert {truth.abandoned for truth in retried} == {("p0",)}
    assert all(truth.phases[TruePhase.PREFILL_ABANDONED] >= 0.7 * SMALL.admission_ns for truth in retried)


async def test_a_prompt_that_is_refused_everywhere_is_a_500(tmp_path: Path) -> None:
    truths, sent = await run(tmp_path, "prefill_failed:*:1")
    assert {(each.status, each.error) for each in sent} == {(500, "InternalServerError")}
    assert {truth.outcome for truth in truths} == {TrueOutcome.FAILED}
    _, sent = await run(tmp_path, "prefill_failed:p0:1", retries=0, id_prefix="alone")
    assert {each.status for each in sent} == {200, 500}


async def test_a_fault_that_is_over_or_to_come_does_nothing(tmp_path: Path) -> None:
    truths, _ = await run(tmp_path, "fetch_failed:*:1@900-", "prefill_failed:*:1@0-0.000001")
    assert {(truth.fetch, truth.outcome, truth.abandoned) for truth in truths} == {(FetchTruth.OK, TrueOutcome.OK, ())}


async def test_a_fault_begins_and_ends_while_the_fleet_runs(tmp_path: Path) -> None:
    sent: list[load.SentRequest] = []
    async with fleet(tmp_path, "slow_link:*:24000@0-4") as running:
        await load.run(replace(LOAD, url=running.url, requests=2), sent.append)
        await load.run(replace(LOAD, url=running.url, requests=30, id_prefix="on"), sent.append)
    truths = running.truths(sent)
    ended_ns = 4000 * MS
    early = [truth for truth in truths if truth.index < 2 and truth.request_id.startswith("load")]
    assert len(early) == 2
    assert all(truth.phases[TruePhase.KV_TRANSFER] > 300 * MS for truth in early)  # would take a minute; let go at 4 s
    after = [truth for truth in truths if truth.arrival_ns > ended_ns]
    assert after
    assert min(truth.phases[TruePhase.KV_TRANSFER] for truth in after) < 300 * MS


def test_every_fault_is_tried_here() -> None:
    text = Path(__file__).read_text(encoding="utf-8")
    clocks = {"clock_offset", "clock_drift"}  # they change the reports and not the truth: test_fleet_engine.py
    assert {name for name in FAULTS if f'"{name}:' not in text and f'("{name}"' not in text} == clocks
