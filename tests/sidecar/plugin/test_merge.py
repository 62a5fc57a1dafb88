"""Merge the events of an engine's processes into records.

The tests cover ends that come in pieces, reads that come late, and processes that exit.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from builders.exchanges import PROCESS
from handrail.plugin import events as words
from handrail.plugin.events import FIELDS
from handrail.records import (
    Direction,
    EngineFacts,
    EngineTimes,
    Exchange,
    FetchEffect,
    Iteration,
    KvFetch,
    KvPublish,
    Observation,
    ProcessEvent,
    ProcessEventKind,
)
from handrail.wire.exchange import resource_of
from handrail.wire.plugin import plugin_log, plugin_spans, read_plugin_log
from handrail_sidecar.export.exporter import ExportDropReason, Exporter, ExportSettings
from handrail_sidecar.plugin_merge.bounds import MergeLimits
from handrail_sidecar.plugin_merge.merge import Merge
from handrail_sidecar.sources.datagram import Packet, PluginDatagramEvent

S = 10**9
MS = 10**6
UNIX = 1_800_000_000 * S
R = TypeVar("R")
_DEFAULTS = {"b": False, "i": 0}


class Engine:
    """An engine that sends a test's events, and all records made of them."""

    def __init__(self, *, exists: Callable[[int], bool | None] = lambda _: True, limits: MergeLimits | None = None) -> None:
        self.lines: list[tuple[int, str, str]] = []
        self.merge = Merge(PROCESS, exists=exists, line=lambda *line: self.lines.append(line), limits=limits)
        self.records: list[Observation] = []
        self._sequence: dict[str, itertools.count[int]] = {}

    def say(
        self, at: int, name: str, boot: str = "core", lost: int = 0, pid: int | None = None, **fields: Any
    ) -> list[Observation]:
        """Send one event in a datagram of its own, at the time when it happened."""
        wanted: Mapping[str, Any] = {field: fields.pop(field, _DEFAULTS.get(kind)) for field, kind in FIELDS[name].items()}
        assert not fields
        return self.send(boot, at, (PluginDatagramEvent(name, at, wanted),), lost, pid)

    def send(
        self, boot: str, at: int, events: tuple[PluginDatagramEvent, ...] = (), lost: int = 0, pid: int | None = None
    ) -> list[Observation]:
        sequence = next(self._sequence.setdefault(boot, itertools.count(1)))
        kind = words.WORKER if boot.startswith("worker") else words.API if boot.startswith("api") else words.CORE
        made = self.merge.take(Packet(boot, pid or 7, kind, sequence, at, UNIX + at, lost, events), pid)
        self.records += made
        return made

    def tick(self, at: int) -> list[Observation]:
        made = self.merge.tick(at)
        self.records += made
        return made

    def of(self, kind: type[R]) -> list[R]:
        return [record for record in self.records if isinstance(record, kind)]

    def only(self, kind: type[R]) -> R:
        """Return the one final record of ``kind``."""
        (found,) = [record for record in self.of(kind) if not getattr(record, "provisional", False)]
        return found


def known(engine: Engine, at: int, request: str = "r", **fields: Any) -> None:
    engine.say(at, "queued", request=request, prompt_tokens=96)
    given = {
        "connector": "Pull",
        "engine_id": "D",
        "peer_engine_id": "P",
        "peer_request_id": "p-1",
        "direction": "p_to_d",
        **fields,
    }
    engine.say(at, "kv_known", request=request, **given)
    engine.say(
        at + MS, "kv_wanted", request=request, tokens_wanted=96, tokens_local=0, blocks=3, bytes_expected=6000, asynchronous=True
    )


def published(engine: Engine, at: int, request: str = "r") -> None:
    engine.say(
        at, "kv_published", request=request, connector="Pull", engine_id="P", tokens=96, blocks=3, kv_bytes=6000, lease_ns=30 * S
    )


_words = st.sampled_from(["r1", "r2", "E1", "E2", "x"])
_of_type = {
    "i": st.integers(0, 10**11),
    "s": _words,
    "b": st.booleans(),
    "m": st.dictionaries(st.sampled_from(["engine_id", "tp_size", "failure_policy", "agents"]), _words | st.integers(0, 3)),
}


@st.composite
def _any_event(draw: st.DrawFn) -> tuple[str, int, str, dict[str, Any]]:
    name = draw(st.sampled_from(sorted(FIELDS)))
    fields = {
        field: draw(_of_type[kind[0]] | st.none()) if kind.endswith("?") else draw(_of_type[kind[0]])
        for field, kind in FIELDS[name].items()
    }
    return name, draw(st.integers(0, 10**11)), draw(st.sampled_from(["core", "core-2", "worker"])), fields


@settings(max_examples=300, deadline=None)
@given(st.lists(_any_event(), max_size=25), st.integers(0, 2 * 10**11))
def test_every_record_of_any_events_in_any_order_can_be_sent(
    statements: list[tuple[str, int, str, dict[str, Any]]], end: int
) -> None:
    alive = {7: True}
    engine = Engine(exists=alive.get)
    for number, (name, at, boot, fields) in enumerate(statements):
        engine.say(at, name, boot, pid=7, **fields)
        if number % 5 == 4:
            engine.tick(at)
    engine.tick(end)
    alive[7] = False
    engine.tick(end + 200 * S)
    for record in engine.records:
        if isinstance(record, (EngineTimes, KvFetch, KvPublish)):
            values = [getattr(record, name) for name in type(record).__slots__ if name.endswith("_ns")]
            assert all(value is None or value >= 0 for value in values)
            plugin_spans(record)
        if not isinstance(record, Exchange):
            assert read_plugin_log(plugin_log(record), PROCESS) is not None  # type: ignore[arg-type]


_edges = st.sampled_from([0, 1, 2**53 - 1, 2**53, 2**62, 2**63 - 1])
_extreme_events = st.tuples(
    st.sampled_from(sorted(FIELDS)), _edges | st.integers(0, 10**11), st.sampled_from(["core", "worker"]), st.randoms()
)


@settings(max_examples=300, deadline=None)
@given(st.lists(_extreme_events, max_size=25), _edges)
def test_numbers_at_the_edges_of_64_bit_cost_no_other_record(statements: list[tuple[str, int, str, Any]], end: int) -> None:
    engine = Engine()
    exporter = Exporter(ExportSettings(), resource_of(PROCESS), lambda: pytest.fail("nothing is sent"))
    for name, at, boot, chance in statements:
        numbers = {field: chance.choice([0, 2**53, 2**62, 2**63 - 1]) for field, kind in FIELDS[name].items() if kind[0] == "i"}
        texts = {field: chance.choice(["r1", "x"]) for field, kind in FIELDS[name].items() if kind[0] == "s"}
        mappings: dict[str, Any] = {field: {} for field, kind in FIELDS[name].items() if kind[0] == "m"}
        engine.say(at, name, boot, **{**numbers, **texts, **mappings})
        engine.tick(at)
    engine.tick(end)
    for record in engine.records:
        exporter.sink(record)
    whole = Engine()
    whole.say(10 * MS, "queued", request="r")
    whole.say(20 * MS, "scheduled", request="r", cached_tokens=2**63 - 1, external_tokens=2**63 - 1)
    whole.say(30 * MS, "first_token", request="r")
    whole.say(2**63 - 1, "finished", request="r", output_tokens=2**63 - 1)
    whole.tick(2**63 - 1)
    times = [record for record in whole.records if isinstance(record, EngineTimes)]
    assert times
    before = exporter.stats.dropped[ExportDropReason.UNENCODABLE]
    for one in times:
        exporter.sink(one)
    assert exporter.stats.dropped[ExportDropReason.UNENCODABLE] == before


# --- requests -----------------------------------------------------------------------------------------------------------------
def test_preempted_time_is_apart_before_and_after_the_first_token() -> None:
    engine = Engine()
    engine.say(10 * MS, "queued", request="r")
    engine.say(20 * MS, "scheduled", request="r", cached_tokens=32, external_tokens=0)
    engine.say(30 * MS, "preempted", request="r")
    engine.say(45 * MS, "scheduled", request="r")
    engine.say(60 * MS, "first_token", request="r")
    engine.say(70 * MS, "preempted", request="r")
    engine.say(90 * MS, "scheduled", request="r")
    engine.say(100 * MS, "finished", request="r", status="FINISHED_STOPPED", output_tokens=9)
    times = engine.only(EngineTimes)
    assert (times.scheduled_ns, times.first_token_ns, times.finished_ns) == (10 * MS, 50 * MS, 90 * MS)
    assert (times.preemptions, times.preempted_ns, times.preempted_before_first_ns) == (2, 35 * MS, 15 * MS)
    assert times.preempted == (20 * MS, 35 * MS, 60 * MS, 80 * MS)
    assert (times.cached_tokens, times.status, times.queued_unix_ns) == (32, "stopped", UNIX + 10 * MS)


def test_of_many_preemptions_the_longest_are_listed_one_by_one() -> None:
    engine = Engine()
    engine.say(0, "queued", request="r")
    engine.say(0, "scheduled", request="r", cached_tokens=0, external_tokens=0)
    for n in range(1, 41):
        engine.say(n * 100 * MS, "preempted", request="r")
        engine.say(n * 101 * MS, "scheduled", request="r")
    engine.say(5 * S, "finished", request="r", status="FINISHED_STOPPED", output_tokens=9)
    times = engine.only(EngineTimes)
    assert times.preemptions == 40
    assert times.preempted_ns == sum(n * MS for n in range(1, 41))
    assert times.preempted == tuple(at for n in range(25, 41) for at in (n * 100 * MS, n * 101 * MS))


def test_a_request_that_is_never_scheduled_still_ends() -> None:
    engine = Engine()
    engine.say(0, "queued", request="r")
    engine.say(5 * MS, "finished", request="r", status="FINISHED_ABORTED", output_tokens=0)
    times = engine.only(EngineTimes)
    assert (times.scheduled_ns, times.first_token_ns, times.status) == (None, None, "aborted")


def test_an_open_request_is_reported_once_it_is_old_and_again_at_intervals() -> None:
    engine = Engine()
    engine.say(0, "queued", request="r")
    ages = [t.seen_ns for at in range(0, 12 * S, S // 2) for t in engine.tick(at) if isinstance(t, EngineTimes)]
    assert ages == [S, 6 * S, 11 * S]


def test_the_inbound_trace_is_kept() -> None:
    engine = Engine()
    engine.say(0, "queued", request="r", traceparent=f"00-{'a' * 32}-{'b' * 16}-01")
    engine.say(5, "finished", request="r")
    ids = engine.only(EngineTimes).ids
    assert (ids.trace_id, ids.parent_span_id, ids.flags) == ("a" * 32, "b" * 16, 1)


def test_what_an_idle_scheduler_forgot_has_ended_unheard() -> None:
    engine = Engine()
    known(engine, 0, "lost")
    known(engine, 9 * S, "running")
    engine.say(10 * S, "alive", last_step_ns=10 * S, unfinished=1)
    assert [t for t in engine.of(EngineTimes) if not t.provisional] == []
    engine.say(10 * S, "alive", last_step_ns=10 * S, unfinished=0)
    assert (engine.only(EngineTimes).request_id, engine.only(EngineTimes).status) == ("lost", "lost")
    assert (engine.only(KvFetch).request_id, engine.only(KvFetch).request_status) == ("lost", "lost")


def test_the_end_of_something_unknown_is_counted() -> None:
    engine = Engine()
    assert [r for r in engine.say(5, "finished", request="r") if isinstance(r, EngineTimes)] == []
    assert engine.merge.requests.unmatched == 1


# --- fetches ------------------------------------------------------------------------------------------------------------------
def test_ranks_become_one_fetch_from_the_first_start_to_the_last_end() -> None:
    engine = Engine()
    engine.say(0, "facts", facts={"tp_size": 2, "failure_policy": "fail"})
    known(engine, 0)
    for rank, late in ((0, 0), (1, 7 * MS)):
        boot = f"worker{rank}"
        engine.say(2 * MS + late, "kv_load", boot, request="r", rank=rank)
        engine.say(3 * MS + late, "kv_posted", boot, request="r", rank=rank)
        engine.say(9 * MS + late, "kv_done", boot, request="r", rank=rank, bytes=3000, descriptors=2, bound_ns=4 * MS)
        engine.say(10 * MS + late, "kv_loaded", boot, request="r", rank=rank, bound_ns=4 * MS)
    engine.say(18 * MS, "kv_noticed", request="r")
    engine.tick(19 * MS)
    f = engine.only(KvFetch)
    assert (f.load_started_ns, f.posted_ns, f.done_ns, f.noticed_ns) == (2 * MS, 3 * MS, 16 * MS, 18 * MS)
    assert (f.done_bound_ns, f.bytes_moved, f.descriptors, f.ranks, f.ranks_done) == (4 * MS, 6000, 4, 2, 2)


def test_a_fetch_waits_for_a_worker_that_sends_late_but_not_for_ever() -> None:
    engine = Engine()
    known(engine, 0)
    engine.say(9 * MS, "kv_noticed", request="r")
    engine.tick(500 * MS)
    assert engine.of(KvFetch) == []
    engine.say(3 * MS, "kv_posted", "worker", request="r", rank=0)
    engine.tick(1100 * MS)
    assert engine.only(KvFetch).posted_ns == 3 * MS


def test_a_failed_load_under_policy_recompute() -> None:
    engine = Engine()
    engine.say(0, "facts", facts={"failure_policy": "recompute"})
    known(engine, 0)
    engine.say(2 * MS, "kv_load", "worker", request="r", rank=0)
    engine.say(3 * MS, "kv_failure", "worker", request="r", rank=0, type="transfer_setup_failed", error="NIXL_ERR_INVALID_PARAM")
    engine.say(3 * MS, "kv_failure", "worker", request="r", rank=0, type="transfer_release_failed")
    engine.say(4 * MS, "kv_loaded", "worker", request="r", rank=0, failed=True, bound_ns=MS)
    engine.say(5 * MS, "kv_noticed", request="r", failed=True)
    engine.tick(2 * S)
    f = engine.only(KvFetch)
    assert (f.failure, f.failure_error, f.effect) == ("transfer_setup_failed", "NIXL_ERR_INVALID_PARAM", FetchEffect.RECOMPUTED)
    assert (f.bytes_moved, f.ranks_done, f.request_status) == (None, 0, None)


def test_a_failed_load_under_policy_fail_ends_with_its_request() -> None:
    engine = Engine()
    engine.say(0, "facts", facts={"failure_policy": "fail"})
    known(engine, 0)
    engine.say(4 * MS, "kv_loaded", "worker", request="r", rank=0, failed=True, bound_ns=MS)
    engine.say(5 * MS, "finished", request="r", status="FINISHED_ERROR", output_tokens=0)
    engine.say(6 * MS, "kv_noticed", request="r", failed=True)
    engine.tick(2 * S)
    f = engine.only(KvFetch)
    assert (f.failure, f.effect, f.request_status) == ("load_failed", FetchEffect.FAILED, "error")


def test_a_client_that_goes_while_kv_is_on_its_way() -> None:
    engine = Engine()
    known(engine, 0)
    engine.say(2 * MS, "kv_load", "worker", request="r", rank=0)
    engine.say(5 * MS, "finished", request="r", status="FINISHED_ABORTED", output_tokens=0)
    engine.tick(2 * S)
    f = engine.only(KvFetch)
    assert (f.request_status, f.ended_ns, f.noticed_ns, f.failure, f.effect) == ("aborted", 5 * MS, None, None, None)


def test_an_open_fetch_has_an_age_and_ends_once() -> None:
    engine = Engine()
    known(engine, 0)
    engine.say(2 * MS, "kv_load", "worker", request="r", rank=0)
    for at in range(0, 8 * S, S // 2):
        engine.tick(at)
    report = [f.seen_ns for f in engine.of(KvFetch) if f.provisional]
    assert report == [S, 6 * S]
    assert engine.merge.fetches.ages_ns(8 * S) == [8 * S]
    engine.say(9 * S, "kv_loaded", "worker", request="r", rank=0)
    engine.say(9 * S, "kv_noticed", request="r")
    engine.tick(9 * S)
    assert {f.ids.span_id for f in engine.of(KvFetch)} == {engine.only(KvFetch).ids.span_id}
    assert engine.merge.fetches.ages_ns(9 * S) == []


def test_all_of_it_was_here() -> None:
    engine = Engine()
    engine.say(0, "queued", request="r")
    engine.say(0, "kv_known", request="r", connector="Pull", direction="p_to_d")
    engine.say(MS, "kv_wanted", request="r", connector="Pull", tokens_wanted=0, blocks=0, bytes_expected=0, asynchronous=True)
    engine.tick(2 * S)
    f = engine.only(KvFetch)
    assert (f.tokens_wanted, f.bytes_expected, f.bytes_moved, f.ended_ns, f.failure) == (0, 0, None, MS, None)


def test_a_handshake_that_failed_and_one_of_another_peer() -> None:
    engine = Engine()
    known(engine, 0)
    engine.say(2 * MS, "kv_load", "worker", request="r", rank=0)
    engine.say(3 * MS, "kv_handshake", "worker", peer_engine_id="P", rank=0, begin_ns=3 * MS)
    engine.say(3 * MS, "kv_handshake", "worker", peer_engine_id="Q", rank=0, begin_ns=MS, ok=True)
    engine.say(5 * S, "kv_handshake", "worker", peer_engine_id="P", rank=0, begin_ns=3 * MS, ok=False)
    engine.say(5 * S, "kv_failure", "worker", request="r", rank=0, type="handshake_failed", error="TimeoutError")
    engine.say(5 * S, "kv_noticed", request="r", failed=True)
    engine.tick(7 * S)
    f = engine.only(KvFetch)
    assert (f.handshake_begin_ns, f.handshake_end_ns, f.posted_ns) == (3 * MS, 5 * S, None)
    assert (f.failure, f.failure_error) == ("handshake_failed", "TimeoutError")


def test_what_a_worker_says_of_a_request_that_nobody_named_is_dropped_and_counted() -> None:
    engine = Engine()
    engine.say(0, "kv_load", "worker", request="0123456789abcdef", rank=0)
    engine.send("worker", 61 * S)
    engine.tick(61 * S)
    assert (engine.of(KvFetch), engine.merge.fetches.orphans, len(engine.merge.fetches.open)) == ([], 1, 0)


def test_too_many_open_are_given_up_and_counted() -> None:
    engine = Engine(limits=MergeLimits(fetches=10, requests=10))
    for n in range(25):
        known(engine, n * MS, f"r{n}")
    assert (len(engine.merge.fetches.open), engine.merge.fetches.open.evicted, engine.merge.requests.open.evicted) == (10, 15, 15)


def test_the_hand_offs_own_trace_yields_to_the_requests() -> None:
    engine = Engine()
    own, other = f"00-{'a' * 32}-{'b' * 16}-01", f"00-{'c' * 32}-{'d' * 16}-00"
    engine.say(0, "queued", request="r", traceparent=own)
    engine.say(0, "kv_known", request="r", connector="Pull", traceparent=other)
    engine.say(1, "kv_noticed", request="r")
    engine.tick(2 * S)
    f = engine.only(KvFetch)
    assert (f.ids.trace_id, f.ids.parent_span_id) == ("a" * 32, "b" * 16)
    assert (f.publish_span_id, f.decode_span_id) == ("d" * 16, "b" * 16)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_the_child_of_a_composite_that_loads_is_the_one(order: tuple[int, int]) -> None:
    engine = Engine()
    engine.say(0, "queued", request="r")
    children = [("Pull", 96), ("Other", 0)]
    for name, _ in (children[n] for n in order):
        engine.say(0, "kv_known", request="r", connector=name, peer_engine_id="P")
    for name, tokens in (children[n] for n in order):
        engine.say(MS, "kv_wanted", request="r", connector=name, tokens_wanted=tokens, blocks=tokens // 32, asynchronous=True)
    engine.tick(3 * S)
    assert [f for f in engine.of(KvFetch) if not f.provisional] == []
    for _ in children:
        engine.say(4 * S, "kv_noticed", request="r")
    engine.tick(6 * S)
    f = engine.only(KvFetch)
    assert (f.connector, f.tokens_wanted, f.blocks, f.ended_ns) == ("Pull", 96, 3, 4 * S)


# --- publishes ----------------------------------------------------------------------------------------------------------------
def test_expired_then_read_is_one_record_more_however_many_ranks() -> None:
    engine = Engine()
    published(engine, 0)
    for rank in range(8):
        engine.say(30 * S, "kv_expired", f"worker{rank}", request="r", rank=rank)
    engine.say(30 * S + MS, "kv_freed", request="r")
    engine.tick(32 * S)
    expired = engine.only(KvPublish)
    assert (expired.expired_ns, expired.read_ns, expired.readers, expired.late_read_ns) == (30 * S, None, 0, None)
    for rank in range(8):
        engine.say(51 * S, "kv_read", f"worker{rank}", request="r", rank=rank, reader="agent", late=True, bound_ns=MS)
    (late,) = [p for p in engine.of(KvPublish) if p.late_read_ns is not None]
    assert (late.late_read_ns, late.expired_ns, late.ids) == (51 * S, 30 * S, expired.ids)


def test_a_lease_that_heartbeats_extend() -> None:
    engine = Engine()
    published(engine, 0)
    engine.say(5 * S, "kv_lease", "worker", request="r", left_ns=40 * S)
    engine.say(9 * S, "kv_read", "worker", request="r", rank=0, reader="agent", bound_ns=MS)
    engine.say(9 * S, "kv_freed", request="r")
    engine.tick(9 * S)
    p = engine.only(KvPublish)
    assert (p.lease_ns, p.lease_end_ns, p.heartbeats, p.readers, p.reader) == (30 * S, 45 * S, 1, 1, "agent")


def test_pinned_bytes_and_age() -> None:
    engine = Engine()
    published(engine, 0, "a")
    published(engine, 2 * S, "b")
    assert engine.merge.publishes.pinned(3 * S) == (12_000, 3 * S)
    engine.say(4 * S, "kv_freed", request="a")
    assert engine.merge.publishes.pinned(5 * S) == (6_000, 3 * S)


# --- processes ----------------------------------------------------------------------------------------------------------------
def kinds(engine: Engine) -> list[ProcessEventKind]:
    return [e.kind for e in engine.of(ProcessEvent)]


def test_a_stopped_engine_is_hung_and_recovers() -> None:
    engine = Engine()
    engine.say(0, "alive", last_step_ns=0, unfinished=1, pid=42)
    engine.tick(4 * S)
    assert kinds(engine) == [ProcessEventKind.STARTED]
    assert not engine.merge.processes.hung
    engine.tick(5 * S)
    engine.tick(6 * S)
    assert engine.merge.processes.hung
    engine.say(9 * S, "alive", last_step_ns=9 * S, unfinished=1, pid=42)
    engine.tick(9 * S)
    assert not engine.merge.processes.hung
    assert kinds(engine) == [ProcessEventKind.STARTED, ProcessEventKind.HUNG, ProcessEventKind.RECOVERED]
    assert engine.of(ProcessEvent)[1].at_unix_ns == UNIX


def test_an_engine_that_lives_and_steps_no_more_while_requests_wait() -> None:
    engine = Engine()
    for second in range(30):
        engine.say(second * S, "alive", last_step_ns=0, unfinished=1)
        engine.tick(second * S)
    assert kinds(engine) == [ProcessEventKind.STARTED, ProcessEventKind.HUNG]
    assert "makes no step" in engine.of(ProcessEvent)[1].detail


def test_a_request_after_a_long_idle_time_is_no_hang() -> None:
    engine = Engine()
    for second in range(100):
        engine.say(second * S, "alive", last_step_ns=0, unfinished=0)
    engine.say(100 * S, "alive", last_step_ns=0, unfinished=1)  # added, and not scheduled yet
    engine.tick(100 * S)
    assert kinds(engine) == [ProcessEventKind.STARTED]


def test_an_idle_engine_is_not_hung() -> None:
    engine = Engine()
    for second in range(60):
        engine.say(second * S, "alive", last_step_ns=0, unfinished=0)
        engine.tick(second * S)
    assert kinds(engine) == [ProcessEventKind.STARTED]


def test_a_dead_engine_closes_what_it_held() -> None:
    alive = {42: True}
    engine = Engine(exists=alive.get)
    engine.say(0, "alive", last_step_ns=0, unfinished=1, pid=42)
    known(engine, MS)
    published(engine, 2 * MS, "p")
    alive[42] = False
    engine.tick(2 * S)
    assert kinds(engine) == [ProcessEventKind.STARTED, ProcessEventKind.DEAD]
    assert engine.only(EngineTimes).status == "engine_lost"
    assert engine.only(KvFetch).request_status == "engine_lost"
    assert engine.only(KvPublish).failure == "engine_lost"
    assert engine.of(ProcessEvent)[-1].at_bound_ns == 2 * S - 2 * MS


@pytest.mark.parametrize(("clean", "kind", "word"), [(True, "stopped", "engine_stopped"), (False, "dead", "engine_lost")])
def test_an_engine_that_shut_down_is_stopped_and_one_that_failed_is_dead(clean: bool, kind: str, word: str) -> None:
    alive = {42: True}
    engine = Engine(exists=alive.get)
    engine.say(0, "alive", last_step_ns=0, unfinished=1, pid=42)
    known(engine, MS)
    published(engine, 2 * MS, "p")
    engine.say(S, "stopping", clean=clean, pid=42)
    engine.tick(3 * S)
    assert kinds(engine) == [ProcessEventKind.STARTED]  # it still exists
    alive[42] = False
    engine.tick(4 * S)
    assert [k.value for k in kinds(engine)] == ["started", kind]
    assert engine.only(EngineTimes).status == engine.only(KvFetch).request_status == engine.only(KvPublish).failure == word


@pytest.mark.parametrize(
    ("clean", "core"), [(True, ["started", "stopped"]), (False, ["started", "dead"])], ids=["told-to-end", "failed"]
)
def test_a_core_that_its_api_server_killed_at_shutdown_is_stopped(clean: bool, core: list[str]) -> None:
    alive = {41: True, 42: True}
    engine = Engine(exists=alive.get)
    engine.say(0, "alive", last_step_ns=0, unfinished=1, pid=42)
    engine.say(0, "alive", "api", pid=41)
    known(engine, MS)
    engine.say(S, "stopping", "api", clean=clean, pid=41)
    alive[42] = False
    engine.tick(3 * S)
    assert [e.kind.value for e in engine.of(ProcessEvent) if e.pid == 42 or e.process_kind == "core"] == core
    assert engine.only(EngineTimes).status == ("engine_stopped" if clean else "engine_lost")


def test_a_core_that_dies_long_after_another_engines_end_is_dead() -> None:
    alive = {41: True, 42: True}
    engine = Engine(exists=alive.get)
    engine.say(0, "alive", "api", pid=41)
    engine.say(S, "stopping", "api", clean=True, pid=41)
    for second in range(2, 50):
        engine.say(second * S, "alive", last_step_ns=0, unfinished=0, pid=42)
    alive[42] = False
    engine.tick(52 * S)
    assert [e.kind.value for e in engine.of(ProcessEvent) if e.process_kind == "core"] == ["started", "dead"]


def test_where_pids_cannot_be_seen_the_last_word_and_silence_are_the_end() -> None:
    engine = Engine(exists=lambda _: None)
    engine.say(0, "alive", last_step_ns=0, unfinished=0, pid=42)
    engine.say(S, "stopping", clean=True, pid=42)
    engine.tick(5 * S)
    assert [k.value for k in kinds(engine)] == ["started"]
    engine.tick(7 * S)
    assert [k.value for k in kinds(engine)] == ["started", "stopped"]


def test_an_engine_that_dies_after_an_announced_end_and_further_steps_is_dead() -> None:
    alive = {42: True}
    engine = Engine(exists=alive.get)
    engine.say(0, "stopping", clean=True, pid=42)
    engine.say(S, "step", begin_ns=S - MS, requests=1, pid=42)
    alive[42] = False
    engine.tick(4 * S)
    assert [k.value for k in kinds(engine)] == ["started", "dead"]


def loaded_within_the_call(engine: Engine, at: int, request: str = "r") -> None:
    """Repeat the load with a connector that loads within the step."""
    engine.say(at, "kv_known", request=request, connector="Example", engine_id="D")
    engine.say(at, "kv_wanted", request=request, connector="Example", tokens_wanted=64, tokens_local=0, asynchronous=False)
    engine.say(at + MS, "kv_load", "worker", request=request, rank=0)
    engine.say(at + 3 * MS, "kv_loaded", "worker", request=request, rank=0)


def test_a_second_load_of_a_request_is_a_load_of_its_own() -> None:
    engine = Engine()
    engine.say(0, "queued", request="r")
    loaded_within_the_call(engine, MS)
    engine.say(5 * MS, "first_token", request="r")
    engine.tick(2 * S)
    loaded_within_the_call(engine, 3 * S)
    engine.tick(5 * S)
    first, second = engine.of(KvFetch)
    assert first.ids.span_id != second.ids.span_id
    assert (second.known_unix_ns - first.known_unix_ns, second.ended_ns) == (3 * S - MS, 3 * MS)
    assert [(f.load_started_ns, f.done_ns, f.ranks_done, f.failure) for f in (first, second)] == [(MS, 3 * MS, 1, None)] * 2


def test_a_load_within_the_call_ends_with_it_although_the_first_token_arrived_before() -> None:
    engine = Engine()
    engine.say(0, "queued", request="r")
    engine.say(MS, "kv_known", request="r", connector="Example", engine_id="D")
    engine.say(MS, "kv_wanted", request="r", connector="Example", tokens_wanted=64, tokens_local=0, asynchronous=False)
    engine.say(12 * MS, "first_token", request="r")
    engine.say(2 * MS, "kv_load", "worker", request="r", rank=0)
    engine.say(4 * MS, "kv_loaded", "worker", request="r", rank=0)
    engine.tick(3 * S)
    assert engine.only(KvFetch).ended_ns == 3 * MS


@pytest.mark.parametrize("workers_first", [False, True])
def test_loads_close_behind_each_other_are_distinguished_in_any_order_of_their_processes(workers_first: bool) -> None:
    """Loads in quick succession stay apart in any order of the processes' events.

    The first fails, and a cache connector loads again before any event of the first has settled.
    """
    engine = Engine()
    known(engine, 0)
    of_core: list[tuple[int, str, dict[str, Any]]] = [
        (10 * MS, "kv_noticed", {"failed": True}),
        (12 * MS, "kv_known", {"connector": "Cache", "engine_id": "D"}),
        (12 * MS, "kv_wanted", {"connector": "Cache", "tokens_wanted": 96, "tokens_local": 0, "asynchronous": True}),
        (30 * MS, "kv_noticed", {}),
    ]
    of_worker: list[tuple[int, str, dict[str, Any]]] = [
        (2 * MS, "kv_load", {}),
        (8 * MS, "kv_loaded", {"failed": True}),
        (13 * MS, "kv_load", {}),
        (20 * MS, "kv_done", {"bytes": 6000, "descriptors": 6}),
        (28 * MS, "kv_loaded", {}),
    ]
    for boot, statements in (
        (("worker", of_worker), ("core", of_core)) if workers_first else (("core", of_core), ("worker", of_worker))
    ):
        for at, name, fields in statements:
            ranked = {"rank": 0} if boot == "worker" else {}
            engine.say(at, name, boot, request="r", **ranked, **fields)
    engine.tick(3 * S)
    first, second = sorted(engine.of(KvFetch), key=lambda f: f.known_unix_ns)
    assert (first.failure, first.ranks_done, first.noticed_ns, first.bytes_moved) == ("load_failed", 0, 10 * MS, None)
    assert (second.failure, second.ranks_done, second.noticed_ns, second.bytes_moved) == (None, 1, 18 * MS, 6000)
    assert second.load_started_ns == MS


def test_a_third_load_before_the_first_has_settled_loses_none() -> None:
    engine = Engine()
    engine.say(0, "queued", request="r")
    for at in (MS, 20 * MS, 40 * MS):
        loaded_within_the_call(engine, at)
    engine.tick(3 * S)
    assert len({f.ids.span_id for f in engine.of(KvFetch)}) == 3


def test_a_restarted_engine_is_reported_and_its_facts_are_new() -> None:
    engine = Engine(exists=lambda _: None)
    engine.say(0, "facts", "core-1", facts={"engine_id": "E1", "model": "m", "model_revision": "r1"})
    known(engine, MS)
    engine.tick(6 * S)
    engine.say(40 * S, "facts", "core-2", facts={"engine_id": "E2", "model": "m"})
    assert kinds(engine)[-1] is ProcessEventKind.RESTARTED
    facts = engine.of(EngineFacts)[-1]
    assert (facts.engine_id, facts.model, facts.model_revision) == ("E2", "m", None)


def test_ranks_that_start_together_are_no_restart() -> None:
    engine = Engine()
    for rank in range(4):
        engine.say(rank * MS, "alive", f"worker{rank}", pid=100 + rank)
    assert kinds(engine) == [ProcessEventKind.STARTED] * 4


def test_losses_are_counted_and_reported_at_intervals() -> None:
    engine = Engine()
    engine.send("core", 0, lost=5)  # before this sidecar listened
    engine.send("core", S, lost=12)
    next(engine._sequence["core"])
    engine.send("core", 2 * S, lost=13)
    engine.tick(11 * S)
    assert (engine.merge.processes.lost_events, engine.merge.processes.lost_datagrams) == (8, 1)
    assert [e.count for e in engine.of(ProcessEvent) if e.kind is ProcessEventKind.PLUGIN_LOST] == [8]


def test_a_datagram_that_comes_twice_counts_once() -> None:
    engine = Engine()
    known(engine, 0)
    event = PluginDatagramEvent(
        "kv_done", MS, {"request": "r", "rank": 0, "bytes": 10, "descriptors": 1, "bound_ns": 0, "writes": False}
    )
    packet = Packet("worker", 8, words.WORKER, 1, MS, UNIX, 0, (event,))
    assert [len(engine.merge.take(packet)) for _ in range(2)] == [1, 0]
    engine.say(2 * MS, "kv_noticed", request="r")
    engine.tick(2 * S)
    assert engine.only(KvFetch).bytes_moved == 10


def test_a_hook_that_fails_is_an_event_of_its_process() -> None:
    engine = Engine()
    engine.say(0, "degraded", hook="nixl.transfer", error="AttributeError", off=True)
    assert [e.detail for e in engine.of(ProcessEvent)][1:] == ["hook nixl.transfer: AttributeError, taken off"]


def test_lines_are_handed_on_with_their_time() -> None:
    engine = Engine()
    engine.say(5 * MS, "log", level="ERROR", line="NIXL transfer failure: x")
    assert engine.lines == [(UNIX + 5 * MS, "ERROR", "NIXL transfer failure: x")]


# --- steps --------------------------------------------------------------------------------------------------------------------
def test_a_pause_is_an_event_of_the_paused_process() -> None:
    engine = Engine()
    engine.say(300 * MS, "paused", begin_ns=80 * MS, reason="throttled", bound_ns=25 * MS)
    (pause,) = [e for e in engine.of(ProcessEvent) if e.kind is ProcessEventKind.PAUSED]
    assert (pause.at_unix_ns, pause.duration_ns, pause.at_bound_ns) == (UNIX + 80 * MS, 220 * MS, 25 * MS)
    assert (pause.detail, pause.process_kind) == ("throttled", words.CORE)


def test_a_pause_that_ends_before_it_begins_lasts_no_time() -> None:
    engine = Engine()
    engine.say(50 * MS, "paused", begin_ns=80 * MS, reason="held", bound_ns=0)
    assert [e.duration_ns for e in engine.of(ProcessEvent) if e.kind is ProcessEventKind.PAUSED] == [0]


def step(engine: Engine, begin: int, end: int, **fields: Any) -> None:
    given = {"requests": 1, "prefill_requests": 0, "prefill_tokens": 0, "decode_tokens": 1, "preemptions": 0, **fields}
    engine.say(end, "step", begin_ns=begin, **given)


def test_steps_are_rolled_up_by_the_second_and_long_ones_kept() -> None:
    engine = Engine()
    for n in range(200):
        step(engine, n * 10 * MS, n * 10 * MS + 9 * MS)
    step(engine, 2000 * MS, 2300 * MS, prefill_requests=1, prefill_tokens=900)
    engine.tick(4 * S)
    full = [i for i in engine.of(Iteration) if i.full]
    rollups = [i for i in engine.of(Iteration) if not i.full]
    assert [(i.steps, i.longest_ns, i.prefill_tokens, i.usual_ns) for i in full] == [(1, 300 * MS, 900, 9 * MS)]
    assert sum(i.steps for i in rollups) == 201
    assert sum(i.decode_tokens for i in rollups) == 201
    assert all(i.duration_ns <= 1400 * MS for i in rollups)
    assert rollups[-1].longest_ns == 300 * MS


def test_long_steps_stay_long_though_a_third_of_all_are() -> None:
    engine = Engine()
    at = 0
    for n in range(300):
        took = (100 if n % 3 == 0 else 10) * MS
        step(engine, at, at + took, prefill_tokens=500 if n % 3 == 0 else 0, resumed_tokens=None)
        at += took
    engine.tick(at + 4 * S)
    full = [i for i in engine.of(Iteration) if i.full]
    assert {(i.longest_ns, i.usual_ns, i.prefill_tokens) for i in full} == {(100 * MS, 10 * MS, 500)}
    assert len(full) > 80


def test_the_first_steps_are_not_called_long() -> None:
    engine = Engine()
    step(engine, 0, 500 * MS)
    assert [i for i in engine.of(Iteration) if i.full] == []


# --- directions ---------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("word", ["p_to_d", "d_to_p"])
def test_directions(word: str) -> None:
    engine = Engine()
    known(engine, 0, direction=word)
    engine.say(5 * MS, "kv_noticed", request="r")
    engine.tick(2 * S)
    assert engine.only(KvFetch).direction is Direction(word)
