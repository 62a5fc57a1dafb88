"""The records that a sidecar makes of a virtual plugin's events."""

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
from handrail_sidecar.plugin_merge.requests import MAX_PREEMPTED
from handrail_sim.emulator.observe_plugin import KeptObservation, LoadObservation, PluginObservation, TimesObservation

LEASE_NS: Final = 30_000_000_000


class PluginRecords:
    """Builds the plugin's records.

    ``processes`` and ``engine_ids``: by host. ``span_id``: returns a new id. vLLM without tracing has no trace context.
    """

    def __init__(self, processes: Mapping[str, Process], engine_ids: Mapping[str, str], span_id: Callable[[], str]) -> None:
        self._processes = processes
        self._engine_ids = engine_ids
        self._span_id = span_id

    def record(self, statement: PluginObservation, published: KvParams | None) -> PluginSpan:
        """Build the record of one observation.

        ``published``: the hand-off parameters in P's answer for D; None where one engine does both.
        """
        process = self._processes[statement.host]
        prefills = process.role is Role.PREFILL
        raw = published.remote_request_id if prefills and published is not None else None
        raw = raw or f"cmpl-{statement.request_id}-0-{'d' * 8}"
        ids = SpanIds(trace_id=derive_trace_id(statement.request_id), span_id=self._span_id())
        engine_id = self._engine_ids.get(statement.host) or f"engine-{statement.host}"
        if isinstance(statement, TimesObservation):
            return self._times(statement, process, ids, raw, engine_id)
        if isinstance(statement, LoadObservation):
            return self._fetch(statement, process, ids, raw, engine_id, published)
        return self._publish(statement, process, ids, raw, engine_id)

    def _times(
        self, times_observation: TimesObservation, process: Process, ids: SpanIds, raw: str, engine_id: str
    ) -> EngineTimes:
        return EngineTimes(
            process=process,
            source=Source.PLUGIN,
            ids=ids,
            engine="vllm",
            request_id=raw,
            queued_unix_ns=times_observation.queued_unix_ns,
            engine_id=engine_id,
            scheduled_ns=times_observation.scheduled_ns,
            first_token_ns=times_observation.first_token_ns,
            finished_ns=times_observation.finished_ns,
            seen_ns=times_observation.seen_ns,
            preemptions=times_observation.preemptions,
            preempted=times_observation.preempted_ns[: 2 * MAX_PREEMPTED],
            status=None if times_observation.finished_ns is None else "error" if times_observation.failed else "length_capped",
            prompt_tokens=times_observation.prompt_tokens,
            output_tokens=times_observation.output_tokens,
            provisional=times_observation.finished_ns is None,
        )

    def _fetch(
        self,
        load_observation: LoadObservation,
        process: Process,
        ids: SpanIds,
        raw: str,
        engine_id: str,
        published: KvParams | None,
    ) -> KvFetch:
        begin, end = load_observation.contact_ns or (None, None)
        return KvFetch(
            process=process,
            source=Source.PLUGIN,
            ids=ids,
            engine="vllm",
            request_id=raw,
            known_unix_ns=load_observation.known_unix_ns,
            connector="NixlConnector",
            engine_id=engine_id,
            peer_engine_id=published.remote_engine_id if published is not None else None,
            peer_request_id=published.remote_request_id if published is not None else None,
            peer_host=load_observation.peer,
            peer_port=5600,
            direction=Direction.P_TO_D,
            mode="pull",
            load_started_ns=load_observation.started_ns,
            handshake_begin_ns=begin,
            handshake_end_ns=end,
            posted_ns=load_observation.posted_ns,
            done_ns=load_observation.done_ns,
            noticed_ns=load_observation.noticed_ns,
            ended_ns=load_observation.noticed_ns,
            seen_ns=load_observation.seen_ns,
            tokens_wanted=load_observation.tokens,
            bytes_expected=load_observation.kv_bytes,
            bytes_moved=load_observation.kv_bytes,
            failure=load_observation.failure,
            effect=FetchEffect(load_observation.effect) if load_observation.effect is not None else None,
            provisional=load_observation.noticed_ns is None,
        )

    def _publish(self, kept_observation: KeptObservation, process: Process, ids: SpanIds, raw: str, engine_id: str) -> KvPublish:
        return KvPublish(
            process=process,
            source=Source.PLUGIN,
            ids=ids,
            engine="vllm",
            request_id=raw,
            published_unix_ns=kept_observation.published_unix_ns,
            connector="NixlConnector",
            engine_id=engine_id,
            direction=Direction.P_TO_D,
            mode="pull",
            tokens=kept_observation.tokens,
            kv_bytes=kept_observation.kv_bytes,
            lease_ns=LEASE_NS,
            lease_end_ns=LEASE_NS,
            read_ns=kept_observation.read_ns,
            readers=0 if kept_observation.read_ns is None else 1,
            freed_ns=kept_observation.read_ns if kept_observation.read_ns is not None else kept_observation.expired_ns,
            expired_ns=kept_observation.expired_ns,
            late_read_ns=kept_observation.late_read_ns,
            seen_ns=kept_observation.seen_ns,
            provisional=kept_observation.read_ns is None and kept_observation.expired_ns is None,
        )
