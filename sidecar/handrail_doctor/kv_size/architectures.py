"""What is known of each architecture: defaults, kinds of layers, their states.

Architectures are known by ``model_type``. The defaults are values that published configs leave out. The kind of a layer is one
word, from ``layer_types`` where the config has it, else from the architecture's rule. Layers without attention (Mamba, linear
attention, short convolutions) keep a state of a request; its numbers are of the whole model, and the conv part keeps one token
less than its kernel is wide.
Source: the models of vLLM 0.32, whose caches the tests compare with (``MambaStateShapeCalculator``,
``MambaStateDtypeCalculator``), and the configuration classes of transformers 5. Speculative decoding keeps more (one conv row a
token), which is not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from handrail_doctor.kv_size.keys import Keys, ModelConfigError
from handrail_doctor.kv_size.shape import DTYPE_BYTES, Layer, LayerKind, StatePart, plain_dtype

_PLAIN_NAMES: Final = (
    "arcee baichuan bloom chatglm cohere cohere2 dbrx deepseek ernie4_5 ernie4_5_moe exaone exaone4 falcon "
    "flex_olmo gemma gemma2 gemma3_text gemma3n_text gemma4_text glm glm4 glm4_moe gpt2 gpt_bigcode gpt_j gptj gpt_neox "
    "gpt_oss granite granitemoe granitemoeshared grok-1 hunyuan_v1_dense hunyuan_v1_moe internlm internlm2 internlm3 "
    "llama llama4_text minicpm minicpm3 minimax_m2 ministral ministral3 mistral mixtral mpt nemotron olmo olmo2 olmo3 "
    "olmoe opt persimmon phi phi3 phimoe qwen qwen2 qwen2_5_vl qwen2_5_vl_text qwen2_moe qwen2_vl qwen2_vl_text qwen3 qwen3_moe "
    "qwen3_vl_moe_text qwen3_vl_text seed_oss smollm3 solar stablelm starcoder2"
)
PLAIN: Final = frozenset(_PLAIN_NAMES.split())
"""Architectures in which every layer attends, by the keys of its config alone."""
_MLA_NAMES: Final = "deepseek_v2 deepseek_v3 deepseek_v32 glm4_moe_lite glm_moe_dsa kimi_k2 kimi_linear pangu_ultra_moe"
MLA: Final = frozenset(_MLA_NAMES.split())
"""Architectures that the engine serves with one latent vector a token."""
_STATEFUL_NAMES: Final = (
    "bamba falcon_h1 falcon_mamba granitemoehybrid jamba lfm2 lfm2_moe mamba mamba2 nemotron_h qwen3_5_moe_text "
    "qwen3_5_text qwen3_next"
)
STATEFUL: Final = frozenset(_STATEFUL_NAMES.split())
KNOWN: Final = PLAIN | MLA | STATEFUL

DEFAULTS: Final[Mapping[str, Mapping[str, int]]] = {
    "gemma2": {"head_dim": 256, "sliding_window": 4096},
    "gemma3_text": {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096},
    "gemma3n_text": {
        "num_hidden_layers": 35,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "sliding_window": 512,
    },
    "gemma4_text": {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 512},
    "cohere2": {"sliding_window": 4096},
    "olmo3": {"sliding_window": 4096},
    "qwen3_next": {"head_dim": 256},
}
"""Values that transformers fills in and published configs leave out."""


FULL, WINDOW, CHUNK, STATE, NONE, BOTH = "full", "window", "chunk", "state", "none", "both"

_WORDS: Final = {
    "full_attention": FULL,
    "attention": FULL,
    "sliding_attention": WINDOW,
    "chunked_attention": CHUNK,
    "linear_attention": STATE,
    "mamba": STATE,
    "mamba2": STATE,
    "conv": STATE,
    "mlp": NONE,
    "moe": NONE,
}
_LETTERS: Final = {"M": STATE, "*": FULL, "-": NONE, "E": NONE}  # NVIDIA's hybrid_override_pattern

_QWEN: Final = ("qwen2", "qwen3", "qwen4")


def layer_words(keys: Keys, model_type: str, depth: int) -> list[str]:
    """Return one word for each of ``depth`` layers. Raises ``ModelConfigError``."""
    for name in ("layer_types", "layers_block_type"):
        found = keys.words(name, depth)
        if found is not None:
            return [_word(keys, name, word) for word in found]
    if pattern := keys.text("hybrid_override_pattern"):
        return _letters(keys, pattern, depth)
    rule = _RULES.get(model_type)
    if rule is not None:
        return rule(keys, depth)
    if not window_of(keys, model_type):
        return [FULL] * depth
    first = keys.optional("max_window_layers", least=0) or 0 if model_type.startswith(_QWEN) else 0
    return [WINDOW if layer >= first else FULL for layer in range(depth)]


def window_of(keys: Keys, model_type: str) -> int | None:
    """Return the sliding window in tokens, where it is switched on.

    Qwen's configs have one that is off; 0 is off too.
    """
    on_by_default = not model_type.startswith(_QWEN)
    if not keys.flag("use_sliding_window", on_by_default):
        return None
    window = keys.optional("sliding_window", least=0)
    if window and model_type.startswith("cohere2"):
        return window + 1  # this model sees the window and the token itself
    return window or None


def shared_from(keys: Keys, model_type: str, depth: int) -> Callable[[int], bool]:
    """Return a test for layers that read the cache of an earlier layer.

    In Gemma 3n and 4 these are the last layers; cross-layer attention has groups.
    """
    default = 15 if model_type == "gemma3n_text" else 0
    last = keys.optional("num_kv_shared_layers", least=0)
    last = default if last is None else last
    group = keys.optional("cla_share_factor") or 1 if keys.flag("use_cla") else 1
    return lambda layer: layer >= depth - last or layer % group != 0


def _word(keys: Keys, name: str, word: str) -> str:
    if word == "hybrid":
        return BOTH
    if word not in _WORDS:
        raise ModelConfigError(
            f"{name} holds the layer type {word!r}, which Handrail does not know",
            where=keys.name,
            valid=", ".join((*_WORDS, "hybrid")),
        )
    return _WORDS[word]


def _letters(keys: Keys, pattern: str, depth: int) -> list[str]:
    if len(pattern) != depth or set(pattern) - set(_LETTERS):
        valid = f"{depth} of the letters M (Mamba), * (attention), - (MLP), E (experts)"
        raise ModelConfigError(f"hybrid_override_pattern is {pattern[:60]!r}", where=keys.name, valid=valid)
    return [_LETTERS[letter] for letter in pattern]


def _every(default: int, key: str, most: str, last: str = FULL) -> Callable[[Keys, int], list[str]]:
    """Build a rule in which every nth layer is ``last`` and the others are ``most``.

    n is under ``key``, else it is the architecture's default.
    """

    def rule(keys: Keys, depth: int) -> list[str]:
        period = keys.number(key, default=default, why="this architecture's default")
        return [last if (layer + 1) % period == 0 else most for layer in range(depth)]

    return rule


def _fixed(period: int, most: str) -> Callable[[Keys, int], list[str]]:
    return lambda keys, depth: [FULL if (layer + 1) % period == 0 else most for layer in range(depth)]


def _alternate(keys: Keys, depth: int) -> list[str]:
    return [FULL if layer % 2 else WINDOW for layer in range(depth)]


def _exaone(keys: Keys, depth: int) -> list[str]:
    """Read ``LLLG`` (L: window), or let every nth layer see everything."""
    letters = keys.text("sliding_window_pattern")
    if letters and set(letters) <= {"L", "G"}:
        return [WINDOW if letters[layer % len(letters)] == "L" else FULL for layer in range(depth)]
    if not keys.has("sliding_window"):
        return [FULL] * depth
    return _every(4, "sliding_window_pattern", WINDOW)(keys, depth)


def _gemma4(keys: Keys, depth: int) -> list[str]:
    return [*_fixed(6, WINDOW)(keys, depth)[:-1], FULL]


def _llama4(keys: Keys, depth: int) -> list[str]:
    """Layers with rotary positions attend within a chunk, the others to everything."""
    rotary = keys.numbers("no_rope_layers")
    if rotary:
        if len(rotary) != depth:
            raise ModelConfigError(f"no_rope_layers names {len(rotary)} layers of {depth}", where=keys.name, valid="one a layer")
        words = [CHUNK if each else FULL for each in rotary]
    else:
        words = _every(4, "no_rope_layer_interval", CHUNK)(keys, depth)
    return words if keys.has("attention_chunk_size") else [FULL] * depth


def _jamba(keys: Keys, depth: int) -> list[str]:
    period = keys.number("attn_layer_period", default=8, why="Jamba's default")
    offset = keys.optional("attn_layer_offset", least=0)
    offset = 4 if offset is None else offset
    return [FULL if layer % period == offset else STATE for layer in range(depth)]


def _bamba(keys: Keys, depth: int) -> list[str]:
    attention = set(keys.numbers("attn_layer_indices") or ())
    return [FULL if layer in attention else STATE for layer in range(depth)]


def _kimi(keys: Keys, depth: int) -> list[str]:
    """Read the lists of layers, which count from 1."""
    part = keys.section("linear_attn_config")
    if part is None:
        return [FULL] * depth
    attention = set(part.numbers("full_attn_layers") or ())
    return [FULL if layer + 1 in attention else STATE for layer in range(depth)]


def _lfm2(keys: Keys, depth: int) -> list[str]:
    attention = keys.numbers("full_attn_idxs")
    return [FULL if attention is None or layer in attention else STATE for layer in range(depth)]


_RULES: Final[dict[str, Callable[[Keys, int], list[str]]]] = {
    "gemma2": _alternate,
    "gpt_oss": _alternate,
    "gemma3_text": _every(6, "sliding_window_pattern", WINDOW),
    "gemma3n_text": _fixed(5, WINDOW),
    "gemma4_text": _gemma4,
    "cohere2": _every(4, "sliding_window_pattern", WINDOW),
    "olmo3": _fixed(4, WINDOW),
    "exaone4": _exaone,
    "llama4_text": _llama4,
    "jamba": _jamba,
    "bamba": _bamba,
    "qwen3_next": _every(4, "full_attention_interval", STATE),
    "qwen3_5_text": _every(4, "full_attention_interval", STATE),
    "qwen3_5_moe_text": _every(4, "full_attention_interval", STATE),
    "kimi_linear": _kimi,
    "lfm2": _lfm2,
    "lfm2_moe": _lfm2,
    "falcon_h1": lambda keys, depth: [BOTH] * depth,
    **dict.fromkeys(("mamba", "falcon_mamba", "mamba2"), lambda keys, depth: [STATE] * depth),
}


def state_layer(keys: Keys, model_type: str, dtype: str) -> Layer:
    """Return the layer of this architecture that keeps a state.

    ``dtype``: the model's. Raises ``ModelConfigError``.
    """
    made = _STATES.get(model_type)
    if made is None:
        raise ModelConfigError(
            f"what a layer of {model_type or 'a model without model_type'} keeps as its state is unknown",
            where=keys.name,
            valid=f"one of {', '.join(sorted(_STATES))}",
        )
    name, parts = made(keys, dtype)
    return Layer(kind=LayerKind.STATE, name=name, state=parts)


_Made = tuple[str, tuple[StatePart, ...]]


def _mamba1(keys: Keys, dtype: str) -> _Made:
    inner = keys.optional("mamba_expand", "expand")
    width = keys.optional("intermediate_size") if inner is None else inner * keys.number("hidden_size")
    if width is None:
        raise ModelConfigError("neither mamba_expand nor intermediate_size is given", where=keys.name, valid="mamba_expand: 2")
    kernel = keys.number("mamba_d_conv", "conv_kernel", default=4, why="Mamba's default")
    numbers = keys.number("mamba_d_state", "state_size", default=16, why="Mamba's default")
    return "Mamba", (
        StatePart(name="conv", dtype=dtype, split=width * (kernel - 1)),
        StatePart(name="ssm", dtype=dtype, split=width * numbers),
    )


def _mamba2(keys: Keys, dtype: str) -> _Made:
    heads = keys.number("mamba_n_heads", "mamba_num_heads", "num_heads")
    names = ("mamba_d_head", "mamba_head_dim", *(() if keys.has("num_attention_heads") else ("head_dim",)))
    head_dim = None if keys.values.get("mamba_d_head") == "auto" else keys.optional(*names)
    width = keys.optional("mamba_d_ssm")
    if width is None and head_dim is not None and keys.has("mamba_num_heads"):
        width = heads * head_dim
    elif width is None:
        width = keys.number("mamba_expand", "expand", default=2, why="Mamba 2's default") * keys.number("hidden_size")
    head_dim = head_dim or width // heads
    groups = keys.number("mamba_n_groups", "n_groups", default=1, why="Mamba 2's default")
    numbers = keys.number("mamba_d_state", "ssm_state_size", "state_size")
    kernel = keys.number("mamba_d_conv", "conv_kernel", default=4, why="Mamba 2's default")
    return "Mamba 2", (
        StatePart(name="conv", dtype=dtype, split=width * (kernel - 1), groups=groups, group_numbers=2 * numbers * (kernel - 1)),
        StatePart(name="ssm", dtype=dtype, split=heads * head_dim * numbers),
    )


def _nemotron_h(keys: Keys, dtype: str) -> _Made:
    name, (conv, ssm) = _mamba2(keys, dtype)
    own = _own_dtype(keys, "mamba_ssm_cache_dtype", "float32")
    return name, (conv, StatePart(name="ssm", dtype=own, split=ssm.split))


def _gated_delta_net(keys: Keys, dtype: str) -> _Made:
    key_heads, value_heads = keys.number("linear_num_key_heads"), keys.number("linear_num_value_heads")
    key_dim, value_dim = keys.number("linear_key_head_dim"), keys.number("linear_value_head_dim")
    kernel = keys.number("linear_conv_kernel_dim")
    own = _own_dtype(keys, "mamba_ssm_dtype", dtype)
    return "gated delta net", (
        StatePart(name="conv", dtype=dtype, split=(2 * key_heads * key_dim + value_heads * value_dim) * (kernel - 1)),
        StatePart(name="state", dtype=own, split=value_heads * value_dim * key_dim),
    )


def _kimi_delta(keys: Keys, dtype: str) -> _Made:
    part = keys.section("linear_attn_config")
    if part is None:
        raise ModelConfigError("linear_attn_config is missing", where=keys.name, valid="a mapping with num_heads and head_dim")
    heads, head_dim = part.number("num_heads"), part.number("head_dim")
    kernel = part.number("short_conv_kernel_size", default=4, why="Kimi Linear's default")
    return "Kimi delta attention", (
        StatePart(name="conv", dtype=dtype, split=3 * heads * head_dim * (kernel - 1)),
        StatePart(name="state", dtype="float32", split=heads * head_dim * head_dim),
    )


def _short_conv(keys: Keys, dtype: str) -> _Made:
    width = keys.number("conv_dim", "hidden_size")
    kernel = keys.number("conv_L_cache", default=3, why="LFM2's default")
    return "short convolution", (StatePart(name="conv", dtype=dtype, split=width * (kernel - 1)),)


def _own_dtype(keys: Keys, key: str, default: str) -> str:
    text = plain_dtype(keys.text(key)) or default
    if text not in DTYPE_BYTES:
        raise keys.wrong(key, f"must be one of {', '.join(DTYPE_BYTES)}")
    return text


_STATES: Final[dict[str, Callable[[Keys, str], _Made]]] = {
    **dict.fromkeys(("jamba", "mamba", "falcon_mamba"), _mamba1),
    **dict.fromkeys(("mamba2", "bamba", "granitemoehybrid", "falcon_h1"), _mamba2),
    "nemotron_h": _nemotron_h,
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), _gated_delta_net),
    "kimi_linear": _kimi_delta,
    **dict.fromkeys(("lfm2", "lfm2_moe"), _short_conv),
}
