"""What sidecars record of the plugin's events in a virtual fleet's engines.

That is times, D's KV fetch, and the KV that P keeps.
All are by the hosts' own clocks and contain only what an engine knows: no fault, no phase, nothing of the other side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

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
from handrail_sim.emulator.observe import HostClock
from handrail_sim.emulator.scenario import Scenario
from handrail_sim.emulator.simulate import UNREAD_NS, Flight
from handrail_sim.emulator.truth import FetchTruth

_FAILURES: Final[Mapping[FetchTruth, tuple[str, FetchEffect]]] = {
    FetchTruth.FAILED: ("transfer_failed", FetchEffect.FAILED),
    FetchTruth.RECOMPUTED: ("transfer_failed", FetchEffect.RECOMPUTED),
    FetchTruth.EXPIRED: ("lease_expired", FetchEffect.RECOMPUTED),
}
"""The engine's name of each failure, and what its policy did."""

PluginRecord = tuple[int | None, PluginSpan]
"""The true time of the report, and the record. None: still open when the run is over."""


class PluginRecords:
    """Builds the plugin's records.

    ``processes``, ``engine_ids`` and ``clocks``: by host. ``span_id``: returns a new id.
    ``over_ns``: when the run is over. What is open then is recorded as it is at that time.
    vLLM without tracing has no trace context, so trace ids are derived from the request's.
    """

    def __init__(
        self,
        scenario: Scenario,
        processes: Mapping[str, Process],
        engine_ids: Mapping[str, str],
        clocks: Mapping[str, HostClock],
        over_ns: int,
        span_id: Callable[[], str],
    ) -> None:
        self._scenario = scenario
        self._processes = processes
        self._engine_ids = engine_ids
        self._clocks = clocks
        self._over_ns = over_ns
        self._span_id = span_id

    def of(self, flight: Flight, published: KvParams | None) -> Iterator[PluginRecord]:
        """Yield all records of one request.

        ``published``: the hand-off parameters in P's answer for D; None where one engine does both.
        """
        plan, split = flight.plan, flight.plan.prefill_host != flight.plan.decode_host
        if split and flight.prefill_queued_ns is not None:
            first = flight.prefill_first_ns
            marks = (flight.prefill_queued_ns, flight.prefill_scheduled_ns, first, first)
            yield self._times(plan.prefill_host, flight, published, marks, 1)
            if first is not None:
                yield self._publish(flight, published, first)
        queued = flight.decode_queued_ns if split else flight.prefill_queued_ns
        if queued is None:
            return
        ended = flight.last_token_ns if not flight.failed else flight.seen_ns or flight.loaded_ns
        scheduled = flight.decode_scheduled_ns if flight.first_token_ns is not None else None
        finished = ended if flight.engine_end_ns is not None else None
        marks = (queued, scheduled, flight.first_token_ns, finished)
        yield self._times(plan.decode_host, flight, published, marks, len(flight.gaps_ns) + 1)
        if split:
            yield self._fetch(flight, published, queued)

    def _common(self, host: str, flight: Flight, published: KvParams | None) -> dict[str, Any]:
        """Build the fields that all records have."""
        process = self._processes[host]
        raw = published.remote_request_id if process.role is Role.PREFILL and published is not None else None
        return {
            "process": process,
            "source": Source.PLUGIN,
            "ids": SpanIds(trace_id=derive_trace_id(flight.id), span_id=self._span_id()),
            "engine": "vllm",
            "request_id": raw or f"cmpl-{flight.id}-0-{'d' * 8}",
            "engine_id": self._engine_ids.get(host) or f"engine-{host}",
        }

    def _times(
        self,
        host: str,
        flight: Flight,
        published: KvParams | None,
        marks: tuple[int, int | None, int | None, int | None],
        made: int,
    ) -> PluginRecord:
        """Build the times of one request inside one engine.

        ``marks``: queued, scheduled, first token, finished.
        """
        here, decodes = self._clocks[host], host == flight.plan.decode_host
        queued, scheduled, first, finished = marks
        preempted = (self._over_ns if at is None else at for each in flight.preempted for at in each) if decodes else ()
        failed = flight.failed and decodes
        return finished, EngineTimes(
            **self._common(host, flight, published),
            queued_unix_ns=here.unix_ns(queued),
            scheduled_ns=_since(here, queued, scheduled),
            first_token_ns=_since(here, queued, first),
            finished_ns=_since(here, queued, finished),
            seen_ns=_since(here, queued, self._over_ns) if finished is None else None,
            preemptions=flight.preemptions if decodes else 0,
            preempted=tuple(here.elapsed_ns(at - queued) for at in preempted)[: 2 * MAX_PREEMPTED],
            status=None if finished is None else "error" if failed else "length_capped",
            prompt_tokens=flight.plan.arrival.prompt_tokens,
            output_tokens=made if first is not None else None,
            provisional=finished is None,
        )

    def _fetch(self, flight: Flight, published: KvParams | None, known: int) -> PluginRecord:
        """Build D's fetch. D cannot tell a stale read from a right one."""
        host, here = flight.plan.decode_host, self._clocks[flight.plan.decode_host]
        failure, effect = _FAILURES.get(flight.fetch, (None, None))
        went_well = flight.fetch in (FetchTruth.OK, FetchTruth.STALE_READ)
        started, contact = flight.load_started_ns, flight.contact_ns
        met = started is not None and contact is not None and contact > started  # otherwise it knew the peer
        noticed = flight.seen_ns if went_well else flight.loaded_ns
        kv_bytes = flight.kv_bytes if went_well else None
        return flight.seen_ns, KvFetch(
            **self._common(host, flight, published),
            known_unix_ns=here.unix_ns(known),
            connector="NixlConnector",
            peer_engine_id=published.remote_engine_id if published is not None else None,
            peer_request_id=published.remote_request_id if published is not None else None,
            peer_host=flight.plan.prefill_host,
            peer_port=5600,
            direction=Direction.P_TO_D,
            mode="pull",
            load_started_ns=_since(here, known, started),
            handshake_begin_ns=_since(here, known, started) if met else None,
            handshake_end_ns=_since(here, known, contact) if met else None,
            posted_ns=_since(here, known, contact),
            done_ns=_since(here, known, flight.loaded_ns) if went_well else None,
            noticed_ns=_since(here, known, noticed),
            ended_ns=_since(here, known, noticed),
            seen_ns=_since(here, known, self._over_ns) if flight.loaded_ns is None else None,
            tokens_wanted=flight.plan.arrival.prompt_tokens,
            bytes_expected=kv_bytes,
            bytes_moved=kv_bytes,
            failure=failure,
            effect=effect,
            provisional=noticed is None,
        )

    def _publish(self, flight: Flight, published: KvParams | None, at_ns: int) -> PluginRecord:
        """Build the KV that P keeps from ``at_ns`` on.

        P looks once a step for the notice that D has read it.
        """
        host, here = flight.plan.prefill_host, self._clocks[flight.plan.prefill_host]
        tokens = flight.plan.arrival.prompt_tokens
        read = flight.received_ns if flight.fetch is FetchTruth.OK else None
        late = flight.received_ns if flight.fetch is FetchTruth.STALE_READ else None
        expired = flight.expired_ns if read is None else None
        ended = read if read is not None else late if late is not None else flight.expired_ns
        return ended, KvPublish(
            **self._common(host, flight, published),
            published_unix_ns=here.unix_ns(at_ns),
            connector="NixlConnector",
            direction=Direction.P_TO_D,
            mode="pull",
            tokens=tokens,
            kv_bytes=tokens * self._scenario.kv_bytes_per_token,
            lease_ns=UNREAD_NS,
            lease_end_ns=UNREAD_NS,
            read_ns=_since(here, at_ns, read),
            readers=0 if read is None else 1,
            freed_ns=_since(here, at_ns, expired if read is None else read),
            expired_ns=_since(here, at_ns, expired),
            late_read_ns=_since(here, at_ns, late),
            seen_ns=_since(here, at_ns, self._over_ns) if ended is None else None,
            provisional=read is None and expired is None,
        )


def _since(here: HostClock, begin_ns: int, at_ns: int | None) -> int | None:
    return here.elapsed_ns(at_ns - begin_ns) if at_ns is not None else None
