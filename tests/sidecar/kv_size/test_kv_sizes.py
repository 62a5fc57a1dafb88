"""KV bytes of published models, against figures worked out by hand.

The figures come from their papers and model cards.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from handrail_doctor.kv_size.keys import ModelConfigError
from handrail_doctor.kv_size.read import read_model, shape_of
from handrail_doctor.kv_size.shape import LayerKind
from handrail_doctor.kv_size.size import Serving, Sizes, sizes

CONFIGS = Path(__file__).parents[2] / "data/model_configs"


def served(name: str, **how: Any) -> Sizes:
    return sizes(read_model(CONFIGS / f"{name}.json"), Serving(**how))


@pytest.mark.parametrize(
    ("name", "token_bytes"),
    [
        ("llama-3.1-8b", 2 * 32 * 8 * 128 * 2),
        ("llama-3.1-70b", 327_680),
        ("llama-3.1-405b", 516_096),
        ("qwen2.5-7b", 57_344),
        ("qwen3-30b-a3b", 98_304),
        ("mistral-7b-v0.1", 131_072),
        ("mixtral-8x7b-v0.1", 131_072),
        ("gemma-2-9b", 344_064),
        ("gemma-3-27b", 507_904),
        ("gemma-3-4b", 34 * 2 * 4 * 256 * 2),
        ("gemma-3n-e4b", 20 * 2 * 2 * 256 * 2),
        ("deepseek-v2-lite", 31_104),
        ("deepseek-v3", 70_272),
        ("deepseek-v3.2", 61 * (576 * 2 + 132)),
        ("gpt-oss-20b", 49_152),
        ("gpt-oss-120b", 73_728),
        ("phi-3-mini-4k", 393_216),
        ("falcon-7b", 8_192),
        ("gpt2", 36_864),
        ("opt-6.7b", 524_288),
        ("jamba-v0.1", 16_384),
        ("qwen3-next-80b-a3b", 24_576),
        ("kimi-linear-48b-a3b", 7 * 576 * 2),
        ("nemotron-h-8b", 4 * 2 * 8 * 128 * 2),
        ("llama-4-scout", 48 * 2 * 8 * 128 * 2),
        ("command-r7b", 131_072),
    ],
)
def test_bytes_of_a_token(name: str, token_bytes: int) -> None:
    found = served(name)
    assert found.token_bytes == token_bytes
    assert found.shape.known


def test_every_config_is_judged() -> None:
    """Every config file in the folder has a row above."""
    marks = test_bytes_of_a_token.pytestmark  # type: ignore[attr-defined]
    assert {name for name, _ in marks[0].args[1]} == {path.stem for path in CONFIGS.glob("*.json")}


def test_llama_70b_over_400_gbit_is_what_the_article_says() -> None:
    """A token takes 327,680 bytes, so 10,000 tokens take 3.3 GB.

    They take 66 ms over 400 Gb/s before any overhead.
    """
    request = served("llama-3.1-70b").request(10_000)
    assert request.bytes == 3_276_800_000
    assert round(request.transfer_ns(400e9 / 8) / 1e6) == 66


def test_B02_the_kv_of_8000_tokens_on_the_l40s() -> None:
    """Case B02: about 470 MB for about 8,000 tokens, so about 58 kB per token."""
    found = served("qwen2.5-7b")
    assert found.token_bytes == pytest.approx(58e3, rel=0.02)
    assert found.request(8192).bytes == pytest.approx(470e6, rel=0.001)


@pytest.mark.parametrize(
    ("name", "window", "windows", "full"),
    [
        ("mistral-7b-v0.1", 4096, 32, 0),
        ("phi-3-mini-4k", 2047, 32, 0),
        ("gemma-2-9b", 4096, 21, 21),
        ("gemma-3-27b", 1024, 52, 10),
        ("gpt-oss-120b", 128, 18, 18),
        ("command-r7b", 4097, 24, 8),
    ],
)
def test_windows_are_bounded_for_each_request(name: str, window: int, windows: int, full: int) -> None:
    found = served(name)
    counts = {layer.kind: count for layer, count in found.shape.layers}
    assert (counts.get(LayerKind.WINDOW, 0), counts.get(LayerKind.FULL, 0)) == (windows, full)
    long, longer = found.request(100_000), found.request(200_000)
    each = found.token_bytes // (windows + full)
    assert longer.bytes - long.bytes == full * each * 100_000
    assert long.bytes == full * each * 100_000 + windows * each * (-(-window // 16) + 1) * 16


def test_without_the_hybrid_manager_windows_hand_over_everything() -> None:
    found = served("gemma-3-27b", windowed=False)
    assert found.request(10_000).bytes == found.token_bytes * 10_000


def test_a_prompt_within_its_window_is_handed_over_whole() -> None:
    found = served("mistral-7b-v0.1")
    assert found.request(4096).bytes == found.token_bytes * 4096


def test_states_are_the_same_for_every_length() -> None:
    found = served("qwen3-next-80b-a3b")
    state = 36 * ((2 * 16 * 128 + 32 * 128) * 3 + 32 * 128 * 128) * 2
    assert found.state_bytes == state
    assert found.request(16).bytes == state + 16 * 24_576
    assert found.request(160_000).bytes == state + 160_000 * 24_576


@pytest.mark.parametrize(
    ("name", "tp", "moved"),
    [
        ("llama-3.1-70b", 8, 327_680),  # one head each
        ("llama-3.1-70b", 16, 655_360),  # each head twice
        ("deepseek-v3", 8, 8 * 70_272),  # the whole latent vector on every rank
        ("qwen3-next-80b-a3b", 8, 4 * 24_576),  # two heads on eight ranks
    ],
)
def test_what_tensor_parallel_ranks_move(name: str, tp: int, moved: int) -> None:
    assert served(name, tp=tp).moved_token_bytes == moved


def test_ranks_that_do_not_divide_the_heads_are_refused() -> None:
    with pytest.raises(ModelConfigError, match="8 KV heads do not divide among 3 ranks"):
        served("llama-3.1-70b", tp=3)
    with pytest.raises(ModelConfigError, match="state of Mamba 2 does not divide among 16 ranks"):
        served("nemotron-h-8b", tp=16)


@pytest.mark.parametrize(
    ("name", "kv_dtype", "token_bytes"),
    [
        ("llama-3.1-70b", "fp8", 163_840),
        ("llama-3.1-70b", "fp8_e5m2", 163_840),
        ("llama-3.1-70b", "float32", 655_360),
        ("deepseek-v3", "fp8", 35_136),
        ("deepseek-v3", "fp8_ds_mla", 61 * 656),
        ("deepseek-v3.2", "fp8_ds_mla", 61 * (656 + 132)),  # the index has its own format
    ],
)
def test_kv_formats(name: str, kv_dtype: str, token_bytes: int) -> None:
    assert served(name, kv_dtype=kv_dtype).token_bytes == token_bytes


@pytest.mark.parametrize(
    "quantised",
    [
        {"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8, "type": "float"}},
        {"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"},
        {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}},
    ],
)
def test_a_checkpoint_with_fp8_kv_is_served_so_and_reported_so(quantised: dict[str, Any]) -> None:
    config = {**json.loads((CONFIGS / "llama-3.1-8b.json").read_text()), "quantization_config": quantised}
    found = sizes(shape_of(config), Serving())
    assert (found.kv_dtype, found.token_bytes) == ("fp8", 65_536)
    assert any("the checkpoint has quantised KV" in note for note in found.notes)
    assert sizes(shape_of(config), Serving(kv_dtype="bfloat16")).token_bytes == 131_072


def test_formats_that_are_not_known_are_refused_by_name() -> None:
    with pytest.raises(ModelConfigError, match="'nvfp4' is unknown") as refused:
        served("llama-3.1-8b", kv_dtype="nvfp4")
    assert "fp8_e4m3" in refused.value.valid
    with pytest.raises(ModelConfigError, match="did you mean bfloat16"):
        served("llama-3.1-8b", kv_dtype="bflaot16")
    with pytest.raises(ModelConfigError, match="for MLA"):
        served("llama-3.1-8b", kv_dtype="fp8_ds_mla")
    with pytest.raises(ModelConfigError, match="'int4' is unknown") as refused:
        served("llama-3.1-8b", dtype="int4")
    assert refused.value.where == "--dtype"


@settings(deadline=None)
@given(
    tokens=st.integers(0, 10**7), more=st.integers(0, 10**5), name=st.sampled_from([path.stem for path in CONFIGS.glob("*.json")])
)
def test_a_longer_prompt_never_hands_over_less(tokens: int, more: int, name: str) -> None:
    found = served(name)
    assert found.request(tokens + more).bytes >= found.request(tokens).bytes
    assert found.request(tokens).bytes <= served(name, windowed=False).request(tokens).bytes


@settings(deadline=None)
@given(
    tokens=st.integers(1, 10**6),
    tp=st.sampled_from([1, 2, 4, 8]),
    name=st.sampled_from(["llama-3.1-70b", "jamba-v0.1", "nemotron-h-8b"]),
)
def test_ranks_that_divide_everything_move_as_much_as_one(tokens: int, tp: int, name: str) -> None:
    assert served(name, tp=tp).request(tokens).bytes == served(name).request(tokens).bytes


def test_the_parts_sum_to_the_whole() -> None:
    for path in CONFIGS.glob("*.json"):
        found = sizes(read_model(path), Serving(tp=1))
        request = found.request(12_345)
        assert sum(request.by_part) == request.bytes
        own = [layer for layer, _ in found.shape.layers if layer.kind is not LayerKind.INDEX]
        attends = sum(count for layer, count in found.shape.layers if layer in own)
        assert attends == found.shape.depth


def test_a_state_that_is_not_known_says_which_are() -> None:
    with pytest.raises(ModelConfigError, match="what a layer of llama keeps as its state"):
        shape_of({**json.loads((CONFIGS / "llama-3.1-8b.json").read_text()), "layer_types": ["mamba"] * 32})
