"""Requests on /metrics while a stream is under way, and when it has ended."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from builders.exchanges import PROCESS, exchange
from handrail.metrics.exponential_histogram import GapSketch
from handrail.metrics.histogram import LATENCY, Histogram
from handrail.metrics.model_labels import MOST_MODELS, OTHER, UNKNOWN, ModelLabels
from handrail.records import ENGINE_LOST, EngineTimes, Exchange, Gaps, Outcome, Role, Source
from handrail_sidecar.live_metrics.requests import LiveRequests
from handrail_sidecar.live_metrics.slo import RequestObjectives
from handrail_sidecar.proxy.exchange_observer import EndReason, ExchangeObserver, identify, observed_operation
from handrail_sidecar.proxy.head import parse_head
from handrail_sidecar.proxy.response import Body
from handrail_sidecar.proxy.stats import ProxyStats

MS, S = 10**6, 10**9
UNIX = 1_800_000_000 * S


def live(role: Role = Role.EDGE) -> LiveRequests:
    return LiveRequests(role, RequestObjectives(), wall=lambda: UNIX)


def chunk(text: str = "a", *, finish: str | None = None, model: str | None = "m", index: int = 0, **more: Any) -> bytes:
    found = {"id": "cmpl-x", "model": model, "choices": [{"index": index, "text": text, "finish_reason": finish}], **more}
    return b"data: " + json.dumps(found).encode() + b"\n\n"


class Request:
    """One streamed completion, as the proxy reports it.

    Every method takes ms after the request's arrival.
    """

    def __init__(self, requests: LiveRequests, body: dict[str, Any] | None = None) -> None:
        data = json.dumps({"model": "m", "prompt": "p", "stream": True} if body is None else body).encode()
        head = parse_head(
            b"POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\n"
            + f"Content-Length: {len(data)}\r\n\r\n".encode()
        )
        who = identify(head, add_request_id=True, set_trace_context=True)
        self.stats = ProxyStats()
        self.observation = ExchangeObserver(
            process=PROCESS,
            head=head,
            identity=who,
            operation=observed_operation(head),
            arrival_ns=S,
            arrival_unix_ns=UNIX,
            stats=self.stats,
            live=requests.begin(who.ids.trace_id),
        )
        self.observation.request_body(data)
        self.observation.request_done_ns = S
        self.body: Body | None = None

    def head(self, status: int = 200, content_type: bytes = b"text/event-stream") -> Request:
        self.body = self.observation.response_head(status, [(b"content-type", content_type)])
        return self

    def read(self, at_ms: float, data: bytes) -> Request:
        assert self.body is not None
        self.body(data, S + round(at_ms * MS))
        if self.observation.content_seen and self.observation.first_delivered_ns is None:
            self.observation.first_delivered_ns = S + round(at_ms * MS)
        return self

    def end(self, at_ms: float, ending: EndReason = EndReason.CLEAN) -> Exchange:
        record = self.observation.record(ending, S + round(at_ms * MS))
        assert self.stats.observer_errors == 0
        return record


def counted(histograms: dict[tuple[str, ...], Histogram]) -> dict[tuple[str, ...], dict[float, int]]:
    """Return series -> upper bound in s -> count."""
    return {
        labels: {LATENCY.bounds[at]: count for at, count in enumerate(histogram.counts) if count}
        for labels, histogram in histograms.items()
    }


def test_a_stream_of_ten_minutes_shows_its_first_token_and_its_gaps_before_it_ends() -> None:
    requests = live()
    request = Request(requests).head()
    request.read(350, chunk())
    assert counted(requests.ttft) == {("m", "edge", "edge"): {0.35: 1}}
    for second in range(1, 600):
        request.read(350 + 1000 * second, chunk())
    request.observation.overdue(10**18)
    assert counted(requests.gaps) == {("m", "edge"): {1.0: 599}}
    assert requests.outcomes["m", Outcome.OK] == 0
    assert requests.judged["m", "ttft", True] == 1
    request.end(600_000, EndReason.UPSTREAM_GONE)
    assert counted(requests.gaps) == {("m", "edge"): {1.0: 599}}
    assert requests.outcomes["m", Outcome.UPSTREAM_DISCONNECT] == 1


def test_what_was_put_off_is_looked_at_when_it_is_due_and_no_earlier() -> None:
    requests = live()
    request = Request(requests).head().read(100, chunk()).read(200, chunk()).read(900, chunk())
    request.observation.overdue(S + 200 * MS)
    assert counted(requests.gaps) == {}
    request.observation.overdue(S + 200 * MS + 1)
    assert counted(requests.gaps) == {("m", "edge"): {0.1: 1, 0.7: 1}}


@given(st.lists(st.floats(0.01, 5000), min_size=1, max_size=80), st.integers(1, 40), st.booleans())
def test_live_gaps_are_those_of_the_record_whatever_a_read_holds(gaps_ms: list[float], a_read: int, known: bool) -> None:
    """Live gaps equal those of the record, however many chunks a read holds.

    Chunks are read one by one or many at a time. Where the choices are not known, the gaps come from the sketch at the end.
    """
    requests = live()
    request = Request(requests, None if known else {}).head()
    at, pending = 10.0, b""
    request.read(at, chunk())
    for number, gap in enumerate(gaps_ms):
        at += gap
        if number % a_read:
            pending += chunk()
        else:
            request.read(at, pending + chunk())
            pending = b""
    if pending:
        request.read(at, pending)
    record = request.end(at + 1)
    assert record.gaps is not None
    (histogram,) = requests.gaps.values()
    assert histogram.count == record.gaps.count == len(gaps_ms)
    if known:
        assert histogram.total == record.gaps.sum_ns
    else:
        assert histogram.total == pytest.approx(record.gaps.sum_ns, rel=0.011)


def test_one_read_of_a_thousand_chunks_loses_none() -> None:
    requests = live()
    Request(requests).head().read(10, chunk()).read(20, chunk() * 1000).end(30)
    assert requests.gaps["m", "edge"].count == 1000


def test_per_token_gaps_come_live_where_running_totals_were_requested() -> None:
    requests = live()
    fields = {
        "model": "m",
        "prompt": "p",
        "stream": True,
        "stream_options": {"continuous_usage_stats": True, "include_usage": True},
    }
    request = Request(requests, fields).head()
    request.read(100, chunk(usage={"prompt_tokens": 4, "completion_tokens": 1}))
    request.read(140, chunk(usage={"prompt_tokens": 4, "completion_tokens": 5}))
    request.observation.overdue(10**18)
    assert counted(requests.itl) == {("m", "edge"): {0.01: 4}}
    request.end(200)
    assert requests.itl["m", "edge"].count == 4


def test_per_token_gaps_that_only_the_end_confirms_are_counted_then() -> None:
    requests = live()
    request = Request(requests).head()
    request.read(100, chunk(usage={"prompt_tokens": 4, "completion_tokens": 1}))
    request.read(140, chunk(usage={"prompt_tokens": 4, "completion_tokens": 5}, finish="stop"))
    request.observation.overdue(10**18)
    assert counted(requests.itl) == {}
    request.read(141, b'data: {"choices":[],"usage":{"prompt_tokens":4,"completion_tokens":5}}\n\ndata: [DONE]\n\n').end(142)
    assert requests.itl["m", "edge"].count == 4


def test_a_first_token_that_cannot_be_known_is_not_counted() -> None:
    requests = live()
    request = Request(requests).head().read(50, b"data: {broken\n\n").read(100, chunk())
    record = request.end(200)
    assert record.ttft_token_ns is None
    assert counted(requests.ttft) == {}


def test_tokens_without_text_have_their_first_at_the_chunk_that_finished() -> None:
    requests = live()
    request = Request(requests).head()
    request.read(80, chunk("", finish="length", usage={"prompt_tokens": 1, "completion_tokens": 3}))
    record = request.read(81, b"data: [DONE]\n\n").end(90)
    assert record.ttft_token_ns == 80 * MS
    assert counted(requests.ttft) == {("m", "edge", "edge"): {0.08: 1}}


def test_an_answer_that_is_not_streamed_has_an_end_and_no_first_token() -> None:
    requests = live()
    body = b'{"id":"x","model":"m","choices":[{"index":0,"text":"a","finish_reason":"stop"}],"usage":{"completion_tokens":3}}'
    Request(requests).head(200, b"application/json").read(300, body).end(300)
    assert (counted(requests.ttft), counted(requests.gaps)) == ({}, {})
    assert counted(requests.e2e) == {("m", "edge"): {0.3: 1}}
    assert requests.outcomes["m", Outcome.OK] == 1
    assert {key: n for key, n in requests.judged.items() if n} == {("m", "success", True): 1}


def test_a_fault_of_counting_costs_neither_the_record_nor_the_times_that_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = live()
    request = Request(requests).head()

    def broken(*_: object) -> bool:
        raise ZeroDivisionError

    monkeypatch.setattr(requests, "first_token", broken)
    request.read(100, chunk()).read(140, chunk(finish="stop")).read(141, b"data: [DONE]\n\n")
    record = request.observation.record(EndReason.CLEAN, S + 142 * MS)
    assert (record.outcome, record.ttft_token_ns) == (Outcome.OK, 100 * MS)
    assert record.gaps is not None
    assert request.stats.observer_errors == 1


# --- models and births ----------------------------------------------------------------------------------------------------


def test_H01_failures_are_there_at_nought_before_the_first_request_and_for_every_model_that_is_served() -> None:
    requests = live()
    assert {outcome for model, outcome in requests.outcomes if model == UNKNOWN} == set(Outcome) - {Outcome.TAINTED}
    assert set(requests.outcomes.values()) == set(requests.judged.values()) == {0}
    requests.know(["a", "b"])
    assert {model for model, _ in requests.outcomes} == {UNKNOWN, "a", "b"}
    assert requests.outcomes["b", Outcome.UPSTREAM_UNREACHABLE] == 0
    Request(requests, {"model": "a", "stream": True}).end(5, EndReason.UNREACHABLE)
    assert requests.outcomes["a", Outcome.UPSTREAM_UNREACHABLE] == 1


def test_D16_what_a_client_writes_as_its_model_becomes_no_label() -> None:
    requests = live()
    for number in range(100):
        request = Request(requests, {"model": f"junk-{number}", "stream": True})
        request.head(404, b"application/json").read(2, b'{"error":{"type":"NotFoundError"}}').end(3)
    assert {model for model, _ in requests.outcomes} == {UNKNOWN}
    assert requests.outcomes[UNKNOWN, Outcome.HTTP_ERROR] == 100


def test_models_are_bounded_and_the_first_ones_stay() -> None:
    labels = ModelLabels()
    served = [labels.serve(f"m{number}") for number in range(MOST_MODELS + 5)]
    assert served == [*(f"m{number}" for number in range(MOST_MODELS)), *[OTHER] * 5]
    assert labels.serve("m3") == labels.ask("m3") == "m3"
    assert (labels.ask("new"), labels.serve(None), labels.serve("")) == (UNKNOWN, UNKNOWN, UNKNOWN)
    assert len(labels.serve("x" * 1000)) <= 128


# --- objectives -----------------------------------------------------------------------------------------------------------


def sketch_of(*gaps_ms: float) -> Any:
    sketch = GapSketch()
    sketch.extend([round(gap * MS) for gap in gaps_ms])
    return Gaps(
        unit="chunk",
        count=sketch.count,
        sum_ns=sketch.sum_ns,
        max_ns=sketch.max_ns or 0,
        max_at_ns=0,
        sketch=sketch.encode(),
    )


GOOD = replace(exchange(), outcome=Outcome.OK, ttft_token_ns=500 * MS, gaps=sketch_of(10, 20), itl=None)


@pytest.mark.parametrize(
    ("changed", "met"),
    [
        pytest.param({}, {"ttft": True, "itl": True, "success": True, "all": True}, id="good"),
        pytest.param({"ttft_token_ns": 2 * S}, {"ttft": False, "itl": True, "success": True, "all": False}, id="late"),
        pytest.param(
            {"gaps": sketch_of(*[10] * 50, *[90] * 5)}, {"ttft": True, "itl": False, "success": True, "all": False}, id="gaps"
        ),
        pytest.param(
            {"gaps": sketch_of(*[10] * 999, 90)}, {"ttft": True, "itl": True, "success": True, "all": True}, id="one-gap-of-1000"
        ),
        pytest.param({"gaps": None}, {"ttft": True, "itl": True, "success": True, "all": True}, id="no-gaps"),
        pytest.param(
            {"outcome": Outcome.STREAM_ERROR}, {"ttft": False, "itl": False, "success": False, "all": False}, id="failed"
        ),
        pytest.param({"outcome": Outcome.HTTP_ERROR, "status": 400, "ttft_token_ns": None, "gaps": None}, {}, id="refused"),
        pytest.param(
            {"outcome": Outcome.HTTP_ERROR, "status": 429, "ttft_token_ns": None, "gaps": None},
            {"ttft": False, "itl": False, "success": False, "all": False},
            id="turned-away",
        ),
        pytest.param({"outcome": Outcome.CLIENT_DISCONNECT}, {"ttft": True, "itl": True, "all": True}, id="left-in-the-stream"),
        pytest.param(
            {"outcome": Outcome.CLIENT_DISCONNECT, "ttft_token_ns": None, "gaps": None, "duration_ns": 3 * S},
            {"ttft": False, "itl": False, "all": False},
            id="gave-up",
        ),
        pytest.param(
            {"outcome": Outcome.CLIENT_DISCONNECT, "ttft_token_ns": None, "gaps": None, "duration_ns": S // 2},
            {},
            id="left-early",
        ),
        pytest.param({"stream": False, "ttft_token_ns": None, "gaps": None}, {"success": True}, id="not-streamed"),
        pytest.param({"outcome": Outcome.UNKNOWN}, {"ttft": True, "itl": True, "all": True}, id="nobody-knows-its-end"),
    ],
)
def test_objectives(changed: dict[str, Any], met: dict[str, bool]) -> None:
    requests = live()
    requests.ended("m", replace(GOOD, **changed), ttft_judged=False)
    assert {objective: held for (_, objective, held), count in requests.judged.items() if count} == met


def test_the_first_token_is_judged_once() -> None:
    requests = live()
    Request(requests).head().read(2000, chunk()).read(2010, chunk(finish="stop")).read(2011, b"data: [DONE]\n\n").end(2012)
    judged = {key[1:]: count for key, count in requests.judged.items() if count}
    assert judged == {("ttft", False): 1, ("itl", True): 1, ("success", True): 1, ("all", False): 1}


def test_prefill_answers_are_counted_and_not_judged() -> None:
    requests = live(Role.PREFILL)
    Request(requests).head().read(100, chunk(finish="length")).read(101, b"data: [DONE]\n\n").end(102)
    assert requests.outcomes["m", Outcome.OK] == 1
    assert (requests.judged, requests.ttft) == ({}, {})


# --- the engine's own figures --------------------------------------------------------------------------------------------


def times(status: str) -> EngineTimes:
    return EngineTimes(
        process=PROCESS,
        source=Source.PLUGIN,
        ids=exchange().ids,
        engine="vllm",
        request_id="r",
        queued_unix_ns=UNIX,
        status=status,
    )


def test_without_anybody_in_front_of_it_the_engine_counts() -> None:
    requests = live(Role.DECODE)
    requests.engine_first_token("/models/m", 70 * MS, "t")
    for status in ("stopped", "error", ENGINE_LOST, "lost", "aborted"):
        requests.engine_ended("/models/m", times(status))
    assert counted(requests.ttft) == {("/models/m", "decode", "engine"): {0.07: 1}}
    assert {outcome: n for (model, outcome), n in requests.outcomes.items() if n} == {
        Outcome.OK: 1,
        Outcome.STREAM_ERROR: 1,
        Outcome.UPSTREAM_DISCONNECT: 1,
        Outcome.UNKNOWN: 1,
        Outcome.ABORTED: 1,
    }


def test_with_somebody_in_front_the_engine_does_not_count_again_and_takes_the_name_that_is_served() -> None:
    requests = live(Role.DECODE)
    Request(requests).head().read(100, chunk(finish="stop")).read(101, b"data: [DONE]\n\n").end(102)
    requests.engine_first_token("/models/m", 70 * MS, "t")
    requests.engine_ended("/models/m", times("stopped"))
    assert counted(requests.ttft) == {("m", "decode", "decode"): {0.1: 1}, ("m", "decode", "engine"): {0.07: 1}}
    assert requests.outcomes["m", Outcome.OK] == 1
