"""Faults from practice, done to a real pair with the plugin.

Each gives the fetch, publish or process event that names it.
There is one pair: D recomputes what it cannot load, P keeps blocks for six seconds. The tests run in the order of the harm they
do.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from handrail.records import EngineFacts, EngineTimes, Exchange, FetchEffect, KvFetch, Outcome, ProcessEventKind, Source
from vllm.child import free_port
from vllm.observed import ObservedPair, observed_pair
from vllm.pair import find_installation

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1200)]

LEASE_S = 6
SECOND_NS = 10**9
MIDDLEWARE = ("--middleware", "handrail.plugin.middleware.Handrail")


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObservedPair]:
    with observed_pair(
        find_installation(),
        tmp_path_factory.mktemp("faults"),
        prefill_connector={"kv_connector_extra_config": {"kv_lease_duration": LEASE_S}},
        decode_connector={"kv_load_failure_policy": "recompute"},
        flags=MIDDLEWARE,
    ) as pair:
        yield pair


def prompt(name: str) -> str:
    """Return a prompt of several blocks that no other test shares."""
    return f"{name}: a question of its own. " * 16


def core_pid(answer: Any) -> int:
    (pid,) = [p.pid for p in answer.source.merge.processes.alive.values() if p.kind == "core"]
    found: int = pid
    return found


def dead_peer(params: dict[str, Any]) -> None:
    params["remote_port"] = free_port()
    params["remote_engine_id"] = "11111111-2222-3333-4444-555555555555"


def test_the_middleware_sees_what_a_proxy_would(observed: ObservedPair) -> None:
    observed.two_step(prompt("fine"), "fine")
    sides = [received_records.wait_records(Exchange, 1) for received_records in (observed.prefill, observed.decode)]
    p, d = (next(e for e in side if e.request_id == "fine") for side in sides)
    for e in (p, d):
        assert (e.source, e.outcome, e.status, e.operation) == (Source.MIDDLEWARE, Outcome.OK, 200, "text_completion")
        assert e.ttfb_ns
    assert p.kv_out is not None
    assert d.kv_in is not None
    assert p.kv_out.keys() == d.kv_in.keys() != ()
    assert d.output_tokens == 12
    fetch, publish = observed.decode.fetch_of("fine"), observed.prefill.publish_of("fine", lambda p: p.read_ns is not None)
    assert d.kv_in.keys() == (f"vllm:{fetch.peer_engine_id}:{fetch.peer_request_id}",)
    assert (publish.readers, publish.expired_ns) == (1, None)


def test_bad_blocks_are_recomputed(observed: ObservedPair) -> None:
    def spoil(params: dict[str, Any]) -> None:
        params["remote_block_ids"] = [[900_001 + n for n, _ in enumerate(group)] for group in params["remote_block_ids"]]

    answer = observed.two_step(prompt("bad"), "bad", change=spoil)
    fetch = observed.decode.fetch_of("bad")
    assert answer.status == 200
    assert (fetch.failure, fetch.failure_error, fetch.effect) == (
        "transfer_setup_failed",
        "NIXL_ERR_INVALID_PARAM",
        FetchEffect.RECOMPUTED,
    )
    assert fetch.bytes_moved is None
    (times,) = [t for t in observed.decode.wait(EngineTimes, lambda found: len(found) >= 2) if "-bad-" in t.request_id]
    assert times.status == "length_capped"


def test_a_dead_side_channel_is_a_handshake_that_took_five_seconds(observed: ObservedPair) -> None:
    observed.two_step(prompt("dead"), "dead", change=dead_peer)
    fetch = observed.decode.fetch_of("dead")
    assert (fetch.failure, fetch.effect, fetch.posted_ns) == ("handshake_failed", FetchEffect.RECOMPUTED, None)
    assert fetch.handshake_begin_ns is not None
    assert fetch.handshake_end_ns is not None
    assert fetch.handshake_end_ns - fetch.handshake_begin_ns > 4 * SECOND_NS
    opened = [f for f in observed.decode.of(KvFetch) if f.provisional and f.ids.span_id == fetch.ids.span_id]
    assert opened
    assert all(f.handshake_end_ns is None for f in opened[:1])


def test_a_client_that_goes_while_kv_is_on_its_way(observed: ObservedPair) -> None:
    params = observed.prefill_step(prompt("gone"), "gone")
    dead_peer(params)
    with pytest.raises((TimeoutError, OSError)):
        observed.decode_step(prompt("gone"), "gone", params, timeout_s=1.0)
    fetch = observed.decode.fetch_of("gone")
    assert (fetch.request_status, fetch.posted_ns, fetch.effect) == ("aborted", None, None)
    left = [e for e in observed.decode.wait_records(Exchange, 4) if e.request_id == "gone"]
    assert [e.outcome for e in left] == [Outcome.CLIENT_DISCONNECT]


def test_kv_never_fetched_expires_and_a_later_read_is_reported(observed: ObservedPair) -> None:
    requested_ns = time.monotonic_ns()
    params = observed.prefill_step(prompt("late"), "late")
    expired = observed.prefill.publish_of("late", lambda p: p.expired_ns is not None, timeout_s=LEASE_S + 120)
    assert (expired.read_ns, expired.readers, expired.late_read_ns) == (None, 0, None)
    assert expired.expired_ns is not None
    assert LEASE_S * SECOND_NS <= expired.expired_ns <= time.monotonic_ns() - requested_ns
    answer = observed.decode_step(prompt("late"), "late", params)
    assert answer.status == 200
    late = observed.prefill.publish_of("late", lambda p: p.late_read_ns is not None)
    assert late.ids == expired.ids
    assert observed.decode.fetch_of("late").failure is None  # D cannot tell


def test_a_restarted_sidecar_hears_on(observed: ObservedPair) -> None:
    observed.listeners.stop(observed.decode)
    observed.two_step(prompt("between"), "between")
    again = observed.listeners.listen("decode", observed.decode.source.path)
    observed.two_step(prompt("after"), "after")
    assert again.fetch_of("after").failure is None
    assert again.fetch_of("between").failure is None  # kept by the plugin meanwhile
    assert again.of(EngineFacts)[-1].connector == "NixlPullConnector"
    assert again.source.merge.processes.lost_events == 0
    observed.listeners.stop(again)


def test_a_stopped_engine_is_hung_behind_a_200(observed: ObservedPair) -> None:
    pid = core_pid(observed.prefill)
    os.kill(pid, signal.SIGSTOP)
    try:
        (hung,) = observed.prefill.wait_event(ProcessEventKind.HUNG, pid)
        with urllib.request.urlopen(f"{observed.pair.prefill.url}/health", timeout=60) as response:
            assert response.status == 200
    finally:
        os.kill(pid, signal.SIGCONT)
    assert (hung.pid, hung.process_kind) == (pid, "core")
    assert observed.prefill.wait_event(ProcessEventKind.RECOVERED, pid)


def test_p_killed_between_the_steps(observed: ObservedPair) -> None:
    received_records = observed.listeners.listen("decode", observed.decode.source.path)
    params = observed.prefill_step(prompt("killed"), "killed")
    observed.prefill.wait_published("killed")
    pid = core_pid(observed.prefill)
    os.kill(pid, signal.SIGKILL)
    for process in list(observed.prefill.source.merge.processes.alive.values()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
    assert observed.prefill.wait_event(ProcessEventKind.DEAD, pid)
    publish = observed.prefill.publish_of("killed", lambda p: True)
    assert publish.failure == "engine_lost"
    answer = observed.decode_step(prompt("killed"), "killed", params)
    fetch = received_records.fetch_of("killed")
    assert (answer.status, fetch.effect) == (200, FetchEffect.RECOMPUTED)
    assert fetch.failure in {"transfer_setup_failed", "transfer_failed", "transfer_exception"}
