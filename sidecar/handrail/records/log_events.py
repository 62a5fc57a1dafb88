"""Facts about hand-offs from log lines and from counters of a metrics page."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final

from handrail.records.process import Process, Source


class LogKind(str, Enum):
    """Kind of a log line about KV.

    Each recogniser of ``engine_logs/lines.py`` names one.
    """

    FETCH_FAILED = "fetch_failed"  # a transfer of one request's blocks failed, on either side
    HANDSHAKE_FAILED = "handshake_failed"
    NOTIFICATION_FAILED = "notification_failed"  # the read went well, its producer does not know
    REGISTRATION_FAILED = "registration_failed"  # a push or a bootstrap could not be announced
    EXPIRED = "expired"  # the producer freed blocks that no consumer had read in time
    STALE_READ = "stale_read"  # blocks were read after the producer had freed them
    READ_DECLINED = "read_declined"  # the reader saw that the lease was over and did not read
    REQUEST_FAILED_BY_KV = "request_failed_by_kv"
    RECOMPUTED = "recomputed"
    BAD_HANDOFF = "bad_handoff"  # transfer parameters missing or not usable
    COMPAT_MISMATCH = "compat_mismatch"
    PEER_LOST = "peer_lost"  # the other engine is gone, as this one sees it
    PEER_REPLACED = "peer_replaced"
    LINK_ERROR = "link_error"  # below requests: a slice, a session, an endpoint
    TRANSFER_RETRIED = "transfer_retried"
    CACHE_SHORT = "cache_short"  # a cache tier gave fewer tokens than it had promised
    CACHE_LOOKUP = "cache_lookup"
    TRANSFER_STATS = "transfer_stats"
    QUEUE_STATS = "queue_stats"
    TRANSPORT = "transport"  # which transport a data path uses
    SLOW_SUBMISSION = "slow_submission"
    TELEMETRY_OFF = "telemetry_off"
    ENGINE_ERROR = "engine_error"
    ENGINE_DEAD = "engine_dead"


FAILED_FETCH_KINDS = frozenset({LogKind.FETCH_FAILED, LogKind.HANDSHAKE_FAILED, LogKind.REQUEST_FAILED_BY_KV, LogKind.RECOMPUTED})
"""Kinds that, with a request id, mean that this request's fetch failed.

They count once a request, whatever the number of lines.
"""


class LineClock(str, Enum):
    """Source of a log fact's time."""

    LINE = "line"  # the line's own stamp
    WRAPPER = "wrapper"  # stamp of the collector of the line (a container runtime)
    RECEIPT = "receipt"  # time when we read it


@dataclass(frozen=True, slots=True, kw_only=True)
class LogFact:
    """Fact from one or several log lines.

    Equal facts of several ranks, and repeats, are one fact with a count.
    Of source ``metrics``: a counter of failures grew by ``lines`` between ``at_unix_ns`` and ``last_unix_ns``; it names no
    request. The same ``fact_id`` with a higher ``revision`` is an update, and the later one wins. Only the fields here ever
    leave the host: no text of a line, so no prompt.
    """

    process: Process
    source: Source
    fact_id: str  # 16 hex digits, the same when a line is read again
    kind: LogKind
    recogniser: str  # which row of the table: "vllm.nixl.expired"
    at_unix_ns: int  # of the first line
    last_unix_ns: int
    clock: LineClock
    resolution_ns: int = 0  # of the stamps: 1 s for vLLM's
    level: str = ""
    lines: int = 1
    ranks: tuple[str, ...] = ()  # processes that logged it, as their lines name them
    request_id: str | None = None  # raw, in the engine's form
    peer_request_id: str | None = None
    engine_id: str | None = None
    peer_engine_id: str | None = None
    peer: str | None = None  # host:port
    room: str | None = None  # SGLang's bootstrap room
    failure: str | None = None  # a word of the engine: transfer_setup_failed
    reason: str | None = None  # a code out of a closed grammar: NIXL_ERR_REMOTE_DISCONNECT, KeyError
    numbers: tuple[tuple[str, float], ...] = ()  # by name, unit in the name; a figure the line lacks is absent
    words: tuple[tuple[str, str], ...] = ()  # other allow-listed fields: transport, nic
    inferred: tuple[str, ...] = ()  # fact ids of lines below requests that fit by time alone
    revision: int = 0


COMPUTED_TOKENS: Final = "computed_tokens"
"""Number of a fact: prompt tokens computed by the engine between the two readings.

The engine computed them itself.
"""

COUNTS: Final = "counts"

MIXED: Final = "transport_and_expiry"
"""Word of a fact: the engine counts expired leases among its failures.

It has no separate counter for them (vLLM before 0.33).
"""
