"""The state that a layer without attention keeps of a request.

Such layers are Mamba, linear attention and short convolutions.
Numbers are of the whole model. The conv part keeps one token less than its kernel is wide.
Source: ``MambaStateShapeCalculator`` and ``MambaStateDtypeCalculator`` of vLLM 0.32. Speculative decoding keeps more (one conv
row a token), which is not counted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from handrail_doctor.kv_size.dtypes import DTYPE_BYTES, plain_dtype
from handrail_doctor.kv_size.keys import Keys, ModelConfigError
from handrail_doctor.kv_size.shape import Layer, LayerKind, StatePart


def state_layer(keys: Keys, model_type: str, dtype: str) -> Layer:
    """Return the layer of this architecture that keeps a state.

    ``dtype``: the model's. Raises ``ModelConfigError``.
    """
    made = _STATES.get(model_type)
    if made is None:
        raise ModelConfigError(
            f"what a layer of {model_type or 'a model without model_type'} keeps as its state is not known here",
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
