"""Read a model's config.json as what its layers keep.

Everything that is assumed is noted; what cannot be known is an error.
Source: the keys as published with the models; the rules as vLLM 0.32 applies them (``model_arch_config_convertor``).
``tests/vllm/test_kv_size.py`` compares with vLLM's own KV cache specifications.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from handrail_doctor.kv_size.architectures import (
    BOTH,
    CHUNK,
    DEFAULTS,
    FULL,
    KNOWN,
    MLA,
    NONE,
    PLAIN,
    STATE,
    WINDOW,
    layer_words,
    shared_from,
    state_layer,
    window_of,
)
from handrail_doctor.kv_size.keys import Keys, ModelConfigError, UnknownModelError
from handrail_doctor.kv_size.shape import Layer, LayerKind, ModelShape, plain_dtype

CONFIG_FILE: Final = "config.json"
_MOST_BYTES: Final = 16 * 2**20
_DEEPEST: Final = 10_000
_TEXT_PARTS: Final = ("text_config", "llm_config", "language_config", "thinker_config")
_INDEX_SCALE_NUMBERS: Final = 128  # index numbers in FP8 for each float32 scale of an index key

_OTHER_RULES: Final = re.compile(
    "mamba|ssm|linear_|conv_|attn_type_list|block_configs|layers_block_type|hybrid|compress|cross_attention|swa_|recurrent|rwkv|"
    "time_mix|index_|state_size|per_layer"
)
"""Keys that show that layers of an unknown architecture do more than attend."""


def read_model(path: Path) -> ModelShape:
    """Read the model whose ``config.json`` is ``path`` or is in it.

    Raises ``ModelConfigError``.
    """
    file = path / CONFIG_FILE if path.is_dir() else path
    valid = "the path of a model's config.json, or of the folder that holds it (nothing is fetched from a hub)"
    try:
        with file.open("rb") as stream:
            text = stream.read(_MOST_BYTES + 1)
    except OSError as error:
        others = sorted(each.name for each in path.glob("*.json"))[:5] if path.is_dir() else []
        hint = f"{valid}; the folder has {', '.join(others)}" if others else valid
        raise ModelConfigError(f"cannot be read: {error.strerror}", where=str(file), valid=hint) from None
    if len(text) > _MOST_BYTES:
        raise ModelConfigError(
            f"is larger than {_MOST_BYTES >> 20} MiB: no config.json is so large", where=str(file), valid=valid
        )
    try:
        values = json.loads(text)
    except UnicodeDecodeError:
        raise ModelConfigError("is not JSON: it is not text", where=str(file), valid=valid) from None
    except (ValueError, RecursionError) as error:
        raise ModelConfigError(f"is not JSON: {error}", where=str(file), valid=valid) from None
    if not isinstance(values, Mapping):
        raise ModelConfigError("is not a JSON object", where=str(file), valid=valid)
    return shape_of(values, str(file))


def shape_of(values: Mapping[str, Any], name: str = CONFIG_FILE) -> ModelShape:
    """Return the shape of a model from its config as JSON.

    Raises ``ModelConfigError``, whose ``where`` begins with ``name``.
    """
    whole = Keys(values, name)
    keys = _text_part(whole)
    if whole.flag("is_encoder_decoder") or keys.flag("is_encoder_decoder"):
        raise ModelConfigError(
            "an encoder-decoder model: Handrail cannot count the KV of its cross-attention",
            where=name,
            valid="a decoder-only model",
        )
    model_type = _model_type(keys, whole)
    known = model_type in KNOWN
    depth = keys.number(
        "num_hidden_layers", "n_layer", "num_layers", "n_layers", default=DEFAULTS.get(model_type, {}).get("num_hidden_layers")
    )
    if depth > _DEEPEST:
        raise keys.wrong("num_hidden_layers", f"must be at most {_DEEPEST}")
    if not known:
        _refuse_other_rules(keys, model_type)
    dtype = _dtype(keys, whole)
    layers = _layers(keys, model_type, depth, dtype)
    if not known:
        keys.assumed.append(
            f"architecture {_architecture(whole, keys)!r} (model_type {model_type!r}) is unknown: the size assumes that "
            "every layer attends, from the keys of its config"
        )
    return ModelShape(
        architecture=_architecture(whole, keys),
        model_type=model_type,
        depth=depth,
        layers=tuple(Counter(layers).items()),
        dtype=dtype,
        kv_dtype=_checkpoint_kv_dtype(keys) or _checkpoint_kv_dtype(whole),
        max_tokens=keys.optional(
            "max_position_embeddings", "n_positions", "seq_length", "max_sequence_length", "model_max_length"
        ),
        assumed=tuple(dict.fromkeys(keys.assumed)),
        known=known,
    )


def _text_part(whole: Keys) -> Keys:
    """Return the language model's own keys, which multi-modal models nest."""
    keys = whole
    for _ in range(2):  # thinker_config contains a text_config
        part = next((found for name in _TEXT_PARTS if (found := keys.section(name)) is not None), None)
        if part is None:
            return keys
        keys = part
    return keys


def _model_type(keys: Keys, whole: Keys) -> str:
    own = keys.text("model_type") or whole.text("model_type")
    # The inner part of older multi-modal configs has the outer name.
    return {"gemma3": "gemma3_text", "gemma3n": "gemma3n_text", "gemma4": "gemma4_text", "llama4": "llama4_text"}.get(own, own)


def _architecture(whole: Keys, keys: Keys) -> str:
    for part in (whole, keys):
        named = part.values.get("architectures")
        if isinstance(named, list) and named and isinstance(named[0], str):
            return named[0]
    return keys.text("model_type") or whole.text("model_type") or "unnamed"


def _refuse_other_rules(keys: Keys, model_type: str) -> None:
    found = sorted(name for name, value in keys.values.items() if value is not None and _OTHER_RULES.search(name))
    if found:
        raise UnknownModelError(
            f"model_type {model_type or 'missing'!r} is unknown, and {', '.join(found[:6])} show that its layers do more "
            "than attend: the config does not give its KV",
            where=keys.name,
            valid="an architecture of docs/kv-size.md; or the bytes and tokens of a running pair (handrail fetches --json)",
        )


def _dtype(keys: Keys, whole: Keys) -> str:
    """Return the model's format as an engine chooses it.

    A float32 model, and one that names no format, are served in bfloat16.
    """
    text = plain_dtype(keys.text("torch_dtype", "dtype") or whole.text("torch_dtype", "dtype"))
    if text in ("bfloat16", "float16", "half"):
        return "float16" if text == "half" else text
    reported_text = f"the config says {text}" if text else "the config names no dtype"
    keys.assumed.append(f"dtype bfloat16: {reported_text}; without --dtype an engine chooses a format of 2 bytes")
    return "bfloat16"


def _checkpoint_kv_dtype(keys: Keys) -> str | None:
    """Return the KV format of a checkpoint that was quantised with its KV: FP8.

    Engines then use it for --kv-cache-dtype auto.
    """
    quantised = keys.section("quantization_config") or keys.section("compression_config")
    if quantised is None:
        return None
    scheme = quantised.section("kv_cache_scheme")
    if scheme is not None and scheme.optional("num_bits") == 8 and scheme.text("type") == "float":
        return "fp8"
    inner = quantised.section("quantization") or quantised
    return "fp8" if inner.text("kv_cache_quant_algo").upper() == "FP8" else None


# --- layers ---------------------------------------------------------------------------------------------------------------


def _layers(keys: Keys, model_type: str, depth: int, dtype: str) -> list[Layer]:
    """Return what each layer keeps, in order.

    A layer that attends and has a state counts as two.
    """
    words = layer_words(keys, model_type, depth)
    shared = shared_from(keys, model_type, depth)
    attends = any(word in (FULL, WINDOW, CHUNK, BOTH) for word in words)
    stateful = any(word in (STATE, BOTH) for word in words)
    by_word = _attention(keys, model_type, words) if attends else {}
    state = state_layer(keys, model_type, dtype) if stateful else None
    index = _index(keys, model_type)
    nothing = Layer(kind=LayerKind.NONE)
    found: list[Layer] = []
    for number, word in enumerate(words):
        if word in (STATE, BOTH) and state is not None:
            found.append(state)
        if word == NONE:
            found.append(nothing)
        elif word != STATE and shared(number):
            found.append(Layer(kind=LayerKind.SHARED))
        elif word != STATE:
            found.append(by_word[FULL if word == BOTH else word])
            if index is not None:
                found.append(index)
    return found


def _attention(keys: Keys, model_type: str, words: list[str]) -> dict[str, Layer]:
    """Return the attending layer of each word."""
    latent = keys.optional("kv_lora_rank")
    if latent is not None and model_type not in PLAIN:
        if model_type not in MLA:
            keys.assumed.append("kv_lora_rank is set, so the size assumes MLA: one latent vector a token")
        row = latent + (keys.optional("qk_rope_head_dim", least=0) or 0)
        return {FULL: Layer(kind=LayerKind.MLA, kv_heads=1, key_dim=row)}
    defaults = DEFAULTS.get(model_type, {})
    heads = keys.number(
        "num_attention_heads", "n_head", "n_heads", default=defaults.get("num_attention_heads"), why=_ARCHITECTURE
    )
    kv_heads = _kv_heads(keys, model_type, heads)
    key_dim = _head_dim(keys, model_type, heads)
    value_dim = keys.optional("v_head_dim") or key_dim
    if model_type == "minicpm3":
        value_dim = key_dim  # the engine pads the values
    full = Layer(kind=LayerKind.FULL, kv_heads=kv_heads, key_dim=key_dim, value_dim=value_dim)
    found = {FULL: full}
    if WINDOW in words:
        window = window_of(keys, model_type) or keys.number(
            "sliding_window", default=defaults.get("sliding_window"), why=_ARCHITECTURE
        )
        found[WINDOW] = replace(full, kind=LayerKind.WINDOW, window=window)
    if CHUNK in words:
        chunk = keys.number("attention_chunk_size")
        found[CHUNK] = replace(full, kind=LayerKind.CHUNK, window=chunk)
    if model_type == "gemma4_text" and keys.has("global_head_dim", "num_global_key_value_heads"):
        wide = keys.optional("global_head_dim") or key_dim
        few = keys.optional("num_global_key_value_heads") or kv_heads
        found[FULL] = Layer(kind=LayerKind.FULL, kv_heads=few, key_dim=wide, value_dim=wide)
    return found


_ARCHITECTURE: Final = "this architecture's default"


def _kv_heads(keys: Keys, model_type: str, heads: int) -> int:
    """Return the number of KV heads.

    Multi-query: one. Grouped-query: as the config says. Otherwise one for each attention head.
    """
    one = keys.flag("multi_query", model_type == "falcon" and not keys.has("num_kv_heads", "n_head_kv"))
    if model_type == "falcon" and keys.flag("new_decoder_architecture"):
        one = False
    if model_type == "gpt_bigcode":
        one = keys.flag("multi_query", True)
    if one:
        return 1
    inner = keys.section("attn_config")
    if inner is not None and inner.has("kv_n_heads"):
        return inner.number("kv_n_heads")
    default = DEFAULTS.get(model_type, {}).get("num_key_value_heads")
    found = keys.optional("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num", "num_query_groups")
    if found is not None:
        return found
    if default is not None:
        return keys.number("num_key_value_heads", default=default, why=_ARCHITECTURE)
    if model_type not in KNOWN:
        keys.assumed.append(f"num_key_value_heads = {heads}: the config has none, so one for each attention head")
    return heads


def _head_dim(keys: Keys, model_type: str, heads: int) -> int:
    if model_type == "minicpm3":
        return keys.number("qk_nope_head_dim") + keys.number("qk_rope_head_dim")
    found = keys.optional("head_dim", "attention_head_dim", "kv_channels", "hidden_size_per_head")
    if found is not None:
        return found
    default = DEFAULTS.get(model_type, {}).get("head_dim")
    if default is not None:
        return keys.number("head_dim", default=default, why=_ARCHITECTURE)
    hidden = keys.number("hidden_size", "n_embd", "d_model")
    if hidden % heads:
        raise ModelConfigError(
            f"hidden_size {hidden} is no multiple of num_attention_heads {heads}, and head_dim is not given",
            where=keys.name,
            valid="a config.json as the model was published with",
        )
    return hidden // heads


def _index(keys: Keys, model_type: str) -> Layer | None:
    """Return the index layer of DeepSeek's sparse attention.

    It keeps an FP8 index key with float32 scales beside the latent vector.
    """
    width = keys.optional("index_head_dim")
    if width is None or model_type not in MLA:
        return None
    return Layer(kind=LayerKind.INDEX, kv_heads=1, row_bytes=width + width // _INDEX_SCALE_NUMBERS * 4)
