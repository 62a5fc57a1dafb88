"""List the hand-offs of a request.

Each load of an engine is paired with what its peer published for it. KV that nothing loaded is listed too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from handrail.records import Direction, KvFetch, KvPublish, LogFact
from handrail_collector.explain.request.path import EngineRun, Path, ProcessEvidence
from handrail_collector.stitch.evidence import connector_key


@dataclass(frozen=True, slots=True)
class KvHandoff:
    """One hand-off.

    ``reader`` and ``run``: the process that loads, and its engine's request. ``keeper``: the process that published the KV.
    """

    fetch: KvFetch | None
    publish: KvPublish | None
    reader: ProcessEvidence | None
    keeper: ProcessEvidence | None
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
        return self.reader is not other.reader


def handoffs(path: Path) -> list[KvHandoff]:
    """Return the hand-offs by their begin: loads first, then KV that was never read."""
    kept = {key: found for found in _published(path) for key in connector_key(found[0].engine_id, found[0].request_id)}
    loads: list[KvHandoff] = []
    for visit in (*path.prefills, *path.decodes):
        for run in visit.runs:
            for fetch in run.fetches:
                key = connector_key(fetch.peer_engine_id, fetch.peer_request_id)
                publish, keeper = kept.get(key[0], (None, None)) if key else (None, None)
                if keeper is None and key:
                    keeper = next((v for v in path.prefills if any(key[0] in e.connector_out for e in v.evidence)), None)
                loads.append(KvHandoff(fetch, publish, visit, keeper, run))
    loads.sort(key=lambda h: (h.fetch.known_unix_ns, h.fetch.ids.span_id) if h.fetch is not None else (0, ""))
    taken = {id(load.publish) for load in loads}
    unread = [KvHandoff(None, publish, None, keeper, None) for publish, keeper in kept.values() if id(publish) not in taken]
    return [*loads, *sorted(unread, key=lambda h: (h.publish.published_unix_ns, h.publish.ids.span_id) if h.publish else (0, ""))]


def on_path(path: Path, every: list[KvHandoff]) -> KvHandoff | None:
    """Return the hand-off that the answer rests on.

    D's last load; without one, what the prefill on the path published.
    """
    for handoff in reversed(every):
        if handoff.fetch is not None and not handoff.backwards and handoff.reader is path.decode:
            return handoff
    for handoff in reversed(every):
        if handoff.fetch is None and not handoff.backwards and handoff.keeper is path.prefill and path.prefill is not None:
            return handoff
    return None


def facts_of(
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


def _published(path: Path) -> Iterator[tuple[KvPublish, ProcessEvidence]]:
    for visit in (*path.prefills, *path.decodes):
        for run in visit.runs:
            for publish in run.publishes:
                yield publish, visit
