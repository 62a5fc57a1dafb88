"""Send OpenAI requests and keep every received chunk with its time.

The load client of the tests uses nothing under test.
Each request carries its own ``X-Request-Id`` and ``traceparent`` (or none). Completions and chat, streamed and whole,
alternate.
Times are monotonic, taken as soon as bytes reach the reader. The bytes are parsed after the load.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

WORDS = (
    "import",
    "def",
    "return",
    "self",
    "class",
    "for",
    "if",
    "else",
    "try",
    "None",
    "value",
    "key",
    "name",
    "path",
    "data",
    "open",
)
TIMEOUT_S = 400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request to send."""

    request_id: str | None
    traceparent: str | None
    chat: bool
    stream: bool
    prompt: str
    max_tokens: int = 12
    model: str = "tiny"
    more_headers: tuple[tuple[str, str], ...] = ()
    leaves_after_s: float | None = None  # the client gives up then

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.chat else "/v1/completions"

    @property
    def headers(self) -> dict[str, str]:
        pairs = (("X-Request-Id", self.request_id), ("traceparent", self.traceparent))
        return {name: value for name, value in (*pairs, *self.more_headers) if value is not None}

    @property
    def body(self) -> dict[str, Any]:
        text = {"messages": [{"role": "user", "content": self.prompt}]} if self.chat else {"prompt": self.prompt}
        fields = {"model": self.model, "max_tokens": self.max_tokens, "ignore_eos": True, "temperature": 0, **text}
        return {**fields, "stream": True, "stream_options": {"include_usage": True}} if self.stream else fields


@dataclass(frozen=True, slots=True)
class Chunk:
    """Bytes as the reader got them; ``at_ns`` since the request was sent."""

    at_ns: int
    data: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What one response contains, read from its bytes.

    Times are since the request was sent; None: not in this response.
    """

    ttft_token_ns: int | None = None  # first event that carries a generated token, its text may be empty
    ttft_content_ns: int | None = None  # first event with text
    token_events: int = 0
    response_id: str | None = None
    usage: dict[str, Any] | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One request and its response.

    ``sent_ns`` is monotonic; ``sent_unix_ns`` is the wall clock at the same moment.
    """

    request: Request
    sent_ns: int
    sent_unix_ns: int
    duration_ns: int
    status: int | None
    headers: dict[str, str] = field(default_factory=dict)  # of the response, names in lower case
    chunks: tuple[Chunk, ...] = ()
    answer: Answer = field(default_factory=Answer)

    @property
    def trace_id(self) -> str | None:
        return self.request.traceparent.split("-")[1] if self.request.traceparent else None


# --- reading a response -----------------------------------------------------------------------------------------------------


def events(chunks: Iterable[Chunk]) -> Iterator[tuple[int, str]]:
    """Yield ``(at_ns, data)`` of each server-sent event.

    The time is that of the chunk that completed the event's line.
    """
    rest = b""
    for chunk in chunks:
        *lines, rest = (rest + chunk.data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield chunk.at_ns, line[5:].strip().decode(errors="replace")


def _has_token(choice: dict[str, Any]) -> bool:
    """Tell whether a streamed choice carries a generated token.

    The role event of a chat stream and a bare finish_reason carry none.
    """
    if "text" in choice:
        return True
    delta = choice.get("delta") or {}
    spoken = any(delta.get(name) is not None for name in ("content", "reasoning_content", "reasoning", "tool_calls"))
    return spoken and "role" not in delta


def _text(choice: dict[str, Any]) -> str:
    delta = choice.get("delta") or {}
    return str(choice.get("text") or delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning") or "")


def read_stream(chunks: Sequence[Chunk]) -> Answer:
    """Read a streamed response, with times."""
    token_ns = content_ns = response_id = usage = error = None
    token_events = 0
    for at_ns, data in events(chunks):
        if data == "[DONE]":
            continue
        event = json.loads(data)
        if "error" in event:
            error = str(event["error"].get("type") or event["error"])
            continue
        response_id = response_id or event.get("id")
        usage = event.get("usage") or usage
        for choice in event.get("choices") or ():
            if _has_token(choice):
                token_events += 1
                token_ns = at_ns if token_ns is None else token_ns
            if content_ns is None and _text(choice):
                content_ns = at_ns
    return Answer(
        ttft_token_ns=token_ns,
        ttft_content_ns=content_ns,
        token_events=token_events,
        response_id=response_id,
        usage=usage,
        error=error,
    )


def read_whole(chunks: Sequence[Chunk], status: int) -> Answer:
    """Read a response without a stream."""
    text = b"".join(chunk.data for chunk in chunks)
    try:
        answer = json.loads(text)
    except ValueError:
        return Answer(error=f"HTTP {status}: not JSON")
    if status != 200:
        return Answer(error=f"HTTP {status}: {(answer.get('error') or {}).get('type')}")
    return Answer(response_id=answer.get("id"), usage=answer.get("usage"))


# --- sending ----------------------------------------------------------------------------------------------------------------


async def send(session: aiohttp.ClientSession, base_url: str, request: Request) -> Result:
    """Send one request and read the whole answer.

    A broken connection is an answer with an error, not an exception.
    """
    body = json.dumps(request.body).encode()
    headers = {"Content-Type": "application/json", **request.headers}
    chunks: list[Chunk] = []
    status: int | None = None
    kept: dict[str, str] = {}
    sent_ns, sent_unix_ns = time.monotonic_ns(), time.time_ns()
    timeout = aiohttp.ClientTimeout(total=request.leaves_after_s or TIMEOUT_S)
    try:
        async with session.post(base_url + request.path, data=body, headers=headers, timeout=timeout) as response:
            status = response.status
            kept = {name.lower(): value for name, value in response.headers.items()}
            async for data in response.content.iter_any():
                chunks.append(Chunk(time.monotonic_ns() - sent_ns, data))  # noqa: PERF401 (what came before an error is kept)
    except (aiohttp.ClientError, asyncio.TimeoutError) as error:
        answer = Answer(error=f"{type(error).__name__}: {error}")
    else:
        streamed = kept.get("content-type", "").startswith("text/event-stream")
        answer = read_stream(chunks) if streamed else read_whole(chunks, status)
    return Result(
        request=request,
        sent_ns=sent_ns,
        sent_unix_ns=sent_unix_ns,
        duration_ns=time.monotonic_ns() - sent_ns,
        status=status,
        headers=kept,
        chunks=tuple(chunks),
        answer=answer,
    )


async def send_all(targets: Sequence[tuple[str, Request]], concurrency: int) -> list[Result]:
    """Send each request to its base URL, at most ``concurrency`` at once.

    They start in order; the results are in the same order.
    """
    gate = asyncio.Semaphore(concurrency)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def one(base_url: str, request: Request) -> Result:
            async with gate:
                return await send(session, base_url, request)

        return list(await asyncio.gather(*(one(*target) for target in targets)))


def load(base_url: str, requests: Sequence[Request], concurrency: int) -> list[Result]:
    """Call ``send_all`` for one place, from code that is not asynchronous."""
    return asyncio.run(send_all([(base_url, request) for request in requests], concurrency))


# --- what to send -----------------------------------------------------------------------------------------------------------


def new_traceparent(source: random.Random, trace_id: str | None = None) -> str:
    """Make a sampled W3C trace context, in the given trace or in a new one."""
    return f"00-{trace_id or f'{source.getrandbits(128) | 1:032x}'}-{source.getrandbits(64) | 1:016x}-01"


def prompt(source: random.Random, words: tuple[int, int] = (40, 120)) -> str:
    """Make a prompt of random words, so that no two share a cached prefix."""
    return " ".join(source.choice(WORDS) for _ in range(source.randint(*words)))


def mixed(count: int, tag: str, *, context: bool = True, seed: int = 1) -> list[Request]:
    """Make ``count`` requests with the ids ``<tag>-0000`` and so on.

    They are completions and chat, streamed and whole, in turn.
    """
    source = random.Random(f"{tag}:{seed}")
    return [
        Request(
            request_id=f"{tag}-{number:04d}",
            traceparent=new_traceparent(source) if context else None,
            chat=number % 2 == 1,
            stream=number % 4 < 2,
            prompt=prompt(source),
        )
        for number in range(count)
    ]
