"""Repeated KV loads: in the same engine, or in another one after a router's retry."""

from __future__ import annotations

from typing import Any

import pytest

from builders.plugin import altered, fact, fetch, publish, times
from builders.records import MS, exchange, kv, split_request
from builders.stitched import StitchedRows, stitched
from handrail.records import FetchEffect, LogKind, Outcome, Role

RAW_D = "cmpl-req-a-0-0000dddd"
FAILED: dict[str, Any] = {"done_ms": None, "failure": "transfer_failed"}


def outcomes(found: StitchedRows) -> list[str]:
    return [each.outcome for each in found.fetches]


def test_a_load_that_failed_and_was_made_again_was_retried_and_the_request_says_so() -> None:
    seen = split_request()
    failed = fetch(134, parent=seen["d"], noticed_ms=20, **FAILED)
    found = stitched([*seen.values(), failed, fetch(160, parent=seen["d"])])
    assert outcomes(found) == ["retried", "ok"]
    row = found.row("req-a")
    assert (row.kv_outcome, row.kv_reason, row.outcome) == ("retried", "transfer_failed", "ok")
    assert row.kv_lost_ns == 20 * MS
    assert row.kv_bytes == 64 * 32768  # the bytes of the load that went well
    assert row.kv_evidence == (
        "decode:plugin load failed: transfer_failed",
        "decode:plugin loaded and seen by the scheduler",
    )
    assert [each.tainted for each in found.fetches] == [False, False]


def test_a_load_whose_second_try_failed_too_was_not_retried_well() -> None:
    seen = split_request()
    d = altered(seen["d"], outcome=Outcome.STREAM_ERROR, ttft_token_ns=None)
    one = fetch(134, parent=d, noticed_ms=20, **FAILED)
    two = fetch(160, parent=d, noticed_ms=20, effect=FetchEffect.FAILED, **FAILED)
    found = stitched([seen["edge"], seen["p"], d, one, two])
    assert outcomes(found) == ["failed", "failed"]
    assert found.row("req-a").kv_outcome == "failed"


def second_decode(first_d: Outcome, *more: Any) -> StitchedRows:
    """Return records in which the router calls D1 first and D2 answers.

    Both load what one P kept.
    """
    seen = split_request()
    key = kv("cmpl-req-a-0-0000aaaa")
    d1 = exchange(
        Role.DECODE, 112, 10, instance="d1:8000", parent=seen["edge"], outcome=first_d, ttft_ms=None, output_tokens=0, kv_in=key
    )
    load1 = fetch(
        113, rid="cmpl-req-a-0-11111111", parent=d1, instance="d1:8000", started_ms=1, posted_ms=None, noticed_ms=5,
        engine_id="E1", **FAILED,
    )  # fmt: skip
    return stitched([*seen.values(), d1, load1, publish(105, parent=seen["p"]), fetch(134, parent=seen["d"]), *more])


@pytest.mark.parametrize("first", [Outcome.STREAM_ERROR, Outcome.HTTP_ERROR])
def test_a_router_that_chose_another_decode_after_the_first_failed_to_load(first: Outcome) -> None:
    found = second_decode(first)
    assert outcomes(found) == ["retried", "ok"]
    row = found.row("req-a")
    assert (row.kv_outcome, row.kv_reason, row.decode_instance) == ("retried", "transfer_failed", "decode:8000")


def test_what_the_first_decode_logged_is_not_about_the_load_of_the_second() -> None:
    line = fact(LogKind.FETCH_FAILED, Role.DECODE, 115, "cmpl-req-a-0-11111111", instance="d1:8000", failure="transfer_failed")
    found = second_decode(Outcome.STREAM_ERROR, line)
    assert outcomes(found) == ["retried", "ok"]
    assert any("decode:log fetch_failed" in word for word in found.fetches[0].evidence)


def test_a_line_about_the_first_of_two_loads_of_one_request_is_not_about_the_second() -> None:
    seen = split_request()
    failed = fetch(134, parent=seen["d"], noticed_ms=20, **FAILED)
    line = fact(LogKind.FETCH_FAILED, Role.DECODE, 150, RAW_D, failure="transfer_failed")
    found = stitched([*seen.values(), failed, fetch(1160, parent=seen["d"]), line])
    assert outcomes(found) == ["retried", "ok"]


def test_several_prompts_of_one_request_load_side_by_side_and_none_is_another_try() -> None:
    seen = split_request()
    one = fetch(134, parent=seen["d"], noticed_ms=20, effect=FetchEffect.FAILED, **FAILED)
    two = fetch(135, rid="cmpl-req-a-1-0000dddd", peer="cmpl-req-a-1-0000aaaa", parent=seen["d"])
    kept = [publish(105, parent=seen["p"]), publish(105, rid="cmpl-req-a-1-0000aaaa", parent=seen["p"])]
    assert outcomes(stitched([*seen.values(), *kept, one, two])) == ["failed", "ok"]


def test_a_load_after_the_first_token_is_no_part_of_the_time_to_it() -> None:
    """A cache connector loads again what a preemption threw away."""
    seen = split_request()
    at_d = times(Role.DECODE, 133, 110, 150, 850, rid=RAW_D, parent=seen["d"], preemptions=1, preempted_ns=50 * MS)
    again = fetch(500, parent=seen["d"], started_ms=1, posted_ms=None, done_ms=9, noticed_ms=10)
    first = fetch(134, parent=seen["d"])
    found = stitched([*seen.values(), at_d, first, again])
    alone = stitched([*seen.values(), at_d, first])
    assert found.row("req-a").phases == alone.row("req-a").phases
    assert outcomes(found) == ["ok", "ok"]
    assert found.row("req-a").kv_outcome == "ok"


def test_an_engine_that_was_lost_while_it_loaded_and_another_that_answered() -> None:
    seen = split_request()
    key = kv("cmpl-req-a-0-0000aaaa")
    d1 = exchange(
        Role.DECODE, 112, 10, instance="d1:8000", parent=seen["edge"], outcome=Outcome.UPSTREAM_DISCONNECT, ttft_ms=None,
        output_tokens=0, kv_in=key,
    )  # fmt: skip
    lost = fetch(
        113, rid="cmpl-req-a-0-11111111", parent=d1, instance="d1:8000", started_ms=1, posted_ms=2, done_ms=None, noticed_ms=None,
        request_status="engine_lost", ended_ns=8 * MS,
    )  # fmt: skip
    found = stitched([*seen.values(), d1, lost, publish(105, parent=seen["p"]), fetch(134, parent=seen["d"])])
    assert outcomes(found) == ["retried", "ok"]
    assert found.row("req-a").kv_reason == "engine_lost"
