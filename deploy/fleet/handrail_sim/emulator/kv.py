"""The KV of one engine: its blocks, what P keeps for D, and cached prefixes.

P keeps blocks until they are read or their lease expires. No clock, no I/O.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

BLOCK_TOKENS = 16


def blocks_for(tokens: int) -> int:
    """Count the blocks that ``tokens`` tokens fill."""
    return -(-tokens // BLOCK_TOKENS)


class BlockPool:
    """A pool of block ids ``1`` to ``size``; vLLM keeps block 0 as its null block."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.withheld = 0  # free blocks that are withheld from this engine's requests
        self._free = list(range(size, 0, -1))

    @property
    def used_share(self) -> float:
        """Return the share of blocks in use, 0 to 1."""
        return 1.0 - len(self._free) / self.size

    def take(self, count: int) -> tuple[int, ...] | None:
        """Take ``count`` blocks; None when there are not enough."""
        if count > len(self._free) - self.withheld:
            return None
        first = len(self._free) - count
        taken = tuple(reversed(self._free[first:]))
        del self._free[first:]
        return taken

    def give_back(self, blocks: tuple[int, ...]) -> None:
        self._free.extend(reversed(blocks))


@dataclass(frozen=True, slots=True)
class Publication:
    """The blocks that P keeps for one request.

    The request id alone says who may read them, as in vLLM.
    """

    request_id: str
    blocks: tuple[int, ...]
    tokens: int


class Publications:
    """P's side of the hand-off: the published blocks.

    Blocks stay until ``release`` or until their lease ends. A heartbeat renews the lease.
    """

    def __init__(self, lease_ns: int) -> None:
        self._lease_ns = lease_ns
        self._held: OrderedDict[str, tuple[Publication, int]] = OrderedDict()  # oldest deadline first: all leases have one length

    def __len__(self) -> int:
        return len(self._held)

    def add(self, publication: Publication, now_ns: int) -> None:
        self._held[publication.request_id] = (publication, now_ns + self._lease_ns)

    def find(self, request_id: str) -> Publication | None:
        held = self._held.get(request_id)
        return held[0] if held else None

    def renew(self, request_id: str, now_ns: int) -> bool:
        """Begin the lease again; False when nothing is held under this id."""
        held = self._held.get(request_id)
        if held is None:
            return False
        self._held[request_id] = (held[0], now_ns + self._lease_ns)
        self._held.move_to_end(request_id)
        return True

    def release(self, request_id: str) -> Publication | None:
        """Release blocks that were read; None when they are already gone."""
        held = self._held.pop(request_id, None)
        return held[0] if held else None

    def expired(self, now_ns: int) -> list[Publication]:
        """Remove and return the publications whose lease has ended."""
        gone = []
        while self._held:
            publication, deadline_ns = next(iter(self._held.values()))
            if deadline_ns > now_ns:
                break
            self._held.popitem(last=False)
            gone.append(publication)
        return gone

    @property
    def next_deadline_ns(self) -> int | None:
        return next(iter(self._held.values()))[1] if self._held else None


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
