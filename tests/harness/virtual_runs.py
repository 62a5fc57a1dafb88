"""Runs in virtual time that tests share.

Equal settings are simulated once a session.
Tests only read what they get. A test of the simulation itself runs its own (``virtual_run``).
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from handrail_sim.emulator import virtual_run
from handrail_sim.emulator.simulate import Ran
from handrail_sim.emulator.virtual_run import VirtualRequest, VirtualRunSettings


@lru_cache(maxsize=32)  # one of 300 requests takes 5 MB
def shared_run(settings: VirtualRunSettings) -> Ran:
    """Return the run of these settings."""
    return virtual_run.ran(settings)


def shared_requests(settings: VirtualRunSettings) -> list[VirtualRequest]:
    """Return the requests of a run, with what its faults cost them.

    It is ``virtual_run.simulate`` with shared runs.
    """
    healthy = shared_run(replace(settings, faults=())).flights if settings.faults else None
    return virtual_run.compared(settings.scenario, shared_run(settings).flights, healthy)
