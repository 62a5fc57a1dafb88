"""When the tokens of an answer come to the edge, and when its client has them: a client that reads nothing, and what is buffered.

A proxy reads on while its client takes nothing, until its buffer is full, and then not until the client reads again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

CLIENT = 7  # what a request's draw is for, as in host.py
SLOW_CLIENTS = 0.2
"""Share of the clients that the fault ``client_slow`` strikes."""

BUFFERED_TOKENS = 256
"""What stands in a proxy of 64 KiB at about 250 bytes a token."""

AT_ONCE_NS = 20_000
"""Between two tokens that were waiting to be read."""


@dataclass(frozen=True, slots=True)
class Delivered:
    """``reads_ns``: when the edge read each token. ``held_ns``: from when to when it read nothing. ``paused_ns``: its client."""

    reads_ns: tuple[int, ...]
    held_ns: tuple[int, int] | None
    paused_ns: tuple[int, int] | None

    @property
    def gaps_ns(self) -> tuple[int, ...]:
        """Between the reads."""
        return tuple(later - earlier for earlier, later in zip(self.reads_ns, self.reads_ns[1:], strict=False))


def delivered(first_ns: int | None, gaps_ns: Sequence[int], stands_ns: int) -> Delivered:
    """By true time of the run. ``first_ns`` None: there was no token. The client reads nothing for ``stands_ns`` a quarter in."""
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
