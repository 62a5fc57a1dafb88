"""Phases from the plugin's records.

Each is a duration on one engine's clock. The sum is exact. Where a moment is missing, the phases are coarser.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from builders.plugin import altered, fact, fetch, loose, publish, times
from builders.records import EPOCH, MS, exchange, kv, split_request
from handrail.phases import Phase
from handrail.records import Direction, LogKind, Role
from handrail_collector.explain.request.request_row import Fleet, explain
from handrail_collector.rows import RequestRow
from handrail_collector.stitch.evidence import Item
from handrail_collector.stitch.stitcher import SECOND, Stitcher

NOW = EPOCH + 10 * SECOND
FLEET = Fleet(frozenset({(Role.PREFILL, "plugin"), (Role.DECODE, "plugin")}))


def rows(records: Iterable[Item]) -> list[RequestRow]:
    stitcher = Stitcher()
    for offset, record in enumerate(records):
        stitcher.add(record, offset, NOW)
    decided = {id(d.group): d.group for s in range(0, 4000, 50) for d in stitcher.sweep(NOW + s * SECOND)}
    return [explain(g, FLEET) for g in decided.values() if g.merged_into is None and g.is_request]


def row_of(records: Iterable[Item]) -> RequestRow:
    (row,) = rows(records)
    return row


def table(row: RequestRow) -> dict[tuple[str, str], float]:
    found: dict[tuple[str, str], float] = {}
    for p in row.phases:
        found[p.process, p.phase] = found.get((p.process, p.phase), 0) + p.duration_ns / MS
    return found


def with_plugin(host_p: str = "h1", host_d: str = "h1", **of_fetch: Any) -> dict[str, Any]:
    """Return records of proxies and plugin.

    P runs from 10 to 110 ms, D from 130 to 990 ms with its first token at 290 ms (edge: 300 ms).
    """
    seen = split_request(host_p=host_p, host_d=host_d)
    p, d = seen["p"], seen["d"]
    return {
        "edge": seen["edge"],
        "p": p,
        "d": d,
        "times_p": times(Role.PREFILL, 12, 20, 92, 93, parent=p, host=host_p),
        "publish": publish(105, parent=p, host=host_p),
        "times_d": times(Role.DECODE, 133, 110, 150, 850, rid="cmpl-req-a-0-0000dddd", parent=d, host=host_d),
        "fetch": fetch(134, parent=d, host=host_d, **of_fetch),
    }


def test_every_phase_of_the_hand_off_by_the_engines_own_clocks() -> None:
    row = row_of(with_plugin().values())
    assert sum(p.duration_ns for p in row.phases) == row.ttft_token_ns == 300 * MS
    assert table(row) == pytest.approx(
        {
            ("prefill", "prefill_admission"): 2,
            ("prefill", "prefill_queue"): 20,
            ("prefill", "prefill_compute"): 72,
            ("prefill", "prefill_respond"): 6,
            ("path", "router_and_hops"): 40,
            ("decode", "decode_admission"): 3,
            ("decode", "kv_wait"): 12,
            ("decode", "kv_handshake"): 0,
            ("decode", "kv_transfer"): 59,
            ("decode", "kv_notice"): 5,
            ("decode", "decode_queue"): 34,
            ("decode", "first_step"): 40,
            ("decode", "decode_respond"): 7,
        }
    )
    assert {p.source for p in row.phases} == {"plugin", "proxy+plugin", "edge-proxy"}
    assert row.kv_outcome == "ok"
    assert row.complete
    assert row.findings == ()


def test_a_first_contact_is_a_phase_until_the_transfer_is_posted() -> None:
    row = row_of(with_plugin(handshake_ms=(10, 45), posted_ms=46).values())
    assert table(row)["decode", "kv_wait"] == 11
    assert table(row)["decode", "kv_handshake"] == 36
    assert table(row)["decode", "kv_transfer"] == 24


def test_a_load_that_waits_for_another_of_its_step_to_be_posted_is_no_transfer_until_then() -> None:
    row = row_of(with_plugin(started_ms=10, posted_ms=31).values())
    parts = {p.phase: p for p in row.phases if p.process == "decode"}
    assert (parts["kv_wait"].duration_ns, parts["kv_handshake"].duration_ns) == (32 * MS, 0)
    assert parts["kv_transfer"].duration_ns == 39 * MS
    assert parts["kv_transfer"].bound_ns <= 2_000
    assert sum(p.duration_ns for p in row.phases) == 300 * MS


def test_a_connector_that_does_not_say_when_it_posts_transfers_from_the_loads_start() -> None:
    row = row_of(with_plugin(posted_ms=None).values())
    assert table(row)["decode", "kv_wait"] == 11
    assert table(row)["decode", "kv_transfer"] == 60


@pytest.mark.parametrize(
    ("missing", "may_be"),
    [
        ({"started_ms": None, "posted_ms": None}, ("kv_wait", "kv_handshake", "kv_transfer")),
        ({"done_ms": None}, ("kv_transfer", "kv_notice")),
        ({"done_ms": None, "noticed_ms": None}, ("kv_transfer", "kv_notice", "decode_queue")),
    ],
    ids=["neither-start-nor-post", "no-done", "neither-done-nor-noticed"],
)
def test_a_missing_moment_makes_it_coarser_and_never_wrong(missing: dict[str, Any], may_be: tuple[str, ...]) -> None:
    row = row_of(with_plugin(**missing).values())
    assert sum(p.duration_ns for p in row.phases) == 300 * MS
    (rest,) = [p for p in row.phases if p.phase == "unattributed"]
    assert rest.may_be == may_be
    assert rest.process == "decode"


def test_the_time_spent_preempted_is_shown_apart() -> None:
    seen = with_plugin()
    seen["times_d"] = altered(seen["times_d"], preemptions=1, preempted_ns=30 * MS, preempted_before_first_ns=30 * MS)
    row = row_of(seen.values())
    steps = {p.source: p.duration_ns for p in row.phases if p.phase == "first_step"}
    assert steps == {"plugin": 10 * MS, "plugin-preempted": 30 * MS}


def test_a_push_is_timed_by_the_clock_that_pushed() -> None:
    seen = with_plugin(mode="push", posted_ms=11, done_ms=70)
    seen["publish"] = publish(105, parent=seen["p"], mode="push", posted_ns=40 * MS, done_ns=65 * MS, read_ms=None)
    row = row_of(seen.values())
    (transfer,) = [p for p in row.phases if p.phase == "kv_transfer"]
    assert (transfer.duration_ns, transfer.source) == (25 * MS, "plugin-peer")
    (rest,) = [p for p in row.phases if p.phase == "unattributed"]
    assert (rest.duration_ns, rest.may_be) == (34 * MS, ("kv_wait", "kv_notice"))


def test_a_collocated_request_lacks_the_phases_of_a_hand_off() -> None:
    edge = exchange(Role.EDGE, 0, 500, ttft_ms=100)
    inside = exchange(Role.COLLOCATED, 5, 490, parent=edge, ttft_ms=90)
    row = row_of([edge, inside, times(Role.COLLOCATED, 7, 20, 80, 480, parent=inside)])
    assert table(row) == pytest.approx(
        {
            ("decode", "decode_admission"): 2,
            ("decode", "prefill_queue"): 20,
            ("decode", "prefill_compute"): 60,
            ("decode", "decode_respond"): 8,
            ("path", "router_and_hops"): 10,
        }
    )


def test_clocks_of_hosts_that_disagree_by_seconds_change_no_phase() -> None:
    seen = with_plugin("hp", "hd")
    shifted = dict(seen)
    for name, by, at in (("p", 2, "arrival_unix_ns"), ("times_p", 2, "queued_unix_ns"), ("publish", 2, "published_unix_ns")):
        shifted[name] = altered(seen[name], **{at: getattr(seen[name], at) + by * SECOND})
    for name, at in (("d", "arrival_unix_ns"), ("times_d", "queued_unix_ns"), ("fetch", "known_unix_ns")):
        shifted[name] = altered(seen[name], **{at: getattr(seen[name], at) - 2 * SECOND})
    assert table(row_of(shifted.values())) == table(row_of(seen.values()))


def test_the_plugin_alone_without_any_proxy_joins_by_the_connectors_keys() -> None:
    seen = with_plugin()
    alone = [loose(seen[name]) for name in ("times_p", "publish", "times_d", "fetch")]
    row = row_of(alone)
    assert row.scope == "engine"
    assert (row.prefill_instance, row.decode_instance) == ("prefill:8000", "decode:8000")
    assert {j.how for j in row.joins} == {"opened", "engine_id", "connector"}
    assert row.phase_of == "ttft"
    assert sum(p.duration_ns for p in row.phases) == 150 * MS


def test_what_an_engine_does_for_itself_is_no_request_and_joins_nothing() -> None:
    seen = with_plugin()
    cleaning = fetch(400, rid="826600bc53018139", trace="t9")
    assert row_of([*seen.values(), cleaning]) == row_of(seen.values())


def test_a_turn_that_takes_kv_back_from_d_has_a_fetch_of_its_own_at_p() -> None:
    seen = with_plugin()
    back = fetch(
        13,
        rid="cmpl-req-a-0-0000aaaa",
        peer="cmpl-earlier-0-0000eeee",
        role=Role.PREFILL,
        parent=seen["p"],
        direction=Direction.D_TO_P,
        started_ms=1,
        posted_ms=2,
        done_ms=9,
        noticed_ms=10,
        peer_engine_id="engine-d",
        engine_id="engine-p",
    )
    row = row_of([*seen.values(), back])
    assert table(row)["prefill", "kv_transfer"] == 7
    assert table(row)["decode", "kv_transfer"] == 59
    assert sum(p.duration_ns for p in row.phases) == 300 * MS


_WILD = st.none() | st.integers(0, 10**9)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_any_part_of_the_evidence_in_any_order_gives_no_negative_phase_and_an_exact_sum(data: st.DataObject) -> None:
    seen = with_plugin(host_p=data.draw(st.sampled_from(["h1", "h2"])))
    fetched, at_d, kept = seen["fetch"], seen["times_d"], seen["publish"]
    moments = ("load_started_ns", "handshake_begin_ns", "handshake_end_ns", "posted_ns", "done_ns", "noticed_ns", "ended_ns")
    seen["fetch"] = altered(
        fetched, **{name: data.draw(_WILD) for name in moments}, mode=data.draw(st.sampled_from(["pull", "push", None]))
    )
    inside = ("scheduled_ns", "first_token_ns", "finished_ns")
    seen["times_d"] = altered(
        at_d, **{name: data.draw(_WILD) for name in inside}, preempted_before_first_ns=data.draw(st.integers(0, 10**9))
    )
    seen["publish"] = altered(kept, posted_ns=data.draw(_WILD), done_ns=data.draw(_WILD), read_ns=data.draw(_WILD))
    seen["fact"] = fact(LogKind.STALE_READ, Role.PREFILL, 200, "cmpl-req-a-0-0000aaaa")
    chosen = data.draw(st.lists(st.sampled_from(sorted(seen)), max_size=12))
    for row in rows(seen[name] for name in chosen):
        assert all(p.duration_ns >= 0 and p.bound_ns >= 0 for p in row.phases)
        assert all(p.phase in {phase.value for phase in Phase} for p in row.phases)
        if row.phase_of == "ttft" and row.scope == "edge":
            assert sum(p.duration_ns for p in row.phases) == row.ttft_token_ns


def test_the_proxy_saw_what_the_plugin_had_no_context_for() -> None:
    """A request without a trace context is found by engine id and the proxy's times.

    vLLM gives its core a trace context only where tracing is on.
    """
    seen = with_plugin()
    bare = {name: loose(seen[name], trace_id="9" * 32) for name in ("times_p", "publish", "times_d", "fetch")}
    row = row_of((seen | bare).values())
    assert table(row) == table(row_of(seen.values()))
    assert row.findings == ()


def test_two_requests_of_one_id_at_one_engine_keep_their_own_times() -> None:
    seen = with_plugin()
    later = {
        "edge": exchange(Role.EDGE, 2000, 1000, trace="t2", ttft_ms=300),
        "d": exchange(Role.DECODE, 2130, 860, trace="t2", ttft_ms=160, kv_in=kv("cmpl-req-a-0-0000bbbb")),
    }
    at_d = times(Role.DECODE, 2133, 110, 150, 850, rid="cmpl-req-a-0-0000ffff", trace="t7")
    found = rows([*seen.values(), *later.values(), at_d])
    of_second = next(r for r in found if r.started_unix_ns == EPOCH + 2000 * MS)
    assert at_d.ids.span_id in of_second.span_ids
    assert sum(at_d.ids.span_id in r.span_ids for r in found) == 1
