"""Find the true cause of each stall by a twin run without one reason.

A reason made a stall when the stall is gone, or less than half as long, in the same run without that reason (the twin).
The module also finds causes that cannot be true: it sets the same stalls beside an engine whose activity is moved in time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from statistics import median_low
from typing import Any, Final

from bench.stalls.parts import Parts
from bench.stalls.scenes import Scene, Setting
from handrail.records import EngineTimes, Exchange, Iteration, KvFetch, ProcessEvent
from handrail.records.devices import DeviceRun
from handrail_collector.batch import rows_of
from handrail_collector.explain.stalls.evidence import StallCause
from handrail_collector.rows import StallRow
from handrail_sim.emulator.delivery import delivered
from handrail_sim.emulator.observe import STARTED_UNIX_NS
from handrail_sim.emulator.simulate import Flight, Ran
from handrail_sim.emulator.virtual_run import VirtualRunSettings
from handrail_sim.virtual.observers import arrivals, engine_arrivals
from harness.virtual_runs import shared_run

NEARBY: Final = 8
"""Gaps before and after that are compared too.

Without the reason the times of the run move a little, and other stalls of the stream move with them.
"""

TURNS: Final = 4
"""Number of shuffles of a run.

In a hundred seconds little happens, so one shuffle says little about coincidence.
"""

APART_NS: Final = 5_000_000_000
SLICE_NS: Final = 2_000_000_000
JITTER_NS: Final = 4_000_000_000


@dataclass(frozen=True, slots=True)
class Judged:
    """One reported stall and the reasons without which it is gone.

    There may be no reason. There are several when no single one made the stall.
    """

    row: StallRow
    truly: frozenset[StallCause]


@dataclass(slots=True)
class Score:
    """The score of one scene.

    ``clear``: stalls with one true cause; ``right``: those of them whose cause was named.
    ``wrong``: stalls of all reported ones for which another cause was named.
    """

    name: str
    reported: int = 0
    clear: int = 0
    right: int = 0
    unknown: int = 0
    wrong: int = 0
    none: int = 0  # stalls that no single reason made
    none_named: int = 0
    shuffled: int = 0
    shuffled_named: int = 0
    by_cause: dict[str, int] = field(default_factory=dict)


def fly(setting: Setting, requests: int, seed: int) -> Ran:
    return shared_run(VirtualRunSettings(scenario=setting.scenario, requests=requests, seed=seed, faults=setting.faults))


def received_records(setting: Setting, flown: Ran, seed: int) -> list[tuple[int, Any]]:
    """Return the records that a collector receives from a run.

    They are in order, each with its time of receipt.
    """
    run: dict[str, Any] = {"seed": seed, "started_unix_ns": STARTED_UNIX_NS}
    made = arrivals(setting.scenario, flown.flights, setting.faults, plugin=True, **run)
    records: list[tuple[int, Any]] = [(one.received_unix_ns, one.record) for one in made]
    records += [(one.received_unix_ns, one.record) for one in engine_arrivals(setting.scenario, flown, setting.faults, **run)]
    return sorted(records, key=lambda each: each[0])


def reported_cause(setting: Setting, flown: Ran, seed: int, moved: Random | None = None) -> list[StallRow]:
    """Return the stalls that a collector reports for a run.

    ``moved``: the other activity of the engines is moved in time.
    """
    records = received_records(setting, flown, seed)
    stalls: list[StallRow] = []
    for _ in rows_of(records if moved is None else shuffled(records, moved), stalls=stalls):
        pass
    last = {}
    for row in stalls:
        if row.number >= 0:
            last[row.request_id, row.number] = row
    return list(last.values())


def judge(scene: Scene, requests: int, seed: int) -> Score:
    """Simulate a scene and its twins, report its stalls, and compare."""
    flown = fly(scene.setting, requests, seed)
    score = Score(scene.name)
    for judged in judged_of(scene, flown, requests, seed):
        count(score, judged)
    for turn in range(TURNS):
        for row in reported_cause(scene.setting, flown, seed, Random(f"{seed} {turn}")):
            score.shuffled += 1
            score.shuffled_named += row.cause not in (StallCause.UNKNOWN.value, StallCause.CLIENT_BACKPRESSURE.value)
    return score


def judged_of(scene: Scene, flown: Ran, requests: int, seed: int) -> list[Judged]:
    """Return every reported stall of a run with its true cause.

    With one reason the run's twin decides, else the twins of the steps.
    """
    rows = reported_cause(scene.setting, flown, seed)
    if len(scene.reasons) == 1:
        twins = {cause: _by_id(fly(without(scene.setting), requests, seed).flights) for cause, without in scene.reasons}
        return [Judged(row, truth(row, twins)) for row in rows]
    parts, flights = Parts(scene.setting.scenario, flown, seed), _by_id(flown.flights)
    return [Judged(row, largest(row, parts, flights[str(row.client_request_id)])) for row in rows]


def largest(row: StallRow, parts: Parts, flight: Flight) -> frozenset[StallCause]:
    """Return the reason that added most.

    It added half of the excess and twice as much as any other. Several are returned when none dominates.
    """
    found = parts.of(flight, row.index)
    most = max(found.values(), default=0.0)
    if 2 * most < row.gap_ns - row.median_ns:
        return frozenset()
    return frozenset(cause for cause, ns in found.items() if 2 * ns > most)


def truth(row: StallRow, twins: dict[StallCause, dict[str, Flight]]) -> frozenset[StallCause]:
    """Return the reasons without which the stream does not stall there."""
    return frozenset(cause for cause, flights in twins.items() if _gone(row, flights[str(row.client_request_id)]))


def _gone(row: StallRow, twin: Flight) -> bool:
    gaps = delivered(twin.edge_first_ns, twin.gaps_ns, twin.client_stands_ns).gaps_ns
    near = gaps[max(0, row.index - NEARBY) : row.index + NEARBY + 1]
    if not near:
        return False
    usual = median_low(gaps)
    return 2 * (max(near) - usual) < row.gap_ns - row.median_ns


def count(score: Score, judged: Judged) -> None:
    """Add one stall to a score."""
    row, truly = judged.row, judged.truly
    score.reported += 1
    score.by_cause[row.cause] = score.by_cause.get(row.cause, 0) + 1
    named = None if row.cause == StallCause.UNKNOWN.value else StallCause(row.cause)
    if len(truly) == 1:
        score.clear += 1
        score.right += named in truly
        score.unknown += named is None
    else:
        score.none += 1
        score.none_named += named is not None
    score.wrong += named is not None and bool(truly) and named not in truly


def _by_id(flights: Iterable[Flight]) -> dict[str, Flight]:
    return {flight.id: flight for flight in flights}


def shuffled(records: Sequence[tuple[int, Any]], random: Random) -> list[tuple[int, Any]]:
    """Return the same streams beside engines whose activity happened at other times.

    Each kind of activity of each engine is rotated by its own share of the run: what leaves at the end comes in at the
    beginning.
    The rotation is at least ``APART_NS``, because activity that hardly moves is still the cause.
    Each ``SLICE_NS`` of it moves by some more of its own: periodic activity would otherwise meet all of the stalls that it
    made, or none.
    """
    times = [received for received, record in records if isinstance(record, Exchange)]
    first, last = min(times), max(times)
    turns: dict[tuple[str, str], int] = {}
    more: dict[tuple[str, str, int], int] = {}

    def turned(kind: str, instance: str, at: int) -> int:
        by = turns.setdefault((kind, instance), random.randrange(APART_NS, last - first - APART_NS - JITTER_NS))
        by += more.setdefault((kind, instance, at // SLICE_NS), random.randrange(JITTER_NS))
        return (at - first + by) % (last - first) + first - at

    found = []
    for received, record in records:
        made: Any = record
        instance = record.process.instance
        if isinstance(record, Iteration):
            by = turned("steps", instance, record.started_unix_ns)
            made = replace(record, started_unix_ns=record.started_unix_ns + by)
        elif isinstance(record, ProcessEvent):
            by = turned("pauses", instance, record.at_unix_ns)
            made = replace(record, at_unix_ns=record.at_unix_ns + by)
        elif isinstance(record, DeviceRun):
            by = turned("clocks", instance, record.at_unix_ns)
            made = replace(record, at=[at + by for at in record.at])
        elif isinstance(record, KvFetch):
            by = turned("loads", instance, record.known_unix_ns)
            made = replace(record, known_unix_ns=record.known_unix_ns + by)
        else:
            by = 0
            if isinstance(record, EngineTimes) and record.preempted:
                made = replace(record, preempted=_elsewhere(record, random))
        found.append((received + by, made))
    return sorted(found, key=lambda each: each[0])


def _elsewhere(times: EngineTimes, random: Random) -> tuple[int, ...]:
    """Return a preemption of a request at another time of its own stream."""
    begin, end = times.first_token_ns or 0, times.finished_ns or 0
    moved: list[int] = []
    for first, last in zip(times.preempted[::2], times.preempted[1::2], strict=True):
        start = begin + random.randrange(max(1, end - begin - (last - first)))
        moved += [start, start + last - first]
    return tuple(moved)
