"""Filter and order request rows.

The filter means the same in Python (here) and in SQL (``read.py``).
"""

from __future__ import annotations

from dataclasses import dataclass

from handrail.phases import Phase
from handrail.printable import is_printable
from handrail_collector.rows import MERGED, RequestRow

MAX_LIMIT = 10_000
DEFAULT_LIMIT = 50

SORT_FIELDS: dict[str, str] = {
    "started": "started_unix_ns",
    "ttft": "ttft_token_ns",
    "ttft_text": "ttft_text_ns",
    "duration": "duration_ns",
    "gap_max": "gap_max_ns",
    "gap_p99": "gap_p99_ns",
}
"""Row fields by sort name; every phase name is a sort name too."""

SORTS: tuple[str, ...] = (*SORT_FIELDS, *(phase.value for phase in Phase))
SCOPES = ("edge", "decode", "engine")


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFilter:
    """A filter that matches rows which fit every field that is set.

    Rows without a value for ``sort`` come last, in both directions.
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
        problems = []
        if self.sort not in SORTS:
            problems.append(f"sort: {self.sort!r} is not one of {', '.join(SORTS)}")
        if not 1 <= self.limit <= MAX_LIMIT:
            problems.append(f"limit: {self.limit} is not between 1 and {MAX_LIMIT}")
        if self.scope is not None and self.scope not in SCOPES:
            problems.append(f"scope: {self.scope!r} is not one of {', '.join(SCOPES)}")
        if self.since_unix_ns is not None and self.until_unix_ns is not None and self.since_unix_ns > self.until_unix_ns:
            problems.append("since: must be before until")
        if self.text is not None and not is_printable(self.text):
            problems.append("text: holds control characters")
        return problems

    def matches(self, row: RequestRow) -> bool:
        """Check whether the row matches."""
        return (
            row.scope != MERGED
            and (self.since_unix_ns is None or row.started_unix_ns >= self.since_unix_ns)
            and (self.until_unix_ns is None or row.started_unix_ns < self.until_unix_ns)
            and self.scope in (None, row.scope)
            and self.outcome in (None, row.outcome)
            and self.model in (None, row.model)
            and (self.instance is None or self.instance in instances(row))
            and (self.min_ttft_ns is None or (row.ttft_token_ns is not None and row.ttft_token_ns >= self.min_ttft_ns))
            and (self.finding is None or any(self.finding in (f, f.partition(":")[0]) for f in row.findings))
            and (self.text is None or any(self.text.lower() in text.lower() for text in texts(row)))
        )

    def order(self, row: RequestRow) -> tuple[bool, int, int, str, str]:
        """Return the ascending sort key of a row.

        Rows with a value come first, then the later start, then the ids.
        """
        value = sort_value(row, self.sort)
        signed = 0 if value is None else -value if self.descending else value
        return value is None, signed, -row.started_unix_ns, row.trace_id, row.request_id


def sort_value(row: RequestRow, sort: str) -> int | None:
    """Return the figure of ``row`` that ``sort`` names, ns."""
    if sort in SORT_FIELDS:
        value: int | None = getattr(row, SORT_FIELDS[sort])
        return value
    durations = [phase.duration_ns for phase in row.phases if phase.phase == sort]
    return sum(durations) if durations else None


def instances(row: RequestRow) -> tuple[str | None, ...]:
    """List the processes of the request."""
    return row.edge_instance, row.router_instance, row.prefill_instance, row.decode_instance


def texts(row: RequestRow) -> tuple[str, ...]:
    """List the texts that ``text`` searches."""
    ids = (row.trace_id, row.request_id, row.client_request_id, row.request_key, row.response_id)
    return tuple(text for text in (*ids, row.model, *instances(row), row.error_type, *row.findings) if text)
