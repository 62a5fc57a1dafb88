"""The engine core: vLLM's scheduler as a state machine without clock or sockets.

The driver passes the monotonic time in, carries out the returned effects and calls ``advance`` again at ``wake_ns``.
A driver with a virtual clock may jump to that time. The behaviour follows vLLM 0.32's ``v1/core/sched/scheduler.py`` and MEASURED
runs of it:

- One step at a time advances every running request by a token and computes up to ``batch_tokens`` prompt tokens. Without chunked
  prefill a prompt is computed whole, in a step of its own, and every stream waits for it.
- A request whose KV is at another engine takes its blocks, then loads. Until the load is done it neither runs nor counts as
  scheduled, so its queue time contains the whole wait. A load starts only when a running slot and blocks are free at that moment.
- Blocks for the whole answer are taken at once, so nothing is preempted. With ``reserve_answer`` off, as in vLLM, they are taken
  one by one: when no block is left, the latest request loses its blocks and computes all its tokens again later.
- A failed load ends its request before it was ever scheduled (``kv_load_failure_policy: fail``), or makes this engine compute the
  prompt (``recompute``).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from handrail_sim.emulator.costs import ForwardPass
from handrail_sim.emulator.kv import BlockPool, Publication, Publications, blocks_for


class StepModel(Protocol):
    """The model of how long a step takes."""

    def step_ns(self, batch: ForwardPass) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheduling:
    """The scheduler's settings. ``batch_tokens`` is vLLM's max_num_batched_tokens."""

    batch_tokens: int = 8192
    chunked_prefill: bool = True
    reserve_answer: bool = True


class FinishReason(str, Enum):
    """Why a request ended; vLLM's ``finished_reason`` label."""

    LENGTH = "length"
    STOP = "stop"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class EngineJob:
    """The work that one request asks of the engine.

    ``answer_tokens`` and ``reason`` are decided before it runs.
    """

    id: str
    prompt_tokens: int
    answer_tokens: int
    reason: FinishReason
    load: bool = False  # the prompt's KV comes from another engine
    publish: bool = False  # keep the prompt's KV for another engine
    cached_tokens: int = 0  # prompt tokens that the prefix cache holds


@dataclass(frozen=True, slots=True)
class JobTimes:
    """The times of one request in monotonic ns; None: has not happened."""

    queued_ns: int
    scheduled_ns: int | None
    first_token_ns: int | None
    last_token_ns: int | None


@dataclass(frozen=True, slots=True)
class LoadStarts:
    """The driver must fetch the KV now and report with ``load_done``."""

    id: str
    tokens: int
    blocks: int


@dataclass(frozen=True, slots=True)
class TokenMade:
    """One more token of a request.

    ``gap_ns``: time since the token before; None for the first. ``generated`` counts from 1.
    """

    id: str
    generated: int
    at_ns: int
    gap_ns: int | None


@dataclass(frozen=True, slots=True)
class Ended:
    """The request is over. ``published``: the blocks kept for another engine."""

    id: str
    reason: FinishReason
    generated: int
    times: JobTimes
    published: Publication | None = None


@dataclass(frozen=True, slots=True)
class StepEnded:
    """One engine iteration."""

    tokens: int  # computed prompt tokens and decode tokens together
    begin_ns: int
    requests: int
    prefill_requests: int  # waiting requests that have no token so far
    prefill_tokens: int
    resumed_tokens: int  # tokens computed again after a preemption
    preemptions: int  # preemptions since the step before
    landed: bool  # a load has ended since the step before
    batch: ForwardPass


@dataclass(frozen=True, slots=True)
class LeaseExpired:
    """The lease of these blocks ended before anyone read them; they are free again."""

    publication: Publication


@dataclass(frozen=True, slots=True)
class Preempted:
    """A request lost its blocks.

    It computes its tokens again when it gets new ones.
    """

    id: str


@dataclass(frozen=True, slots=True)
class Resumed:
    """A request runs again after a preemption."""

    id: str


Effect = LoadStarts | TokenMade | Ended | StepEnded | LeaseExpired | Preempted | Resumed


@dataclass(slots=True)
class _Running:
    job: EngineJob
    queued_ns: int
    target: int  # tokens to compute before the next one is sampled: the prompt, and after a preemption the generated ones too
    load: bool
    blocks: tuple[int, ...] = ()
    computed: int = 0  # tokens of ``target`` whose KV is here
    lost: int = 0  # tokens whose KV was here before a preemption
    generated: int = 0
    scheduled_ns: int | None = None
    first_token_ns: int | None = None
    last_token_ns: int | None = None

    def times(self) -> JobTimes:
        return JobTimes(self.queued_ns, self.scheduled_ns, self.first_token_ns, self.last_token_ns)


def _wants(request: _Running) -> int:
    """Return the tokens that a request would compute in the next step without a limit."""
    return max(1, request.target - request.computed)


@dataclass(slots=True)
class _Step:
    ends_ns: int
    ended: StepEnded
    advances: list[tuple[_Running, int]] = field(default_factory=list)  # request, prompt tokens computed (0: a decode token)


@dataclass(frozen=True, slots=True)
class Load:
    """How many requests are in each state."""

    running: int
    waiting: int  # all requests that are not running
    loading: int
    loaded: int  # loaded, not yet scheduled
    to_load: int  # the load has not begun


class EngineCore:
    """One engine's scheduler.

    Not thread-safe. Every method takes the same monotonic clock, which must not run backwards.
    """

    def __init__(
        self, model: StepModel, *, max_running: int, blocks: int, lease_ns: int, scheduling: Scheduling | None = None
    ) -> None:
        self._model = model
        self._scheduling = scheduling or Scheduling()
        self._ids: set[str] = set()
        self._max_running = max_running
        self._pool = BlockPool(blocks)
        self._publications = Publications(lease_ns)
        self._waiting: deque[_Running] = deque()
        self._loading: dict[str, _Running] = {}
        self._loaded: deque[_Running] = deque()
        self._running: list[_Running] = []
        self._step: _Step | None = None
        self._preemptions = 0  # not yet returned to the driver
        self._landed = False

    # --- inputs from the driver ------------------------------------------------------------------------------------------

    def submit(self, job: EngineJob, now_ns: int) -> None:
        """Queue a request.

        Raises ``ValueError`` for a request that could never fit or whose id is in use.
        """
        if job.prompt_tokens < 1 or job.answer_tokens < 1:
            raise ValueError("a request has at least one prompt token and one answer token")
        if blocks_for(job.prompt_tokens + job.answer_tokens) > self._pool.size:
            raise ValueError(f"the request needs more than all {self._pool.size} KV blocks")
        if job.id in self._ids:
            raise ValueError(f"request id {job.id} is in use")
        self._ids.add(job.id)
        self._waiting.append(_Running(job, now_ns, job.prompt_tokens, job.load))

    def load_done(self, request_id: str, ok: bool, *, recompute: bool = False) -> list[Effect]:
        """Report that the load which ``LoadStarts`` asked for is over.

        ``recompute``: this engine computes the prompt if the load failed. An unknown id (aborted meanwhile) does nothing.
        """
        request = self._loading.pop(request_id, None)
        if request is None:
            return []
        self._landed = True
        if ok:
            request.computed = request.job.prompt_tokens - 1  # vLLM computes the last prompt token itself, to sample from it
            self._loaded.append(request)
            return []
        if recompute:
            request.load = False
            self._loaded.append(request)
            return []
        return [self._end(request, FinishReason.ERROR)]

    def abort(self, request_id: str) -> list[Effect]:
        """Drop a request, whatever its state; blocks that it published stay.

        An unknown id does nothing.
        """
        for request in self._all():
            if request.job.id == request_id:
                return [self._drop(request)]
        return []

    def limit(self, max_running: int) -> None:
        """Run at most this many requests from now on; those that run already go on."""
        self._max_running = max_running

    def withhold(self, blocks: int) -> None:
        """Withhold this many KV blocks from this engine's requests.

        Blocks in use are withheld as soon as they are free.
        """
        self._pool.withheld = blocks

    def preempt_last(self) -> list[Effect]:
        """Preempt the running request that arrived last.

        Does nothing when fewer than two run.
        """
        return [self._preempt(self._running.pop())] if len(self._running) > 1 else []

    def published(self, request_id: str) -> Publication | None:
        return self._publications.find(request_id)

    def renew_lease(self, request_id: str, now_ns: int) -> bool:
        """Renew a lease on a heartbeat of the reading engine.

        Returns False when nothing is held under this id.
        """
        return self._publications.renew(request_id, now_ns)

    def release(self, request_id: str) -> bool:
        """Free the blocks that the other engine has read.

        Returns False when they had already expired.
        """
        publication = self._publications.release(request_id)
        if publication is None:
            return False
        self._pool.give_back(publication.blocks)
        return True

    # --- queries of the driver -------------------------------------------------------------------------------------------

    def advance(self, now_ns: int) -> list[Effect]:
        """Return all effects up to ``now_ns``, and begin the next step if there is work."""
        effects: list[Effect] = []
        for publication in self._publications.expired(now_ns):
            self._pool.give_back(publication.blocks)
            effects.append(LeaseExpired(publication))
        if self._step is not None and self._step.ends_ns <= now_ns:
            effects += self._finish_step(self._step, now_ns)
            self._step = None
        if self._step is None:
            effects += self._admit(now_ns)
            if not self._scheduling.reserve_answer:
                effects += self._grow()
            self._step = self._begin_step(now_ns)
        return effects

    def wake_ns(self) -> int | None:
        """Return when ``advance`` next has work if the driver reports nothing before.

        None: never.
        """
        times = [self._step.ends_ns if self._step else None, self._publications.next_deadline_ns]
        return min((time for time in times if time is not None), default=None)

    @property
    def step_ends_ns(self) -> int | None:
        """Return when the scheduler next looks at finished loads.

        None: at once, since no step runs.
        """
        return self._step.ends_ns if self._step else None

    @property
    def kv_usage(self) -> float:
        """Return the share of KV blocks in use, 0 to 1."""
        return self._pool.used_share

    def load(self) -> Load:
        to_load = sum(1 for request in self._waiting if request.job.load)
        waiting = len(self._waiting) + len(self._loading) + len(self._loaded)
        return Load(len(self._running), waiting, len(self._loading), len(self._loaded), to_load)

    def scheduled_ns(self, request_id: str) -> int | None:
        """Return when this unfinished request was first scheduled."""
        return next((each.scheduled_ns for each in self._all() if each.job.id == request_id), None)

    @property
    def unfinished(self) -> int:
        """Count the requests that have not ended."""
        return len(self._ids)

    # --- inside ---------------------------------------------------------------------------------------------------------

    def _all(self) -> list[_Running]:
        return [*self._waiting, *self._loading.values(), *self._loaded, *self._running]

    def _admit(self, now_ns: int) -> list[Effect]:
        effects: list[Effect] = []
        budget = self._scheduling.batch_tokens - sum(map(_wants, self._running))
        while self._loaded and len(self._running) < self._max_running and budget > 0:
            request = self._loaded.popleft()
            request.scheduled_ns = now_ns
            self._running.append(request)
            budget -= _wants(request)
        while self._waiting and len(self._running) < self._max_running and budget > 0:
            request = self._waiting[0]
            job = request.job
            tokens = job.prompt_tokens + job.answer_tokens if self._scheduling.reserve_answer else request.target
            blocks = self._pool.take(blocks_for(tokens))
            if blocks is None:
                break
            self._waiting.popleft()
            request.blocks = blocks
            if request.load:
                self._loading[job.id] = request
                effects.append(LoadStarts(job.id, job.prompt_tokens, blocks_for(job.prompt_tokens)))
            else:
                request.computed = job.cached_tokens
                if request.scheduled_ns is None:
                    request.scheduled_ns = now_ns
                else:
                    effects.append(Resumed(job.id))
                self._running.append(request)
                budget -= _wants(request)
        return effects

    def _grow(self) -> list[Effect]:
        """Give a block to every stream that has filled its last one.

        When no block is left, takes them from the requests that arrived last.
        """
        effects: list[Effect] = []
        index = 0
        while index < len(self._running):
            request = self._running[index]
            short = blocks_for(request.job.prompt_tokens + request.generated) - len(request.blocks)
            while short > 0:
                blocks = self._pool.take(short)
                if blocks is not None:
                    request.blocks += blocks
                    break
                victim = self._running.pop()
                effects.append(self._preempt(victim))
                if victim is request:
                    break
            index += 1
        return effects

    def _preempt(self, request: _Running) -> Preempted:
        self._pool.give_back(request.blocks)
        self._preemptions += 1
        request.blocks = ()
        request.lost = max(request.lost, request.job.prompt_tokens if request.load else request.computed)
        request.computed = 0
        request.target = request.job.prompt_tokens + request.generated
        request.load = False
        self._waiting.appendleft(request)
        return Preempted(request.job.id)

    def _begin_step(self, now_ns: int) -> _Step | None:
        if not self._running:
            return None
        advances: list[tuple[_Running, int]] = []
        prompts: list[_Running] = []
        decoding = context = prefill = pairs = first = fresh = resumed = 0
        for request in self._running:
            rest = request.target - request.computed
            if rest == 0 or request.load:  # loaded: one token of its prompt is left to compute, as costly as a decode token
                decoding += 1
                context += request.job.prompt_tokens + request.generated
                first += request.generated == 0
                advances.append((request, rest))
            else:
                prompts.append(request)
        chunked = self._scheduling.chunked_prefill
        if prompts and not chunked:
            advances, decoding, context, first = [], 0, 0, 0
        for request in prompts:
            rest = request.target - request.computed
            budget = self._scheduling.batch_tokens - prefill
            chunk = min(rest, budget) if chunked else rest
            if chunk > 0 and (chunked or chunk <= budget or prefill == 0):
                prefill += chunk
                again = chunk if request.generated else min(chunk, max(0, request.lost - request.computed))
                resumed += again
                fresh += request.generated == 0
                pairs += chunk * request.computed + chunk * chunk // 2
                advances.append((request, chunk))
        batch = ForwardPass(
            decoding=decoding, context_tokens=context, prefill_tokens=prefill, prefill_pairs=pairs, running=len(self._running)
        )
        ended = StepEnded(
            tokens=decoding + prefill,
            begin_ns=now_ns,
            requests=len(advances),
            prefill_requests=first + fresh,
            prefill_tokens=prefill - resumed + first,
            resumed_tokens=resumed,
            preemptions=self._preemptions,
            landed=self._landed,
            batch=batch,
        )
        self._preemptions, self._landed = 0, False
        return _Step(now_ns + self._model.step_ns(batch), ended, advances)

    def _finish_step(self, step: _Step, now_ns: int) -> list[Effect]:
        effects: list[Effect] = []
        running = set(map(id, self._running))
        for request, computed in step.advances:
            if id(request) not in running:  # aborted during the step
                continue
            request.computed += computed
            if request.computed < request.target:
                continue
            gap_ns = None if request.last_token_ns is None else now_ns - request.last_token_ns
            request.generated += 1
            request.last_token_ns = now_ns
            if request.first_token_ns is None:
                request.first_token_ns = now_ns
            effects.append(TokenMade(request.job.id, request.generated, now_ns, gap_ns))
            if request.generated >= request.job.answer_tokens:
                self._running.remove(request)
                effects.append(self._end(request, request.job.reason, now_ns))
        effects.append(step.ended)
        return effects

    def _end(self, request: _Running, reason: FinishReason, now_ns: int | None = None) -> Ended:
        job = request.job
        self._ids.discard(job.id)
        if job.publish and now_ns is not None:
            kept = blocks_for(job.prompt_tokens)
            publication = Publication(job.id, request.blocks[:kept], job.prompt_tokens)
            self._publications.add(publication, now_ns)
            self._pool.give_back(request.blocks[kept:])
            return Ended(job.id, reason, request.generated, request.times(), publication)
        self._pool.give_back(request.blocks)
        return Ended(job.id, reason, request.generated, request.times())

    def _drop(self, request: _Running) -> Ended:
        for queue in (self._waiting, self._loaded, self._running):
            if request in queue:
                queue.remove(request)
        self._loading.pop(request.job.id, None)
        return self._end(request, FinishReason.ABORT)
