"""A store with its clock, maintenance and a reader, and rows to fill it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from builders.store_rows import START_UNIX_NS, request_rows, spans_of_requests
from handrail_collector.store.filters import RequestFilter
from handrail_collector.store.layout import HOUR_NS
from handrail_collector.store.maintenance import Upkeep, UpkeepSettings
from handrail_collector.store.manifest import ManifestReader, StoredFile, files_of
from handrail_collector.store.publish import StorePublisher
from handrail_collector.store.read import StoreReader
from handrail_collector.store.schema import Table

ROWS = [replace(row, version=1, first_offset=index * 10, last_offset=index * 10) for index, row in enumerate(request_rows(12))]
SPANS = spans_of_requests(6)
LATER = START_UNIX_NS + 1000 * HOUR_NS
PUBLISHED = (Table.REQUESTS, Table.SPANS)
"""Tables that ``publish_all`` fills."""

EVERYTHING = RequestFilter(limit=1000, descending=False)


@dataclass
class Clock:
    """Unix time that tests set."""

    unix_ns: int = LATER

    def __call__(self) -> int:
        return self.unix_ns


@dataclass
class Kept:
    """A store with its maintenance and a reader."""

    root: Path
    clock: Clock
    publisher: StorePublisher
    reader: StoreReader

    def upkeep(self, **settings: int | None) -> Upkeep:
        return Upkeep(self.publisher, UpkeepSettings(**settings), self.clock)  # type: ignore[arg-type]  # by name

    def files(self, table: Table) -> list[StoredFile]:
        return files_of(ManifestReader(self.root).publishes(), table)

    def on_disk(self) -> list[str]:
        return sorted(path.relative_to(self.root).as_posix() for path in self.root.rglob("*.parquet*"))


def kept_store(root: Path) -> Kept:
    """Open a new store."""
    clock = Clock()
    kept = Kept(root, clock, StorePublisher(root, now_unix_ns=clock), StoreReader(root, threads=1))
    kept.publisher.open()
    return kept


def publish_all(publisher: StorePublisher) -> None:
    """Publish four times in one hour."""
    for index, (first, end) in enumerate(pairwise((0, 100, 200, 300, 400))):
        spans = [replace(span, offset=first + 1) for span in SPANS[index * 3 : index * 3 + 3]]
        publisher.publish(first, end, first, spans, ROWS[index * 3 : index * 3 + 3])
