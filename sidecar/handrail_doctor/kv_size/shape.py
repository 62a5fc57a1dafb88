"""What a model keeps of a prompt: its layers, and the formats of their numbers.

Layers are grouped by what each keeps. Plain data, no engine. Source of the formats: vLLM 0.32, ``--kv-cache-dtype`` and
``vllm/v1/kv_cache_interface.py``. Formats with scales beside the numbers (int8, fp8 and int4 per token and head, nvfp4,
TurboQuant, UltraQuant) are not known here: they are refused, not guessed.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
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


class LayerKind(str, Enum):
    """The kind of data that one layer keeps.

    In vLLM's words: FullAttentionSpec, SlidingWindowSpec, ChunkedLocalAttentionSpec, MLAAttentionSpec, MambaSpec.
    """

    FULL = "full attention"  # keys and values of every token
    WINDOW = "sliding window"  # keys and values of the last ``window`` tokens
    CHUNK = "chunked attention"  # keys and values of the chunk of ``window`` tokens that contains the last token
    MLA = "MLA"  # one latent vector a token in place of keys and values; whole on every rank
    INDEX = "sparse index"  # index keys beside MLA (DeepSeek V3.2); whole on every rank
    STATE = "state"  # Mamba, linear attention, short convolution: one state a request, whatever its length
    SHARED = "shared"  # reads the cache of an earlier layer, keeps nothing
    NONE = "no attention"  # keeps nothing: an MLP alone


@dataclass(frozen=True, slots=True, kw_only=True)
class StatePart:
    """One part of a layer's state, for the whole model.

    The ranks divide ``split`` numbers among them. Beside them there are ``groups`` groups of ``group_numbers`` each.
    Where the ranks do not divide the groups, the engine makes as many groups as there are ranks (Mamba 2).
    """

    name: str
    dtype: str  # a key of ``DTYPE_BYTES``
    split: int
    groups: int = 0
    group_numbers: int = 0

    def rank_numbers(self, tp: int) -> int:
        """Return the numbers on one of ``tp`` ranks.

        Source: ``MambaStateShapeCalculator`` of vLLM 0.32.
        """
        groups = self.groups if self.groups % tp == 0 else tp
        return (self.split + groups * self.group_numbers) // tp


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """What one layer keeps.

    Dimensions are numbers a token and KV head, for the whole model.
    """

    kind: LayerKind
    name: str = ""  # kind of state: mamba, gated delta net, ...
    kv_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    window: int | None = None  # tokens
    row_bytes: int | None = None  # a fixed size of one token's row, whatever the KV format
    state: tuple[StatePart, ...] = ()

    @property
    def by_token(self) -> bool:
        """Test whether it grows with the prompt (up to its window)."""
        return self.kind not in (LayerKind.STATE, LayerKind.SHARED, LayerKind.NONE)

    @property
    def replicated(self) -> bool:
        """Test whether every tensor-parallel rank has all of it, not split by heads."""
        return self.kind in (LayerKind.MLA, LayerKind.INDEX)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The layers of a model.

    ``layers``: (layer, how many), in the order in which each first appears. A layer that keeps two things counts in both.
    ``assumed``: in words, what the config does not say and was filled in. ``known``: the architecture's rules are known.
    """

    architecture: str
    model_type: str
    depth: int  # layers of the model
    layers: tuple[tuple[Layer, int], ...]
    dtype: str  # the model's dtype, a key of ``DTYPE_BYTES``
    kv_dtype: str | None = None  # the checkpoint's own KV format, which an engine uses for "auto"
    max_tokens: int | None = None
    assumed: tuple[str, ...] = ()
    known: bool = True
