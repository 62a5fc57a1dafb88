"""A whole fleet in virtual time: a discrete-event driver over ``EngineCore``, links, a router and an edge.

Nothing is random but what belongs to a request or an instant (``noise``), so a run with a fault and one without differ by what
the fault did alone. Clocks here are true; what the hosts' own clocks would have said is ``observe``'s business.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from handrail_fleet.core import Effect, Ended, EngineCore, Job, LoadStarts, Preempted, Reason, Scheduling, TokenMade
from handrail_fleet.costs import Costs
from handrail_fleet.faults import Active, Fault
from handrail_fleet.links import Link
from handrail_fleet.noise import uniform
from handrail_fleet.prefix import PrefixCache
from handrail_fleet.scenario import Scenario
from handrail_fleet.truth import Fetch, Outcome, Phase, RequestTruth
from handrail_fleet.workload import Plan

RUN_OUT_NS = 600_000_000_000  # after the last arrival; what is open then is hung
COLD_EVERY_NS = 5_000_000_000  # how often the peers of a cold link lose each other
FAILS_AFTER_NS = 50_000_000  # from the post of a transfer to its failure
UNREAD_NS = 30_000_000_000  # vLLM's lease: how long P holds what nobody reads
_FOREIGN = "foreign-"
_ADMISSION_P, _ADMISSION_D, _FETCH = 3, 4, 5  # what a draw is for


@dataclass(slots=True)
class Flight:
    """One request under way; true times in ns of the run, None for what has not happened."""

    plan: Plan
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
    expired_ns: int | None = None  # P gave up what nobody had read
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
    fetch: Fetch = Fetch.NONE
    failed: bool = False

    @property
    def id(self) -> str:
        return f"sim-{self.plan.index:06d}"


class _Host:
    """An engine and when it is to be woken."""

    def __init__(self, name: str, scenario: Scenario, seed: int, clock: Callable[[], int]) -> None:
        self.name = name
        self.costs = Costs(scenario, seed, clock)
        self.cache = PrefixCache(scenario.prefix_cache_blocks)
        self.core = EngineCore(
            self.costs,
            max_running=scenario.max_running,
            blocks=scenario.kv_blocks,
            lease_ns=1 << 62,  # the driver ends leases: D's heartbeats renew them as long as it means to read
            scheduling=Scheduling(
                batch_tokens=scenario.batch_tokens, chunked_prefill=scenario.chunked_prefill, reserve_answer=False
            ),
        )
        self.wake_ns: int | None = None


class _Wire:
    """A link, its contact, and when it is to be looked at."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.wake_ns: int | None = None
        self.contact: tuple[int, int] | None = None  # which contact it is, and when it is made


class Simulation:
    """One run. ``run`` returns the flights in order of arrival; an instance runs once."""

    def __init__(self, scenario: Scenario, plans: Sequence[Plan], seed: int, faults: Sequence[Fault] = ()) -> None:
        self._scenario = scenario
        self._seed = seed
        self._faults = Active(faults)
        self._names = scenario.hosts()
        self._now_ns = 0
        self._events: list[tuple[int, int, Callable[[], None]]] = []
        self._sequence = 0
        names = tuple(dict.fromkeys((*self._names.prefill, *self._names.decode)))
        self._hosts = {name: _Host(name, scenario, seed * 1009 + place, lambda: self._now_ns) for place, name in enumerate(names)}
        self._wires: dict[str, _Wire] = {}
        if not self._names.collocated:
            self._wires = {
                f"{prefill}>{decode}": _Wire(Link(scenario.link_bytes_per_s, in_turn=scenario.link_order == "in-turn"))
                for prefill in self._names.prefill
                for decode in self._names.decode
            }
        self._flights = {flight.id: flight for flight in (Flight(plan) for plan in plans)}
        self._open = len(self._flights)
        self._ends_ns = max((plan.arrival.at_ns for plan in plans), default=0) + RUN_OUT_NS

    def run(self, progress: Callable[[int], None] | None = None) -> list[Flight]:
        """``progress`` is told now and then how many have ended.

        Raises ``ValueError`` for a request that no engine could ever hold.
        """
        for time_ns in (0, *self._faults.edges()):
            self._at(time_ns, self._apply_faults)
        for fault in self._faults.named("prefill_queue"):
            for name in self._names.prefill:
                if fault.size > 0 and fault.place in ("*", name):
                    self._at(fault.from_ns, partial(self._foreign, self._hosts[name], fault, 0))
        for fault in self._faults.named("preemption_storm"):
            for name in self._names.decode:
                if fault.place in ("*", name):
                    self._at(fault.from_ns, partial(self._storm, self._hosts[name], fault))
        for flight in self._flights.values():
            self._at(flight.plan.arrival.at_ns, partial(self._arrive, flight))
        while self._events and self._open:
            self._now_ns, _, act = heapq.heappop(self._events)
            if self._now_ns > self._ends_ns:
                break
            act()
            if progress is not None and self._sequence % 4096 == 0:
                progress(len(self._flights) - self._open)
        return list(self._flights.values())

    def _at(self, time_ns: int, act: Callable[[], None]) -> None:
        self._sequence += 1
        heapq.heappush(self._events, (time_ns, self._sequence, act))

    # --- a request's way ------------------------------------------------------------------------------------------------

    def _arrive(self, flight: Flight) -> None:
        slower = sum(fault.size for fault in self._faults.named("router_slow") if fault.at("router", self._now_ns))
        flight.router_ns = self._scenario.router_ns + round(slower * 1e9)
        engine_ns = self._now_ns + 2 * self._scenario.hop_ns + flight.router_ns
        self._at(engine_ns, partial(self._at_prefill, flight))

    def _at_prefill(self, flight: Flight) -> None:
        flight.prefill_arrival_ns = self._now_ns
        self._at(self._now_ns + self._admission_ns(flight, _ADMISSION_P), partial(self._queue_prefill, flight))

    def _queue_prefill(self, flight: Flight) -> None:
        host, arrival = self._hosts[flight.plan.prefill_host], flight.plan.arrival
        flight.prefill_queued_ns = self._now_ns
        flight.cached_tokens = host.cache.match(arrival.blocks, arrival.prompt_tokens)
        split = not self._names.collocated
        answer = 1 if split else arrival.answer_tokens
        host.core.submit(
            Job(flight.id, arrival.prompt_tokens, answer, Reason.LENGTH, publish=split, cached_tokens=flight.cached_tokens),
            self._now_ns,
        )
        self._kick(host)

    def _at_decode(self, flight: Flight) -> None:
        flight.decode_arrival_ns = self._now_ns
        self._at(self._now_ns + self._admission_ns(flight, _ADMISSION_D), partial(self._queue_decode, flight))

    def _queue_decode(self, flight: Flight) -> None:
        host, arrival = self._hosts[flight.plan.decode_host], flight.plan.arrival
        flight.decode_queued_ns = self._now_ns
        host.core.submit(Job(flight.id, arrival.prompt_tokens, arrival.answer_tokens, Reason.LENGTH, load=True), self._now_ns)
        self._kick(host)

    def _admission_ns(self, flight: Flight, leg: int) -> int:
        return round(self._scenario.admission_ns * (0.7 + 0.6 * uniform(self._seed, flight.plan.index, leg)))

    # --- engines --------------------------------------------------------------------------------------------------------

    def _kick(self, host: _Host) -> None:
        self._carry_out(host, host.core.advance(self._now_ns))
        ends_ns = host.core.step_ends_ns
        if ends_ns is not None and ends_ns != host.wake_ns:
            host.wake_ns = ends_ns
            self._at(ends_ns, partial(self._kick, host))

    def _carry_out(self, host: _Host, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, TokenMade):
                self._token(host, effect)
            elif isinstance(effect, Ended):
                self._ended(host, effect)
            elif isinstance(effect, LoadStarts):
                self._load_starts(host, self._flights[effect.id])
            elif isinstance(effect, Preempted) and effect.id in self._flights:
                self._flights[effect.id].preemptions += 1

    def _token(self, host: _Host, token: TokenMade) -> None:
        flight = self._flights.get(token.id)
        if flight is None or host.name != flight.plan.decode_host:
            return
        flight.last_token_ns = token.at_ns
        if token.gap_ns is not None:
            flight.gaps_ns.append(token.gap_ns)
            return
        flight.first_token_ns = token.at_ns
        flight.sent_ns = token.at_ns + self._scenario.respond_ns
        flight.edge_first_ns = flight.sent_ns + 2 * self._scenario.hop_ns

    def _ended(self, host: _Host, ended: Ended) -> None:
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
                self._at(flight.prefill_done_ns + 2 * self._scenario.hop_ns, partial(self._at_decode, flight))
                return
        flight.decode_scheduled_ns = times.scheduled_ns
        flight.failed = ended.reason is Reason.ERROR
        if not flight.failed:
            self._answered(host, flight)
        flight.engine_end_ns = self._now_ns + self._scenario.respond_ns
        if flight.failed:
            flight.sent_ns = flight.engine_end_ns
        flight.end_ns = flight.engine_end_ns + 2 * self._scenario.hop_ns
        self._open -= 1

    def _answered(self, host: _Host, flight: Flight) -> None:
        """The engine knows the answer's KV now, and P too where it is sent back: alone, the other way of the link is free."""
        arrival, scenario = flight.plan.arrival, self._scenario
        blocks = arrival.blocks + arrival.answer_blocks
        host.cache.keep(blocks)
        if scenario.kv_return and not self._names.collocated:
            takes_ns = round(arrival.answer_tokens * scenario.kv_bytes_per_token / scenario.link_bytes_per_s * 1e9)
            self._at(self._now_ns + takes_ns, partial(self._hosts[flight.plan.prefill_host].cache.keep, blocks))

    def _hold(self, host: _Host, flight: Flight) -> None:
        """P's KV is there until it is read; where no heartbeats come, until the lease ends."""
        fault = self._faults.find("lease_expired", host.name, self._now_ns)
        if fault is not None:
            self._at(self._now_ns + round(fault.size * 1e9), partial(self._free, host, flight))

    def _free(self, host: _Host, flight: Flight) -> None:
        if flight.contact_ns is None and host.core.release(flight.id):
            flight.expired_ns = self._now_ns
            self._kick(host)

    # --- the hand-off ---------------------------------------------------------------------------------------------------

    def _load_starts(self, host: _Host, flight: Flight) -> None:
        flight.load_started_ns = self._now_ns
        contact_ns = self._contact(f"{flight.plan.prefill_host}>{host.name}")
        if contact_ns > self._now_ns:
            self._at(contact_ns, partial(self._post, host, flight))
        else:
            self._post(host, flight)

    def _contact(self, name: str) -> int:
        """When the peers know each other; a first contact begins now if they do not."""
        wire = self._wires[name]
        fault = self._faults.find("handshake_cold", name, self._now_ns)
        which = 1 + (self._now_ns - fault.from_ns) // COLD_EVERY_NS if fault else 0
        if wire.contact is None or (fault and wire.contact[0] != which):
            takes_ns = round(fault.size * 1e9) if fault else self._scenario.handshake_ns
            wire.contact = (which, self._now_ns + takes_ns)
        return wire.contact[1]

    def _post(self, host: _Host, flight: Flight) -> None:
        plan, scenario = flight.plan, self._scenario
        name = f"{plan.prefill_host}>{host.name}"
        flight.contact_ns = self._now_ns
        if self._hosts[plan.prefill_host].core.published(flight.id) is None:
            self._fails(host, flight, Fetch.EXPIRED, recompute=True)
            return
        drawn = uniform(self._seed, plan.index, _FETCH)
        for fault_name, fetch in (("fetch_failed", Fetch.FAILED), ("fetch_recomputed", Fetch.RECOMPUTED)):
            fault = self._faults.find(fault_name, name, self._now_ns)
            if fault is not None and drawn < fault.size:
                self._fails(host, flight, fetch, recompute=fetch is Fetch.RECOMPUTED)
                return
        here = host.cache.match(plan.arrival.blocks, plan.arrival.prompt_tokens)
        flight.kv_bytes = (plan.arrival.prompt_tokens - here) * scenario.kv_bytes_per_token
        wire = self._wires[name]
        host.costs.post(plan.arrival.prompt_tokens - here)
        wire.link.start(flight.id, flight.kv_bytes, self._now_ns)
        self._watch(name, wire)

    def _fails(self, host: _Host, flight: Flight, fetch: Fetch, *, recompute: bool) -> None:
        flight.fetch = fetch
        prefill = self._hosts[flight.plan.prefill_host]

        def report() -> None:
            self._loaded(host, flight, ok=False, recompute=recompute)

        def give_up() -> None:
            if prefill.core.release(flight.id):
                flight.expired_ns = self._now_ns
                self._kick(prefill)

        self._at(self._now_ns + FAILS_AFTER_NS, report)
        self._at(self._now_ns + UNREAD_NS, give_up)

    def _watch(self, name: str, wire: _Wire) -> None:
        next_ns = wire.link.next_ns()
        if next_ns is not None and next_ns != wire.wake_ns:
            wire.wake_ns = next_ns
            self._at(next_ns, partial(self._arrived, name, wire))

    def _arrived(self, name: str, wire: _Wire) -> None:
        if wire.wake_ns != self._now_ns:
            return  # another transfer has begun since, so this is not the time any more
        prefill_name, decode_name = name.split(">")
        wire.wake_ns = None
        for request_id in wire.link.finished(self._now_ns):
            flight = self._flights[request_id]
            flight.fetch = Fetch.OK
            prefill = self._hosts[prefill_name]
            if prefill.core.release(request_id):
                self._kick(prefill)
            self._loaded(self._hosts[decode_name], flight, ok=True)
        self._watch(name, wire)

    def _loaded(self, host: _Host, flight: Flight, *, ok: bool, recompute: bool = False) -> None:
        flight.loaded_ns = self._now_ns
        flight.seen_ns = host.core.step_ends_ns
        if flight.seen_ns is None or flight.seen_ns < self._now_ns:
            flight.seen_ns = self._now_ns
        if ok:
            host.cache.keep(flight.plan.arrival.blocks)
        self._carry_out(host, host.core.load_done(flight.id, ok, recompute=recompute))
        self._kick(host)

    # --- faults ---------------------------------------------------------------------------------------------------------

    def _apply_faults(self) -> None:
        """Set what holds from now on; called where a fault begins or ends."""
        scenario, faults, now_ns = self._scenario, self._faults, self._now_ns
        for name, host in self._hosts.items():
            host.costs.prefill_factor = faults.factor("slow_prefill", name, now_ns)
            host.costs.step_factor = faults.factor("bad_host", name, now_ns)
            pressure = faults.find("kv_pressure", name, now_ns)
            host.core.withhold(round(pressure.size * scenario.kv_blocks) if pressure else 0)
            cap = faults.find("decode_queue", name, now_ns)
            host.core.limit(min(scenario.max_running, round(cap.size)) if cap else scenario.max_running)
            self._kick(host)
        for name, wire in self._wires.items():
            ends = name.split(">")
            rate = scenario.link_bytes_per_s / faults.factor("slow_link", name, now_ns)
            for end in ends:
                rate /= faults.factor("bad_host", end, now_ns)
            staged = faults.find("no_p2p", name, now_ns)
            wire.link.set_rate(min(rate, staged.size) if staged else rate, now_ns)
            self._watch(name, wire)

    def _foreign(self, host: _Host, fault: Fault, number: int) -> None:
        """Somebody else's prompt, of the longest kind asked here, every so often."""
        if not fault.at(host.name, self._now_ns):
            return
        tokens = self._scenario.prompt_tokens_max
        host.core.submit(Job(f"{_FOREIGN}{fault.from_ns}-{number}", tokens, 1, Reason.LENGTH), self._now_ns)
        self._kick(host)
        every_ns = round(host.costs.prefill_ns(tokens) / fault.size)
        self._at(self._now_ns + every_ns, partial(self._foreign, host, fault, number + 1))

    def _storm(self, host: _Host, fault: Fault) -> None:
        if not fault.at(host.name, self._now_ns):
            return
        self._carry_out(host, host.core.preempt_last())
        self._kick(host)
        self._at(self._now_ns + round(1e9 / fault.size), partial(self._storm, host, fault))


def record(scenario: Scenario, flight: Flight) -> RequestTruth:
    """The truth of a flight whose run is over."""
    arrival = flight.plan.arrival
    outcome = Outcome.HUNG if flight.end_ns is None else Outcome.FAILED if flight.failed else Outcome.OK
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
        phases=_phases(scenario, flight),
        gaps_ns=tuple(flight.gaps_ns),
        preemptions=flight.preemptions,
    )


def _phases(scenario: Scenario, flight: Flight) -> dict[Phase, int]:
    """Each from one mark to the next that was reached. A failed load counts to the end of its fetch."""
    marks = [
        (flight.prefill_arrival_ns, None),
        (flight.prefill_queued_ns, Phase.PREFILL_ADMISSION),
        (flight.prefill_scheduled_ns, Phase.PREFILL_QUEUE),
        (flight.prefill_first_ns, Phase.PREFILL_COMPUTE),
        (flight.prefill_done_ns, Phase.PREFILL_RESPOND),
        (flight.decode_arrival_ns, None),
        (flight.decode_queued_ns, Phase.DECODE_ADMISSION),
        (flight.load_started_ns, Phase.KV_WAIT),
        (flight.contact_ns, Phase.KV_HANDSHAKE),
        (flight.loaded_ns, Phase.KV_TRANSFER),
    ]
    collocated = flight.plan.prefill_host == flight.plan.decode_host
    if not collocated and not flight.failed:
        marks += [
            (flight.seen_ns, Phase.KV_NOTICE),
            (flight.decode_scheduled_ns, Phase.DECODE_QUEUE),
            (flight.first_token_ns, Phase.FIRST_STEP),
        ]
    marks.append((flight.sent_ns, Phase.DECODE_RESPOND))
    phases: dict[Phase, int] = {}
    before: int | None = None
    for time_ns, phase in marks:
        if time_ns is None:
            continue
        if phase is not None and before is not None:
            phases[phase] = time_ns - before
        before = time_ns
    if flight.sent_ns is not None:
        phases[Phase.ROUTER] = flight.router_ns
        phases[Phase.HOPS] = (4 if collocated else 6) * scenario.hop_ns
    return phases
