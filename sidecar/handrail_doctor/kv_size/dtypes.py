"""The number formats of a KV cache: bytes of one number, and packed row formats.

Source: vLLM 0.32, ``--kv-cache-dtype`` and ``vllm/v1/kv_cache_interface.py``. Formats with scales beside the numbers (int8, fp8
and int4 per token and head, nvfp4, TurboQuant, UltraQuant) are not known here: they are refused, not guessed.
"""

from __future__ import annotations

from typing import Final

AUTO: Final = "auto"
"""The model's own format, unless the checkpoint says that its KV is quantised."""

DTYPE_BYTES: Final = {
    "bfloat16": 2,
    "float16": 2,
    "half": 2,
    "float32": 4,
    "float": 4,
    "fp8": 1,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
}

FP8_DS_MLA: Final = "fp8_ds_mla"
"""One row of sparse MLA.

It has 512 latent numbers as FP8, four float32 scales, and 64 rotary numbers as bfloat16.
"""
FP8_DS_MLA_BYTES: Final = 512 + 4 * 4 + 64 * 2
FP8_DS_MLA_LATENT: Final = 512
FP8_DS_MLA_ROPE: Final = 64

KV_DTYPES: Final = (AUTO, *DTYPE_BYTES, FP8_DS_MLA)


def plain_dtype(text: str) -> str:
    """Normalise a dtype: ``torch.bfloat16`` becomes ``bfloat16``, in lower case."""
    return text.strip().lower().removeprefix("torch.")
