"""The emulated engine but for HTTP: the core driven by the real clock, the KV side channel, metrics and spans."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from handrail_fleet.channel import Address, ChannelServer, Peer, Peers, TransferError
from handrail_fleet.core import Effect, Ended, EngineCore, Job, LeaseExpired, LoadStarts, Reason, StepEnded, TokenMade
from handrail_fleet.kv import Publication
from handrail_fleet.metrics import EngineMetrics
from handrail_fleet.model import LatencyModel
from handrail_fleet.openai import Ask, BadRequestError
from handrail_fleet.profile import Profile
from handrail_fleet.spans import RequestFigures, RequestSpans, exporter
from handrail_fleet.text import Plan, TokenStream, plan, seed_of

log = logging.getLogger(__name__)

_LOAD_KEYS = ("remote_engine_id", "remote_request_id", "remote_host", "remote_port")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """One engine process."""

    role: str  # prefill | decode | both
    listen: tuple[str, int]
    profile: Profile
    model: str
    seed: int = 0
    speed: float = 1.0
    otlp_endpoint: str | None = None
    otlp_protocol: str = "grpc"
    ready_file: Path | None = None
    echo_request_id: bool = False
    blocks: int = 16_384
    max_model_len: int = 32_768
    lease_s: float = 30.0  # vLLM's kv_lease_duration
    handshake_timeout_s: float = 5.0


class Outbox:
    """Tokens on their way to one response. Like vLLM's output collector it merges what the response has not taken yet, so its
    size is bounded by the number of choices, and a slow response gets several tokens in one event."""

    def __init__(self) -> None:
        self._pending: dict[int, tuple[int, Reason | None]] = {}
        self._some = asyncio.Event()

    def put(self, choice: int, tokens: int, reason: Reason | None) -> None:
        before = self._pending.get(choice, (0, None))
        self._pending[choice] = (before[0] + tokens, reason)
        self._some.set()

    async def take(self) -> list[tuple[int, int, Reason | None]]:
        """(choice, new tokens, why it ended or None); waits for at least one."""
        await self._some.wait()
        self._some.clear()
        taken = [(choice, tokens, reason) for choice, (tokens, reason) in self._pending.items()]
        self._pending.clear()
        return taken


@dataclass(slots=True)
class _Call:
    """One choice of one HTTP request, while the core has it."""

    job: Job
    span_id: str  # gen_ai.request.id: without the engine's own suffix
    choice: int
    ask: Ask
    headers: dict[str, str]
    outbox: Outbox
    arrival_unix_ns: int
    arrival_ns: int
    first_ns: int | None = None


@dataclass(slots=True)
class Generation:
    """What a handler holds of its request."""

    outbox: Outbox
    calls: list[_Call]
    texts: list[TokenStream]
    made: list[int] = field(default_factory=list)


class Engine:
    """One engine. All methods run on one event loop."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.id = str(uuid.uuid4())
        self._model = LatencyModel(settings.profile, settings.seed, settings.speed)
        self._core = EngineCore(
            self._model, max_running=settings.profile.max_num_seqs, blocks=settings.blocks, lease_ns=round(settings.lease_s * 1e9)
        )
        self.metrics = EngineMetrics(settings.model, reads_kv=settings.role != "prefill", monotonic_s=time.monotonic)
        self._spans: RequestSpans | None = None
        if settings.otlp_endpoint is not None:
            self._spans = RequestSpans(exporter(settings.otlp_endpoint, settings.otlp_protocol), f"vllm-{settings.role}")
        self._channel = ChannelServer(self._on_channel)
        self._channel_port = 0
        self._peers = Peers(lambda: self._model.handshake_ns() / 1e9, settings.handshake_timeout_s)
        self._calls: dict[str, _Call] = {}
        self._fetches: dict[str, asyncio.Task[None]] = {}
        self._kept: dict[str, Publication] = {}
        self._timer: asyncio.Handle | None = None
        self._heart: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._channel_port = await self._channel.start(self.settings.listen[0])
        self._heart = asyncio.create_task(self._heartbeats())

    async def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        tasks = [*self._fetches.values(), *([self._heart] if self._heart else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._peers.close()
        await self._channel.close()
        if self._spans is not None:
            await asyncio.to_thread(self._spans.close)

    # --- requests -------------------------------------------------------------------------------------------------------

    def begin(self, ask: Ask, stem: str, headers: dict[str, str]) -> Generation:
        """Hand every choice to the core. Raises ``BadRequestError`` for what can never fit."""
        outbox = Outbox()
        generation = Generation(outbox, [], [])
        kv = ask.kv or {}
        now_ns, now_unix_ns = time.monotonic_ns(), time.time_ns()
        for index, prompt in enumerate(ask.prompts):
            span_id = stem if ask.chat else f"{stem}-{index}"  # completions carry the prompt's index
            for sample in range(ask.n):
                choice = index * ask.n + sample
                seed = seed_of(prompt.text, choice)
                answer: Plan = plan(seed, max_tokens=ask.max_tokens, min_tokens=ask.min_tokens, ignore_eos=ask.ignore_eos)
                prefix = f"{sample}_" if ask.n > 1 else ""
                job = Job(
                    id=f"{prefix}{span_id}-{uuid.uuid4().hex[:8]}",
                    prompt_tokens=prompt.tokens,
                    answer_tokens=answer.tokens,
                    reason=Reason(answer.finish_reason),
                    load=bool(kv.get("do_remote_prefill")),
                    publish=bool(kv.get("do_remote_decode")),
                )
                try:
                    self._core.submit(job, now_ns)
                except ValueError as error:
                    self.give_up(generation)
                    raise BadRequestError(str(error)) from None
                call = _Call(job, span_id, choice, ask, headers, outbox, now_unix_ns, now_ns)
                self._calls[job.id] = call
                generation.calls.append(call)
                generation.texts.append(TokenStream(seed))
                generation.made.append(0)
                if job.load:
                    self.metrics.matched(prompt.tokens)
        self._kick()
        return generation

    def give_up(self, generation: Generation) -> None:
        """The client went away: whatever still runs is aborted. Leaves no span, as in vLLM."""
        for call in generation.calls:
            self._kept.pop(call.job.id, None)
            if self._calls.pop(call.job.id, None) is not None:
                fetch = self._fetches.get(call.job.id)
                if fetch is not None:
                    fetch.cancel()
                self._core.abort(call.job.id)
        self._kick()

    def kv_params(self, generation: Generation) -> dict[str, Any] | None:
        """``kv_transfer_params`` of the response: only where P keeps blocks for D."""
        publication = self._kept.pop(generation.calls[0].job.id, None)
        for call in generation.calls[1:]:
            self._kept.pop(call.job.id, None)
        if publication is None:
            return None
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [list(publication.blocks)],
            "remote_engine_id": self.id,
            "remote_request_id": publication.request_id,
            "remote_host": self.settings.listen[0],
            "remote_port": self._channel_port,
            "tp_size": 1,
            "dcp_size": 1,
            "pp_size": 1,
            "remote_num_tokens": publication.tokens,
            "remote_blocks_expiry_time": None,
            "transfer_mode": "pull",
            "remote_prefill_cached_tokens": 0,
        }

    # --- driving the core -----------------------------------------------------------------------------------------------

    def _kick(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_soon(self._advance)

    def _advance(self) -> None:
        self._carry_out(self._core.advance(time.monotonic_ns()))
        self.metrics.seen(self._core.load(), self._core.kv_usage)
        wake_ns = self._core.wake_ns()
        self._timer = None if wake_ns is None else asyncio.get_running_loop().call_at(wake_ns / 1e9, self._advance)

    def _carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, TokenMade):
                self._on_token(effect)
            elif isinstance(effect, Ended):
                self._on_end(effect)
            elif isinstance(effect, LoadStarts):
                self._fetches[effect.id] = asyncio.create_task(self._fetch(effect))
            elif isinstance(effect, StepEnded):
                self.metrics.step(effect.tokens)
            elif isinstance(effect, LeaseExpired):
                self.metrics.lease_expired()
                log.warning(
                    "Releasing expired KV blocks for request %s which were retrieved by 0 remote worker(s) before lease expired.",
                    effect.publication.request_id,
                )

    def _on_token(self, token: TokenMade) -> None:
        call = self._calls.get(token.id)
        if call is None:
            return
        self.metrics.tokens(1)
        if token.gap_ns is None:
            call.first_ns = time.monotonic_ns()
            self.metrics.first_token((call.first_ns - call.arrival_ns) / 1e9, call.job.prompt_tokens, call.job.load)
        else:
            self.metrics.gap(token.gap_ns / 1e9)
        if token.generated < call.job.answer_tokens:  # the last one goes out together with the reason, by _on_end
            call.outbox.put(call.choice, 1, None)

    def _on_end(self, ended: Ended) -> None:
        call = self._calls.pop(ended.id, None)
        if call is None:
            return
        if ended.published is not None:
            self._kept[ended.id] = ended.published
        failed = ended.reason is Reason.ERROR
        now_ns = time.monotonic_ns()
        e2e_s = (now_ns - call.arrival_ns) / 1e9
        first_ns = call.first_ns or now_ns  # vLLM takes a failing output for a first token
        if failed:
            self.metrics.first_token(e2e_s, 0, call.job.load)
        self.metrics.ended(ended, e2e_s=e2e_s, prompt_tokens=call.job.prompt_tokens, max_tokens=call.ask.max_tokens, n=call.ask.n)
        if self._spans is not None:
            self._spans.emit(call.headers, _figures(call, ended, (first_ns - call.arrival_ns) / 1e9, e2e_s))
        call.outbox.put(call.choice, 0 if failed else 1, ended.reason)

    # --- KV -------------------------------------------------------------------------------------------------------------

    async def _fetch(self, load: LoadStarts) -> None:
        """Pull one request's KV and tell the core how it went."""
        call = self._calls.get(load.id)
        kv = (call.ask.kv if call else None) or {}
        try:
            if any(kv.get(key) is None for key in _LOAD_KEYS):
                log.warning("Got invalid KVTransferParams: %s. This request will not utilize KVTransfer", sorted(kv))
                await asyncio.Event().wait()  # vLLM 0.32 never finishes such a request; only its client's leaving ends it
            ok = await self._pull(load, kv)
        finally:
            self._fetches.pop(load.id, None)
        self._carry_out(self._core.load_done(load.id, ok))
        self._kick()

    async def _pull(self, load: LoadStarts, kv: dict[str, Any]) -> bool:
        remote = str(kv["remote_request_id"])
        try:
            address = Address(str(kv["remote_host"]), int(kv["remote_port"]), str(kv["remote_engine_id"]))
        except ValueError:
            address = Address("", 0, "")
        peer: Peer | None = None
        try:
            peer = await self._peers.get(address)
            posted_ns = time.monotonic_ns()
            answer = await peer.ask({"op": "read", "request_id": remote, "blocks": kv.get("remote_block_ids")})
            if not answer.get("ok"):
                raise TransferError("transfer_setup_failed", str(answer.get("error")))
            post_s = (time.monotonic_ns() - posted_ns) / 1e9
            await asyncio.sleep(self._model.transfer_ns(load.tokens) / 1e9)
            size = load.tokens * self.settings.profile.kv_bytes_per_token
            self.metrics.transferred((time.monotonic_ns() - posted_ns) / 1e9, post_s, size)
            await peer.ask({"op": "done", "request_id": remote})
        except (TransferError, OSError) as error:
            failure = (
                error
                if isinstance(error, TransferError)
                else TransferError("transfer_setup_failed", "NIXL_ERR_REMOTE_DISCONNECT")
            )
            if peer is not None and isinstance(error, OSError):
                self._peers.forget(address)
            self.metrics.transfer_failed()
            log.error(
                "NIXL transfer failure: %s | Context: {'failure_type': '%s', 'request_id': '%s', 'engine_id': '%s', "
                "'remote_engine_id': '%s', 'remote_request_id': '%s', 'remote_host': '%s', 'remote_port': %s, "
                "'num_local_blocks': %d}",
                *(failure, failure.kind, load.id, self.id, address.engine_id, remote, address.host, address.port, load.blocks),
            )
            return False
        return True

    def _on_channel(self, message: dict[str, Any]) -> dict[str, Any]:
        operation, request_id = message.get("op"), str(message.get("request_id"))
        if operation == "hello":
            return {"ok": True, "engine_id": self.id}
        if operation == "heartbeat":
            return {"ok": self._core.renew_lease(request_id, time.monotonic_ns())}
        if operation == "read":
            publication = self._core.published(request_id)
            if publication is None:
                return {"ok": False, "error": f"nothing is held for {request_id}"}
            if message.get("blocks") != [list(publication.blocks)]:
                return {"ok": False, "error": "NIXL_ERR_INVALID_PARAM"}
            return {"ok": True}
        if operation == "done":
            held = self._core.release(request_id)
            if held:
                self._kick()  # the freed blocks may let a waiting request in
            else:
                self.metrics.notified_late()
            return {"ok": held}
        return {"ok": False, "error": f"unknown operation {operation!r}"}

    async def _heartbeats(self) -> None:
        """Renew the leases of all that is yet to be read, every sixth of a lease (as vLLM's decode engine does)."""
        while True:
            await asyncio.sleep(self.settings.lease_s / 6)
            for call in [call for call in self._calls.values() if call.job.load and call.first_ns is None]:
                kv = call.ask.kv or {}
                if any(kv.get(key) is None for key in _LOAD_KEYS):
                    continue
                try:
                    peer = await self._peers.get(
                        Address(str(kv["remote_host"]), int(kv["remote_port"]), str(kv["remote_engine_id"]))
                    )
                    await peer.ask({"op": "heartbeat", "request_id": str(kv["remote_request_id"])})
                except (TransferError, OSError, ValueError) as error:
                    log.debug("heartbeat: %s", error)  # the load itself will fail and is counted then


def _figures(call: _Call, ended: Ended, ttft_s: float, e2e_s: float) -> RequestFigures:
    times = ended.times
    scheduled, first, last = times.scheduled_ns, times.first_token_ns, times.last_token_ns
    queue_ns = scheduled - times.queued_ns if scheduled is not None else 0
    prefill_ns = first - scheduled if first is not None and scheduled is not None else 0
    decode_ns = last - first if last is not None and first is not None else 0
    return RequestFigures(
        request_id=call.span_id,
        arrival_unix_ns=call.arrival_unix_ns,
        end_unix_ns=time.time_ns(),
        ttft_s=ttft_s,
        e2e_s=e2e_s,
        queue_s=queue_ns / 1e9,
        prefill_s=prefill_ns / 1e9,
        decode_s=decode_ns / 1e9,
        inference_s=(prefill_ns + decode_ns) / 1e9,
        prompt_tokens=call.job.prompt_tokens,
        completion_tokens=ended.generated,
        max_tokens=call.ask.max_tokens,
        n=call.ask.n,
        temperature=call.ask.temperature,
        top_p=call.ask.top_p,
    )
