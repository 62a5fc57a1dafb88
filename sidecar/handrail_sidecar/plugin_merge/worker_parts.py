"""What an engine's workers did for a KV load: their parts and handshakes.

A load that needs a handshake waits for it, whichever load began it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from handrail_sidecar.plugin_merge.bounds import Bounded


@dataclass(slots=True)
class Rank:
    """One worker's part of a load."""

    load_ns: int | None = None
    posted_ns: int | None = None
    done_ns: int | None = None
    done_bound_ns: int = 0
    loaded_ns: int | None = None
    loaded_bound_ns: int = 0
    failed: bool = False
    moved: int | None = None
    descriptors: int | None = None


def last_done(ranks: list[Rank]) -> tuple[int | None, int]:
    """When the last rank's last transfer was seen done, and its bound.

    The bound is how much earlier it may have been. Without reported transfers the worker's report to the scheduler is the end.
    """
    ends = []
    for rank in ranks:
        if rank.done_ns is not None:
            ends.append((rank.done_ns, _since_begun(rank, rank.done_ns, rank.done_bound_ns)))
        elif rank.loaded_ns is not None and not rank.failed:
            ends.append((rank.loaded_ns, _since_begun(rank, rank.loaded_ns, rank.loaded_bound_ns)))
    return max(ends, default=(None, 0))


def _since_begun(rank: Rank, end_ns: int, bound_ns: int) -> int:
    """Limit a bound to the length of the transfer.

    The last poll may have been before the transfer began.
    """
    begun = rank.posted_ns if rank.posted_ns is not None else rank.load_ns
    return bound_ns if begun is None else min(bound_ns, max(0, end_ns - begun))


def least(known: int | None, at_ns: int) -> int:
    return at_ns if known is None else min(known, at_ns)


def added(known: int | None, more: int | None) -> int | None:
    return known if more is None else more + (known or 0)


def total(values: Iterable[int | None]) -> int | None:
    found = [value for value in values if value is not None]
    return sum(found) if found else None


MAX_PEERS: Final = 1024
MAX_HANDSHAKES: Final = 64  # remembered of one rank with one peer


@dataclass(slots=True)
class Handshake:
    """One handshake of one worker with a peer; ``end_ns`` None while it runs."""

    begin_ns: int
    end_ns: int | None = None


class Handshakes:
    """The latest handshake by rank and peer engine."""

    def __init__(self) -> None:
        self._known: Bounded[list[Handshake]] = Bounded(MAX_PEERS)

    def note(self, peer: str, rank: int, begin_ns: int, end_ns: int | None) -> None:
        """Note a handshake that has begun, or one that has ended, well or not."""
        key = f"{rank}:{peer}"
        known = self._known.get(key)
        if known is None:
            known = []
            self._known.put(key, known)
        for handshake in known:
            if handshake.begin_ns == begin_ns:
                handshake.end_ns = end_ns if end_ns is not None else handshake.end_ns
                return
        known.append(Handshake(begin_ns, end_ns))
        del known[:-MAX_HANDSHAKES]

    def contact(
        self, peer: str | None, ranks: Iterable[int], started_ns: int | None, until_ns: int | None
    ) -> tuple[int | None, int | None]:
        """Begin and end of the handshake that a load waited for.

        The wait lies between ``started_ns`` and ``until_ns``; None, None for none. The end is None while one of the ranks still
        waits.
        """
        if peer is None or started_ns is None:
            return None, None
        begun: list[int] = []
        met: list[int | None] = []
        for rank in ranks:
            for handshake in self._known.get(f"{rank}:{peer}", ()):
                over = handshake.end_ns is not None and handshake.end_ns <= started_ns
                if not over and (until_ns is None or handshake.begin_ns <= until_ns):
                    begun.append(max(handshake.begin_ns, started_ns))
                    met.append(handshake.end_ns)
        if not begun:
            return None, None
        ended = [end for end in met if end is not None]
        return min(begun), max(ended) if len(ended) == len(met) else None
