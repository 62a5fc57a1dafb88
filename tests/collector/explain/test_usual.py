"""One request against the requests around it."""

from __future__ import annotations

from dataclasses import replace

from builders.period import period, slower
from builders.request_rows import KV_AND_QUEUE, MS, ROWS, STARTED, phase, request_row
from handrail.phases import Phase
from handrail_collector.explain.period.baseline import LEAST_REQUESTS
from handrail_collector.explain.period.request_columns import requests_of
from handrail_collector.explain.period.request_comparison import RequestVerdict, against, to_json


def test_a_slow_request_is_reported_with_excess_and_reason() -> None:
    rows, touched = period(lambda row: {"prefill_queue": 400} if row.prefill_host == "p0" else {})
    row = rows[touched[10]]
    found = against(row, requests_of(rows), STARTED, STARTED + 1)
    assert found is not None
    assert (found.verdict, found.phase, found.place, found.significant) == (RequestVerdict.SLOW, "prefill_queue", "p0", True)
    assert found.late_ns is not None
    assert found.baseline_ttft_ns is not None
    assert found.late_ns + found.baseline_ttft_ns == row.ttft_token_ns
    assert 350 * MS < found.late_ns < 450 * MS
    assert found.uncached_tokens == row.prompt_tokens
    assert found.compared == len(rows)


def test_only_one_that_is_slow_is_no_sign_of_more() -> None:
    rows, _ = period()
    found = against(slower(rows[5], first_step=200), requests_of(rows), STARTED, STARTED + 1)
    assert found is not None
    assert (found.verdict, found.phase, found.significant) == (RequestVerdict.SLOW, "first_step", False)


def test_one_as_the_others_is_usual() -> None:
    rows, _ = period()
    found = against(rows[3], requests_of(rows), STARTED, STARTED + 1)
    assert found is not None
    assert found.verdict is RequestVerdict.NOT_SLOW


def test_too_few_others_say_nothing() -> None:
    rows, _ = period()
    found = against(rows[3], requests_of(rows[: LEAST_REQUESTS - 1]), STARTED, STARTED + 1)
    assert found is not None
    assert (found.verdict, found.late_ns, found.phase, found.needed) == (RequestVerdict.CANNOT_TELL, None, None, LEAST_REQUESTS)


def test_without_a_first_token_there_is_nothing_to_compare() -> None:
    rows, _ = period()
    assert against(ROWS["not_streamed"], requests_of(rows), STARTED, STARTED + 1) is None
    assert to_json(None) is None


def test_what_no_evidence_explains_says_what_it_may_be() -> None:
    rows, touched = period(lambda row: {"unattributed": 300} if row.decode_host == "d1" else {})
    fields = to_json(against(rows[touched[0]], requests_of(rows), STARTED, STARTED + 1))
    assert fields is not None
    assert (fields["verdict"], fields["phase"], fields["place"]) == ("slow", "unattributed", "d1")
    assert fields["may_be"] == tuple(Phase(name).value for name in KV_AND_QUEUE)


def test_a_host_that_nobody_named_goes_by_its_process() -> None:
    row = request_row((phase("first_step", 10, "decode", "otlp"),))
    found = requests_of([replace(row, decode_host=None, decode_instance="10.0.0.2:8200")])
    assert found.decode_host.tolist() == ["10.0.0.2:8200"]
