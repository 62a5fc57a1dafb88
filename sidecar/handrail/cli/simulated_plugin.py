"""What a virtual plugin said, as the records that a sidecar makes of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from handrail.identity import derive_trace_id
from handrail.records import (
    Direction,
    EngineTimes,
    FetchEffect,
    KvFetch,
    KvParams,
    KvPublish,
    PluginSpan,
    Process,
    Role,
    Source,
    SpanIds,
)
from handrail.sources.merging.requests import MAX_PREEMPTED
from handrail_fleet.observe_plugin import KeptObservation, LoadObservation, PluginObservation, TimesObservation

LEASE_NS: Final = 30_000_000_000


class PluginRecords:
    """``processes`` and ``engine_ids`` by host; ``span_id`` gives a new one. vLLM without tracing knows no trace context."""

    def __init__(self, processes: Mapping[str, Process], engine_ids: Mapping[str, str], span_id: Callable[[], str]) -> None:
        self._processes = processes
        self._engine_ids = engine_ids
        self._span_id = span_id

    def record(self, said: PluginObservation, published: KvParams | None) -> PluginSpan:
        """``published``: what P's answer said for D; None where one engine does both."""
        process = self._processes[said.host]
        prefills = process.role is Role.PREFILL
        raw = published.remote_request_id if prefills and published is not None else None
        raw = raw or f"cmpl-{said.request_id}-0-{'d' * 8}"
        ids = SpanIds(trace_id=derive_trace_id(said.request_id), span_id=self._span_id())
        engine_id = self._engine_ids.get(said.host) or f"engine-{said.host}"
        if isinstance(said, TimesObservation):
            return self._times(said, process, ids, raw, engine_id)
        if isinstance(said, LoadObservation):
            return self._fetch(said, process, ids, raw, engine_id, published)
        return self._publish(said, process, ids, raw, engine_id)

    def _times(self, said: TimesObservation, process: Process, ids: SpanIds, raw: str, engine_id: str) -> EngineTimes:
        return EngineTimes(
            process=process,
            source=Source.PLUGIN,
            ids=ids,
            engine="vllm",
            request_id=raw,
            queued_unix_ns=said.queued_unix_ns,
            engine_id=engine_id,
            scheduled_ns=said.scheduled_ns,
            first_token_ns=said.first_token_ns,
            finished_ns=said.finished_ns,
            seen_ns=said.seen_ns,
            preemptions=said.preemptions,
            preempted=said.preempted_ns[: 2 * MAX_PREEMPTED],
            status=None if said.finished_ns is None else "error" if said.failed else "length_capped",
            prompt_tokens=said.prompt_tokens,
            output_tokens=said.output_tokens,
            provisional=said.finished_ns is None,
        )

    def _fetch(
        self, said: LoadObservation, process: Process, ids: SpanIds, raw: str, engine_id: str, published: KvParams | None
    ) -> KvFetch:
        begin, end = said.contact_ns or (None, None)
        return KvFetch(
            process=process,
            source=Source.PLUGIN,
            ids=ids,
            engine="vllm",
            request_id=raw,
            known_unix_ns=said.known_unix_ns,
            connector="NixlConnector",
            engine_id=engine_id,
            peer_engine_id=published.remote_engine_id if published is not None else None,
            peer_request_id=published.remote_request_id if published is not None else None,
            peer_host=said.peer,
            peer_port=5600,
            direction=Direction.P_TO_D,
            mode="pull",
            load_started_ns=said.started_ns,
            handshake_begin_ns=begin,
            handshake_end_ns=end,
            posted_ns=said.posted_ns,
            done_ns=said.done_ns,
            noticed_ns=said.noticed_ns,
            ended_ns=said.noticed_ns,
            seen_ns=said.seen_ns,
            tokens_wanted=said.tokens,
            bytes_expected=said.kv_bytes,
            bytes_moved=said.kv_bytes,
            failure=said.failure,
            effect=FetchEffect(said.effect) if said.effect is not None else None,
            provisional=said.noticed_ns is None,
        )

    def _publish(self, said: KeptObservation, process: Process, ids: SpanIds, raw: str, engine_id: str) -> KvPublish:
        return KvPublish(
            process=process,
            source=Source.PLUGIN,
            ids=ids,
            engine="vllm",
            request_id=raw,
            published_unix_ns=said.published_unix_ns,
            connector="NixlConnector",
            engine_id=engine_id,
            direction=Direction.P_TO_D,
            mode="pull",
            tokens=said.tokens,
            kv_bytes=said.kv_bytes,
            lease_ns=LEASE_NS,
            lease_end_ns=LEASE_NS,
            read_ns=said.read_ns,
            readers=0 if said.read_ns is None else 1,
            freed_ns=said.read_ns if said.read_ns is not None else said.expired_ns,
            expired_ns=said.expired_ns,
            late_read_ns=said.late_read_ns,
            seen_ns=said.seen_ns,
            provisional=said.read_ns is None and said.expired_ns is None,
        )
