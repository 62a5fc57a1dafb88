"""Which links are asked for. Light: what answers it (``answer.py``) brings numpy and DuckDB."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

DEFAULT_NS: Final = 3_600_000_000_000
"""Without ``since``: the hour before ``until``."""

DEFAULT_LIMIT: Final = 20
MAX_LIMIT: Final = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class LinksQuestion:
    """``until_unix_ns`` None: now, or just after the latest hand-off where that is an hour ago. ``peer``: either engine or host.

    ``limit``: so many links, those that moved most; the others are told as one.
    """

    since_unix_ns: int | None = None
    until_unix_ns: int | None = None
    peer: str | None = None
    limit: int = DEFAULT_LIMIT

    def validate(self) -> list[str]:
        """What is wrong with it, in words; empty when it is fine."""
        since, until = self.since_unix_ns, self.until_unix_ns
        problems = ["since: not before until"] if since is not None and until is not None and since >= until else []
        return problems + ([] if 1 <= self.limit <= MAX_LIMIT else [f"limit: {self.limit} is not between 1 and {MAX_LIMIT}"])
