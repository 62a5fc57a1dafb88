"""Define which period to explain.

Cheap to import: ``answer.py``, which answers it, loads DuckDB and numpy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

DEFAULT_NS: Final = 3_600_000_000_000
"""Length of the period without ``since``: the hour before ``until``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """The period, scope and model to explain.

    ``until_unix_ns`` None: now, or just after the latest request where that is an hour ago. ``fast``: the approximate first
    answer.
    """

    since_unix_ns: int | None = None
    until_unix_ns: int | None = None
    scope: str | None = None
    model: str | None = None
    fast: bool = False

    def validate(self) -> list[str]:
        """Return what is wrong with it, as text; empty when it is valid."""
        since, until = self.since_unix_ns, self.until_unix_ns
        return ["since: must be before until"] if since is not None and until is not None and since >= until else []
