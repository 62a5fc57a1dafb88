"""Sidecars' records of hand-offs, engines and processes, from bytes to tables.

The collector is killed in between, and nothing is stored twice.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from builders.plugin import altered, fact, facts_of, fetch, happened, publish
from builders.records import EPOCH, MS, process
from doubles.store_filters import fetch_matches, fetch_order
from handrail.otlp.signals import Signal
from handrail.records import Iteration, LogKind, Outcome, ProcessEventKind, Role, Source
from handrail_collector.rows import FetchRow
from handrail_collector.stitch.stitcher import SECOND
from handrail_collector.store.filters import FetchFilter
from handrail_collector.store.layout import HOUR_NS
from handrail_collector.store.maintenance import Upkeep, UpkeepSettings
from handrail_collector.store.publish import StorePublisher
from handrail_collector.store.read import StoreReader
from handrail_collector.store.schema import Table
from handrail_sidecar.engine_metrics.failures import counted_failures
from harness.pipelines import Clock, a_request, log_batch, plugin_batch, proxies, running, send, stored, sweep, taken


def fetches(root: Path, **wanted: Any) -> list[FetchRow]:
    reader = StoreReader(root / "store", threads=1)
    try:
        return reader.fetches(FetchFilter(**wanted))
    finally:
        reader.close()


def kept(root: Path, table: Table) -> list[Any]:
    reader = StoreReader(root / "store", threads=1)
    try:
        return reader.events(table, 0, 1 << 62)
    finally:
        reader.close()


async def test_a_hand_off_is_a_row_under_its_requests_ids_and_version(tmp_path: Path) -> None:
    clock = Clock()
    seen, plugin = a_request()
    async with running(tmp_path, clock) as (journal, pipeline):
        await send(journal, seen)
        for seq, of_process in enumerate(plugin, 1):
            await journal.consume(Signal.TRACES, plugin_batch(of_process, seq))
        await taken(pipeline, journal)
        sweep(pipeline, clock.now + 20 * SECOND)
    (row,) = stored(tmp_path)
    (one,) = fetches(tmp_path)
    assert (one.trace_id, one.request_id, one.version) == (row.trace_id, row.request_id, row.version)
    assert (one.outcome, one.consumer_instance, one.producer_instance) == ("ok", "decode:8000", "prefill:8000")
    assert (one.bytes_moved, one.transfer_ns, one.handshake_ns) == (64 * 32768, 59 * MS, 0)
    assert (row.kv_outcome, row.kv_bytes) == ("ok", 64 * 32768)
    assert row.client_request_id == one.client_request_id == "req-a"
    assert {p.phase for p in row.phases} >= {"kv_wait", "kv_handshake", "kv_transfer", "kv_notice", "decode_queue"}


async def test_an_open_hand_off_is_a_provisional_row_with_its_age_until_its_end_comes(tmp_path: Path) -> None:
    clock = Clock()
    open_one = fetch(0, done_ms=None, noticed_ms=None, provisional=True, seen_ns=3 * SECOND, ended_ns=None, bytes_moved=None)
    async with running(tmp_path, clock) as (journal, pipeline):
        await journal.consume(Signal.LOGS, log_batch([open_one], 1))
        await taken(pipeline, journal)
        (live,) = pipeline.fetches()
        assert (live.version, live.open, live.duration_ns, live.outcome, live.reason) == (0, True, 3 * SECOND, "unknown", "open")
        later = altered(open_one, seen_ns=70 * SECOND)
        await journal.consume(Signal.LOGS, log_batch([later], 2))
        await taken(pipeline, journal)
        assert [f.outcome for f in pipeline.fetches()] == ["hung"]
        ended = altered(open_one, provisional=False, noticed_ns=80 * SECOND, ended_ns=80 * SECOND)
        await journal.consume(Signal.TRACES, plugin_batch([ended], 3))
        await journal.consume(Signal.LOGS, log_batch([later], 4))  # a delayed report changes nothing
        await taken(pipeline, journal)
        assert [(f.outcome, f.open) for f in pipeline.fetches()] == [("ok", False)]
        sweep(pipeline, clock.now + 30 * SECOND)
    assert [f.outcome for f in fetches(tmp_path)] == ["ok"]
    assert stored(tmp_path) == []  # nobody saw a request


async def test_events_of_processes_iterations_and_findings_are_tables_and_each_is_there_once(tmp_path: Path) -> None:
    clock = Clock()
    reports = [
        happened(ProcessEventKind.HUNG, Role.DECODE, 100),
        Iteration(process=happened(ProcessEventKind.DEAD, Role.DECODE, 0).process, source=Source.PLUGIN, started_unix_ns=EPOCH,
                  duration_ns=SECOND, steps=40, decode_tokens=400),
        facts_of(Role.PREFILL, 0, engine_id="E1"),
        facts_of(Role.PREFILL, 5000, engine_id="E2", dtype="float16"),
    ]  # fmt: skip
    for life in range(2):
        async with running(tmp_path, clock) as (journal, pipeline):
            if life == 0:
                await journal.consume(Signal.LOGS, log_batch(reports, 1))
                await journal.consume(Signal.LOGS, log_batch([facts_of(Role.DECODE, 5000)], 2))
                await send(journal, a_request()[0])
            await journal.consume(Signal.LOGS, log_batch(reports, 1))  # delivered twice
            await taken(pipeline, journal)
            sweep(pipeline, clock.now + 20 * SECOND)
    assert [(e.kind, e.detail) for e in kept(tmp_path, Table.PROCESS_EVENTS)] == [
        ("restarted", "engine E1 -> E2 at one address"),
        ("hung", ""),
    ]
    assert [i.decode_tokens for i in kept(tmp_path, Table.ITERATIONS)] == [400]
    assert [(f.kind, f.detail) for f in kept(tmp_path, Table.FINDINGS)] == [
        ("kv_mismatch", "dtype is float16 at P and bfloat16 at D"),
    ]
    (row,) = stored(tmp_path)
    assert "kv_mismatch: dtype is float16 at P and bfloat16 at D" in row.findings


async def test_a_replay_says_nothing_twice_and_a_late_expiry_makes_a_new_version(tmp_path: Path) -> None:
    clock = Clock()
    seen, (at_p, _) = a_request()
    unread = [at_p[0], publish(105, parent=seen[1], read_ms=None, freed_ms=None, provisional=True, seen_ns=2 * SECOND)]
    async with running(tmp_path, clock) as (journal, pipeline):
        await send(journal, seen)
        await journal.consume(Signal.TRACES, plugin_batch(unread[:1], 1))
        await journal.consume(Signal.LOGS, log_batch(unread[1:], 2))
        await taken(pipeline, journal)
        sweep(pipeline, clock.now + 20 * SECOND)
        await pipeline.flush()
        assert [(f.version, f.outcome) for f in fetches(tmp_path)] == [(1, "unknown")]
        late = altered(unread[1], provisional=False, seen_ns=None, freed_ns=30 * SECOND, expired_ns=30 * SECOND)
        await journal.consume(Signal.TRACES, plugin_batch([late], 3))
        await taken(pipeline, journal)
        sweep(pipeline, clock.now + 40 * SECOND)
    assert [(f.version, f.outcome) for f in fetches(tmp_path)] == [(2, "expired")]
    async with running(tmp_path, clock) as (journal, pipeline):  # another life replays it
        await taken(pipeline, journal)
        sweep(pipeline, clock.now + 60 * SECOND)
    assert [(f.version, f.outcome) for f in fetches(tmp_path)] == [(2, "expired")]
    (row,) = stored(tmp_path)
    assert (row.version, row.outcome, row.kv_outcome) == (2, "tainted", "expired")


async def test_hand_offs_are_folded_to_their_last_version_and_leave_with_their_day(tmp_path: Path) -> None:
    await test_a_replay_says_nothing_twice_and_a_late_expiry_makes_a_new_version(tmp_path)
    publisher, later = StorePublisher(tmp_path / "store"), Clock.at(EPOCH + 50 * HOUR_NS)
    publisher.open()
    upkeep = Upkeep(publisher, UpkeepSettings(closed_after_ns=0), later)
    upkeep.run_pass()
    files = [f for p in publisher.publishes() for f in p.files if f.table is Table.KV_FETCHES]
    assert [f.rows for f in files] == [1]
    assert upkeep.stats.failures == 0
    assert [f.outcome for f in fetches(tmp_path)] == ["expired"]
    Upkeep(publisher, UpkeepSettings(closed_after_ns=0, retention_ns=HOUR_NS), Clock.at(1 << 61)).run_pass()
    publisher.close()
    assert fetches(tmp_path) == []


async def test_a_line_of_a_log_reaches_its_request(tmp_path: Path) -> None:
    clock = Clock()
    seen, plugin = a_request()
    line = fact(LogKind.STALE_READ, Role.PREFILL, 51_000, "cmpl-req-a-0-0000aaaa", lines=8, numbers=(("since_expiry_s", 21.0),))
    async with running(tmp_path, clock) as (journal, pipeline):
        await send(journal, seen)
        await journal.consume(Signal.TRACES, plugin_batch(plugin[0][:1], 1))
        await journal.consume(Signal.LOGS, log_batch([line], 2))
        await taken(pipeline, journal)
        sweep(pipeline, clock.now + 20 * SECOND)
    (row,) = stored(tmp_path)
    assert (row.kv_outcome, row.outcome) == ("stale_read", "tainted")
    assert row.kv_evidence == ("prefill:log stale_read (8 lines, one request)",)


@pytest.mark.parametrize(
    "wanted", [{"outcome": "ok"}, {"peer": "10.0.0.1:5600"}, {"failed": False}, {"direction": "p_to_d"}], ids=str
)
async def test_a_filter_means_the_same_in_python_and_in_sql(tmp_path: Path, wanted: dict[str, Any]) -> None:
    clock = Clock()
    async with running(tmp_path, clock) as (journal, pipeline):
        for number in range(3):
            seen, plugin = a_request(f"req-{number}", f"t{number}", number * 2000)
            await send(journal, seen, 3 * number + 1)
            if number == 2:
                plugin[1][1] = altered(plugin[1][1], failure="transfer_failed", done_ns=None, peer_host="10.0.0.2")
            for seq, of_process in enumerate(plugin):
                await journal.consume(Signal.TRACES, plugin_batch(of_process, 10 * number + seq))
        await taken(pipeline, journal)
        sweep(pipeline, clock.now + 20 * SECOND)
        rows = list(pipeline.fetches())
    fetch_filter = FetchFilter(sort="duration", **wanted)
    expected = sorted((r for r in rows if fetch_matches(fetch_filter, r)), key=lambda row: fetch_order(fetch_filter, row))
    assert 0 < len(expected) <= 3
    assert fetches(tmp_path, sort="duration", **wanted) == expected


async def test_blocks_that_p_keeps_for_peers_are_exported_with_the_age_of_the_oldest(tmp_path: Path) -> None:
    clock = Clock()
    kept_ones = [
        publish(
            at, rid=f"cmpl-{at}-0-0000aaaa", trace=f"t{at}", read_ms=None, freed_ms=None, provisional=True, seen_ns=age * SECOND
        )
        for at, age in ((0, 9), (4000, 5))
    ]
    async with running(tmp_path, clock) as (journal, pipeline):
        await journal.consume(Signal.LOGS, log_batch(kept_ones, 1))
        await taken(pipeline, journal)
        assert pipeline.pinned() == {"prefill:8000": (2 * 64 * 32768, 9 * SECOND)}
        freed = altered(kept_ones[0], provisional=False, read_ns=10 * SECOND, freed_ns=10 * SECOND, readers=1)
        await journal.consume(Signal.TRACES, plugin_batch([freed], 2))
        await taken(pipeline, journal)
        assert pipeline.pinned() == {"prefill:8000": (64 * 32768, 5 * SECOND)}


def _counted(at_ms: float, count: int = 1) -> Any:
    grown = {("kv_transfer_failures", "0", "nixl"): float(count)}
    pages = {**grown, ("kv_expired_requests", "0", "nixl"): 0.0}
    start = EPOCH + round(at_ms * MS)
    (made,) = counted_failures(process(Role.DECODE), grown, pages, start, start + 5 * SECOND)
    return made


async def test_a_counted_failure_comes_to_the_only_request_that_can_be_meant_and_not_again_after_a_restart(
    tmp_path: Path,
) -> None:
    clock = Clock()
    edge, p, d = proxies("req-a", "t1", 0)
    ended = {"outcome": Outcome.STREAM_ERROR, "ttft_token_ns": None}
    for life in range(2):
        async with running(tmp_path, clock) as (journal, pipeline):
            if life == 0:
                await send(journal, [altered(edge, **ended), p, altered(d, **ended)])
                await journal.consume(Signal.LOGS, log_batch([_counted(0)], 1))
            await taken(pipeline, journal)
            for after in (14, 20, 40):
                sweep(pipeline, clock.now + after * SECOND)
    assert [(row.kv_outcome, row.kv_reason) for row in stored(tmp_path)] == [("failed", "counted_failure")]
    assert kept(tmp_path, Table.FINDINGS) == []


async def test_counted_failures_that_no_request_explains_are_one_finding_an_hour(tmp_path: Path) -> None:
    clock = Clock()
    for life in range(2):
        async with running(tmp_path, clock) as (journal, pipeline):
            if life == 0:
                for seq, at_ms in enumerate((0, 5000, 10_000, 3_600_000), 1):
                    await journal.consume(Signal.LOGS, log_batch([_counted(at_ms, 2)], seq))
            await taken(pipeline, journal)
            sweep(pipeline, clock.now + 30 * SECOND)
    found = kept(tmp_path, Table.FINDINGS)
    assert [f.kind for f in found] == ["unexplained_failures"] * 2
    assert found[0].detail == "decode counted 2 kv_transfer_failures within 5 s, while no known hand-off was open there"
    assert found[0].instance == "decode:8000"
