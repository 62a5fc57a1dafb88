"""The records that proxies, vLLM's spans and a router would make of a request.

The proxies are at the edge, P and D. All times are by their own hosts' clocks.
Nothing else that is true leaks into them: no phases, no faults, no fetch.
A router has no spans, as vllm-router by default, unless the scenario sets ``router_traces``.
``reported_ns`` is the true time of the report, from which others may know of it; no host's clock shows it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from handrail_sim.emulator.delivery import Hop, delivered, hop_ns
from handrail_sim.emulator.faults import Fault, FaultPlace
from handrail_sim.emulator.scenario import Scenario
from handrail_sim.emulator.simulate import Attempt, Flight

STARTED_UNIX_NS = 1_700_000_000_000_000_000  # wall time at which a run begins, by a right clock
UPTIME_NS = 86_400_000_000_000  # uptime of every machine when a run begins


@dataclass(frozen=True, slots=True)
class HostClock:
    """A host's clock.

    It runs ``drift_ppm`` too fast, and its wall clock was ``offset_ns`` ahead when the run began.
    """

    offset_ns: int = 0
    drift_ppm: float = 0.0
    started_unix_ns: int = STARTED_UNIX_NS

    def elapsed_ns(self, true_ns: int) -> int:
        """Return what the clock shows for a duration.

        This is also the host's monotonic time since the run began.
        """
        return true_ns + round(true_ns * self.drift_ppm / 1e6)

    def unix_ns(self, true_ns: int) -> int:
        return self.started_unix_ns + self.offset_ns + self.elapsed_ns(true_ns)


def clock(host: str, faults: Sequence[Fault], started_unix_ns: int = STARTED_UNIX_NS) -> HostClock:
    """Build a host's clock.

    The faults of a clock hold for the whole run, whatever time they name, since a clock has one offset and one drift.
    """
    mine = [fault for fault in faults if fault.place in ("*", host)]
    return HostClock(
        round(sum(fault.size for fault in mine if fault.name == "clock_offset") * 1e9),
        sum(fault.size for fault in mine if fault.name == "clock_drift"),
        started_unix_ns,
    )


def clocks(scenario: Scenario, faults: Sequence[Fault], started_unix_ns: int = STARTED_UNIX_NS) -> dict[str, HostClock]:
    """Build every host's clock, by the host's name."""
    return {host: clock(host, faults, started_unix_ns) for host in scenario.hosts().of(FaultPlace.HOST)}


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyObservation:
    """The record of an inline proxy in front of ``host``.

    Wall times are the host's clock's; durations are ns of its monotonic clock.
    ``first_token_ns``: from arrival to the first chunk with a token; None where the response is not streamed (P), or has none.
    ``end_ns``: None where the request was still open when the run was over.
    Token counts are the response's usage; only P says how many it found in its cache.
    """

    host: str
    request_id: str
    arrival_unix_ns: int
    first_token_ns: int | None
    end_ns: int | None
    gaps_ns: tuple[int, ...]
    status: int  # HTTP
    error: bool  # an error event in the stream
    prompt_tokens: int | None
    completion_tokens: int | None
    cached_tokens: int | None
    reported_ns: int | None
    held_ns: tuple[tuple[int, int], ...] = ()  # from arrival: the proxy read nothing, since the client took nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineObservation:
    """vLLM's ``llm_request`` span, which holds durations and two wall times.

    Its queue time at D contains the whole KV wait.
    For a request that was never scheduled the queue time is minus the machine's uptime, as measured on vLLM 0.32.
    """

    host: str
    request_id: str
    arrival_unix_ns: int
    end_unix_ns: int
    ttft_ns: int
    queue_ns: int
    prefill_ns: int
    decode_ns: int
    prompt_tokens: int
    completion_tokens: int
    reported_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterObservation:
    """One span of a router.

    ``leg``: ``server`` for the router's own request, else ``prefill`` or ``decode`` for the call to the engine at host ``peer``.
    """

    host: str
    request_id: str
    leg: str
    peer: str
    start_unix_ns: int
    end_unix_ns: int
    reported_ns: int


Observation = ProxyObservation | EngineObservation | RouterObservation


def observe(
    scenario: Scenario, flight: Flight, faults: Sequence[Fault], by_host: Mapping[str, HostClock] | None = None
) -> list[Observation]:
    """Make all records of one request.

    For a request that hangs, engines and routers that had not finished it have no record.
    ``by_host``: the ``clocks`` of the run; pass it when you call this for many requests.
    """
    here = clocks(scenario, faults) if by_host is None else by_host
    plan = flight.plan
    statement: list[Observation] = [_edge(flight, here["edge"])]
    statement += [_abandoned(attempt, flight.id, here[attempt.host]) for attempt in flight.abandoned]
    if plan.prefill_host != plan.decode_host:
        statement += _prefill(flight, here[plan.prefill_host])
    statement += _decode(flight, here[plan.decode_host])
    if scenario.router_traces:
        statement += _router(scenario, flight, here["router"])
    return statement


def _router(scenario: Scenario, flight: Flight, here: HostClock) -> list[Observation]:
    """Make the router's spans: its own request and each engine call, once ended."""

    def took(hop: Hop) -> int:
        return hop_ns(scenario, flight.seed, flight.plan.index, hop)

    plan, over = flight.plan, flight.engine_end_ns
    arrival = plan.arrival.at_ns + took(Hop.EDGE_ROUTER)
    sent = flight.abandoned[-1].end_ns + scenario.hop_ns if flight.abandoned else arrival + flight.router_ns
    ends = over + took(Hop.LAST_D_ROUTER) if over is not None else None
    legs = [("server", "", arrival, ends)]
    if plan.prefill_host == plan.decode_host:
        legs.append(("decode", plan.decode_host, sent, ends))
    elif flight.prefill_arrival_ns is not None:  # calls that got an error have no spans of their own
        answered = flight.prefill_done_ns + took(Hop.P_ROUTER) if flight.prefill_done_ns is not None else None
        legs.append(("prefill", plan.prefill_host, sent, answered))
        if answered is not None:
            legs.append(("decode", plan.decode_host, answered, ends))
    return [
        RouterObservation(
            host="router",
            request_id=flight.id,
            leg=leg,
            peer=peer,
            start_unix_ns=here.unix_ns(start),
            end_unix_ns=here.unix_ns(end),
            reported_ns=end,
        )
        for leg, peer, start, end in legs
        if end is not None
    ]


def _edge(flight: Flight, here: HostClock) -> ProxyObservation:
    arrival = flight.plan.arrival.at_ns
    proxy_observation = _proxy("edge", flight, here, arrival, flight.edge_first_ns, flight.end_ns, answers=True)
    if flight.client_stands_ns:
        proxy_observation = _to_a_slow_client(proxy_observation, flight, here, arrival)
    refused = flight.failed and flight.prefill_arrival_ns is None  # from every P that was tried: the router passes the error on
    return replace(proxy_observation, status=500, error=False) if refused else proxy_observation


def _to_a_slow_client(proxy_observation: ProxyObservation, flight: Flight, here: HostClock, arrival: int) -> ProxyObservation:
    """Apply a slow client's buffering to a proxy's record.

    Tokens are read later than they came while nothing more fits into the buffer.
    """
    seen = delivered(flight.edge_first_ns, flight.gaps_ns, flight.client_stands_ns)
    ends = max(flight.end_ns or 0, *(moment[1] for moment in (seen.held_ns, seen.paused_ns) if moment is not None))
    return replace(
        proxy_observation,
        gaps_ns=tuple(map(here.elapsed_ns, seen.gaps_ns)),
        held_ns=tuple((here.elapsed_ns(begin - arrival), here.elapsed_ns(end - arrival)) for begin, end in (seen.held_ns,))
        if seen.held_ns is not None
        else (),
        end_ns=here.elapsed_ns(ends - arrival) if proxy_observation.end_ns is not None else None,
        reported_ns=ends if proxy_observation.reported_ns is not None else None,
    )


def _abandoned(attempt: Attempt, request_id: str, here: HostClock) -> ProxyObservation:
    """Make the record of a prompt that P answered with an error."""
    return ProxyObservation(
        host=attempt.host,
        request_id=request_id,
        arrival_unix_ns=here.unix_ns(attempt.arrival_ns),
        first_token_ns=None,
        end_ns=here.elapsed_ns(attempt.end_ns - attempt.arrival_ns),
        gaps_ns=(),
        status=500,
        error=False,
        prompt_tokens=None,
        completion_tokens=None,
        cached_tokens=None,
        reported_ns=attempt.end_ns,
    )


def _prefill(flight: Flight, here: HostClock) -> list[Observation]:
    arrival, queued, done = flight.prefill_arrival_ns, flight.prefill_queued_ns, flight.prefill_done_ns
    host = flight.plan.prefill_host
    if arrival is None:
        return []
    statement: list[Observation] = [_proxy(host, flight, here, arrival, None, done, answers=False)]
    scheduled, first = flight.prefill_scheduled_ns, flight.prefill_first_ns
    if queued is not None and scheduled is not None and first is not None:
        statement.append(_engine(host, flight, here, (queued, scheduled, first, first), 1))
    return statement


def _decode(flight: Flight, here: HostClock) -> list[Observation]:
    split = flight.plan.prefill_host != flight.plan.decode_host
    arrival = flight.decode_arrival_ns if split else flight.prefill_arrival_ns
    queued = flight.decode_queued_ns if split else flight.prefill_queued_ns
    host = flight.plan.decode_host
    if arrival is None:
        return []
    statement: list[Observation] = [
        _proxy(host, flight, here, arrival, flight.sent_ns if not flight.failed else None, flight.engine_end_ns, answers=True)
    ]
    scheduled, first, last = flight.decode_scheduled_ns, flight.first_token_ns, flight.last_token_ns
    if queued is None or flight.engine_end_ns is None:
        return statement
    if scheduled is not None and first is not None and last is not None:
        statement.append(_engine(host, flight, here, (queued, scheduled, first, last), len(flight.gaps_ns) + 1))
    elif flight.failed and flight.loaded_ns is not None:
        statement.append(_never_scheduled(host, flight, here, queued, flight.loaded_ns))
    return statement


def _proxy(
    host: str, flight: Flight, here: HostClock, arrival_ns: int, first_ns: int | None, end_ns: int | None, *, answers: bool
) -> ProxyObservation:
    return ProxyObservation(
        host=host,
        request_id=flight.id,
        arrival_unix_ns=here.unix_ns(arrival_ns),
        first_token_ns=here.elapsed_ns(first_ns - arrival_ns) if first_ns is not None else None,
        end_ns=here.elapsed_ns(end_ns - arrival_ns) if end_ns is not None else None,
        gaps_ns=_gaps(flight, here) if answers else (),
        status=200,
        error=answers and flight.failed,
        prompt_tokens=flight.plan.arrival.prompt_tokens if end_ns is not None and not flight.failed else None,
        completion_tokens=_made(flight, answers=answers) if end_ns is not None and not flight.failed else None,
        cached_tokens=flight.cached_tokens if host == flight.plan.prefill_host and end_ns is not None else None,
        reported_ns=end_ns,
    )


def _gaps(flight: Flight, here: HostClock) -> tuple[int, ...]:
    return tuple(map(here.elapsed_ns, flight.gaps_ns)) if here.drift_ppm else tuple(flight.gaps_ns)


def _made(flight: Flight, *, answers: bool) -> int:
    return len(flight.gaps_ns) + 1 if answers else 1


def _engine(host: str, flight: Flight, here: HostClock, times: tuple[int, int, int, int], made: int) -> EngineObservation:
    queued, scheduled, first, last = times
    return EngineObservation(
        host=host,
        request_id=flight.id,
        arrival_unix_ns=here.unix_ns(queued),
        end_unix_ns=here.unix_ns(last),
        ttft_ns=here.elapsed_ns(first - queued),
        queue_ns=here.elapsed_ns(scheduled - queued),
        prefill_ns=here.elapsed_ns(first - scheduled),
        decode_ns=here.elapsed_ns(last - first),
        prompt_tokens=flight.plan.arrival.prompt_tokens,
        completion_tokens=made,
        reported_ns=last,
    )


def _never_scheduled(host: str, flight: Flight, here: HostClock, queued: int, ended: int) -> EngineObservation:
    return EngineObservation(
        host=host,
        request_id=flight.id,
        arrival_unix_ns=here.unix_ns(queued),
        end_unix_ns=here.unix_ns(ended),
        ttft_ns=here.elapsed_ns(ended - queued),
        queue_ns=-(UPTIME_NS + here.elapsed_ns(queued)),
        prefill_ns=UPTIME_NS + here.elapsed_ns(ended),
        decode_ns=0,
        prompt_tokens=flight.plan.arrival.prompt_tokens,
        completion_tokens=0,
        reported_ns=ended,
    )
