"""The processes of a virtual fleet, and when its run is over."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from handrail.records import Process, Role
from handrail_sim.emulator.scenario import Scenario
from handrail_sim.emulator.simulate import Flight

_PATIENCE_NS: Final = 60_000_000_000


def processes(scenario: Scenario) -> dict[str, Process]:
    """Return the edge, the router and the engines, by host."""
    hosts = scenario.hosts()
    roles = dict.fromkeys(hosts.prefill, Role.COLLOCATED if hosts.collocated else Role.PREFILL)
    roles |= {} if hosts.collocated else dict.fromkeys(hosts.decode, Role.DECODE)
    roles |= {"edge": Role.EDGE, "router": Role.ROUTER}
    return {host: Process(role=role, instance=f"{host}:8000", host=host, host_name=host) for host, role in roles.items()}


def over_ns(flights: Sequence[Flight]) -> int:
    """Return when the run is over.

    Its last request has ended. Where some hang, everything else that happens has happened.
    """
    last = max((flight.end_ns for flight in flights if flight.end_ns is not None), default=0)
    last = max([last, *(flight.plan.arrival.at_ns for flight in flights)])
    return last + (_PATIENCE_NS if any(flight.end_ns is None for flight in flights) else 0)
