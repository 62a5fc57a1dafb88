"""Builders of the plugin's records for tests; every field has a default.

Times are in ms after ``EPOCH``.
"""

from __future__ import annotations

from dataclasses import replace
from hashlib import blake2b
from typing import Any

from builders.records import EPOCH, MS, ids, process
from handrail.records import (
    Direction,
    EngineFacts,
    EngineTimes,
    KvFetch,
    KvPublish,
    LineClock,
    LogFact,
    LogKind,
    ProcessEvent,
    ProcessEventKind,
    Record,
    Role,
    Source,
)

P_ENGINE, D_ENGINE = "engine-p", "engine-d"


def ns(ms: float | None) -> int | None:
    return None if ms is None else round(ms * MS)


def times(
    role: Role,
    at_ms: float,
    scheduled_ms: float | None,
    first_ms: float | None,
    finished_ms: float | None,
    *,
    rid: str = "cmpl-req-a-0-0000aaaa",
    trace: str = "t1",
    parent: Record | str = "",
    host: str = "h1",
    instance: str | None = None,
    **more: Any,
) -> EngineTimes:
    """Build the times scheduled, first token and finished, in ms after queued."""
    base = EngineTimes(
        process=process(role, instance, host),
        source=Source.PLUGIN,
        ids=ids(trace, parent),
        engine="vllm",
        request_id=rid,
        queued_unix_ns=EPOCH + round(at_ms * MS),
        engine_id=P_ENGINE if role is Role.PREFILL else D_ENGINE,
        scheduled_ns=ns(scheduled_ms),
        first_token_ns=ns(first_ms),
        finished_ns=ns(finished_ms),
        status="stopped" if finished_ms is not None else None,
    )
    return replace(base, **more)


def fetch(
    at_ms: float,
    *,
    rid: str = "cmpl-req-a-0-0000dddd",
    peer: str | None = "cmpl-req-a-0-0000aaaa",
    trace: str = "t1",
    parent: Record | str = "",
    host: str = "h1",
    instance: str | None = None,
    role: Role = Role.DECODE,
    started_ms: float | None = 10,
    posted_ms: float | None = 11,
    done_ms: float | None = 70,
    noticed_ms: float | None = 75,
    handshake_ms: tuple[float, float] | None = None,
    **more: Any,
) -> KvFetch:
    """Build a KV fetch that succeeded; offsets are in ms after it was known."""
    base = KvFetch(
        process=process(role, instance, host),
        source=Source.PLUGIN,
        ids=ids(trace, parent),
        engine="vllm",
        request_id=rid,
        known_unix_ns=EPOCH + round(at_ms * MS),
        connector="NixlConnector",
        engine_id=D_ENGINE,
        peer_engine_id=P_ENGINE if peer else None,
        peer_request_id=peer,
        peer_host="10.0.0.1",
        peer_port=5600,
        direction=Direction.P_TO_D,
        mode="pull",
        load_started_ns=ns(started_ms),
        handshake_begin_ns=ns(handshake_ms[0]) if handshake_ms else None,
        handshake_end_ns=ns(handshake_ms[1]) if handshake_ms else None,
        posted_ns=ns(posted_ms),
        done_ns=ns(done_ms),
        noticed_ns=ns(noticed_ms),
        ended_ns=ns(noticed_ms),
        tokens_wanted=1024,
        tokens_local=0,
        blocks=64,
        block_bytes=32768,
        bytes_expected=64 * 32768,
        bytes_moved=64 * 32768,
        descriptors=128,
        ranks=1,
        ranks_done=0 if done_ms is None else 1,
    )
    return replace(base, **more)


def publish(
    at_ms: float,
    *,
    rid: str = "cmpl-req-a-0-0000aaaa",
    trace: str = "t1",
    parent: Record | str = "",
    host: str = "h1",
    instance: str | None = None,
    read_ms: float | None = 100,
    freed_ms: float | None = 101,
    expired_ms: float | None = None,
    late_read_ms: float | None = None,
    lease_ms: float = 30_000,
    **more: Any,
) -> KvPublish:
    """Build a publish: KV that P keeps; offsets are in ms after it was published."""
    base = KvPublish(
        process=process(Role.PREFILL, instance, host),
        source=Source.PLUGIN,
        ids=ids(trace, parent),
        engine="vllm",
        request_id=rid,
        published_unix_ns=EPOCH + round(at_ms * MS),
        connector="NixlConnector",
        engine_id=P_ENGINE,
        direction=Direction.P_TO_D,
        mode="pull",
        tokens=1024,
        blocks=64,
        block_bytes=32768,
        kv_bytes=64 * 32768,
        lease_ns=ns(lease_ms),
        lease_end_ns=ns(lease_ms),
        read_ns=ns(read_ms),
        readers=0 if read_ms is None else 1,
        freed_ns=ns(freed_ms),
        expired_ns=ns(expired_ms),
        late_read_ns=ns(late_read_ms),
    )
    return replace(base, **more)


def fact(
    kind: LogKind, role: Role, at_ms: float, rid: str | None, *, host: str = "h1", instance: str | None = None, **more: Any
) -> LogFact:
    """Build the fact that a line of an engine's log states."""
    base = LogFact(
        process=process(role, instance, host),
        source=Source.LOG,
        fact_id=blake2b(f"{kind}{role}{rid}{at_ms}{instance}".encode(), digest_size=8).hexdigest(),
        kind=kind,
        recogniser="vllm.nixl.test",
        at_unix_ns=EPOCH + round(at_ms * MS),
        last_unix_ns=EPOCH + round(at_ms * MS),
        clock=LineClock.LINE,
        level="ERROR",
        request_id=rid,
    )
    return replace(base, **more)


def happened(kind: ProcessEventKind, role: Role, at_ms: float, **more: Any) -> ProcessEvent:
    """Build an event of an engine's process."""
    base = ProcessEvent(
        process=process(role),
        source=Source.PLUGIN,
        at_unix_ns=EPOCH + round(at_ms * MS),
        kind=kind,
        engine="vllm",
        engine_id=P_ENGINE if role is Role.PREFILL else D_ENGINE,
        pid=100,
        process_kind="core",
    )
    return replace(base, **more)


def facts_of(role: Role, at_ms: float = 0, **more: Any) -> EngineFacts:
    """Build the facts about an engine."""
    base = EngineFacts(
        process=process(role),
        source=Source.PLUGIN,
        at_unix_ns=EPOCH + round(at_ms * MS),
        engine="vllm",
        engine_id=P_ENGINE if role is Role.PREFILL else D_ENGINE,
        model="m",
        model_revision="r1",
        dtype="bfloat16",
        kv_cache_dtype="auto",
        block_size=16,
        kv_layout="HND",
    )
    return replace(base, **more)


def altered(record: Any, **changes: Any) -> Any:
    """Return a copy of a record of any kind with these fields."""
    return replace(record, **changes)


def loose(record: Any, **changes: Any) -> Any:
    """Return ``record`` without a parent, as when the engine knew no trace context."""
    return replace(record, ids=replace(record.ids, parent_span_id="", **changes))
