"""The small parts of a virtual fleet.

They are links, prefix caches, noise, costs, scenarios and workloads.
"""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise
from pathlib import Path
from statistics import fmean, pstdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from handrail_sim.emulator import scenario as scenarios
from handrail_sim.emulator.costs import Costs, ForwardPass
from handrail_sim.emulator.kv import PrefixCache
from handrail_sim.emulator.noise import normal, uniform
from handrail_sim.emulator.scenario import Scenario, ScenarioError
from handrail_sim.emulator.wire import EmulatedLink
from handrail_sim.emulator.workload import Arrival, TraceError, generate, plans, read_azure, read_mooncake, repeat

S = 1_000_000_000
TRACES = Path(__file__).parents[1] / "data" / "request_traces"


def drain(link: EmulatedLink) -> list[tuple[str, int]]:
    arrived = []
    while (at_ns := link.next_ns()) is not None:
        arrived += [(name, at_ns) for name in link.finished(at_ns)]
    return arrived


def test_one_transfer_has_the_link_to_itself() -> None:
    link = EmulatedLink(470e6 / 1.3)
    link.start("a", 470_000_000, 0)
    assert drain(link) == [("a", 1_300_000_000)]


def test_transfers_at_once_share_the_link() -> None:
    link = EmulatedLink(100.0)
    link.start("a", 100, 0)
    link.start("b", 300, S // 2)  # a has 50 left; both get 50 a second until a is done at 1.5 s, b has 250 left
    assert drain(link) == [("a", 3 * S // 2), ("b", 4 * S)]


def test_transfers_in_turn_have_the_link_to_themselves() -> None:
    link = EmulatedLink(100.0, in_turn=True)
    link.start("a", 100, 0)
    link.start("b", 300, S // 2)
    link.start("c", 0, S // 2)
    assert drain(link) == [("a", S), ("b", 4 * S), ("c", 4 * S)]


def test_a_rate_holds_from_when_it_is_set() -> None:
    link = EmulatedLink(100.0)
    link.start("a", 100, 0)
    link.set_rate(10.0, S // 2)
    assert drain(link) == [("a", 11 * S // 2)]


@given(
    st.lists(st.tuples(st.integers(0, 10**9), st.integers(0, 3 * S)), min_size=1, max_size=8),
    st.floats(1e6, 1e11),
    st.booleans(),
)
def test_all_that_is_sent_arrives_once_and_no_faster_than_the_link_can(
    sends: list[tuple[int, int]], rate: float, in_turn: bool
) -> None:
    link = EmulatedLink(rate, in_turn=in_turn)
    arrived: list[tuple[str, int]] = []
    for index, (size, at_ns) in enumerate(sorted(sends, key=lambda send: send[1])):
        while (next_ns := link.next_ns()) is not None and next_ns <= at_ns:
            arrived += [(name, next_ns) for name in link.finished(next_ns)]
        link.start(str(index), size, at_ns)
    arrived += drain(link)
    assert sorted(name for name, _ in arrived) == sorted(str(index) for index in range(len(sends)))
    first = min(at_ns for _, at_ns in sends)
    total = sum(size for size, _ in sends)
    assert (max(at_ns for _, at_ns in arrived) - first + len(sends) + 2) * rate / 1e9 >= total * (1 - 1e-9)


def test_a_prefix_is_found_up_to_its_first_missing_block_and_never_whole() -> None:
    cache = PrefixCache(4)
    cache.keep([1, 2, 3])
    assert cache.match([1, 2, 9, 3], 2048) == 1024
    assert cache.match([9, 1], 1024) == 0
    assert cache.match([1, 2], 1024) == 1023
    cache.keep([4, 5])  # 1 and 2 were used last: 3 goes
    assert cache.match([1, 2, 3], 1536) == 1024


def test_noise_belongs_to_its_key() -> None:
    assert uniform(1, 2, 3) == uniform(1, 2, 3) != uniform(1, 3, 2)
    draws = [uniform(7, index) for index in range(4000)]
    assert fmean(draws) == pytest.approx(0.5, abs=0.02)
    normals = [normal(7, index * 1_000_003) for index in range(4000)]
    assert fmean(normals) == pytest.approx(0, abs=0.06)
    assert pstdev(normals) == pytest.approx(1, abs=0.06)


def test_a_step_costs_what_it_does() -> None:
    costs = Costs(Scenario(noise_share=0.0, prefill_hosts=1), seed=0, clock=lambda: 0)
    alone = costs.step_ns(ForwardPass(decoding=1, prefill_tokens=0, running=1, context_tokens=1000))
    both = costs.step_ns(ForwardPass(decoding=1, prefill_tokens=1000, running=2, context_tokens=1000, prefill_pairs=500_000))
    assert alone == 10_000_000 + 60_000 + 400
    assert both - alone == 1000 * 50_000 + 500_000
    costs.prefill_factor, costs.step_factor = 2.0, 3.0
    again = costs.step_ns(ForwardPass(decoding=1, prefill_tokens=1000, running=2, context_tokens=1000, prefill_pairs=500_000))
    assert again == 3 * (alone + 2 * (both - alone))


def test_a_step_waits_for_what_is_still_being_posted() -> None:
    now_ns = 0
    scenario = Scenario(noise_share=0.0, prefill_hosts=1, load_post_token_ns=1000, decode_request_ns=0)
    costs = Costs(scenario, seed=0, clock=lambda: now_ns)
    step = ForwardPass(decoding=1, prefill_tokens=0, running=1)
    costs.post(8000)  # 8 ms, behind the step that has begun
    costs.post(4000)  # 4 ms more, when the first is posted
    now_ns = 9_000_000
    assert costs.step_ns(step) == scenario.step_ns + 3_000_000
    now_ns = 12_000_000
    assert costs.step_ns(step) == scenario.step_ns


@pytest.mark.parametrize("name", scenarios.bundled())
def test_bundled_scenarios_load(name: str) -> None:
    assert scenarios.load(name).name == name


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({"layout": "both"}, "valid: split, collocated"),
        ({"layouts": "split"}, "unknown key"),
        ({"layout": "split"}, "prefill-hosts is 1 or more"),
        ({"layout": "collocated", "prefill-hosts": 2}, "not given when collocated"),
        ({"layout": "collocated", "batch-tokens": 0}, "1 or more"),
        ({"layout": "collocated", "batch-tokens": "many"}, "type int"),
        ({"layout": "collocated", "batch-tokens": True}, "type int"),
        ({"layout": "collocated", "arrivals-per-s": 0}, "above 0"),
        ({"layout": "collocated", "prompt-tokens-min": 9000}, "prompt-tokens-min"),
        ({"layout": "collocated", "answer-tokens-min": 0}, "answer-tokens-min"),
        ({"layout": "collocated", "noise-share": 0.9}, "noise-share"),
        ({"layout": "collocated", "prefix-tokens": 100}, "multiple of 512"),
        ({"layout": "collocated", "turns": 0}, "turns is 1 or more"),
        ({"layout": "collocated", "turns": 2, "prefix-groups": 3}, "1 where there are prefix-groups"),
        ({"layout": "collocated", "turn-gap-s": 0}, "turn-gap-s"),
        ({"layout": "collocated", "routing": "least-load"}, "valid: random, round-robin"),
        ({"layout": "split", "prefill-hosts": 1, "link-order": "fair"}, "valid: shared, in-turn"),
        ({"layout": "split", "prefill-hosts": 1, "load-post-token-ns": -1}, "load-post-token-ns is 0 or more"),
    ],
)
def test_a_wrong_scenario_is_refused_with_what_is_valid(content: dict[str, object], says: str) -> None:
    with pytest.raises(ScenarioError, match=says):
        scenarios.parse("mine", content)


def test_a_scenario_is_a_file_too(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("layout: collocated\nlink-bytes-per-s: 1000000000\n")
    assert scenarios.load(str(path)) == Scenario(name="mine", layout="collocated", link_bytes_per_s=1e9)
    path.write_text("- a list\n")
    with pytest.raises(ScenarioError, match="mapping"):
        scenarios.load(str(path))
    with pytest.raises(ScenarioError, match="neither a file nor one of collocated"):
        scenarios.load("nowhere")


def test_equal_seeds_ask_the_same() -> None:
    scenario = scenarios.load("prefixes")
    assert generate(scenario, 50, 3) == generate(scenario, 50, 3) != generate(scenario, 50, 4)
    assert plans(scenario, generate(scenario, 50, 3), 3) == plans(scenario, generate(scenario, 50, 3), 3)
    rate = 2000 / (generate(scenario, 2000, 1)[-1].at_ns / S)
    assert rate == pytest.approx(scenario.arrivals_per_s, rel=0.1)


def test_requests_spread_over_all_pairs_of_hosts() -> None:
    scenario = scenarios.load("split")
    pairs = [(plan.prefill_host, plan.decode_host) for plan in plans(scenario, generate(scenario, 400, 0), 0)]
    assert all(pairs.count(pair) > 60 for pair in [("p0", "d0"), ("p0", "d1"), ("p1", "d0"), ("p1", "d1")])


@pytest.mark.parametrize("layout", ["split", "collocated"])
def test_round_robin_gives_every_pair_of_hosts_the_same(layout: str) -> None:
    hosts = {"prefill_hosts": 2, "decode_hosts": 3} if layout == "split" else {"decode_hosts": 3}
    scenario = Scenario(layout=layout, routing="round-robin", **hosts)  # type: ignore[arg-type]
    workload_requests = plans(scenario, generate(scenario, 600, 0), 0)
    counts = Counter((plan.prefill_host, plan.decode_host) for plan in workload_requests)
    assert set(counts.values()) == ({100} if layout == "split" else {200})
    assert len(counts) == (6 if layout == "split" else 3)
    assert len({plan.prefill_host for plan in workload_requests[: len(scenario.hosts().prefill)]}) == len(
        scenario.hosts().prefill
    )


def test_turns_of_a_conversation_grow_and_stay_on_their_hosts() -> None:
    scenario = scenarios.load("turns")
    workload_requests = plans(scenario, generate(scenario, 400, 0), 0)
    assert [plan.arrival.at_ns for plan in workload_requests] == sorted(plan.arrival.at_ns for plan in workload_requests)
    turns = [plan for plan in workload_requests if plan.arrival.conversation == 3]
    assert len(turns) == 4
    assert len({(plan.prefill_host, plan.decode_host) for plan in turns}) == 1
    for before, after in pairwise(plan.arrival for plan in turns):
        assert after.prompt_tokens == before.prompt_tokens + before.answer_tokens + scenario.turn_tokens
        known = before.blocks + before.answer_blocks
        assert after.blocks[: len(known)] == known
        assert after.at_ns - before.at_ns == pytest.approx(30 * S, abs=2)


def test_azure_s_trace() -> None:
    rows = read_azure((TRACES / "AzureLLMInferenceTrace_conv_first200.csv").read_text().splitlines())
    assert len(rows) == 200
    assert rows[:2] == [Arrival(0, 374, 44), Arrival(4_314_579_000, 396, 109)]


def test_mooncake_s_trace() -> None:
    rows = read_mooncake((TRACES / "mooncake_conversation_first100.jsonl").read_text().splitlines())
    assert len(rows) == 100
    assert rows[0] == Arrival(0, 6758, 500, tuple(range(14)))
    assert len(rows[0].blocks) * 512 >= rows[0].prompt_tokens


@pytest.mark.parametrize("line", ["2023-11-16 18:17:03.97,1", "yesterday,1,2", "2023-11-16 18:17:03.97,x,2"])
def test_a_broken_row_of_azure_s_is_named(line: str) -> None:
    with pytest.raises(TraceError, match="line 2"):
        read_azure(["TIMESTAMP,ContextTokens,GeneratedTokens", line])


@pytest.mark.parametrize("line", ["{", "[]", "{}", '{"timestamp": 0, "input_length": 1, "output_length": null, "hash_ids": []}'])
def test_a_broken_row_of_mooncake_s_is_named(line: str) -> None:
    with pytest.raises(TraceError, match="line 1"):
        read_mooncake([line])


def test_a_trace_is_sorted_begun_again_and_sped_up() -> None:
    rows = [Arrival(2 * S, 5, 1), Arrival(0, 4, 1)]
    random.Random(0).shuffle(rows)
    assert [row.at_ns for row in repeat(rows, 4, 1.0)] == [0, 2 * S, 3 * S, 5 * S]
    assert [row.at_ns for row in repeat(rows, 2, 2.0)] == [0, S]
    with pytest.raises(TraceError, match="no rows"):
        repeat([], 1, 1.0)
