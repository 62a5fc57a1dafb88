"""What must stay apart.

The cases are concurrent calls of one trace, a request id used twice, and ids that differ only in a last digit.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from handrail_collector.rows import RequestRow
from vllm.client import Request, Result, mixed, new_traceparent, prompt
from vllm.configurations import PLAIN
from vllm.figures import Figures
from vllm.run import evidence, is_whole, observe
from vllm.stack import Attach, Bed, Stack, running_stack

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module", params=list(Attach), ids=[each.value for each in Attach])
def stack(request: pytest.FixtureRequest, bed: Bed, work: Path) -> Iterator[Stack]:
    attach: Attach = request.param
    with running_stack(bed, PLAIN[attach], work / f"identity-{attach.value}") as running:
        yield running


def ask(request_id: str, seed: int, *, stream: bool = True, max_tokens: int = 12) -> Request:
    source = random.Random(f"{request_id}:{seed}")
    return Request(
        request_id=request_id,
        traceparent=new_traceparent(source),
        chat=False,
        stream=stream,
        prompt=prompt(source),
        max_tokens=max_tokens,
    )


def assert_each_has_its_own_row(results: Sequence[Result], rows: Sequence[RequestRow], stack: Stack) -> None:
    """Assert that there are as many rows as requests.

    Each has the answer of one request, and the hand-off that the proxy made for it.
    """
    failed = [each.answer.error for each in results if each.answer.error]
    assert not failed, (failed, [each for each in stack.handoffs() if each.error])
    assert len(rows) == len(results), [(row.scope, row.client_request_id, row.request_id) for row in rows]
    partial = [(row.request_id, sorted(evidence(row)), row.findings) for row in rows if not is_whole(row, stack.configuration)]
    assert not partial, partial[:3]
    sent = sorted((each.request.request_id, each.trace_id, (each.answer.usage or {})["prompt_tokens"]) for each in results)
    assert sorted((row.client_request_id, row.trace_id, row.prompt_tokens) for row in rows) == sent
    called = {(each.traceparent or "").split("-")[2]: each.request_id for each in stack.handoffs()}
    assert [called.get(row.request_id) for row in rows] == [row.client_request_id for row in rows]


def test_twenty_concurrent_requests_of_one_trace_are_twenty_rows(stack: Stack, figures: Figures) -> None:
    source = random.Random(20)
    trace_id = f"{source.getrandbits(128):032x}"
    requests = [replace(each, traceparent=new_traceparent(source, trace_id)) for each in mixed(20, "agent")]
    results, rows = observe(stack, requests, concurrency=20)
    figures.add("identity", f"20 concurrent requests under one trace id: {len(rows)} rows")
    assert {row.trace_id for row in rows} == {trace_id}
    assert_each_has_its_own_row(results, rows, stack)


@pytest.mark.parametrize("concurrency", [pytest.param(2, id="overlapping"), pytest.param(1, id="in-sequence")])
def test_a_request_id_used_twice_is_two_rows(concurrency: int, stack: Stack, figures: Figures) -> None:
    request_id = f"twice-{concurrency}"
    results, rows = observe(stack, [ask(request_id, seed, max_tokens=40) for seed in (1, 2)], concurrency)
    first, second = sorted(results, key=lambda each: each.sent_ns)
    assert (second.sent_ns < first.sent_ns + first.duration_ns) is (concurrency == 2)
    figures.add("identity", f"one request id twice, concurrency {concurrency}: {len(rows)} rows")
    assert_each_has_its_own_row(results, rows, stack)


def test_ids_that_end_in_different_digits_are_two_rows(stack: Stack, figures: Figures) -> None:
    results, rows = observe(stack, [ask("user-42-7", 1), ask("user-42-8", 2)], concurrency=2)
    figures.add("identity", f"user-42-7 and user-42-8: {len(rows)} rows")
    assert_each_has_its_own_row(results, rows, stack)
    assert {row.client_request_id for row in rows} == {"user-42-7", "user-42-8"}
