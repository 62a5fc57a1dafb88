"""Filter and order hand-offs.

The filter means the same in Python (here) and in SQL (``fetch_sql.py``).
"""

from __future__ import annotations

from dataclasses import dataclass

from handrail.kv_outcomes import FAILURES, FetchOutcome
from handrail.records import Direction
from handrail_collector.rows import FetchRow
from handrail_collector.store.filter import DEFAULT_LIMIT, MAX_LIMIT

FETCH_SORTS: dict[str, str] = {
    "started": "started_unix_ns",
    "duration": "duration_ns",
    "transfer": "transfer_ns",
    "handshake": "handshake_ns",
    "wait": "wait_ns",
    "held": "held_ns",
    "bytes": "bytes_moved",
    "lost": "lost_ns",
}
"""Columns by sort name; the ``duration`` of an open hand-off is its age."""

OUTCOMES = tuple(outcome.value for outcome in FetchOutcome)
DIRECTIONS = tuple(direction.value for direction in Direction)


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchFilter:
    """A filter that matches rows which fit every field that is set.

    Rows without a value for ``sort`` come last.
    """

    since_unix_ns: int | None = None
    until_unix_ns: int | None = None
    outcome: str | None = None
    failed: bool | None = None  # True: outcomes that count as failures; False: all others
    open: bool | None = None
    direction: str | None = None
    peer: str | None = None  # host:port of either engine, a host, or the address of the side channel
    sort: str = "started"
    descending: bool = True
    limit: int = DEFAULT_LIMIT

    def validate(self) -> list[str]:
        """List the problems of the filter, in words; empty when it is valid."""
        problems = []
        if self.sort not in FETCH_SORTS:
            problems.append(f"sort: {self.sort!r} is not one of {', '.join(FETCH_SORTS)}")
        if not 1 <= self.limit <= MAX_LIMIT:
            problems.append(f"limit: {self.limit} is not between 1 and {MAX_LIMIT}")
        if self.outcome is not None and self.outcome not in OUTCOMES:
            problems.append(f"outcome: {self.outcome!r} is not one of {', '.join(OUTCOMES)}")
        if self.direction is not None and self.direction not in DIRECTIONS:
            problems.append(f"direction: {self.direction!r} is not one of {', '.join(DIRECTIONS)}")
        if self.since_unix_ns is not None and self.until_unix_ns is not None and self.since_unix_ns > self.until_unix_ns:
            problems.append("since: must be before until")
        return problems

    def matches(self, row: FetchRow) -> bool:
        """Check whether the row matches."""
        return (
            row.number >= 0
            and (self.since_unix_ns is None or row.started_unix_ns >= self.since_unix_ns)
            and (self.until_unix_ns is None or row.started_unix_ns < self.until_unix_ns)
            and self.outcome in (None, row.outcome)
            and (self.failed is None or self.failed == (row.outcome in FAILED))
            and self.open in (None, row.open)
            and self.direction in (None, row.direction)
            and (self.peer is None or self.peer in peers(row))
        )

    def order(self, row: FetchRow) -> tuple[bool, int, int, str, str, int]:
        """Return the ascending sort key of a row.

        Rows with a value come first, then the later start, then the ids.
        """
        value: int | None = getattr(row, FETCH_SORTS[self.sort])
        signed = 0 if value is None else -value if self.descending else value
        return value is None, signed, -row.started_unix_ns, row.trace_id, row.request_id, row.number


FAILED = frozenset(outcome.value for outcome in FAILURES)


def peers(row: FetchRow) -> tuple[str | None, ...]:
    """List the values of a row that ``peer`` may name."""
    return row.consumer_instance, row.producer_instance, row.consumer_host, row.producer_host, row.producer_address
