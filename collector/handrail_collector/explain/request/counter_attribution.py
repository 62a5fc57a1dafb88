"""Attribute failures that engine counters show to the one request that fits.

A counter names no request (``handrail_sidecar/engine_metrics/failures.py``). It counts as evidence only where exactly one
hand-off was open at that engine between the two readings, and nothing else shows how that hand-off ended.
A failed hand-off that other evidence names explains the counter, and so does an aborted request (vLLM's clean-up after it may
fail and count). Then nothing is concluded from the counter.
Failures that no request explains become a finding.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from handrail.records import (
    FAILED_FETCH_KINDS,
    EngineRequest,
    Exchange,
    KvFetch,
    KvPublish,
    LogFact,
    LogKind,
    Outcome,
    Role,
    Source,
)
from handrail_collector.explain.request.kv_handoff import load_failed
from handrail_collector.stitch.evidence import Evidence
from handrail_collector.stitch.group import RequestGroup

SECOND: Final = 10**9
MOST: Final = 4096
SLACK_NS: Final = SECOND
"""How far a counted failure and a record's stamps may lie apart.

The engine counts a failure at a step and reports its request's end after it.
"""

GIVEN_UP_NS: Final = 30 * SECOND
"""How long after an abort the engine's clean-up may still fail and count.

Each handshake times out after 5 s.
"""

_READS: Final = frozenset({LogKind.FETCH_FAILED, LogKind.HANDSHAKE_FAILED})
_KEEPS: Final = frozenset({LogKind.EXPIRED, LogKind.STALE_READ})
_SAYS_SO: Final = {
    LogKind.FETCH_FAILED: FAILED_FETCH_KINDS,
    LogKind.HANDSHAKE_FAILED: FAILED_FETCH_KINDS,
    LogKind.EXPIRED: frozenset({LogKind.EXPIRED, LogKind.STALE_READ}),
    LogKind.STALE_READ: frozenset({LogKind.STALE_READ}),
}


@dataclass(frozen=True, slots=True)
class UnattributedFailures:
    """Failures that an engine counted and that no request explains.

    ``explained``: the number of requests that explain some of them.
    """

    fact: LogFact
    offset: int
    explained: int
    open: int  # hand-offs that it may belong to


@dataclass(frozen=True, slots=True)
class _PendingFailure:
    fact: LogFact
    offset: int
    due_unix_ns: int


@dataclass(slots=True)
class _Handoffs:
    """What one group's hand-offs at an engine show about a counted failure.

    ``may_be``: the failure may be of this group. ``explains``: other evidence already shows such a failure.
    """

    may_be: bool = False
    explains: bool = False


class CounterAttribution:
    """Counted failures that wait until all evidence that may explain them is there.

    One owner; the caller passes the time in.
    """

    def __init__(self, wait_ns: int) -> None:
        self._wait_ns = wait_ns
        self._waiting: deque[_PendingFailure] = deque(maxlen=MOST)

    def take(self, fact: LogFact, offset: int, now_unix_ns: int) -> bool:
        """Take ``fact`` if it is a counted failure; return whether it is one."""
        if fact.source is not Source.METRICS or fact.kind not in _SAYS_SO or not fact.process.instance:
            return False
        if all(w.fact.fact_id != fact.fact_id for w in self._waiting):
            self._waiting.append(_PendingFailure(fact, offset, now_unix_ns + self._wait_ns))
        return True

    def settle(
        self, groups: Callable[[], Sequence[RequestGroup]], ranks: Callable[[str], int | None], now_unix_ns: int
    ) -> Iterator[tuple[RequestGroup, LogFact, int] | UnattributedFailures]:
        """Yield the attributed failures, and those that nothing explains.

        An attributed failure is (group, fact, journal offset).
        ``ranks`` returns the workers of an engine, where known. ``groups`` is called, and each group examined once, only where a
        failure is due.
        """
        ripe = []
        while self._waiting and self._waiting[0].due_unix_ns <= now_unix_ns:
            ripe.append(self._waiting.popleft())
        if not ripe:
            return
        at = _by_instance(groups(), {w.fact.process.instance for w in ripe})
        for waiting in ripe:
            fact = waiting.fact
            found = [(group, _look(evidence, fact)) for group, evidence in at.get(fact.process.instance, [])]
            explaining = sum(1 for _, seen in found if seen.explains)
            meant = [group for group, seen in found if seen.may_be and not seen.explains]
            workers = ranks(fact.process.instance)
            if not explaining and len(meant) == 1 and fact.kind is not LogKind.STALE_READ:
                yield meant[0], fact, waiting.offset
            elif not explaining or (workers is not None and fact.lines > explaining * workers):
                yield UnattributedFailures(fact, waiting.offset, explaining, len(meant))


def _by_instance(groups: Sequence[RequestGroup], wanted: set[str]) -> dict[str, list[tuple[RequestGroup, list[Evidence]]]]:
    found: dict[str, list[tuple[RequestGroup, list[Evidence]]]] = {}
    for group in groups:
        of_group: dict[str, list[Evidence]] = {}
        for evidence in group.evidence:
            if evidence.record.process.instance in wanted:
                of_group.setdefault(evidence.record.process.instance, []).append(evidence)
        for instance, mine in of_group.items():
            found.setdefault(instance, []).append((group, mine))
    return found


def _look(evidence: Sequence[Evidence], fact: LogFact) -> _Handoffs:
    """Return what a group's evidence at this engine shows about ``fact``.

    The engine's own records take precedence over those of the proxy before it.
    """
    seen = _Handoffs()
    begin, end = fact.at_unix_ns - SLACK_NS, fact.last_unix_ns + SLACK_NS
    reported = False
    for one in evidence:
        record = one.record
        if isinstance(record, LogFact):
            names_it = record.source is not Source.METRICS and record.kind in _SAYS_SO[fact.kind]
            seen.explains |= names_it and one.start_unix_ns <= end
        elif isinstance(record, KvFetch) and fact.kind in _READS:
            reported = True
            _add_fetch(seen, record, begin, end)
        elif isinstance(record, KvPublish):
            reported |= _add_publish(seen, record, fact.kind, begin, end)
    if not reported and fact.kind in _READS:
        for one in evidence:
            if isinstance(one.record, Exchange):
                reported = True
                _add_exchange(seen, one.record, begin, end)
        for one in evidence:
            if not reported and isinstance(one.record, EngineRequest) and one.role is Role.DECODE:
                seen.may_be |= one.start_unix_ns <= end and (one.end_unix_ns or end) >= begin
    return seen


def _add_fetch(seen: _Handoffs, fetch: KvFetch, begin: int, end: int) -> None:
    offset = next((at for at in (fetch.noticed_ns, fetch.ended_ns) if at is not None), None)
    over = fetch.known_unix_ns + offset if offset is not None else None
    if fetch.known_unix_ns > end:
        return
    if over is None or over >= begin:
        failed = load_failed(fetch) or fetch.failure is not None
        seen.explains |= failed
        well = fetch.noticed_ns is not None and not failed
        seen.may_be |= not well and fetch.tokens_wanted != 0
    if fetch.request_status == "aborted" and over is not None and over + GIVEN_UP_NS >= begin:
        seen.explains = True


def _add_publish(seen: _Handoffs, publish: KvPublish, kind: LogKind, begin: int, end: int) -> bool:
    """Return whether ``publish`` is evidence on this kind of failure."""
    pushes = kind in _READS and publish.mode == "push"
    if not pushes and kind not in _KEEPS:
        return False
    if publish.published_unix_ns > end:
        return True
    freed = publish.published_unix_ns + publish.freed_ns if publish.freed_ns is not None else None
    while_kept = freed is None or freed >= begin
    if kind is LogKind.STALE_READ:
        seen.explains |= publish.late_read_ns is not None
        seen.may_be |= publish.late_read_ns is None
    elif kind is LogKind.EXPIRED:
        seen.explains |= while_kept and publish.expired_ns is not None
        seen.may_be |= while_kept and publish.read_ns is None and publish.done_ns is None and publish.expired_ns is None
    else:
        seen.explains |= while_kept and publish.failure is not None
        seen.may_be |= while_kept and publish.done_ns is None and publish.failure is None
    return True


def _add_exchange(seen: _Handoffs, exchange: Exchange, begin: int, end: int) -> None:
    """Use a request that was to read KV, where the engine reported nothing.

    Its KV fetch may have been open until its first token, or its end.
    """
    kv_params = exchange.kv_in
    local = kv_params is None and exchange.inspected == "whole"
    if local or (kv_params is not None and kv_params.do_remote_decode) or exchange.arrival_unix_ns > end:
        return
    took = exchange.ttft_token_ns if exchange.ttft_token_ns is not None else exchange.duration_ns
    until = exchange.arrival_unix_ns + took
    if exchange.outcome in (Outcome.CLIENT_DISCONNECT, Outcome.ABORTED) and exchange.ttft_token_ns is None:
        seen.explains |= until + GIVEN_UP_NS >= begin
    elif until >= begin:
        seen.may_be = True


def unexplained_detail(found: UnattributedFailures) -> str:
    """Return the text of the finding."""
    fact = found.fact
    what = fact.recogniser.removeprefix("metrics.")
    text = f"{fact.process.role.value} counted {fact.lines} {what} within {(fact.last_unix_ns - fact.at_unix_ns) / 1e9:.0f} s"
    if found.explained:
        return f"{text}, more than the {found.explained} failed requests explain"
    if not found.open:
        return f"{text}, while no known hand-off was open there"
    return f"{text}, while {found.open} hand-offs were open there, and no evidence says which of them these are"
