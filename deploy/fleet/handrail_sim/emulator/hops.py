"""How long a message takes from one process to the next.

All messages take a minimum, and on average ``hop_spread_ns`` more.
"""

from __future__ import annotations

import math
from enum import IntEnum

from handrail_sim.emulator.noise import uniform
from handrail_sim.emulator.scenario import Scenario

_HOP = 8  # the purpose of a request's draw


class Hop(IntEnum):
    """The messages of a request.

    A retry at another P, and the error before it, take the minimum.
    """

    EDGE_ROUTER = 0
    ROUTER_P = 1  # collocated: the engine
    P_ROUTER = 2
    ROUTER_D = 3
    FIRST_D_ROUTER = 4  # the first token
    FIRST_ROUTER_EDGE = 5
    LAST_D_ROUTER = 6  # the end of the answer
    LAST_ROUTER_EDGE = 7
    D_P = 8  # D has read: NIXL's notification


FIRST = (Hop.FIRST_D_ROUTER, Hop.FIRST_ROUTER_EDGE)
LAST = (Hop.LAST_D_ROUTER, Hop.LAST_ROUTER_EDGE)


def hop_ns(scenario: Scenario, seed: int, request: int, hop: Hop) -> int:
    """Draw the duration of one hop.

    It is the same for one seed, whatever else happens. The spread is exponential.
    """
    if not scenario.hop_spread_ns:
        return scenario.hop_ns
    return scenario.hop_ns + round(-math.log(1 - uniform(seed, request, _HOP, hop)) * scenario.hop_spread_ns)
