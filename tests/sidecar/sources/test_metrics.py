"""The metrics tap against real HTTP endpoints: good, slow, dead, huge, odd."""

from __future__ import annotations

import asyncio
import gzip
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from builders.records import EPOCH, process
from handrail.records import (
    EngineSample,
    LogFact,
    LogKind,
    ProcessEvent,
    ProcessEventKind,
    Role,
    SchemaReport,
    SchemaState,
    Source,
)
from handrail_sidecar.sources.engine_metrics import MetricsSettings, MetricsSource

_PAGE = (Path(__file__).parents[2] / "data/recordings/metrics_decode.txt").read_bytes()
_COUNTER = "metrics.kv_transfer_failures"
S = 10**9


@dataclass
class Got:
    """What the source delivered."""

    taken: list[EngineSample | SchemaReport | LogFact] = field(default_factory=list)
    events: list[ProcessEvent] = field(default_factory=list)
    full: bool = False

    async def __call__(self, record: EngineSample | SchemaReport | LogFact) -> bool:
        if not self.full:
            self.taken.append(record)
        return not self.full

    @property
    def samples(self) -> list[EngineSample]:
        return [record for record in self.taken if isinstance(record, EngineSample)]

    @property
    def facts(self) -> list[LogFact]:
        return [record for record in self.taken if isinstance(record, LogFact)]

    @property
    def reports(self) -> list[SchemaReport]:
        return [record for record in self.taken if isinstance(record, SchemaReport)]


@dataclass
class Engine:
    """An endpoint whose answer a test chooses.

    ``asked``: the headers of the last request.
    """

    answer: Callable[[web.Request], Awaitable[web.StreamResponse]]
    url: str = ""
    request_headers: dict[str, str] = field(default_factory=dict)


@asynccontextmanager
async def engine(answer: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> AsyncIterator[Engine]:
    made = Engine(answer)

    async def handle(request: web.Request) -> web.StreamResponse:
        made.request_headers = dict(request.headers)
        return await made.answer(request)

    app = web.Application()
    app.router.add_get("/metrics", handle)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    made.url = f"http://127.0.0.1:{runner.addresses[0][1]}/metrics"
    try:
        yield made
    finally:
        await runner.cleanup()


def of(body: bytes, **more: Any) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    async def answer(_: web.Request) -> web.StreamResponse:
        return web.Response(body=body, **more)

    return answer


@asynccontextmanager
async def source(url: str, got: Got, **more: Any) -> AsyncIterator[MetricsSource]:
    """A source that scrapes only on demand, and has scraped once."""
    clock = iter(range(EPOCH, EPOCH + 10**6 * S, 20 * S))
    made = MetricsSource(
        MetricsSettings(**{"url": url, "timeout_s": 5.0, **more}),
        process(Role.DECODE),
        got,
        got.events.append,
        now_unix_ns=lambda: next(clock),
    )
    await made.scrape()
    try:
        yield made
    finally:
        await made.shutdown(1)
        await made.shutdown(1)


async def test_a_page_becomes_a_report_and_samples() -> None:
    got = Got()
    async with engine(of(_PAGE)) as at, source(at.url, got, headers={"Authorization": "Bearer x"}) as tap:
        await tap.scrape()
    assert "version=0.0.4" in at.request_headers["Accept"]
    assert at.request_headers["Authorization"] == "Bearer x"
    assert [report.emitters for report in got.reports] == [("vllm", "vllm-nixl")]
    first, second = got.samples
    assert (first.model, second.at_unix_ns - first.at_unix_ns) == ("tiny", 20 * S)
    assert {value.name for value in first.values} >= {"requests_waiting", "kv_cache_usage_ratio", "kv_transfer_failures"}
    counter = next(value for value in first.values if value.name == "generation_tokens")
    assert counter.start_unix_ns > 0
    assert not got.events


async def test_gzip_is_requested_and_read() -> None:
    got = Got()
    async with engine(of(gzip.compress(_PAGE), headers={"Content-Encoding": "gzip"})) as at, source(at.url, got) as tap:
        assert tap.stats.page_bytes == len(_PAGE)
    assert "gzip" in at.request_headers["Accept-Encoding"]


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gzip_bomb"])
async def test_a_huge_page_is_refused_before_it_is_held(packed: bool) -> None:
    huge = b"x" * (3 << 20)
    answer = of(gzip.compress(huge), headers={"Content-Encoding": "gzip"}) if packed else of(huge)
    got = Got()
    async with engine(answer) as at, source(at.url, got, most_bytes=1 << 20) as tap:
        assert tap.stats.failures == {"too_large": 1}
    assert not got.taken


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (of(b"", status=503), "status"),
        (of(b"", status=302, headers={"Location": "http://127.0.0.1:1/"}), "status"),
        (of(b"\x1f\x8b not gzip", headers={"Content-Encoding": "gzip"}), "unreachable"),
    ],
    ids=["503", "redirect", "bad_gzip"],
)
async def test_what_brings_no_page_is_a_state(answer: Callable[[web.Request], Awaitable[web.StreamResponse]], kind: str) -> None:
    got = Got()
    async with engine(answer) as at, source(at.url, got) as tap:
        await tap.scrape()
        assert tap.stats.failures == {kind: 2}
        assert [event.kind for event in got.events] == [ProcessEventKind.UNREACHABLE]
        at.answer = of(_PAGE)
        await tap.scrape()
        assert tap.stats.up
    assert [event.kind for event in got.events] == [ProcessEventKind.UNREACHABLE, ProcessEventKind.REACHABLE]


async def test_a_slow_endpoint_ends_by_its_timeout_and_nothing_waits() -> None:
    never = asyncio.Event()

    async def answer(_: web.Request) -> web.StreamResponse:
        await never.wait()
        return web.Response()

    got = Got()
    async with engine(answer) as at, source(at.url, got, timeout_s=0.05) as tap:
        assert tap.stats.failures == {"timeout": 1}
        never.set()


async def test_nobody_listens() -> None:
    got = Got()
    async with source("http://127.0.0.1:1/metrics", got) as tap:
        assert tap.stats.failures == {"unreachable": 1}
        assert tap.reading is None


async def test_an_error_page_with_status_200_is_no_page() -> None:
    got = Got()
    async with engine(of(_PAGE)) as at, source(at.url, got) as tap:
        at.answer = of(b"<html>maintenance</html>")
        await tap.scrape()
        assert tap.reading is None
        await tap.scrape()
    assert [event.kind for event in got.events] == [ProcessEventKind.UNREACHABLE]
    assert len(got.samples) == 1


async def test_a_restarted_engine_is_an_event_and_its_counters_count_from_then() -> None:
    def page(tokens: int) -> bytes:
        return f'# TYPE vllm:generation_tokens_total counter\nvllm:generation_tokens_total{{engine="0"}} {tokens}\n'.encode()

    got = Got()
    async with engine(of(page(500))) as at, source(at.url, got) as tap:
        at.answer = of(page(7))
        await tap.scrape()
        assert tap.tracks.resets == 1
    assert [event.kind for event in got.events] == [ProcessEventKind.RESTARTED]
    assert [value.start_unix_ns - EPOCH for sample in got.samples for value in sample.values] == [0, 1]
    assert [value.value for sample in got.samples for value in sample.values] == [500.0, 7.0]


async def test_another_engine_under_the_same_address_is_reported_again() -> None:
    got = Got()
    async with engine(of(_PAGE)) as at, source(at.url, got) as tap:
        at.answer = of(
            _PAGE.replace(b"# TYPE vllm:kv_cache_usage_perc gauge\n", b"").replace(b"vllm:kv_cache_usage_perc{", b"vllm:gone{")
        )
        await tap.scrape()
        await tap.scrape()
    first, second = got.reports
    assert not first.notes
    assert [(note.state, note.quantity) for note in second.notes] == [(SchemaState.MISSING, "kv_cache_usage_ratio")]


async def test_what_is_not_taken_over_is_dropped_counted_and_reported_later() -> None:
    got = Got(full=True)
    async with engine(of(_PAGE)) as at, source(at.url, got) as tap:
        await tap.scrape()
        dropped = tap.stats.dropped
        got.full = False
        await tap.scrape()
    assert dropped >= 2
    assert (len(got.reports), len(got.samples)) == (1, 1)


def page_with(failures: int, computed: int = 0) -> bytes:
    """Return the recorded page with these counts."""
    page = re.sub(rb"(?m)^(vllm:nixl_num_failed_transfers_total\{[^}]*\}) .*$", rb"\g<1> %d.0" % failures, _PAGE)
    return re.sub(rb"(?m)^(vllm:prompt_tokens_by_source_total\{[^}]*local_compute[^}]*\}) .*$", rb"\g<1> %d.0" % computed, page)


async def test_failures_that_were_counted_between_two_readings_are_a_fact_that_names_nobody() -> None:
    got, pages = Got(), iter([page_with(2, 100), page_with(2, 140), page_with(5, 1164), page_with(5, 1164)])

    async def answer(_: web.Request) -> web.Response:
        return web.Response(body=next(pages))

    async with engine(answer) as at, source(at.url, got) as tap:
        for _ in range(3):
            await tap.scrape()
    (fact,) = got.facts
    assert (fact.source, fact.kind, fact.recogniser, fact.lines) == (Source.METRICS, LogKind.FETCH_FAILED, _COUNTER, 3)
    assert (fact.request_id, dict(fact.numbers)) == (None, {"computed_tokens": 1024.0})
    assert 20 * S <= fact.last_unix_ns - fact.at_unix_ns < 25 * S
    assert fact.at_unix_ns == EPOCH + 20 * S


async def test_a_counted_failure_that_is_not_taken_over_is_reported_later_and_once() -> None:
    got, pages = Got(), iter([page_with(0), page_with(1), page_with(1), page_with(1)])

    async def answer(_: web.Request) -> web.Response:
        return web.Response(body=next(pages))

    async with engine(answer) as at, source(at.url, got) as tap:
        got.full = True
        await tap.scrape()
        got.full = False
        await tap.scrape()
        await tap.scrape()
    assert [(fact.lines, fact.at_unix_ns) for fact in got.facts] == [(1, EPOCH)]


async def test_failures_counted_since_a_restart_are_reported_and_those_before_the_first_reading_are_not() -> None:
    got, pages = Got(), iter([page_with(7), page_with(2)])

    async def answer(_: web.Request) -> web.Response:
        return web.Response(body=next(pages))

    async with engine(answer) as at, source(at.url, got) as tap:
        await tap.scrape()
    assert [fact.lines for fact in got.facts] == [2]


async def test_fifty_sources_leave_nothing_behind() -> None:
    async with engine(of(_PAGE)) as at:
        for _ in range(50):
            made = MetricsSource(MetricsSettings(url=at.url), process(Role.DECODE), Got(), lambda _: None)
            await made.start()
            await made.shutdown(1)
        await asyncio.sleep(0)
        assert not [task for task in asyncio.all_tasks() if "MetricsSource" in repr(task)]


async def test_it_scrapes_on_its_own_until_it_is_stopped() -> None:
    enough = asyncio.Event()

    async def take(record: EngineSample | SchemaReport | LogFact) -> bool:
        got.taken.append(record)
        if len(got.samples) == 3:
            enough.set()
        return True

    got = Got()
    async with engine(of(_PAGE)) as at:
        made = MetricsSource(MetricsSettings(url=at.url, interval_s=0.01), process(Role.DECODE), take, got.events.append)
        await made.start()
        await asyncio.wait_for(enough.wait(), 60)
        await made.shutdown(1)
    assert made.stats.faults == 0
