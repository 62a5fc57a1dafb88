"""A load of proxy spans that remembers what a collector acknowledged.

At the end it compares this with what the collector's store holds.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow.parquet as pq
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from builders.records import split_request
from handrail.conventions import BATCH_SEQ, SCOPE_PROXY
from handrail.otlp.client import OtlpClient
from handrail.otlp.settings import ClientSettings
from handrail.otlp.signals import Retryable, Signal
from handrail.records import Exchange, Role
from handrail.wire.exchange import resource_of, to_span
from handrail_collector.store.filters import RequestFilter
from handrail_collector.store.layout import HOUR_NS
from handrail_collector.store.read import StoreReader
from handrail_collector.store.schema import Table

SENDERS = (Role.EDGE, Role.PREFILL, Role.DECODE)
_NAMES = ("edge", "p", "d")


def requests(name: str = "") -> Iterator[dict[str, Exchange]]:
    """Yield P/D requests without end, as the proxies at edge, P and D see them.

    ``name`` is in their ids. Their hours are over, so compaction also runs.
    """
    for number in itertools.count():
        base = time.time_ns() - 2 * HOUR_NS
        made = split_request(f"req-{name}{number}", f"t{name}{number}")
        proxies = {n: r for n, r in made.items() if isinstance(r, Exchange)}
        shift = base - proxies["edge"].arrival_unix_ns
        yield {n: replace(r, arrival_unix_ns=r.arrival_unix_ns + shift) for n, r in proxies.items()}


class Load:
    """Sends batches of ``batch`` requests from three senders until ``stopping``.

    ``pause_s``: the wait after each batch.
    Concurrent loads need different values of ``name``, so that they share no requests and no senders.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        batch: int = 160,
        pause_s: float = 0.0,
        timeout_s: float = 5.0,
        name: str = "",
        compression: str = "gzip",
    ) -> None:
        self.client = OtlpClient(
            ClientSettings(endpoint=endpoint, protocol="http/protobuf", timeout_s=timeout_s, compression=compression)
        )
        self.acknowledged: set[str] = set()
        self.latencies_s: list[float] = []  # of every acknowledged request, its last attempt
        self.refusals: Counter[str] = Counter()
        self.delays_s: list[float] = []  # delays that refusals requested
        self.refused_spans = 0  # on every attempt
        self.requests = 0
        self.stopping = False
        self._batch = batch
        self._pause_s = pause_s
        self._name = name
        self._source = requests(name)
        self._seq = dict.fromkeys(SENDERS, 0)
        self._made: list[list[tuple[bytes, list[str]]]] = []

    @property
    def retries(self) -> int:
        return self.refusals.total()

    def prepare(self, batches: int) -> None:
        """Prepare so many batches now; ``run`` sends them first.

        Prepared batches cost almost nothing to send.
        """
        self._made = [self._batch_of_all() for _ in range(batches)][::-1]

    async def run(self) -> None:
        """Send until ``stopping``."""
        while not self.stopping:
            payloads = self._made.pop() if self._made else self._batch_of_all()
            self.requests += self._batch
            await asyncio.gather(*(self._send(*each) for each in payloads))
            if self._pause_s:
                await asyncio.sleep(self._pause_s)

    def _batch_of_all(self) -> list[tuple[bytes, list[str]]]:
        """Build one export request of each sender, with its spans' ids."""
        made = [next(self._source) for _ in range(self._batch)]
        return [self._encoded(role, [r[name] for r in made]) for role, name in zip(SENDERS, _NAMES, strict=True)]

    def _encoded(self, role: Role, records: list[Exchange]) -> tuple[bytes, list[str]]:
        self._seq[role] += 1
        process = replace(records[0].process, sender=role.value * 4 + self._name)
        spans = [to_span(r) for r in records]
        request = ExportTraceServiceRequest()
        group = request.resource_spans.add(resource=resource_of(process))
        scoped = group.scope_spans.add(spans=spans)
        scoped.scope.name = SCOPE_PROXY
        scoped.scope.attributes.add(key=BATCH_SEQ).value.int_value = self._seq[role]
        return request.SerializeToString(), [span.span_id.hex() for span in spans]

    async def _send(self, payload: bytes, ids: list[str]) -> None:
        while not await self._taken(payload):
            self.refused_spans += len(ids)
            await asyncio.sleep(0.02)  # the client's own wait between attempts
        self.acknowledged.update(ids)

    async def _taken(self, payload: bytes) -> bool:
        began_s = time.monotonic()
        try:
            await self.client.send(Signal.TRACES, payload)
        except Retryable as refusal:
            self.refusals[refusal.reason.split(":")[0][:60]] += 1
            self.delays_s.append(refusal.delay_s)
            return False
        self.latencies_s.append(time.monotonic() - began_s)
        return True


@contextlib.asynccontextmanager
async def loading(load: Load) -> AsyncIterator[asyncio.Task[None]]:
    """Run the load in the background; cancel it at the end if it still runs."""
    sending = asyncio.create_task(load.run())
    try:
        yield sending
    finally:
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        await load.client.close()


async def until(holds: Callable[[], bool], what: Callable[[], str], timeout_s: float, poll_s: float = 0.02) -> None:
    """Return as soon as ``holds()``. Raises ``TimeoutError`` that names the condition."""
    deadline_s = time.monotonic() + timeout_s
    while not holds():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"{what()} (not within {timeout_s:.0f} s)")
        await asyncio.sleep(poll_s)


async def until_stored(store: Path, count: int, timeout_s: float) -> None:
    """Wait until the store has so many request rows. Raises ``TimeoutError``."""
    reader = StoreReader(store)
    deadline_s = time.monotonic() + timeout_s
    while (rows := await asyncio.to_thread(reader.count, RequestFilter())) < count:
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"{rows} of {count} rows within {timeout_s:.0f} s")
        await asyncio.sleep(0.2)


@dataclass(frozen=True, slots=True)
class Stored:
    """What the store holds of a load.

    ``rows``: how many requests have a row. ``rows_twice``: requests with more than one current row.
    """

    acknowledged: int
    lost: frozenset[str]
    doubled: frozenset[str]
    requests: int
    rows: int
    rows_twice: int

    @property
    def whole(self) -> bool:
        """Whether every span and every row is there exactly once."""
        return not self.lost and not self.doubled and not self.rows_twice and self.rows == self.requests

    def text(self) -> str:
        spans = f"{self.acknowledged} spans acknowledged, {len(self.lost)} lost, {len(self.doubled)} doubled"
        twice = f", {self.rows_twice} twice" if self.rows_twice else ""
        return f"{spans}; {self.rows} rows of {self.requests} requests{twice}"


def stored(store: Path, *loads: Load) -> Stored:
    """Compare the store with what the collector acknowledged to all these loads."""
    reader = StoreReader(store)
    spans = Counter(span_ids(store, reader))
    rows = Counter(row_keys(reader))
    acknowledged = set().union(*(load.acknowledged for load in loads))
    return Stored(
        acknowledged=len(acknowledged),
        lost=frozenset(acknowledged - set(spans)),
        doubled=frozenset(span for span, times in spans.items() if times > 1),
        requests=sum(load.requests for load in loads),
        rows=len(rows),
        rows_twice=sum(times > 1 for times in rows.values()),
    )


def span_ids(store: Path, reader: StoreReader) -> list[str]:
    """Return the span ids of every span file that the manifest lists."""
    files = [file for publish in reader.snapshot().publishes for file in publish.files if file.table is Table.SPANS]
    return [i.hex() for f in files for i in pq.read_table(store / f.path, columns=["span_id"])["span_id"].to_pylist()]


def row_keys(reader: StoreReader) -> list[str]:
    """Return the client's id of every row that a reader sees.

    A reader sees the highest version of each row.
    """
    found: list[str] = []
    before = None
    while True:
        rows = reader.requests(RequestFilter(limit=10_000, until_unix_ns=before))
        found.extend(r.client_request_id or "" for r in rows)
        if len(rows) < 10_000:
            return found
        before = min(r.started_unix_ns for r in rows)
