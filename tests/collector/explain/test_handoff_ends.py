"""Events after a hand-off's end do not decide its outcome.

Seen on the real pair.
"""

from __future__ import annotations

from typing import Any

import pytest

from builders.plugin import altered, fact, fetch, happened, publish, times
from builders.records import MS, split_request
from builders.stitched import stitched
from handrail.records import FetchEffect, LogKind, Outcome, ProcessEventKind, Role

RAW_D = "cmpl-req-a-0-0000dddd"
GIVEN_UP: dict[str, Any] = {"request_status": "aborted", "ended_ns": 20_000_000}


@pytest.mark.parametrize(
    ("of_fetch", "late_read_ms", "outcome"),
    [
        ({"done_ms": None, "noticed_ms": None}, None, "aborted"),
        ({"done_ms": 3800, "noticed_ms": 3801}, None, "aborted"),  # the transfer went on, and the scheduler saw its end
        ({"done_ms": 3800, "noticed_ms": 3801}, 3802, "aborted"),  # meanwhile P had freed the blocks on D's clean-up
        ({"done_ms": None, "noticed_ms": None, "failure": "handshake_failed"}, None, "aborted"),
        ({"done_ms": None, "noticed_ms": 19, "failure": "x", "effect": FetchEffect.RECOMPUTED}, None, "recomputed"),
    ],
    ids=["open", "done-later", "done-later-late-for-p", "failed-later", "left-after-the-failure"],
)
def test_a_request_given_up_while_its_load_was_open_is_aborted(
    of_fetch: dict[str, Any], late_read_ms: float | None, outcome: str
) -> None:
    seen = split_request()
    left = altered(seen["edge"], outcome=Outcome.CLIENT_DISCONNECT, ttft_token_ns=None)
    d = altered(seen["d"], outcome=Outcome.CLIENT_DISCONNECT, ttft_token_ns=None)
    load = fetch(134, parent=d, rid=RAW_D, **(of_fetch | GIVEN_UP))
    kept = publish(105, parent=seen["p"], read_ms=40, freed_ms=41, late_read_ms=late_read_ms)
    log_fact = fact(LogKind.HANDSHAKE_FAILED, Role.DECODE, 5100, RAW_D)
    row = stitched([left, seen["p"], d, load, kept, *([log_fact] if "failure" in of_fetch else [])]).row("req-a")
    assert row.kv_outcome == outcome
    assert row.kv_evidence


def test_the_end_of_ps_response_beside_d_is_not_on_the_path_and_the_rest_of_p_is() -> None:
    seen = split_request()
    p = altered(seen["p"], duration_ns=160 * MS)  # its end is reported 40 ms after D was called
    row = stitched([seen["edge"], p, seen["d"], seen["engine_p"], seen["engine_d"]]).row("req-a")
    phases = {phase.phase: phase for phase in row.phases if phase.process == "prefill"}
    assert (phases["prefill_queue"].duration_ns, phases["prefill_compute"].duration_ns) == (20 * MS, 60 * MS)
    assert phases["prefill_respond"].bound_ns >= 20 * MS
    assert "prefill_decode_overlap" not in row.findings
    assert sum(phase.duration_ns for phase in row.phases) == row.ttft_token_ns


@pytest.mark.parametrize(
    ("kinds", "reason"),
    [
        (["stopped"], "engine_stopped"),
        (["stopped", "restarted"], "engine_stopped"),
        (["dead", "stopped"], "engine_lost"),  # its workers ended cleanly, the engine did not
        (["restarted"], "engine_lost"),
    ],
)
def test_an_engine_that_shut_down_during_a_load_is_distinguished_from_one_that_died(kinds: list[str], reason: str) -> None:
    seen = split_request()
    d = altered(seen["d"], outcome=Outcome.UPSTREAM_DISCONNECT, ttft_token_ns=None)
    load = fetch(134, parent=d, done_ms=None, noticed_ms=None, ended_ns=20 * MS)
    events = [happened(ProcessEventKind(kind), Role.DECODE, 150 + at) for at, kind in enumerate(kinds)]
    row = stitched([seen["edge"], seen["p"], d, load, *events]).row("req-a")
    assert (row.kv_outcome, row.kv_reason) == ("failed", reason)
    word = {"stopped": "engine_stopped", "dead": "engine_lost", "restarted": "engine_restarted"}
    assert {finding.partition(":")[0] for finding in row.findings} >= {word[kind] for kind in kinds}


@pytest.mark.parametrize(
    ("status", "outcome"), [("engine_stopped", "upstream_disconnect"), ("aborted", "aborted"), ("stopped", "ok")]
)
def test_how_ps_answer_ended_is_not_how_the_request_did(status: str, outcome: str) -> None:
    """D's engine knows the outcome better than the proxy beside P.

    D's API server died with its exchange, and no edge has reported.
    """
    seen = split_request()
    at_d = times(Role.DECODE, 133, 110, 150, 850, rid=RAW_D, parent=seen["edge"], status=status)
    row = stitched([seen["p"], at_d, fetch(134, parent=seen["edge"]), publish(105, parent=seen["p"])]).rows[0]
    assert (row.scope, row.outcome, row.status) == ("engine", outcome, None)
    assert row.decode_instance is not None


@pytest.mark.parametrize(("died_ms", "reason"), [(150, "engine_lost"), (4_000, "transfer_setup_failed")], ids=["before", "after"])
def test_an_engine_that_dies_after_the_load_had_failed_is_not_why(died_ms: float, reason: str) -> None:
    seen = split_request()
    d = altered(seen["d"], outcome=Outcome.STREAM_ERROR, ttft_token_ns=None)
    load = fetch(134, parent=d, done_ms=None, noticed_ms=20, failure="transfer_setup_failed", effect=FetchEffect.FAILED)
    kept = publish(105, parent=seen["p"], read_ms=None, freed_ms=None, expired_ms=5_000)
    row = stitched([seen["edge"], seen["p"], d, load, kept, happened(ProcessEventKind.DEAD, Role.PREFILL, died_ms)]).row("req-a")
    assert (row.kv_outcome, row.kv_reason) == ("failed", reason)
