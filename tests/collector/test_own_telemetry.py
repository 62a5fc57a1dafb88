"""What a collector reports about its own work.

It also covers what the collector does with such reports of others.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from aiohttp import ClientSession

from doubles.own_spans import KeptSpans
from handrail import conventions as names
from handrail.otlp.signals import Retryable, Signal
from handrail_collector.api.server import ApiServer
from handrail_collector.stitch.stitcher import SECOND
from handrail_collector.store.layout import SUFFIX
from handrail_collector.store.maintenance import Upkeep, UpkeepSettings
from handrail_collector.store.read import StoreReader
from harness.pipelines import Clock, batch, proxies, running, send, sweep, taken
from harness.store import kept_store, publish_all


class SlowClock(Clock):
    """A clock that goes on by 10 ms whenever somebody looks at it."""

    def __call__(self) -> int:
        self.now += 10_000_000
        return self.now


def own_spans(*operations: str) -> bytes:
    backend = KeptSpans()
    for name in operations:
        with backend.tracer.start_as_current_span(name):
            pass
    return backend.payload()


async def test_own_spans_that_come_in_are_not_joined_stored_or_counted_as_spans(tmp_path: Path) -> None:
    forwarded: list[bytes] = []
    async with running(tmp_path, Clock(), forward=lambda _, payload: forwarded.append(payload)) as (journal, pipeline):
        payload = own_spans(names.OWN_COMMIT, names.OWN_PUBLISH)
        await journal.consume(Signal.TRACES, payload)
        await taken(pipeline, journal)
        assert (pipeline.stats.own_spans, pipeline.stats.spans, len(pipeline.stitcher)) == (2, 0, 0)
        await pipeline.flush()
    assert forwarded == [payload]
    assert list((tmp_path / "store").rglob(f"*{SUFFIX}")) == []


async def test_requests_beside_own_spans_in_one_batch_are_taken(tmp_path: Path) -> None:
    async with running(tmp_path, Clock()) as (journal, pipeline):
        await journal.consume(Signal.TRACES, own_spans(names.OWN_COMMIT) + batch(proxies("req-a", "t1")[:1]))
        await taken(pipeline, journal)
        assert (pipeline.stats.own_spans, pipeline.stats.spans, len(pipeline.stitcher)) == (1, 1, 1)


async def test_work_on_own_spans_makes_no_own_spans(tmp_path: Path) -> None:
    """Otherwise a collector that is its own backend would never be at rest."""
    backend = KeptSpans()
    async with running(tmp_path, SlowClock(), tracer=backend.tracer) as (journal, pipeline):
        for _ in range(3):
            await journal.consume(Signal.TRACES, own_spans(names.OWN_COMMIT))
            await taken(pipeline, journal)
            await pipeline.flush()
    assert backend.names == []


async def test_journal_pipeline_and_publish_are_traced(tmp_path: Path) -> None:
    backend, clock = KeptSpans(), SlowClock()
    async with running(tmp_path, clock, tracer=backend.tracer) as (journal, pipeline):
        records = proxies("req-a", "t1")
        await send(journal, records)
        await taken(pipeline, journal)
        sweep(pipeline, clock() + 3600 * SECOND)
        await pipeline.flush()
    commits, entries = backend.named(names.OWN_COMMIT), backend.named(names.OWN_ENTRY)
    assert sum(int(str((span.attributes or {})[names.OWN_RECORDS])) for span in commits) == len(records)
    assert [span.parent for span in backend.named(names.OWN_SYNC)] == [span.context for span in commits]
    assert len(entries) == len(records)
    for name in (names.OWN_DECODE, names.OWN_STITCH):
        assert [span.parent for span in backend.named(name)] == [span.context for span in entries]
    for whole, decode, stitch in zip(entries, *map(backend.named, (names.OWN_DECODE, names.OWN_STITCH)), strict=True):
        assert (whole.start_time, decode.end_time, stitch.end_time) == (decode.start_time, stitch.start_time, whole.end_time)
        assert (whole.attributes or {})[names.OWN_SIGNAL] == "traces"
    assert [span.attributes for span in backend.named(names.OWN_DECIDE)] == [{names.OWN_DECIDED: 1}]
    assert [span.attributes for span in backend.named(names.OWN_PUBLISH)] == [{names.OWN_SPANS: 3, names.OWN_ROWS: 1}]


async def test_an_entry_that_is_quick_makes_no_span(tmp_path: Path) -> None:
    backend = KeptSpans()
    async with running(tmp_path, Clock(), tracer=backend.tracer) as (journal, pipeline):
        await send(journal, proxies("req-a", "t1"))
        await taken(pipeline, journal)
    assert not {names.OWN_ENTRY, names.OWN_DECODE, names.OWN_STITCH, names.OWN_DECIDE} & set(backend.names)


async def test_a_commit_that_refuses_and_a_publish_that_fails_are_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = KeptSpans()
    async with running(tmp_path, Clock(), tracer=backend.tracer) as (journal, pipeline):
        await send(journal, proxies("req-a", "t1"))
        await taken(pipeline, journal)
        with monkeypatch.context() as broken:
            broken.setattr(pipeline._publisher, "publish", _no_space)
            await pipeline.flush()
        with monkeypatch.context() as broken:
            broken.setattr(journal._log, "append", _no_space)
            with pytest.raises(Retryable):
                await journal.consume(Signal.TRACES, batch(proxies("req-b", "t2")[:1], 9))
    failed = backend.named(names.OWN_PUBLISH)[0]
    assert (failed.status.is_ok, [event.name for event in failed.events]) == (False, ["exception"])
    refused = backend.named(names.OWN_COMMIT)[-1]
    assert (refused.status.is_ok, (refused.attributes or {})[names.OWN_REFUSED]) == (False, 1)


def _no_space(*_: object) -> None:
    raise OSError(28, "No space left on device")


def test_every_step_of_a_maintenance_pass_is_traced(tmp_path: Path) -> None:
    backend, store = KeptSpans(), kept_store(tmp_path / "store")
    publish_all(store.publisher)
    Upkeep(store.publisher, UpkeepSettings(closed_after_ns=15), store.clock, tracer=backend.tracer).run_pass()
    store.reader.close()
    store.publisher.close()
    whole = backend.one(names.OWN_UPKEEP)
    steps = [span for span in backend.spans if span.parent == whole.context]
    assert [span.name for span in steps] == [
        "store.damaged_files",
        "store.damaged_rollups",
        "store.retention",
        "store.quota",
        "store.compaction",
        "store.rollups",
        "store.removal",
    ]
    folded = [span for span in backend.named("store.compaction") if span.attributes]
    (step,) = [step for step in steps if step.name == "store.compaction"]
    assert folded
    assert all(span.parent == step.context for span in folded)
    assert all(str((span.attributes or {})[names.OWN_FOLDER]).startswith(("requests", "spans")) for span in folded)


async def test_questions_are_traced_and_scrapes_are_not(tmp_path: Path) -> None:
    backend = KeptSpans()
    async with running(tmp_path, Clock()) as (_, pipeline):
        api = ApiServer(StoreReader(tmp_path / "store"), pipeline, dict, "127.0.0.1", 0, tracer=backend.tracer)
        await api.start()
        base = f"http://127.0.0.1:{api.address[1]}"
        async with ClientSession() as session:
            for path in ("/metrics", "/healthz", "/api/v1/explain", "/api/v1/requests/none", "/elsewhere"):
                async with session.get(base + path) as response:
                    await response.read()
        await api.shutdown()
    roots = [span for span in backend.spans if span.parent is None]
    assert [(span.name, dict(span.attributes or {})) for span in roots] == [
        (f"GET {route}", {names.HTTP_METHOD: "GET", names.HTTP_ROUTE: route, names.HTTP_STATUS: status})
        for route, status in (("/api/v1/explain", 200), ("/api/v1/requests/{id}", 404))
    ]
    assert [span.parent for span in backend.named(names.OWN_QUERY)] == [span.context for span in roots]
