"""Failures in an engine's counters, which name no request.

A failure is attributed to a request only where no other one can be meant; otherwise it stays unexplained.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from builders.plugin import altered, fact, facts_of, fetch, publish
from builders.records import EPOCH, MS, engine, exchange, process, split_request
from builders.stitched import REPORTING
from handrail.records import FetchEffect, LogFact, LogKind, Outcome, Role
from handrail_collector.explain.request.counter_attribution import CounterAttribution, UnattributedFailures, unexplained_detail
from handrail_collector.explain.request.request_row import Fleet, explain_all
from handrail_collector.rows import RequestRow
from handrail_collector.stitch.engines import EngineRegistry
from handrail_collector.stitch.stitcher import SECOND, Stitcher
from handrail_sidecar.engine_metrics.failures import COMPUTED, counted_failures
from handrail_sidecar.engine_metrics.page import Key

NOW = EPOCH + 10 * SECOND


def counted(
    count: float = 1.0,
    *,
    role: Role = Role.DECODE,
    name: str = "kv_transfer_failures",
    at_ms: float = 0,
    computed: float | None = None,
) -> LogFact:
    """Return the record that the metrics source makes of two readings 5 s apart.

    ``computed``: the prompt tokens computed on the engine between them.
    """
    grown: dict[Key, float] = {(name, "0", "nixl"): count}
    if computed is not None:
        grown[COMPUTED[0], "0", COMPUTED[1]] = computed
    pages = {**grown, ("kv_expired_requests", "0", "nixl"): 0.0}
    from_ns = EPOCH + round(at_ms * MS)
    (made,) = counted_failures(process(role), grown, pages, from_ns, from_ns + 5 * SECOND)
    return made


@dataclass
class CountedCase:
    """One case of counted failures and its expected result."""

    rows: list[RequestRow] = field(default_factory=list)
    unexplained: list[UnattributedFailures] = field(default_factory=list)

    def row(self, client_id: str) -> RequestRow:
        (found,) = [row for row in self.rows if row.client_request_id == client_id]
        return found


def attribute(records: Iterable[Any], facts: Sequence[LogFact], engines: Sequence[Any] = ()) -> CountedCase:
    """Attribute counted failures to requests, as the pipeline does.

    The pipeline holds the facts of counters until the other evidence is there, attributes them, and makes the rows again.
    """
    stitcher, book, waiting = Stitcher(), EngineRegistry(), CounterAttribution(14 * SECOND)
    for one in engines:
        book.take(one)
    for offset, record in enumerate(records):
        stitcher.add(record, offset, NOW)
    for offset, one in enumerate(facts, 1000):
        assert waiting.take(one, offset, NOW)
        assert waiting.take(one, offset, NOW)  # reported twice, counted once
    counted_case, latest = CountedCase(), {}
    for second in range(60):
        now = NOW + second * SECOND
        for found in waiting.settle(stitcher.groups, book.ranks, now):
            if isinstance(found, UnattributedFailures):
                counted_case.unexplained.append(found)
            else:
                stitcher.attach(*found, now)
        for decision in stitcher.sweep(now):
            latest[id(decision.group)] = decision.group
    fleet = Fleet(REPORTING, book, stitcher.clocks)
    counted_case.rows = [row for g in latest.values() if g.merged_into is None and (row := explain_all(g, fleet).row) is not None]
    return counted_case


def failed_answer(seen: dict[str, Any]) -> list[Any]:
    return [
        altered(seen["edge"], outcome=Outcome.STREAM_ERROR, ttft_token_ns=None),
        seen["p"],
        altered(seen["d"], outcome=Outcome.STREAM_ERROR, ttft_token_ns=None),
    ]


def test_a_counted_failure_is_that_of_the_only_load_that_was_open() -> None:
    counted_case = attribute(failed_answer(split_request()), [counted()])
    row = counted_case.row("req-a")
    assert (row.kv_outcome, row.kv_reason, row.version) == ("failed", "counted_failure", 2)
    assert row.kv_evidence == ("decode:metrics 1 kv_transfer_failures counted while no other hand-off was open there",)
    assert ("decode:metrics", "only_one") in {(join.evidence, join.how) for join in row.joins}
    assert counted_case.unexplained == []


def test_without_the_counter_the_same_evidence_cannot_tell() -> None:
    assert attribute(failed_answer(split_request()), []).row("req-a").kv_outcome == "unknown"


@pytest.mark.parametrize(
    ("computed", "outcome", "of_request"),
    [(1000.0, "recomputed", "ok"), (1.0, "failed", "tainted"), (None, "unknown", "ok")],
    ids=["computed-the-prompt", "computed-nothing", "engine-does-not-say"],
)
def test_an_answer_all_the_same_is_judged_by_the_tokens_that_were_computed(
    computed: float | None, outcome: str, of_request: str
) -> None:
    seen = split_request()
    seen["d"] = altered(seen["d"], prompt_tokens=1024)
    row = attribute([seen["edge"], seen["p"], seen["d"]], [counted(computed=computed)]).row("req-a")
    assert (row.kv_outcome, row.kv_reason, row.outcome) == (outcome, "counted_failure", of_request)


def test_of_two_loads_that_were_open_the_counter_cannot_tell_which_and_says_so() -> None:
    counted_case = attribute([*failed_answer(split_request()), *failed_answer(split_request("req-b", "t2", 400))], [counted()])
    assert {row.kv_outcome for row in counted_case.rows} == {"unknown"}
    (one,) = counted_case.unexplained
    assert unexplained_detail(one) == (
        "decode counted 1 kv_transfer_failures within 5 s, while 2 hand-offs were open there, and no evidence "
        "says which of them these are"
    )


def test_a_request_seen_only_by_the_engines_own_span_may_be_meant_as_well() -> None:
    other = engine(Role.DECODE, 300, 400, rid="cmpl-req-z-0", trace="t9", ttft_ms=200)
    counted_case = attribute([*failed_answer(split_request()), other], [counted()])
    assert counted_case.row("req-a").kv_outcome == "unknown"
    assert [one.open for one in counted_case.unexplained] == [2]


def test_a_load_outside_the_two_readings_is_not_meant() -> None:
    counted_case = attribute([*failed_answer(split_request()), *failed_answer(split_request("req-b", "t2", 20_000))], [counted()])
    assert (counted_case.row("req-a").kv_outcome, counted_case.row("req-b").kv_outcome) == ("failed", "unknown")


def test_a_load_that_the_plugin_saw_go_well_is_not_meant() -> None:
    seen, other = split_request(), split_request("req-b", "t2", 400)
    well = [*other.values(), fetch(534, rid="cmpl-req-b-0-0000dddd", peer="cmpl-req-b-0-0000aaaa", trace="t2", parent=other["d"])]
    counted_case = attribute([*failed_answer(seen), *well], [counted()])
    assert (counted_case.row("req-a").kv_outcome, counted_case.row("req-b").kv_outcome) == ("failed", "ok")


def test_a_failure_that_is_known_explains_the_counter_and_nothing_is_concluded_from_it() -> None:
    seen, other = split_request(), split_request("req-b", "t2", 400)
    known = fetch(134, parent=seen["d"], done_ms=None, noticed_ms=20, failure="transfer_failed", effect=FetchEffect.FAILED)
    counted_case = attribute([*failed_answer(seen), known, *failed_answer(other)], [counted()])
    assert (counted_case.row("req-a").kv_reason, counted_case.row("req-b").kv_outcome) == ("transfer_failed", "unknown")
    assert counted_case.unexplained == []


def test_a_line_of_the_log_explains_it_as_well() -> None:
    line = fact(LogKind.FETCH_FAILED, Role.DECODE, 180, "cmpl-req-a-0-0000dddd", failure="transfer_failed")
    counted_case = attribute(
        [*failed_answer(split_request()), line, *failed_answer(split_request("req-b", "t2", 400))], [counted()]
    )
    assert (counted_case.row("req-a").kv_outcome, counted_case.row("req-b").kv_outcome) == ("failed", "unknown")
    assert counted_case.unexplained == []


def test_the_clean_up_of_a_request_that_was_given_up_may_fail_and_count() -> None:
    gone = split_request()
    left = [gone["p"], altered(gone["edge"], outcome=Outcome.CLIENT_DISCONNECT, ttft_token_ns=None)]
    left.append(altered(gone["d"], outcome=Outcome.CLIENT_DISCONNECT, ttft_token_ns=None))
    counted_case = attribute([*left, *failed_answer(split_request("req-b", "t2", 8_000))], [counted(at_ms=7_000)])
    assert counted_case.row("req-b").kv_outcome == "unknown"
    assert counted_case.unexplained == []


def test_more_failures_than_requests_that_failed_are_a_finding_where_the_ranks_are_known() -> None:
    seen = split_request()
    known = fetch(134, parent=seen["d"], done_ms=None, noticed_ms=20, failure="transfer_failed", effect=FetchEffect.FAILED)
    records = [*failed_answer(seen), known]
    assert attribute(records, [counted(8)]).unexplained == []  # it is unknown how many workers count the same failure
    assert attribute(records, [counted(8)], [facts_of(Role.DECODE, tp_size=8)]).unexplained == []
    (one,) = attribute(records, [counted(8)], [facts_of(Role.DECODE, tp_size=2)]).unexplained
    assert (one.explained, one.fact.lines) == (1, 8)
    assert "more than the 1 failed requests explain" in unexplained_detail(one)


def test_failures_while_nothing_was_open_are_a_finding() -> None:
    (one,) = attribute([], [counted(3)]).unexplained
    assert unexplained_detail(one).endswith("while no known hand-off was open there")


def test_an_expiry_that_p_counted_is_that_of_the_only_kv_that_was_kept() -> None:
    seen = split_request()
    kept = publish(105, parent=seen["p"], read_ms=None, freed_ms=30_000)
    left = [seen["p"], altered(seen["edge"], outcome=Outcome.CLIENT_DISCONNECT, ttft_token_ns=None), kept]
    counted_case = attribute(left, [counted(role=Role.PREFILL, name="kv_expired_requests", at_ms=28_000)])
    row = counted_case.row("req-a")
    assert row.kv_outcome == "expired"
    assert row.kv_evidence == ("prefill:metrics 1 kv_expired_requests counted while no other hand-off was open there",)


def test_A04_what_is_counted_with_expiry_in_it_says_so() -> None:
    grown = {("kv_transfer_failures", "0", "nixl"): 1.0}
    (mixed,) = counted_failures(process(Role.DECODE), grown, grown, EPOCH, EPOCH + 5 * SECOND)
    (row,) = attribute(failed_answer(split_request()), [mixed]).rows
    assert row.kv_evidence[0].endswith("open there, including expiry")
    pages = {**grown, ("kv_expired_requests", "0", "nixl"): 0.0}
    (apart,) = counted_failures(process(Role.DECODE), grown, pages, EPOCH, EPOCH + 5 * SECOND)
    assert ("counts", "transport_and_expiry") not in apart.words


def test_a_request_that_reads_nothing_is_not_counted() -> None:
    edge = exchange(Role.EDGE, 0, 900, rid="req-z", trace="t9", ttft_ms=300, outcome=Outcome.STREAM_ERROR)
    local = exchange(Role.DECODE, 10, 800, rid="req-z", trace="t9", parent=edge, outcome=Outcome.STREAM_ERROR)
    counted_case = attribute([edge, local], [counted()])
    assert counted_case.row("req-z").kv_outcome is None
    assert [one.open for one in counted_case.unexplained] == [0]
