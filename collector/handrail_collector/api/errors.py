"""Define the API's errors.

An error says what is wrong, where, what would be valid, and the nearest known names.
"""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any


@dataclass(kw_only=True, eq=False)  # an exception is hashed by identity
class ApiError(Exception):
    """Error that is answered with ``status`` and ``to_json()``."""

    status: int
    what: str
    where: str
    valid: str
    nearest: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.what} ({self.where})"

    def to_json(self) -> dict[str, Any]:
        """Return the body of the answer."""
        return {"error": {"what": self.what, "where": self.where, "valid": self.valid, "nearest": list(self.nearest)}}


def nearest(word: str, known: tuple[str, ...]) -> tuple[str, ...]:
    """Return the known words nearest to ``word``, nearest first."""
    return tuple(get_close_matches(word, known, n=3, cutoff=0.5))
