"""Compute bytes of KV: of one token and one request, on one rank and on all.

Figures are whole numbers, with the arithmetic beside them.
A hand-off is counted as vLLM 0.32's NIXL connector moves it. It moves whole blocks. Of a sliding window it moves only the blocks
at the end (``cdiv(window, block_size) + 1`` of them, as ``NixlBaseConnectorScheduler.blocks_per_sw``). Every rank moves its own
part, so what all ranks hold whole (MLA, KV heads fewer than ranks) moves once for each rank. A state moves once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from handrail.config.types import nearest
from handrail_doctor.kv_size.keys import ModelConfigError
from handrail_doctor.kv_size.shape import (
    AUTO,
    DTYPE_BYTES,
    FP8_DS_MLA,
    FP8_DS_MLA_BYTES,
    FP8_DS_MLA_LATENT,
    FP8_DS_MLA_ROPE,
    KV_DTYPES,
    Layer,
    LayerKind,
    ModelShape,
    plain_dtype,
)

BLOCK_SIZE: Final = 16
"""vLLM's block on CUDA, in tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """How the engine serves the model.

    ``dtype``: replaces the config's. ``windowed``: the hybrid cache manager is on, as it is by default with NIXL in vLLM 0.32.
    Without it, windows keep and hand over every token.
    """

    kv_dtype: str = AUTO
    dtype: str | None = None
    tp: int = 1
    block_size: int = BLOCK_SIZE
    windowed: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGroupSize:
    """The sizes of all layers of one kind.

    ``token_bytes``: one token in all of them, once. ``rank_token_bytes``: on one rank.
    ``state_bytes``, ``rank_state_bytes``: of a request, whatever its length.
    ``arithmetic``: how ``token_bytes`` (for a state: ``state_bytes``) is computed.
    """

    layer: Layer
    layers: int
    token_bytes: int
    rank_token_bytes: int
    state_bytes: int
    rank_state_bytes: int
    arithmetic: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The sizes of a model as it is served."""

    shape: ModelShape
    serving: Serving
    dtype: str
    kv_dtype: str
    parts: tuple[LayerGroupSize, ...]
    notes: tuple[str, ...]

    @property
    def token_bytes(self) -> int:
        """Return one token's bytes in every layer that keeps it, once.

        This is what grows with the prompt where there is no window.
        """
        return sum(part.token_bytes for part in self.parts)

    @property
    def moved_token_bytes(self) -> int:
        """Return ``token_bytes`` over all ranks: the bytes that the wire carries."""
        return self.serving.tp * sum(part.rank_token_bytes for part in self.parts)

    @property
    def state_bytes(self) -> int:
        """Return a request's state over all ranks, whatever its length."""
        return self.serving.tp * sum(part.rank_state_bytes for part in self.parts)

    def request(self, tokens: int) -> Request:
        """Return what a prompt of ``tokens`` hands over."""
        return Request(
            tokens=tokens,
            blocks=blocks_of(tokens, self.serving.block_size),
            by_part=tuple(self.serving.tp * _rank_bytes(part, tokens, self.serving) for part in self.parts),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt's KV over all ranks; ``by_part`` is in the order of ``Sizes.parts``."""

    tokens: int
    blocks: int
    by_part: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return sum(self.by_part)

    def transfer_ns(self, bytes_per_s: float) -> int:
        """Return the transfer time at that rate, with no overhead."""
        return round(self.bytes / bytes_per_s * 1e9)


def sizes(shape: ModelShape, serving: Serving) -> Sizes:
    """Compute the sizes of a model.

    Raises ``ModelConfigError`` where the model cannot be served so.
    """
    dtype = _model_dtype(shape, serving)
    kv_dtype, notes = _kv_dtype(shape, serving, dtype)
    parts = tuple(_part(layer, count, serving.tp, kv_dtype) for layer, count in shape.layers)
    return Sizes(
        shape=shape,
        serving=serving,
        dtype=dtype,
        kv_dtype=kv_dtype,
        parts=parts,
        notes=(*shape.assumed, *notes, *_notes(parts, serving)),
    )


def blocks_of(tokens: int, block_size: int) -> int:
    """Count the blocks that ``tokens`` fill."""
    return -(-tokens // block_size)


def kept_tokens(layer: Layer, tokens: int, serving: Serving) -> int:
    """Count the prompt tokens whose rows the layer hands over, in whole blocks."""
    size = serving.block_size
    blocks = blocks_of(tokens, size)
    if layer.window is not None and serving.windowed:
        blocks = min(blocks, blocks_of(layer.window, size) + (layer.kind is LayerKind.WINDOW))
    return blocks * size


def _rank_bytes(part: LayerGroupSize, tokens: int, serving: Serving) -> int:
    return part.rank_state_bytes + part.rank_token_bytes * kept_tokens(part.layer, tokens, serving)


def _part(layer: Layer, count: int, tp: int, kv_dtype: str) -> LayerGroupSize:
    if layer.kind is LayerKind.STATE:
        return _state_part(layer, count, tp)
    if not layer.by_token:
        return LayerGroupSize(
            layer=layer,
            layers=count,
            token_bytes=0,
            rank_token_bytes=0,
            state_bytes=0,
            rank_state_bytes=0,
            arithmetic="keeps nothing",
        )
    row, text = _row(layer, layer.kv_heads, kv_dtype)
    rank_row, _ = _row(layer, _rank_heads(layer, tp), kv_dtype)
    return LayerGroupSize(
        layer=layer,
        layers=count,
        token_bytes=count * row,
        rank_token_bytes=count * rank_row,
        state_bytes=0,
        rank_state_bytes=0,
        arithmetic=f"{count} layers × {text}",
    )


def _row(layer: Layer, heads: int, kv_dtype: str) -> tuple[int, str]:
    """Return the bytes of one token in one layer, and the arithmetic."""
    if layer.row_bytes is not None:
        return layer.row_bytes, f"{layer.row_bytes} B"
    if layer.kind is LayerKind.MLA and kv_dtype == FP8_DS_MLA:
        return FP8_DS_MLA_BYTES, f"{FP8_DS_MLA_BYTES} B (512 FP8, 4 scales, 64 bfloat16)"
    one = DTYPE_BYTES[kv_dtype]
    if layer.kind is LayerKind.MLA:
        return layer.key_dim * one, f"{layer.key_dim} latent × {one} B"
    both = f"2 × {layer.key_dim}" if layer.key_dim == layer.value_dim else f"({layer.key_dim} + {layer.value_dim})"
    plural = "head" if heads == 1 else "heads"
    return heads * (layer.key_dim + layer.value_dim) * one, f"{heads} KV {plural} × {both} × {one} B"


def _rank_heads(layer: Layer, tp: int) -> int:
    """Return the KV heads on one rank.

    Fewer heads than ranks are held several times. Raises ``ModelConfigError``.
    """
    if layer.replicated or tp == 1:
        return layer.kv_heads
    if layer.kv_heads % tp and tp % layer.kv_heads:
        raise ModelConfigError(
            f"{layer.kv_heads} KV heads do not divide among {tp} ranks",
            where="--tp",
            valid=f"a divisor or a multiple of {layer.kv_heads}",
        )
    return max(1, layer.kv_heads // tp)


def _state_part(layer: Layer, count: int, tp: int) -> LayerGroupSize:
    for each in layer.state:
        if each.split % tp or (each.groups > 1 and each.groups % tp):
            raise ModelConfigError(
                f"the {each.name} state of {layer.name} does not divide among {tp} ranks",
                where="--tp",
                valid=f"a divisor of {each.groups if each.groups > 1 else each.split}",
            )
    whole = sum(part.rank_numbers(1) * DTYPE_BYTES[part.dtype] for part in layer.state)
    rank = sum(part.rank_numbers(tp) * DTYPE_BYTES[part.dtype] for part in layer.state)
    parts = " + ".join(f"{part.name} {part.rank_numbers(1):,} × {DTYPE_BYTES[part.dtype]} B" for part in layer.state)
    return LayerGroupSize(
        layer=layer,
        layers=count,
        token_bytes=0,
        rank_token_bytes=0,
        state_bytes=count * whole,
        rank_state_bytes=count * rank,
        arithmetic=f"{count} layers × ({parts})",
    )


def _model_dtype(shape: ModelShape, serving: Serving) -> str:
    if serving.dtype is None or plain_dtype(serving.dtype) == AUTO:
        return shape.dtype
    dtype = plain_dtype(serving.dtype)
    if dtype not in ("bfloat16", "float16", "half", "float32", "float"):
        raise _unknown("--dtype", serving.dtype, ("auto", "bfloat16", "float16", "float32"))
    return dtype


def _kv_dtype(shape: ModelShape, serving: Serving, dtype: str) -> tuple[str, list[str]]:
    query = plain_dtype(serving.kv_dtype)
    if query == AUTO:
        if shape.kv_dtype is not None:
            return shape.kv_dtype, [f"KV in {shape.kv_dtype}: the checkpoint has quantised KV, and auto uses that"]
        return dtype, []
    if query not in KV_DTYPES:
        raise _unknown("--kv-dtype", serving.kv_dtype, KV_DTYPES)
    if query == FP8_DS_MLA:
        rows = [layer for layer, _ in shape.layers if layer.by_token and layer.kind is not LayerKind.INDEX]
        if any(layer.kind is not LayerKind.MLA or layer.key_dim != FP8_DS_MLA_LATENT + FP8_DS_MLA_ROPE for layer in rows):
            raise ModelConfigError(
                f"{FP8_DS_MLA} is for MLA with {FP8_DS_MLA_LATENT} latent and {FP8_DS_MLA_ROPE} rotary numbers only",
                where="--kv-dtype",
                valid=", ".join(KV_DTYPES[:-1]),
            )
    return query, []


def _unknown(flag: str, given: str, valid: tuple[str, ...]) -> ModelConfigError:
    near = nearest(given, valid)
    hint = f"; did you mean {near}?" if near else ""
    return ModelConfigError(f"{given!r} is unknown{hint}", where=flag, valid=", ".join(valid))


def _notes(parts: tuple[LayerGroupSize, ...], serving: Serving) -> list[str]:
    """Return notes for a reader of the figures."""
    notes = []
    tp = serving.tp
    several = [part for part in parts if part.rank_token_bytes * tp > part.token_bytes]
    if any(part.layer.replicated for part in several):
        notes.append(f"MLA is whole on each of the {tp} ranks, so a hand-off moves it {tp} times")
    for part in several:
        if not part.layer.replicated:
            heads = part.layer.kv_heads
            notes.append(f"{heads} KV heads on {tp} ranks: each exists and moves {tp // heads} times")
            break
    if any(part.layer.kind is LayerKind.CHUNK for part in parts):
        notes.append("chunked attention keeps at most one chunk; how much depends on where the prompt ends")
    if any(part.layer.kind is LayerKind.STATE for part in parts):
        notes.append("states as with --mamba-cache-dtype auto and without speculative decoding; engines may pad their pages")
    if any(part.layer.window is not None for part in parts) and serving.windowed:
        notes.append(
            "windows need the hybrid cache manager on both engines (on by default); --disable-hybrid-kv-cache-manager keeps all"
        )
    return notes
