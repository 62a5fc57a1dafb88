"""Impossible times in the plugin's events: bounded by the arrival and counted.

No record waits for them. The tests also cover what the end of a sidecar reports.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from builders.exchanges import PROCESS
from handrail.plugin import events as words
from handrail.plugin.events import FIELDS
from handrail.records import (
    EngineTimes,
    Exchange,
    Iteration,
    KvFetch,
    KvPublish,
    Observation,
    ProcessEvent,
    ProcessEventKind,
)
from handrail_sidecar.plugin_merge.merge import Merge
from handrail_sidecar.plugin_merge.stamps import AHEAD_NS, BEGINS, OLDEST_NS, REASONS, Stamps
from handrail_sidecar.plugin_merge.steps import MOST_STEPS, MOST_WINDOWS
from handrail_sidecar.sources.datagram import Packet, PluginDatagramEvent
from handrail_sidecar.sources.plugin_socket import PluginSource

S, MS = 10**9, 10**6
UNIX = 1_800_000_000 * S
DAY = 86_400 * S
YEAR_2099 = 4_070_908_800 * S
BEYOND = 2**63 - 1
_DEFAULTS: dict[str, Any] = {"b": False, "i": 0, "s": "r", "m": {}}
R = TypeVar("R")


def event(name: str, at: int, **fields: Any) -> PluginDatagramEvent:
    begins = {BEGINS[name]: at} if name in BEGINS else {}
    given = {field: None if kind.endswith("?") else _DEFAULTS[kind[0]] for field, kind in FIELDS[name].items()}
    assert fields.keys() <= given.keys()
    return PluginDatagramEvent(name, at, {**given, **begins, **fields})


class Host:
    """A sidecar on a host that has been up for ``now``.

    Datagrams arrive as they are made.
    """

    def __init__(self, now: int, exists: bool | None = True) -> None:
        self.now = now
        self.records: list[Observation] = []
        self.stamps = Stamps()
        self.merge = Merge(PROCESS, exists=lambda _: exists, line=lambda *_: None)
        self._numbers = itertools.count(1)

    def judge(self, *events: PluginDatagramEvent, sent: int | None = None, unix: int | None = None, boot: str = "core") -> Packet:
        sent = self.now if sent is None else sent
        packet = Packet(boot, 7, words.CORE, next(self._numbers), sent, UNIX + self.now if unix is None else unix, 0, events)
        return self.stamps.judged(packet, self.now, UNIX + self.now)

    def hear(self, *events: PluginDatagramEvent, sent: int | None = None, unix: int | None = None, boot: str = "core") -> None:
        self.records += self.merge.take(self.judge(*events, sent=sent, unix=unix, boot=boot), 7)

    def wait(self, seconds: float) -> None:
        for _ in range(round(seconds * 2)):
            self.now += S // 2
            self.records += self.merge.tick(self.now)

    def close(self) -> None:
        self.records += self.merge.close(self.now)

    def of(self, kind: type[R]) -> list[R]:
        return [record for record in self.records if isinstance(record, kind)]

    def final(self, kind: type[R]) -> list[R]:
        return [record for record in self.of(kind) if not getattr(record, "provisional", False)]


def displaced(host: Host) -> dict[str, int]:
    return {reason: count for reason, count in host.stamps.displaced.items() if count}


# --- what can be stays -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("behind", [0, 100 * MS, 3600 * S, 23 * 3600 * S])
def test_what_was_kept_while_nobody_listened_stays_as_it_is(behind: int) -> None:
    host = Host(400 * DAY)
    sent = host.now - behind
    unix = UNIX + sent
    packet = Packet("b", 7, words.CORE, 1, sent, unix, 0, (event("queued", sent - 3600 * S, arrival_unix_ns=unix - 3601 * S),))
    assert host.stamps.judged(packet, host.now, UNIX + host.now) is packet
    assert displaced(host) == {}


def test_an_idle_engines_last_step_may_be_a_week_old() -> None:
    host = Host(400 * DAY)
    (plugin_datagram_event,) = host.judge(event("alive", host.now, last_step_ns=host.now - 7 * DAY)).events
    assert plugin_datagram_event.fields["last_step_ns"] == host.now - 7 * DAY
    assert displaced(host) == {}


# --- what cannot be --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sent", [400 * DAY, YEAR_2099, BEYOND], ids=["400 days", "2099", "most"])
def test_a_step_from_the_future_is_rolled_up_within_seconds(sent: int) -> None:
    host = Host(10 * S)
    host.hear(event("step", sent, begin_ns=sent - 20 * MS, decode_tokens=3), sent=sent)
    host.wait(1.5)
    (made,) = host.of(Iteration)
    assert (made.duration_ns, made.busy_ns, made.decode_tokens, made.started_unix_ns) == (
        20 * MS,
        20 * MS,
        3,
        UNIX + 10 * S - 20 * MS,
    )
    assert displaced(host) == {"future": 1}


def test_a_single_event_from_the_future_counts_as_of_its_datagram() -> None:
    host = Host(100 * S)
    host.hear(event("step", BEYOND, begin_ns=BEYOND), event("step", host.now, begin_ns=host.now - MS))
    host.wait(1.5)
    (made,) = host.of(Iteration)
    assert (made.steps, made.started_unix_ns) == (2, UNIX + 100 * S)
    assert displaced(host) == {"future": 2}, "its begin lies ahead as well"


def test_what_lies_between_the_times_of_another_machines_clock_stays() -> None:
    """The engine runs in a virtual machine that booted long before or after this host."""
    for ahead in (DAY, -2 * DAY):
        host = Host(30 * DAY)
        for after in range(4):
            at = host.now + ahead
            host.hear(event(("queued", "scheduled", "first_token", "finished")[after], at), sent=at)
            host.now += 250 * MS
        (made,) = host.of(EngineTimes)
        assert (made.scheduled_ns, made.first_token_ns, made.finished_ns) == (250 * MS, 500 * MS, 750 * MS)
        assert made.queued_unix_ns == UNIX + 30 * DAY
        assert displaced(host) == {"future" if ahead > 0 else "old": 4}


def test_a_clock_that_is_right_again_is_believed_again() -> None:
    host = Host(10 * S)
    assert host.judge(sent=DAY).monotonic_ns == 10 * S
    host.now += S
    assert host.judge(sent=host.now).monotonic_ns == host.now
    host.now += S
    assert host.judge(sent=host.now).monotonic_ns == host.now
    assert displaced(host) == {"future": 1}


def test_a_begin_a_year_ago_is_a_day_old() -> None:
    host = Host(400 * DAY)
    (plugin_datagram_event,) = host.judge(event("paused", host.now, begin_ns=0, reason="stopped")).events
    assert plugin_datagram_event.fields["begin_ns"] == host.now - OLDEST_NS
    assert displaced(host) == {"old": 1}


@pytest.mark.parametrize("unix", [0, YEAR_2099, BEYOND], ids=["1970", "2099", "most"])
def test_a_wall_clock_that_is_not_this_hosts_gives_way_to_it(unix: int) -> None:
    host = Host(100 * S)
    host.hear(event("queued", host.now, arrival_unix_ns=unix), unix=unix)
    host.now += S
    host.hear(event("finished", host.now), unix=min(BEYOND, unix + S))
    (made,) = host.of(EngineTimes)
    assert (made.queued_unix_ns, made.arrival_unix_ns, made.finished_ns) == (UNIX + 100 * S, UNIX + 100 * S, S)
    assert displaced(host) == {"wall": 2}


def test_an_impossible_arrival_is_not_reported() -> None:
    host = Host(100 * S)
    (plugin_datagram_event,) = host.judge(event("queued", host.now, arrival_unix_ns=0)).events
    assert plugin_datagram_event.fields["arrival_unix_ns"] is None
    assert displaced(host) == {"wall": 1}


_times = st.one_of(st.integers(0, BEYOND), st.integers(0, 20 * S), st.sampled_from([0, BEYOND]))


@st.composite
def _events(draw: st.DrawFn) -> PluginDatagramEvent:
    name = draw(st.sampled_from(sorted(FIELDS)))
    fields = {BEGINS[name]: draw(_times)} if name in BEGINS else {}
    return event(name, draw(_times), **fields)


@given(
    st.lists(st.tuples(_times, _times, st.lists(_events(), max_size=4)), max_size=8),
    st.sampled_from([10 * S, 3600 * S, 400 * DAY]),
)
def test_whatever_the_times_nothing_lies_ahead_and_nothing_is_held(
    given_: list[tuple[int, int, list[PluginDatagramEvent]]], uptime: int
) -> None:
    host = Host(uptime)
    for sent, unix, events in given_:
        packet = host.judge(*events, sent=sent, unix=unix)
        assert packet.monotonic_ns <= host.now + AHEAD_NS
        for plugin_datagram_event in packet.events:
            begin = (
                plugin_datagram_event.fields[BEGINS[plugin_datagram_event.name]] if plugin_datagram_event.name in BEGINS else None
            )
            assert host.now - 2 * OLDEST_NS <= plugin_datagram_event.at_ns <= packet.monotonic_ns
            assert begin is None or begin <= plugin_datagram_event.at_ns
        host.records += host.merge.take(packet, 7)
    host.wait(3)
    assert not any(window.steps for window in host.merge.steps._windows.values())
    assert not [fetch for fetch in host.merge.fetches.open.values() if fetch.known_ns and fetch.ended_ns]
    assert not [publish for publish in host.merge.publishes.open.values() if publish.published_ns and publish.freed_ns]
    host.wait(62)
    assert not [fetch for fetch in host.merge.fetches.open.values() if fetch.known_ns is None]
    assert set(host.stamps.displaced) == set(REASONS)


def test_steps_of_one_time_and_of_many_boots_are_bounded() -> None:
    host = Host(100 * S)
    for _ in range(MOST_STEPS + 1):
        host.hear(event("step", host.now, decode_tokens=1))
    assert [made.steps for made in host.of(Iteration)] == [MOST_STEPS]
    for number in range(MOST_WINDOWS + 8):
        host.hear(event("step", host.now, decode_tokens=1), boot=f"boot-{number}")
    assert len(host.merge.steps._windows) == MOST_WINDOWS
    host.close()
    assert sum(made.decode_tokens for made in host.of(Iteration)) == MOST_STEPS + 1 + MOST_WINDOWS + 8


# --- ends ------------------------------------------------------------------------------------------------------------------


def everything_waiting(host: Host, at: int) -> None:
    """Send a step, a load that one rank still misses, and kept KV that nobody read.

    There is one ended and one open request of each.
    """
    host.hear(event("facts", at, facts={"tp_size": 2}), sent=at)
    host.hear(event("step", at, begin_ns=at - 20 * MS), sent=at)
    for request in ("ended", "open"):
        host.hear(event("queued", at, request=request), sent=at)
        host.hear(event("kv_known", at, request=request), sent=at)
        host.hear(event("kv_wanted", at, request=request, tokens_wanted=9, asynchronous=True), sent=at)
        host.hear(event("kv_load", at, request=request), sent=at)
        host.hear(event("kv_published", at, request=f"{request}-kept"), sent=at)
    host.hear(event("kv_noticed", at, request="ended"), sent=at)
    host.hear(event("kv_freed", at, request="ended-kept"), sent=at)


@pytest.mark.parametrize("ahead", [0, 400 * DAY, -3 * DAY], ids=["now", "future", "long ago"])
def test_all_that_waits_is_emitted_when_the_sidecar_ends(ahead: int) -> None:
    host = Host(500 * DAY)
    everything_waiting(host, host.now + ahead)
    assert (host.of(Iteration), host.of(KvFetch), host.of(KvPublish)) == ([], [], [])
    host.close()
    assert [made.steps for made in host.of(Iteration)] == [1]
    for report in (host.of(KvFetch), host.of(KvPublish)):
        how = {record.request_id.partition("-")[0]: record.provisional for record in report}
        assert how == {"ended": False, "open": True}
    assert [record.provisional for record in host.of(EngineTimes)] == [True, True]


@pytest.mark.parametrize("ahead", [0, 400 * DAY, -3 * DAY], ids=["now", "future", "long ago"])
def test_all_that_waits_is_emitted_when_the_engine_is_gone(ahead: int) -> None:
    host = Host(500 * DAY, exists=False)
    everything_waiting(host, host.now + ahead)
    host.wait(2)
    assert [record.kind for record in host.of(ProcessEvent)] == [ProcessEventKind.STARTED, ProcessEventKind.DEAD]
    assert [made.steps for made in host.of(Iteration)] == [1]
    assert {len(host.final(kind)) for kind in (KvFetch, KvPublish, EngineTimes)} == {2}
    assert not host.merge.fetches.open
    assert not host.merge.publishes.open
    assert not host.merge.requests.open


@pytest.mark.parametrize("ahead", [0, 400 * DAY], ids=["now", "future"])
def test_all_that_waits_is_emitted_when_another_boot_takes_its_place(ahead: int) -> None:
    host = Host(500 * DAY, exists=None)
    everything_waiting(host, host.now + ahead)
    host.wait(6)
    host.hear(sent=host.now + ahead, boot="next")
    assert [record.kind for record in host.of(ProcessEvent)][-1] is ProcessEventKind.RESTARTED
    assert {len(host.final(kind)) for kind in (KvFetch, KvPublish, EngineTimes)} == {2}


def test_a_process_that_is_forgotten_for_others_is_closed() -> None:
    host = Host(100 * S)
    host.hear(event("queued", host.now, request="r"))
    for number in range(1024):
        host.hear(boot=f"boot-{number}")
    assert [record.status for record in host.final(EngineTimes)] == ["engine_lost"]


def test_losses_are_reported_at_the_end() -> None:
    host = Host(5 * S)
    for lost in (0, 3):
        host.records += host.merge.take(Packet("b", 7, words.CORE, lost + 1, host.now, UNIX + host.now, lost, ()), 7)
    host.close()
    assert [(r.kind, r.count) for r in host.of(ProcessEvent)][1:] == [(ProcessEventKind.PLUGIN_LOST, 3)]


async def test_a_source_judges_what_it_reads_and_tells_all_at_its_shutdown(tmp_path: Path) -> None:
    records: list[Observation] = []
    source = PluginSource(tmp_path / "s", PROCESS, records.append, clock=lambda: 10 * S, wall=lambda: UNIX)
    await source.start()
    source._take(b'[1,"b",7,"core",1,%d,%d,0,[["step",%d,%d,1,0,0,1,0,1,0,false,0]]]' % (DAY, UNIX, DAY, DAY - MS), 7)
    assert not [record for record in records if isinstance(record, Iteration | Exchange)]
    await source.shutdown(0.0)
    assert [record.started_unix_ns for record in records if isinstance(record, Iteration)] == [UNIX - MS]
    assert source.stamps.displaced["future"] == 1
