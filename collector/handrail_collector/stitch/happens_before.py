"""Derive cause and effect across hosts: pairs of moments in a certain order.

The first of a pair came before the second, whatever the clocks show.
A moment is used only where its stamp is on the safe side of the event. A cause must be stamped before it could be seen
elsewhere, an effect after it happened.
A call that lost a race, or whose caller left, may end at any time and is no evidence of an answer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from handrail.clock_offset import DRIFT_PPM
from handrail.identity import JoinKind
from handrail.records import EngineRequest, EngineTimes, Exchange, KvFetch, KvPublish, Outcome, Role, RouterCall, Source
from handrail_collector.stitch.evidence import Evidence

Event = tuple[str, int]
"""A host and a time on its wall clock."""

FULLY_RECEIVED: Final = frozenset({Outcome.OK, Outcome.INCOMPLETE, Outcome.UNKNOWN_FINISH})
"""Outcomes of a caller that ends after its callee."""

_FINISHED: Final = frozenset({"stopped", "length_capped", "repetition"})
_MADE_BY_P: Final = "vllm:"
"""Kind of the connector keys that are unknown before P has answered.

Other keys are agreed on in advance.
"""


def of_call(caller: Evidence, callee: Evidence) -> list[tuple[Event, Event]]:
    """Return the pairs of one call: called before reached, answered before received.

    A caller that did not read the whole answer (a client left, a time limit) gives only the first pair: the callee may go on long
    after (case G04).
    """
    a, b = caller.record.process.host, callee.record.process.host
    called, reached = caller.start_unix_ns, callee.start_unix_ns
    if not called or not reached:
        return []
    answered, received = _answered(callee), _receipts(caller)
    if received is not None and answered is not None:
        if answered - reached > (received - called) * (1 + DRIFT_PPM / 1e6) + 1:
            return []  # no clock offset makes that fit: these are not one call
        return [((a, called), (b, reached)), ((b, answered), (a, received))]
    return [((a, called), (b, reached))]


def within(evidence: Sequence[Evidence]) -> Iterator[tuple[Evidence, Event, Event]]:
    """Yield the pairs inside one request: the evidence, the cause and the effect.

    Evidence that only a request id joined is no proof and is skipped.
    """
    sure = [each for each in evidence if each.how is not JoinKind.REQUEST_KEY]
    readers = [each for each in sure if each.connector_in]
    for keeper in [each for each in sure if each.connector_out] if readers else ():
        for reader in readers:
            if not set(keeper.connector_out).isdisjoint(reader.connector_in):
                yield from _handed(sure, keeper, reader)
    yield from _routed(sure)
    yield from _streamed(sure)


def of_transfer(keeper: Evidence, reader: Evidence) -> Iterator[tuple[Event, Event]]:
    """Yield the pairs of one KV fetch from another engine.

    The KV is published before the reader knows of it; it is requested and read before the publisher learns of the read.
    """
    kept, load = keeper.record, reader.record
    if not isinstance(kept, KvPublish) or not isinstance(load, KvFetch) or load.mode == "push":
        return
    at_keeper, at_reader = kept.process.host, load.process.host
    first = 0 if load.mode == "pull" else load.posted_ns
    if first is not None:
        yield (at_keeper, kept.published_unix_ns), (at_reader, load.known_unix_ns + first)
    if load.done_ns is None or kept.read_ns is None:
        return
    queries = [load.posted_ns] if load.posted_ns is not None else []
    if kept.readers == 1:  # of several readers only the last is reported, and each knows only its own end
        queries.append(load.done_ns - load.done_bound_ns)
    if queries:
        yield (at_reader, load.known_unix_ns + max(queries)), (at_keeper, kept.published_unix_ns + kept.read_ns)


def _handed(sure: Sequence[Evidence], keeper: Evidence, reader: Evidence) -> Iterator[tuple[Evidence, Event, Event]]:
    """Yield the pairs of a hand-off.

    The answer that names the KV comes before the request that names it; the KV itself gives the pairs otherwise.
    """
    reports = list(of_transfer(keeper, reader))
    answered = _answered(keeper) if isinstance(keeper.record, Exchange) and isinstance(reader.record, Exchange) else None
    if answered is not None and _made_by_p(keeper, reader):
        reports = [((keeper.record.process.host, answered), (reader.record.process.host, reader.start_unix_ns))]
    for cause, effect in reports:
        yield reader, cause, effect
    if reports:
        yield from _around(sure, keeper, reader, *reports[0])


def _made_by_p(keeper: Evidence, reader: Evidence) -> bool:
    return any(key.startswith(_MADE_BY_P) for key in set(keeper.connector_out) & set(reader.connector_in))


def _around(
    sure: Sequence[Evidence], keeper: Evidence, reader: Evidence, left: Event, came: Event
) -> Iterator[tuple[Evidence, Event, Event]]:
    """Yield the pairs from the edge to D through P, and from P to the edge through D.

    The time inside P and inside D, by their own clocks, is subtracted.
    So one request bounds the edge against each of them from both sides, as narrowly as its messages were quick.
    """
    edges = [each for each in sure if each.role is Role.EDGE and isinstance(each.record, Exchange)]
    if len(edges) != 1 or left[0] != keeper.record.process.host:
        return
    edge, host = edges[0], edges[0].record.process.host
    entered = min((e.start_unix_ns for e in _beside(sure, keeper) if 0 < e.start_unix_ns <= left[1]), default=left[1])
    yield reader, (host, edge.start_unix_ns + _at_least(left[1] - entered)), came
    for answered, received in _answers(sure, edge, reader):
        if answered >= came[1]:
            yield reader, (left[0], left[1] + _at_least(answered - came[1])), (host, received)


def _answers(sure: Sequence[Evidence], edge: Evidence, reader: Evidence) -> Iterator[tuple[int, int]]:
    """Yield when D's answer, or its first token, left D and reached the edge.

    The first token is preferred: clocks drift less over a shorter time.
    """
    first = _first_token(sure)
    if first is not None and first.decode.record.process.instance == reader.record.process.instance:
        yield first.left_unix_ns, first.seen_unix_ns
    elif (received := _receipts(edge)) is not None:
        yield max((at for each in _beside(sure, reader) if (at := _answered(each)) is not None), default=0), received


def _beside(sure: Sequence[Evidence], one: Evidence) -> list[Evidence]:
    """Return all evidence of the same process that lies within the request."""
    instance = one.record.process.instance
    return [each for each in sure if each.record.process.instance == instance and each.within_request]


def _at_least(by_another_ns: int) -> int:
    """Return the least that one clock advanced while another advanced this much.

    The two may drift apart.
    """
    return by_another_ns - math.ceil(by_another_ns * DRIFT_PPM / 1e6) - 1


def _routed(sure: Sequence[Evidence]) -> Iterator[tuple[Evidence, Event, Event]]:
    """Yield the pairs of a router's calls and the requests that they reached.

    The parent span that the router propagated links the two.
    """
    spans = {each.span: each for each in sure if isinstance(each.record, RouterCall)}
    for callee in sure:
        call = spans.get(callee.parent)
        if call is None or not call.start_unix_ns or not callee.start_unix_ns or isinstance(callee.record, RouterCall):
            continue
        router = call.record.process.host
        yield callee, (router, call.start_unix_ns), (callee.record.process.host, callee.start_unix_ns)
        for keeper in sure:  # the router builds the call to D from P's answer
            answered = _answered(keeper) if isinstance(keeper.record, Exchange) else None
            if answered is not None and _made_by_p(keeper, callee):
                yield callee, (keeper.record.process.host, answered), (router, call.start_unix_ns)
        server, answered = spans.get(call.parent), _answered(callee)
        if server is not None and server.end_unix_ns and answered is not None and callee.role is not Role.PREFILL:
            yield callee, (callee.record.process.host, answered), (server.record.process.host, server.end_unix_ns)


def _streamed(sure: Sequence[Evidence]) -> Iterator[tuple[Evidence, Event, Event]]:
    first = _first_token(sure)
    if first is not None:
        hosts = first.decode.record.process.host, first.edge.record.process.host
        yield first.decode, (hosts[0], first.left_unix_ns), (hosts[1], first.seen_unix_ns)


@dataclass(frozen=True, slots=True)
class _FirstToken:
    """When the first token left the only decode, and when the edge saw it.

    Each is by the clock of its own host.
    """

    decode: Evidence
    left_unix_ns: int
    edge: Evidence
    seen_unix_ns: int


def _first_token(sure: Sequence[Evidence]) -> _FirstToken | None:
    tokens = [(each, at) for each in sure if (at := _token(each)) is not None]
    edges = [(each, at) for each, at in tokens if each.role is Role.EDGE]
    decodes = [(each, at) for each, at in tokens if each.role in (Role.DECODE, Role.COLLOCATED)]
    return _FirstToken(*decodes[0], *edges[0]) if len(edges) == len(decodes) == 1 else None


def _token(evidence: Evidence) -> int | None:
    record = evidence.record
    if (
        not isinstance(record, Exchange)
        or not record.stream
        or record.ttft_token_ns is None
        or record.outcome not in FULLY_RECEIVED
    ):
        return None
    return record.arrival_unix_ns + record.ttft_token_ns


def _receipts(caller: Evidence) -> int | None:
    """Return when the caller had the whole answer, or None.

    None where it did not read to the end.
    """
    record = caller.record
    return caller.end_unix_ns if isinstance(record, Exchange) and record.outcome in FULLY_RECEIVED else None


def _answered(callee: Evidence) -> int | None:
    """Return a moment before the last byte of a whole answer was sent, or None.

    None where the caller may not have received the answer, or where the stamp may be later.
    A proxy stamps what it reads before it passes that on. The middleware stamps each part before it is sent, and the end after.
    """
    record = callee.record
    if isinstance(record, Exchange):
        if record.outcome not in FULLY_RECEIVED:
            return None
        if record.source is Source.PROXY:
            return callee.end_unix_ns
        last = record.last_content_ns if record.stream else record.ttfb_ns
        return record.arrival_unix_ns + last if last is not None else None
    if isinstance(record, EngineRequest):  # vLLM ends its span before its API server gets the last output
        return callee.end_unix_ns if record.engine == "vllm" and record.outcome is Outcome.OK else None
    if isinstance(record, EngineTimes):
        return callee.end_unix_ns if not record.provisional and record.status in _FINISHED else None
    return callee.end_unix_ns if isinstance(record, RouterCall) else None
