"""Reported hand-off faults, from the evidence that reaches the collector.

Each request has one outcome, and the outcome names its source.
"""

from __future__ import annotations

import base64
import json
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from builders.plugin import altered, fact, facts_of, fetch, happened, publish, times
from builders.records import EPOCH, MS, engine, exchange, kv, process, split_request
from builders.stitched import stitched
from handrail.records import FetchEffect, LogFact, LogKind, Outcome, ProcessEventKind, Role, Source
from handrail.wire.engines.vllm import NEVER_SCHEDULED
from handrail_collector.stitch.stitcher import SECOND
from handrail_sidecar.engine_logs.aggregate import Folder
from handrail_sidecar.engine_logs.line_header import read_head
from handrail_sidecar.engine_logs.lines import recognise
from handrail_sidecar.proxy.response_reader import End, ResponseReader

_DATA = Path(__file__).parents[2] / "data/replay"
S = 1000  # ms


def case(name: str) -> Any:
    return json.loads((_DATA / "join" / f"{name}.json").read_text(encoding="utf-8"))


def of_log(name: str, role: Role = Role.PREFILL) -> list[LogFact]:
    """Return the facts of a recorded log, as the log source makes them."""
    near = int(datetime(2026, 8, 16, 9, tzinfo=timezone.utc).timestamp()) * 10**9
    folder = Folder(process(role), Source.LOG, None)
    for text in (_DATA / "logs" / name).read_text(encoding="utf-8").splitlines():
        head = read_head(text, near, timezone.utc)
        line = recognise(head.message)
        if line is None:
            folder.continued(head)
        else:
            folder.add(head, line, near)
    return list(folder.take(near, all_of_them=True))


def request(number: int, raw_p: str, start_ns: int) -> list[Any]:
    """Return a split request that P calls ``raw_p``; its proxies saw nothing wrong."""
    rid, at = f"req-{number}", (start_ns - EPOCH) / MS
    seen = split_request(rid, f"t{number}", at)
    p, d = seen["p"], seen["d"]
    key = kv(raw_p)
    return [
        seen["edge"],
        altered(p, kv_out=key),
        altered(d, kv_in=key),
        times(Role.PREFILL, at + 12, 20, 92, 93, rid=raw_p, parent=p, trace=f"t{number}"),
    ]


def test_A01_eight_stale_reads_of_forty_two_requests_all_with_200() -> None:
    facts = of_log("A01_prefill_expiry.log")
    ids = sorted({f.request_id for f in facts if f.request_id})
    first = min(f.at_unix_ns for f in facts)
    records: list[Any] = [
        one for n in range(42) for one in request(n, ids[n] if n < len(ids) else f"cmpl-well-{n}-0-0000aaaa", first - 30 * SECOND)
    ]
    found = stitched([*records, *facts])
    assert len(found.rows) == 42
    assert all(row.status == 200 for row in found.rows)
    stale = [row for row in found.rows if row.kv_outcome == "stale_read"]
    assert len(stale) == len(ids) == 8
    assert {row.outcome for row in stale} == {"tainted"}
    assert all("stale_read: D read blocks 21.0 s after P released them" in row.findings for row in stale)
    assert sum(row.outcome == "ok" for row in found.rows) == 34
    assert len(stale[0].kv_evidence) == 1  # eight ranks reported it, for one request


def test_A01_the_plugins_word_for_it_needs_no_log() -> None:
    seen = split_request()
    late = publish(105, parent=seen["p"], read_ms=None, freed_ms=30 * S, expired_ms=30 * S, late_read_ms=51 * S)
    row = stitched([*seen.values(), late]).row("req-a")
    assert (row.kv_outcome, row.outcome) == ("stale_read", "tainted")
    (one,) = stitched([*seen.values(), late]).fetches
    assert (one.late_ns, one.tainted) == (21 * SECOND, True)


def test_A03_a_reference_used_again_is_another_requests_kv_and_not_one_trace() -> None:
    first = split_request("req-a", "t1", 0)
    again = split_request("req-c", "t3", 3000)
    stolen = altered(again["d"], kv_in=kv("cmpl-req-a-0-0000aaaa"))
    load = fetch(3134, rid="cmpl-req-c-0-0000dddd", peer="cmpl-req-a-0-0000aaaa", trace="t3", parent=stolen)
    own = fetch(134, parent=first["d"])
    kept = publish(105, parent=first["p"])
    found = stitched([*first.values(), own, kept, again["edge"], again["p"], stolen, load])
    assert len(found.rows) == 2
    wrong = found.row("req-c")
    assert (wrong.kv_outcome, wrong.outcome) == ("wrong_request", "tainted")
    assert any(f.startswith("wrong_request: ") for f in wrong.findings)
    assert (found.row("req-a").kv_outcome, found.row("req-a").outcome) == ("ok", "ok")


def test_A08_the_wait_is_reported_as_over_the_lease_though_clocks_differ() -> None:
    given = case("A08_lease_race")
    skew = given["clock_offset_D_s"] * S
    lease, wait = given["lease_s"], given["read_start"] - given["prefill_end"]
    edge = exchange(Role.EDGE, -500, 140 * S, ttft_ms=500 + given["first_token"] * S, host="he")
    p = exchange(Role.PREFILL, -400, 400, parent=edge, host="hp", kv_out=kv("cmpl-req-a-0-0000aaaa"))
    d_at = given["queue_start"] * S + skew
    d = exchange(Role.DECODE, d_at, 139 * S, parent=edge, host="hd", ttft_ms=131_300, kv_in=kv("cmpl-req-a-0-0000aaaa"))
    load = fetch(
        d_at + 1, parent=d, host="hd", started_ms=wait * S - 60, posted_ms=wait * S - 51, done_ms=131_200, noticed_ms=131_250
    )
    gone = fact(LogKind.EXPIRED, Role.PREFILL, lease * S, "cmpl-req-a-0-0000aaaa", host="hp", numbers=(("timeout_s", 120.0),))
    one_call = split_request("req-b", "t2", 500_000, "hp", "hd")  # a short request between the same hosts bounds their clocks
    one_call["edge"] = altered(one_call["edge"], process=process(Role.EDGE, host="he"))
    one_call["d"] = altered(one_call["d"], arrival_unix_ns=EPOCH + round((500_130 + skew) * MS))
    calls = [one_call[name] for name in ("edge", "p", "d")]
    row = stitched([*calls, edge, p, d, load, gone]).row("req-a")
    assert row.kv_outcome == "stale_read"
    (output,) = [f for f in row.findings if f.startswith("handoff_over_lease")]
    (one,) = [f for f in stitched([*calls, edge, p, d, load, gone]).fetches if f.client_request_id == "req-a"]
    assert one.held_ns is not None
    assert abs(one.held_ns / SECOND - given["expected"]["handoff_wait_s"]) < 1, output
    assert one.lease_ns == 120 * SECOND


def test_A08_kv_older_than_most_of_its_lease_is_reported_before_it_expires() -> None:
    seen = split_request()
    load = fetch(134, parent=seen["d"], started_ms=97 * S, posted_ms=97 * S, done_ms=97 * S + 50, noticed_ms=97 * S + 60)
    kept = publish(105, parent=seen["p"], lease_ms=120 * S, read_ms=97 * S, freed_ms=97 * S)
    row = stitched([*seen.values(), load, kept]).row("req-a")
    assert row.kv_outcome == "ok"
    assert [f.partition(":")[0] for f in row.findings] == ["handoff_near_lease"]


def test_A10_recompute_is_no_success_of_the_fetch_though_the_client_has_its_answer() -> None:
    seen = split_request()
    load = fetch(
        134, parent=seen["d"], done_ms=None, noticed_ms=40, failure="transfer_failed", policy="recompute",
        effect=FetchEffect.RECOMPUTED, bytes_moved=None,
    )  # fmt: skip
    at_d = times(Role.DECODE, 133, 50, 150, 850, rid="cmpl-req-a-0-0000dddd", parent=seen["d"])
    found = stitched([*seen.values(), load, at_d])
    row = found.row("req-a")
    assert (row.kv_outcome, row.kv_reason, row.outcome) == ("recomputed", "transfer_failed", "ok")
    assert row.kv_lost_ns == 149 * MS  # until its first token: D computed what it failed to load
    line = fact(LogKind.RECOMPUTED, Role.DECODE, 180, "cmpl-req-a-0-0000dddd")
    at_d_only = stitched([*seen.values(), at_d, line]).row("req-a")
    assert at_d_only.kv_outcome == "recomputed"


def test_A11_a_request_parked_after_its_failure_is_shown_as_open() -> None:
    given = case("A11_parked_after_recompute")
    failed_ms = given["R1"]["kv_failure"] * S
    load = fetch(
        1, rid="cmpl-r1-0-0000dddd", done_ms=None, noticed_ms=failed_ms, failure="transfer_failed", policy="recompute",
        effect=FetchEffect.RECOMPUTED, bytes_moved=None,
    )  # fmt: skip
    parked = times(Role.DECODE, 0, None, None, None, rid="cmpl-r1-0-0000dddd", provisional=True, seen_ns=360 * SECOND)
    (row,) = stitched([load, parked], still_open=True).rows
    assert row.version == 0
    assert row.kv_outcome == "recomputed"
    assert row.duration_ns == 360 * SECOND
    assert any(f.startswith("waiting_after_failure: 359.8 s") for f in row.findings)


def test_A16_after_the_link_has_failed_no_answer_without_a_loads_good_word_is_trusted() -> None:
    seen, later = split_request("req-a", "t1", 0), split_request("req-b", "t2", 60_000)
    broken = [
        fact(LogKind.LINK_ERROR, Role.DECODE, at, None, reason="NIXL_ERR_REMOTE_DISCONNECT") for at in (30_000, 60_200, 60_400)
    ]
    found = stitched([*seen.values(), *later.values(), *broken])
    assert (found.row("req-a").outcome, found.row("req-b").outcome) == ("ok", "tainted")
    assert (found.row("req-b").kv_outcome, found.row("req-b").kv_reason) == ("unknown", "link_failing")
    assert "3 times" in found.row("req-b").kv_evidence[0]


def test_A16_the_resulting_stream_is_tainted_and_its_empty_answer_is_reported() -> None:
    """A stream after a failed load is tainted.

    The proxy reads the recorded stream of the case, between an edge and a D whose link fails since t0.
    """
    name = _DATA / "sse/A16_reasoning_garbage_empty_content.sse.json"
    stream = json.loads(name.read_text(encoding="utf-8"))
    reader = ResponseReader(
        "chat", choices=1, status=200, content_type="text/event-stream", content_encoding=None, continuous_usage=None
    )
    for read in stream["reads"]:
        reader.feed(base64.b64decode(read["b64"]), round(read["t"] * SECOND))
    reader.finish(round((stream["reads"][-1]["t"] + 0.01) * SECOND), End.CLEAN)
    facts = reader.facts()
    seen = split_request("req-b", "t2", 60_000)
    reported_of = {
        "outcome": facts.outcome, "ttft_token_ns": facts.ttft_token_ns, "ttft_text_ns": facts.ttft_text_ns,
        "ttft_text_kind": facts.ttft_text_kind, "hints": facts.hints, "events": facts.events,
    }  # fmt: skip
    for door in ("edge", "d"):
        seen[door] = altered(seen[door], **reported_of)
    broken = [fact(LogKind.PEER_LOST, Role.DECODE, at, None, reason="NIXL_ERR_REMOTE_DISCONNECT") for at in (30_000, 60_200)]
    row = stitched([*seen.values(), *broken]).row("req-b")
    assert (row.status, row.outcome, row.kv_outcome, row.kv_reason) == (200, "tainted", "unknown", "link_failing")
    assert "reasoning_only" in row.hints


def test_A17_sixty_expiries_then_the_engine_dies_and_what_was_open_is_closed_as_lost() -> None:
    facts = of_log("A17_expiry_burst.log")
    expired = [f for f in facts if f.kind is LogKind.EXPIRED]
    assert len({f.request_id for f in expired}) == 60
    at = (max(f.at_unix_ns for f in facts) - EPOCH) / MS
    waiting = times(Role.PREFILL, at - 5000, 10, None, None, rid="cmpl-open-0-0000aaaa", provisional=True, seen_ns=4 * SECOND)
    dead = happened(ProcessEventKind.DEAD, Role.PREFILL, at + 1000, at_bound_ns=2 * SECOND)
    found = stitched([*facts, waiting, dead])
    (row,) = found.rows
    assert (row.outcome, row.error_type) == ("upstream_disconnect", "engine_lost")
    assert any(f.startswith("engine_lost: prefill:8000") for f in row.findings)


def test_A19_another_engine_at_the_address_is_reported_with_the_request_that_hangs() -> None:
    seen = split_request("req-a", "t1", 0)
    load = fetch(
        134, parent=seen["d"], done_ms=None, noticed_ms=None, provisional=True, seen_ns=85 * SECOND, ended_ns=None,
        bytes_moved=None,
    )  # fmt: skip
    replaced = [facts_of(Role.PREFILL, -60_000, engine_id="E1"), facts_of(Role.PREFILL, 40_000, engine_id="E2")]
    open_edge = {name: r for name, r in seen.items() if name in ("p", "engine_p")}
    at_d = times(
        Role.DECODE, 133, None, None, None, rid="cmpl-req-a-0-0000dddd", parent=seen["d"], provisional=True, seen_ns=85 * SECOND
    )
    found = stitched([*replaced, *open_edge.values(), load, at_d], still_open=True)
    (row,) = [r for r in found.rows if r.decode_instance]
    assert row.kv_outcome == "hung"
    joined = stitched([*replaced, *open_edge.values(), load, at_d]).rows
    (hung,) = [r for r in joined if r.decode_instance]
    assert any("E1 -> E2" in f for f in hung.findings)


def _a21(given: dict[str, Any]) -> list[Any]:
    p, d = given["spans"]
    edge = exchange(
        Role.EDGE, -10, (d["end_s"] + 0.02) * S, rid=given["id"], trace=given["id"],
        ttft_ms=(d["start_s"] + 0.1) * S if d["output_tokens"] else None,
        outcome=Outcome.CLIENT_DISCONNECT if "client_disconnect_s" in d else Outcome.OK,
    )  # fmt: skip
    failed = exchange(
        Role.PREFILL, p["start_s"] * S, (p["end_s"] - p["start_s"]) * S, rid=given["id"], parent=edge, inspected="none",
        outcome=Outcome.STREAM_ERROR, error_type=p["error"],
    )  # fmt: skip
    answered = exchange(
        Role.DECODE, d["start_s"] * S, (d["end_s"] - d["start_s"]) * S, rid=given["id"], parent=edge, inspected="none",
        ttft_ms=90 if d["output_tokens"] else None, output_tokens=d["output_tokens"],
        outcome=Outcome.CLIENT_DISCONNECT if "client_disconnect_s" in d else Outcome.OK,
    )  # fmt: skip
    return [edge, failed, answered]


def test_A21_a_prefill_that_failed_makes_the_answer_one_that_is_not_counted_as_good() -> None:
    first, second = case("A21_prefill_fails_decode_goes_on")["requests"]
    row = stitched(_a21(first)).row("r-1")
    assert (row.kv_outcome, row.kv_reason, row.outcome, row.status) == ("failed", "prefill_error", "tainted", 200)
    row = stitched(_a21(second)).row("r-2")
    assert (row.kv_outcome, row.kv_reason) == ("failed", "prefill_error")
    assert "prefill_error: the decode waited 299.98 s for a prefill that had failed" in row.findings


def test_A21_the_wait_for_a_failed_prefill_is_reported_while_it_lasts() -> None:
    _, failed, answered = _a21(case("A21_prefill_fails_decode_goes_on")["requests"][1])
    waits = times(
        Role.DECODE, 20, None, None, None, rid="cmpl-r-2-0-0000dddd", trace="r-2", provisional=True, seen_ns=100 * SECOND
    )
    edge_at = altered(failed, ids=altered(failed.ids, parent_span_id=""))
    parent = altered(waits, ids=altered(waits.ids, parent_span_id=failed.ids.span_id))
    del answered
    (row,) = stitched([edge_at, parent], still_open=True).rows
    assert row.version == 0
    assert "prefill_error: the decode waited 100.00 s for a prefill that had failed" in row.findings


def test_A23_a_cache_probe_is_no_retry_no_error_and_adds_no_tokens() -> None:
    given = case("A23_cache_probe_then_pd")
    probe, p, d = given["calls"]
    edge = exchange(Role.EDGE, 0, 3110, rid="r-1", ttft_ms=given["expected"]["ttft_s"] * S, output_tokens=120)
    legs = [
        exchange(
            Role.DECODE, probe["start_s"] * S, 30, rid="r-1", parent=edge, finish_reasons=("cache_threshold",), output_tokens=0
        ),
        exchange(Role.PREFILL, 30, 870, rid="r-1", parent=edge, kv_out=kv("cmpl-r-1-0-0000aaaa")),
        exchange(Role.DECODE, 900, 2200, rid="r-1", parent=edge, ttft_ms=50, output_tokens=120, kv_in=kv("cmpl-r-1-0-0000aaaa")),
    ]
    found = stitched([edge, *legs, fetch(901, rid="cmpl-r-1-0-0000dddd", peer="cmpl-r-1-0-0000aaaa", parent=legs[2])])
    (row,) = found.rows
    assert (row.outcome, row.output_tokens, row.ttft_token_ns) == ("ok", 120, 950 * MS)
    assert (row.kv_outcome, row.prefill_attempts, row.hints, row.findings) == ("ok", 1, ("cache_probe",), ())
    assert (p["role"], d["role"]) == ("prefill", "decode")


def test_A26_only_the_third_refusal_is_a_failed_fetch() -> None:
    assert [r["id"] for r in case("A26_three_refusals")["requests"]] == ["r-1", "r-2", "r-3"]
    refused = exchange(Role.EDGE, 0, 5, rid="r-1", trace="r1", status=500, outcome=Outcome.HTTP_ERROR, stream=False)
    edge = exchange(Role.EDGE, 100, 20, rid="r-2", trace="r2", outcome=Outcome.STREAM_ERROR)
    bare = exchange(
        Role.DECODE, 105, 3, rid="r-2", parent=edge, outcome=Outcome.STREAM_ERROR, error_type="no disaggregation parameters"
    )
    third = exchange(Role.EDGE, 200, 900, rid="r-3", trace="r3", outcome=Outcome.UPSTREAM_DISCONNECT)
    p = exchange(Role.PREFILL, 210, 400, rid="r-3", parent=third, kv_out=kv("cmpl-r-3-0-0000aaaa"))
    d = exchange(
        Role.DECODE, 630, 40, rid="r-3", parent=third, kv_in=kv("cmpl-r-3-0-0000aaaa"), outcome=Outcome.STREAM_ERROR,
        error_type="sequence not found",
    )  # fmt: skip
    found = stitched([refused, edge, bare, third, p, d])
    outcomes = {row.client_request_id: row.kv_outcome for row in found.rows}
    assert outcomes == {"r-1": None, "r-2": None, "r-3": "failed"}
    assert any(f.startswith("no_handoff_data") for f in found.row("r-2").findings)
    assert found.row("r-3").outcome == "upstream_disconnect"


@pytest.mark.parametrize(
    ("of_fetch", "outcome", "reason"),
    [
        ({"failure": "transfer_setup_failed", "effect": FetchEffect.FAILED}, "failed", "transfer_setup_failed"),
        ({"failure": "handshake_failed", "failure_error": "NIXL_ERR_TIMEOUT"}, "timed_out", "handshake_failed"),
        ({"noticed_ms": None, "request_status": "aborted", "ended_ns": 20 * MS}, "aborted", None),
        ({"noticed_ms": None, "provisional": True, "seen_ns": 61 * SECOND, "ended_ns": None}, "hung", None),
        ({"noticed_ms": None, "provisional": True, "seen_ns": 5 * SECOND, "ended_ns": None}, "unknown", "open"),
        ({"done_ms": 10, "failure": "notification_failed"}, "ok", None),
        ({"noticed_ms": None, "request_status": "engine_lost", "ended_ns": 20 * MS}, "failed", "engine_lost"),
        ({"noticed_ms": None, "request_status": "lost", "ended_ns": 20 * MS}, "unknown", "lost"),
        ({"tokens_wanted": 0, "noticed_ms": None}, "ok", "already_there"),
    ],
    ids=[
        "failed",
        "timed-out",
        "aborted",
        "hung",
        "young",
        "only-the-word-to-p-was-lost",
        "engine-lost",
        "end-not-heard",
        "already-there",
    ],
)  # fmt: skip
def test_each_outcome_by_the_readers_own_record(of_fetch: dict[str, Any], outcome: str, reason: str | None) -> None:
    seen = split_request()
    d = altered(seen["d"], outcome=Outcome.STREAM_ERROR, ttft_token_ns=None)
    load = fetch(134, parent=d, **({"done_ms": None} | of_fetch))
    kept = publish(105, parent=seen["p"], read_ms=None, freed_ms=None)
    row = stitched([seen["edge"], seen["p"], d, load, kept]).row("req-a")
    assert (row.kv_outcome, row.kv_reason) == (outcome, reason)
    assert row.kv_evidence
    assert row.kv_evidence[0].startswith("decode:plugin ")


@pytest.mark.parametrize(
    ("dropped", "known", "output"),
    [
        pytest.param(NEVER_SCHEDULED, True, None, id="what a failed load leaves behind"),
        pytest.param((*NEVER_SCHEDULED, "gen_ai.latency.e2e"), True, "gen_ai.latency.e2e", id="and what it does not"),
        pytest.param(NEVER_SCHEDULED, False, ", ".join(NEVER_SCHEDULED), id="nobody tells of the load"),
    ],
)
def test_C15_a_failed_fetch_is_one_fault_not_two(dropped: tuple[str, ...], known: bool, output: str | None) -> None:
    """A failed fetch is one fault.

    With policy ``fail`` on vLLM 0.32 the request ends before it is scheduled, so its span's queue time is minus the uptime.
    """
    seen = split_request()
    d = altered(seen["d"], outcome=Outcome.STREAM_ERROR, ttft_token_ns=None)
    load = fetch(134, parent=d, done_ms=None, failure="transfer_failed", effect=FetchEffect.FAILED)
    span = altered(
        engine(Role.DECODE, 131, 60, parent=d),
        outcome=Outcome.ABORTED,
        output_tokens=0,
        queue_ns=None,
        prefill_ns=None,
        ttft_ns=None,
        dropped_attributes=dropped,
    )
    row = stitched([seen["edge"], seen["p"], d, span, *([load] if known else [])]).row("req-a")
    assert row.kv_outcome == ("failed" if known else "unknown")
    assert [f for f in row.findings if f.startswith("bad_attribute")] == (
        [f"bad_attribute: decode sent absurd {output}"] if output else []
    )


def test_kv_that_nobody_read_until_its_lease_ended_has_expired() -> None:
    seen = split_request()
    kept = publish(105, parent=seen["p"], read_ms=None, freed_ms=30 * S, expired_ms=30 * S)
    gone = altered(seen["edge"], outcome=Outcome.CLIENT_DISCONNECT, ttft_token_ns=None)
    found = stitched([gone, seen["p"], kept])
    (row,) = found.rows
    assert (row.kv_outcome, row.outcome) == ("expired", "client_disconnect")
    assert found.fetches[0].outcome == "expired"


def test_engines_that_differ_in_what_they_hand_over_are_a_finding_of_the_request() -> None:
    seen = split_request()
    engine_facts = [
        facts_of(Role.PREFILL),
        facts_of(Role.DECODE, dtype="float16", block_size=32, model_revision="r2", kv_layout="NHD"),
    ]
    row = stitched([*engine_facts, *seen.values()]).row("req-a")
    assert [f for f in row.findings if f.startswith("kv_mismatch")] == [
        "kv_mismatch: model revision is r1 at P and r2 at D",
        "kv_mismatch: dtype is bfloat16 at P and float16 at D",
        "kv_mismatch: KV layout is HND at P and NHD at D",
        "kv_mismatch: block size is 16 at P and 32 at D",
    ]
