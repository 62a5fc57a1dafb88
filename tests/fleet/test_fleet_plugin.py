"""What an emulated engine sends on the plugin's socket.

The events have the plugin's form and agree with the referee's truth.
"""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from builders.exchanges import PROCESS
from fleet.running import MODEL, SMALL, engine, routed, until
from handrail.plugin import events as words
from handrail.plugin import pauses as guest_pauses
from handrail.records import (
    EngineFacts,
    EngineTimes,
    FetchEffect,
    Iteration,
    KvFetch,
    KvPublish,
    Observation,
    ProcessEvent,
    ProcessEventKind,
)
from handrail_sidecar.sources.datagram import read_packet
from handrail_sidecar.sources.plugin_socket import PluginSource
from handrail_sim.emulator import load
from handrail_sim.emulator.core import Ended, EngineCore, EngineJob, FinishReason, JobTimes, LoadStarts, StepEnded
from handrail_sim.emulator.costs import ForwardPass
from handrail_sim.emulator.faults import parse
from handrail_sim.emulator.host import LATE_NS, WATCH_NS, Hindrance
from handrail_sim.emulator.kv import Publication
from handrail_sim.emulator.plugin_events import EventSender, LogLines, PluginEvents

LOAD = load.LoadSettings(url="", requests=4, concurrency=2, model=MODEL, streaming_share=1.0, answer_tokens=(6, 12))


@dataclass
class ReceivedEvent:
    """A P and a D with a sidecar's socket beside each."""

    url: str
    p: list[Observation]
    d: list[Observation]
    sources: tuple[PluginSource, PluginSource]
    lines: list[str]

    def of(self, side: list[Observation], kind: type[Any]) -> list[Any]:
        return [each for each in side if isinstance(each, kind) and not getattr(each, "provisional", False)]


@asynccontextmanager
async def received_events(folder: Path, *faults: str, **changes: Any) -> AsyncIterator[ReceivedEvent]:
    p: list[Observation] = []
    d: list[Observation] = []
    lines: list[str] = []
    sources = (
        PluginSource(folder / "p.sock", PROCESS, p.append),
        PluginSource(folder / "d.sock", PROCESS, d.append, line=lambda at, level, text: lines.append(text)),
    )
    for source in sources:
        await source.start()
    shared = {"faults": tuple(parse(each, SMALL.hosts()) for each in faults), "profile": None, **changes}
    async with (
        engine("prefill", plugin_socket=folder / "p.sock", **shared) as (_, prefill),
        engine("decode", plugin_socket=folder / "d.sock", **shared) as (_, decode),
        routed(prefill, decode) as url,
    ):
        yield ReceivedEvent(url, p, d, sources, lines)
    for source in sources:
        await source.shutdown(1.0)
        assert source.merge.stats.unread_events == 0
        assert source.stats.bad_datagrams == 0


async def test_requests_fetches_and_kept_blocks_of_a_healthy_pair(tmp_path: Path) -> None:
    async with received_events(tmp_path) as pair:
        await load.run(replace(LOAD, url=pair.url), lambda _: None)
        await until(lambda: len(pair.of(pair.d, KvFetch)) == len(pair.of(pair.p, KvPublish)) == 4)
        fetches, kept = pair.of(pair.d, KvFetch), pair.of(pair.p, KvPublish)
        for fetch in fetches:
            assert (fetch.failure, fetch.effect, fetch.bytes_moved) == (None, None, fetch.bytes_expected)
            assert 0 <= fetch.load_started_ns <= fetch.posted_ns <= fetch.done_ns <= fetch.noticed_ns
        assert {fetch.peer_request_id for fetch in fetches} == {each.request_id for each in kept}
        assert all(each.read_ns is not None and each.expired_ns is None for each in kept)
        await until(lambda: len(pair.of(pair.d, EngineTimes)) == len(pair.of(pair.p, EngineTimes)) == 4)
        for times in (*pair.of(pair.d, EngineTimes), *pair.of(pair.p, EngineTimes)):
            assert 0 <= times.scheduled_ns <= times.first_token_ns <= times.finished_ns
            assert times.status in ("length_capped", "stopped")
        await until(lambda: bool(pair.of(pair.d, Iteration) and pair.of(pair.d, EngineFacts)))
        facts = pair.of(pair.d, EngineFacts)[0]
        assert (facts.model, facts.block_size, facts.kv_blocks) == (MODEL, 16, SMALL.kv_blocks)


@pytest.mark.parametrize(
    ("fault", "effect"),
    [("fetch_failed:p0>d0:1", FetchEffect.FAILED), ("fetch_recomputed:p0>d0:1", FetchEffect.RECOMPUTED)],
)
async def test_a_failed_fetch_is_reported_with_the_engines_word_and_its_line(
    tmp_path: Path, fault: str, effect: FetchEffect
) -> None:
    async with received_events(tmp_path, fault, recompute=effect is FetchEffect.RECOMPUTED) as pair:
        await load.run(replace(LOAD, url=pair.url), lambda _: None)
        await until(lambda: len(pair.of(pair.d, KvFetch)) == 4)
        assert {(each.failure, each.effect) for each in pair.of(pair.d, KvFetch)} == {("transfer_failed", effect)}
        await until(lambda: any("NIXL transfer failure" in line for line in pair.lines))


async def test_a_lease_that_ends_and_a_read_that_comes_after_it(tmp_path: Path) -> None:
    async with received_events(tmp_path, "stale_read:p0:0.001", "handshake_cold:p0>d0:0.3") as pair:
        await load.run(replace(LOAD, url=pair.url, requests=1), lambda _: None)
        await until(lambda: any(each.late_read_ns is not None for each in pair.of(pair.p, KvPublish)))
        assert pair.of(pair.p, KvPublish)[0].expired_ns is not None


async def test_a_paused_process_is_reported_as_the_plugin_reports_it(tmp_path: Path) -> None:
    def paused(of: list[Observation]) -> list[ProcessEvent]:
        return [each for each in of if isinstance(each, ProcessEvent) and each.kind is ProcessEventKind.PAUSED]

    async with received_events(tmp_path, "host_pause:d0:0.5") as pair:
        await until(lambda: bool(paused(pair.d)))
        process_event = paused(pair.d)[0]
        assert 500_000_000 - WATCH_NS <= process_event.duration_ns <= 500_000_000
        assert (process_event.detail, process_event.at_bound_ns, process_event.process_kind) == (
            guest_pauses.HELD,
            WATCH_NS,
            "core",
        )
        assert not paused(pair.p)


def test_the_emulated_watch_is_that_of_the_plugin() -> None:
    assert (round(guest_pauses.SLEEP_S * 1e9), guest_pauses.LATE_NS) == (WATCH_NS, LATE_NS)


@given(st.lists(st.integers(1, 3_000_000_000), min_size=1, max_size=40))
def test_every_pause_is_reported_once_however_often_it_is_polled(passed: list[int]) -> None:
    by = Hindrance(7, 0.0, 4_000_000_000, 300_000_000, 0, None)
    plugin, statements = _recorded(by)
    began = now = plugin._watched_ns
    for each in passed:
        now += each
        plugin.paused(now)
    long_enough = [last for first, last in by.times(began, now) if last - -(-first // WATCH_NS) * WATCH_NS >= LATE_NS]
    assert [at_ns for name, _, at_ns in statements if name == "paused"] == [last for last in long_enough if began < last <= now]


async def test_an_engine_without_the_variable_says_nothing(tmp_path: Path) -> None:
    async with engine("both") as (running, _):
        assert running._plugin._sender is None


@given(st.lists(st.text(max_size=3000), max_size=40))
def test_all_events_become_datagrams_that_the_sidecar_reads(lines: list[str]) -> None:
    with TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as bound:
        bound.bind(f"{folder}/s")
        bound.setblocking(False)
        sender = EventSender(Path(folder, "s"), {"model": "m"}, lambda: 0)
        for line in lines:
            sender.add("log", "WARNING", line)
        sender.end()
        packets = list(map(read_packet, _received(bound)))
    events = [event.fields["line"] for packet in packets for event in packet.events]
    assert not any(packet.unread for packet in packets)
    assert len(events) + sender.lost == len(lines)
    assert sender.lost or events == lines


def _received(bound: socket.socket) -> Iterator[bytes]:
    with contextlib.suppress(BlockingIOError):
        while True:
            yield bound.recv(1 << 20)


def test_a_sidecar_that_is_not_there_costs_events_and_they_are_counted(tmp_path: Path) -> None:
    sender = EventSender(tmp_path / "nobody.sock", {}, lambda: 0)
    sender.add("first_token", "r")
    sender.end()
    assert sender.lost == 1


def test_its_words_are_the_plugins() -> None:
    """The emulator sends every kind of event with as many fields as the plugin."""
    plugin, reports = _recorded(Hindrance(7, 0.0, 4_000_000_000, 300_000_000, 0, None))
    sender = plugin._sender
    assert sender is not None
    job = EngineJob("r", 10, 1, FinishReason.STOP, load=True)
    plugin._core.submit(job, 0)
    plugin.paused(plugin._watched_ns + 8_000_000_000)
    plugin.queued(job, 0, 0, {}, None)
    plugin.load(LoadStarts("r", 10, 1), 5, 10)
    with plugin.contact("peer"):
        plugin._add("kv_handshake", "peer", 0, 0, None)
    plugin.posted("r", 0)
    plugin.done("r", 1, 1)
    plugin.failed("r", "transfer_failed", "peer")
    plugin.loaded("r", ok=True, noticed_ns=1)
    plugin.preempted("r")
    plugin.resumed("r")
    plugin.first_token("r", 1)
    plugin.ended(Ended("r", FinishReason.STOP, 1, JobTimes(0, 1, 2, 3), Publication("r", (1,), 10)))
    plugin.step(StepEnded(1, 0, 1, 0, 0, 0, 0, False, ForwardPass(decoding=1, prefill_tokens=0, running=1)))
    plugin.renewed("r")
    plugin.read("r", late=False)
    plugin.expired("r")
    LogLines(sender).emit(logging.makeLogRecord({"msg": "line", "levelname": "WARNING"}))
    statement = {name: fields for name, fields, _ in reports}
    assert statement == {name: len(words.FIELDS[name]) for name in statement}
    assert len(statement) >= 19


def _recorded(*pauses: Hindrance) -> tuple[PluginEvents, list[tuple[str, int, int | None]]]:
    """Run an emulated engine without a socket.

    Returns it and its events: name, number of fields, time.
    """
    statements: list[tuple[str, int, int | None]] = []

    class Kept(EventSender):
        def add(self, name: str, *fields: Any, at_ns: int | None = None) -> None:
            statements.append((name, len(fields), at_ns))

    core = EngineCore(_Steps(), max_running=1, blocks=100, lease_ns=1)
    plugin = PluginEvents(None, engine_id="e", model="m", scenario=SMALL, lease_ns=1, policy="fail", core=core, pauses=pauses)
    plugin._sender = Kept(Path("unused"), {}, lambda: 0)
    return plugin, statements


class _Steps:
    def step_ns(self, batch: ForwardPass) -> int:
        return 1
