"""Merge the KV fetches of one engine into one record each.

A record combines what the scheduler wanted and what each rank did.
Scheduler and workers send on their own time, so a worker's event may come before the scheduler's and after its end: a fetch
that has ended waits a moment for the rest. All times are on one monotonic clock, so the order of arrival does not matter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from handrail.records import Direction, FetchEffect, KvFetch, Source, SpanIds
from handrail.trace_context import TraceContext
from handrail_sidecar.plugin_merge.bounds import Bounded, MergeLimits
from handrail_sidecar.plugin_merge.engine import ENGINE, ObservedEngine, ids_of, read_context
from handrail_sidecar.plugin_merge.requests import LOST, since, status_word
from handrail_sidecar.plugin_merge.worker_parts import Handshakes, Rank, added, last_done, least, total

_DIRECTIONS: Final = {direction.value: direction for direction in Direction}
RECOMPUTE: Final = "recompute"
ERROR: Final = "error"  # the status of a request that failed in the engine


@dataclass(slots=True)
class PendingFetch:
    """What is known of one load.

    ``known_ns`` None: only workers have reported it yet.
    ``ahead``: worker events of the next load of the same request, which the scheduler has not reported yet.
    """

    request_id: str
    first_received_ns: int
    known_ns: int | None = None
    known_unix_ns: int = 0
    boot: str = ""
    fields: dict[str, Any] = field(default_factory=dict)  # fields of kv_known and kv_wanted
    ids: SpanIds | None = None
    origin: str = ""
    publish_span_id: str = ""
    decode_span_id: str = ""
    ranks: dict[int, Rank] = field(default_factory=dict)
    ahead: dict[int, Rank] = field(default_factory=dict)
    noticed_ns: int | None = None
    ended_ns: int | None = None
    close_at_ns: int | None = None
    failed: bool = False
    failure: str | None = None
    failure_error: str | None = None
    status: str | None = None
    reported_ns: int | None = None


class Fetches:
    """Open loads by request id."""

    def __init__(self, engine: ObservedEngine, limits: MergeLimits) -> None:
        self._engine = engine
        self._limits = limits
        self.open: Bounded[PendingFetch] = Bounded(limits.fetches)
        self._before: Bounded[PendingFetch] = Bounded(limits.fetches)  # a request's load before the one that is open
        self.orphans = 0
        self.handshakes = Handshakes()

    # --- events of the scheduler ------------------------------------------------------------------------------------------
    def known(
        self, boot: str, at_ns: int, unix_ns: int, reported_fields: Mapping[str, Any], context: TraceContext | None
    ) -> None:
        """Note that the scheduler knows the load.

        ``context``: the engine's own trace context of the request, if it has one.
        """
        fetch = self._fetch(reported_fields["request"], at_ns)
        if fetch.known_ns is not None:
            if not fetch.fields.get("tokens_wanted"):  # another child of a composite connector has reported it
                return
            fetch = self._again(fetch, at_ns)
        fetch.known_ns, fetch.known_unix_ns, fetch.boot = at_ns, unix_ns, boot
        fetch.fields = {**reported_fields, **fetch.fields}
        publish = read_context(reported_fields["traceparent"])
        fetch.publish_span_id = publish.span_id if publish else ""
        fetch.decode_span_id = context.span_id if context else ""
        if publish is not None and (context is None or context.trace_id == publish.trace_id):
            fetch.ids, fetch.origin = ids_of(fetch.request_id, publish)
        else:  # the engine's own trace is the request's; the hand-off's trace may be a derived one
            fetch.ids, fetch.origin = ids_of(fetch.request_id, context)

    def wanted(self, at_ns: int, reported_fields: Mapping[str, Any]) -> None:
        """Note that a load is wanted.

        Every child of a composite connector reports this; the one that loads has tokens.
        """
        fetch = self._fetch(reported_fields["request"], at_ns)
        if reported_fields["tokens_wanted"] > 0:
            fetch.fields.update(reported_fields)
            fetch.ended_ns = fetch.close_at_ns = None
            self._end_with_the_call(fetch)
        elif not fetch.fields.get("tokens_wanted"):  # all of it was here, unless another child reports otherwise
            fetch.fields.update(reported_fields)
            self._end(fetch, at_ns)

    def noticed(self, request_id: str, at_ns: int, failed: bool) -> None:
        if (fetch := self._at(request_id, at_ns)) is None:
            return
        fetch.noticed_ns = at_ns
        fetch.failed = fetch.failed or failed
        self._end(fetch, at_ns)

    def request_finished(self, request_id: str, at_ns: int, status: str | None) -> None:
        """Note that the request is over; a fetch of it that is still open ends with it."""
        if (fetch := self.open.get(request_id)) is None:
            return
        word = status_word(status) or "finished"
        if fetch.ended_ns is None or word == ERROR:  # policy "fail" ends the request before the connector learns of it
            fetch.status = word
        self._end(fetch, at_ns)

    def first_token(self, request_id: str, at_ns: int) -> None:
        """End a load within the call: its step is over, whatever the workers reported."""
        if (fetch := self.open.get(request_id)) is not None and fetch.fields.get("asynchronous") is False:
            self._end(fetch, max((r.loaded_ns for r in fetch.ranks.values() if r.loaded_ns is not None), default=at_ns))

    # --- events of the workers --------------------------------------------------------------------------------------------
    def load(self, request_id: str, rank: int, at_ns: int) -> None:
        part = self._rank(request_id, rank, at_ns)
        if part.loaded_ns is not None and at_ns > part.loaded_ns:
            part = self._fetch(request_id, at_ns).ahead.setdefault(rank, Rank())
        part.load_ns = least(part.load_ns, at_ns)

    def posted(self, request_id: str, rank: int, at_ns: int) -> None:
        part = self._rank(request_id, rank, at_ns)
        part.posted_ns = least(part.posted_ns, at_ns)

    def done(self, request_id: str, rank: int, at_ns: int, moved: int | None, descriptors: int | None, bound_ns: int) -> None:
        part = self._rank(request_id, rank, at_ns)
        if part.done_ns is None or at_ns >= part.done_ns:
            part.done_ns, part.done_bound_ns = at_ns, bound_ns
        part.moved = added(part.moved, moved)
        part.descriptors = added(part.descriptors, descriptors)

    def loaded(self, request_id: str, rank: int, at_ns: int, failed: bool, bound_ns: int) -> None:
        part = self._rank(request_id, rank, at_ns)
        part.loaded_ns, part.failed, part.loaded_bound_ns = at_ns, failed, bound_ns
        fetch = self._at(request_id, at_ns)
        if fetch is None or fetch.ranks.get(rank) is not part:  # of a load that the scheduler has not reported yet
            return
        fetch.failed = fetch.failed or failed
        self._end_with_the_call(fetch)

    def failure(self, request_id: str, at_ns: int, failure_type: str, error: str | None) -> bool:
        """Note a failure; False when no open fetch has this id.

        The first failure is the cause, the others follow from it.
        """
        fetch = self._at(request_id, at_ns)
        if fetch is None:
            return False
        if fetch.failure is None:
            fetch.failure, fetch.failure_error = failure_type, error
        return True

    # --- results ----------------------------------------------------------------------------------------------------------
    def settled(self, now_ns: int, *, at_once: bool = False) -> Iterator[KvFetch]:
        """Take the fetches that have ended and of which no more events are expected.

        ``at_once``: also those of which this sidecar will receive no more.
        """
        for held in (self._before, self.open):
            for key, fetch in list(held.items()):
                if fetch.known_ns is None:
                    if at_once or now_ns - fetch.first_received_ns >= self._limits.orphan_ns:
                        del held[key]
                        self.orphans += 1
                elif fetch.close_at_ns is not None and (at_once or now_ns >= fetch.close_at_ns or self._complete(fetch)):
                    del held[key]
                    yield self._record(fetch, None)

    def provisional(self, now_ns: int, *, at_once: bool = False) -> Iterator[KvFetch]:
        """Records of the open fetches that were not reported lately.

        ``at_once``: of all open ones.
        """
        limits = self._limits
        for fetch in self.open.values():
            if fetch.known_ns is None or fetch.ended_ns is not None:
                continue
            due = now_ns - fetch.known_ns >= limits.provisional_after_ns
            if at_once or (due and (fetch.reported_ns is None or now_ns - fetch.reported_ns >= limits.provisional_every_ns)):
                fetch.reported_ns = now_ns
                yield self._record(fetch, now_ns)

    def close_forgotten(self, boot: str, before_ns: int, at_ns: int) -> Iterator[KvFetch]:
        """End the open fetches that were known before ``before_ns``.

        The scheduler had nothing left to do after that, as for requests.
        """
        for fetch in [f for f in self.open.values() if f.boot == boot and f.ended_ns is None]:
            if fetch.known_ns is not None and fetch.known_ns < before_ns:
                del self.open[fetch.request_id]
                fetch.status, fetch.ended_ns = LOST, at_ns
                yield self._record(fetch, None)

    def close_boot(self, boot: str, at_ns: int, status: str) -> Iterator[KvFetch]:
        """End the fetches of a scheduler that is gone."""
        for held in (self._before, self.open):
            for key, fetch in [(key, fetch) for key, fetch in held.items() if fetch.boot == boot]:
                del held[key]
                if fetch.ended_ns is None:
                    fetch.status, fetch.ended_ns = status, at_ns
                yield self._record(fetch, None)

    def ages_ns(self, now_ns: int) -> list[int]:
        """Ages of the open ones."""
        return [now_ns - f.known_ns for f in self.open.values() if f.known_ns is not None and f.ended_ns is None]

    def _fetch(self, request_id: str, at_ns: int) -> PendingFetch:
        fetch = self.open.get(request_id)
        if fetch is None:
            fetch = PendingFetch(request_id, at_ns)
            self.open.put(request_id, fetch)
        return fetch

    def _again(self, fetch: PendingFetch, at_ns: int) -> PendingFetch:
        """Begin another load of the same request.

        It follows a preemption, or a failure of the load before.
        """
        self._end(fetch, at_ns)
        earlier = self._before.pop(fetch.request_id, None)
        if earlier is not None:  # no more events of it can come
            self._before.put(f"{earlier.request_id} {earlier.known_ns}", earlier)
        self._before.put(fetch.request_id, fetch)
        another = PendingFetch(
            fetch.request_id, at_ns, ranks=fetch.ahead, failed=any(part.failed for part in fetch.ahead.values())
        )
        self.open[fetch.request_id] = another
        return another

    def _at(self, request_id: str, at_ns: int) -> PendingFetch | None:
        """The load that was open at ``at_ns``.

        A worker's event of the load before may come late.
        """
        fetch = self.open.get(request_id)
        before = self._before.get(request_id)
        late = before is not None and fetch is not None and fetch.known_ns is not None and at_ns < fetch.known_ns
        return before if late else fetch

    def _rank(self, request_id: str, rank: int, at_ns: int) -> Rank:
        fetch = self._at(request_id, at_ns) or self._fetch(request_id, at_ns)
        return fetch.ahead[rank] if rank in fetch.ahead else fetch.ranks.setdefault(rank, Rank())

    def _end(self, fetch: PendingFetch, at_ns: int) -> None:
        if fetch.ended_ns is None:
            fetch.ended_ns = at_ns
            fetch.close_at_ns = at_ns + self._limits.settle_ns

    def _end_with_the_call(self, fetch: PendingFetch) -> None:
        """End a load within the call once every rank has loaded.

        The event of the first token may arrive before that.
        """
        loaded = [part.loaded_ns for part in fetch.ranks.values() if part.loaded_ns is not None]
        if fetch.fields.get("asynchronous") is False and len(loaded) >= self._engine.ranks:
            self._end(fetch, max(loaded))
            fetch.ended_ns = min(max(loaded), fetch.ended_ns or max(loaded))

    def _complete(self, fetch: PendingFetch) -> bool:
        """Whether every rank has loaded and nothing failed.

        A failed load waits for the effect of the engine's policy.
        """
        ranks = fetch.ranks.values()
        received = len(ranks) >= self._engine.ranks and all(r.loaded_ns is not None for r in ranks)
        return received and not fetch.failed

    def _record(self, fetch: PendingFetch, seen_at_ns: int | None) -> KvFetch:
        assert fetch.ids is not None
        assert fetch.known_ns is not None
        origin, reported_fields, ranks = fetch.known_ns, fetch.fields, list(fetch.ranks.values())
        loads = [r.load_ns for r in ranks if r.load_ns is not None]
        started = min(loads, default=None)
        posted = min((r.posted_ns for r in ranks if r.posted_ns is not None), default=None)
        until = posted if posted is not None else fetch.ended_ns
        begun, met = self.handshakes.contact(reported_fields.get("peer_engine_id"), fetch.ranks, started, until)
        done_ns, done_bound_ns = last_done(ranks)
        return KvFetch(
            process=self._engine.process,
            source=Source.PLUGIN,
            ids=fetch.ids,
            engine=ENGINE,
            request_id=fetch.request_id,
            known_unix_ns=fetch.known_unix_ns,
            connector=reported_fields.get("connector"),
            engine_id=reported_fields.get("engine_id") or self._engine.engine_id,
            peer_engine_id=reported_fields.get("peer_engine_id"),
            peer_request_id=reported_fields.get("peer_request_id"),
            peer_host=reported_fields.get("peer_host"),
            peer_port=reported_fields.get("peer_port"),
            direction=_DIRECTIONS.get(reported_fields.get("direction") or ""),
            mode=reported_fields.get("mode"),
            trace_origin=fetch.origin,
            publish_span_id=fetch.publish_span_id,
            decode_span_id=fetch.decode_span_id,
            load_started_ns=since(origin, started),
            handshake_begin_ns=since(origin, begun),
            handshake_end_ns=since(origin, met),
            posted_ns=since(origin, posted),
            done_ns=since(origin, done_ns),
            done_bound_ns=done_bound_ns,
            noticed_ns=since(origin, fetch.noticed_ns),
            ended_ns=since(origin, fetch.ended_ns),
            seen_ns=since(origin, seen_at_ns),
            tokens_wanted=reported_fields.get("tokens_wanted"),
            tokens_local=reported_fields.get("tokens_local"),
            blocks=reported_fields.get("blocks"),
            block_bytes=self._engine.known.get("block_bytes"),
            bytes_expected=reported_fields.get("bytes_expected"),
            bytes_moved=total(r.moved for r in ranks),
            descriptors=total(r.descriptors for r in ranks),
            ranks=len(loads),
            ranks_done=sum(1 for r in ranks if r.loaded_ns is not None and not r.failed),
            failure=fetch.failure or ("load_failed" if fetch.failed else None),
            failure_error=fetch.failure_error,
            policy=self._engine.policy,
            effect=self._effect(fetch),
            request_status=fetch.status,
            provisional=seen_at_ns is not None,
        )

    def _effect(self, fetch: PendingFetch) -> FetchEffect | None:
        """What became of the request of a failed load.

        None when that is unknown (an abort came first).
        """
        if not fetch.failed:
            return None
        if fetch.status == ERROR:
            return FetchEffect.FAILED
        return FetchEffect.RECOMPUTED if self._engine.policy == RECOMPUTE and fetch.noticed_ns is not None else None
