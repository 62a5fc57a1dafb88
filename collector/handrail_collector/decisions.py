"""Make the rows of a decided request.

They are its own row, those of its KV fetches and stalls, and withdrawals.
A request may have had rows before: it was decided too early, in parts, or by an earlier process whose journal is replayed.
Its new row is then the next version of one of them, and the other ones are withdrawn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from handrail_collector.explain.request.request_row import Fleet, explain_all
from handrail_collector.explain.stalls.stall_rows import StallDesk, no_stalls
from handrail_collector.rows import MERGED, WITHDRAWN_FETCHES, FetchRow, RequestRow, StallRow
from handrail_collector.stitch.group import RequestGroup
from handrail_collector.store.recovery import RowId

RequestId = tuple[str, str]
"""Trace id and request id of a row."""


@dataclass(frozen=True, slots=True)
class DecidedRows:
    """What one decision publishes.

    ``row``: of the request; None where no process saw one, or where the store has this very row.
    ``withdrawn``: rows that withdraw earlier rows about a part of the request.
    ``known``: rows that the store had at the start, by the same evidence.
    """

    row: RequestRow | None = None
    withdrawn: tuple[RequestRow, ...] = ()
    fetches: tuple[FetchRow, ...] = ()
    stalls: tuple[StallRow, ...] = ()
    known: tuple[RequestId, ...] = ()


def _raise(what: str) -> None:
    """Raise the exception that is being handled."""
    raise


@dataclass(slots=True)
class Decisions:
    """What becomes of the decisions of one stitcher. One owner.

    ``published``: span id to the newest row in the store that rests on it; a replay publishes none of these rows again.
    ``fault``: called in the handler of an exception that costs a row its pauses or its stalls. The row itself is kept.
    """

    desk: StallDesk
    published: Mapping[str, RowId] = field(default_factory=dict)
    fault: Callable[[str], None] = _raise

    def rows(self, group: RequestGroup, fleet: Fleet) -> DecidedRows:
        """Return the rows of a decided ``group``, in the version that the group says.

        Raises what explaining the request raises; the request then has no rows.
        """
        if group.only_facts:
            return DecidedRows()
        explained = explain_all(group, fleet)
        if explained.row is None:  # no record of a request: only KV that was kept, or a load
            return DecidedRows(fetches=explained.fetches)
        known = self._known(explained.row)
        row, earlier = self._next_version(group, explained.row, known)
        earlier.update({(trace_id, request_id): version for trace_id, request_id, version in group.superseded})
        group.superseded.clear()
        if row is None:
            return DecidedRows(known=tuple(known))
        row = self._with_pauses(group, row)
        earlier.pop((row.trace_id, row.request_id), None)
        gone = sorted(earlier.items())
        return DecidedRows(
            row=row,
            withdrawn=tuple(_withdrawn(row, *of, version) for of, version in gone),
            fetches=(
                *(replace(f, trace_id=row.trace_id, request_id=row.request_id, version=row.version) for f in explained.fetches),
                *(_without_fetches(row, *of, version) for of, version in gone),
            ),
            stalls=(*self._stalls(group, row), *(no_stalls(row, *of, version + 1) for of, version in gone)),
            known=tuple(known),
        )

    def forget_published(self) -> None:
        """Forget the rows in the store, because no replay can make them again."""
        self.published = {}

    def _known(self, row: RequestRow) -> dict[RequestId, int]:
        """Return the versions of rows in the store that rest on evidence of ``row``."""
        found = filter(None, map(self.published.get, row.span_ids if self.published else ()))
        return {(trace_id, request_id): version for trace_id, request_id, version in found}

    def _next_version(
        self, group: RequestGroup, row: RequestRow, known: Mapping[RequestId, int]
    ) -> tuple[RequestRow | None, dict[RequestId, int]]:
        """Return the row to store, and the ``known`` rows that it makes wrong.

        The row is None when the store has it already.
        A replay starts in the middle: it may open a request by another span than the first run did, and so under another id.
        Stored requests are therefore recognised by their evidence. A row that adds evidence becomes the next version of a
        stored row, preferably under its own id, so that the choice is deterministic.
        """
        if not known:
            return row, {}
        stored = {span_id for span_id in row.span_ids if span_id in self.published}
        group.counted.joins |= stored
        if len(known) == 1 and len(stored) == len(set(row.span_ids)):
            ((group.row_id, group.version),) = known.items()
            return None, {}
        wrong = dict(known)
        own = (row.trace_id, row.request_id)
        if row.version > 1:  # an earlier version came from this process
            wrong[own] = max(row.version - 1, wrong.get(own, 0))
        chosen = own if own in wrong else min(wrong)
        version = max(row.version, wrong.pop(chosen) + 1)
        group.row_id, group.version = chosen, version
        return replace(row, trace_id=chosen[0], request_id=chosen[1], version=version), wrong

    def _with_pauses(self, group: RequestGroup, row: RequestRow) -> RequestRow:
        try:
            return self.desk.with_pauses(group, row)
        except Exception:
            self.fault("a request lacks the pauses of its engines")
            return row

    def _stalls(self, group: RequestGroup, row: RequestRow) -> Sequence[StallRow]:
        try:
            stalls = self.desk.explain(group, row)
        except Exception:
            self.fault("a request lacks its stalls")
            return ()
        group.stalls_reported = bool(stalls)
        return stalls


def _withdrawn(row: RequestRow, trace_id: str, request_id: str, version: int) -> RequestRow:
    """Make the row that withdraws an earlier row of a part of ``row``'s request.

    It is the earlier row's next version, without content.
    """
    return replace(
        row,
        trace_id=trace_id,
        request_id=request_id,
        version=version + 1,
        scope=MERGED,
        gap_sum_ns=None,
        gap_min_ns=None,
        gap_buckets=(),
        gap_counts=(),
        phases=(),
        joins=(),
        findings=(),
        span_ids=(),
    )


def _without_fetches(row: RequestRow, trace_id: str, request_id: str, version: int) -> FetchRow:
    """Make the row that withdraws the KV fetches of an earlier row.

    The earlier row belongs to a part of ``row``'s request.
    """
    return FetchRow(
        started_unix_ns=row.started_unix_ns,
        trace_id=trace_id,
        request_id=request_id,
        version=version + 1,
        number=WITHDRAWN_FETCHES,
        span_id=request_id,
    )
