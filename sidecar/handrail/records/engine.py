"""The plugin's records of an engine: requests, steps, processes and facts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from handrail.records.exchange import Record
from handrail.records.kv import KvFetch, KvPublish
from handrail.records.process import Process, Source, SpanIds


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTimes:
    """One request inside one engine, from the plugin.

    Times are EngineCore's monotonic clock, as offsets from ``queued_unix_ns``. ``provisional``: not finished yet; ``seen_ns`` is
    then its age. Later records of the same ids replace earlier ones.
    """

    process: Process
    source: Source
    ids: SpanIds
    engine: str  # vllm | ...
    request_id: str  # raw, in the engine's form
    queued_unix_ns: int
    engine_id: str | None = None  # the KV connector's id of this engine
    trace_origin: str = "derived"  # inbound: the engine knew the request's traceparent; derived: from the request key
    arrival_unix_ns: int | None = None  # arrival in the front end, on the wall clock
    scheduled_ns: int | None = None  # first scheduled
    first_token_ns: int | None = None
    finished_ns: int | None = None
    seen_ns: int | None = None
    preemptions: int = 0
    preempted_ns: int = 0  # preempted until scheduled again, summed
    preempted_before_first_ns: int = 0  # the part of it before the first token
    preempted: tuple[int, ...] = ()  # from, to, from, to ...: the longest 16, by time
    # the engine's word: stopped | length_capped | aborted | ignored | error | repetition; ours: ENGINE_GONE, lost (no event)
    status: str | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None  # from the engine's own prefix cache
    external_tokens: int | None = None  # through the connector
    output_tokens: int | None = None
    provisional: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Iteration:
    """One step of the engine, or a rollup of several.

    A step has ``steps`` 1 and ``full``; a rollup covers the steps that ended within about a second.
    """

    process: Process
    source: Source
    started_unix_ns: int  # of the (first) step
    duration_ns: int  # first step's start to last step's end
    steps: int
    full: bool = False
    engine_id: str | None = None
    core: int | None = None  # pid of the EngineCore (several under data parallelism)
    busy_ns: int = 0  # sum of the steps' times
    longest_ns: int = 0
    longest_at_ns: int = 0  # end of the longest step, from started_unix_ns
    requests: int = 0  # most in one step
    prefill_requests: int = 0  # request-steps that computed prompt tokens
    prefill_tokens: int = 0
    decode_tokens: int = 0  # scheduled, drafts included
    preemptions: int = 0
    running: int | None = None  # at the end
    waiting: int | None = None
    kv_landing_steps: int = 0  # steps in which a KV load ended
    resumed_tokens: int = 0  # computed once more, since a preemption had discarded them
    usual_ns: int = 0  # of a full one: the running median of the steps before it


class ProcessEventKind(str, Enum):
    """Kind of an event in a process of the engine."""

    STARTED = "started"
    RESTARTED = "restarted"  # another process of the same kind ran there before
    HUNG = "hung"  # silent, or no longer steps while requests wait
    RECOVERED = "recovered"
    DEAD = "dead"
    STOPPED = "stopped"  # it received the signal to end, and did
    PLUGIN_DEGRADED = "plugin_degraded"  # a hook could not be set, or was disabled after repeated failure
    PLUGIN_LOST = "plugin_lost"  # events or datagrams lost
    TRANSFERS_STUCK = "transfers_stuck"  # fetches are open, but neither their number nor the transferred bytes change
    TRANSFERS_MOVING = "transfers_moving"
    PAUSED = "paused"  # it did not run for duration_ns; detail: the reason, a word of plugin/pauses.py
    UNREACHABLE = "unreachable"  # its metrics page does not answer
    REACHABLE = "reachable"
    GPU_LOST = "gpu_lost"  # a GPU, or NVML as a whole, no longer answers
    GPU_BACK = "gpu_back"
    GPU_STUCK = "gpu_stuck"  # a call into the driver does not return
    GPU_XID = "gpu_xid"  # the driver reported an error of a GPU


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessEvent:
    """One event of one engine process."""

    process: Process
    source: Source
    at_unix_ns: int
    kind: ProcessEventKind
    engine: str = ""
    engine_id: str | None = None
    pid: int | None = None
    process_kind: str | None = None  # api | core | worker; sidecar: our own beside it
    detail: str = ""  # plain words, no data of requests
    at_bound_ns: int = 0  # happened at most this much before
    count: int = 0  # how many were lost
    duration_ns: int = 0  # of a pause, which begins at at_unix_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """Description of an engine.

    Sent at its start and again every few minutes, so that a restarted collector has it.
    """

    process: Process
    source: Source
    at_unix_ns: int
    engine: str
    engine_version: str | None = None
    engine_id: str | None = None
    pid: int | None = None
    model: str | None = None
    model_revision: str | None = None
    dtype: str | None = None
    kv_cache_dtype: str | None = None
    block_size: int | None = None  # tokens
    block_bytes: int | None = None  # one block, all layers of one rank; None where groups differ
    kv_layout: str | None = None
    kv_blocks: int | None = None
    tp_size: int | None = None
    pp_size: int | None = None
    dp_rank: int | None = None
    connector: str | None = None
    connector_role: str | None = None
    lease_ns: int | None = None
    failure_policy: str | None = None
    transport: str | None = None  # nixl 1.5.1 | ...
    agents: tuple[str, ...] = ()  # the transport's names of this engine's ranks
    plugin_version: str | None = None
    capabilities: tuple[str, ...] = ()  # what the plugin could hook
    missing: tuple[str, ...] = ()  # and what it could not


PluginSpan = EngineTimes | KvFetch | KvPublish
"""Records that travel as spans of scope ``handrail.plugin``.

Provisional ones travel as events.
"""


PluginEvent = Iteration | ProcessEvent | EngineFacts
"""Records that travel as log records of scope ``handrail.events``."""


Observation = Record | PluginSpan | PluginEvent
"""All kinds of records that a source may hand on."""


Sink = Callable[[Observation], None]
"""Takes one finished record of a source.

It never blocks and never raises; it counts drops itself. Records are frozen and may be kept.
"""
