"""A fleet in virtual time: the truth of every request and each fault's effect.

The tests also cover where a fault acts and what the hosts report.
"""

from __future__ import annotations

import ast
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

import handrail_sim.emulator
from handrail_sim.emulator import scenario as scenarios
from handrail_sim.emulator.__main__ import main
from handrail_sim.emulator.faults import FAULTS, parse
from handrail_sim.emulator.observe import STARTED_UNIX_NS, EngineObservation, ProxyObservation, RouterObservation, clock, observe
from handrail_sim.emulator.scenario import Scenario
from handrail_sim.emulator.truth import FetchTruth, RequestTruth, TrueOutcome, TruePhase, excess
from handrail_sim.emulator.virtual_run import SimulationError, VirtualRequest, VirtualRunSettings, simulate
from harness.virtual_runs import shared_requests

SPLIT = scenarios.load("split")
COLLOCATED = scenarios.load("collocated")
TRACES = Path(__file__).parents[1] / "data" / "request_traces"
MS = 1_000_000


def chosen(*faults: str, scenario: Scenario = SPLIT, requests: int = 300, seed: int = 1) -> VirtualRunSettings:
    parsed = tuple(parse(text, scenario.hosts()) for text in faults)
    return VirtualRunSettings(scenario=scenario, requests=requests, seed=seed, faults=parsed)


def simulate_run(*faults: str, scenario: Scenario = SPLIT, requests: int = 300, seed: int = 1) -> list[VirtualRequest]:
    return shared_requests(chosen(*faults, scenario=scenario, requests=requests, seed=seed))


def slow(run: list[VirtualRequest]) -> Counter[tuple[TruePhase | None, str | None]]:
    """Return the requests whose first token a fault delayed."""
    counted: Counter[tuple[TruePhase | None, str | None]] = Counter()
    for one in run:
        cause, ttft_ns = one.excess, one.truth.ttft_ns
        if cause is not None and cause.ttft_ns is not None and ttft_ns is not None and cause.slow(ttft_ns - cause.ttft_ns):
            counted[cause.phase, cause.place] += 1
    return counted


def truths(run: list[VirtualRequest]) -> list[RequestTruth]:
    return [one.truth for one in run]


EVERY_FAULT = [
    "slow_prefill:p1:2",
    "prefill_queue:p0:0.4",
    "slow_link:p0>d1:20",
    "no_p2p:p0>d1:400000000",
    "handshake_cold:p1>d0:0.8",
    "kv_pressure:d0:0.975",
    "decode_queue:d0:1",
    "preemption_storm:d1:20",
    "router_slow:router:0.3",
    "fetch_failed:p0>d0:0.5",
    "fetch_recomputed:p0>d0:0.5",
    "lease_expired:p0:0.003",
    "stale_read:p0:0.003",
    "prefill_failed:p0:0.5",
    "bad_host:p1:2",
    "gpu_throttled:d0:4",
    "host_pause:d0:0.2",
    "engine_hung:d0:2@1-",
    "client_slow:edge:3",
    "clock_offset:d0:2",
    "clock_drift:p1:200",
]


def test_every_fault_is_tried_here() -> None:
    assert [text.split(":")[0] for text in EVERY_FAULT] == list(FAULTS)


@pytest.mark.parametrize("fault", [None, *EVERY_FAULT])
def test_phases_sum_to_the_time_to_first_token_whatever_goes_wrong(fault: str | None) -> None:
    for truth in truths(simulate_run(*([fault] if fault else []))):
        assert all(ns >= 0 for ns in truth.phases.values())
        if truth.outcome is TrueOutcome.OK:
            assert sum(truth.phases.values()) == truth.ttft_ns
            assert len(truth.gaps_ns) == truth.answer_tokens - 1
        elif truth.outcome is TrueOutcome.FAILED:
            assert truth.ttft_ns is None
            assert sum(truth.phases.values()) == truth.total_ns


@pytest.mark.parametrize(
    ("fault", "phase", "place"),
    [
        ("slow_prefill:p1:2", TruePhase.PREFILL_COMPUTE, "p1"),
        ("prefill_queue:p0:0.4", TruePhase.PREFILL_QUEUE, "p0"),
        ("slow_link:p0>d1:20", TruePhase.KV_TRANSFER, "p0>d1"),
        ("no_p2p:p0>d1:400000000", TruePhase.KV_TRANSFER, "p0>d1"),
        ("handshake_cold:p1>d0:0.8", TruePhase.KV_HANDSHAKE, "p1>d0"),
        ("kv_pressure:d0:0.975", TruePhase.KV_WAIT, "d0"),
        ("decode_queue:d0:1", TruePhase.KV_WAIT, "d0"),
        ("router_slow:router:0.3", TruePhase.ROUTER, "router"),
        ("fetch_recomputed:p0>d0:0.5", TruePhase.FIRST_STEP, "d0"),
        ("bad_host:p1:2", TruePhase.PREFILL_COMPUTE, "p1"),
    ],
)
def test_a_fault_shows_in_its_phase_at_its_place(fault: str, phase: TruePhase, place: str) -> None:
    counted = slow(simulate_run(fault))
    assert counted.most_common(1)[0][0] == (phase, place)
    assert counted[phase, place] >= 5
    assert counted[phase, place] >= 0.5 * counted.total()


@pytest.mark.parametrize("scenario", [SPLIT, COLLOCATED], ids=["split", "collocated"])
def test_a_healthy_fleet_answers_all(scenario: Scenario) -> None:
    run = truths(simulate_run(scenario=scenario))
    assert all(truth.outcome is TrueOutcome.OK and truth.preemptions == 0 for truth in run)
    split = scenario is SPLIT
    assert all((truth.fetch is FetchTruth.OK) == split and (TruePhase.KV_TRANSFER in truth.phases) == split for truth in run)


def test_equal_seeds_give_equal_runs() -> None:
    once, again = simulate(chosen("slow_link:*:3")), simulate(chosen("slow_link:*:3"))
    assert [(one.truth, one.excess) for one in once] == [(one.truth, one.excess) for one in again]
    assert truths(simulate_run()) != truths(simulate_run(seed=2))


def test_a_fault_that_does_nothing_changes_nothing() -> None:
    late = simulate_run("slow_prefill:*:9@90000-", "slow_link:*:1", "fetch_failed:*:0")
    assert truths(late) == truths(simulate_run())
    assert all(one.excess is not None and not one.excess.phases and one.excess.phase is None for one in late)


def test_a_fault_touches_nobody_before_its_time() -> None:
    run = simulate_run("slow_prefill:*:3@30-40")
    before = [one for one in run if one.truth.total_ns and one.truth.arrival_ns + one.truth.total_ns < 30_000 * MS]
    assert len(before) > 50
    assert all(one.excess is not None and not one.excess.phases for one in before)
    assert slow(run)


def test_clock_faults_change_the_records_and_not_the_truth() -> None:
    run = simulate_run("clock_offset:d0:2", "clock_drift:p1:200")
    assert truths(run) == truths(simulate_run())


def test_failed_fetches_end_in_errors_and_only_on_their_link() -> None:
    run = truths(simulate_run("fetch_failed:p0>d0:0.5"))
    failed = [truth for truth in run if truth.outcome is TrueOutcome.FAILED]
    on_link = [truth for truth in run if (truth.prefill_host, truth.decode_host) == ("p0", "d0")]
    assert 0.3 * len(on_link) < len(failed) < 0.7 * len(on_link)
    assert all(
        truth in on_link and truth.fetch is FetchTruth.FAILED and TruePhase.FIRST_STEP not in truth.phases for truth in failed
    )


def test_an_expired_lease_is_recomputed() -> None:
    run = simulate_run("lease_expired:p0:0.003")
    expired = [one for one in run if one.truth.fetch is FetchTruth.EXPIRED]
    assert len(expired) > 50
    assert all(one.truth.outcome is TrueOutcome.OK and one.truth.prefill_host == "p0" for one in expired)
    assert all(one.excess is not None and one.excess.outcome_changed for one in expired)


def test_a_stale_read_looks_like_any_other() -> None:
    run = simulate_run("stale_read:p0:0.003")
    stale = [one for one in run if one.truth.fetch is FetchTruth.STALE_READ]
    assert len(stale) > 50
    assert all(one.truth.outcome is TrueOutcome.OK and one.truth.prefill_host == "p0" for one in stale)
    assert all(TruePhase.KV_TRANSFER in one.truth.phases and one.truth.kv_bytes for one in stale)


def test_a_refused_prompt_is_computed_by_the_next_host() -> None:
    run = simulate_run("prefill_failed:p0:0.5")
    retried = [one for one in run if one.truth.abandoned]
    assert len(retried) > 50
    for one in retried:
        assert (one.truth.abandoned, one.truth.prefill_host, one.truth.outcome) == (("p0",), "p1", TrueOutcome.OK)
        assert one.truth.place(TruePhase.PREFILL_ABANDONED) == "p0"
        assert one.truth.phases[TruePhase.PREFILL_ABANDONED] > SPLIT.respond_ns
    assert all(one.truth.fetch is FetchTruth.OK for one in run)


def test_a_prompt_that_every_host_refuses_fails() -> None:
    failed = truths(simulate_run("prefill_failed:*:1", requests=20))
    assert {truth.outcome for truth in failed} == {TrueOutcome.FAILED}
    assert {truth.abandoned for truth in failed} == {("p0", "p1"), ("p1", "p0")}
    for truth in failed:
        assert sum(truth.phases.values()) == truth.total_ns


def test_hosts_that_refuse_say_so_and_the_edge_where_all_do() -> None:
    tried = replace(SPLIT, router_traces=True)
    for one in simulate_run("prefill_failed:p0:1", scenario=tried, requests=30):
        statement = observe(tried, one.flight, ())
        refused = [each for each in statement if isinstance(each, ProxyObservation) and each.status == 500]
        assert [each.host for each in refused] == list(one.truth.abandoned)
        calls = [each for each in statement if isinstance(each, RouterObservation)]
        assert [(each.leg, each.peer) for each in calls] == [("server", ""), ("prefill", "p1"), ("decode", one.truth.decode_host)]
        assert calls[0].start_unix_ns <= calls[1].start_unix_ns < calls[2].start_unix_ns
        if refused:
            assert calls[1].start_unix_ns - STARTED_UNIX_NS >= one.flight.abandoned[0].end_ns
    for one in simulate_run("prefill_failed:*:1", scenario=tried, requests=5):
        statement = observe(tried, one.flight, ())
        proxies = [each for each in statement if isinstance(each, ProxyObservation)]
        assert [(each.host, each.status) for each in proxies] == [("edge", 500), *((host, 500) for host in one.truth.abandoned)]
        assert [each.leg for each in statement if isinstance(each, RouterObservation)] == ["server"]


def test_a_preemption_storm_breaks_streams_at_its_host_alone() -> None:
    run = simulate_run("preemption_storm:d1:20")
    assert sum(one.truth.preemptions for one in run) > 100
    assert all(one.truth.preemptions == 0 for one in run if one.truth.decode_host == "d0")
    assert sum(one.excess is not None and one.excess.gap_ns > 50 * MS for one in run) > 50


def test_memory_that_is_all_gone_leaves_requests_hung() -> None:
    run = truths(simulate_run("kv_pressure:d0:1"))
    hung = [truth for truth in run if truth.outcome is TrueOutcome.HUNG]
    assert {truth.decode_host for truth in hung} == {"d0"}
    assert all(truth.ttft_ns is None and truth.total_ns is None for truth in hung)


def test_prefill_breaks_streams_when_collocated_less_in_chunks_and_not_when_split() -> None:
    def worst(scenario: Scenario) -> int:
        busy = replace(scenario, prompt_tokens_min=3500, answer_tokens_min=40, answer_tokens_max=80)
        gaps = sorted(gap for truth in truths(simulate_run(scenario=busy)) for gap in truth.gaps_ns)
        return gaps[len(gaps) * 99 // 100]

    split, chunked, whole = worst(SPLIT), worst(COLLOCATED), worst(scenarios.load("collocated-unchunked"))
    assert split < 20 * MS
    assert 80 * MS < chunked < 150 * MS  # a chunk of 2,048 tokens
    assert whole > 1.5 * chunked


def test_shared_beginnings_are_neither_computed_nor_moved_twice() -> None:
    run = truths(simulate_run(scenario=replace(scenarios.load("prefixes"), prefix_groups=5)))
    hits = [truth for truth in run if truth.cached_tokens]
    assert len(hits) > 200
    assert sum(truth.kv_bytes < truth.prompt_tokens * SPLIT.kv_bytes_per_token for truth in run) > 200


def test_kv_that_goes_back_spares_p_the_answers_of_earlier_turns() -> None:
    turns = scenarios.load("turns")
    back, kept = truths(simulate_run(scenario=turns)), truths(simulate_run(scenario=replace(turns, kv_return=False)))
    assert all(one.cached_tokens >= other.cached_tokens for one, other in zip(back, kept, strict=True))
    assert sum(one.cached_tokens for one in back) > 1.1 * sum(one.cached_tokens for one in kept) > 0


def test_the_published_traces_can_be_replayed() -> None:
    for name in ("AzureLLMInferenceTrace_conv_first200.csv", "mooncake_conversation_first100.jsonl"):
        run = truths(simulate(VirtualRunSettings(scenario=SPLIT, requests=60, trace=TRACES / name, rate=0.5)))
        assert all(truth.outcome is TrueOutcome.OK for truth in run)


def test_a_run_that_is_impossible_raises(tmp_path: Path) -> None:
    with pytest.raises(SimulationError, match="KV blocks"):
        simulate(VirtualRunSettings(scenario=replace(SPLIT, kv_blocks=100), requests=50))
    with pytest.raises(SimulationError, match="ends in one of"):
        simulate(VirtualRunSettings(scenario=SPLIT, requests=5, trace=tmp_path / "trace.parquet"))


def test_two_different_requests_are_not_compared() -> None:
    one, other = truths(simulate_run(requests=2))
    with pytest.raises(ValueError, match="not the same request"):
        excess(one, other)


def test_hosts_say_what_is_true_by_their_own_clocks() -> None:
    faults = tuple(parse(text, SPLIT.hosts()) for text in ("clock_offset:d0:2", "clock_drift:d0:1000"))
    for one in simulate(VirtualRunSettings(scenario=SPLIT, requests=50, faults=faults)):
        statement = observe(SPLIT, one.flight, faults)
        truth, phases = one.truth, one.truth.phases
        assert [item.host for item in statement] == ["edge", *[truth.prefill_host] * 2, *[truth.decode_host] * 2]
        edge, prefill_proxy, prefill, decode_proxy, decode = statement
        assert isinstance(edge, ProxyObservation)
        assert (edge.first_token_ns, edge.arrival_unix_ns) == (truth.ttft_ns, STARTED_UNIX_NS + truth.arrival_ns)
        assert isinstance(prefill, EngineObservation)
        assert (prefill.queue_ns, prefill.prefill_ns) == (phases[TruePhase.PREFILL_QUEUE], phases[TruePhase.PREFILL_COMPUTE])
        assert isinstance(prefill_proxy, ProxyObservation)
        assert prefill_proxy.first_token_ns is None
        assert isinstance(decode, EngineObservation)
        assert isinstance(decode_proxy, ProxyObservation)
        waits = (TruePhase.KV_WAIT, TruePhase.KV_HANDSHAKE, TruePhase.KV_TRANSFER, TruePhase.KV_NOTICE, TruePhase.DECODE_QUEUE)
        drift = 1.001 if truth.decode_host == "d0" else 1.0
        assert decode.queue_ns == pytest.approx(sum(phases[phase] for phase in waits) * drift, abs=1)
        assert decode.prefill_ns == pytest.approx(phases[TruePhase.FIRST_STEP] * drift, abs=1)
        ahead = decode_proxy.arrival_unix_ns - STARTED_UNIX_NS - (one.flight.decode_arrival_ns or 0)
        assert ahead == (0 if drift == 1.0 else 2_000 * MS + round((one.flight.decode_arrival_ns or 0) / 1000))


def test_no_clocks_are_compared_to_tell_the_router_s_part() -> None:
    for one in simulate_run("clock_offset:p0:-2", requests=50):
        edge, prefill, _, decode, _ = observe(SPLIT, one.flight, ())
        assert isinstance(edge, ProxyObservation)
        assert isinstance(prefill, ProxyObservation)
        assert isinstance(decode, ProxyObservation)
        rest = (edge.first_token_ns or 0) - (prefill.end_ns or 0) - (decode.first_token_ns or 0)
        assert rest == one.truth.phases[TruePhase.ROUTER] + one.truth.phases[TruePhase.HOPS]


def test_a_failed_load_says_what_vllm_says_of_it() -> None:
    run = simulate_run("fetch_failed:*:1", requests=20)
    for one in run:
        statement = observe(SPLIT, one.flight, ())
        assert isinstance(statement[-1], EngineObservation)
        assert statement[-1].queue_ns < -86_400_000 * MS
        assert statement[-1].completion_tokens == 0
        edge = statement[0]
        assert isinstance(edge, ProxyObservation)
        assert (edge.error, edge.status, edge.first_token_ns) == (True, 200, None)


def test_a_hung_request_is_not_reported_as_ended() -> None:
    hung = next(one for one in simulate_run("kv_pressure:d0:1") if one.truth.outcome is TrueOutcome.HUNG)
    statement = observe(SPLIT, hung.flight, ())
    edge, decode = statement[0], statement[-1]
    assert isinstance(edge, ProxyObservation)
    assert isinstance(decode, ProxyObservation)
    assert edge.end_ns is None
    assert decode.end_ns is None


def test_a_clock_is_its_host_s() -> None:
    faults = [parse("clock_offset:edge:-0.5", SPLIT.hosts()), parse("clock_drift:*:10", SPLIT.hosts())]
    assert clock("edge", faults).unix_ns(1_000_000 * MS) == STARTED_UNIX_NS - 500 * MS + 1_000_010 * MS
    assert clock("p0", faults).elapsed_ns(1_000_000) == 1_000_010


def test_the_command_prints_a_line_a_request(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--requests", "5", "--seed", "3", "--fault", "router_slow:router:0.5", "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["truth"]["index"] for line in lines] == [0, 1, 2, 3, 4]
    assert all(line["excess"]["phase"] == "router" and line["excess"]["place"] == "router" for line in lines)
    assert {item["source"] for item in lines[0]["observed"]} == {"ProxyObservation", "EngineObservation"}


def test_the_command_prints_figures(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--requests", "20", "--fault", "fetch_failed:*:1"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert (figures["requests"], figures["outcomes"]["failed"], figures["ttft_ms"]) == (20, 20, None)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--fault", "slow:p0:2"], "valid: slow_prefill"),
        (["--scenario", "nowhere"], "neither a file nor one of"),
        (["--trace", "nowhere.csv"], "nowhere.csv"),
    ],
)
def test_the_command_says_what_is_wrong(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *arguments]) == 1
    assert says in capsys.readouterr().err


def test_the_fleet_does_not_import_handrail() -> None:
    for path in Path(handrail_sim.emulator.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            assert not [name for name in names if name.split(".")[0] in ("handrail", "handrail_collector")], path
