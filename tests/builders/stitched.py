"""Run records through stitching and explaining, for tests.

The result holds the final row of each request and of each hand-off.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from builders.records import EPOCH
from handrail.records import EngineFacts, LogFact, ProcessEvent, Role
from handrail_collector.explain.request.request_row import Explained, Fleet, explain_all
from handrail_collector.rows import FetchRow, RequestRow
from handrail_collector.stitch.engines import EngineRegistry
from handrail_collector.stitch.evidence import Item
from handrail_collector.stitch.stitcher import SECOND, Stitcher

NOW = EPOCH + 10 * SECOND
REPORTING = frozenset({(Role.PREFILL, "plugin"), (Role.DECODE, "plugin")})


@dataclass(frozen=True, slots=True)
class StitchedRows:
    """All rows that the stitcher produced; find a request by its client's id."""

    every: tuple[Explained, ...]

    @property
    def rows(self) -> list[RequestRow]:
        return [one.row for one in self.every if one.row is not None]

    @property
    def fetches(self) -> list[FetchRow]:
        return [fetch for one in self.every for fetch in one.fetches]

    def row(self, client_id: str) -> RequestRow:
        (found,) = [row for row in self.rows if row.client_request_id == client_id]
        return found


def stitched(
    records: Iterable[Item | ProcessEvent | EngineFacts], *, still_open: bool = False, hung_ns: int = 60 * SECOND
) -> StitchedRows:
    """Stitch these records.

    ``still_open``: return the rows right after the last record, before anything is decided.
    """
    stitcher, book = Stitcher(), EngineRegistry()
    for offset, record in enumerate(records):
        if isinstance(record, ProcessEvent | EngineFacts):
            book.take(record)
            continue
        if isinstance(record, LogFact):
            book.take(record)
            if record.request_id is None:
                continue
        stitcher.add(record, offset, NOW)
    if still_open:
        groups = stitcher.open_groups()
    else:
        decided = {id(d.group): d.group for s in range(0, 4000, 20) for d in stitcher.sweep(NOW + s * SECOND)}
        groups = [g for g in decided.values() if g.merged_into is None]
    fleet = Fleet(REPORTING, book, stitcher.clocks, hung_ns)
    return StitchedRows(tuple(explain_all(g, fleet) for g in groups if not g.only_facts))
