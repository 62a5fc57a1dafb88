"""The request records of a plugin inside the engines of a virtual fleet.

They are each engine's times, D's load and the KV that P keeps.
All are by the hosts' own clocks and contain only what an engine knows: no fault, no phase, nothing of the other side.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from handrail_sim.emulator.observe import HostClock
from handrail_sim.emulator.scenario import Scenario
from handrail_sim.emulator.simulate import Flight
from handrail_sim.emulator.truth import FetchTruth

FAILURES: Mapping[FetchTruth, tuple[str, str]] = {
    FetchTruth.FAILED: ("transfer_failed", "failed"),
    FetchTruth.RECOMPUTED: ("transfer_failed", "recomputed"),
    FetchTruth.EXPIRED: ("lease_expired", "recomputed"),
}
"""The engine's name of each failure, and what its policy did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimesObservation:
    """The times of one request inside one engine.

    Offsets are from ``queued_unix_ns``; None: has not happened by the end of the run.
    """

    host: str
    request_id: str
    queued_unix_ns: int
    scheduled_ns: int | None
    first_token_ns: int | None
    finished_ns: int | None
    seen_ns: int | None  # only for a request that is still there
    failed: bool
    preemptions: int
    preempted_ns: tuple[int, ...]  # from, to, from, to ...
    prompt_tokens: int
    output_tokens: int | None
    reported_ns: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadObservation:
    """D's load of one request's KV, as offsets from ``known_unix_ns``.

    ``contact_ns``: from when to when D made contact; None: it knew the peer.
    """

    host: str
    peer: str
    request_id: str
    known_unix_ns: int
    started_ns: int | None
    contact_ns: tuple[int, int] | None
    posted_ns: int | None
    done_ns: int | None
    noticed_ns: int | None
    seen_ns: int | None
    failure: str | None
    effect: str | None
    tokens: int
    kv_bytes: int | None
    reported_ns: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptObservation:
    """The KV that P keeps for one request, as offsets from ``published_unix_ns``.

    ``read_ns``: when P knows that D has read it; P looks for that once a step.
    """

    host: str
    request_id: str
    published_unix_ns: int
    read_ns: int | None
    expired_ns: int | None
    late_read_ns: int | None
    seen_ns: int | None
    tokens: int
    kv_bytes: int
    reported_ns: int | None


PluginObservation = TimesObservation | LoadObservation | KeptObservation


def observe_plugin(scenario: Scenario, flight: Flight, clocks: Mapping[str, HostClock], over_ns: int) -> list[PluginObservation]:
    """Make all plugin records of one request.

    ``over_ns``: when the run is over. What is open then is recorded as it is at that time.
    """
    plan = flight.plan
    split = plan.prefill_host != plan.decode_host
    statement: list[PluginObservation] = []
    if split and flight.prefill_queued_ns is not None:
        marks = (flight.prefill_queued_ns, flight.prefill_scheduled_ns, flight.prefill_first_ns, flight.prefill_first_ns)
        statement.append(_times(plan.prefill_host, flight, clocks[plan.prefill_host], marks, over_ns, made=1))
        if flight.prefill_first_ns is not None:
            statement.append(_publish_observation(scenario, flight, clocks[plan.prefill_host], flight.prefill_first_ns, over_ns))
    queued = flight.decode_queued_ns if split else flight.prefill_queued_ns
    if queued is None:
        return statement
    here = clocks[plan.decode_host]
    ended = flight.last_token_ns if not flight.failed else flight.seen_ns or flight.loaded_ns
    finished = ended if flight.engine_end_ns is not None else None
    marks = (queued, flight.decode_scheduled_ns if flight.first_token_ns is not None else None, flight.first_token_ns, finished)
    statement.append(_times(plan.decode_host, flight, here, marks, over_ns, made=len(flight.gaps_ns) + 1))
    if split:
        statement.append(_load(flight, here, queued, over_ns))
    return statement


def _times(
    host: str, flight: Flight, here: HostClock, marks: tuple[int, int | None, int | None, int | None], over_ns: int, *, made: int
) -> TimesObservation:
    queued, scheduled, first, finished = marks
    return TimesObservation(
        host=host,
        request_id=flight.id,
        queued_unix_ns=here.unix_ns(queued),
        scheduled_ns=_since(here, queued, scheduled),
        first_token_ns=_since(here, queued, first),
        finished_ns=_since(here, queued, finished),
        seen_ns=_since(here, queued, over_ns) if finished is None else None,
        failed=flight.failed and host == flight.plan.decode_host,
        preemptions=flight.preemptions if host == flight.plan.decode_host else 0,
        preempted_ns=tuple(here.elapsed_ns((over_ns if at is None else at) - queued) for each in flight.preempted for at in each)
        if host == flight.plan.decode_host
        else (),
        prompt_tokens=flight.plan.arrival.prompt_tokens,
        output_tokens=made if first is not None else None,
        reported_ns=finished,
    )


def _load(flight: Flight, here: HostClock, known: int, over_ns: int) -> LoadObservation:
    failure, effect = FAILURES.get(flight.fetch, (None, None))
    started, contact = flight.load_started_ns, flight.contact_ns
    went_well = flight.fetch in (FetchTruth.OK, FetchTruth.STALE_READ)  # D cannot tell the two apart
    met = started is not None and contact is not None and contact > started
    return LoadObservation(
        host=flight.plan.decode_host,
        peer=flight.plan.prefill_host,
        request_id=flight.id,
        known_unix_ns=here.unix_ns(known),
        started_ns=_since(here, known, started),
        contact_ns=(here.elapsed_ns(started - known), here.elapsed_ns(contact - known)) if met and started and contact else None,
        posted_ns=_since(here, known, contact),
        done_ns=_since(here, known, flight.loaded_ns) if went_well else None,
        noticed_ns=_since(here, known, flight.seen_ns if went_well else flight.loaded_ns),
        seen_ns=_since(here, known, over_ns) if flight.loaded_ns is None else None,
        failure=failure,
        effect=effect,
        tokens=flight.plan.arrival.prompt_tokens,
        kv_bytes=flight.kv_bytes if went_well else None,
        reported_ns=flight.seen_ns,
    )


def _publish_observation(scenario: Scenario, flight: Flight, here: HostClock, published: int, over_ns: int) -> KeptObservation:
    tokens = flight.plan.arrival.prompt_tokens
    read = flight.received_ns if flight.fetch is FetchTruth.OK else None
    late = flight.received_ns if flight.fetch is FetchTruth.STALE_READ else None
    ended = read if read is not None else late if late is not None else flight.expired_ns
    return KeptObservation(
        host=flight.plan.prefill_host,
        request_id=flight.id,
        published_unix_ns=here.unix_ns(published),
        read_ns=_since(here, published, read),
        expired_ns=_since(here, published, flight.expired_ns) if read is None else None,
        late_read_ns=_since(here, published, late),
        seen_ns=_since(here, published, over_ns) if ended is None else None,
        tokens=tokens,
        kv_bytes=tokens * scenario.kv_bytes_per_token,
        reported_ns=ended,
    )


def _since(here: HostClock, begin_ns: int, at_ns: int | None) -> int | None:
    return here.elapsed_ns(at_ns - begin_ns) if at_ns is not None else None
