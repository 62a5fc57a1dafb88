"""The tests' own client: what it reads from bytes.

Events need not arrive whole.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm.client import Answer, Chunk, mixed, read_stream, read_whole


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def text(value: str) -> bytes:
    return event(id="cmpl-a", choices=[{"index": 0, "text": value}])


def delta(**fields: Any) -> bytes:
    return event(id="chatcmpl-a", choices=[{"index": 0, "delta": fields}])


DONE = b"data: [DONE]\n\n"
USAGE = event(id="cmpl-a", choices=[], usage={"completion_tokens": 2})

STREAMS: Mapping[str, tuple[Sequence[bytes], Mapping[str, Any]]] = {
    "completion": ([text("a"), text("b"), USAGE, DONE], {"token": 0, "content": 0, "events": 2, "usage": 2}),
    "a token without text first": ([text(""), text("b"), DONE], {"token": 0, "content": 1, "events": 2}),
    "chat: the role is no token": (
        [delta(role="assistant", content=""), delta(content="a"), DONE],
        {"token": 1, "content": 1, "events": 1},
    ),
    "chat: reasoning": (
        [delta(role="assistant", content=""), delta(reasoning_content="hm"), DONE],
        {"token": 1, "content": 1, "events": 1},
    ),
    "chat: a bare finish is no token": ([delta(content="a"), delta(), DONE], {"token": 0, "content": 0, "events": 1}),
    "an error inside": ([event(error={"type": "InternalServerError"}), DONE], {"error": "InternalServerError", "events": 0}),
    "nothing": ([], {"events": 0}),
}


@pytest.mark.parametrize(("parts", "expected"), STREAMS.values(), ids=STREAMS.keys())
def test_a_stream_is_read_at_the_times_of_its_chunks(parts: Sequence[bytes], expected: Mapping[str, Any]) -> None:
    answer = read_stream([Chunk(index, part) for index, part in enumerate(parts)])
    assert answer.ttft_token_ns == expected.get("token")
    assert answer.ttft_content_ns == expected.get("content")
    assert answer.token_events == expected["events"]
    assert answer.error == expected.get("error")
    assert (answer.usage or {}).get("completion_tokens") == expected.get("usage")


@given(st.lists(st.integers(1, 12), max_size=60))
def test_where_the_bytes_are_cut_does_not_matter(sizes: list[int]) -> None:
    whole = text("a") + text("é") + USAGE + DONE
    chunks, at = [], 0
    for size in [*sizes, len(whole)]:
        chunks.append(Chunk(7, whole[at : at + size]))
        at += size
    assert read_stream(chunks) == Answer(
        ttft_token_ns=7, ttft_content_ns=7, token_events=2, response_id="cmpl-a", usage={"completion_tokens": 2}
    )


@pytest.mark.parametrize(
    ("status", "body", "expected"),
    [
        pytest.param(200, b'{"id": "cmpl-a", "usage": {"completion_tokens": 1}}', None, id="answer"),
        pytest.param(500, b'{"error": {"type": "InternalServerError"}}', "HTTP 500: InternalServerError", id="error"),
        pytest.param(502, b"<html>", "HTTP 502: not JSON", id="not JSON"),
    ],
)
def test_a_whole_response(status: int, body: bytes, expected: str | None) -> None:
    answer = read_whole([Chunk(1, body[:5]), Chunk(2, body[5:])], status)
    assert answer.error == expected
    assert answer.response_id == ("cmpl-a" if expected is None else None)


def test_a_mixed_load_has_every_kind_equally_often_and_nothing_twice() -> None:
    requests = mixed(100, "mix")
    assert {(chat, stream): 25 for chat in (True, False) for stream in (True, False)} == {
        kind: sum((each.chat, each.stream) == kind for each in requests) for kind in {(r.chat, r.stream) for r in requests}
    }
    for name in ("request_id", "traceparent", "prompt"):
        assert len({getattr(each, name) for each in requests}) == 100
    assert mixed(100, "mix") == requests
    assert {each.traceparent for each in mixed(4, "mix", context=False)} == {None}
