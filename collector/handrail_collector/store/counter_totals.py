"""Amounts that publishes add up, by name and place: what is counted in too many places to be said in total each time.

Written as ``(place, amount, place, amount, ...)``; the total is the sum over all publishes of a shard.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

Added = Mapping[str, Sequence[int]]
"""By name."""


def added_up(parts: Iterable[Added]) -> dict[str, tuple[int, ...]]:
    """All of ``parts`` together, each place once, by place."""
    found: dict[str, dict[int, int]] = {}
    for part in parts:
        for name, flat in part.items():
            amounts = found.setdefault(name, {})
            for place, amount in zip(flat[::2], flat[1::2], strict=True):
                amounts[place] = amounts.get(place, 0) + amount
    return {name: tuple(number for each in sorted(amounts.items()) for number in each) for name, amounts in found.items()}
