"""Keep what is known of each engine: its facts, process events, and link faults.

Memory is bounded by instance, oldest out.
Times are wall clock of the engine's host; nothing here compares clocks of two hosts.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from handrail.records import EngineFacts, LogFact, LogKind, ProcessEvent, ProcessEventKind, Source

SECOND: Final = 10**9
MAX_RANKS: Final = 256
LINK_QUIET_NS: Final = 60 * SECOND
"""Time without an error after which a link counts as healthy again."""

GONE: Final = frozenset({ProcessEventKind.DEAD, ProcessEventKind.STOPPED, ProcessEventKind.RESTARTED})
WRONG: Final = GONE | {ProcessEventKind.HUNG}
_LINK: Final = frozenset({LogKind.LINK_ERROR, LogKind.PEER_LOST})
_COMPARED: Final = (
    ("model", "model"),
    ("model_revision", "model revision"),
    ("dtype", "dtype"),
    ("kv_cache_dtype", "KV cache dtype"),
    ("kv_layout", "KV layout"),
    ("block_size", "block size"),
)


@dataclass(slots=True)
class LinkFault:
    """Link errors at one engine that name no request, without a longer pause."""

    since_unix_ns: int
    last_unix_ns: int
    reason: str
    count: int = 1


@dataclass(slots=True)
class _KnownEngine:
    facts: dict[int | None, EngineFacts] = field(default_factory=dict)  # by data-parallel rank
    events: deque[ProcessEvent] = field(default_factory=lambda: deque(maxlen=64))
    faults: deque[LinkFault] = field(default_factory=lambda: deque(maxlen=16))


@dataclass(slots=True)
class EngineRegistry:
    """The known facts, events and link faults of engines, by instance (host:port)."""

    max_engines: int = 4096
    _engines: OrderedDict[str, _KnownEngine] = field(default_factory=OrderedDict)

    def take(self, record: EngineFacts | ProcessEvent | LogFact) -> ProcessEvent | None:
        """Learn from one record.

        Returns the event that it implies: another engine runs at a known address (``RESTARTED``).
        """
        if not record.process.instance:
            return None
        engine = self._at(record.process.instance)
        if isinstance(record, ProcessEvent):
            if record not in engine.events:
                engine.events.append(record)
            return None
        if isinstance(record, LogFact):
            _take_fact(engine, record)
            return None
        before = engine.facts.get(record.dp_rank)
        if before is not None and before.at_unix_ns > record.at_unix_ns:
            return None
        if len(engine.facts) < MAX_RANKS or before is not None:
            engine.facts[record.dp_rank] = record
        if before is None or not before.engine_id or not record.engine_id or before.engine_id == record.engine_id:
            return None
        event = ProcessEvent(
            process=record.process,
            source=Source(record.source),
            at_unix_ns=record.at_unix_ns,
            kind=ProcessEventKind.RESTARTED,
            engine=record.engine,
            engine_id=record.engine_id,
            pid=record.pid,
            detail=f"engine {before.engine_id} -> {record.engine_id} at one address",
            at_bound_ns=max(0, record.at_unix_ns - before.at_unix_ns),
        )
        engine.events.append(event)
        return event

    def _at(self, instance: str) -> _KnownEngine:
        engine = self._engines.get(instance)
        if engine is None:
            engine = self._engines[instance] = _KnownEngine()
            if len(self._engines) > self.max_engines:
                self._engines.popitem(last=False)
        return engine

    def wrong(self, instance: str, from_unix_ns: int, to_unix_ns: int) -> Iterator[ProcessEvent]:
        """Yield this engine's events that may have affected its work in this time.

        Such events: it died, hung, stopped or was replaced.
        """
        engine = self._engines.get(instance)
        for event in engine.events if engine is not None else ():
            since = from_unix_ns - (LINK_QUIET_NS if event.kind is ProcessEventKind.HUNG else 0)
            if event.kind in WRONG and since <= event.at_unix_ns and event.at_unix_ns - event.at_bound_ns <= to_unix_ns:
                yield event

    def link_fault(self, instance: str, from_unix_ns: int, to_unix_ns: int) -> LinkFault | None:
        """Return a link fault that was present in this time, or None."""
        engine = self._engines.get(instance)
        for fault in engine.faults if engine is not None else ():
            if fault.since_unix_ns <= to_unix_ns and fault.last_unix_ns + LINK_QUIET_NS >= from_unix_ns:
                return fault
        return None

    def differences(self, one: str, two: str) -> Iterator[tuple[str, str, str]]:
        """Yield the settings in which two engines differ that hand KV to each other.

        Each: the setting, the value at the first, the value at the second.
        """
        a, b = self._facts(one), self._facts(two)
        if a is None or b is None or one == two:
            return
        for name, words in _COMPARED:
            ours, theirs = getattr(a, name), getattr(b, name)
            if ours is not None and theirs is not None and ours != theirs:
                yield words, str(ours), str(theirs)

    def _facts(self, instance: str) -> EngineFacts | None:
        engine = self._engines.get(instance)
        return next(iter(engine.facts.values()), None) if engine is not None else None

    def ranks(self, instance: str) -> int | None:
        """Return how many workers take part in each KV fetch; None where unknown."""
        facts = self._facts(instance)
        return max(1, facts.tp_size) * max(1, facts.pp_size or 1) if facts is not None and facts.tp_size is not None else None

    def lease_ns(self, instance: str) -> int | None:
        """Return how long this engine keeps KV for a peer (its lease); None where unknown."""
        facts = self._facts(instance)
        return facts.lease_ns if facts is not None else None


def _take_fact(engine: _KnownEngine, fact: LogFact) -> None:
    if fact.kind is LogKind.ENGINE_DEAD:
        event = ProcessEvent(
            process=fact.process,
            source=fact.source,
            at_unix_ns=fact.at_unix_ns,
            kind=ProcessEventKind.DEAD,
            detail=fact.reason or "its log says so",
            at_bound_ns=fact.resolution_ns,
        )
        if event not in engine.events:
            engine.events.append(event)
    if fact.kind not in _LINK or fact.request_id is not None:
        return
    last = engine.faults[-1] if engine.faults else None
    if last is None or not last.since_unix_ns - LINK_QUIET_NS <= fact.at_unix_ns <= last.last_unix_ns + LINK_QUIET_NS:
        engine.faults.append(LinkFault(fact.at_unix_ns, fact.last_unix_ns, fact.reason or fact.kind.value))
    else:
        last.since_unix_ns = min(last.since_unix_ns, fact.at_unix_ns)
        last.last_unix_ns = max(last.last_unix_ns, fact.last_unix_ns)
        last.count += 1
