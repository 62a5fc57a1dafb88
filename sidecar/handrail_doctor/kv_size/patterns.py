"""The kind of each layer of a model, as one word a layer.

The words come from ``layer_types`` where the config has it, else from the architecture's rule.
Source: the configuration classes of transformers 5 and the models of vLLM 0.32, whose caches the tests compare with.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from handrail_doctor.kv_size.keys import Keys, ModelConfigError

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
            f"{name} holds the layer type {word!r}, which is not known here",
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
