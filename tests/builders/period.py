"""Made periods with a fault in their middle third.

Hosts are p0, p1, d0 and d1; a request arrives every 100 ms; the fault makes phases longer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

from builders.request_rows import KV_AND_QUEUE, MS, STARTED, phase, request_row
from handrail_collector.rows import RequestRow

Change = Callable[[RequestRow], dict[str, float]]


def usual(number: int, random: Random) -> RequestRow:
    """Build a healthy request whose prefill takes 50 µs per token.

    ``unattributed`` at D takes 30 ms.
    """
    tokens = 500 + 100 * (number % 30)
    row = request_row(
        (
            phase("prefill_queue", random.choice((0, 0, 0, 40)), "prefill", "otlp"),
            phase("prefill_compute", tokens * 0.05 + random.random(), "prefill", "otlp"),
            phase("router_and_hops", 2 + random.random() / 10, "path", "edge-proxy"),
            phase("unattributed", 30 + random.random(), "decode", "otlp", may_be=KV_AND_QUEUE),
            phase("first_step", 10 + random.random(), "decode", "otlp"),
        )
    )
    return replace(
        row,
        client_request_id=f"r{number}",
        started_unix_ns=STARTED + number * 100 * MS,
        prompt_tokens=tokens,
        cached_tokens=None,
        prefill_host=f"p{number % 2}",
        decode_host=f"d{number // 2 % 2}",
    )


def slower(row: RequestRow, **more_ms: float) -> RequestRow:
    """Return the same request with longer phases."""
    phases = tuple(replace(p, duration_ns=p.duration_ns + round(more_ms.get(p.phase, 0) * MS)) for p in row.phases)
    return replace(row, phases=phases, ttft_token_ns=sum(p.duration_ns for p in phases))


def period(change: Change | None = None, requests: int = 1200) -> tuple[list[RequestRow], list[int]]:
    """Build a period in whose middle third ``change`` makes phases longer.

    ``change`` returns the extra ms by phase. Also returns the numbers of the requests that it changed.
    """
    random, rows, touched = Random(1), [], []
    for number in range(requests):
        row = usual(number, random)
        more = change(row) if change is not None and requests // 3 <= number < 2 * requests // 3 else {}
        if more:
            touched.append(number)
            row = slower(row, **more)
        rows.append(row)
    return rows, touched
