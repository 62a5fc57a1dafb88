"""List the hand-offs of a request, and gather all evidence on each.

Each load of an engine is paired with what its peer published for it. KV that nothing loaded is listed too.
Beside the records of both engines, evidence is what their logs and counters show, and what happened to their processes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from handrail.records import (
    Direction,
    Exchange,
    KvFetch,
    KvPublish,
    LogFact,
    LogKind,
    Outcome,
    ProcessEvent,
    Source,
)
from handrail_collector.explain.request.path import EngineRun, Path, ProcessEvidence
from handrail_collector.stitch.clocks import HostClocks
from handrail_collector.stitch.engines import EngineRegistry, LinkFault
from handrail_collector.stitch.evidence import connector_key

HUNG_NS: Final = 60 * 10**9
"""How long an open KV fetch may last before it counts as hung; the default."""

ANSWERED: Final = frozenset({Outcome.OK, Outcome.INCOMPLETE, Outcome.UNKNOWN_FINISH, Outcome.TRUNCATED})

_MIN_REPORTED_NS: Final = 10**9
"""How much later than it happened the death of a process may be stamped."""

_GRACE_NS: Final = 5 * 10**9
"""How long after an engine's last activity its death may be reported.

Surviving processes report it.
"""


@dataclass(frozen=True, slots=True)
class KvHandoff:
    """One hand-off.

    ``consumer`` and ``run``: the process that loads, and its engine's request. ``producer``: the process that published the KV.
    """

    fetch: KvFetch | None
    publish: KvPublish | None
    consumer: ProcessEvidence | None
    producer: ProcessEvidence | None
    run: EngineRun | None

    @property
    def backwards(self) -> bool:
        """Whether P reads KV that D kept from an earlier turn."""
        statement = self.fetch or self.publish
        return statement is not None and statement.direction is Direction.D_TO_P

    def before(self, other: KvHandoff) -> bool:
        """Whether ``other`` is a later load of the same request.

        Later: in the same run of the engine, or at another process that was called instead.
        Loads of several prompts or choices are parallel, not later.
        """
        if self.fetch is None or other.fetch is None or self is other or self.backwards or other.backwards:
            return False
        if self.run is other.run:
            return self.fetch.known_unix_ns < other.fetch.known_unix_ns
        return self.consumer is not other.consumer


@dataclass(frozen=True, slots=True, kw_only=True)
class KvEvidence:
    """All evidence on one hand-off.

    ``wait_ns``: the least and the most time from publish to the begin of the read.
    """

    handoff: KvHandoff
    path: Path
    facts: tuple[LogFact, ...] = ()
    rests: bool = True  # the answer may rest on it: the request has no later load
    wrong: str = ""  # why the KV that was read seems to be another request's
    lost: tuple[ProcessEvent, ...] = ()  # process events of the two engines meanwhile
    link_fault: LinkFault | None = None
    wait_ns: tuple[int | None, int | None] = (None, None)
    lease_ns: int | None = None
    hung_ns: int = HUNG_NS

    def outcome_by(self, *kinds: LogKind) -> list[LogFact]:
        """Return the log lines of these kinds about this request."""
        return [fact for fact in self.facts if fact.kind in kinds and fact.source is not Source.METRICS]

    def counted(self, *kinds: LogKind) -> list[LogFact]:
        """Return the counted failures of these kinds that only this request explains."""
        return [fact for fact in self.facts if fact.kind in kinds and fact.source is Source.METRICS]

    @property
    def answer(self) -> Exchange | None:
        """The exchange at the proxy beside D, else at the edge."""
        decode = self.path.decode
        return decode.exchange if decode is not None and decode.exchange is not None else self.path.edge

    @property
    def answered(self) -> bool:
        """Whether tokens came and the answer ended normally, based on this hand-off."""
        if not self.rests:
            return False
        decode = self.path.decode
        seen = self.answer
        if seen is not None:
            return seen.outcome in ANSWERED and (seen.output_tokens != 0 or seen.ttft_token_ns is not None)
        return decode is not None and any(run.times is not None and run.times.first_token_ns is not None for run in decode.runs)


def handoffs(path: Path) -> list[KvHandoff]:
    """Return the hand-offs by their begin: loads first, then KV that was never read."""
    kept = {key: found for found in _published(path) for key in connector_key(found[0].engine_id, found[0].request_id)}
    loads: list[KvHandoff] = []
    for visit in (*path.prefills, *path.decodes):
        for run in visit.runs:
            for fetch in run.fetches:
                key = connector_key(fetch.peer_engine_id, fetch.peer_request_id)
                publish, producer = kept.get(key[0], (None, None)) if key else (None, None)
                if producer is None and key:
                    producer = next((v for v in path.prefills if any(key[0] in e.connector_out for e in v.evidence)), None)
                loads.append(KvHandoff(fetch, publish, visit, producer, run))
    loads.sort(key=lambda h: (h.fetch.known_unix_ns, h.fetch.ids.span_id) if h.fetch is not None else (0, ""))
    taken = {id(load.publish) for load in loads}
    unread = [KvHandoff(None, publish, None, producer, None) for publish, producer in kept.values() if id(publish) not in taken]
    return [*loads, *sorted(unread, key=lambda h: (h.publish.published_unix_ns, h.publish.ids.span_id) if h.publish else (0, ""))]


def on_path(path: Path, every: list[KvHandoff]) -> KvHandoff | None:
    """Return the hand-off that the answer rests on.

    D's last load; without one, what the prefill on the path published.
    """
    for handoff in reversed(every):
        if handoff.fetch is not None and not handoff.backwards and handoff.consumer is path.decode:
            return handoff
    for handoff in reversed(every):
        if handoff.fetch is None and not handoff.backwards and handoff.producer is path.prefill and path.prefill is not None:
            return handoff
    return None


def _published(path: Path) -> Iterator[tuple[KvPublish, ProcessEvidence]]:
    for visit in (*path.prefills, *path.decodes):
        for run in visit.runs:
            for publish in run.publishes:
                yield publish, visit


def load_went_well(fetch: KvFetch | None) -> bool:
    return fetch is not None and not load_failed(fetch) and fetch.noticed_ns is not None


def load_failed(fetch: KvFetch) -> bool:
    """Whether the load failed.

    True where the engine's failure policy took effect, or no rank got its part. Where only the notice to P was lost, the KV is
    there.
    """
    return fetch.effect is not None or (fetch.failure is not None and not fetch.ranks_done)


def evidence_on(
    every: Sequence[KvHandoff],
    chosen: KvHandoff | None,
    path: Path,
    engines: EngineRegistry,
    clocks: HostClocks,
    *,
    wrong: str,
    hung_ns: int,
) -> list[KvEvidence]:
    """Return the evidence on each of ``every`` hand-off of a request.

    ``chosen``: the one that the answer rests on. ``wrong``: why its KV seems to be another request's, as the stitcher found.
    """
    return [
        KvEvidence(
            handoff=handoff,
            path=path,
            facts=_facts_of(handoff, every, chosen, path.facts),
            rests=chosen is None or not handoff.before(chosen),
            wrong=_wrong(handoff, path, wrong if handoff is chosen else ""),
            lost=_lost(handoff, engines),
            link_fault=_link_fault(handoff.consumer, engines),
            wait_ns=_held(handoff, clocks),
            lease_ns=_lease(handoff, path.facts, engines),
            hung_ns=hung_ns,
        )
        for handoff in every
    ]


def evidence_without_records(path: Path, engines: EngineRegistry, wrong: str) -> KvEvidence:
    """Return the evidence on a hand-off that neither engine reported."""
    handoff = KvHandoff(None, None, path.decode, path.prefill, None)
    return KvEvidence(
        handoff=handoff,
        path=path,
        facts=path.facts,
        wrong=wrong,
        lost=_lost(handoff, engines),
        link_fault=_link_fault(path.decode, engines),
    )


def _facts_of(
    one: KvHandoff, every: Sequence[KvHandoff], chosen: KvHandoff | None, facts: Sequence[LogFact]
) -> tuple[LogFact, ...]:
    """Return the log facts and counted failures about this hand-off.

    A fact belongs to it by the request id of either engine, and by time where one engine loads again.
    A fact that names neither belongs to the hand-off that the answer rests on.
    """
    own = _names(one)
    others = {name for other in every if other is not one for name in _names(other)} - own
    rest = one is chosen or len(every) == 1
    return tuple(f for f in facts if _while(one, every, f) and (f.request_id in own or (rest and f.request_id not in others)))


def _names(one: KvHandoff) -> set[str]:
    found = {one.fetch.request_id, one.fetch.peer_request_id} if one.fetch is not None else set()
    return {name for name in (*found, one.publish.request_id if one.publish is not None else None) if name}


def _while(one: KvHandoff, every: Sequence[KvHandoff], fact: LogFact) -> bool:
    """Whether a log line belongs to this one of several loads of an engine's request.

    It belongs to the last load that had begun by then.
    """
    if one.fetch is None or fact.request_id != one.fetch.request_id:
        return True
    loads = [o.fetch for o in every if o.run is one.run and o.fetch is not None]
    begun = [load for load in loads if load.known_unix_ns <= fact.at_unix_ns + fact.resolution_ns]
    return one.fetch is (begun[-1] if begun else loads[0])


def _held(handoff: KvHandoff, clocks: HostClocks) -> tuple[int | None, int | None]:
    """Return the least and the most time that KV lay at P before its read began.

    It is an interval because the offset of two hosts' clocks is only bounded.
    """
    fetch, producer = handoff.fetch, handoff.producer
    if fetch is None or fetch.posted_ns is None or producer is None:
        return None, None
    if handoff.publish is not None:
        kept_at = handoff.publish.published_unix_ns
    elif producer.exchange is not None:
        kept_at = producer.exchange.arrival_unix_ns + producer.exchange.duration_ns
    else:
        return None, None
    read_at = fetch.known_unix_ns + fetch.posted_ns
    offset = clocks.between(fetch.process.host, producer.evidence[0].record.process.host, read_at)
    if offset is None:
        return read_at - kept_at, read_at - kept_at
    return (
        None if offset.low_ns is None else read_at + offset.low_ns - kept_at,
        None if offset.high_ns is None else read_at + offset.high_ns - kept_at,
    )


def _lease(handoff: KvHandoff, facts: Sequence[LogFact], engines: EngineRegistry) -> int | None:
    if handoff.publish is not None and handoff.publish.lease_end_ns is not None:
        return handoff.publish.lease_end_ns
    for fact in facts:
        seconds = dict(fact.numbers).get("timeout_s")
        if seconds is not None:
            return round(seconds * 1e9)
    return engines.lease_ns(handoff.producer.instance) if handoff.producer is not None else None


def _wrong(handoff: KvHandoff, path: Path, found: str) -> str:
    """Return why the KV seems to be another request's; '' without such evidence.

    The stitcher's finding, or: D read a key that this request's prefill did not publish.
    """
    if found or handoff.backwards or handoff.fetch is None or handoff.publish is not None or path.prefill is None:
        return found
    published = {key for e in path.prefill.evidence for key in e.connector_out}
    evidence = handoff.consumer.evidence if handoff.consumer is not None else ()
    read = {key for e in evidence if e.record is handoff.fetch for key in e.connector_in}
    return "D read KV that this request's prefill did not publish" if published and read and not published & read else ""


def _lost(handoff: KvHandoff, engines: EngineRegistry) -> tuple[ProcessEvent, ...]:
    """Return the process events of both engines before the load ended.

    Later events cannot be why it failed.
    """
    found: list[ProcessEvent] = []
    fetch = handoff.fetch
    over = fetch.known_unix_ns + fetch.ended_ns + _MIN_REPORTED_NS if fetch is not None and fetch.ended_ns is not None else None
    for visit in (handoff.consumer, handoff.producer):
        if visit is not None:
            until = visit.ended_unix_ns + _GRACE_NS
            found.extend(engines.wrong(visit.instance, visit.began_unix_ns, until if over is None else min(over, until)))
    return tuple(found)


def _link_fault(visit: ProcessEvidence | None, engines: EngineRegistry) -> LinkFault | None:
    if visit is None:
        return None
    return engines.link_fault(visit.instance, visit.began_unix_ns, visit.ended_unix_ns)
