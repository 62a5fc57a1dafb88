"""Numbers for a person: bytes that cross a wire in decimal units, as networks are told, memory in binary ones; and counts."""

from __future__ import annotations


def format_bytes(count: float | None) -> str:
    """Of a hand-off or another transfer, three digits: ``3.28 GB``; ``–`` where it is not known."""
    if count is None:
        return "–"
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB" if count < 999.5 else f"{count:,.0f} TB"


def format_gib(count: float) -> str:
    """Of memory: ``80.0`` for 80 GiB."""
    return f"{count / 2**30:.1f}"


def counted(count: int, one: str, many: str | None = None) -> str:
    """``1 request``, ``2,000 requests``; ``many`` where it is not ``one`` with an s."""
    return f"{count:,} {one if count == 1 else many or f'{one}s'}"
