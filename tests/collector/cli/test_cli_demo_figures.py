"""The figures of a demo run: what counts as joined or wrong, and how each is made."""

from __future__ import annotations

from typing import Any

import pytest

from builders.request_rows import MS, TRACE, phase, request_row
from handrail_collector.rows import RequestRow
from handrail_sim.demo.figures import ClientRequest, figures, quantile, slowest_row


def sent(number: int, **changes: Any) -> ClientRequest:
    line: dict[str, Any] = {
        "request_id": f"demo-{number}",
        "traceparent": f"00-{number:032x}-{1:016x}-01",
        "status": 200,
        "error": None,
        "ttft_token_ns": 100 * MS + number,
        "completion_tokens": 7,
    }
    return ClientRequest.of({**line, **changes})


def row(number: int, **changes: Any) -> RequestRow:
    phases = (
        phase("prefill_compute", 60 + number, "prefill"),
        phase("unattributed", 20, "decode"),
        phase("router_and_hops", 20, "path"),
    )
    own = {
        "client_request_id": f"demo-{number}",
        "trace_id": f"{number:032x}",
        "request_id": f"{number:016x}",
        "output_tokens": 7,
    }
    return request_row(changes.pop("phases", phases), **{**own, **changes})


def test_a_good_run() -> None:
    result = figures([sent(number) for number in range(1, 11)], [*map(row, range(1, 11)), request_row(())])
    assert result.good
    assert (result.requests, result.answered, result.joined, result.wrong, result.coverage) == (10, 10, 10, 0, 1.0)
    assert (result.ttft_p50_ms, result.ttft_p99_ms) == (105, 110)
    assert result.client_ttft_p50_ms == pytest.approx(100)
    assert result.ttft_difference_p50_ms == pytest.approx(-5.5, abs=0.01)
    assert result.unattributed_share == pytest.approx(200 / 1055)
    assert result.phases_p50_ms == {"prefill_compute": 65.5, "router_and_hops": 20, "unattributed": 20}


@pytest.mark.parametrize(
    ("changes", "joined", "wrong"),
    [
        ({"decode_instance": None}, 1, 0),
        ({"scope": "decode"}, 1, 0),
        ({"complete": False}, 1, 0),
        ({"trace_id": "f" * 32}, 2, 1),
        ({"trace_id": "f" * 32, "other_trace_ids": (f"{2:032x}",)}, 2, 0),
        ({"output_tokens": 8}, 2, 1),
        ({"output_tokens": None}, 2, 0),
        ({"findings": ("wrong_request: KV of another",)}, 2, 1),
        ({"client_request_id": "demo-1"}, 1, 2),
        ({"client_request_id": "somebody"}, 1, 0),
    ],
    ids=["no decode", "no edge", "incomplete", "other trace", "lost context", "tokens", "unknown", "finding", "twice", "others"],
)
def test_what_is_joined_and_what_is_wrong(changes: dict[str, Any], joined: int, wrong: int) -> None:
    result = figures([sent(1), sent(2)], [row(1), row(2, **changes)])
    assert (result.joined, result.wrong) == (joined, wrong)
    assert result.good == (joined == 2 and wrong == 0)


def test_a_failed_request_is_not_good() -> None:
    result = figures(
        [sent(1), sent(2, error="HTTP 500", status=500, ttft_token_ns=None, completion_tokens=None)], [row(1), row(2)]
    )
    assert (result.answered, result.joined, result.good) == (1, 2, False)


def test_nothing_at_all_has_no_figures() -> None:
    result = figures([sent(1, traceparent=None, ttft_token_ns=None)], [])
    assert (result.ttft_p50_ms, result.unattributed_share, result.ttft_difference_p50_ms, result.phases_p50_ms) == (
        None,
        None,
        None,
        {},
    )


@pytest.mark.parametrize(
    ("values", "share", "expected"), [([], 0.5, None), ([1], 0.99, 1), ([1, 2, 3, 4], 0.5, 2), (range(1, 101), 0.99, 99)]
)
def test_quantiles(values: list[int], share: float, expected: int | None) -> None:
    assert quantile(values, share) == expected


def test_the_slowest_is_a_joined_stream() -> None:
    whole = row(1, ttft_token_ns=None, duration_ns=10_000 * MS)
    lost = row(9, decode_instance=None)
    assert slowest_row([row(2), row(3), whole, lost]) == row(3)
    assert slowest_row([whole, lost]) == whole
    assert slowest_row([lost]) is None
    assert TRACE not in {row(1).trace_id}
