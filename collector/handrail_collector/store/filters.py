"""Define what a question to a store asks for.

This module imports nothing heavy: the command line asks a collector without a store of its own.
``queries/*.sql`` says what matches.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

from handrail.kv_outcomes import FAILURES, FetchOutcome
from handrail.phases import Phase
from handrail.printable import is_printable
from handrail.records import Direction, EngineSample

MAX_LIMIT: Final = 10_000
DEFAULT_LIMIT: Final = 50

SORT_FIELDS: Final[dict[str, str]] = {
    "started": "started_unix_ns",
    "ttft": "ttft_token_ns",
    "ttft_text": "ttft_text_ns",
    "duration": "duration_ns",
    "gap_max": "gap_max_ns",
    "gap_p99": "gap_p99_ns",
}
"""Row fields by sort name; every phase name is a sort name too."""

SORTS: Final[tuple[str, ...]] = (*SORT_FIELDS, *(phase.value for phase in Phase))
SCOPES: Final = ("edge", "decode", "engine")

FETCH_SORTS: Final[dict[str, str]] = {
    "started": "started_unix_ns",
    "duration": "duration_ns",
    "transfer": "transfer_ns",
    "handshake": "handshake_ns",
    "wait": "wait_ns",
    "held": "held_ns",
    "bytes": "bytes_moved",
    "lost": "lost_ns",
}
"""Columns by sort name; the ``duration`` of an open KV fetch is its age."""

OUTCOMES: Final = tuple(outcome.value for outcome in FetchOutcome)
DIRECTIONS: Final = tuple(direction.value for direction in Direction)
FAILED: Final = frozenset(outcome.value for outcome in FAILURES)
"""Outcomes that count as failures."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFilter:
    """Which requests to list: rows that match every field that is set.

    Query: ``queries/requests.sql``.
    Rows without a value for ``sort`` come last, in both directions. Of equal values the later start comes first, then the ids.
    """

    since_unix_ns: int | None = None  # started at or after
    until_unix_ns: int | None = None  # started before
    scope: str | None = None
    outcome: str | None = None
    model: str | None = None
    instance: str | None = None  # host:port of any process of the request
    min_ttft_ns: int | None = None
    finding: str | None = None  # a finding, or its kind (the part before ':')
    text: str | None = None  # substring of ids, model, instances, error type or findings; case-insensitive
    sort: str = "started"
    descending: bool = True
    limit: int = DEFAULT_LIMIT

    def validate(self) -> list[str]:
        """List the problems of the filter, in words; empty when it is valid."""
        problems = [*_problems(self.sort, SORTS, self.limit, self.since_unix_ns, self.until_unix_ns)]
        if self.scope is not None and self.scope not in SCOPES:
            problems.append(f"scope: {self.scope!r} is not one of {', '.join(SCOPES)}")
        if self.text is not None and not is_printable(self.text):
            problems.append("text: holds control characters")
        return problems


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchFilter:
    """Which KV fetches to list: those that match every field that is set.

    Query: ``queries/kv_fetches.sql``.
    They are ordered like requests, and by their number within a request.
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
        problems = [*_problems(self.sort, tuple(FETCH_SORTS), self.limit, self.since_unix_ns, self.until_unix_ns)]
        if self.outcome is not None and self.outcome not in OUTCOMES:
            problems.append(f"outcome: {self.outcome!r} is not one of {', '.join(OUTCOMES)}")
        if self.direction is not None and self.direction not in DIRECTIONS:
            problems.append(f"direction: {self.direction!r} is not one of {', '.join(DIRECTIONS)}")
        return problems


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleFilter:
    """A filter that matches samples of [since, until).

    ``hosts``: ids or names. ``names``: counters to keep, others are left out. None: any.
    ``every_ns``: above 0, one sample of each device per interval of this length, from ``since`` on
    (``queries/samples_thinned.sql``): the mean of gauges and the last value of counters, with the time of the interval's last
    sample. Values without a column of their own (``tables/samples.py``: ``more``) are left out. Only for devices.
    """

    since_unix_ns: int
    until_unix_ns: int
    hosts: frozenset[str] | None = None
    names: frozenset[str] | None = None
    every_ns: int = 0

    def reduced(self, sample: Any) -> Any:
        """Keep only the values of the sample that the filter names."""
        if self.names is None:
            return sample
        kept = {"values": tuple(value for value in sample.values if value.name in self.names)}
        if isinstance(sample, EngineSample):
            kept["histograms"] = tuple(each for each in sample.histograms if each.name in self.names)
        return replace(sample, **kept)


@dataclass(frozen=True, slots=True, kw_only=True)
class PeriodQuery:
    """Which requests a question about a period counts. None: any."""

    since_unix_ns: int | None = None
    until_unix_ns: int | None = None
    scope: str | None = None
    model: str | None = None


def _problems(sort: str, sorts: tuple[str, ...], limit: int, since: int | None, until: int | None) -> list[str]:
    problems = []
    if sort not in sorts:
        problems.append(f"sort: {sort!r} is not one of {', '.join(sorts)}")
    if not 1 <= limit <= MAX_LIMIT:
        problems.append(f"limit: {limit} is not between 1 and {MAX_LIMIT}")
    if since is not None and until is not None and since > until:
        problems.append("since: must be before until")
    return problems
