"""Merge the events of one engine's processes: packets in, records out.

It does no I/O; the clock is that of the host.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from handrail.plugin import events as words
from handrail.records import ENGINE_LOST, ENGINE_STOPPED, Observation, Process, ProcessEventKind
from handrail.trace_context import TraceContext
from handrail_sidecar.live_metrics.requests import LiveRequests
from handrail_sidecar.plugin_merge.bounds import Bounded, MergeLimits
from handrail_sidecar.plugin_merge.engine import ObservedEngine, read_context
from handrail_sidecar.plugin_merge.fetches import Fetches
from handrail_sidecar.plugin_merge.processes import Exists, GuestProcess, Processes
from handrail_sidecar.plugin_merge.publishes import Publishes
from handrail_sidecar.plugin_merge.requests import OpenRequests
from handrail_sidecar.plugin_merge.steps import Steps
from handrail_sidecar.sources.datagram import Packet
from handrail_sidecar.sources.middleware import MiddlewareExchanges

FACTS_EVERY_NS: Final = 300 * 10**9
FORGOTTEN_NS: Final = 2 * 10**9  # longer than counts and reports can be out of step
HTTP_WORDS: Final = (words.HTTP_REQUEST, words.HTTP_PART, words.HTTP_HEAD, words.HTTP_BODY, words.HTTP_HELD, words.HTTP_END)
MAX_CONTEXTS: Final = 50_000

Line = Callable[[int, str, str], None]
"""Takes one log line of the engine: time, level and text.

The time is on the wall clock. It never raises.
"""


@dataclass(slots=True)
class MergeStats:
    """Counts since start."""

    events: int = 0
    repeated: int = 0  # datagrams that were taken before
    unread_events: int = 0
    hook_failures: int = 0
    lines: int = 0


@dataclass(frozen=True, slots=True)
class PluginEvent:
    """One event and the process that sent it.

    ``v``: its fields. ``at``: on the monotonic clock.
    """

    boot: str
    pid: int
    at: int
    offset_ns: int  # wall clock minus monotonic, of that process
    v: Mapping[str, Any]

    @property
    def unix_ns(self) -> int:
        return self.at + self.offset_ns

    @property
    def request(self) -> str:
        found: str = self.v["request"]
        return found

    @property
    def rank(self) -> int:
        found: int = self.v["rank"]
        return found


class Merge:
    """Turns the events of one engine's processes into records.

    ``take`` and ``tick`` return what became known.
    """

    def __init__(
        self,
        process: Process,
        *,
        exists: Exists,
        line: Line,
        limits: MergeLimits | None = None,
        live: LiveRequests | None = None,
        count_exchanges: bool = True,
    ) -> None:
        """Begin without processes.

        ``count_exchanges`` False: another source gives ``live`` the requests that the middleware sees too.
        """
        limits = limits or MergeLimits()
        self.stats = MergeStats()
        self.engine = ObservedEngine(process)
        self.requests = OpenRequests(self.engine, limits)
        self.fetches = Fetches(self.engine, limits)
        self.publishes = Publishes(self.engine, limits)
        self.steps = Steps(self.engine, limits)
        self.exchanges = MiddlewareExchanges(process, live if count_exchanges else None)
        self.processes = Processes(self.engine, limits, exists, self._gone)
        self._line = line
        self._live = live
        self._contexts: Bounded[TraceContext] = Bounded(MAX_CONTEXTS)  # of requests that carry one, until they are over
        self._out: list[Observation] = []
        self._facts_reported_ns: int | None = None
        self._hearers = self._make_hearers()

    def take(self, packet: Packet, host_pid: int | None = None) -> list[Observation]:
        """Take one packet; return what became known.

        ``host_pid``: the sender as the kernel names it here, None when unknown.
        """
        if self.processes.knows(packet):
            self.stats.repeated += 1
            return []
        self._out += self.processes.take(packet, host_pid)
        self.stats.events += len(packet.events)
        self.stats.unread_events += packet.unread
        offset_ns = packet.unix_ns - packet.monotonic_ns
        for plugin_datagram_event in packet.events:
            hear = self._hearers.get(plugin_datagram_event.name)
            if hear is not None:
                hear(PluginEvent(packet.boot, packet.pid, plugin_datagram_event.at_ns, offset_ns, plugin_datagram_event.fields))
        return self._taken()

    def tick(self, now_ns: int, listening_ns: int = 0) -> list[Observation]:
        """Return what has settled, what is open, and what became of the processes.

        Call it about twice a second.
        ``listening_ns``: since when this process has listened without a pause of its own.
        """
        self._out += self.processes.look(now_ns, listening_ns)
        self._out += self.fetches.settled(now_ns)
        self._out += self.publishes.settled(now_ns)
        self._out += self.requests.provisional(now_ns)
        self._out += self.fetches.provisional(now_ns)
        self._out += self.publishes.provisional(now_ns)
        self._out += self.steps.due(now_ns)
        if self._facts_reported_ns is not None and now_ns - self._facts_reported_ns >= FACTS_EVERY_NS:
            self._say_facts(now_ns)
        return self._taken()

    def close(self, now_ns: int) -> list[Observation]:
        """Return all that waits to settle, and the state of what is open.

        This sidecar ends; the engine may go on.
        """
        self._out += self.processes.close(now_ns)
        self._out += self.fetches.settled(now_ns, at_once=True)
        self._out += self.publishes.settled(now_ns, at_once=True)
        self._out += self.steps.close()
        self._out += self.requests.provisional(now_ns, at_once=True)
        self._out += self.fetches.provisional(now_ns, at_once=True)
        self._out += self.publishes.provisional(now_ns, at_once=True)
        return self._taken()

    def _taken(self) -> list[Observation]:
        out, self._out = self._out, []
        return out

    def _make_hearers(self) -> dict[str, Callable[[PluginEvent], None]]:
        """Map each event to its handler.

        The reader of the datagram has checked the types of the fields.
        """
        requests, fetches, publishes = self.requests, self.fetches, self.publishes
        return {
            words.STEP: self._step,
            words.PAUSED: self._paused,
            words.QUEUED: self._queued,
            words.SCHEDULED: lambda s: requests.scheduled(s.request, s.at, s.v["cached_tokens"], s.v["external_tokens"]),
            words.FIRST_TOKEN: self._first_token,
            words.PREEMPTED: lambda s: requests.preempted(s.request, s.at),
            words.FINISHED: self._finished,
            words.ALIVE: self._alive,
            words.FACTS: self._learn,
            words.LOG: self._log,
            words.DEGRADED: self._degraded,
            words.STOPPING: lambda s: self.processes.report_stopping(s.boot, s.at, s.v["clean"]),
            **{name: self._http(name) for name in HTTP_WORDS},
            words.KV_KNOWN: lambda s: fetches.known(s.boot, s.at, s.unix_ns, s.v, self._contexts.get(s.request)),
            words.KV_WANTED: lambda s: fetches.wanted(s.at, s.v),
            words.KV_LOAD: lambda s: fetches.load(s.request, s.rank, s.at),
            words.KV_HANDSHAKE: self._handshake,
            words.KV_POSTED: self._posted,
            words.KV_DONE: self._done,
            words.KV_LOADED: lambda s: fetches.loaded(s.request, s.rank, s.at, s.v["failed"], s.v["bound_ns"]),
            words.KV_FAILURE: self._failure,
            words.KV_NOTICED: lambda s: fetches.noticed(s.request, s.at, s.v["failed"]),
            words.KV_PUBLISHED: lambda s: publishes.published(s.boot, s.at, s.unix_ns, s.v, self._contexts.pop(s.request, None)),
            words.KV_LEASE: lambda s: publishes.lease(s.request, s.at, s.v["left_ns"]),
            words.KV_READ: self._read,
            words.KV_EXPIRED: lambda s: publishes.expired(s.request, s.at),
            words.KV_FREED: lambda s: publishes.freed(s.request, s.at),
        }

    def _alive(self, s: PluginEvent) -> None:
        unfinished = s.v["unfinished"]
        self.processes.report_life(s.boot, s.v["last_step_ns"], unfinished)
        if unfinished == 0:
            self._out += self.fetches.close_forgotten(s.boot, s.at - FORGOTTEN_NS, s.at)
            self._out += self.requests.close_forgotten(s.boot, s.at - FORGOTTEN_NS, s.at)

    def _http(self, name: str) -> Callable[[PluginEvent], None]:
        def hear(s: PluginEvent) -> None:
            exchange = self.exchanges.hear(s.boot, name, s.at, s.offset_ns, s.v)
            if exchange is not None:
                self._out.append(exchange)

        return hear

    def _step(self, s: PluginEvent) -> None:
        self.processes.stepped(s.boot, s.at)
        self._out += self.steps.step(s.boot, s.pid, s.offset_ns, s.at, s.v)

    def _paused(self, s: PluginEvent) -> None:
        begin_ns = min(s.v["begin_ns"], s.at)
        self._out += self.processes.paused(s.boot, begin_ns, s.at - begin_ns, s.v["reason"], s.v["bound_ns"])

    def _queued(self, s: PluginEvent) -> None:
        v = s.v
        context = read_context(v["traceparent"])
        if context is not None:
            self._contexts.put(s.request, context)
        self.requests.queued(s.boot, s.request, s.at, s.unix_ns, v["arrival_unix_ns"], v["prompt_tokens"], context)

    def _first_token(self, s: PluginEvent) -> None:
        request = self.requests.first_token(s.request, s.at)
        if request is not None and self._live is not None:
            waited_ns = max(0, s.at - request.queued_ns)
            self._live.engine_first_token(self.engine.known.get("model"), waited_ns, request.ids.trace_id)
        self.fetches.first_token(s.request, s.at)

    def _finished(self, s: PluginEvent) -> None:
        status = s.v["status"]
        self.fetches.request_finished(s.request, s.at, status)
        record = self.requests.finished(s.request, s.at, status, s.v["output_tokens"])
        if record is not None:
            self._out.append(record)

    def _handshake(self, s: PluginEvent) -> None:
        self.fetches.handshakes.note(s.v["peer_engine_id"], s.rank, s.v["begin_ns"], None if s.v["ok"] is None else s.at)

    def _posted(self, s: PluginEvent) -> None:
        if s.v["writes"]:
            self.publishes.posted(s.request, s.at)
        else:
            self.fetches.posted(s.request, s.rank, s.at)

    def _done(self, s: PluginEvent) -> None:
        v = s.v
        if v["writes"]:
            self.publishes.done(s.request, s.at, v["bytes"], v["descriptors"], v["bound_ns"])
        else:
            self.fetches.done(s.request, s.rank, s.at, v["bytes"], v["descriptors"], v["bound_ns"])

    def _failure(self, s: PluginEvent) -> None:
        v = s.v
        if v["request"] is not None and not self.fetches.failure(s.request, s.at, v["type"], v["error"]):
            self.publishes.failure(s.request, v["type"], v["error"])

    def _read(self, s: PluginEvent) -> None:
        v = s.v
        if not v["late"]:
            self.publishes.read(s.request, s.at, v["reader"], v["bound_ns"])
        elif (late := self.publishes.read_late(s.request, s.at, v["reader"])) is not None:
            self._out.append(late)

    def _log(self, s: PluginEvent) -> None:
        self.stats.lines += 1
        self._line(s.unix_ns, s.v["level"], s.v["line"])

    def _learn(self, s: PluginEvent) -> None:
        facts: Mapping[str, Any] = s.v["facts"]
        engine_id = facts.get("engine_id")
        if isinstance(engine_id, str) and self.engine.engine_id not in (None, engine_id):
            self.engine.forget()
        if self.engine.learn(facts):
            self._say_facts(s.at)

    def _say_facts(self, at_ns: int) -> None:
        core = next((p for p in self.processes.alive.values() if p.kind == words.CORE), None)
        self._out.append(self.engine.facts(at_ns + self._offset_ns(), core.pid if core is not None else None))
        self._facts_reported_ns = at_ns

    def _offset_ns(self) -> int:
        return next((process.offset_ns for process in self.processes.alive.values()), 0)

    def _degraded(self, s: PluginEvent) -> None:
        self.stats.hook_failures += 1
        what = f"hook {s.v['hook']}: {s.v['error']}" + (", taken off" if s.v["off"] else "")
        self._out += self.processes.event(s.boot, ProcessEventKind.PLUGIN_DEGRADED, s.at, what)

    def _gone(self, process: GuestProcess, at_ns: int) -> None:
        """End what a process that has ended held open."""
        word = ENGINE_STOPPED if process.stopping_ns is not None and process.stops_clean else ENGINE_LOST
        self._out += self.requests.close_boot(process.boot, at_ns, word)
        self._out += self.fetches.close_boot(process.boot, at_ns, word)
        self._out += self.publishes.close_boot(process.boot, at_ns, word)
        self._out += self.steps.close_boot(process.boot)
        self._out += self.exchanges.close_boot(process.boot, at_ns)
