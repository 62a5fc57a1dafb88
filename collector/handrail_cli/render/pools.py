"""Render each pool of GPUs in a line.

The line says whether arithmetic or memory limits the pool, and how that is known.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from rich.text import Text

_BOUND: Final = {
    "compute_bound": "compute-bound",
    "memory_bound": "memory-bound",
    "balanced": "balanced between compute and memory",
    "unknown": "not known whether compute-bound or memory-bound",
}
_UNDER: Final = " " * 14


def pool_lines(pools: Sequence[Mapping[str, Any]], width: int) -> Iterator[Text]:
    """Write the lines of the pools.

    Nothing where no pool has sampled GPUs: a line would be the same every time.
    """
    if not any(pool["gpus"] or pool["shared"] for pool in pools):
        return
    yield Text("Pools of GPUs", style="bold")
    for pool in pools:
        line = Text(f"  {pool['role']:<11} ")
        line.append(_BOUND.get(pool["bound"], pool["bound"]), style="bold" if pool["bound"] != "unknown" else "dim")
        line.append(f"  {_what(pool)}".rstrip(), style="dim")
        yield line
        for part in textwrap.wrap(_evidence(pool), width - len(_UNDER)):
            yield Text(f"{_UNDER}{part}", style="dim")


def _what(pool: Mapping[str, Any]) -> str:
    if not pool["gpus"]:
        return ""
    hosts = f" on {pool['hosts']} host{'s' if pool['hosts'] > 1 else ''}"
    return f"{pool['gpus']} × {', '.join(pool['products']) or 'GPU'}{hosts}"


def _evidence(pool: Mapping[str, Any]) -> str:
    if pool["how"] == "measured":
        busy = f", busy {_percent(pool['busy'])} of the time" if pool["busy"] is not None else ""
        return f"measured: tensor {_percent(pool['tensor'])}, DRAM {_percent(pool['dram'])} while busy{busy}"
    if pool["how"] == "estimated":
        return (
            f"estimated: {pool['tokens_a_step']:,.0f} tokens a step are at most {pool['intensity']:,.0f} operations a byte, "
            f"the GPU's ridge is at {pool['ridge']:,.0f} (dense weights of 2 bytes, KV reads left out)"
        )
    return str(pool["why"])


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
