"""The latency model: means, bounds, load, speed, repeatability; and random text."""

from __future__ import annotations

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from handrail_sim.emulator.costs import ForwardPass
from handrail_sim.emulator.profile import LatencyModel, load
from handrail_sim.emulator.text import TokenStream, plan, prefix_blocks, seed_of, tokenize

PER_TOKEN = load("8b-h100-balanced-per-token")
CONSTANT = load("8b-h100-balanced-constant")


def test_a_lone_decode_step_takes_the_inter_token_latency() -> None:
    model = LatencyModel(PER_TOKEN, seed=1)
    steps = [model.step_ns(ForwardPass(decoding=1, prefill_tokens=0, running=1)) for _ in range(2000)]
    assert statistics.mean(steps) == pytest.approx(12e6, rel=0.02)
    assert statistics.stdev(steps) == pytest.approx(2e6, rel=0.15)


@pytest.mark.parametrize(
    ("profile", "tokens", "expected_ns"),
    [(PER_TOKEN, 100, 55e6), (PER_TOKEN, 1000, 280e6), (CONSTANT, 100, 100e6), (CONSTANT, 1000, 100e6)],
    ids=["per token, short", "per token, long", "constant, short", "constant, long"],
)
def test_prefill_by_calculator(profile: object, tokens: int, expected_ns: float) -> None:
    model = LatencyModel(profile, seed=1)  # type: ignore[arg-type]
    steps = [model.step_ns(ForwardPass(decoding=0, prefill_tokens=tokens, running=1)) for _ in range(500)]
    assert statistics.mean(steps) == pytest.approx(expected_ns, rel=0.05)


def test_a_prefill_in_the_batch_stalls_the_decodes() -> None:
    model = LatencyModel(PER_TOKEN, seed=1)
    assert min(model.step_ns(ForwardPass(decoding=4, prefill_tokens=2000, running=5)) for _ in range(100)) > 400e6


def test_a_full_batch_takes_the_load_factor_longer() -> None:
    alone, full = LatencyModel(PER_TOKEN, seed=3), LatencyModel(PER_TOKEN, seed=3)
    one = alone.step_ns(ForwardPass(decoding=1, prefill_tokens=0, running=1))
    many = full.step_ns(ForwardPass(decoding=16, prefill_tokens=0, running=16))
    assert many == pytest.approx(2.0 * one, rel=1e-6)


def test_transfers_by_calculator() -> None:
    assert LatencyModel(PER_TOKEN, seed=1).transfer_ns(1000) == pytest.approx(3e6, rel=0.7)
    assert LatencyModel(CONSTANT, seed=1).transfer_ns(1000) == pytest.approx(2e6, rel=0.7)
    assert LatencyModel(PER_TOKEN, seed=1).transfer_ns(0) == 0


@given(seed=st.integers(0, 1000), speed=st.floats(0.1, 100), running=st.integers(1, 40), tokens=st.integers(0, 8192))
def test_draws_are_positive_bounded_and_repeatable(seed: int, speed: float, running: int, tokens: int) -> None:
    draws = [
        LatencyModel(PER_TOKEN, seed, speed).step_ns(ForwardPass(decoding=1, prefill_tokens=tokens, running=running))
        for _ in range(2)
    ]
    assert draws[0] == draws[1]
    longest = 1.7 * max(12e6, 30e6 + tokens * 250e3) * 2.0 / speed
    assert 1 <= draws[0] <= longest + 1


def test_speed_must_be_above_zero() -> None:
    with pytest.raises(ValueError, match="above 0"):
        LatencyModel(PER_TOKEN, seed=1, speed=0)


@given(seed=st.integers(0, 2**64 - 1), cuts=st.lists(st.integers(1, 5), min_size=1, max_size=30))
def test_text_does_not_depend_on_how_tokens_are_grouped(seed: int, cuts: list[int]) -> None:
    whole, parts = TokenStream(seed), TokenStream(seed)
    grouped = "".join(parts.take(count, last=index == len(cuts) - 1) for index, count in enumerate(cuts))
    assert whole.take(sum(cuts), last=True) == grouped


def test_some_tokens_have_no_text() -> None:
    stream = TokenStream(1)
    texts = [stream.take(1, last=False) for _ in range(1000)]
    assert 5 < texts.count("") < 100


def test_plans_end_where_they_must() -> None:
    assert plan(1, max_tokens=50, min_tokens=0, ignore_eos=True).tokens == 50
    made = [plan(seed, max_tokens=4000, min_tokens=7, ignore_eos=False) for seed in range(200)]
    assert {each.finish_reason for each in made} == {"stop"}
    assert min(each.tokens for each in made) >= 7
    assert plan(1, max_tokens=1, min_tokens=0, ignore_eos=False).finish_reason == "length"


def test_prompts_are_counted_and_seeded() -> None:
    assert tokenize("") == (0, ())
    assert tokenize("the first prompt") == (3, ())
    assert tokenize("prefilling, mostly!") == (5, ())
    assert seed_of("a", 0) == seed_of("a", 0) != seed_of("a", 1)


def test_equal_beginnings_have_equal_blocks() -> None:
    words = [f"w{index}" for index in range(2000)]
    tokens, blocks = tokenize(" ".join(words))
    assert len(blocks) == tokens // 512
    changed = tokenize(" ".join([*words[:700], "other", *words[701:]]))[1]
    assert (blocks[0] == changed[0], blocks[-1] == changed[-1]) == (True, False)
    ids = list(range(1100))
    assert len(prefix_blocks(ids)) == 2
    assert prefix_blocks(ids)[:1] == prefix_blocks(ids[:512]) != prefix_blocks(ids[1:513])
    assert prefix_blocks(ids[:511]) == ()
