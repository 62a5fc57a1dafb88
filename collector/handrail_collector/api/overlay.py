"""Lay live rows over the rows of the store.

Live rows are decided but not stored yet, or still open (version 0).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from handrail_collector.rows import MERGED, FetchRow, RequestRow, StallRow
from handrail_collector.store.fetch_filter import FetchFilter
from handrail_collector.store.filter import RequestFilter
from handrail_collector.store.match import best


class LiveRows(Protocol):
    """Source of rows that the store does not have yet.

    It is called in the event loop; the rows are frozen and the caller may keep them.
    """

    def rows(self) -> Sequence[RequestRow]: ...

    def fetches(self) -> Sequence[FetchRow]: ...

    def stalls(self) -> Sequence[StallRow]: ...


@dataclass(frozen=True, slots=True)
class RowAnswer:
    """A row; ``provisional`` while the request is open."""

    row: RequestRow

    @property
    def provisional(self) -> bool:
        return self.row.version == 0


def overlaid(stored: Sequence[RequestRow], live: Sequence[RequestRow]) -> list[RowAnswer]:
    """Return one answer a request: its highest version.

    Of equal versions the live one wins; it may have been stored just now.
    """
    found: dict[tuple[str, str], RowAnswer] = {}
    for answer in map(RowAnswer, (*stored, *live)):
        key = (answer.row.trace_id, answer.row.request_id)
        known = found.get(key)
        if known is None or answer.row.version >= known.row.version:
            found[key] = answer
    return [answer for answer in found.values() if answer.row.scope != MERGED]


def listed(stored: Sequence[RequestRow], live: Sequence[RequestRow], wanted: RequestFilter) -> list[RowAnswer]:
    """Return the matching answers in the wanted order.

    ``stored`` must hold as many more rows than the limit as there are live rows.
    """
    fitting = [answer for answer in overlaid(stored, live) if wanted.matches(answer.row)]
    return sorted(fitting, key=lambda answer: wanted.order(answer.row))[: wanted.limit]


def named(stored: Sequence[RequestRow], live: Sequence[RequestRow], any_id: str) -> list[RowAnswer]:
    """Return the answers that ``any_id`` fits best, latest first."""
    answers = overlaid(stored, live)
    rows = best([answer.row for answer in answers], any_id)
    fitting = [answer for answer in answers if answer.row in rows]
    return sorted(fitting, key=lambda answer: -answer.row.started_unix_ns)


VersionedRowT = TypeVar("VersionedRowT", FetchRow, StallRow)


def newest_version(rows: Iterable[VersionedRowT]) -> list[VersionedRowT]:
    """Return each request's hand-offs or stalls of its highest version.

    Each number appears once; of equal ones the last in ``rows`` wins.
    """
    newest: dict[tuple[str, str], tuple[int, dict[int, VersionedRowT]]] = {}
    for row in rows:
        key = row.trace_id, row.request_id
        known = newest.get(key)
        if known is None or known[0] < row.version:
            newest[key] = row.version, {row.number: row}
        elif known[0] == row.version:
            known[1][row.number] = row
    return [row for _, numbered in newest.values() for row in numbered.values()]


def listed_fetches(stored: Sequence[FetchRow], live: Sequence[FetchRow], wanted: FetchFilter) -> list[FetchRow]:
    """Return the matching KV fetches, as ``listed`` does for requests."""
    return sorted(filter(wanted.matches, newest_version([*stored, *live])), key=wanted.order)[: wanted.limit]


def listed_stalls(stored: Sequence[StallRow], live: Sequence[StallRow], row: RequestRow) -> list[StallRow]:
    """Return the stalls of one request, in order."""
    own = [stall for stall in live if (stall.trace_id, stall.request_id) == (row.trace_id, row.request_id)]
    return sorted((stall for stall in newest_version([*stored, *own]) if stall.number >= 0), key=lambda stall: stall.number)
