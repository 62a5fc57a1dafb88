"""Count KV fetches by peer for the sidecar's /metrics: bytes and busy time.

Busy time is the time in which at least one transfer from the peer was running.
Bytes over busy seconds is the link's rate while transferring, whatever overlaps.
Peers are bounded: pods come and go, and a label for each of them would stay.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from handrail.records import KvFetch, Observation

MOST_PEERS: Final = 32
QUIET_NS: Final = 3_600 * 10**9
"""Time without a fetch after which a peer gives its label to another one.

Its counts go to ``other``.
"""

MOST_INTERVALS: Final = 64
OTHER: Final = "other"


class Covered:
    """Adds up the time that at least one interval covers.

    Intervals come in nearly any order.
    """

    def __init__(self) -> None:
        self._known: list[tuple[int, int]] = []  # disjoint, rising; the earliest are forgotten
        self._forgotten_ns = 0  # everything before this is forgotten

    def add(self, begin_ns: int, end_ns: int) -> int:
        """Return how much of [begin, end) was not covered before.

        Forgotten time counts as covered.
        """
        begin_ns = max(begin_ns, self._forgotten_ns)
        if end_ns <= begin_ns:
            return 0
        first = bisect_left(self._known, begin_ns, key=lambda known: known[1])
        last = first
        covered, low, high = 0, begin_ns, end_ns
        while last < len(self._known) and self._known[last][0] <= end_ns:
            known = self._known[last]
            covered += max(0, min(end_ns, known[1]) - max(begin_ns, known[0]))
            low, high, last = min(low, known[0]), max(high, known[1]), last + 1
        self._known[first:last] = [(low, high)]
        if len(self._known) > MOST_INTERVALS:
            self._forgotten_ns = self._known.pop(0)[1]
        return end_ns - begin_ns - covered


@dataclass(slots=True)
class PeerBytes:
    """Counts of one peer since start."""

    fetches: Counter[str] = field(default_factory=Counter)  # by outcome
    bytes_moved: int = 0
    busy_ns: int = 0
    covered: Covered = field(default_factory=Covered)
    last_unix_ns: int = 0


class PeerTally:
    """Counts KV fetches by peer.

    ``outcome_of``: the outcome that the consumer knows for its load.
    ``peers`` is by ``host:port`` of the peers' side channels.
    """

    def __init__(self, outcome_of: Callable[[KvFetch], str]) -> None:
        self.peers: OrderedDict[str, PeerBytes] = OrderedDict()
        self._outcome_of = outcome_of

    def take(self, record: Observation) -> None:
        """Count a hand-off that has ended."""
        if not isinstance(record, KvFetch) or record.provisional or record.peer_host is None:
            return
        name = f"{record.peer_host}:{record.peer_port}" if record.peer_port else record.peer_host
        peer = self._peer(name, record.known_unix_ns)
        peer.fetches[self._outcome_of(record)] += 1
        if record.posted_ns is None or record.done_ns is None or record.bytes_moved is None:
            return
        peer.bytes_moved += record.bytes_moved
        began = record.known_unix_ns
        peer.busy_ns += peer.covered.add(began + record.posted_ns, began + max(record.posted_ns, record.done_ns))

    def _peer(self, name: str, at_unix_ns: int) -> PeerBytes:
        if name not in self.peers:
            if sum(known != OTHER for known in self.peers) >= MOST_PEERS and not self._make_room(at_unix_ns):
                name = OTHER
            self.peers.setdefault(name, PeerBytes())
        peer = self.peers[name]
        peer.last_unix_ns = max(peer.last_unix_ns, at_unix_ns)
        return peer

    def _make_room(self, now_unix_ns: int) -> bool:
        quiet = min((peer.last_unix_ns, name) for name, peer in self.peers.items() if name != OTHER)
        if now_unix_ns - quiet[0] < QUIET_NS:
            return False
        gone, other = self.peers.pop(quiet[1]), self.peers.setdefault(OTHER, PeerBytes())
        other.fetches.update(gone.fetches)
        other.bytes_moved += gone.bytes_moved
        other.busy_ns += gone.busy_ns
        return True
