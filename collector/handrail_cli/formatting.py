"""Format byte counts and other counts for a person.

Transfers use decimal units, as networks do; memory uses binary ones.
"""

from __future__ import annotations


def format_bytes(count: float | None) -> str:
    """Format the bytes of a transfer with three digits: ``3.28 GB``.

    ``–`` where the count is not known.
    """
    if count is None:
        return "–"
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB" if count < 999.5 else f"{count:,.0f} TB"


def format_gib(count: float) -> str:
    """Format the size of memory: ``80.0`` for 80 GiB."""
    return f"{count / 2**30:.1f}"


def counted(count: int, one: str, many: str | None = None) -> str:
    """Format a count: ``1 request``, ``2,000 requests``.

    ``many``: the plural, where it is not ``one`` with an s.
    """
    return f"{count:,} {one if count == 1 else many or f'{one}s'}"
