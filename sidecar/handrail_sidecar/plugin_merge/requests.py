"""Merge the requests of one engine from the events of its scheduler.

A request is queued, scheduled, has its first token, is preempted and finishes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from handrail.records import EngineTimes, Source, SpanIds
from handrail.trace_context import TraceContext
from handrail_sidecar.plugin_merge.bounds import Bounded, MergeLimits
from handrail_sidecar.plugin_merge.engine import ENGINE, ObservedEngine, ids_of

_FINISHED = "FINISHED_"
MAX_PREEMPTED: Final = 16  # times of one request that are reported one by one
LOST = "lost"  # the event of its end was not received


@dataclass(slots=True)
class OpenRequest:
    """What is known of one request; times on the monotonic clock."""

    request_id: str
    boot: str
    ids: SpanIds
    origin: str
    context: TraceContext | None
    queued_ns: int
    queued_unix_ns: int
    arrival_unix_ns: int | None
    prompt_tokens: int | None
    reported_ns: int  # when it was last reported, provisionally
    scheduled_ns: int | None = None
    first_token_ns: int | None = None
    preempted_at_ns: int | None = None
    preemptions: int = 0
    preempted_ns: int = 0
    preempted_before_first_ns: int = 0
    preempted: list[tuple[int, int]] = field(default_factory=list)  # from, to; the longest
    cached_tokens: int | None = None
    external_tokens: int | None = None


class OpenRequests:
    """Open requests by id.

    An event of an unknown request counts in ``unmatched``: the event of its beginning was not received.
    """

    def __init__(self, engine: ObservedEngine, limits: MergeLimits) -> None:
        self._engine = engine
        self._limits = limits
        self.open: Bounded[OpenRequest] = Bounded(limits.requests)
        self.unmatched = 0

    def queued(
        self,
        boot: str,
        request_id: str,
        at_ns: int,
        unix_ns: int,
        arrival: int | None,
        tokens: int | None,
        context: TraceContext | None,
    ) -> None:
        ids, origin = ids_of(request_id, context)
        self.open.put(
            request_id, OpenRequest(request_id, boot, ids, origin, context, at_ns, unix_ns, arrival, tokens, reported_ns=at_ns)
        )

    def scheduled(self, request_id: str, at_ns: int, cached: int | None, external: int | None) -> None:
        if (request := self._find(request_id)) is None:
            return
        if request.scheduled_ns is None:
            request.scheduled_ns = at_ns
            request.cached_tokens, request.external_tokens = cached, external
        self._resume(request, at_ns)

    def first_token(self, request_id: str, at_ns: int) -> OpenRequest | None:
        """Note a first token; return its request, None if one was noted before."""
        request = self._find(request_id)
        if request is None or request.first_token_ns is not None:
            return None
        request.first_token_ns = at_ns
        return request

    def preempted(self, request_id: str, at_ns: int) -> None:
        if (request := self._find(request_id)) is not None and request.preempted_at_ns is None:
            request.preempted_at_ns = at_ns
            request.preemptions += 1

    def finished(self, request_id: str, at_ns: int, status: str | None, output_tokens: int | None) -> EngineTimes | None:
        request = self._find(request_id)
        if request is None:
            return None
        del self.open[request_id]
        self._resume(request, at_ns)
        return self._record(request, at_ns, finished=True, status=status, output_tokens=output_tokens)

    def provisional(self, now_ns: int, *, at_once: bool = False) -> Iterator[EngineTimes]:
        """Records of the open requests that are old enough and were not reported lately.

        ``at_once``: of all open ones.
        """
        limits = self._limits
        for request in self.open.values():
            old = now_ns - request.queued_ns >= limits.provisional_after_ns
            due = request.reported_ns == request.queued_ns or now_ns - request.reported_ns >= limits.provisional_every_ns
            if at_once or (old and due):
                request.reported_ns = now_ns
                yield self._record(request, now_ns, finished=False, status=None, output_tokens=None)

    def close_forgotten(self, boot: str, before_ns: int, at_ns: int) -> Iterator[EngineTimes]:
        """End the open requests that were queued before ``before_ns``.

        The scheduler had nothing left to do after that. They have ended, and the events of their ends were lost.
        """
        for request in [r for r in self.open.values() if r.boot == boot and r.queued_ns < before_ns]:
            del self.open[request.request_id]
            self._resume(request, at_ns)
            yield self._record(request, at_ns, finished=True, status=LOST, output_tokens=None)

    def close_boot(self, boot: str, at_ns: int, status: str) -> Iterator[EngineTimes]:
        """End the requests of a process that is gone."""
        for request in [r for r in self.open.values() if r.boot == boot]:
            del self.open[request.request_id]
            self._resume(request, at_ns)
            yield self._record(request, at_ns, finished=True, status=status, output_tokens=None)

    def _find(self, request_id: str) -> OpenRequest | None:
        request = self.open.get(request_id)
        if request is None:
            self.unmatched += 1
        return request

    @staticmethod
    def _resume(request: OpenRequest, at_ns: int) -> None:
        if request.preempted_at_ns is not None:
            lost = max(0, at_ns - request.preempted_at_ns)
            request.preempted_ns += lost
            if request.first_token_ns is None:
                request.preempted_before_first_ns += lost
            request.preempted.append((request.preempted_at_ns, request.preempted_at_ns + lost))
            if len(request.preempted) > MAX_PREEMPTED:
                request.preempted.remove(min(request.preempted, key=lambda each: each[1] - each[0]))
            request.preempted_at_ns = None

    def _record(
        self, request: OpenRequest, at_ns: int, *, finished: bool, status: str | None, output_tokens: int | None
    ) -> EngineTimes:
        return EngineTimes(
            process=self._engine.process,
            source=Source.PLUGIN,
            ids=request.ids,
            engine=ENGINE,
            request_id=request.request_id,
            queued_unix_ns=request.queued_unix_ns,
            engine_id=self._engine.engine_id,
            trace_origin=request.origin,
            arrival_unix_ns=request.arrival_unix_ns,
            scheduled_ns=since(request.queued_ns, request.scheduled_ns),
            first_token_ns=since(request.queued_ns, request.first_token_ns),
            finished_ns=since(request.queued_ns, at_ns) if finished else None,
            seen_ns=None if finished else since(request.queued_ns, at_ns),
            preemptions=request.preemptions,
            preempted_ns=request.preempted_ns,
            preempted_before_first_ns=request.preempted_before_first_ns,
            preempted=tuple(max(0, at - request.queued_ns) for each in request.preempted for at in each),
            status=status_word(status),
            prompt_tokens=request.prompt_tokens,
            cached_tokens=request.cached_tokens,
            external_tokens=request.external_tokens,
            output_tokens=output_tokens,
            provisional=not finished,
        )


def since(origin_ns: int, at_ns: int | None) -> int | None:
    """An offset in ns, never negative.

    The stamps of hooks that run at one moment may be microseconds out of order.
    """
    return None if at_ns is None else max(0, at_ns - origin_ns)


def status_word(status: str | None) -> str | None:
    """Convert ``FINISHED_LENGTH_CAPPED`` to ``length_capped``."""
    return None if status is None else status.removeprefix(_FINISHED).lower()
