"""100 requests of all kinds through each router and each loss of context.

Each gets one row, with P and D, and with no other request's data.
"""

from __future__ import annotations

from collections import Counter

import pytest

from handrail_collector.rows import RequestRow
from handrail_collector.store.tables.spans import SpanRow
from vllm.client import Result
from vllm.configurations import CONFIGURATIONS
from vllm.figures import Figures
from vllm.run import REQUESTS, Run, Runs, evidence, is_joined, is_whole
from vllm.stack import Configuration, Front

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1200)]
every_configuration = pytest.mark.parametrize("configuration", [pytest.param(each, id=each.id) for each in CONFIGURATIONS])

PREFIXES = ("chatcmpl-", "cmpl-")


def worker_id(result: Result, configuration: Configuration) -> str:
    """Return the id that the engines got, by what the client knows.

    It is the client's own, or the one that vllm-router put in its place.
    """
    if configuration.front is Front.TWO_STEP:
        return str(result.request.request_id)
    response_id = str(result.answer.response_id)
    return next(response_id.removeprefix(prefix) for prefix in PREFIXES if response_id.startswith(prefix))


def named_by(span: SpanRow) -> str | None:
    """Return the id in a span of an engine or its sidecar.

    It comes without what the engine adds to it.
    """
    raw = span.attributes.get("gen_ai.request.id")
    if raw is None:
        found = span.attributes.get("handrail.request.id")
        return None if found is None else str(found)
    text = str(raw)
    if text.startswith("chatcmpl-"):
        return text.removeprefix("chatcmpl-")
    return text.removeprefix("cmpl-").removesuffix("-0")  # a completion's id ends with the index of its prompt


def kv_id(span: SpanRow, direction: str) -> str | None:
    params = span.attributes.get(f"handrail.kv.{direction}")
    found = params.get("remote_request_id") if isinstance(params, dict) else None
    return None if found is None else str(found)


@every_configuration
def test_every_request_is_one_row_with_prefill_and_decode(configuration: Configuration, runs: Runs, figures: Figures) -> None:
    run = runs.of(configuration)
    failed = [(each.request.request_id, each.answer.error) for each in run.results if each.answer.error]
    assert not failed, failed[:3]
    joined = [row for row in run.rows if is_joined(row)]
    whole = sum(is_whole(row, configuration) for row in joined)
    figures.add("joined", f"{configuration.id:42} {len(joined)}/{REQUESTS} joined, {whole} whole, {len(run.rows)} rows")
    rest = [(row.scope, row.client_request_id, sorted(j.evidence for j in row.joins)) for row in run.rows if not is_joined(row)]
    assert not rest, f"{len(rest)} rows are not joined: {rest[:3]}"
    assert len(joined) == REQUESTS
    assert {row.client_request_id for row in joined} == {each.request.request_id for each in run.results}
    lacking = [(row.client_request_id, sorted(configuration.evidence - evidence(row)), row.complete) for row in joined]
    assert whole == REQUESTS, [each for each in lacking if each[1] or not each[2]][:3]


@every_configuration
def test_no_evidence_belongs_to_another_request(configuration: Configuration, runs: Runs, figures: Figures) -> None:
    run = runs.of(configuration)
    wrong = [problem for result in run.results for problem in contradictions(run, result, run.row(result))]
    figures.add("joined wrongly", f"{configuration.id:42} {len(wrong)} contradictions in {REQUESTS} requests")
    assert not wrong, wrong[:5]
    used = Counter(join.span_id for row in run.rows for join in row.joins)
    assert not [span_id for span_id, times in used.items() if times > 1], "evidence stands in two rows"


def contradictions(run: Run, result: Result, row: RequestRow) -> list[str]:
    """Return what in ``row`` cannot belong to the client's request.

    It compares with the client's and the two-step proxy's own notes.
    """
    request = result.request
    name = request.request_id
    found = []
    if result.trace_id is not None and row.trace_id != result.trace_id:
        found.append(f"{name}: trace {row.trace_id}, sent {result.trace_id}")
    if row.response_id != result.answer.response_id:
        found.append(f"{name}: response {row.response_id}, got {result.answer.response_id}")
    if row.stream is not request.stream or row.path != request.path:
        found.append(f"{name}: {row.path} stream={row.stream}")
    usage = result.answer.usage or {}
    if (row.prompt_tokens, row.output_tokens) != (usage.get("prompt_tokens"), usage.get("completion_tokens")):
        found.append(f"{name}: tokens {row.prompt_tokens}+{row.output_tokens}, got {usage}")
    handoff = next((each for each in run.handoffs if each.request_id == name), None)
    if handoff is not None:
        sent_by = (handoff.traceparent or "").split("-")
        if sent_by[1:3] != [row.trace_id, row.request_id]:
            found.append(f"{name}: the proxy was called by {handoff.traceparent}, the row is {row.trace_id} {row.request_id}")
    expected_id = worker_id(result, run.configuration)
    for join in row.joins:
        role, _, source = join.evidence.partition(":")
        span = run.spans.get(join.span_id)
        if span is None:
            found.append(f"{name}: {join.evidence} {join.span_id} is not stored")
        elif role in ("prefill", "decode"):
            if named_by(span) != expected_id:
                found.append(f"{name}: {join.evidence} is of {named_by(span)}, joined by {join.how}")
            kv = kv_id(span, "out" if role == "prefill" else "in") if source == "proxy" else None
            if source == "proxy" and handoff is not None and kv != handoff.remote_request_id:
                found.append(f"{name}: {join.evidence} handed off {kv}, the proxy saw {handoff.remote_request_id}")
    return found


@every_configuration
def test_phases_sum_to_the_total_exactly(configuration: Configuration, runs: Runs) -> None:
    run = runs.of(configuration)
    wrong = []
    for result in run.results:
        row = run.row(result)
        total = row.ttft_token_ns if result.request.stream else row.duration_ns
        of = "ttft" if result.request.stream else "total"
        added = sum(phase.duration_ns for phase in row.phases)
        if row.phase_of != of or total is None or added != total or any(phase.duration_ns < 0 for phase in row.phases):
            wrong.append((row.client_request_id, row.phase_of, added, total))
    assert not wrong, f"{len(wrong)}: {wrong[:3]}"
