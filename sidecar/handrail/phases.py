"""Phases of the time to first token, and exact sums of them.

Durations inside one process come from that process's clock alone and are never compared with another's. Across processes there
is one exact remainder, ``router_and_hops``. The sum of the phases of a request equals its total to the nanosecond.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum


class Phase(str, Enum):
    """Closed enum of phases, in path order."""

    PREFILL_ADMISSION = "prefill_admission"  # arrival at P -> queued in the engine
    PREFILL_QUEUE = "prefill_queue"  # queued -> scheduled
    PREFILL_COMPUTE = "prefill_compute"  # scheduled -> first token
    PREFILL_RESPOND = "prefill_respond"  # first token -> response complete
    DECODE_ADMISSION = "decode_admission"  # arrival at D -> known to the scheduler
    KV_WAIT = "kv_wait"  # known -> posted; where a first contact is needed: known -> load started
    KV_HANDSHAKE = "kv_handshake"  # load started -> first contact done and posted; 0 where the peer was known
    KV_TRANSFER = "kv_transfer"  # posted -> done
    KV_NOTICE = "kv_notice"  # done -> seen by the scheduler
    DECODE_QUEUE = "decode_queue"  # seen -> scheduled
    FIRST_STEP = "first_step"  # scheduled -> first token
    DECODE_RESPOND = "decode_respond"  # first token -> its chunk leaves D
    ROUTER_AND_HOPS = "router_and_hops"  # total - time inside P - time inside D
    ROUTER = "router"
    PREFILL_HOPS = "prefill_hops"
    DECODE_HOPS = "decode_hops"
    UNATTRIBUTED = "unattributed"  # inside a process, or between processes that gave no evidence


class Place(str, Enum):
    """Place where a phase is spent."""

    PREFILL = "prefill"
    DECODE = "decode"
    PATH = "path"  # routers, networks, and processes without evidence


KV_AND_QUEUE = (Phase.KV_WAIT, Phase.KV_HANDSHAKE, Phase.KV_TRANSFER, Phase.KV_NOTICE, Phase.DECODE_QUEUE)
"""Phases that vLLM books as one "queue time" on D when it pulls KV.

Measured: vLLM sets scheduled_ts only after the load.
"""


@dataclass(frozen=True, slots=True)
class PhaseTime:
    """Duration of one phase.

    The true value lies within +- ``bound_ns``; ``may_be``: the phases that ``unattributed`` may hide.
    """

    phase: Phase
    duration_ns: int
    place: Place
    source: str
    bound_ns: int = 0
    may_be: tuple[Phase, ...] = ()


def close_sum(known: Sequence[PhaseTime], total_ns: int, rest: PhaseTime) -> tuple[PhaseTime, ...]:
    """Add a remainder to the ``known`` phases of one place so that they sum exactly.

    The sum is ``total_ns``. ``rest`` gives name, place, source and ``may_be`` of the remainder; its duration is ignored.
    The known phases may exceed the total: they were measured at different points of one process, microseconds apart, or the
    engine's figures are rounded. Then the largest ones are shortened by the excess and their bound grows by it: nothing becomes
    negative and the sum stays exact. Phases of zero length are kept (0 is a fact), a zero remainder is not.
    """
    phases = [p for p in known if p.duration_ns >= 0]
    excess = sum(p.duration_ns for p in phases) - total_ns
    if excess <= 0:
        return (*phases, replace(rest, duration_ns=-excess)) if excess else tuple(phases)
    for index in sorted(range(len(phases)), key=lambda i: -phases[i].duration_ns):
        cut = min(excess, phases[index].duration_ns)
        phases[index] = replace(phases[index], duration_ns=phases[index].duration_ns - cut, bound_ns=phases[index].bound_ns + cut)
        excess -= cut
        if not excess:
            break
    return tuple(phases)


def total(phases: Iterable[PhaseTime]) -> int:
    """Sum of the phases in ns."""
    return sum(p.duration_ns for p in phases)


ORDER = {phase: index for index, phase in enumerate(Phase)}


def path_order(phases: Iterable[PhaseTime]) -> tuple[PhaseTime, ...]:
    """Phases in path order: prefill, then what lies between, then decode.

    The order inside a place is the enum's.
    """
    place = {Place.PREFILL: 0, Place.PATH: 1, Place.DECODE: 2}
    return tuple(sorted(phases, key=lambda p: (place[p.place], ORDER[p.phase])))
