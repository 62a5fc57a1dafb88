"""Joins and decisions: every order of arrival, every form of lost trace context."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from builders.records import EPOCH, MS, engine, exchange, kv, router, split_request
from handrail.records import EngineRequest, Exchange, Hint, Record, Role, SpanIds
from handrail_collector.stitch.group import Closing, RequestGroup
from handrail_collector.stitch.stitcher import SECOND, Decision, Stitcher, StitchSettings

NOW = EPOCH + 10 * SECOND


def run(records: Iterable[Record], stitcher: Stitcher | None = None, *, until_s: float = 4000) -> list[RequestGroup]:
    """Feed records 1 ms apart, then let time pass.

    Return the groups that were decided, each once.
    """
    stitcher = stitcher or Stitcher()
    decided: dict[int, RequestGroup] = {}
    for offset, record in enumerate(records):
        stitcher.add(record, offset, NOW + offset * MS)
        for decision in stitcher.advance(NOW + offset * MS):
            decided[id(decision.group)] = decision.group
        assert stitcher.low_water() == min((group.first_offset for group in stitcher.groups()), default=None)
    for second in range(0, int(until_s), 10):
        for decision in stitcher.sweep(NOW + second * SECOND):
            decided[id(decision.group)] = decision.group
        assert stitcher.low_water() == min((group.first_offset for group in stitcher.groups()), default=None)
    return [g for g in decided.values() if g.merged_into is None]


def shape(groups: Iterable[RequestGroup]) -> list[list[str]]:
    return sorted(sorted(e.label for e in g.evidence) for g in groups)


WHOLE = ["decode:otlp", "decode:proxy", "edge:proxy", "prefill:otlp", "prefill:proxy"]


def test_any_order_of_arrival_gives_one_request() -> None:
    records = split_request()
    for order in itertools.permutations(["edge", "p", "d", "engine_p", "engine_d"]):
        assert shape(run(records[name] for name in order)) == [WHOLE], order


def cut(record: Record, trace: str) -> Record:
    """Return the record of a process that the trace context did not reach.

    It is a root of a trace of its own.
    """
    return replace(record, ids=SpanIds(trace_id=trace.encode().hex().rjust(32, "0"), span_id=record.ids.span_id))


@pytest.mark.parametrize("lost", [("p",), ("d",), ("p", "d")], ids="-".join)
@pytest.mark.parametrize("engines_only", [False, True], ids=["inline", "tap alone"])
@pytest.mark.parametrize("seed", range(8))
def test_lost_context_is_made_up_for_by_keys(lost: tuple[str, ...], engines_only: bool, seed: int) -> None:
    everything: list[Record] = []
    for n in range(5):
        r = split_request(f"req-{n}", f"t{n}", at_ms=n * 50)
        if engines_only:
            assert isinstance(r["engine_p"], EngineRequest)
            assert isinstance(r["engine_d"], EngineRequest)
            for side in ("p", "d"):
                ids = SpanIds(
                    trace_id=r["edge"].ids.trace_id, span_id=r[f"engine_{side}"].ids.span_id, parent_span_id=r["edge"].ids.span_id
                )
                r[f"engine_{side}"] = replace(r[f"engine_{side}"], ids=ids)
                if side in lost:
                    r[f"engine_{side}"] = cut(r[f"engine_{side}"], f"x{side}{n}")
                del r[side]
        else:
            for side in lost:
                r[side] = cut(r[side], f"x{side}{n}")
                r[f"engine_{side}"] = replace(
                    r[f"engine_{side}"],
                    ids=SpanIds(
                        trace_id=r[side].ids.trace_id, span_id=r[f"engine_{side}"].ids.span_id, parent_span_id=r[side].ids.span_id
                    ),
                )
        everything.extend(r.values())
    random.Random(seed).shuffle(everything)
    groups = run(everything)
    expected = ["decode:otlp", "edge:proxy", "prefill:otlp"] if engines_only else WHOLE
    assert shape(groups) == [expected] * 5
    for group in groups:
        assert len({k for e in group.evidence for k in e.keys}) == 1


def test_twenty_requests_under_one_trace_are_twenty() -> None:
    requests = [split_request(f"req-{n}", "agent", at_ms=n) for n in range(20)]
    records = [r for request in requests for r in request.values()]
    random.Random(1).shuffle(records)
    assert shape(run(records)) == [WHOLE] * 20


def test_a_shared_trace_id_and_parent_join_nothing_by_themselves() -> None:
    p = engine(Role.PREFILL, 0, 100, rid="cmpl-a-0", parent="00f067aa0ba902b7")
    d = engine(Role.DECODE, 120, 800, rid="cmpl-b-0", parent="00f067aa0ba902b7")
    assert shape(run([p, d])) == [["decode:otlp"], ["prefill:otlp"]]


def test_user_42_7_and_user_42_8_are_two() -> None:
    one, two = split_request("user-42-7", "t1"), split_request("user-42-8", "t2", at_ms=5)
    assert shape(run([*one.values(), *two.values()])) == [WHOLE] * 2


@pytest.mark.parametrize("gap_ms", [500, 1005], ids=["overlapping", "in sequence"])
def test_C09_the_same_request_id_twice_is_two_requests(gap_ms: int) -> None:
    one, two = split_request("same", "t1"), split_request("same", "t2", at_ms=gap_ms)
    # P publishes under another engine id each time, as vLLM's random suffix does
    p2, d2 = two["p"], two["d"]
    assert isinstance(p2, Exchange)
    assert isinstance(d2, Exchange)
    two["p"], two["d"] = replace(p2, kv_out=kv("cmpl-same-0-1111bbbb")), replace(d2, kv_in=kv("cmpl-same-0-1111bbbb"))
    records = [*one.values(), *two.values()]
    random.Random(2).shuffle(records)
    assert shape(run(records)) == [WHOLE] * 2


def test_the_same_id_in_flight_twice_without_context_is_reported_as_ambiguous() -> None:
    hints = (Hint.DUPLICATE_REQUEST_ID,)
    records: list[Record] = []
    for n, at in enumerate((0, 20)):
        edge: Record = exchange(Role.EDGE, at, 1000, rid="same", trace=f"e{n}", ttft_ms=300, hints=hints)
        p = engine(Role.PREFILL, at + 10, 90, rid="cmpl-same-0", trace=f"p{n}")
        records.extend((edge, p, engine(Role.DECODE, at + 120, 800, rid="cmpl-same-0", trace=f"d{n}")))
    groups = run(records)
    edges = [g for g in groups if g.edge is not None]
    assert len(edges) == 2
    for group in edges:
        assert shape([group]) == [["edge:proxy"]]
        assert {f.kind for f in group.findings} == {"ambiguous_request_id"}


def test_connector_keys_join_what_nothing_else_does() -> None:
    p = exchange(Role.PREFILL, 10, 100, rid=None, trace="p", kv_out=kv("a"))
    d = exchange(Role.DECODE, 130, 800, rid=None, trace="d", kv_in=kv("a"), ttft_ms=100)
    other = exchange(Role.PREFILL, 12, 100, rid=None, trace="q", kv_out=kv("b"))
    assert shape(run([d, other, p])) == [["decode:proxy", "prefill:proxy"], ["prefill:proxy"]]


def test_A03_stale_keys_do_not_build_one_request_of_two() -> None:
    a = split_request("req-a", "ta")
    late_edge = exchange(Role.EDGE, 5000, 900, rid="req-c", trace="tc", ttft_ms=300)
    stale = exchange(Role.DECODE, 5100, 700, rid="req-c", parent=late_edge, ttft_ms=100, kv_in=kv("cmpl-req-a-0-0000aaaa"))
    groups = run([*a.values(), stale, late_edge])
    assert shape(groups) == [WHOLE, ["decode:proxy", "edge:proxy"]]
    wrong = next(g for g in groups if len(g.evidence) == 2)
    assert [f.kind for f in wrong.findings] == ["wrong_request"]


def test_A03_without_edges_the_second_reader_is_the_wrong_one() -> None:
    p = exchange(Role.PREFILL, 0, 100, rid="a", trace="p", kv_out=kv("rA"))
    d = exchange(Role.DECODE, 110, 500, rid="a", trace="d", kv_in=kv("rA"), ttft_ms=100)
    stale = exchange(Role.DECODE, 5000, 500, rid="c", trace="c", kv_in=kv("rA"), ttft_ms=100)
    groups = run([p, d, stale])
    assert shape(groups) == [["decode:proxy"], ["decode:proxy", "prefill:proxy"]]
    assert [f.kind for g in groups for f in g.findings] == ["wrong_request"]


def test_a_routers_spans_are_followed_and_foreign_spans_are_walked_through() -> None:
    edge = exchange(Role.EDGE, 0, 1000, ttft_ms=300)
    server = router(5, 990, parent=edge)
    foreign = "f" * 16
    p = engine(Role.PREFILL, 10, 100, parent=foreign)
    p = replace(p, ids=replace(p.ids, trace_id=edge.ids.trace_id))
    stitcher = Stitcher()
    stitcher.add(p, 0, NOW)
    stitcher.link(edge.ids.trace_id + foreign, edge.ids.trace_id + server.ids.span_id, NOW)
    stitcher.add(server, 1, NOW)
    stitcher.add(edge, 2, NOW)
    assert shape(run([], stitcher)) == [["edge:proxy", "prefill:otlp", "router:otlp"]]


def test_an_edge_below_an_edge_is_a_request_of_its_own() -> None:
    outer = exchange(Role.EDGE, 0, 1000)
    inner = exchange(Role.EDGE, 100, 500, rid="req-b", parent=outer)
    assert shape(run([outer, inner])) == [["edge:proxy"], ["edge:proxy"]]


def test_C27_counters_never_join_processes() -> None:
    records: list[Record] = [
        exchange(Role.EDGE, 0, 1000, rid="1", trace="a"),
        engine(Role.PREFILL, 10, 100, rid="cmpl-1-0", trace="b"),
        engine(Role.DECODE, 120, 500, rid="cmpl-1-0", trace="c"),
    ]
    assert len(run(records)) == 3


def test_C01_context_lost_between_sidecar_and_engine() -> None:
    edge = exchange(Role.EDGE, 0, 1000, rid="R", trace="t1", ttft_ms=300)
    p, d = engine(Role.PREFILL, 10, 100, rid="cmpl-R-0", trace="t2"), engine(Role.DECODE, 130, 800, rid="cmpl-R-0", trace="t3")
    groups = run([p, d, edge])
    assert shape(groups) == [["decode:otlp", "edge:proxy", "prefill:otlp"]]
    assert {e.how.value for e in groups[0].evidence} == {"opened", "request_key"}


# --- when ---------------------------------------------------------------------------------------------------------------


def test_a_request_is_decided_as_soon_as_everything_that_reports_has_reported() -> None:
    stitcher = Stitcher()
    start = NOW - 20 * SECOND
    for offset, record in enumerate(split_request("req-0", "t0").values()):
        stitcher.add(record, offset, start)
    assert stitcher.advance(start) == []  # nobody knows yet which processes report in this fleet
    assert [d.closing for d in stitcher.sweep(NOW)] == [Closing.WAITED]
    second = split_request("req-1", "t1", at_ms=2000)
    later = second.pop("engine_d")
    for offset, record in enumerate(second.values(), 10):
        stitcher.add(record, offset, NOW + SECOND)
    assert stitcher.sweep(NOW + 5 * SECOND) == []  # D's engine has been sending spans, so it is waited for
    stitcher.add(later, 20, NOW + 6 * SECOND)
    assert [d.closing for d in stitcher.advance(NOW + 6 * SECOND)] == [Closing.COMPLETE]


def test_what_never_comes_is_not_waited_for_longer_than_the_engine_wait() -> None:
    stitcher = Stitcher()
    for offset, record in enumerate(split_request("req-0", "t0").values()):
        stitcher.add(record, offset, NOW - 20 * SECOND)
    stitcher.sweep(NOW)
    stitcher.add(exchange(Role.EDGE, 2000, 100, rid="req-1", trace="t1"), 10, NOW + SECOND)
    assert stitcher.sweep(NOW + 12 * SECOND) == []
    assert [d.closing for d in stitcher.sweep(NOW + 14 * SECOND)] == [Closing.WAITED]


def test_G01_a_ten_minute_stream_is_one_complete_request() -> None:
    edge = exchange(Role.EDGE, 0, 600_000, ttft_ms=300)
    p = exchange(Role.PREFILL, 10, 100, parent=edge, kv_out=kv("a"))
    d = exchange(Role.DECODE, 130, 599_000, parent=edge, kv_in=kv("a"), ttft_ms=100)
    stitcher = Stitcher()
    stitcher.add(p, 0, NOW)
    for second in range(1, 600):
        assert stitcher.sweep(NOW + second * SECOND) == []
    stitcher.add(d, 1, NOW + 600 * SECOND)
    stitcher.add(edge, 2, NOW + 600 * SECOND)
    decisions = stitcher.advance(NOW + 600 * SECOND)
    assert [d.closing for d in decisions] == [Closing.COMPLETE]
    assert shape(d.group for d in decisions) == [["decode:proxy", "edge:proxy", "prefill:proxy"]]


def test_late_evidence_makes_a_new_version_of_the_same_row() -> None:
    stitcher = Stitcher()
    records = split_request()
    late = records.pop("engine_d")
    for offset, record in enumerate(records.values()):
        stitcher.add(record, offset, NOW)
    first = stitcher.sweep(NOW + 20 * SECOND)
    identity, version = first[0].group.identity, first[0].group.version
    stitcher.add(late, 9, NOW + 30 * SECOND)
    again = stitcher.sweep(NOW + 40 * SECOND)
    assert [d.closing for d in again] == [Closing.LATE]
    assert again[0].group.identity == identity
    assert again[0].group.version == version + 1
    assert stitcher.sweep(NOW + 50 * SECOND) == []


def test_a_row_that_is_out_keeps_its_identity_when_its_edge_comes_late() -> None:
    stitcher = Stitcher()
    records = split_request()
    edge = records.pop("edge")
    for offset, record in enumerate(records.values()):
        stitcher.add(record, offset, NOW)
    out = stitcher.sweep(NOW + 20 * SECOND)
    identities = {d.group.identity for d in out}
    stitcher.add(edge, 9, NOW + 25 * SECOND)
    again = stitcher.sweep(NOW + 40 * SECOND)
    assert len(again) == 1
    assert again[0].group.identity in identities
    assert again[0].group.edge is not None


def test_G12_the_same_span_again_changes_nothing_and_another_content_replaces() -> None:
    stitcher = Stitcher()
    edge = exchange(Role.EDGE, 0, 1000, ttft_ms=300)
    stitcher.add(edge, 0, NOW)
    stitcher.add(edge, 1, NOW)
    assert len(stitcher) == 1
    assert stitcher.stats.updates == 0
    stitcher.add(replace(edge, duration_ns=2_000_000_000), 2, NOW)
    assert stitcher.stats.updates == 1
    (group,) = run([], stitcher)
    assert group.edge is not None
    assert isinstance(group.edge.record, Exchange)
    assert group.edge.record.duration_ns == 2_000_000_000


@pytest.mark.parametrize("most", [1, 7, 1000])
def test_sweep_in_slices_decides_what_a_whole_one_decides(most: int) -> None:
    def filled() -> Stitcher:
        stitcher = Stitcher()
        for n in range(200):
            stitcher.add(exchange(Role.PREFILL, n, 10, rid=f"r{n}", trace=f"t{n}"), n, NOW)
        return stitcher

    def offsets(decisions: Iterable[Decision]) -> set[int]:
        return {decision.group.first_offset for decision in decisions}

    later = NOW + 3600 * SECOND
    whole, sliced = filled(), filled()
    expected = offsets(whole.sweep(later))
    assert len(expected) == 200
    found: set[int] = set()
    for call in range(1000):
        decisions = sliced.sweep(later, most)
        assert len(decisions) <= most
        found |= offsets(decisions)
        if call == 0 and most < 200:
            assert sliced.sweeping
            late = exchange(Role.PREFILL, 999, 10, rid="late", trace="late")
            sliced.add(late, 999, later)
        if not sliced.sweeping:
            break
    assert found == expected
    assert len(sliced) == len(whole) + (most < 200)


def test_sweep_of_many_undecided_requests_stops_in_between() -> None:
    stitcher = Stitcher()
    for n in range(200):
        stitcher.add(exchange(Role.PREFILL, n, 10, rid=f"r{n}", trace=f"t{n}"), n, NOW)
    assert stitcher.sweep(NOW, 2) == []
    assert stitcher.sweeping, "SCANNED_EACH bounds what one call checks"
    while stitcher.sweeping:
        assert stitcher.sweep(NOW, 2) == []


def test_G14_memory_is_bounded_and_every_eviction_has_its_reason() -> None:
    stitcher = Stitcher(StitchSettings(max_groups=100, max_links=50))
    for n in range(300):
        stitcher.add(exchange(Role.PREFILL, n, 10, rid=f"r{n}", trace=f"t{n}"), n, NOW)
        stitcher.link(f"s{n}", "p", NOW)
    decisions = stitcher.sweep(NOW)
    assert len(decisions) == 200
    assert {d.closing for d in decisions} == {Closing.EVICTED}
    assert len(stitcher) == 100
    assert stitcher.low_water() == 200
    assert len(stitcher._joins._links) == 50


def test_everything_is_forgotten_in_the_end() -> None:
    stitcher = Stitcher()
    run([r for n in range(20) for r in split_request(f"r{n}", f"t{n}", at_ms=n * 10).values()], stitcher)
    assert len(stitcher) == 0
    assert not any(
        (
            stitcher._joins._by_span,
            stitcher._joins._waiting,
            stitcher._joins._by_key,
            stitcher._joins._published,
            stitcher._joins._reading,
        )
    )


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 5000), st.sampled_from(["keep", "p", "d", "pd"]), st.booleans(), st.integers(-2000, 2000)),
        min_size=1,
        max_size=8,
    ),
    st.randoms(use_true_random=False),
)
def test_nothing_is_ever_joined_wrongly(requests: list[tuple[int, str, bool, int]], rng: random.Random) -> None:
    """Two requests are never joined into one.

    Contexts are lost, proxies are missing and clocks are offset in any mix. Ids are distinct, so every record finds its
    request.
    """
    records: list[Record] = []
    for n, (at, lost, proxies, skew_ms) in enumerate(requests):
        r = split_request(f"req-{n}", f"t{n}", at_ms=at, host_d=f"d{n}")
        for side in ("p", "d"):
            if side in lost:
                r[side] = cut(r[side], f"{side}{n}")
                parent = r[side].ids
                r[f"engine_{side}"] = replace(
                    r[f"engine_{side}"],
                    ids=SpanIds(trace_id=parent.trace_id, span_id=r[f"engine_{side}"].ids.span_id, parent_span_id=parent.span_id),
                )
        d, engine_d = r["d"], r["engine_d"]
        assert isinstance(d, Exchange)
        assert isinstance(engine_d, EngineRequest)
        r["d"] = replace(d, arrival_unix_ns=d.arrival_unix_ns + skew_ms * MS)
        shifted = engine_d.start_unix_ns + skew_ms * MS
        r["engine_d"] = replace(engine_d, start_unix_ns=shifted, end_unix_ns=shifted + 850 * MS)
        if not proxies:
            for side in ("p", "d"):
                del r[side]
                parent_ids = r["edge"].ids
                ids = SpanIds(
                    trace_id=parent_ids.trace_id, span_id=r[f"engine_{side}"].ids.span_id, parent_span_id=parent_ids.span_id
                )
                r[f"engine_{side}"] = replace(r[f"engine_{side}"], ids=ids)
                if side in lost:
                    r[f"engine_{side}"] = cut(r[f"engine_{side}"], f"{side}{n}")
        records.extend(r.values())
    rng.shuffle(records)
    groups = run(records)
    assert len(groups) == len(requests)
    for group in groups:
        assert len({k for e in group.evidence for k in e.keys}) == 1
        assert {e.role for e in group.evidence} == {Role.EDGE, Role.PREFILL, Role.DECODE}


def test_a_context_that_is_still_to_come_is_waited_for_and_says_how_it_was_joined() -> None:
    records = split_request()
    for order in (("engine_p", "engine_d", "edge", "p", "d"), ("edge", "engine_d", "engine_p", "d", "p")):
        (group,) = run(records[name] for name in order)
        assert {e.label: e.how.value for e in group.evidence if e.how.value != "opened"} == {
            "prefill:proxy": "ancestor",
            "decode:proxy": "ancestor",
            "prefill:otlp": "ancestor",
            "decode:otlp": "ancestor",
        }


def test_an_update_is_found_by_what_it_carries_now() -> None:
    d = exchange(Role.DECODE, 130, 800, rid=None, trace="d", ttft_ms=100, kv_in=kv("a"))
    stitcher = Stitcher()
    stitcher.add(d, 0, NOW)
    stitcher.add(replace(d, kv_in=None), 1, NOW)
    stitcher.add(exchange(Role.PREFILL, 10, 100, rid=None, trace="p", kv_out=kv("a")), 2, NOW)
    assert shape(run([], stitcher)) == [["decode:proxy"], ["prefill:proxy"]]
    stitcher = Stitcher()
    stitcher.add(replace(d, kv_in=None), 0, NOW)
    stitcher.add(d, 1, NOW)
    stitcher.add(exchange(Role.PREFILL, 10, 100, rid=None, trace="p", kv_out=kv("a")), 2, NOW)
    assert shape(run([], stitcher)) == [["decode:proxy", "prefill:proxy"]]


@pytest.mark.parametrize("by", ["connector", "request_key"])
def test_late_evidence_without_context_joins_a_decided_request(by: str) -> None:
    records = split_request()
    d = cut(records["d"], "xd")
    assert isinstance(d, Exchange)
    if by == "request_key":
        d = replace(d, kv_in=None)
    stitcher = Stitcher()
    for name in ("edge", "p"):
        stitcher.add(records[name], 0, NOW)
    (first,) = (x for s in range(15) for x in stitcher.sweep(NOW + s * SECOND))
    stitcher.add(d, 1, NOW + 20 * SECOND)
    (again,) = (x for s in range(20, 100) for x in stitcher.sweep(NOW + s * SECOND))
    assert (again.closing, again.group.identity, again.group.version) == (Closing.LATE, first.group.identity, 2)
    assert shape([again.group]) == [["decode:proxy", "edge:proxy", "prefill:proxy"]]


def test_evidence_of_the_very_instant_of_a_decision_is_not_lost() -> None:
    records = split_request()
    late = records.pop("engine_d")
    stitcher = Stitcher()
    for record in records.values():
        stitcher.add(record, 0, NOW)
    stitcher.sweep(NOW + 20 * SECOND)
    stitcher.add(late, 1, NOW + 20 * SECOND)
    assert [d.closing for d in stitcher.sweep(NOW + 30 * SECOND)] == [Closing.LATE]


def test_one_id_on_everything_is_not_joined_by_and_costs_no_more() -> None:
    stitcher = Stitcher()
    for n in range(500):
        stitcher.add(exchange(Role.EDGE, n, 100, rid="constant", trace=f"t{n}"), n, NOW)
    groups = run([], stitcher)
    assert len(groups) == 500
    assert {f.kind for g in groups[100:] for f in g.findings} == {"request_id_reused"}
    assert len(stitcher) == len(stitcher._joins._by_key) == 0


def test_with_clocks_that_nothing_relates_a_join_by_id_says_so() -> None:
    edge = exchange(Role.EDGE, 0, 1000, rid="same", trace="e", ttft_ms=300)
    other_host = exchange(Role.PREFILL, 5000, 100, rid="same", trace="p", host="h2")
    (group,) = run([edge, other_host])
    assert [f.kind for f in group.findings] == ["clocks_unknown"]
    third = exchange(Role.PREFILL, 9000, 100, rid="same", trace="p3", host="h2")
    groups = run([edge, other_host, third])
    assert shape(groups) == [["edge:proxy"], ["prefill:proxy"], ["prefill:proxy"]]
    assert {f.kind for g in groups for f in g.findings} == {"ambiguous_request_id"}
