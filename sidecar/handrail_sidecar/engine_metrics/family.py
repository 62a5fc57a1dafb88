"""Map one metric family of an engine's page to a quantity of the schema."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

ENGINE_LABELS: Final = ("engine", "dp_rank", "agent_name")
"""Labels that distinguish the engines on one page; the first one present wins.

vLLM's data-parallel rank, SGLang's, NIXL's agent.
"""

COPY_LABELS: Final = frozenset({"tp_rank", "pp_rank", "moe_ep_rank", "pid", "rank"})
"""Labels of processes that repeat the same count.

Of counters that differ only in these labels the largest counts, not the sum.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One row of the table.

    When several rows have the same quantity (and fixed label), the first that is on the page is read; so put new names first.
    ``label``: the source's label whose value becomes the quantity's. ``fixed``: the value when the family has no such label.
    ``expected``: its absence is worth a note when another family of the emitter is there.
    """

    name: str  # as exposed: a counter has _total
    quantity: str
    versions: str = ""
    scale: float = 1.0
    label: str = ""
    fixed: str = ""
    expected: bool = False
    rename: Mapping[str, str] = field(default_factory=dict)  # values of the label that get another word

    @property
    def emitter(self) -> str:
        """The program or library that exposes the family, by its prefix."""
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
"""Prefixes of family names and their emitters, longer prefixes first."""


def emitter_of(name: str) -> str:
    """Return the emitter of a family of this name; '' for an unknown one."""
    return next((emitter for prefix, emitter in PREFIXES.items() if name.startswith(prefix)), "")
