"""The emulated engine without its HTTP API, on the real clock.

It drives a host and serves the KV side channel, metrics, spans and the truth.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from handrail_sim.emulator.channel import ChannelServer
from handrail_sim.emulator.core import (
    Effect,
    Ended,
    EngineJob,
    FinishReason,
    LeaseExpired,
    LoadStarts,
    Preempted,
    Resumed,
    StepEnded,
    TokenMade,
)
from handrail_sim.emulator.costs import Costs, StepCosts
from handrail_sim.emulator.faults import Fault
from handrail_sim.emulator.generation import ArrivedRequest, ChoiceCall, Generation, figures, refused, saw
from handrail_sim.emulator.host import ADMISSION_D, ADMISSION_P, FETCH, REFUSED, EmulatedHost
from handrail_sim.emulator.kv import Publication
from handrail_sim.emulator.kv_handoff import Fetcher, KvPublisher, Pull
from handrail_sim.emulator.metrics import EngineMetrics
from handrail_sim.emulator.noise import uniform
from handrail_sim.emulator.openai import Ask, InvalidRequestError, Prompt
from handrail_sim.emulator.plugin_events import PluginEvents
from handrail_sim.emulator.process import RunClock
from handrail_sim.emulator.profile import LatencyModel, Profile, with_profile
from handrail_sim.emulator.scenario import Scenario
from handrail_sim.emulator.spans import RequestSpans, exporter
from handrail_sim.emulator.text import AnswerPlan, TokenStream, plan, seed_of
from handrail_sim.emulator.truth_log import TruthFile

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Settings of one engine process.

    ``host``: its name in the scenario. ``profile``: an llm-d profile that replaces the scenario's latencies.
    ``began_unix_ns``: when the fleet began; None is now. The times of faults and of the truth are relative to it.
    """

    role: str  # prefill | decode | both
    listen: tuple[str, int]
    scenario: Scenario
    host: str
    model: str
    profile: Profile | None = None
    faults: tuple[Fault, ...] = ()
    began_unix_ns: int | None = None
    truth: Path | None = None
    seed: int = 0
    speed: float = 1.0
    otlp_endpoint: str | None = None
    otlp_protocol: str = "grpc"
    ready_file: Path | None = None
    echo_request_id: bool = False
    max_model_len: int = 32_768
    lease_s: float = 30.0  # vLLM's kv_lease_duration
    recompute: bool = False  # vLLM's kv_load_failure_policy, for failures that no fault caused
    handshake_timeout_s: float = 5.0
    plugin_socket: Path | None = None  # where a sidecar listens for the plugin's events; None: without the plugin


class EmulatedEngine:
    """One emulated engine. All methods run on one event loop."""

    def __init__(self, settings: EngineSettings) -> None:
        self.settings = settings
        self.id = str(uuid.uuid4())
        self.clock = RunClock.of(settings.host, settings.faults, settings.began_unix_ns)
        self._faults = self.clock.active(settings.faults)
        self._scenario = settings.scenario
        if settings.profile is not None:
            self._scenario = with_profile(settings.scenario, settings.profile)
        self._scenario = self._scenario.faster(settings.speed)
        lease_ns = round(settings.lease_s * 1e9)
        self._host = EmulatedHost(settings.host, self._scenario, self._costs(), self._faults, self, lease_ns=lease_ns)
        self._core = self._host.core
        self.metrics = EngineMetrics(settings.model, reads_kv=settings.role != "prefill", monotonic_s=time.monotonic)
        self._spans: RequestSpans | None = None
        if settings.otlp_endpoint is not None:
            self._spans = RequestSpans(exporter(settings.otlp_endpoint, settings.otlp_protocol), f"vllm-{settings.role}")
        self._truth = TruthFile(settings.truth) if settings.truth is not None else None
        self._plugin = PluginEvents(
            settings.plugin_socket,
            engine_id=self.id,
            model=settings.model,
            scenario=self._scenario,
            lease_ns=lease_ns,
            policy="recompute" if settings.recompute else "fail",
            core=self._core,
            pauses=self._host.hindrances.get("host_pause", ()),
        )
        self._publisher = KvPublisher(self.id, self._host, self.metrics, self, self._plugin)
        self._channel = ChannelServer(self._publisher.answer)
        self._channel_port = 0
        self._fetcher = Fetcher(
            *(settings.host, self.id, self._scenario, self._faults, self.metrics, self._plugin),
            handshake_timeout_s=settings.handshake_timeout_s,
            recompute=settings.recompute,
        )
        self._calls: dict[str, ChoiceCall] = {}
        self._fetches: dict[str, asyncio.Task[None]] = {}
        self._kept: dict[str, Publication] = {}
        self._timer: asyncio.Handle | None = None
        self._events: set[asyncio.TimerHandle] = set()
        self._heart: asyncio.Task[None] | None = None

    def _costs(self) -> StepCosts:
        settings = self.settings
        if settings.profile is not None:
            return LatencyModel(settings.profile, settings.seed, settings.speed)
        return Costs(self._scenario, settings.seed, self.now_ns)

    async def start(self) -> None:
        self._channel_port = await self._channel.start(self.settings.listen[0])
        self._heart = asyncio.create_task(self._heartbeats())
        self._plugin.start()
        self._apply_faults()
        now_ns = self.now_ns()
        for time_ns in self._faults.edges():
            if time_ns > now_ns:
                self.at(time_ns, self._apply_faults)
        self._host.begin_faults()

    async def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for event in self._events:
            event.cancel()
        tasks = [*self._fetches.values(), *([self._heart] if self._heart else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._fetcher.close()
        await self._channel.close()
        await self._plugin.close()
        if self._spans is not None:
            await asyncio.to_thread(self._spans.close)
        if self._truth is not None:
            self._truth.close()

    # --- requests -------------------------------------------------------------------------------------------------------

    def arrive(self, stem: str, given: str, headers: dict[str, str]) -> ArrivedRequest:
        return ArrivedRequest(stem, given, headers, time.time_ns(), time.monotonic_ns(), seed_of(given or stem, 0))

    async def admit(self, ask: Ask, arrived: ArrivedRequest) -> bool:
        """Wait for as long as admission takes.

        Returns False when a fault makes the engine answer this request with an error.
        """
        loads = bool((ask.kv or {}).get("do_remote_prefill"))
        takes_ns = self._host.admission_ns(self._drawn(arrived, ADMISSION_D if loads else ADMISSION_P))
        if takes_ns:
            await asyncio.sleep(max(0, arrived.monotonic_ns + takes_ns - time.monotonic_ns()) / 1e9)
        if loads or not self._host.refuses(self._drawn(arrived, REFUSED)):
            return True
        if self._truth is not None:
            tokens = sum(each.tokens for each in ask.prompts)
            self._truth.write(refused(self.settings.host, self.clock, arrived, time.monotonic_ns(), tokens))
        return False

    def begin(self, ask: Ask, arrived: ArrivedRequest) -> Generation:
        """Submit every choice of a request to the core.

        Raises ``BadRequestError`` for a request that can never fit.
        """
        generation = Generation(arrived)
        for index, prompt in enumerate(ask.prompts):
            span_id = arrived.stem if ask.chat else f"{arrived.stem}-{index}"  # completions carry the prompt's index
            for sample in range(ask.n):
                self._begin_choice(generation, ask, prompt, span_id, index * ask.n + sample, f"{sample}_" if ask.n > 1 else "")
        self._kick()
        return generation

    def _begin_choice(self, generation: Generation, ask: Ask, prompt: Prompt, span_id: str, choice: int, prefix: str) -> None:
        kv = ask.kv or {}
        seed = seed_of(prompt.text, choice)
        answer: AnswerPlan = plan(seed, max_tokens=ask.max_tokens, min_tokens=ask.min_tokens, ignore_eos=ask.ignore_eos)
        load = bool(kv.get("do_remote_prefill"))
        job = EngineJob(
            id=f"{prefix}{span_id}-{uuid.uuid4().hex[:8]}",
            prompt_tokens=prompt.tokens,
            answer_tokens=answer.tokens,
            reason=FinishReason(answer.finish_reason),
            load=load,
            publish=bool(kv.get("do_remote_decode")),
            cached_tokens=0 if load else self._host.cache.match(prompt.blocks, prompt.tokens),
        )
        now_ns, now_unix_ns = time.monotonic_ns(), time.time_ns()
        try:
            self._core.submit(job, now_ns)
        except ValueError as error:
            self.give_up(generation)
            raise InvalidRequestError(str(error)) from None
        call = ChoiceCall(
            *(job, span_id, choice, ask, generation.arrived, generation.outbox, prompt.blocks, now_unix_ns, now_ns),
            gaps_ns=[] if self._truth is not None else None,
        )
        self._calls[job.id] = call
        traced = generation.arrived.headers.get("traceparent") if self._spans is not None else None
        self._plugin.queued(job, now_ns, now_unix_ns, kv, traced)
        generation.calls.append(call)
        generation.texts.append(TokenStream(seed))
        generation.made.append(0)
        if job.load:
            self.metrics.matched(prompt.tokens)

    def give_up(self, generation: Generation) -> None:
        """Abort what still runs of a request that is over or whose client left.

        An aborted choice leaves no span, as in vLLM.
        """
        for call in generation.calls:
            self._kept.pop(call.job.id, None)
            if self._calls.pop(call.job.id, None) is not None:
                fetch = self._fetches.pop(call.job.id, None)
                if fetch is not None:
                    fetch.cancel()
                for effect in self._core.abort(call.job.id):
                    if isinstance(effect, Ended):
                        call.ended = effect
                        self._plugin.ended(effect)
        self._kick()
        if self._truth is not None:
            for call in generation.calls:
                self._truth.write(saw(self.settings.host, self.clock, generation, call, time.monotonic_ns()))

    def kv_params(self, generation: Generation) -> dict[str, Any] | None:
        """Return the response's ``kv_transfer_params``, where P keeps blocks for D."""
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
            "remote_prefill_cached_tokens": generation.calls[0].job.cached_tokens,
        }

    # --- the driver's side of the host ----------------------------------------------------------------------------------

    def now_ns(self) -> int:
        return time.monotonic_ns()

    def at(self, time_ns: int, act: Callable[[], None]) -> None:
        def happen() -> None:
            self._events.discard(handle)
            act()

        handle = asyncio.get_running_loop().call_at(time_ns / 1e9, happen)
        self._events.add(handle)

    def kick(self, host: EmulatedHost) -> None:
        self._kick()

    def carry_out(self, host: EmulatedHost, effects: list[Effect]) -> None:
        self._carry_out(effects)

    def _apply_faults(self) -> None:
        self._host.apply_faults()
        self._fetcher.apply_faults()

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
                self._plugin.step(effect)
            elif isinstance(effect, LeaseExpired):
                self._publisher.expired(effect.publication)
            elif isinstance(effect, Preempted):
                self.metrics.preempted()
                self._plugin.preempted(effect.id)
                call = self._calls.get(effect.id)
                if call is not None:
                    call.preemptions += 1
            elif isinstance(effect, Resumed):
                self._plugin.resumed(effect.id)

    def _on_token(self, token: TokenMade) -> None:
        call = self._calls.get(token.id)
        if call is None:
            return
        self.metrics.tokens(1)
        if token.gap_ns is None:
            call.first_ns = time.monotonic_ns()
            self._plugin.first_token(token.id, token.at_ns)
            ttft_s = (call.first_ns - call.queued_ns) / 1e9
            loaded = call.pull is not None and call.pull.ok
            self.metrics.first_token(ttft_s, call.job.prompt_tokens, loaded, call.job.cached_tokens)
        else:
            self.metrics.gap(token.gap_ns / 1e9)
            if call.gaps_ns is not None:
                call.gaps_ns.append(token.gap_ns)
        if token.generated < call.job.answer_tokens:  # _on_end sends the last token together with the finish reason
            call.outbox.put(call.choice, 1, None)

    def _on_end(self, ended: Ended) -> None:
        call = self._calls.pop(ended.id, None)
        if call is None:
            return
        call.ended = ended
        self._plugin.ended(ended)
        if ended.published is not None:
            self._kept[ended.id] = ended.published
            self._publisher.hold(ended.id)
        failed = ended.reason is FinishReason.ERROR
        if not failed:
            self._host.cache.keep(call.blocks)
        now_ns = time.monotonic_ns()
        e2e_s = (now_ns - call.queued_ns) / 1e9
        first_ns = call.first_ns or now_ns  # vLLM takes a failing output for a first token
        if failed:
            self.metrics.first_token(e2e_s, 0, call.job.load)
        self.metrics.ended(ended, e2e_s=e2e_s, prompt_tokens=call.job.prompt_tokens, max_tokens=call.ask.max_tokens, n=call.ask.n)
        if self._spans is not None:
            request_figures = figures(self.clock, call, ended, first_ns - call.queued_ns, now_ns - call.queued_ns)
            self._spans.emit(call.arrived.headers, request_figures)
        call.outbox.put(call.choice, 0 if failed else 1, ended.reason)

    # --- KV -------------------------------------------------------------------------------------------------------------

    async def _fetch(self, load: LoadStarts) -> None:
        """Pull one request's KV and report the result to the core."""
        call = self._calls[load.id]
        tokens = load.tokens - self._host.cache.match(call.blocks, load.tokens)
        pull = call.pull = Pull(
            load.id,
            call.ask.kv or {},
            kv_bytes=tokens * self._scenario.kv_bytes_per_token,
            link_bytes=self._host.costs.kv_bytes(tokens),
            blocks=load.blocks,
            drawn=self._drawn(call.arrived, FETCH),
            started_ns=time.monotonic_ns(),
        )
        self._host.costs.post(tokens)
        self._plugin.load(load, pull.kv_bytes, tokens)
        try:
            await self._fetcher.fetch(pull)
        finally:
            self._fetches.pop(load.id, None)
        now_ns = time.monotonic_ns()
        pull.seen_ns = max(now_ns, self._core.step_ends_ns or now_ns)
        self._plugin.loaded(load.id, ok=pull.ok, noticed_ns=pull.seen_ns)
        self._carry_out(self._core.load_done(load.id, pull.ok, recompute=pull.recompute))
        self._kick()

    async def _heartbeats(self) -> None:
        """Renew the leases of all KV that is still to be read.

        Runs every sixth of a lease, as vLLM's decode engine does.
        """
        while True:
            await asyncio.sleep(self.settings.lease_s / 6)
            for call in [call for call in self._calls.values() if call.job.load and call.first_ns is None]:
                await self._fetcher.heartbeat(call.ask.kv or {})

    def _drawn(self, arrived: ArrivedRequest, what: int) -> float:
        """Draw the request's own number, from 0 up to 1.

        It is the same in every run of a seed that gives the request the same name.
        """
        return uniform(self.settings.seed, arrived.drawn_from, what)
