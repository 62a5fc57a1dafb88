"""List what happened to the engines.

The list holds events of their processes, and findings that belong to no single request.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Happened:
    """One entry of the list.

    ``kind``: a value of ``records.ProcessEventKind``, or the kind of a finding (``finding``).
    """

    at_unix_ns: int
    kind: str
    finding: bool
    instance: str
    detail: str
    peer_instance: str = ""
    role: str = ""
    host: str = ""
    source: str = ""
    process_kind: str | None = None
    pid: int | None = None
    at_bound_ns: int = 0  # happened at most this much earlier
    count: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class HappenedFilter:
    """Filter of the list, which comes latest first.

    ``since_unix_ns`` None: the last day.
    """

    since_unix_ns: int | None = None
    until_unix_ns: int | None = None
    instance: str | None = None
    limit: int = 50

    def validate(self) -> list[str]:
        """Return each problem as a sentence."""
        since, until = self.since_unix_ns, self.until_unix_ns
        return ["since must be before until"] if since is not None and until is not None and since >= until else []


def happened_to_json(one: Happened) -> dict[str, Any]:
    """Encode every field by its name."""
    return {each.name: getattr(one, each.name) for each in fields(Happened)}


def happened_from_json(plain: Mapping[str, Any]) -> Happened:
    """Decode an entry: the inverse of ``happened_to_json``.

    Unknown names are ignored. Raises ``ValueError`` where a field is missing.
    """
    try:
        return Happened(**{each.name: plain[each.name] for each in fields(Happened)})
    except (KeyError, TypeError) as error:
        raise ValueError(f"no event: {error}") from error
