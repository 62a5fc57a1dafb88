"""Sum amounts over publishes, by counter name and place.

These counters have too many places for a publish to carry their totals, so a publish carries the increments.
Format: ``(place, amount, place, amount, ...)``. The total is the sum over all publishes of a shard.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

Added = Mapping[str, Sequence[int]]
"""Increments by counter name."""


def added_up(parts: Iterable[Added]) -> dict[str, tuple[int, ...]]:
    """Sum all ``parts``: each place once, in ascending order."""
    found: dict[str, dict[int, int]] = {}
    for part in parts:
        for name, flat in part.items():
            amounts = found.setdefault(name, {})
            for place, amount in zip(flat[::2], flat[1::2], strict=True):
                amounts[place] = amounts.get(place, 0) + amount
    return {name: tuple(number for each in sorted(amounts.items()) for number in each) for name, amounts in found.items()}
