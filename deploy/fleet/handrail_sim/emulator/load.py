"""A client of the fleet that records the times it measures, one record a request.

It is the referee's side of every comparison.
Times are monotonic ns from just before the request goes out. ``started_unix_ns`` is the wall clock at the same moment.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain, islice
from random import Random
from typing import Any

import aiohttp

from handrail_sim.emulator.delivery import CLIENT, SLOW_CLIENTS
from handrail_sim.emulator.kv import PREFIX_TOKENS
from handrail_sim.emulator.noise import uniform
from handrail_sim.emulator.text import WORDS
from handrail_sim.emulator.workload import Arrival

_TOKEN_IDS = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSettings:
    """Settings of the load.

    ``rate`` (requests/s, Poisson) is open loop. Without it, ``concurrency`` requests are always under way.
    ``arrivals``: replaces both with requests at these times, as completions of made-up token ids with the same prefixes.
    ``slow_clients_s``: the fault ``client_slow``. One stream in five is not read for this many seconds.
    """

    url: str
    requests: int
    concurrency: int = 8
    rate: float | None = None
    streaming_share: float = 0.8
    chat_share: float = 0.5
    seed: int = 0
    model: str | None = None  # None: the model that the server serves
    id_prefix: str = "load"
    traceparent: bool = True
    prompt_words: tuple[int, int] = (50, 400)
    answer_tokens: tuple[int, int] = (8, 40)
    timeout_s: float = 120.0
    arrivals: tuple[Arrival, ...] = ()
    slow_clients_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """One request to send; in an open loop, ``due_ns`` after the start."""

    index: int
    request_id: str
    chat: bool
    stream: bool
    traceparent: str | None
    body: dict[str, Any]
    due_ns: int | None = None

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.chat else "/v1/completions"


@dataclass(frozen=True, slots=True, kw_only=True)
class SentRequest:
    """One request's result.

    ``ttft_token_ns``: the first event that carries a generated token, whose text may be empty.
    ``chunk_ns``: all such events. ``text_ns``: those of them that have text.
    A request that is not streamed has none of these.
    """

    index: int
    request_id: str
    traceparent: str | None
    path: str
    stream: bool
    started_unix_ns: int
    status: int | None
    ttfb_ns: int | None
    ttft_token_ns: int | None
    ttft_text_ns: int | None
    duration_ns: int
    chunk_ns: tuple[int, ...]
    response_id: str | None
    prompt_tokens: int | None
    completion_tokens: int | None
    error: str | None
    text_ns: tuple[int, ...] = ()


def plans(settings: LoadSettings) -> list[ScheduledRequest]:
    """Make all requests of a run; equal seeds give equal runs."""
    random = Random(settings.seed)
    if settings.arrivals:
        return [_replayed(settings, index, arrival, random) for index, arrival in enumerate(settings.arrivals)]
    made = []
    for index in range(settings.requests):
        chat, stream = random.random() < settings.chat_share, random.random() < settings.streaming_share
        words = " ".join(random.choice(WORDS) for _ in range(random.randint(*settings.prompt_words)))
        query = {"messages": [{"role": "user", "content": words}]} if chat else {"prompt": words}
        body = _body(settings, random.randint(*settings.answer_tokens), stream, query)
        made.append(ScheduledRequest(index, _id(settings, index), chat, stream, _context(settings, random), body))
    if settings.rate is None:
        return made
    pace = Random(settings.seed + 1)
    due_s = 0.0
    for index, plan in enumerate(made):
        made[index] = replace(plan, due_ns=round(due_s * 1e9))
        due_s += pace.expovariate(settings.rate)
    return made


def _replayed(settings: LoadSettings, index: int, arrival: Arrival, random: Random) -> ScheduledRequest:
    stream = random.random() < settings.streaming_share
    shared = (block * PREFIX_TOKENS + place for block in arrival.blocks for place in range(PREFIX_TOKENS))
    own = (index * 1_000_003 + place for place in range(arrival.prompt_tokens))
    tokens = [token % _TOKEN_IDS for token in islice(chain(shared, own), arrival.prompt_tokens)]
    body = _body(settings, arrival.answer_tokens, stream, {"prompt": tokens})
    return ScheduledRequest(index, _id(settings, index), False, stream, _context(settings, random), body, arrival.at_ns)


def _body(settings: LoadSettings, answer_tokens: int, stream: bool, fields: dict[str, Any]) -> dict[str, Any]:
    body: dict[str, Any] = {"max_tokens": answer_tokens, "ignore_eos": True, "stream": stream}
    if settings.model is not None:
        body["model"] = settings.model
    if stream:
        body["stream_options"] = {"include_usage": True}
    return body | fields


def _id(settings: LoadSettings, index: int) -> str:
    return f"{settings.id_prefix}-{index:05d}"


def _context(settings: LoadSettings, random: Random) -> str | None:
    if not settings.traceparent:
        return None
    return f"00-{random.getrandbits(128) or 1:032x}-{random.getrandbits(64) or 1:016x}-01"


class ResponseTimer:
    """Read one response piece by piece and record the times.

    The caller passes the clock in with every piece.
    """

    def __init__(self, chat: bool, stream: bool) -> None:
        self._chat = chat
        self._stream = stream
        self._rest = b""
        self.ttfb_ns: int | None = None
        self.ttft_text_ns: int | None = None
        self.chunk_ns: list[int] = []
        self.text_ns: list[int] = []
        self.response_id: str | None = None
        self.usage: dict[str, Any] = {}
        self.error: str | None = None

    def feed(self, piece: bytes, at_ns: int) -> None:
        if self.ttfb_ns is None:
            self.ttfb_ns = at_ns
        self._rest += piece
        if not self._stream:
            return
        *lines, self._rest = self._rest.split(b"\n")
        for line in lines:
            if line.startswith(b"data: ") and line != b"data: [DONE]":
                self._event(json.loads(line[6:]), at_ns)

    def end(self) -> None:
        if not self._stream:
            try:
                body = json.loads(self._rest)
            except ValueError:
                self.error = "not JSON"
                return
            self._common(body)

    def _event(self, event: dict[str, Any], at_ns: int) -> None:
        self._common(event)
        for choice in event.get("choices") or []:
            delta = choice.get("delta") or {}
            if self._chat and "role" in delta:
                continue  # sent before any token
            text = delta.get("content") if self._chat else choice.get("text")
            self.chunk_ns.append(at_ns)
            if text:
                self.text_ns.append(at_ns)
                self.ttft_text_ns = self.text_ns[0]

    def _common(self, body: dict[str, Any]) -> None:
        if "error" in body:
            self.error = str(body["error"].get("type") if isinstance(body["error"], dict) else body["error"])
        self.response_id = body.get("id") or self.response_id
        self.usage = body.get("usage") or self.usage


async def send(session: aiohttp.ClientSession, url: str, plan: ScheduledRequest, stands_s: float = 0.0) -> SentRequest:
    """Send one request; never raises for what the server does.

    The client reads nothing for ``stands_s``, from a quarter of the answer on.
    """
    headers = {"X-Request-Id": plan.request_id, **({"traceparent": plan.traceparent} if plan.traceparent else {})}
    watch = ResponseTimer(plan.chat, plan.stream)
    status = None
    started_unix_ns, started_ns = time.time_ns(), time.monotonic_ns()
    try:
        async with session.post(url + plan.path, json=plan.body, headers=headers) as answer:
            status = answer.status
            watch = ResponseTimer(plan.chat, plan.stream and status == 200)
            async for piece in answer.content.iter_any():
                watch.feed(piece, time.monotonic_ns() - started_ns)
                if stands_s and 4 * len(watch.chunk_ns) >= plan.body["max_tokens"]:
                    await asyncio.sleep(stands_s)
                    stands_s = 0.0
        watch.end()
        error = watch.error or (None if status == 200 else f"HTTP {status}")
    except (aiohttp.ClientError, asyncio.TimeoutError, ValueError) as failure:
        error = type(failure).__name__
    return SentRequest(
        index=plan.index,
        request_id=plan.request_id,
        traceparent=plan.traceparent,
        path=plan.path,
        stream=plan.stream,
        started_unix_ns=started_unix_ns,
        status=status,
        ttfb_ns=watch.ttfb_ns,
        ttft_token_ns=watch.chunk_ns[0] if watch.chunk_ns else None,
        ttft_text_ns=watch.ttft_text_ns,
        duration_ns=time.monotonic_ns() - started_ns,
        chunk_ns=tuple(watch.chunk_ns),
        response_id=watch.response_id,
        prompt_tokens=watch.usage.get("prompt_tokens"),
        completion_tokens=watch.usage.get("completion_tokens"),
        error=error,
        text_ns=tuple(watch.text_ns),
    )


async def run(settings: LoadSettings, report: Callable[[SentRequest], None]) -> None:
    """Send everything; ``report`` gets each request when it is over."""
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=settings.timeout_s)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        planned = plans(settings)
        if settings.arrivals or settings.rate is not None:
            await _open_loop(session, settings, planned, report)
        else:
            todo = iter(planned)

            async def worker() -> None:
                for plan in todo:  # shared: each worker takes the next request
                    report(await send(session, settings.url, plan, _stands_s(settings, plan)))

            await asyncio.gather(*(worker() for _ in range(min(settings.concurrency, settings.requests))))


async def _open_loop(
    session: aiohttp.ClientSession,
    settings: LoadSettings,
    planned: Sequence[ScheduledRequest],
    report: Callable[[SentRequest], None],
) -> None:
    loop = asyncio.get_running_loop()
    started_s = loop.time()

    async def one(plan: ScheduledRequest) -> None:
        report(await send(session, settings.url, plan, _stands_s(settings, plan)))

    tasks = []
    for plan in planned:
        await asyncio.sleep(max(0.0, started_s + (plan.due_ns or 0) / 1e9 - loop.time()))
        tasks.append(asyncio.create_task(one(plan)))
    await asyncio.gather(*tasks)


def _stands_s(settings: LoadSettings, plan: ScheduledRequest) -> float:
    """Return how long this client reads nothing; the same in every run of a seed."""
    slow = plan.stream and uniform(settings.seed, plan.index, CLIENT) < SLOW_CLIENTS
    return settings.slow_clients_s if slow else 0.0


def print_line(sent: SentRequest) -> None:
    sys.stdout.write(json.dumps(asdict(sent), separators=(",", ":")) + "\n")
    sys.stdout.flush()
