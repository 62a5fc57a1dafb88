"""Read a model's config.json: other key names, other layer rules, and nonsense.

The tests also check the messages about unknown values.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from handrail_doctor.kv_size.keys import ModelConfigError
from handrail_doctor.kv_size.read import read_model, shape_of
from handrail_doctor.kv_size.shape import LayerKind, ModelShape
from handrail_doctor.kv_size.size import Serving, sizes

PLAIN: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "torch_dtype": "bfloat16",
}


def config(**more: Any) -> dict[str, Any]:
    """Return ``PLAIN`` with other keys; None removes a key."""
    return {name: value for name, value in {**PLAIN, **more}.items() if value is not None}


def kinds(shape: ModelShape) -> dict[LayerKind, int]:
    found: dict[LayerKind, int] = {}
    for layer, count in shape.layers:
        found[layer.kind] = found.get(layer.kind, 0) + count
    return found


@pytest.mark.parametrize(
    ("given", "heads", "dim"),
    [
        pytest.param({}, 4, 64, id="as-llama-writes-them"),
        pytest.param({"head_dim": 96}, 4, 96, id="head-dim-of-its-own"),
        pytest.param({"num_key_value_heads": None}, 16, 64, id="none-given-one-for-each"),
        pytest.param({"num_key_value_heads": None, "multi_query": True}, 1, 64, id="multi-query"),
        pytest.param({"num_key_value_heads": None, "n_head_kv": 2}, 2, 64, id="falcon-of-old"),
        pytest.param({"num_key_value_heads": None, "multi_query_group_num": 2, "kv_channels": 32}, 2, 32, id="chatglm"),
        pytest.param({"num_key_value_heads": None, "attn_config": {"kv_n_heads": 8}}, 8, 64, id="dbrx"),
        pytest.param({"model_type": "gpt_bigcode", "num_key_value_heads": None}, 1, 64, id="bigcode-is-multi-query-unless-told"),
        pytest.param(
            {
                "model_type": "falcon",
                "num_key_value_heads": None,
                "new_decoder_architecture": True,
                "num_kv_heads": 8,
                "multi_query": True,
            },
            8,
            64,
            id="falcon-40b-ignores-multi-query",
        ),
    ],
)
def test_kv_heads_by_their_many_names(given: dict[str, Any], heads: int, dim: int) -> None:
    ((layer, count),) = shape_of(config(**given)).layers
    assert (layer.kind, count, layer.kv_heads, layer.key_dim, layer.value_dim) == (LayerKind.FULL, 8, heads, dim, dim)


def test_values_may_be_narrower_than_keys() -> None:
    found = sizes(shape_of(config(head_dim=192, v_head_dim=128)), Serving())
    assert found.token_bytes == 8 * 4 * (192 + 128) * 2
    assert "(192 + 128)" in found.parts[0].arithmetic


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        pytest.param(
            {"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 4096}, {LayerKind.FULL: 8}, id="qwen-off"
        ),
        pytest.param(
            {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 6},
            {LayerKind.FULL: 6, LayerKind.WINDOW: 2},
            id="qwen-on-from-a-layer",
        ),
        pytest.param({"model_type": "mistral", "sliding_window": 4096}, {LayerKind.WINDOW: 8}, id="mistral"),
        pytest.param({"model_type": "mistral", "sliding_window": None}, {LayerKind.FULL: 8}, id="mistral-of-later"),
        pytest.param({"model_type": "mistral", "sliding_window": 0}, {LayerKind.FULL: 8}, id="a-window-of-0-is-off"),
        pytest.param({"model_type": "olmo3"}, {LayerKind.WINDOW: 6, LayerKind.FULL: 2}, id="olmo3"),
        pytest.param(
            {"model_type": "exaone4", "sliding_window": 4096, "sliding_window_pattern": "LLLG"},
            {LayerKind.WINDOW: 6, LayerKind.FULL: 2},
            id="exaone-by-letters",
        ),
        pytest.param({"model_type": "exaone4", "sliding_window": None}, {LayerKind.FULL: 8}, id="exaone-without"),
        pytest.param(
            {"layer_types": ["sliding_attention", "full_attention"] * 4, "sliding_window": 512, "model_type": "gemma3_text"},
            {LayerKind.WINDOW: 4, LayerKind.FULL: 4},
            id="layer-types-win-over-the-rule",
        ),
        pytest.param(
            {"model_type": "llama4", "attention_chunk_size": 8192, "no_rope_layer_interval": 4},
            {LayerKind.CHUNK: 6, LayerKind.FULL: 2},
            id="llama4-by-interval",
        ),
        pytest.param({"model_type": "llama4"}, {LayerKind.FULL: 8}, id="llama4-without-chunks"),
        pytest.param({"num_kv_shared_layers": 3}, {LayerKind.FULL: 5, LayerKind.SHARED: 3}, id="the-last-layers-share"),
        pytest.param(
            {"use_cla": True, "cla_share_factor": 2}, {LayerKind.FULL: 4, LayerKind.SHARED: 4}, id="every-second-layer-shares"
        ),
        pytest.param(
            {
                "model_type": "lfm2",
                "full_attn_idxs": [2, 5],
                "conv_dim": 1024,
                "conv_L_cache": 3,
            },
            {LayerKind.STATE: 6, LayerKind.FULL: 2},
            id="lfm2",
        ),
        pytest.param(
            {
                "model_type": "falcon_h1",
                "mamba_n_heads": 32,
                "mamba_d_head": 64,
                "mamba_d_state": 128,
                "mamba_d_ssm": 2048,
                "mamba_n_groups": 1,
            },
            {LayerKind.STATE: 8, LayerKind.FULL: 8},
            id="falcon-h1-does-both-in-each-layer",
        ),
        pytest.param(
            {"model_type": "bamba", "attn_layer_indices": [3], "mamba_n_heads": 32, "mamba_d_head": "auto", "mamba_d_state": 128},
            {LayerKind.STATE: 7, LayerKind.FULL: 1},
            id="bamba",
        ),
        pytest.param(
            {"model_type": "falcon_mamba", "state_size": 16, "intermediate_size": 2048}, {LayerKind.STATE: 8}, id="pure-mamba"
        ),
        pytest.param(
            {"model_type": "gemma4_text", "global_head_dim": 512, "num_global_key_value_heads": 2, "head_dim": 256},
            {LayerKind.WINDOW: 6, LayerKind.FULL: 2},
            id="gemma4",
        ),
    ],
)
def test_which_layer_does_what(given: dict[str, Any], expected: dict[LayerKind, int]) -> None:
    assert kinds(shape_of(config(**given))) == expected


def test_gemma4_has_wider_heads_where_it_sees_everything() -> None:
    shape = shape_of(config(model_type="gemma4_text", global_head_dim=512, num_global_key_value_heads=2, head_dim=256))
    dims = {layer.kind: (layer.kv_heads, layer.key_dim) for layer, _ in shape.layers}
    assert dims == {LayerKind.WINDOW: (4, 256), LayerKind.FULL: (2, 512)}


def test_the_text_part_of_a_multi_modal_model_is_read() -> None:
    whole = {
        "architectures": ["SomeVisionModel"],
        "model_type": "some_vl",
        "text_config": config(),
        "vision_config": {"hidden_size": 3},
    }
    shape = shape_of(whole)
    assert (shape.architecture, shape.model_type, shape.depth, shape.known) == ("SomeVisionModel", "llama", 8, True)
    assert shape_of({"thinker_config": {"text_config": config()}}).depth == 8


def test_an_unknown_architecture_is_read_as_a_plain_one_and_reported_so() -> None:
    shape = shape_of(config(architectures=["NovelForCausalLM"], model_type="novel"))
    assert not shape.known
    assert sizes(shape, Serving()).token_bytes == 8 * 2 * 4 * 64 * 2
    assert any("NovelForCausalLM" in note and "every layer attends" in note for note in shape.assumed)


def test_fields_that_an_unknown_architecture_leaves_out_are_reported() -> None:
    shape = shape_of(config(model_type="novel", num_key_value_heads=None, torch_dtype=None))
    assert [note.split(" ")[0] for note in shape.assumed] == ["dtype", "num_key_value_heads", "architecture"]


@pytest.mark.parametrize(
    "key", ["mamba_d_state", "ssm_state_size", "linear_num_key_heads", "attn_type_list", "compress_ratios", "swa_heads"]
)
def test_an_unknown_architecture_with_other_layers_is_refused(key: str) -> None:
    with pytest.raises(ModelConfigError, match=f"'novel' is unknown, and {key} show") as refused:
        shape_of(config(model_type="novel", **{key: 16}))
    assert "docs/kv-size.md" in refused.value.valid


def test_an_unknown_architecture_with_a_latent_is_taken_for_mla_and_reported_so() -> None:
    shape = shape_of(config(model_type="novel", kv_lora_rank=512, qk_rope_head_dim=64))
    assert kinds(shape) == {LayerKind.MLA: 8}
    assert any("so the size assumes MLA" in note for note in shape.assumed)


def test_minicpm3_is_not_served_as_mla() -> None:
    shape = shape_of(config(model_type="minicpm3", kv_lora_rank=256, qk_nope_head_dim=64, qk_rope_head_dim=32, v_head_dim=64))
    ((layer, _),) = shape.layers
    assert (layer.kind, layer.key_dim, layer.value_dim) == (LayerKind.FULL, 96, 96)


def test_an_encoder_decoder_is_refused() -> None:
    with pytest.raises(ModelConfigError, match="cross-attention"):
        shape_of(config(is_encoder_decoder=True))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"num_hidden_layers": None}, "num_hidden_layers is missing"),
        ({"num_hidden_layers": "32"}, "num_hidden_layers is '32': must be a whole number"),
        ({"num_hidden_layers": -1}, "must be a whole number from 1"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"num_hidden_layers": 10**6}, "must be at most 10000"),
        ({"num_attention_heads": 10**30}, "must be a whole number from 1 to 1000000000"),
        ({"num_attention_heads": None}, "num_attention_heads is missing"),
        ({"hidden_size": 1000}, "hidden_size 1000 is no multiple of num_attention_heads 16"),
        ({"hidden_size": float("nan")}, "hidden_size is nan"),
        ({"layer_types": ["full_attention"]}, "layer_types names 1 layers of 8"),
        ({"layer_types": "full"}, "must be a list of words"),
        ({"layer_types": ["psychic"] * 8}, "the layer type 'psychic', which Handrail does not know"),
        ({"hybrid_override_pattern": "M-x", "model_type": "nemotron_h"}, "hybrid_override_pattern is 'M-x'"),
        ({"use_sliding_window": "yes"}, "use_sliding_window is 'yes': must be true or false"),
        ({"model_type": "llama4", "attention_chunk_size": 8, "no_rope_layers": [1]}, "no_rope_layers names 1 layers of 8"),
        ({"model_type": "qwen3_next"}, "linear_num_key_heads is missing"),
        ({"model_type": "gemma3_text", "sliding_window_pattern": 0}, "sliding_window_pattern is 0"),
    ],
)
def test_nonsense_is_refused_by_its_key(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelConfigError) as refused:
        shape_of(config(**given), "here.json")
    assert message in refused.value.what
    assert refused.value.where.startswith("here.json")
    assert refused.value.valid


_json = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
_KEY_NAMES = """model_type num_hidden_layers hidden_size num_attention_heads num_key_value_heads head_dim layer_types
sliding_window kv_lora_rank text_config torch_dtype quantization_config linear_attn_config attn_layer_period
hybrid_override_pattern architectures index_head_dim"""
_KEYS = _KEY_NAMES.split()
_TYPES = st.sampled_from(
    ["llama", "gemma3", "jamba", "qwen3_next", "kimi_linear", "nemotron_h", "deepseek_v3", "exaone4", "lfm2", "x"]
)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # the first run builds tables of characters
@given(st.dictionaries(st.sampled_from(_KEYS), _json, max_size=8), _TYPES)
def test_any_json_is_read_or_refused_and_nothing_else(changed: dict[str, Any], model_type: str) -> None:
    """Any JSON is read or refused.

    No input causes another error, or a negative or fractional size.
    """
    try:
        found = sizes(shape_of({**PLAIN, "model_type": model_type, **changed}), Serving())
    except ModelConfigError:
        return
    assert isinstance(found.token_bytes, int)
    assert found.request(100).bytes >= 0


# --- files ----------------------------------------------------------------------------------------------------------------


def test_a_folder_is_read_by_its_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PLAIN))
    assert read_model(tmp_path) == read_model(tmp_path / "config.json")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param(None, "cannot be read", id="absent"),
        pytest.param(b"", "is not JSON", id="empty"),
        pytest.param(b"\xff\xfe{", "is not JSON", id="not-text"),
        pytest.param(b"[]", "is not a JSON object", id="a-list"),
        pytest.param(b"[" * 100_000, "is not JSON", id="deep"),
        pytest.param(b" " * (16 * 2**20 + 1), "larger than 16 MiB", id="huge"),
    ],
)
def test_files_that_are_no_config(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "config.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ModelConfigError, match=message) as refused:
        read_model(path)
    assert refused.value.where == str(path)
    assert "nothing is fetched" in refused.value.valid


def test_a_folder_without_a_config_names_what_it_has(tmp_path: Path) -> None:
    (tmp_path / "params.json").write_text("{}")
    with pytest.raises(ModelConfigError) as refused:
        read_model(tmp_path)
    assert "the folder has params.json" in refused.value.valid


SECOND = Path(__file__).parents[2] / "data/second"


def test_P06_windows_with_heads_of_their_own_are_refused_not_guessed() -> None:
    with pytest.raises(ModelConfigError, match="swa_num_key_value_heads"):
        read_model(SECOND / "P06/config.json")


def test_P07_only_layers_that_attend_keep_kv() -> None:
    found = sizes(read_model(SECOND / "P07/config.json"), Serving())
    assert found.token_bytes == 30_720
    assert sorted((part.layers, part.token_bytes) for part in found.parts) == [(15, 30_720), (45, 0)]
    assert found.state_bytes > 0
