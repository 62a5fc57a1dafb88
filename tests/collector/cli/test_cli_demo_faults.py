"""The demo's report on a fault.

The report names the requests that the fault struck.
It shows Handrail's phases of those requests and of the others, beside the true phases.
"""

from __future__ import annotations

from dataclasses import replace
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from builders.request_rows import MS, phase, request_row
from handrail_cli.errors import CliError
from handrail_collector.rows import RequestRow
from handrail_sim.demo.faults import checked, plain, render, struck
from handrail_sim.emulator.truth import FetchTruth, RequestTruth, TrueOutcome, TruePhase


def truth(number: int, prefill: str, decode: str = "d0", **changes: Any) -> RequestTruth:
    made = RequestTruth(
        index=number,
        request_id=f"demo-{number}",
        arrival_ns=0,
        prompt_tokens=100,
        answer_tokens=5,
        cached_tokens=0,
        kv_bytes=1,
        prefill_host=prefill,
        decode_host=decode,
        outcome=TrueOutcome.OK,
        fetch=FetchTruth.OK,
        ttft_ns=100 * MS,
        total_ns=200 * MS,
        phases={
            TruePhase.PREFILL_COMPUTE: 40 * MS,
            TruePhase.KV_TRANSFER: 50 * MS,
            TruePhase.ROUTER: 4 * MS,
            TruePhase.HOPS: 6 * MS,
        },
        gaps_ns=(),
        preemptions=0,
    )
    return replace(made, **changes)


def row(number: int, unattributed_ms: int) -> RequestRow:
    phases = (phase("prefill_compute", 40, "prefill"), phase("unattributed", unattributed_ms, "decode"))
    return request_row(phases, client_request_id=f"demo-{number}")


TRUTHS = [truth(0, "p0"), truth(1, "p1"), truth(2, "p0", "d1"), truth(3, "p1", fetch=FetchTruth.FAILED, ttft_ns=None)]
ROWS = [row(0, 50), row(1, 5), row(2, 7), row(3, 9)]


@pytest.mark.parametrize(
    ("fault", "requests"),
    [
        ("slow_link:p0>d0:8", 1),
        ("slow_prefill:p0:2", 2),
        ("decode_queue:d0:1", 3),
        ("router_slow:router:1", 4),
        ("fetch_failed:*:1", 4),
        ("slow_link:p1>d1:8", 0),
    ],
)
def test_a_fault_strikes_what_goes_where_it_is(fault: str, requests: int) -> None:
    assert struck(fault, checked([fault])[0][1], TRUTHS, ROWS).requests == requests


def test_an_attempt_that_was_abandoned_went_there_too() -> None:
    [(text, fault)] = checked(["prefill_failed:p0:1"])
    retried = truth(0, "p1", abandoned=("p0",), preemptions=3, phases={TruePhase.PREFILL_ABANDONED: 5 * MS, TruePhase.HOPS: MS})
    one = struck(text, fault, [retried], [])
    assert (one.requests, one.retried, one.preempted, one.truly) == (1, 1, 3, {"router_and_hops": 6.0})
    assert str(render(one).title).endswith("their KV: 1 ok; 1 refused by a prefill host; 3 preemptions")


def test_findings_are_printed_beside_the_truth() -> None:
    [(text, fault)] = checked(["slow_link:p0>d0:8"])
    one = struck(text, fault, TRUTHS, ROWS)
    assert plain(one) == {
        "fault": text,
        "requests": 1,
        "phases_p50_ms": {"prefill_compute": 40, "unattributed": 50},
        "elsewhere_p50_ms": {"prefill_compute": 40, "unattributed": 7},
        "true_p50_ms": {"prefill_compute": 40.0, "kv_transfer": 50.0, "router_and_hops": 10.0},
        "true_fetches": {"ok": 1},
        "true_retried": 0,
        "true_preemptions": 0,
    }
    drawn = StringIO()
    Console(file=drawn, width=100).print(render(one))
    lines = drawn.getvalue().splitlines()
    assert "1 request went there; their KV: 1 ok" in lines[0]
    assert [line.split() for line in lines if "kv_transfer" in line] == [["kv_transfer", "-", "-", "50.0", "ms"]]
    assert [line.split() for line in lines if "unattributed" in line] == [["unattributed", "50.0", "ms", "7.0", "ms", "-"]]


def test_where_all_are_struck_nobody_is_elsewhere_and_failed_ones_count() -> None:
    [(text, fault)] = checked(["fetch_failed:*:0.5"])
    one = struck(text, fault, TRUTHS, ROWS)
    assert (one.elsewhere, dict(one.fetches)) == (None, {"ok": 3, "failed": 1})


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("slow_lnk:p0>d0:2", "unknown"),
        ("slow_link:p0:2", "p0>d0"),
        ("clock_drift:edge:5", "keep this machine's clock"),
        ("clock_offset:*:5", "keep this machine's clock"),
    ],
)
def test_an_impossible_fault_is_reported(text: str, says: str) -> None:
    with pytest.raises(CliError, match=says):
        checked([text])
