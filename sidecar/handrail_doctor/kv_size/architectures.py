"""The architectures with known rules, by ``model_type``, and their defaults.

The defaults are values that published configs leave out.
Source: the models of vLLM 0.32 and the configuration classes of transformers 5.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

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
