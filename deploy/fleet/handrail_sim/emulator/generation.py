"""The state of an HTTP request in an engine process, and its record at the end.

The state is its choices in the core and the tokens on their way out. The record is its span and its truth.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

from handrail_sim.emulator.core import Ended, EngineJob, FinishReason
from handrail_sim.emulator.kv_handoff import Pull
from handrail_sim.emulator.openai import Ask
from handrail_sim.emulator.process import RunClock
from handrail_sim.emulator.spans import RequestFigures
from handrail_sim.emulator.text import TokenStream
from handrail_sim.emulator.truth import FetchTruth
from handrail_sim.emulator.truth_log import REFUSED, EngineSaw


class Outbox:
    """The tokens on their way to one response.

    Merges the tokens that the response has not taken yet, like vLLM's output collector.
    Its size is therefore bounded by the number of choices, and a slow response gets several tokens in one event.
    """

    def __init__(self) -> None:
        self._pending: dict[int, tuple[int, FinishReason | None]] = {}
        self._some = asyncio.Event()

    def put(self, choice: int, tokens: int, reason: FinishReason | None) -> None:
        before = self._pending.get(choice, (0, None))
        self._pending[choice] = (before[0] + tokens, reason)
        self._some.set()

    async def take(self) -> list[tuple[int, int, FinishReason | None]]:
        """Wait for at least one (choice, new tokens, finish reason or None)."""
        await self._some.wait()
        self._some.clear()
        taken = [(choice, tokens, reason) for choice, (tokens, reason) in self._pending.items()]
        self._pending.clear()
        return taken


@dataclass(frozen=True, slots=True)
class ArrivedRequest:
    """One HTTP request.

    ``stem``: the engine's name of it, which contains the caller's ``given`` id. ``drawn_from``: the key of its random draws.
    """

    stem: str
    given: str
    headers: dict[str, str]
    unix_ns: int
    monotonic_ns: int
    drawn_from: int


@dataclass(slots=True)
class ChoiceCall:
    """One choice of one HTTP request."""

    job: EngineJob
    span_id: str  # gen_ai.request.id: without the engine's own suffix
    choice: int
    ask: Ask
    arrived: ArrivedRequest
    outbox: Outbox
    blocks: tuple[int, ...]  # blocks of the prompt's prefix
    queued_unix_ns: int
    queued_ns: int
    first_ns: int | None = None
    gaps_ns: list[int] | None = None  # kept where the truth is recorded
    preemptions: int = 0
    pull: Pull | None = None
    ended: Ended | None = None


@dataclass(slots=True)
class Generation:
    """An HTTP request's state in its handler."""

    arrived: ArrivedRequest
    outbox: Outbox = field(default_factory=Outbox)
    calls: list[ChoiceCall] = field(default_factory=list)
    texts: list[TokenStream] = field(default_factory=list)
    made: list[int] = field(default_factory=list)
    sent_ns: int | None = None  # monotonic: when the first token, or the error, was written


def refused(host: str, clock: RunClock, arrived: ArrivedRequest, now_ns: int, prompt_tokens: int) -> EngineSaw:
    return EngineSaw(
        host=host,
        request_id=arrived.given,
        publish=True,
        load=False,
        reason=REFUSED,
        arrival_ns=clock.run_ns(arrived.monotonic_ns),
        end_ns=clock.run_ns(now_ns),
        prompt_tokens=prompt_tokens,
    )


def saw(host: str, clock: RunClock, generation: Generation, call: ChoiceCall, now_ns: int) -> EngineSaw:
    """Build the truth line of a ``call`` that is over at ``now_ns``."""
    arrived, job, ended, pull = generation.arrived, call.job, call.ended, call.pull

    def run(monotonic_ns: int | None) -> int | None:
        return None if monotonic_ns is None else clock.run_ns(monotonic_ns)

    times = ended.times if ended is not None else None
    return EngineSaw(
        host=host,
        request_id=arrived.given,
        publish=job.publish,
        load=job.load,
        reason=(ended.reason if ended is not None else FinishReason.ABORT).value,
        arrival_ns=clock.run_ns(arrived.monotonic_ns),
        end_ns=clock.run_ns(now_ns),
        prompt_tokens=job.prompt_tokens,
        queued_ns=clock.run_ns(call.queued_ns),
        scheduled_ns=run(times.scheduled_ns) if times else None,
        first_token_ns=run(times.first_token_ns) if times else None,
        last_token_ns=run(times.last_token_ns) if times else None,
        sent_ns=run(generation.sent_ns),
        answer_tokens=ended.generated if ended is not None else 0,
        cached_tokens=job.cached_tokens,
        preemptions=call.preemptions,
        gaps_ns=tuple(call.gaps_ns or ()),
        load_started_ns=run(pull.started_ns) if pull else None,
        contact_ns=run(pull.contact_ns) if pull else None,
        loaded_ns=run(pull.loaded_ns) if pull else None,
        seen_ns=run(pull.seen_ns) if pull else None,
        kv_bytes=pull.kv_bytes if pull else 0,
        peer=pull.peer if pull else None,
        fetch=(pull.fetch if pull else FetchTruth.NONE).value,
    )


def figures(clock: RunClock, call: ChoiceCall, ended: Ended, ttft_ns: int, e2e_ns: int) -> RequestFigures:
    """Compute the figures of vLLM's span when a request has ended.

    They are by the host's own clock.
    For a request whose load failed, vLLM 0.32 has 0 as the time when it was scheduled, and takes the failing output for the first
    and last token: all five such spans that were recorded show it (tests/data/recordings/otlp_failed_loads.jsonl).
    """
    times = ended.times
    scheduled, first, last = times.scheduled_ns, times.first_token_ns, times.last_token_ns
    if ended.reason is FinishReason.ERROR:
        scheduled, first = 0, (last := call.queued_ns + e2e_ns)
    queue_ns = scheduled - times.queued_ns if scheduled is not None else 0
    prefill_ns = first - scheduled if first is not None and scheduled is not None else 0
    decode_ns = last - first if last is not None and first is not None else 0

    def shown_s(true_ns: int) -> float:
        return clock.shows.elapsed_ns(true_ns) / 1e9

    return RequestFigures(
        request_id=call.span_id,
        arrival_unix_ns=clock.unix_ns(call.queued_unix_ns),
        end_unix_ns=clock.unix_ns(time.time_ns()),
        ttft_s=shown_s(ttft_ns),
        e2e_s=shown_s(e2e_ns),
        queue_s=shown_s(queue_ns),
        prefill_s=shown_s(prefill_ns),
        decode_s=shown_s(decode_ns),
        inference_s=shown_s(prefill_ns + decode_ns),
        prompt_tokens=call.job.prompt_tokens,
        completion_tokens=ended.generated,
        max_tokens=call.ask.max_tokens,
        n=call.ask.n,
        temperature=call.ask.temperature,
        top_p=call.ask.top_p,
    )
