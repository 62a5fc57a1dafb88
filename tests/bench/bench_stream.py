"""Measure what it costs to read one chunk of a stream.

The figure is the reader alone: the cost of the loop around it is subtracted.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

from handrail.metrics.exponential_histogram import GapSketch
from handrail_sidecar.proxy.request_body import RequestInspector
from handrail_sidecar.proxy.response_reader import ResponseReader

_CHUNKS = 4000
_REPEATS = 9
_GAP_NS = 24_000_000

_CHAT = (
    b'data: {"id":"chatcmpl-lab-0002","object":"chat.completion.chunk","created":1795970465,"model":"tiny",'
    b'"choices":[{"index":0,"delta":{"content":" token"},"logprobs":null,"finish_reason":null,"token_ids":null}]}\n\n'
)
_TEXT = (
    b'data: {"id":"cmpl-lab-0001","object":"text_completion","created":1795970465,"model":"tiny","choices":[{"index":0,'
    b'"text":" os","logprobs":null,"finish_reason":null,"stop_reason":null,"prompt_token_ids":null,"token_ids":null}]}\n\n'
)
_USAGE = _CHAT.replace(b"}]}\n\n", b'}],"usage":{"prompt_tokens":116,"total_tokens":128,"completion_tokens":12}}\n\n')
_MESSAGE = (
    b"event: content_block_delta\ndata: "
    b'{"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":" token"}}\n\n'
)


class _Nothing:
    """A stand-in whose cost is subtracted: the same call without the reader."""

    def feed(self, data: bytes, at_ns: int) -> None:
        """Do nothing."""


def _loop_us(feed: Callable[[bytes, int], None], chunk: bytes) -> float:
    begin = time.process_time_ns()
    for number in range(_CHUNKS):
        feed(chunk, number * _GAP_NS)
    return (time.process_time_ns() - begin) / _CHUNKS / 1000


def _reader(operation: str, choices: int | None) -> ResponseReader:
    reader = ResponseReader(
        operation,
        choices=choices,
        status=200,
        content_type="text/event-stream; charset=utf-8",
        content_encoding=None,
        continuous_usage=None,
    )
    reader.feed(b": begun\n\n", 0)
    return reader


def _chunk_us(operation: str, chunk: bytes, choices: int | None = 1) -> float:
    bare = median(_loop_us(_Nothing().feed, chunk) for _ in range(_REPEATS))
    return median(_loop_us(_reader(operation, choices).feed, chunk) for _ in range(_REPEATS)) - bare


def _timed(work: Callable[[], object], times: int) -> float:
    """Return the median process time of one call, in us."""
    samples = []
    for _ in range(_REPEATS):
        begin = time.process_time_ns()
        for _ in range(times):
            work()
        samples.append((time.process_time_ns() - begin) / times / 1000)
    return median(samples)


def _inspect(body: bytes) -> None:
    inspector = RequestInspector("/v1/chat/completions", "application/json", len(body))
    for begin in range(0, len(body), 65536):
        inspector.feed(body[begin : begin + 65536])
    inspector.facts()


def _row(name: str, value: float, unit: str, budget: float | None = None) -> dict[str, Any]:
    ratio = None if budget is None else value / budget
    return {
        "name": name,
        "value": value,
        "unit": unit,
        "budget": budget,
        "ratio": ratio,
        "met": None if ratio is None else ratio <= 1,
    }


def run() -> list[dict[str, Any]]:
    """Return every row of this benchmark. Takes about two seconds."""
    gaps = [20_000_000 + number * 7919 % 9_000_000 for number in range(512)]
    chat = b'{"model":"m","messages":[{"role":"user","content":"' + b"word " * 200 + b'"}],"stream":true,"max_tokens":128}'
    large = b'{"model":"m","messages":[{"role":"user","content":"' + b"word\\n" * 800_000 + b'"}],"stream":true}'
    return [
        _row("stream_reader_us_per_chunk", _chunk_us("chat", _CHAT), "us", 4),
        _row("stream_reader_completions_us_per_chunk", _chunk_us("text_completion", _TEXT), "us", 4),
        _row("stream_reader_with_usage_us_per_chunk", _chunk_us("chat", _USAGE), "us"),
        _row("stream_reader_unknown_n_us_per_chunk", _chunk_us("chat", _CHAT, None), "us"),
        _row("stream_reader_two_events_a_read_us_per_chunk", _chunk_us("chat", _CHAT * 2) / 2, "us"),
        _row("stream_reader_messages_us_per_chunk", _chunk_us("messages", _MESSAGE), "us"),
        _row("gap_sketch_us_per_gap", _timed(lambda: GapSketch().extend(gaps), 20) / len(gaps), "us"),
        _row("request_inspector_us_per_body", _timed(lambda: _inspect(chat), 500), "us"),
        _row("request_inspector_ms_per_mib", _timed(lambda: _inspect(large), 1) / 1000 / (len(large) / (1 << 20)), "ms", 1),
    ]
