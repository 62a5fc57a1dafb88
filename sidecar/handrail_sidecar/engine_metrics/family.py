"""One family of an engine's page: what it is called there, and which quantity it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

ENGINE_LABELS: Final = ("engine", "dp_rank", "agent_name")
"""Labels that tell engines of one page apart, first one present wins: vLLM's data-parallel rank, SGLang's, NIXL's agent."""

COPY_LABELS: Final = frozenset({"tp_rank", "pp_rank", "moe_ep_rank", "pid", "rank"})
"""Labels of processes that tell the same again: of counters that differ in these alone the largest counts, not the sum."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One row. Of several rows of a quantity (and fixed label) the first that is on the page is read; so put new names first.

    ``label``: the source's label whose value becomes the quantity's. ``fixed``: the value where the family has no such label.
    ``expected``: its absence is worth telling wherever another family of the emitter is there.
    """

    name: str  # as exposed: a counter with _total
    quantity: str
    versions: str = ""
    scale: float = 1.0
    label: str = ""
    fixed: str = ""
    expected: bool = False
    rename: Mapping[str, str] = field(default_factory=dict)  # values of the label under other words

    @property
    def emitter(self) -> str:
        """Who exposes it, told from its prefix."""
        return emitter_of(self.name)


PREFIXES: Final = {
    "vllm:nixl_": "vllm-nixl",
    "vllm:mooncake_": "vllm-mooncake",
    "vllm:": "vllm",
    "sglang:": "sglang",
    "vllm_router_": "vllm-router",
    "sgl_router_": "sglang-router",
    "smg_": "sglang-router",
    "agent_": "nixl",
    "lmcache:": "lmcache",
    "tent_": "mooncake",
    "dynamo_": "dynamo",
    "trtllm_": "tensorrt-llm",
    "process_": "process",
}
"""Beginnings of family names, longer ones first where they nest, and who uses them."""


def emitter_of(name: str) -> str:
    """Who exposes a family of this name; '' for nobody we know."""
    return next((emitter for prefix, emitter in PREFIXES.items() if name.startswith(prefix)), "")
