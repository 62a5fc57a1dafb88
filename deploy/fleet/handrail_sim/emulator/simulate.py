"""Simulate a whole fleet in virtual time with a discrete-event driver.

It drives ``EngineCore`` objects, links, a router and an edge.
Only draws that belong to a request or an instant are random (``noise``), so a run with a fault and one without differ only by the
fault's effects. Clocks here are true; ``observe`` makes the times that the hosts' own clocks would show.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from handrail_sim.emulator.core import (
    Effect,
    Ended,
    EngineJob,
    FinishReason,
    LoadStarts,
    Preempted,
    Resumed,
    StepEnded,
    TokenMade,
)
from handrail_sim.emulator.costs import Costs
from handrail_sim.emulator.delivery import CLIENT, FIRST, LAST, SLOW_CLIENTS, Hop, hop_ns
from handrail_sim.emulator.faults import Active, Fault
from handrail_sim.emulator.host import ADMISSION_D, ADMISSION_P, FETCH, REFUSED, EmulatedHost, Hindrance
from handrail_sim.emulator.noise import uniform
from handrail_sim.emulator.scenario import Scenario
from handrail_sim.emulator.truth import FetchTruth, RequestTruth, TrueOutcome, TruePhase
from handrail_sim.emulator.wire import FAILS_AFTER_NS, Wire
from handrail_sim.emulator.workload import WorkloadRequest

RUN_OUT_NS = 600_000_000_000  # after the last arrival; a request that is open then has hung
PATIENCE_NS = 60_000_000_000  # from the end of everything else until the clients of hung requests give up
UNREAD_NS = 30_000_000_000  # vLLM's lease: how long P holds blocks that nobody reads


@dataclass(frozen=True, slots=True)
class Attempt:
    """A prefill that ended in an error.

    It has the host, the arrival there, and when the answer left.
    """

    host: str
    arrival_ns: int
    end_ns: int


@dataclass(slots=True)
class Flight:
    """One request under way, in true ns of the run; None: has not happened.

    A retry changes the hosts of ``plan`` to its own. ``abandoned``: the attempts before.
    """

    plan: WorkloadRequest
    seed: int = 0  # the run's seed: the durations of its messages are drawn with it
    cached_tokens: int = 0
    kv_bytes: int = 0
    router_ns: int = 0
    prefill_arrival_ns: int | None = None
    prefill_queued_ns: int | None = None
    prefill_scheduled_ns: int | None = None
    prefill_first_ns: int | None = None
    prefill_done_ns: int | None = None
    decode_arrival_ns: int | None = None
    decode_queued_ns: int | None = None
    load_started_ns: int | None = None
    contact_ns: int | None = None
    loaded_ns: int | None = None
    received_ns: int | None = None  # P, polling once a step, has D's notice that it has read
    expired_ns: int | None = None  # P freed blocks that nobody had read
    seen_ns: int | None = None
    decode_scheduled_ns: int | None = None
    first_token_ns: int | None = None
    last_token_ns: int | None = None
    sent_ns: int | None = None  # the first chunk, or the error, leaves the engine
    edge_first_ns: int | None = None
    engine_end_ns: int | None = None
    end_ns: int | None = None  # at the edge
    gaps_ns: list[int] = field(default_factory=list)
    preemptions: int = 0
    preempted: list[tuple[int, int | None]] = field(default_factory=list)  # from, to; None: it has not run again
    client_stands_ns: int = 0  # how long its client reads nothing, from a quarter of the answer on
    fetch: FetchTruth = FetchTruth.NONE
    failed: bool = False
    abandoned: list[Attempt] = field(default_factory=list)

    @property
    def id(self) -> str:
        return f"sim-{self.plan.index:06d}"


@dataclass(frozen=True, slots=True)
class Ran:
    """A finished run.

    It has its flights in order of arrival, each host's steps by their end, and each host's hindrances by fault.
    """

    flights: list[Flight]
    steps: dict[str, list[tuple[int, StepEnded]]]
    hindered: dict[str, dict[str, list[Hindrance]]]


class Simulation:
    """One run of the simulation; an instance runs once.

    ``run`` returns the flights in order of arrival.
    """

    def __init__(self, scenario: Scenario, plans: Sequence[WorkloadRequest], seed: int, faults: Sequence[Fault] = ()) -> None:
        self._scenario = scenario
        self._seed = seed
        self._faults = Active(faults)
        self._names = scenario.hosts()
        self._now_ns = 0
        self._events: list[tuple[int, int, Callable[[], None]]] = []
        self._sequence = 0
        names = tuple(dict.fromkeys((*self._names.prefill, *self._names.decode)))
        self._hosts = {
            name: EmulatedHost(name, scenario, Costs(scenario, seed * 1009 + place, self.now_ns), self._faults, self)
            for place, name in enumerate(names)
        }
        self._steps: dict[str, list[tuple[int, StepEnded]]] = {name: [] for name in names}
        self._wires: dict[str, Wire] = {}
        if not self._names.collocated:
            pairs = [(prefill, decode) for prefill in self._names.prefill for decode in self._names.decode]
            self._wires = {wire.name: wire for wire in (Wire(*pair, scenario, self._faults) for pair in pairs)}
        self._flights = {flight.id: flight for flight in (Flight(plan, seed) for plan in plans)}
        self._open = len(self._flights)
        self._ends_ns = max((plan.arrival.at_ns for plan in plans), default=0) + RUN_OUT_NS

    def ran(self, progress: Callable[[int], None] | None = None) -> Ran:
        """Run as ``run`` does, and also return what the hosts did."""
        flights = self.run(progress)
        return Ran(flights, self._steps, {name: host.hindrances for name, host in self._hosts.items()})

    def run(self, progress: Callable[[int], None] | None = None) -> list[Flight]:
        """Run, and report now and then to ``progress`` how many requests have ended.

        Raises ``ValueError`` for a request that no engine could ever hold.
        """
        for time_ns in (0, *self._faults.edges()):
            self.at(time_ns, self._apply_faults)
        for host in self._hosts.values():
            host.begin_faults()
        for flight in self._flights.values():
            self.at(flight.plan.arrival.at_ns, partial(self._arrive, flight))
        while self._events and self._open:
            self._now_ns, _, act = heapq.heappop(self._events)
            if self._now_ns > self._ends_ns:
                break
            act()
            if progress is not None and self._sequence % 4096 == 0:
                progress(len(self._flights) - self._open)
        return list(self._flights.values())

    # --- the driver's side of the host -----------------------------------------------------------------------------------

    def now_ns(self) -> int:
        return self._now_ns

    def at(self, time_ns: int, act: Callable[[], None]) -> None:
        self._sequence += 1
        heapq.heappush(self._events, (time_ns, self._sequence, act))

    def kick(self, host: EmulatedHost) -> None:
        self.carry_out(host, host.core.advance(self._now_ns))
        ends_ns = host.core.step_ends_ns
        if ends_ns is not None and ends_ns != host.wake_ns:
            host.wake_ns = ends_ns
            self.at(ends_ns, partial(self.kick, host))

    def carry_out(self, host: EmulatedHost, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, TokenMade):
                self._token(host, effect)
            elif isinstance(effect, Ended):
                self._ended(host, effect)
            elif isinstance(effect, LoadStarts):
                self._load_starts(host, self._flights[effect.id])
            elif isinstance(effect, StepEnded):
                self._steps[host.name].append((self._now_ns, effect))
            elif isinstance(effect, Preempted) and effect.id in self._flights:
                flight = self._flights[effect.id]
                flight.preemptions += 1
                flight.preempted.append((self._now_ns, None))
            elif isinstance(effect, Resumed) and effect.id in self._flights:
                preempted = self._flights[effect.id].preempted
                preempted[-1] = (preempted[-1][0], self._now_ns)

    # --- the course of a request ----------------------------------------------------------------------------------------

    def _arrive(self, flight: Flight) -> None:
        slower = sum(fault.size for fault in self._faults.named("router_slow") if fault.at("router", self._now_ns))
        flight.router_ns = self._scenario.router_ns + round(slower * 1e9)
        engine_ns = self._now_ns + self._hops_ns(flight, Hop.EDGE_ROUTER, Hop.ROUTER_P) + flight.router_ns
        self.at(engine_ns, partial(self._at_prefill, flight))

    def _at_prefill(self, flight: Flight) -> None:
        admitted_ns = self._now_ns + self._admission_ns(flight, ADMISSION_P)
        place = len(flight.abandoned)
        if self._hosts[flight.plan.prefill_host].refuses(uniform(self._seed, flight.plan.index, REFUSED, place)):
            done_ns = admitted_ns + self._scenario.respond_ns
            self.at(done_ns, partial(self._refused, flight, Attempt(flight.plan.prefill_host, self._now_ns, done_ns)))
            return
        flight.prefill_arrival_ns = self._now_ns
        self.at(admitted_ns, partial(self._queue_prefill, flight))

    def _refused(self, flight: Flight, attempt: Attempt) -> None:
        """Handle an error of P: try the next host, then pass the error on.

        The scenario bounds the number of retries.
        """
        flight.abandoned.append(attempt)
        hosts = self._names.prefill
        if len(flight.abandoned) <= min(self._scenario.prefill_retries, len(hosts) - 1):
            following = hosts[(hosts.index(attempt.host) + 1) % len(hosts)]
            decode = following if self._names.collocated else flight.plan.decode_host
            flight.plan = replace(flight.plan, prefill_host=following, decode_host=decode)
            self.at(self._now_ns + 2 * self._scenario.hop_ns, partial(self._at_prefill, flight))
            return
        flight.failed = True
        flight.engine_end_ns = flight.sent_ns = self._now_ns
        flight.end_ns = self._now_ns + self._hops_ns(flight, *LAST)
        self._open -= 1

    def _queue_prefill(self, flight: Flight) -> None:
        host, arrival = self._hosts[flight.plan.prefill_host], flight.plan.arrival
        flight.prefill_queued_ns = self._now_ns
        flight.cached_tokens = host.cache.match(arrival.blocks, arrival.prompt_tokens)
        split = not self._names.collocated
        answer = 1 if split else arrival.answer_tokens
        host.core.submit(
            EngineJob(
                flight.id, arrival.prompt_tokens, answer, FinishReason.LENGTH, publish=split, cached_tokens=flight.cached_tokens
            ),
            self._now_ns,
        )
        self.kick(host)

    def _at_decode(self, flight: Flight) -> None:
        flight.decode_arrival_ns = self._now_ns
        self.at(self._now_ns + self._admission_ns(flight, ADMISSION_D), partial(self._queue_decode, flight))

    def _queue_decode(self, flight: Flight) -> None:
        host, arrival = self._hosts[flight.plan.decode_host], flight.plan.arrival
        flight.decode_queued_ns = self._now_ns
        host.core.submit(
            EngineJob(flight.id, arrival.prompt_tokens, arrival.answer_tokens, FinishReason.LENGTH, load=True), self._now_ns
        )
        self.kick(host)

    def _hops_ns(self, flight: Flight, *hops: Hop) -> int:
        return sum(hop_ns(self._scenario, flight.seed, flight.plan.index, hop) for hop in hops)

    def _admission_ns(self, flight: Flight, leg: int) -> int:
        host = self._hosts[flight.plan.prefill_host if leg == ADMISSION_P else flight.plan.decode_host]
        return host.admission_ns(uniform(self._seed, flight.plan.index, leg))

    # --- engines --------------------------------------------------------------------------------------------------------

    def _token(self, host: EmulatedHost, token: TokenMade) -> None:
        flight = self._flights.get(token.id)
        if flight is None or host.name != flight.plan.decode_host:
            return
        flight.last_token_ns = token.at_ns
        if token.gap_ns is not None:
            flight.gaps_ns.append(token.gap_ns)
            return
        flight.first_token_ns = token.at_ns
        flight.sent_ns = token.at_ns + self._scenario.respond_ns
        flight.edge_first_ns = flight.sent_ns + self._hops_ns(flight, *FIRST)
        fault = self._faults.find("client_slow", "edge", self._now_ns)
        if fault is not None and uniform(self._seed, flight.plan.index, CLIENT) < SLOW_CLIENTS:
            flight.client_stands_ns = round(fault.size * 1e9)

    def _ended(self, host: EmulatedHost, ended: Ended) -> None:
        flight = self._flights.get(ended.id)
        if flight is None:
            return
        times, plan = ended.times, flight.plan
        if host.name == plan.prefill_host:
            flight.prefill_scheduled_ns, flight.prefill_first_ns = times.scheduled_ns, times.first_token_ns
            host.cache.keep(plan.arrival.blocks)
            if not self._names.collocated:
                flight.prefill_done_ns = self._now_ns + self._scenario.respond_ns
                self._hold(host, flight)
                called_ns = flight.prefill_done_ns + self._hops_ns(flight, Hop.P_ROUTER, Hop.ROUTER_D)
                self.at(called_ns, partial(self._at_decode, flight))
                return
        flight.decode_scheduled_ns = times.scheduled_ns
        flight.failed = ended.reason is FinishReason.ERROR
        if not flight.failed:
            self._answered(host, flight)
        flight.engine_end_ns = self._now_ns + self._scenario.respond_ns
        if flight.failed:
            flight.sent_ns = flight.engine_end_ns
        flight.end_ns = max(flight.engine_end_ns + self._hops_ns(flight, *LAST), flight.edge_first_ns or 0)
        self._open -= 1

    def _answered(self, host: EmulatedHost, flight: Flight) -> None:
        """Record that the engine, and P where KV is sent back, now hold the answer's KV.

        No other transfer uses the link in that direction, so sending it back delays none.
        """
        arrival, scenario = flight.plan.arrival, self._scenario
        blocks = arrival.blocks + arrival.answer_blocks
        host.cache.keep(blocks)
        if scenario.kv_return and not self._names.collocated:
            takes_ns = round(arrival.answer_tokens * scenario.kv_bytes_per_token / scenario.link_bytes_per_s * 1e9)
            self.at(self._now_ns + takes_ns, partial(self._hosts[flight.plan.prefill_host].cache.keep, blocks))

    def _hold(self, host: EmulatedHost, flight: Flight) -> None:
        """Keep P's KV until it is read, since D's heartbeats renew the lease.

        A fault may end it before.
        """
        freed_ns = host.freed_after_ns()
        if freed_ns is not None:
            self.at(freed_ns, partial(self._free, host, flight))

    def _free(self, host: EmulatedHost, flight: Flight) -> None:
        if flight.contact_ns is None and host.core.release(flight.id):
            flight.expired_ns = self._now_ns
            self.kick(host)

    # --- the hand-off ---------------------------------------------------------------------------------------------------

    def _load_starts(self, host: EmulatedHost, flight: Flight) -> None:
        flight.load_started_ns = self._now_ns
        contact_ns = self._wire(flight).contact_ns(self._now_ns)
        if contact_ns > self._now_ns:
            self.at(contact_ns, partial(self._post, host, flight))
        else:
            self._post(host, flight)

    def _wire(self, flight: Flight) -> Wire:
        return self._wires[f"{flight.plan.prefill_host}>{flight.plan.decode_host}"]

    def _post(self, host: EmulatedHost, flight: Flight) -> None:
        plan, wire = flight.plan, self._wire(flight)
        flight.contact_ns = self._now_ns
        if self._hosts[plan.prefill_host].core.published(flight.id) is None:
            flight.fetch = wire.unheld(self._now_ns) or FetchTruth.EXPIRED
            if flight.fetch is FetchTruth.EXPIRED:
                self._fails(host, flight, recompute=True)
                return
        failure = wire.failure(uniform(self._seed, plan.index, FETCH), self._now_ns)
        if failure is not None:
            flight.fetch = failure
            self._fails(host, flight, recompute=failure is FetchTruth.RECOMPUTED)
            return
        here = host.cache.match(plan.arrival.blocks, plan.arrival.prompt_tokens)
        host.costs.post(plan.arrival.prompt_tokens - here)
        flight.kv_bytes = host.costs.kv_bytes(plan.arrival.prompt_tokens - here)
        wire.link.start(flight.id, flight.kv_bytes, self._now_ns)
        self._watch(wire)

    def _fails(self, host: EmulatedHost, flight: Flight, *, recompute: bool) -> None:
        prefill = self._hosts[flight.plan.prefill_host]

        def report() -> None:
            self._loaded(host, flight, ok=False, recompute=recompute)

        def give_up() -> None:
            if prefill.core.release(flight.id):
                flight.expired_ns = self._now_ns
                self.kick(prefill)

        self.at(self._now_ns + FAILS_AFTER_NS, report)
        self.at(self._now_ns + UNREAD_NS, give_up)

    def _watch(self, wire: Wire) -> None:
        next_ns = wire.link.next_ns()
        if next_ns is not None and next_ns != wire.wake_ns:
            wire.wake_ns = next_ns
            self.at(next_ns, partial(self._arrived, wire))

    def _arrived(self, wire: Wire) -> None:
        if wire.wake_ns != self._now_ns:
            return  # another transfer has begun since, so this time is no longer right
        wire.wake_ns = None
        for request_id in wire.link.finished(self._now_ns):
            flight = self._flights[request_id]
            if flight.fetch is not FetchTruth.STALE_READ:
                flight.fetch = FetchTruth.OK
            self.at(self._now_ns + self._hops_ns(flight, Hop.D_P), partial(self._notified, self._hosts[wire.prefill], flight))
            self._loaded(self._hosts[wire.decode], flight, ok=True)
        self._watch(wire)

    def _notified(self, prefill: EmulatedHost, flight: Flight) -> None:
        """Notify P that D has read.

        P looks for such messages once a step, or at once when it is idle.
        """
        self.at(max(self._now_ns, prefill.core.step_ends_ns or 0), partial(self._hears, prefill, flight))

    def _hears(self, prefill: EmulatedHost, flight: Flight) -> None:
        flight.received_ns = self._now_ns
        if prefill.core.release(flight.id):
            self.kick(prefill)

    def _loaded(self, host: EmulatedHost, flight: Flight, *, ok: bool, recompute: bool = False) -> None:
        flight.loaded_ns = self._now_ns
        flight.seen_ns = host.core.step_ends_ns
        if flight.seen_ns is None or flight.seen_ns < self._now_ns:
            flight.seen_ns = self._now_ns
        if ok:
            host.cache.keep(flight.plan.arrival.blocks)
        self.carry_out(host, host.core.load_done(flight.id, ok, recompute=recompute))
        self.kick(host)

    # --- faults ---------------------------------------------------------------------------------------------------------

    def _apply_faults(self) -> None:
        """Apply the faults that are active now; called where a fault begins or ends."""
        for host in self._hosts.values():
            host.apply_faults()
        for wire in self._wires.values():
            wire.apply_faults(self._now_ns)
            self._watch(wire)


def over_ns(flights: Sequence[Flight]) -> int:
    """Return when the run is over.

    Its last request has ended. Where some hang, everything else that happens has happened.
    """
    last = max((flight.end_ns for flight in flights if flight.end_ns is not None), default=0)
    last = max([last, *(flight.plan.arrival.at_ns for flight in flights)])
    return last + (PATIENCE_NS if any(flight.end_ns is None for flight in flights) else 0)


def record(scenario: Scenario, flight: Flight) -> RequestTruth:
    """Return the truth of a flight whose run is over."""
    handed_over = (Hop.P_ROUTER, Hop.ROUTER_D) if flight.decode_arrival_ns is not None else ()
    hops = (Hop.EDGE_ROUTER, Hop.ROUTER_P, *handed_over, *(LAST if flight.edge_first_ns is None else FIRST))
    return truth_of(flight, sum(hop_ns(scenario, flight.seed, flight.plan.index, hop) for hop in hops))


def truth_of(flight: Flight, hops_ns: int | None) -> RequestTruth:
    """Build a flight's truth.

    ``hops_ns`` None: hops are the time that no other phase explains, for runs in which the network's time is not known.
    """
    arrival = flight.plan.arrival
    outcome = TrueOutcome.HUNG if flight.end_ns is None else TrueOutcome.FAILED if flight.failed else TrueOutcome.OK
    ttft_ns = flight.edge_first_ns - arrival.at_ns if flight.edge_first_ns is not None else None
    total_ns = flight.end_ns - arrival.at_ns if flight.end_ns is not None else None
    return RequestTruth(
        index=flight.plan.index,
        request_id=flight.id,
        arrival_ns=arrival.at_ns,
        prompt_tokens=arrival.prompt_tokens,
        answer_tokens=arrival.answer_tokens,
        cached_tokens=flight.cached_tokens,
        kv_bytes=flight.kv_bytes,
        prefill_host=flight.plan.prefill_host,
        decode_host=flight.plan.decode_host,
        outcome=outcome,
        fetch=flight.fetch,
        ttft_ns=ttft_ns,
        total_ns=total_ns,
        phases=_phases(flight, ttft_ns if ttft_ns is not None else total_ns, hops_ns),
        gaps_ns=tuple(flight.gaps_ns),
        preemptions=flight.preemptions,
        abandoned=tuple(attempt.host for attempt in flight.abandoned),
    )


def _phases(flight: Flight, whole_ns: int | None, hops_ns: int | None) -> dict[TruePhase, int]:
    """Compute the phases, each from one reached mark to the next.

    A failed load counts to the end of its fetch.
    """
    marks = [
        (flight.prefill_arrival_ns, None),
        (flight.prefill_queued_ns, TruePhase.PREFILL_ADMISSION),
        (flight.prefill_scheduled_ns, TruePhase.PREFILL_QUEUE),
        (flight.prefill_first_ns, TruePhase.PREFILL_COMPUTE),
        (flight.prefill_done_ns, TruePhase.PREFILL_RESPOND),
        (flight.decode_arrival_ns, None),
        (flight.decode_queued_ns, TruePhase.DECODE_ADMISSION),
        (flight.load_started_ns, TruePhase.KV_WAIT),
        (flight.contact_ns, TruePhase.KV_HANDSHAKE),
        (flight.loaded_ns, TruePhase.KV_TRANSFER),
    ]
    collocated = flight.plan.prefill_host == flight.plan.decode_host
    if not collocated and not flight.failed:
        marks += [
            (flight.seen_ns, TruePhase.KV_NOTICE),
            (flight.decode_scheduled_ns, TruePhase.DECODE_QUEUE),
            (flight.first_token_ns, TruePhase.FIRST_STEP),
        ]
    marks.append((flight.sent_ns, TruePhase.DECODE_RESPOND))
    phases: dict[TruePhase, int] = {}
    before: int | None = None
    for time_ns, phase in marks:
        if time_ns is None:
            continue
        if phase is not None and before is not None:
            phases[phase] = time_ns - before
        before = time_ns
    if flight.abandoned:
        first, last = flight.abandoned[0], flight.abandoned[-1]
        phases[TruePhase.PREFILL_ABANDONED] = (flight.prefill_arrival_ns or last.end_ns) - first.arrival_ns
    if flight.sent_ns is not None and whole_ns is not None:
        phases[TruePhase.ROUTER] = flight.router_ns
        phases[TruePhase.HOPS] = whole_ns - sum(phases.values()) if hops_ns is None else hops_ns
    return phases
