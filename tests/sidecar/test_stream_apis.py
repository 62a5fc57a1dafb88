"""Facts from each API's chunks, bodies, errors and ends."""

from __future__ import annotations

import json
from typing import Any

import pytest

from handrail.records import Hint, KvParams, Outcome
from handrail_sidecar.proxy.response_reader import BODY_LIMIT_BYTES, End, ResponseReader, StreamFacts

MS = 1_000_000
Event = dict[str, Any]


def streamed(
    events: list[Event | str],
    operation: str = "chat",
    *,
    choices: int | None = 1,
    end: End = End.CLEAN,
    status: int = 200,
    requested: bool | None = None,
) -> StreamFacts:
    """Stream events at fixed times: event i arrives at (i + 1) x 10 ms.

    A ``str`` is raw data. Named events are as the Responses and Messages APIs send them.
    """
    reader = ResponseReader(
        operation,
        choices=choices,
        status=status,
        content_type="text/event-stream",
        content_encoding=None,
        continuous_usage=requested,
    )
    for number, event in enumerate(events, 1):
        data = event if isinstance(event, str) else json.dumps(event)
        named = f"event: {event['type']}\n" if isinstance(event, dict) and operation in ("responses", "messages") else ""
        reader.feed(f"{named}data: {data}\n\n".encode(), number * 10 * MS)
    reader.finish((len(events) + 1) * 10 * MS, end)
    return reader.facts()


def body(
    found: object,
    operation: str | None = "chat",
    *,
    status: int = 200,
    end: End = End.CLEAN,
    media: str | None = "application/json",
) -> StreamFacts:
    data = found if isinstance(found, bytes) else json.dumps(found).encode()
    reader = ResponseReader(operation, choices=1, status=status, content_type=media, content_encoding=None, continuous_usage=None)
    for begin in range(0, len(data), 1 << 18):
        reader.feed(data[begin : begin + (1 << 18)], 5 * MS)
    reader.finish(6 * MS, end)
    return reader.facts()


def delta(index: int = 0, finish: str | None = None, usage: int | None = None, ids: int | None = None, **members: Any) -> Event:
    choice = {"index": index, "delta": members, "finish_reason": finish}
    if ids is not None:
        choice["token_ids"] = list(range(ids))
    event: Event = {"id": "chatcmpl-1", "model": "m", "choices": [choice]}
    if usage is not None:
        event["usage"] = {"prompt_tokens": 3, "completion_tokens": usage}
    return event


def text(value: str, finish: str | None = None) -> Event:
    return {"id": "cmpl-1", "model": "m", "choices": [{"index": 0, "text": value, "finish_reason": finish}]}


def summed(tokens: int) -> Event:
    return {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": tokens}}


DONE = "[DONE]"
ROLE = delta(role="assistant", content="")


@pytest.mark.parametrize(
    ("operation", "events", "token_ms", "text_ms", "kind"),
    [
        pytest.param("chat", [ROLE, delta(content="a")], 20, 20, "text", id="role_then_text"),
        pytest.param("chat", [delta(role="assistant"), delta(content="a")], 20, 20, "text", id="role_without_content"),
        pytest.param("chat", [delta(role="assistant", content="a")], 10, 10, "text", id="role_with_text"),
        pytest.param("chat", [ROLE, delta(content=""), delta(content="a")], 20, 30, "text", id="first_token_without_text"),
        pytest.param("chat", [ROLE, delta(), delta(content="a")], 30, 30, "text", id="empty_delta"),
        pytest.param("chat", [ROLE, delta(content=None), delta(content="a")], 30, 30, "text", id="null_delta"),
        pytest.param(
            "chat",
            [delta(usage=0, role="assistant", content=""), delta(usage=0, content=""), delta(usage=1, content="a")],
            30,
            30,
            "text",
            id="usage_says_no_token_yet",
        ),
        pytest.param(
            "chat",
            [delta(usage=1, role="assistant", content=""), delta(usage=2, content="a")],
            10,
            20,
            "text",
            id="usage_says_the_role_chunk_had_one",
        ),
        pytest.param(
            "chat",
            [delta(ids=0, content=""), delta(ids=1, content=""), delta(ids=1, content="a")],
            20,
            30,
            "text",
            id="token_ids_decide",
        ),
        pytest.param("chat", [ROLE, delta(reasoning="r"), delta(content="a")], 20, 20, "reasoning", id="reasoning"),
        pytest.param("chat", [ROLE, delta(reasoning_content="r", content=None)], 20, 20, "reasoning", id="reasoning_content"),
        pytest.param("chat", [ROLE, delta(refusal="no")], 20, 20, "refusal", id="refusal"),
        pytest.param(
            "chat", [ROLE, delta(function_call={"name": "f", "arguments": ""})], 20, 20, "tool_call", id="function_call"
        ),
        pytest.param(
            "chat",
            [
                ROLE,
                delta(tool_calls=[]),
                delta(tool_calls=[{"index": 0, "function": {"arguments": ""}}]),
                delta(tool_calls=[{"index": 0, "id": "c", "function": {"name": "f"}}]),
            ],
            40,
            40,
            "tool_call",
            id="empty_tool_calls_are_none",
        ),
        pytest.param("chat", [ROLE, delta(content=[{"type": "text", "text": "a"}])], 20, 20, "text", id="content_in_parts"),
        pytest.param("text_completion", [text(""), text("a")], 10, 20, "text", id="completion_without_text"),
        pytest.param("text_completion", [text("", "length"), summed(1)], 10, None, None, id="one_token_shown_by_usage"),
        pytest.param("text_completion", [text("", "stop"), summed(0)], None, None, None, id="no_token_at_all"),
        pytest.param("chat", [ROLE, delta(finish="stop", usage=1)], 20, None, None, id="one_token_in_the_finish_chunk"),
        pytest.param("chat", [ROLE, summed(0)], None, None, None, id="usage_only"),
    ],
)
def test_first_token_and_first_text(
    operation: str, events: list[Event | str], token_ms: int | None, text_ms: int | None, kind: str | None
) -> None:
    facts = streamed([*events, DONE], operation)
    assert facts.ttft_token_ns == (None if token_ms is None else token_ms * MS)
    assert facts.ttft_text_ns == (None if text_ms is None else text_ms * MS)
    assert facts.ttft_text_kind == kind


def test_a_token_without_text_makes_no_stream_gap_but_an_itl_sample() -> None:
    facts = streamed(
        [ROLE, delta(ids=1, content="a"), delta(ids=1, content=""), delta(ids=2, content="b"), delta(finish="stop"), DONE]
    )
    assert facts.gaps is not None
    assert (facts.gaps.count, facts.gaps.sum_ns) == (1, 20 * MS)
    assert facts.itl is not None
    assert (facts.itl.unit, facts.itl.count, facts.itl.sum_ns, facts.itl.max_ns) == ("token", 3, 20 * MS, 10 * MS)
    assert (facts.output_tokens, facts.tpot_mean_ns) == (4, round(20 * MS / 3))


def test_per_token_times_need_every_chunk_counted() -> None:
    facts = streamed(
        [delta(usage=1, content="a"), delta(content="b"), delta(usage=3, content="c"), delta(finish="stop"), DONE], requested=True
    )
    assert facts.itl is None
    assert facts.output_tokens == 3


def test_a_sum_in_the_finish_chunk_is_no_token() -> None:
    facts = streamed([ROLE, delta(content="a"), delta(content="b"), delta(finish="stop", usage=9), DONE])
    assert (facts.output_tokens, facts.last_content_ns, facts.itl, facts.tpot_mean_ns) == (9, 30 * MS, None, round(10 * MS / 8))


@pytest.mark.parametrize(("total", "known"), [(4, True), (5, False), (None, True)])
def test_running_totals_are_per_choice_and_must_agree_with_the_sum(total: int | None, known: bool) -> None:
    events: list[Event | str] = [
        delta(0, usage=1, content="a"),
        delta(1, usage=1, content="a"),
        delta(0, usage=2, content="b", finish="stop"),
        delta(1, usage=2, content="b", finish="stop"),
        *([summed(total)] if total is not None else []),
        DONE,
    ]
    facts = streamed(events, choices=2, requested=True)
    assert facts.output_tokens == (total or 4)
    assert (facts.itl is not None) is known
    assert facts.gaps is not None
    assert (facts.gaps.count, facts.gaps.sum_ns) == (2, 40 * MS)


@pytest.mark.parametrize(
    ("events", "end", "outcome"),
    [
        pytest.param([delta(content="a"), delta(finish="stop"), DONE], End.CLEAN, Outcome.OK, id="whole"),
        pytest.param([delta(content="a"), delta(finish="stop"), DONE], End.UPSTREAM_CUT, Outcome.OK, id="cut_after_done"),
        pytest.param([delta(content="a"), delta(finish="stop")], End.CLEAN, Outcome.OK, id="finish_only"),
        pytest.param([delta(content="a"), delta(finish="stop")], End.CLIENT_GONE, Outcome.OK, id="client_had_all"),
        pytest.param(
            [delta(content="a"), delta(finish="stop")], End.UPSTREAM_CUT, Outcome.UPSTREAM_DISCONNECT, id="cut_before_done"
        ),
        pytest.param([delta(content="a")], End.CLIENT_GONE, Outcome.CLIENT_DISCONNECT, id="client_gone"),
        pytest.param([], End.CLIENT_GONE, Outcome.CLIENT_DISCONNECT, id="client_gone_before_all"),
        pytest.param([delta(content="a")], End.UPSTREAM_CUT, Outcome.UPSTREAM_DISCONNECT, id="cut"),
        pytest.param([delta(content="a")], End.TIMED_OUT, Outcome.TIMED_OUT, id="timed_out"),
        pytest.param([delta(content="a")], End.IDLE_AFTER_FINISH, Outcome.TIMED_OUT, id="idle_without_finish"),
        pytest.param([], End.CLEAN, Outcome.TRUNCATED, id="nothing"),
        pytest.param([delta(content="a"), delta(finish="abort"), DONE], End.CLEAN, Outcome.ABORTED, id="aborted"),
        pytest.param([delta(content="a"), delta(finish="error"), DONE], End.CLEAN, Outcome.STREAM_ERROR, id="finish_error"),
        pytest.param(
            [delta(0, content="a"), delta(1, content="a"), delta(0, finish="stop")], End.CLEAN, Outcome.TRUNCATED, id="one_of_two"
        ),
        pytest.param(
            [delta(0, content="a"), delta(1, content="a"), delta(0, finish="stop"), DONE],
            End.CLEAN,
            Outcome.UNKNOWN_FINISH,
            id="one_of_two_done",
        ),
    ],
)
def test_ends(events: list[Event | str], end: End, outcome: Outcome) -> None:
    assert streamed(events, choices=2, end=end).outcome is outcome


@pytest.mark.parametrize(
    ("operation", "event", "kind", "code"),
    [
        pytest.param(
            "chat",
            {"error": {"message": "secret", "type": "InternalServerError", "param": None, "code": 500}},
            "InternalServerError",
            "500",
            id="vllm",
        ),
        pytest.param(
            "text_completion",
            {"object": "error", "message": "secret", "type": "BadRequestError", "code": 400},
            "BadRequestError",
            "400",
            id="vllm_old",
        ),
        pytest.param("chat", {"error": "secret prompt text"}, None, None, id="bare_string"),
        pytest.param("chat", {"error": {"type": "the prompt: secret", "code": True}}, None, None, id="not_a_word"),
        pytest.param("chat", {"choices": 7, "error": {"type": "x"}}, "x", None, id="odd_types"),
        pytest.param(
            "messages",
            {"type": "error", "error": {"type": "overloaded_error", "message": "secret"}},
            "overloaded_error",
            None,
            id="messages",
        ),
        pytest.param(
            "responses",
            {"type": "error", "code": "server_error", "message": "secret"},
            "error",
            "server_error",
            id="responses_event",
        ),
    ],
)
def test_an_error_inside_200_keeps_type_and_code_only(operation: str, event: Event, kind: str | None, code: str | None) -> None:
    facts = streamed([event, DONE], operation)
    assert (facts.outcome, facts.error_type, facts.error_code) == (Outcome.STREAM_ERROR, kind, code)
    assert "secret" not in repr(facts)


def test_an_event_named_error_is_one() -> None:
    reader = ResponseReader(
        "chat", choices=1, status=200, content_type="text/event-stream", content_encoding=None, continuous_usage=None
    )
    reader.feed(b'event: error\ndata: {"type":"rate_limit_exceeded","message":"secret"}\n\n', MS)
    reader.finish(2 * MS, End.CLEAN)
    assert (reader.facts().outcome, reader.facts().error_type) == (Outcome.STREAM_ERROR, "rate_limit_exceeded")


# --- messages -------------------------------------------------------------------------------------------------------------


def block(kind: str, **members: Any) -> Event:
    return {"type": "content_block_delta", "index": 0, "delta": {"type": kind, **members}}


START: Event = {
    "type": "message_start",
    "message": {"id": "msg_1", "model": "m", "usage": {"input_tokens": 9, "output_tokens": 0, "cache_read_input_tokens": 4}},
}
STOP: list[Event] = [
    {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 3}},
    {"type": "message_stop"},
]


@pytest.mark.parametrize(
    ("first", "kind"),
    [
        (block("text_delta", text="a"), "text"),
        (block("thinking_delta", thinking="a"), "reasoning"),
        (block("input_json_delta", partial_json="{"), "tool_call"),
        ({"type": "content_block_start", "index": 0, "content_block": {"type": "tool_use", "id": "t", "name": "f"}}, "tool_call"),
    ],
)
def test_messages(first: Event, kind: str) -> None:
    quiet: list[Event] = [
        {"type": "ping"},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        block("text_delta", text=""),
        block("signature_delta", signature="x"),
    ]
    facts = streamed([START, *quiet, first, block("text_delta", text="b"), {"type": "content_block_stop"}, *STOP], "messages")
    assert (facts.ttft_token_ns, facts.ttft_text_ns, facts.ttft_text_kind) == (60 * MS, 60 * MS, kind)
    assert (facts.prompt_tokens, facts.output_tokens, facts.cached_tokens) == (9, 3, 4)
    assert (facts.response_id, facts.model, facts.finish_reasons) == ("msg_1", "m", ("end_turn",))
    assert (facts.outcome, facts.events, facts.tpot_mean_ns) == (Outcome.OK, 2, 5 * MS)
    assert facts.gaps is not None
    assert facts.gaps.sum_ns == 10 * MS


def test_messages_cut_before_their_stop() -> None:
    assert streamed([START, block("text_delta", text="a")], "messages").outcome is Outcome.TRUNCATED


# --- responses ------------------------------------------------------------------------------------------------------------


def responded(status: str, **members: Any) -> Event:
    return {"type": f"response.{status}", "response": {"id": "resp_1", "model": "m", "status": status, **members}}


@pytest.mark.parametrize(
    ("kind", "shown"),
    [
        ("response.output_text.delta", "text"),
        ("response.reasoning_text.delta", "reasoning"),
        ("response.reasoning_summary_text.delta", "reasoning"),
        ("response.refusal.delta", "refusal"),
        ("response.function_call_arguments.delta", "tool_call"),
        ("response.mcp_call_arguments.delta", "tool_call"),
    ],
)
def test_responses_first_delta(kind: str, shown: str) -> None:
    usage = {"input_tokens": 7, "output_tokens": 2, "input_tokens_details": {"cached_tokens": 5}}
    events: list[Event | str] = [
        responded("created", usage=None),
        {"type": "response.output_item.added", "item": {"type": "function_call", "name": "f"}},
        {"type": kind, "delta": ""},
        {"type": kind, "delta": "x"},
        {"type": kind, "delta": "y"},
        responded("completed", usage=usage, output=[]),
    ]
    facts = streamed(events, "responses")
    assert (facts.ttft_token_ns, facts.ttft_text_kind, facts.events) == (40 * MS, shown, 2)
    assert (facts.prompt_tokens, facts.output_tokens, facts.cached_tokens) == (7, 2, 5)
    assert (facts.outcome, facts.model, facts.tpot_mean_ns) == (Outcome.OK, "m", 10 * MS)


def test_responses_of_servers_that_send_no_deltas() -> None:
    facts = streamed(
        [responded("created"), {"type": "response.output_text.done", "text": "a"}, responded("completed")], "responses"
    )
    assert (facts.ttft_token_ns, facts.outcome) == (20 * MS, Outcome.OK)


def test_an_incomplete_response_says_so() -> None:
    facts = streamed([responded("incomplete", incomplete_details={"reason": "max_output_tokens"})], "responses")
    assert (facts.outcome, facts.finish_reasons) == (Outcome.INCOMPLETE, ("max_output_tokens",))


def test_a_cancelled_response_was_aborted() -> None:
    assert streamed([responded("cancelled")], "responses").outcome is Outcome.ABORTED


def test_a_response_cut_before_its_end_is_truncated() -> None:
    facts = streamed([responded("created"), {"type": "response.output_text.delta", "delta": "a"}], "responses")
    assert facts.outcome is Outcome.TRUNCATED


# --- bodies that are not streamed -------------------------------------------------------------------------------------------

KV = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[1, 2, 3, 4]],
    "remote_engine_id": "3780e0c7-d215-4798-ab76-85327e69834f",
    "remote_request_id": "cmpl-lab-0001-0-9c60a41c",
    "remote_host": "127.0.0.1",
    "remote_port": 5600,
    "remote_num_tokens": 121,
    "transfer_mode": "pull",
}


def test_a_prefill_answer_hands_its_blocks_over() -> None:
    found = {
        "id": "cmpl-lab-0001",
        "model": "tiny",
        "choices": [{"index": 0, "text": "secret", "finish_reason": "length"}],
        "usage": {"prompt_tokens": 121, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 64}},
        "kv_transfer_params": KV,
    }
    facts = body(found, "text_completion")
    assert facts.kv_out == KvParams(
        do_remote_prefill=True,
        do_remote_decode=False,
        remote_engine_id="3780e0c7-d215-4798-ab76-85327e69834f",
        remote_request_id="cmpl-lab-0001-0-9c60a41c",
        remote_host="127.0.0.1",
        remote_port=5600,
        remote_blocks=4,
        remote_num_tokens=121,
        transfer_mode="pull",
    )
    assert (facts.response_id, facts.model, facts.finish_reasons) == ("cmpl-lab-0001", "tiny", ("length",))
    assert (facts.prompt_tokens, facts.output_tokens, facts.cached_tokens) == (121, 1, 64)
    assert (facts.stream, facts.ttfb_ns, facts.ttft_token_ns, facts.ttft_text_ns) == (False, 5 * MS, None, None)
    assert (facts.outcome, facts.tpot_mean_ns, facts.gaps) == (Outcome.OK, None, None)
    assert "secret" not in repr(facts)


def test_a_stream_hands_over_in_any_chunk() -> None:
    facts = streamed([delta(content="a"), {**delta(finish="stop"), "kv_transfer_params": KV}, DONE])
    assert facts.kv_out is not None
    assert facts.kv_out.remote_blocks == 4
    assert streamed([{**delta(content="a"), "kv_transfer_params": None}]).kv_out is None


@pytest.mark.parametrize(
    ("operation", "found", "outcome", "reasons"),
    [
        pytest.param("messages", {"id": "m", "stop_reason": "end_turn"}, Outcome.OK, ("end_turn",), id="messages"),
        pytest.param("responses", {"id": "r", "status": "completed"}, Outcome.OK, ("completed",), id="responses"),
        pytest.param(
            "responses",
            {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}},
            Outcome.INCOMPLETE,
            ("max_output_tokens",),
            id="incomplete",
        ),
        pytest.param(
            "responses", {"status": "failed", "error": {"code": "server_error"}}, Outcome.STREAM_ERROR, ("error",), id="failed"
        ),
        pytest.param("responses", {"status": "in_progress"}, Outcome.OK, (), id="background"),
        pytest.param("chat", {"error": {"type": "x"}}, Outcome.STREAM_ERROR, (), id="error_in_200"),
        pytest.param("chat", {"choices": [{"index": 1, "finish_reason": "abort"}]}, Outcome.ABORTED, ("abort",), id="abort"),
        pytest.param("chat", {"choices": [{"finish_reason": "odd words: secret"}]}, Outcome.OK, ("other",), id="not_a_word"),
        pytest.param("chat", {"choices": 3, "usage": [], "id": 4, "kv_transfer_params": "x"}, Outcome.OK, (), id="odd_types"),
        pytest.param("chat", b"", Outcome.OK, (), id="empty"),
        pytest.param(None, b"# metrics", Outcome.OK, (), id="not_ours"),
    ],
)
def test_bodies(operation: str | None, found: object, outcome: Outcome, reasons: tuple[str, ...]) -> None:
    facts = body(found, operation)
    assert (facts.outcome, facts.finish_reasons, facts.hints) == (outcome, reasons, ())


@pytest.mark.parametrize(
    ("found", "kind", "code"),
    [
        pytest.param({"error": {"message": "secret", "type": "NotFoundError", "code": 404}}, "NotFoundError", "404", id="vllm"),
        pytest.param(
            {"object": "error", "message": "secret", "type": "BadRequestError", "code": 400}, "BadRequestError", "400", id="old"
        ),
        pytest.param({"type": "error", "error": {"type": "rate_limit_error"}}, "rate_limit_error", None, id="messages"),
        pytest.param({"detail": "secret"}, None, None, id="fastapi"),
        pytest.param(b"secret words", None, None, id="text"),
        pytest.param(b"", None, None, id="empty"),
    ],
)
@pytest.mark.parametrize("operation", ["chat", None])
def test_an_error_status_keeps_type_and_code_only(
    operation: str | None, found: object, kind: str | None, code: str | None
) -> None:
    facts = body(found, operation, status=404)
    assert (facts.outcome, facts.error_type, facts.error_code) == (Outcome.HTTP_ERROR, kind, code)
    assert "secret" not in repr(facts)


@pytest.mark.parametrize(
    ("end", "outcome", "hints"),
    [
        (End.CLEAN, Outcome.UNKNOWN, (Hint.UNDECODABLE,)),
        (End.UPSTREAM_CUT, Outcome.UPSTREAM_DISCONNECT, ()),
        (End.CLIENT_GONE, Outcome.CLIENT_DISCONNECT, ()),
        (End.TIMED_OUT, Outcome.TIMED_OUT, ()),
    ],
)
@pytest.mark.parametrize(
    "found", [b'{"id":"x"', b'{"id":"x"} trailing', b"[1]", b"[" * 50_000], ids=["cut", "garbage", "list", "deep"]
)
def test_a_body_that_is_no_json_object(found: bytes, end: End, outcome: Outcome, hints: tuple[Hint, ...]) -> None:
    facts = body(found, end=end)
    assert (facts.outcome, facts.hints, facts.response_id) == (outcome, hints, None)


def test_a_body_above_the_limit_stays_unknown() -> None:
    facts = body({"id": "x", "choices": [{"text": "y" * BODY_LIMIT_BYTES}]})
    assert (facts.outcome, facts.response_id, facts.ttfb_ns) == (Outcome.OK, None, 5 * MS)


def test_only_the_first_end_counts_and_the_reader_says_when_a_close_may_come() -> None:
    reader = ResponseReader(
        "chat", choices=1, status=200, content_type="Text/Event-Stream", content_encoding="", continuous_usage=None
    )
    reader.feed(b"", MS)
    assert (reader.facts().ttfb_ns, reader.finished, reader.events) == (None, False, 0)
    reader.feed(b"data: " + json.dumps(delta(content="a", finish="stop")).encode() + b"\n\n", MS)
    assert (reader.finished, reader.events) == (True, 1)
    reader.finish(2 * MS, End.CLEAN)
    reader.finish(3 * MS, End.TIMED_OUT)
    assert (reader.facts().outcome, reader.facts().end_ns, reader.facts().stream) == (Outcome.OK, 2 * MS, True)
