"""What a store is to the rest of the collector: a single writer of each shard, and questions from anywhere.

``tests/contract/test_store.py`` says in full what the answers are; a backend is done when it passes that battery.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from handrail_collector.rows import FetchRow, RequestRow, StallRow
from handrail_collector.store.counter_totals import Added
from handrail_collector.store.fetch_filter import FetchFilter
from handrail_collector.store.filter import RequestFilter
from handrail_collector.store.recovery import Recovered
from handrail_collector.store.sample_filter import SampleFilter
from handrail_collector.store.schema import Table
from handrail_collector.store.span import SpanRow
from handrail_collector.store.tables.dataclass_table import FlatRows


class StoreQueries(Protocol):
    """Questions; thread-safe, each blocks its thread. Raises ``StoreDamagedError`` where the store cannot be read."""

    def requests(self, wanted: RequestFilter) -> list[RequestRow]:
        """The rows that fit in the order asked for: of each request the highest version, withdrawn ones not at all.

        What is meant is said in Python by ``RequestFilter.matches`` and ``order``. Raises ``ValueError`` for a bad filter.
        """

    def count(self, wanted: RequestFilter) -> int:
        """How many fit, whatever ``limit`` says. Raises ``ValueError`` for a bad filter."""

    def find(self, any_id: str) -> list[RequestRow]:
        """The requests that an id in any form may name (``store.match``), latest first."""

    def near(self, any_id: str, limit: int = 5) -> list[str]:
        """Ids of recent requests that look like ``any_id``, the likest first."""

    def spans(self, row: RequestRow) -> list[SpanRow]:
        """Its evidence and what hangs below, by start. Of spans sent again changed, the one with the highest offset."""

    def fetches(self, wanted: FetchFilter) -> list[FetchRow]:
        """The hand-offs that fit in the order asked for (``FetchFilter.matches`` and ``order``): of each request those of its
        highest version. Raises ``ValueError`` for a bad filter."""

    def fetches_of(self, row: RequestRow) -> list[FetchRow]:
        """The hand-offs of one request, in order."""

    def stalls_of(self, row: RequestRow) -> list[StallRow]:
        """The stalls of one request, in order: those of its highest version."""

    def samples(self, table: Table, wanted: SampleFilter) -> list[Any]:
        """The samples of ``gpu_samples``, ``link_samples`` (``DeviceSample``) or ``engine_samples`` (``EngineSample``) that fit,
        oldest first: ``SampleFilter`` and ``thinned`` say in Python what is meant."""

    def close(self) -> None:
        """Let go of what is held. Works twice."""


class StoreWriter(Protocol):
    """The single writer of one shard. Methods block; one caller at a time."""

    def open(self) -> Recovered:
        """Take the store and say what is there. What was published, and no more, is there whatever stopped the last writer."""

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
        """All of it durable and visible when this returns, or nothing of it.

        Ranges follow one another. Raises ``ValueError`` for one out of order, and ``OSError``: then it may be tried again as is.
        """

    def close(self) -> None:
        """Let go of the store. Works twice."""
