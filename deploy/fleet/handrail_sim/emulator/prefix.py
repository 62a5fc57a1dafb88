"""The prefix cache of one engine: the leading prompt blocks that it holds.

It holds blocks that the engine has computed or loaded before. No clock, no I/O.
Blocks are the 512-token ones of Mooncake's traces. The least recently used block is dropped first.
The room that cached blocks take in the engine's pool is not modelled, since vLLM frees them before it would refuse a request.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

PREFIX_TOKENS = 512


class PrefixCache:
    def __init__(self, capacity_blocks: int) -> None:
        self._capacity = capacity_blocks
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def match(self, blocks: Sequence[int], prompt_tokens: int) -> int:
        """Return how many leading tokens need not be computed.

        At most all but one, since the engine samples from the last one.
        """
        hits = 0
        for block in blocks:
            if block not in self._blocks:
                break
            self._blocks.move_to_end(block)
            hits += 1
        return min(hits * PREFIX_TOKENS, prompt_tokens - 1)

    def keep(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self._capacity:
            self._blocks.popitem(last=False)
