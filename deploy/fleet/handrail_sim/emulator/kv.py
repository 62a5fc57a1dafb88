"""The KV blocks of one engine: a pool of block ids, and what a prefill holds for a decode until it is read or expires."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

BLOCK_TOKENS = 16


def blocks_for(tokens: int) -> int:
    """Blocks that ``tokens`` tokens fill."""
    return -(-tokens // BLOCK_TOKENS)


class BlockPool:
    """Block ids ``1`` to ``size`` (vLLM keeps block 0 as its null block)."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.withheld = 0  # of the free blocks, those that somebody else has a claim on
        self._free = list(range(size, 0, -1))

    @property
    def used_share(self) -> float:
        """0 to 1."""
        return 1.0 - len(self._free) / self.size

    def take(self, count: int) -> tuple[int, ...] | None:
        """``count`` blocks, or None when there are not enough."""
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
    """What P holds for one request: who may read it is known by the request id alone, as in vLLM."""

    request_id: str
    blocks: tuple[int, ...]
    tokens: int


class Publications:
    """P's side of the hand-off: blocks stay until ``release`` or until the lease ends, which a heartbeat renews."""

    def __init__(self, lease_ns: int) -> None:
        self._lease_ns = lease_ns
        self._held: OrderedDict[str, tuple[Publication, int]] = OrderedDict()  # oldest deadline first: one lease length for all

    def __len__(self) -> int:
        return len(self._held)

    def add(self, publication: Publication, now_ns: int) -> None:
        self._held[publication.request_id] = (publication, now_ns + self._lease_ns)

    def find(self, request_id: str) -> Publication | None:
        held = self._held.get(request_id)
        return held[0] if held else None

    def renew(self, request_id: str, now_ns: int) -> bool:
        """Start the lease anew; False when nothing is held under this id."""
        held = self._held.get(request_id)
        if held is None:
            return False
        self._held[request_id] = (held[0], now_ns + self._lease_ns)
        self._held.move_to_end(request_id)
        return True

    def release(self, request_id: str) -> Publication | None:
        """The blocks were read; None when they are gone already."""
        held = self._held.pop(request_id, None)
        return held[0] if held else None

    def expired(self, now_ns: int) -> list[Publication]:
        """Remove and return what nobody read in time."""
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
