"""Define what a store offers to the rest of the collector.

Each shard has a single writer. Any thread may query.
``tests/contract/test_store.py`` defines the answers in full. A backend is complete when it passes that battery.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from handrail_collector.rows import FetchRow, RequestRow, StallRow
from handrail_collector.store.filters import FetchFilter, RequestFilter, SampleFilter
from handrail_collector.store.manifest import Added
from handrail_collector.store.recovery import Recovered
from handrail_collector.store.schema import Table
from handrail_collector.store.tables.append_only import FlatRows
from handrail_collector.store.tables.spans import SpanRow


class LiveRows(Protocol):
    """Source of rows that the store does not have yet.

    They are decided and not stored, or of open requests (version 0).
    It is called in the event loop; the rows are frozen and the caller may keep them.
    """

    def rows(self) -> Sequence[RequestRow]: ...

    def fetches(self) -> Sequence[FetchRow]: ...

    def stalls(self) -> Sequence[StallRow]: ...


class StoreQueries(Protocol):
    """Queries of a store; thread-safe.

    Each query blocks its thread. Each raises ``StoreDamagedError`` when the store cannot be read.
    """

    def requests(self, wanted: RequestFilter, live: Sequence[RequestRow] = ()) -> list[RequestRow]:
        """List the requests that match, in the order of the filter.

        Each request appears in its highest version. Withdrawn requests do not appear.
        ``live``: rows that the store does not have yet; of equal versions they win. Raises ``ValueError`` for a bad filter.
        """

    def count(self, wanted: RequestFilter) -> int:
        """Count the requests that match, whatever ``limit`` is.

        Raises ``ValueError`` for a bad filter.
        """

    def find(self, any_id: str, live: Sequence[RequestRow] = ()) -> list[RequestRow]:
        """Find the requests that an id in any form may name, latest first.

        ``read.match`` defines the match. ``live``: as for ``requests``.
        """

    def near(self, any_id: str, limit: int = 5) -> list[str]:
        """List ids of recent requests that resemble ``any_id``, the most similar first."""

    def spans(self, row: RequestRow) -> list[SpanRow]:
        """List the evidence of a request and the spans below it, by start.

        Of spans that were sent again with changes, the one with the highest offset counts.
        """

    def fetches(self, wanted: FetchFilter, live: Sequence[FetchRow] = ()) -> list[FetchRow]:
        """List the KV fetches that match, in the order of the filter.

        Of each request, the fetches of its highest version count. ``live``: as for ``requests``.
        Raises ``ValueError`` for a bad filter.
        """

    def fetches_of(self, row: RequestRow, live: Sequence[FetchRow] = ()) -> list[FetchRow]:
        """List the KV fetches of one request, in order. ``live``: as for ``requests``."""

    def stalls_of(self, row: RequestRow, live: Sequence[StallRow] = ()) -> list[StallRow]:
        """List the stalls of one request's highest version, in order.

        ``live``: as for ``requests``.
        """

    def samples(self, table: Table, wanted: SampleFilter) -> list[Any]:
        """List the samples of one table that match, oldest first.

        ``gpu_samples`` and ``link_samples`` hold ``DeviceSample``; ``engine_samples`` holds ``EngineSample``.
        ``SampleFilter`` defines the result.
        """

    def close(self) -> None:
        """Release all resources. Idempotent."""


class StoreWriter(Protocol):
    """The single writer of one shard. Methods block; one caller at a time."""

    def open(self) -> Recovered:
        """Take ownership of the store and return what it holds.

        The store holds exactly what was published, however the last writer ended.
        """

    def publish(
        self,
        first_offset: int,
        end_offset: int,
        low_water_offset: int,
        spans: Sequence[SpanRow],
        requests: Sequence[RequestRow],
        observed: Mapping[str, int] | None = None,
        flat: FlatRows | None = None,
        added: Added | None = None,
    ) -> None:
        """Store all of this, durable and visible on return, or store none of it.

        Ranges follow one another. Raises ``ValueError`` for a range that is out of order.
        Raises ``OSError`` when the disk fails; the same publish may then be tried again.
        """

    def close(self) -> None:
        """Release the store. Idempotent."""
