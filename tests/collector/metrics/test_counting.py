"""The collector's counts of requests.

Each request counts once, however many versions its row has and however often the collector restarts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from builders.records import EPOCH, MS, exchange, process, split_request
from builders.stalls import seconds, step, stream
from handrail.otlp.payload import with_batch_seq
from handrail.otlp.signals import Signal
from handrail.records import EngineSample, EngineValue, Exchange, LineClock, LogFact, LogKind, Outcome, Role, Source
from handrail.wire.counts import counts_request
from handrail.wire.engine_samples import metrics_request
from handrail.wire.exchange import resource_of
from handrail_collector.counters import CounterKey, DurableCounters, Timed
from handrail_collector.metrics.request_metrics import phases
from handrail_collector.pipeline import Pipeline
from handrail_collector.stitch.stitcher import SECOND, StitchSettings
from harness.pipelines import START, Clock, log_batch, proxies, running, send, stored, sweep, taken

QUICK = StitchSettings(engine_wait_ns=SECOND, settle_ns=SECOND // 2)
MODEL = "meta-llama/Llama-3.1-8B-Instruct"


def of_model(records: list[Exchange], model: str = MODEL, **changes: Any) -> list[Exchange]:
    return [replace(r, model=model, **changes) for r in records]


def phase_counts(seen: DurableCounters) -> Mapping[tuple[str, ...], int]:
    return {words: found.histogram().count for words, found in seen.durations(Timed.PHASES, 2).items()}


async def decide(pipeline: Pipeline, journal: Any, clock: Clock, seconds: int = 5) -> None:
    await taken(pipeline, journal)
    clock.now += seconds * SECOND
    sweep(pipeline, clock.now)
    await pipeline.flush()


async def test_a_request_counts_when_it_is_first_decided_and_is_joined_when_all_have_spoken(tmp_path: Path) -> None:
    clock = Clock()
    edge, p, d = of_model(proxies("req-a", "t1"))
    async with running(tmp_path, clock, stitch=QUICK) as (journal, pipeline):
        await send(journal, [edge, p])
        await decide(pipeline, journal, clock)
        first = dict(phase_counts(pipeline.observed))
        assert first
        assert set(first.values()) == {1}
        assert pipeline.observed.by_words(CounterKey.JOINED, 2) == {}
    for seq in (9, 10):  # one restart, then a late span, then nothing new
        async with running(tmp_path, clock, stitch=QUICK) as (journal, pipeline):
            if seq == 9:
                await send(journal, [d], seq)
            await decide(pipeline, journal, clock)
            seen = pipeline.observed
            assert phase_counts(seen) == first, "its phases were counted as they were first known"
            assert seen.by_words(CounterKey.JOINED, 2) == {("ok", MODEL): 1}
            assert list(pipeline.counting.models.names) == [MODEL]


@pytest.mark.parametrize("restart", [False, True])
async def test_phases_that_are_only_known_late_count_then(tmp_path: Path, restart: bool) -> None:
    """Phases that become known late count at that time.

    A row of D's engine alone has no first token that anybody saw. The edge's span, which was long on the way, has it.
    """
    clock = Clock()
    made = split_request("req-a", "t1")
    edge, d = of_model([r for name in ("edge", "d") if isinstance(r := made[name], Exchange)])
    async with running(tmp_path, clock, stitch=QUICK) as (journal, pipeline):
        await send(journal, [replace(d, ttft_token_ns=None, outcome=Outcome.CLIENT_DISCONNECT)])
        await decide(pipeline, journal, clock)
        assert len(stored(tmp_path)) == 1
        assert phase_counts(pipeline.observed) == {}
        if not restart:
            await send(journal, [edge], 9)
            await decide(pipeline, journal, clock)
    async with running(tmp_path, clock, stitch=QUICK) as (journal, pipeline):
        if restart:
            await send(journal, [edge], 9)
        await decide(pipeline, journal, clock)
        (row,) = stored(tmp_path)
        assert (row.version, row.phase_of) == (2, "ttft")
        assert set(phase_counts(pipeline.observed).values()) == {1}


async def test_phases_in_parts_are_one_duration_and_their_sum_is_the_time_to_first_token(tmp_path: Path) -> None:
    clock = Clock()
    async with running(tmp_path, clock, stitch=QUICK) as (journal, pipeline):
        await send(journal, of_model(proxies("req-a", "t1")))
        await decide(pipeline, journal, clock)
        durations = pipeline.observed.durations(Timed.PHASES, 2)
        assert set(phase_counts(pipeline.observed).values()) == {1}
        assert sum(found.sum_ns for found in durations.values()) == 300 * MS


async def test_the_last_request_of_a_bucket_is_its_exemplar_for_an_hour(tmp_path: Path) -> None:
    clock = Clock()
    async with running(tmp_path, clock, stitch=QUICK) as (journal, pipeline):
        for seq, name in ((1, "a"), (10, "b")):
            await send(journal, of_model(proxies(f"req-{name}", f"t{name}")), seq)
            await decide(pipeline, journal, clock)
        (_, b) = sorted(stored(tmp_path), key=lambda row: row.client_request_id or "")
        for found in phases(pipeline.observed, 0).values():
            assert {exemplar.trace_id for exemplar in found.exemplars.values()} == {b.trace_id}
            assert all(found.counts[bucket] == 2 for bucket in found.exemplars)
        assert not any(found.exemplars for found in phases(pipeline.observed, clock.now + 1).values())
    async with running(tmp_path, clock, stitch=QUICK) as (_, pipeline):
        assert not any(found.exemplars for found in phases(pipeline.observed, 0).values())


async def test_a_response_that_is_not_streamed_has_no_phases_of_a_first_token(tmp_path: Path) -> None:
    clock = Clock()
    async with running(tmp_path, clock, stitch=QUICK) as (journal, pipeline):
        await send(journal, of_model(proxies("req-a", "t1"), stream=False, ttft_token_ns=None))
        await decide(pipeline, journal, clock)
        assert phase_counts(pipeline.observed) == {}
        assert pipeline.observed.by_words(CounterKey.JOINED, 2) == {("ok", MODEL): 1}


@pytest.mark.parametrize("outcome", [Outcome.HTTP_ERROR, Outcome.UPSTREAM_UNREACHABLE])
async def test_what_no_model_answered_is_not_joined_and_gives_no_model_a_name(tmp_path: Path, outcome: Outcome) -> None:
    clock = Clock()
    async with running(tmp_path, clock, stitch=QUICK) as (journal, pipeline):
        made = of_model(proxies("req-a", "t1"), "invented", outcome=outcome, status=404, ttft_token_ns=None)
        await send(journal, made)
        await decide(pipeline, journal, clock)
        assert len(stored(tmp_path)) == 1
        assert pipeline.observed.by_words(CounterKey.JOINED, 2) == {}
        assert not pipeline.counting.models.names


async def test_a_finding_counts_once_a_request_over_versions_and_restarts(tmp_path: Path) -> None:
    clock = Clock()
    made = proxies("req-a", "t1")
    edge, p, d = made
    async with running(tmp_path, clock, stitch=QUICK) as (journal, pipeline):
        await send(journal, [edge, replace(p, model="a"), replace(d, model="b")])
        await decide(pipeline, journal, clock)
        assert pipeline.observed.by_word(CounterKey.FINDINGS) == {"model_mismatch": 1}
    again = exchange(Role.PREFILL, 5, 3, rid="req-a", parent=edge, model="a")
    async with running(tmp_path, clock, stitch=QUICK) as (journal, pipeline):
        await send(journal, [again], 9)
        await decide(pipeline, journal, clock)
        (row,) = stored(tmp_path)
        assert row.version == 2
        found = pipeline.observed.by_word(CounterKey.FINDINGS)
        assert found == dict.fromkeys({finding.split(":")[0] for finding in row.findings}, 1)
        assert set(found) == {"model_mismatch", "prefill_retried"}


async def test_a_stall_is_not_counted_again_by_a_version_of_another_life(tmp_path: Path) -> None:
    """A request that has counted adds no further stalls.

    The counter does not ask the store which stalls an earlier version had.
    """
    clock = Clock()
    edge, p, d = stalled()
    async with running(tmp_path, clock) as (journal, pipeline):
        await journal.consume(Signal.LOGS, log_batch([*seconds(0, 41_000), step(126, 131, prefill_tokens=2048)], 1))
        await send(journal, [edge, d])
        await decide(pipeline, journal, clock, 20)
        counted = pipeline.observed.by_words(CounterKey.STALLS, 2)
        assert sum(counted.values()) == 1
        assert {model for _, model in counted} == {MODEL}
    async with running(tmp_path, clock) as (journal, pipeline):
        await send(journal, [p], 9)
        await decide(pipeline, journal, clock, 20)
        (row,) = stored(tmp_path)
        assert row.version == 2
        assert pipeline.observed.by_words(CounterKey.STALLS, 2) == counted


def stalled() -> list[Exchange]:
    gaps = [10.0] * 2000
    gaps[10] = 130.0
    edge = stream(Role.EDGE, 0, 30, gaps, model=MODEL, rid="req-a", host="h-e")
    d = stream(Role.DECODE, 2, 26, gaps, model=MODEL, rid="req-a", parent=edge)
    return [edge, exchange(Role.PREFILL, 1, 1, rid="req-a", parent=edge, model=MODEL), d]


# --- what others count ----------------------------------------------------------------------------------------------------

START_OF_COUNT = START - 30 * SECOND


def counts(at_unix_ns: int, ok: int, failed: int = 0, seq: int = 1) -> bytes:
    resource = resource_of(replace(process(Role.EDGE), sender="edge-counts"))
    finished = {Outcome.OK: ok, Outcome.HTTP_ERROR: failed}
    return with_batch_seq(counts_request(resource, finished, START_OF_COUNT, at_unix_ns), seq)


def finished(at_unix_ns: int, number: float, seq: int = 1, role: Role = Role.DECODE) -> bytes:
    engine_sample = EngineSample(
        process=process(role),
        source=Source.METRICS,
        at_unix_ns=at_unix_ns,
        values=tuple(
            EngineValue(name="requests_finished", value=value, label=reason, start_unix_ns=START - 3600 * SECOND)
            for reason, value in (("stop", number), ("abort", 0.0))
        ),
    )
    resource = resource_of(replace(process(role), sender="metrics"))
    return with_batch_seq(metrics_request(resource, [engine_sample]), seq)


def now_ish(rid: str, trace: str, at_unix_ns: int) -> list[Exchange]:
    """Return a request that ends a second after ``at_unix_ns``."""
    shift = at_unix_ns - EPOCH
    made = split_request(rid, trace)
    return [replace(r, arrival_unix_ns=r.arrival_unix_ns + shift) for r in made.values() if isinstance(r, Exchange)]


async def test_coverage_is_over_what_edges_counted_and_not_over_rows(tmp_path: Path) -> None:
    clock = Clock()
    async with running(tmp_path, clock, stitch=QUICK) as (journal, pipeline):
        await journal.consume(Signal.METRICS, counts(clock.now, 0, seq=1))
        await send(journal, now_ish("req-a", "t1", clock.now))
        await taken(pipeline, journal)
        assert pipeline.counting.coverage.ratio(clock.now) is None
        clock.now += 10 * SECOND
        await journal.consume(Signal.METRICS, counts(clock.now, 4, failed=7, seq=2))  # three of them never reached the collector
        await decide(pipeline, journal, clock, 30)
        assert pipeline.counting.coverage.ratio(clock.now) == 1 / 4
        assert pipeline.observed.by_word(CounterKey.COUNTED) == {"edge": 4}
        assert sum(pipeline.observed.by_words(CounterKey.JOINED, 2).values()) == 1
        assert len(stored(tmp_path)) == 1


async def test_without_an_edge_the_engines_that_decode_count(tmp_path: Path) -> None:
    clock = Clock()
    async with running(tmp_path, clock, stitch=QUICK) as (journal, pipeline):
        for seq, number in ((1, 100.0), (2, 102.0)):
            await journal.consume(Signal.METRICS, finished(clock.now, number, seq))
            await journal.consume(Signal.METRICS, finished(clock.now, number, seq, Role.PREFILL))
            if seq == 1:
                await send(journal, now_ish("req-a", "t1", clock.now))
            await taken(pipeline, journal)
            clock.now += 10 * SECOND
        await decide(pipeline, journal, clock, 30)
        assert pipeline.observed.by_word(CounterKey.COUNTED) == {"engine": 2}
        assert pipeline.counting.coverage.ratio(clock.now) == 0.5


async def test_counts_are_counted_once_over_replays_and_redeliveries(tmp_path: Path) -> None:
    clock = Clock()
    for life in range(3):
        async with running(tmp_path, clock, stitch=QUICK) as (journal, pipeline):
            await taken(pipeline, journal)
            if life == 0:
                for seq, ok in ((1, 0), (2, 5)):
                    await journal.consume(Signal.METRICS, counts(clock.now, ok, seq=seq))
                    clock.now += 10 * SECOND
            await journal.consume(Signal.METRICS, counts(clock.now - 10 * SECOND, 5, seq=2))
            if life == 2:
                await journal.consume(Signal.METRICS, counts(clock.now, 9, seq=3))
            await decide(pipeline, journal, clock)
            assert pipeline.observed.by_word(CounterKey.COUNTED) == {"edge": 9 if life == 2 else 5}


async def test_failures_that_no_request_explains_are_found_once_over_restarts(tmp_path: Path) -> None:
    clock = Clock()
    fact = LogFact(
        process=process(Role.DECODE),
        source=Source.METRICS,
        fact_id="f" * 16,
        kind=LogKind.FETCH_FAILED,
        recogniser="metrics.kv_transfer_failures",
        at_unix_ns=clock.now,
        last_unix_ns=clock.now + 5 * SECOND,
        clock=LineClock.RECEIPT,
        lines=3,
    )
    for life in range(3):
        async with running(tmp_path, clock, stitch=QUICK) as (journal, pipeline):
            if life == 0:
                await journal.consume(Signal.LOGS, log_batch([fact], 1))
            await decide(pipeline, journal, clock, 10)
            assert pipeline.observed.by_word(CounterKey.FINDINGS) == {"unexplained_failures": 1}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0, 1e300], ids=str)
async def test_a_counter_that_is_no_number_of_requests_counts_nothing_and_breaks_nothing(tmp_path: Path, value: float) -> None:
    clock = Clock()
    async with running(tmp_path, clock, stitch=QUICK) as (journal, pipeline):
        for seq, number in ((1, 1.0), (2, value), (3, 3.0)):
            await journal.consume(Signal.METRICS, finished(clock.now, number, seq))
            clock.now += 10 * SECOND
        await decide(pipeline, journal, clock)
        assert pipeline.observed.by_word(CounterKey.COUNTED) == {"engine": 2}
        assert pipeline.stats.faults == 0
