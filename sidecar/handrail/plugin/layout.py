"""Size of a KV block, from the engine's own description of its cache.

MLA and hybrid models are included. ``kv_cache_config.kv_cache_groups``: each group's blocks hold some layers;
``page_size_bytes`` is one block of one layer, or of all the group's layers where the group describes them one by one
(``kv_cache_specs``). On one rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class KvLayout:
    """Block bytes by KV-cache group, for one rank and for the engine."""

    def __init__(self, kv_cache_config: Any, ranks: int) -> None:
        groups = getattr(kv_cache_config, "transfer_groups", None) or getattr(kv_cache_config, "kv_cache_groups", None) or ()
        self.rank_block_bytes = tuple(_block_bytes(group) for group in groups)
        self._ranks = ranks

    def engine_bytes(self, sizes: Sequence[int]) -> int | None:
        """Bytes of ``sizes`` blocks (by group) on all ranks.

        None where the groups are not those of the cache.
        """
        if not any(sizes):
            return 0
        if len(sizes) != len(self.rank_block_bytes):
            return None
        if len(sizes) == 1:
            return self._ranks * sizes[0] * self.rank_block_bytes[0]
        return self._ranks * sum(count * size for count, size in zip(sizes, self.rank_block_bytes, strict=True))

    def transferred(self, here: Sequence[int], there: Sequence[int]) -> tuple[int, ...]:
        """Blocks that move, by group.

        These are the blocks to fill here, but no more than the peer has.
        """
        if len(here) != len(there):
            return tuple(here)
        if len(here) == 1:  # the common case, 1 us less
            return (min(here[0], there[0]),)
        return tuple(min(mine, theirs) for mine, theirs in zip(here, there, strict=True))


def _block_bytes(group: Any) -> int:
    spec = group.kv_cache_spec
    layers = 1 if hasattr(spec, "kv_cache_specs") else len(group.layer_names)
    return int(spec.page_size_bytes) * layers
