"""Divide an engine's time, from queue to first token, into phases.

The moments are the plugin's times, by one host's clock.
The time between two known moments is a phase where only one phase can lie there. Where a moment between them is unknown, the
time is ``unattributed`` with the phases that it may hide.
No phase is negative. A moment stamped before an earlier one (a poll saw it late) moves to that earlier one, and the phase's
bound grows by the shift.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from handrail.phases import Phase, PhaseTime, Place
from handrail.records import EngineTimes, KvFetch, KvPublish

PLUGIN = "plugin"
PREEMPTED = "plugin-preempted"
"""Source of the part of a phase during which the request was preempted."""
PEER = "plugin-peer"
"""Source of a transfer's time by the clock of the engine that pushed it."""

CLOCK_NS = 1_000
"""Bound of moments from several processes of one host, put on one clock.

Their wall stamps are taken a microsecond apart.
"""


@dataclass(frozen=True, slots=True)
class Mark:
    """The end of a phase.

    The phase ends at ``end_unix_ns`` (None: unknown), or at most ``bound_ns`` before.
    """

    phase: Phase
    end_unix_ns: int | None
    bound_ns: int = 0


@dataclass(frozen=True, slots=True)
class Account:
    """The phases inside an engine, up to the first token.

    They run from ``begin_unix_ns``, when the scheduler knew the request, to ``first_unix_ns``, its first token.
    """

    begin_unix_ns: int
    first_unix_ns: int
    phases: tuple[PhaseTime, ...]


def account(
    times: EngineTimes, fetch: KvFetch | None, place: Place, *, computes: bool, pushed: KvPublish | None = None
) -> Account | None:
    """Return the phases inside the engine; None before the first token.

    ``computes``: the prompt is computed here. ``pushed``: the peer's record of its writes.
    """
    if times.first_token_ns is None:
        return None
    queued = times.queued_unix_ns
    first = queued + times.first_token_ns
    marks = _marks(times, fetch, computes)
    phases = _segments(queued, first, marks, place)
    if fetch is not None and pushed is not None and fetch.mode == "push":
        phases = _by_peer(phases, pushed)
    return Account(queued, first, _preempted_apart(phases, times))


def _marks(times: EngineTimes, fetch: KvFetch | None, computes: bool) -> list[Mark]:
    queued = times.queued_unix_ns
    queue = Mark(Phase.PREFILL_QUEUE if computes else Phase.DECODE_QUEUE, _at(queued, times.scheduled_ns))
    step = Mark(Phase.PREFILL_COMPUTE if computes else Phase.FIRST_STEP, _at(queued, times.first_token_ns))
    if fetch is None or fetch.tokens_wanted == 0:
        return [queue, step]
    load = _load(fetch)
    started, scheduled = load[0].end_unix_ns, queue.end_unix_ns
    if started is not None and scheduled is not None and started > scheduled:  # the connector loads within the step
        return [queue, *(mark for mark in load if mark.phase is not Phase.KV_NOTICE), step]
    return [*load, queue, step]


def _load(fetch: KvFetch) -> list[Mark]:
    """Return the marks of a KV fetch.

    With a known peer, a load waits until its transfer is posted: the loads of one step are posted one after another.
    """
    known = fetch.known_unix_ns
    started, posted = _at(known, fetch.load_started_ns), _at(known, fetch.posted_ns)
    done, noticed = _at(known, fetch.done_ns), _at(known, fetch.noticed_ns)
    if fetch.handshake_begin_ns is not None:  # after a handshake the engine posts at its next step
        wait = Mark(Phase.KV_WAIT, started, fetch.load_started_bound_ns)
        ended = posted if posted is not None else _at(known, fetch.handshake_end_ns)
        contact = Mark(Phase.KV_HANDSHAKE, ended, fetch.handshake_bound_ns)
    elif posted is not None:
        wait = Mark(Phase.KV_WAIT, posted, fetch.posted_bound_ns)
        contact = Mark(Phase.KV_HANDSHAKE, posted)
    else:  # the connector reports no post: its transfer is the whole load
        wait = Mark(Phase.KV_WAIT, started, fetch.load_started_bound_ns)
        contact = Mark(Phase.KV_HANDSHAKE, started if done is not None else None)
    if done is None and noticed is not None and (fetch.failure is not None or fetch.effect is not None):
        # the phase it was in until the scheduler learned of the failure
        if fetch.handshake_begin_ns is not None and contact.end_unix_ns is None:
            return [wait, replace(contact, end_unix_ns=noticed, bound_ns=fetch.noticed_bound_ns)]
        return [wait, contact, Mark(Phase.KV_TRANSFER, noticed, fetch.noticed_bound_ns)]
    return [
        wait,
        contact,
        Mark(Phase.KV_TRANSFER, done, fetch.done_bound_ns),
        Mark(Phase.KV_NOTICE, noticed, fetch.noticed_bound_ns),
    ]


def _segments(begin: int, last: int, marks: Iterable[Mark], place: Place) -> list[PhaseTime]:
    found: list[PhaseTime] = []
    at, pending, doubt = begin, [], 0
    for mark in marks:
        pending.append(mark.phase)
        if mark.end_unix_ns is None:
            continue
        end = min(max(mark.end_unix_ns, at), max(last, at))
        moved = abs(mark.end_unix_ns - end)
        bound = CLOCK_NS + doubt + mark.bound_ns + moved
        if len(pending) == 1:
            found.append(PhaseTime(pending[0], end - at, place, PLUGIN, bound))
        elif end > at:
            found.append(PhaseTime(Phase.UNATTRIBUTED, end - at, place, PLUGIN, 0, tuple(pending)))
        at, pending, doubt = end, [], mark.bound_ns + moved
    return found


def _by_peer(phases: Sequence[PhaseTime], pushed: KvPublish) -> list[PhaseTime]:
    """Use the writer's clock for the duration of a pushed transfer.

    The rest of the wait is before or after it; which one is unknown.
    """
    if pushed.posted_ns is None or pushed.done_ns is None:
        return list(phases)
    found: list[PhaseTime] = []
    for phase in phases:
        if phase.phase is not Phase.KV_TRANSFER:
            found.append(phase)
            continue
        took = min(max(0, pushed.done_ns - pushed.posted_ns), phase.duration_ns)
        found.append(replace(phase, duration_ns=took, source=PEER, bound_ns=CLOCK_NS + pushed.done_bound_ns))
        if rest := phase.duration_ns - took:
            may_be = (Phase.KV_WAIT, Phase.KV_NOTICE)
            found.append(PhaseTime(Phase.UNATTRIBUTED, rest, phase.place, PLUGIN, 0, may_be))
    return found


def _preempted_apart(phases: Sequence[PhaseTime], times: EngineTimes) -> tuple[PhaseTime, ...]:
    """Split off the time during which the request was preempted.

    Only time before its first token counts. It lies within the compute phase and becomes a part of its own.
    """
    found: list[PhaseTime] = []
    for phase in phases:
        pause = min(times.preempted_before_first_ns, phase.duration_ns)
        if phase.phase in (Phase.PREFILL_COMPUTE, Phase.FIRST_STEP) and pause > 0:
            found.append(replace(phase, duration_ns=phase.duration_ns - pause))
            found.append(replace(phase, duration_ns=pause, source=PREEMPTED))
        else:
            found.append(phase)
    return tuple(found)


def _at(origin: int, offset: int | None) -> int | None:
    return None if offset is None else origin + offset
