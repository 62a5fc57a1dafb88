"""KV fetches and publishes, as the plugin in the engines saw them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final

from handrail.records.process import Process, Source, SpanIds


class Direction(str, Enum):
    """Direction of a hand-off.

    D reads what P prefilled, or P reads what D still holds of an earlier turn.
    """

    P_TO_D = "p_to_d"
    D_TO_P = "d_to_p"


class FetchEffect(str, Enum):
    """Effect of the engine's load failure policy on a request whose load failed."""

    FAILED = "failed"
    RECOMPUTED = "recomputed"


ENGINE_LOST: Final = "engine_lost"
ENGINE_STOPPED: Final = "engine_stopped"
ENGINE_GONE: Final = frozenset({ENGINE_LOST, ENGINE_STOPPED})
"""Outcomes of open work in an engine that ended: it died, or was stopped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KvFetch:
    """One KV fetch as the consumer saw it, ranks merged; one record a load.

    Offsets are from ``known_unix_ns`` (the scheduler decided to load) on the host's monotonic clock, which all processes of an
    engine share. ``X_bound_ns``: X happened at most this much before the offset given (a poll saw it). ``provisional``: still
    open at ``seen_ns``.
    """

    process: Process
    source: Source
    ids: SpanIds
    engine: str
    request_id: str  # raw, of the engine that receives
    known_unix_ns: int
    connector: str | None = None  # class name
    engine_id: str | None = None
    peer_engine_id: str | None = None  # with peer_request_id: the connector key
    peer_request_id: str | None = None
    peer_host: str | None = None
    peer_port: int | None = None
    direction: Direction | None = None  # None: shared storage, no peer
    mode: str | None = None  # pull | push; None: the connector does not report it
    trace_origin: str = "derived"
    publish_span_id: str = ""  # of the peer's kv.publish, where the hand-off carried it; then also the parent
    decode_span_id: str = ""  # what the engine's own trace context named, where it knew one
    load_started_ns: int | None = None  # first rank
    load_started_bound_ns: int = 0
    handshake_begin_ns: int | None = None  # None: the peer was known
    handshake_end_ns: int | None = None
    handshake_bound_ns: int = 0
    posted_ns: int | None = None  # first transfer handed to the transport; pushed: registration sent to P
    posted_bound_ns: int = 0
    done_ns: int | None = None  # last rank's last transfer
    done_bound_ns: int = 0
    noticed_ns: int | None = None  # the scheduler knows
    noticed_bound_ns: int = 0
    ended_ns: int | None = None  # noticed, or the request ended before
    seen_ns: int | None = None
    tokens_wanted: int | None = None  # to be loaded
    tokens_local: int | None = None  # already here
    blocks: int | None = None  # to be written, all KV-cache groups
    block_bytes: int | None = None  # of one block, all layers, all ranks; None where groups differ
    bytes_expected: int | None = None  # blocks x block bytes, groups and ranks apart
    bytes_moved: int | None = None  # as the transport counted; None: it does not report it
    descriptors: int | None = None
    ranks: int | None = None  # that reported a start
    ranks_done: int | None = None
    failure: str | None = None  # the engine's failure type: transfer_setup_failed, handshake_failed, ...
    failure_error: str | None = None  # the transport's error name, never its text
    policy: str | None = None  # fail | recompute
    effect: FetchEffect | None = None
    request_status: str | None = None  # where the request ended while the fetch was open
    provisional: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class KvPublish:
    """KV kept for a consumer, from the request's end until read, freed or expired.

    Offsets are from ``published_unix_ns``. A read after expiry (``late_read_ns``) comes as a later record of the same ids.
    """

    process: Process
    source: Source
    ids: SpanIds
    engine: str
    request_id: str  # raw: what the peer will name as remote_request_id
    published_unix_ns: int
    connector: str | None = None
    engine_id: str | None = None
    direction: Direction | None = None
    mode: str | None = None
    trace_origin: str = "derived"
    tokens: int | None = None
    blocks: int | None = None
    block_bytes: int | None = None
    kv_bytes: int | None = None
    lease_ns: int | None = None  # as promised at publication
    lease_end_ns: int | None = None  # after the heartbeats seen
    heartbeats: int = 0
    posted_ns: int | None = None  # pushed only: P's own writes
    done_ns: int | None = None
    done_bound_ns: int = 0
    bytes_moved: int | None = None
    descriptors: int | None = None
    read_ns: int | None = None  # the last reader's notification was seen
    read_bound_ns: int = 0
    readers: int = 0
    reader: str | None = None  # the transport's name of the (last) reader; see EngineFacts.agents
    freed_ns: int | None = None  # the scheduler had the blocks back
    expired_ns: int | None = None
    late_read_ns: int | None = None
    failure: str | None = None
    failure_error: str | None = None
    seen_ns: int | None = None
    provisional: bool = False
