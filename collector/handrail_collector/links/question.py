"""Define the parameters of a question about links.

This module imports little: ``answer.py``, which answers, needs numpy and DuckDB.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

DEFAULT_NS: Final = 3_600_000_000_000
"""Period without ``since``: the hour before ``until``."""

DEFAULT_LIMIT: Final = 20
MAX_LIMIT: Final = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class LinksQuestion:
    """Parameters of a question about links.

    ``until_unix_ns`` None: now, or just after the latest hand-off where that is an hour old.
    ``peer``: either engine or host.
    ``limit``: how many links are listed, those with the most bytes; the others are summed into one.
    """

    since_unix_ns: int | None = None
    until_unix_ns: int | None = None
    peer: str | None = None
    limit: int = DEFAULT_LIMIT

    def validate(self) -> list[str]:
        """Return each problem in words; empty when the question is valid."""
        since, until = self.since_unix_ns, self.until_unix_ns
        problems = ["since: must be before until"] if since is not None and until is not None and since >= until else []
        return problems + ([] if 1 <= self.limit <= MAX_LIMIT else [f"limit: {self.limit} is not between 1 and {MAX_LIMIT}"])
