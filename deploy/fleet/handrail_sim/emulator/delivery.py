"""When an answer's tokens reach the edge while its client reads slowly.

A proxy reads on while its client reads nothing, until the proxy's buffer is full. It then waits until the client reads again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

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
