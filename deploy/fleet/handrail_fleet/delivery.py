"""When the tokens of an answer come to the edge, and when its client has them: a client that reads nothing, and what is buffered.

A proxy reads on while its client takes nothing, until its buffer is full, and then not until the client reads again.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from handrail_fleet.simulate import Flight

BUFFERED_TOKENS = 256
"""What stands in a proxy of 64 KiB at about 250 bytes a token."""

AT_ONCE_NS = 20_000
"""Between two tokens that were waiting to be read."""


@dataclass(frozen=True, slots=True)
class Delivered:
    """``reads_ns``: when the edge read each token. ``held_ns``: from when to when it read nothing. ``stood_ns``: its client."""

    reads_ns: tuple[int, ...]
    held_ns: tuple[int, int] | None
    stood_ns: tuple[int, int] | None

    @property
    def gaps_ns(self) -> tuple[int, ...]:
        """Between the reads."""
        return tuple(later - earlier for earlier, later in zip(self.reads_ns, self.reads_ns[1:], strict=False))


def delivered(flight: Flight) -> Delivered:
    """By true time of the run. Nothing of an answer without a token."""
    if flight.edge_first_ns is None:
        return Delivered((), None, None)
    reads = list(accumulate(flight.gaps_ns, initial=flight.edge_first_ns))
    if not flight.client_stands_ns:
        return Delivered(tuple(reads), None, None)
    stops = len(reads) // 4
    stood = reads[stops], reads[stops] + flight.client_stands_ns
    full = stops + BUFFERED_TOKENS
    if full >= len(reads) or reads[full] >= stood[1]:
        return Delivered(tuple(reads), None, stood)
    held = reads[full], stood[1]
    for place in range(full + 1, len(reads)):
        reads[place] = max(reads[place], held[1] + (place - full) * AT_ONCE_NS)
    return Delivered(tuple(reads), held, stood)
