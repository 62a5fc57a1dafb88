"""Handshakes of an engine's workers with its peers.

A load that needs one waits for it, whichever load began it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from handrail_sidecar.plugin_merge.bounds import Bounded

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
