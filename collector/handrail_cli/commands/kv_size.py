"""Compute the size of a model's KV cache from its config.json.

It prints the bytes per token, the bytes that a prompt hands over, and the time
that a link needs for them. It needs no engine and no network.
Sizes are decimal (1 GB = 10^9 bytes), like those of links.

examples:
  handrail kv-size /models/Llama-3.1-70B --tokens 10000 --link-gbps 400
  handrail kv-size config.json --tp 16 --kv-dtype fp8
  handrail kv-size /models/gemma-3-27b-it --json
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from handrail.config.schema import Flags
from handrail.durations import format_duration
from handrail_cli.errors import EXIT_OK, EXIT_USAGE, CliError
from handrail_cli.formatting import format_bytes
from handrail_doctor.kv_size.keys import ModelConfigError
from handrail_doctor.kv_size.read import read_model
from handrail_doctor.kv_size.shape import AUTO, KV_DTYPES, LayerKind
from handrail_doctor.kv_size.size import BLOCK_SIZE, LayerGroupSize, Serving, Sizes, sizes

DEFAULT_TOKENS: Final = 10_000
_PIPE_WIDTH: Final = 160
_MOST_TOKENS: Final = 10**9


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``handrail kv-size``."""
    parser.add_argument("model", metavar="MODEL_CONFIG", type=Path, help="config.json of a model, or its folder")
    parser.add_argument(
        "--tokens",
        metavar="N",
        type=int,
        default=DEFAULT_TOKENS,
        help=f"length of the prompt in tokens (default {DEFAULT_TOKENS})",
    )
    parser.add_argument("--link-gbps", metavar="GBIT", type=float, help="rate of the link in 10^9 bits a second")
    add_serving_flags(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def add_serving_flags(parser: Flags) -> None:
    """Add flags for how the engine serves the model.

    ``kv-size`` and ``doctor`` have the same ones.
    """
    parser.add_argument("--dtype", metavar="NAME", help="number format of the model (default: as in its config)")
    parser.add_argument("--kv-dtype", metavar="NAME", help=f"number format of the KV: {', '.join(KV_DTYPES)} (default {AUTO})")
    parser.add_argument("--tp", metavar="N", type=int, help="number of tensor-parallel ranks (default 1)")
    parser.add_argument("--block-size", metavar="N", type=int, help=f"tokens in a block (default {BLOCK_SIZE})")
    parser.add_argument(
        "--no-hybrid", action="store_true", help="the engines run without the hybrid KV cache manager: windows keep every token"
    )


def run(arguments: argparse.Namespace) -> int:
    """Return 0; raise ``CliError`` (2) for a config or flags that are invalid."""
    for flag, value, most in (("--tokens", arguments.tokens, _MOST_TOKENS), ("--link-gbps", arguments.link_gbps, 10**6)):
        if value is not None and not 0 < value <= most:
            raise CliError(what=f"{flag} is {value}", valid=f"above 0, at most {most}", exit_code=EXIT_USAGE)
    try:
        found = sizes(read_model(arguments.model), serving(arguments))
    except ModelConfigError as error:
        raise config_failure(error) from None
    if arguments.json:
        print(json.dumps(sizes_json(found, arguments.tokens, arguments.link_gbps)))
    else:
        _print(found, arguments.tokens, arguments.link_gbps)
    return EXIT_OK


def serving(arguments: argparse.Namespace) -> Serving:
    """Return how the engine serves the model, by the flags.

    Raises ``CliError``.
    """
    for flag, value, most in (("--tp", arguments.tp, 4096), ("--block-size", arguments.block_size, 10**6)):
        if value is not None and not 1 <= value <= most:
            raise CliError(what=f"{flag} is {value}", valid=f"a whole number from 1 to {most}", exit_code=EXIT_USAGE)
    return Serving(
        kv_dtype=arguments.kv_dtype or AUTO,
        dtype=arguments.dtype,
        tp=arguments.tp or 1,
        block_size=arguments.block_size or BLOCK_SIZE,
        windowed=not arguments.no_hybrid,
    )


def config_failure(error: ModelConfigError) -> CliError:
    """Convert the error to one that a command shows."""
    return CliError(what=error.what, where=error.where, valid=error.valid, exit_code=EXIT_USAGE)


# --- JSON -----------------------------------------------------------------------------------------------------------------


def sizes_json(found: Sizes, tokens: int, link_gbps: float | None) -> dict[str, Any]:
    """Return everything in bytes and ns.

    ``assumed``: the values that the config does not hold.
    """
    request, serving = found.request(tokens), found.serving
    return {
        "architecture": found.shape.architecture,
        "model_type": found.shape.model_type,
        "known": found.shape.known,
        "layers": found.shape.depth,
        "dtype": found.dtype,
        "kv_dtype": found.kv_dtype,
        "tp": serving.tp,
        "block_size": serving.block_size,
        "windowed": serving.windowed,
        "token_bytes": found.token_bytes,
        "moved_token_bytes": found.moved_token_bytes,
        "state_bytes": found.state_bytes,
        "parts": [_part_json(part, moved) for part, moved in zip(found.parts, request.by_part, strict=True)],
        "request": {"tokens": tokens, "blocks": request.blocks, "bytes": request.bytes},
        "link": None
        if link_gbps is None
        else {"bits_per_s": link_gbps * 1e9, "transfer_ns": request.transfer_ns(link_gbps * 1e9 / 8)},
        "assumed": list(found.shape.assumed),
        "notes": list(found.notes[len(found.shape.assumed) :]),
    }


def _part_json(part: LayerGroupSize, moved: int) -> dict[str, Any]:
    layer = asdict(part.layer)
    layer["kind"] = part.layer.kind.value
    sums = {
        name: getattr(part, name) for name in ("token_bytes", "rank_token_bytes", "state_bytes", "rank_state_bytes", "arithmetic")
    }
    return {"layers": part.layers, **layer, **sums, "request_bytes": moved}


# --- for a person ---------------------------------------------------------------------------------------------------------


def _print(found: Sizes, tokens: int, link_gbps: float | None) -> None:
    from rich.text import Text

    from handrail_cli.console import answer_console
    from handrail_cli.tables import Column, table

    console = answer_console(in_pipe=_PIPE_WIDTH)
    request, serving = found.request(tokens), found.serving
    ranks = f", {serving.tp} tensor-parallel ranks" if serving.tp > 1 else ""
    console.print(Text(f"{found.shape.architecture}, {found.shape.depth} layers, KV in {found.kv_dtype}{ranks}", style="bold"))
    console.print()
    rows = [
        (
            str(part.layers),
            _keeps(part),
            part.arithmetic,
            f"{part.token_bytes:,}" if part.layer.by_token else "–",
            f"{moved:,}" if moved else "–",
        )
        for part, moved in zip(found.parts, request.by_part, strict=True)
    ]
    if len(rows) > 1:
        rows.append(("", "", "total", f"{found.token_bytes:,}", f"{request.bytes:,}"))
    columns = [
        Column[tuple[str, str, str, str, str]]("layers", lambda row: row[0], right=True),
        Column("what", lambda row: row[1]),
        Column("how", lambda row: row[2]),
        Column("bytes per token", lambda row: row[3], right=True),
        Column(f"{tokens:,} tokens", lambda row: row[4], right=True),
    ]
    console.print(table(columns, rows, console.width))
    console.print()
    for line in _sentences(found, tokens, link_gbps):
        console.print(line)
    for note in found.notes:
        word = "assumed: " if note in found.shape.assumed else ""
        console.print(Text(f"{word}{note}", style="yellow" if word else "dim"))


def _keeps(part: LayerGroupSize) -> str:
    layer = part.layer
    if layer.kind is LayerKind.WINDOW:
        return f"sliding window of {layer.window:,}"
    if layer.kind is LayerKind.CHUNK:
        return f"chunks of {layer.window:,}"
    return f"state ({layer.name})" if layer.kind is LayerKind.STATE else layer.kind.value


def _sentences(found: Sizes, tokens: int, link_gbps: float | None) -> list[str]:
    request, serving = found.request(tokens), found.serving
    size = format_bytes(request.bytes)
    lines = [
        f"{tokens:,} tokens fill {request.blocks:,} blocks of {serving.block_size} and hand over {size} ({request.bytes:,} bytes)"
    ]
    if serving.tp > 1:
        rank = sum(part.rank_token_bytes for part in found.parts)
        lines.append(f"one rank keeps {rank:,} bytes per token; {serving.tp} ranks move {found.moved_token_bytes:,}")
    if found.state_bytes:
        lines.append(f"{format_bytes(found.state_bytes)} of that is state, which does not grow with the prompt")
    if link_gbps is not None:
        took = format_duration(request.transfer_ns(link_gbps * 1e9 / 8))
        lines.append(f"over {link_gbps:g} Gb/s ({link_gbps / 8:g} GB/s) this takes {took} at line rate, without overhead")
    return lines
