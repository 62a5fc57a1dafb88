"""When messages between processes, and tokens at a slow client, arrive.

A message takes a minimum, and on average ``hop_spread_ns`` more.
A proxy reads on while its client reads nothing, until the proxy's buffer is full. It then waits until the client reads again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import accumulate

from handrail_sim.emulator.noise import uniform
from handrail_sim.emulator.scenario import Scenario

_HOP = 8  # the purpose of a request's draw


class Hop(IntEnum):
    """The messages of a request.

    A retry at another P, and the error before it, take the minimum.
    """

    EDGE_ROUTER = 0
    ROUTER_P = 1  # collocated: the engine
    P_ROUTER = 2
    ROUTER_D = 3
    FIRST_D_ROUTER = 4  # the first token
    FIRST_ROUTER_EDGE = 5
    LAST_D_ROUTER = 6  # the end of the answer
    LAST_ROUTER_EDGE = 7
    D_P = 8  # D has read: NIXL's notification


FIRST = (Hop.FIRST_D_ROUTER, Hop.FIRST_ROUTER_EDGE)
LAST = (Hop.LAST_D_ROUTER, Hop.LAST_ROUTER_EDGE)


def hop_ns(scenario: Scenario, seed: int, request: int, hop: Hop) -> int:
    """Draw the duration of one hop.

    It is the same for one seed, whatever else happens. The spread is exponential.
    """
    if not scenario.hop_spread_ns:
        return scenario.hop_ns
    return scenario.hop_ns + round(-math.log(1 - uniform(seed, request, _HOP, hop)) * scenario.hop_spread_ns)


CLIENT = 7  # the purpose of a request's draw, as in host.py
SLOW_CLIENTS = 0.2
"""Share of the clients that the fault ``client_slow`` strikes."""

BUFFERED_TOKENS = 256
"""Tokens that fit into a proxy's buffer of 64 KiB, at about 250 bytes a token."""

AT_ONCE_NS = 20_000
"""Time between two reads of tokens that were already waiting."""


@dataclass(frozen=True, slots=True)
class Delivered:
    """The reads of one answer.

    ``reads_ns``: when the edge read each token.
    ``held_ns``: from when to when the edge read nothing.
    ``paused_ns``: from when to when the client read nothing.
    """

    reads_ns: tuple[int, ...]
    held_ns: tuple[int, int] | None
    paused_ns: tuple[int, int] | None

    @property
    def gaps_ns(self) -> tuple[int, ...]:
        """Return the times between the reads."""
        return tuple(later - earlier for earlier, later in zip(self.reads_ns, self.reads_ns[1:], strict=False))


def delivered(first_ns: int | None, gaps_ns: Sequence[int], stands_ns: int) -> Delivered:
    """Compute when the edge reads each token, in true time of the run.

    ``first_ns``: None where there was no token.
    The client reads nothing for ``stands_ns``, from a quarter of the answer on.
    """
    if first_ns is None:
        return Delivered((), None, None)
    reads = list(accumulate(gaps_ns, initial=first_ns))
    if not stands_ns:
        return Delivered(tuple(reads), None, None)
    stops = len(reads) // 4
    pauses = reads[stops], reads[stops] + stands_ns
    full = stops + BUFFERED_TOKENS
    if full >= len(reads) or reads[full] >= pauses[1]:
        return Delivered(tuple(reads), None, pauses)
    held = reads[full], pauses[1]
    for place in range(full + 1, len(reads)):
        reads[place] = max(reads[place], held[1] + (place - full) * AT_ONCE_NS)
    return Delivered(tuple(reads), held, pauses)
