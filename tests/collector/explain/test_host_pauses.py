"""A pause of an engine's process is one cause, whatever phases it falls into.

The tests use fleets whose truth is known, and made periods.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from bench.stalls.referee import fly, received_records, shuffled
from bench.stalls.scenes import Setting
from builders.period import usual
from builders.plugin import times
from builders.records import EPOCH, MS, engine, exchange, process
from builders.scope import explained_period, scope_of
from handrail.records import Iteration, ProcessEvent, ProcessEventKind, Record, Role, Source
from handrail_collector.batch import newest, rows_of
from handrail_collector.explain.period.attribution import causes
from handrail_collector.explain.period.baseline import fit
from handrail_collector.explain.period.host_pauses import attribute_pauses
from handrail_collector.explain.period.request_columns import requests_of
from handrail_collector.explain.period.summary import summary
from handrail_collector.explain.period.tail import TailCause
from handrail_collector.explain.request.path import path_of
from handrail_collector.explain.stalls.stall_rows import has_pause_data, with_pauses
from handrail_collector.rows import RequestRow
from handrail_collector.stitch.engine_activity import Activity
from handrail_collector.stitch.evidence import Item
from handrail_collector.stitch.stitcher import SECOND, Stitcher
from handrail_sim.emulator import scenario as scenarios
from handrail_sim.emulator.faults import parse
from handrail_sim.emulator.simulate import record
from handrail_sim.emulator.truth import excess

# --- fleets whose truth is known ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Judged:
    """Requests that a pause made slow: named by the collector, and true.

    ``named``: requests said to be slow because of a pause, by host. ``truly``: those that the pauses made slow.
    """

    named: dict[str, list[str]]
    truly: set[str]
    phases: dict[str, list[str]]


def judged(layout: str, fault: str, *, requests: int = 1200, moved: bool = False) -> Judged:
    """Judge a fleet's requests.

    ``moved``: everything the engines did beside the requests is moved in time.
    """
    chosen = scenarios.load(layout)
    seed = 1
    setting = Setting(chosen, (parse(fault, chosen.hosts()),))
    flown, well = fly(setting, requests, seed), fly(Setting(chosen), requests, seed)
    records = received_records(setting, flown, seed)
    rows = newest(rows_of(shuffled(records, random.Random(seed)) if moved else records))
    every = requests_of(rows)
    typical = fit(every)
    assert typical is not None
    late = causes(every, typical).slow
    slow = [row for row, is_late in zip(rows, late.tolist(), strict=True) if is_late]
    others = [row for row, is_late in zip(rows, late.tolist(), strict=True) if not is_late]
    of_slow = requests_of(slow)
    found = causes(of_slow, typical)
    paused_requests = attribute_pauses(of_slow, paused(slow), found, requests_of(others), paused(others), 8)
    truly = set()
    for before, after in zip(well.flights, flown.flights, strict=True):
        truth = record(chosen, after)
        cost = excess(record(chosen, before), truth)
        if cost.ttft_ns is not None and truth.ttft_ns is not None and cost.slow(truth.ttft_ns - cost.ttft_ns):
            truly.add(truth.request_id)
    by_host = {host: [str(slow[place].client_request_id) for place in at] for host, at in paused_requests.by_host()}
    return Judged(by_host, truly, {host: paused_requests.phases(host, found) for host in by_host})


def paused(rows: list[RequestRow]) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    return np.array([[row.prefill_paused_ns or 0, row.decode_paused_ns or 0] for row in rows], np.float64).reshape(-1, 2)


def test_pauses_of_a_decode_host_are_named_in_a_small_fleet() -> None:
    found = judged("split", "host_pause:d0:0.4", requests=400)
    assert list(found.named) == ["d0"]
    assert len(found.truly & set(found.named["d0"])) >= 0.9 * len(found.named["d0"])


@pytest.mark.eval
@pytest.mark.parametrize(
    ("layout", "host", "phases", "share"),
    [
        pytest.param("split", "d0", {"kv_wait", "first_step"}, 0.8, id="D: loads that wait, steps that last"),
        # a request that comes to P after a pause and waits behind the paused ones is reported as waiting in a queue
        pytest.param("split", "p0", {"prefill_queue", "prefill_compute"}, 0.3, id="P"),
        pytest.param("collocated", "e0", {"prefill_queue", "prefill_compute"}, 0.3, id="collocated"),
    ],
)
def test_pauses_of_one_host_are_one_cause(layout: str, host: str, phases: set[str], share: float) -> None:
    found = judged(layout, f"host_pause:{host}:0.4")
    assert list(found.named) == [host]
    assert len(found.truly & set(found.named[host])) >= 0.9 * len(found.named[host])
    assert len(found.truly & set(found.named[host])) >= share * len(found.truly) >= 8 * share
    assert phases <= set(found.phases[host])


@pytest.mark.eval
@pytest.mark.parametrize(
    ("fault", "moved"),
    [
        pytest.param("host_pause:d0:0.4", True, id="the pauses were at other times"),
        pytest.param("slow_prefill:p0:3", False, id="another fault"),
        pytest.param("slow_link:p0>d0:30", False, id="of a link"),
    ],
)
def test_what_pauses_did_not_make_is_not_named_for_them(fault: str, moved: bool) -> None:
    assert judged("split", fault, moved=moved).named == {}


# --- made periods ---------------------------------------------------------------------------------------------------------


def made(requests: int, phases: tuple[str, ...], *, paused_everywhere: bool = False) -> list[RequestRow]:
    """Return 1,500 requests, some slowed by a pause.

    ``requests`` of those at d1 waited 900 ms longer in one of ``phases``, in turn, while its process stood still.
    """
    dice = random.Random(4)
    rows = [usual(number, dice) for number in range(1500)]
    struck = [number for number, row in enumerate(rows) if row.decode_host == "d1"][100::10][:requests]
    for turn, number in enumerate(struck):
        phase = phases[turn % len(phases)]
        longer = tuple(replace(p, duration_ns=p.duration_ns + 900 * MS * (p.phase == phase)) for p in rows[number].phases)
        ttft_ns = (rows[number].ttft_token_ns or 0) + 900 * MS
        rows[number] = replace(rows[number], phases=longer, ttft_token_ns=ttft_ns, decode_paused_ns=850 * MS)
    if paused_everywhere:
        rows = [replace(row, decode_paused_ns=row.decode_paused_ns or 300 * MS) for row in rows]
    return rows


def named(folder: Path, rows: list[RequestRow]) -> list[TailCause]:
    causes = explained_period(scope_of(folder, rows).ttft).causes
    assert causes is not None
    return [each for each in causes.named if each.why]


def test_a_host_pause_is_named_once_with_its_phases(tmp_path: Path) -> None:
    rows = made(14, ("unattributed", "first_step"))
    (found,) = named(tmp_path / "a", rows)
    assert (found.why, found.place, found.requests, found.excess_ns) == ("host_pause", "d1", 14, 850 * MS)
    assert set(found.phases) == {"unattributed", "first_step"}
    assert found.phase == found.phases[0]
    output = " ".join(summary(scope_of(tmp_path / "b", rows)))
    assert "host_pause at d1 (the engine's process paused for 850 ms on average, in " in output
    assert output.count(" at d1 ") == 1, "one cause, not one a phase"


def test_pauses_that_everybody_has_or_too_few_have_are_no_cause(tmp_path: Path) -> None:
    assert named(tmp_path / "everybody", made(14, ("first_step",), paused_everywhere=True)) == []
    assert named(tmp_path / "few", made(4, ("first_step",))) == []


# --- what is kept of one request ------------------------------------------------------------------------------------------


def pause(role: Role, at_ms: float, lasted_ms: float, why: str = "queued") -> ProcessEvent:
    return ProcessEvent(
        process=process(role),
        source=Source.PLUGIN,
        at_unix_ns=EPOCH + round(at_ms * MS),
        kind=ProcessEventKind.PAUSED,
        engine="vllm",
        pid=1,
        process_kind="core",
        detail=why,
        duration_ns=round(lasted_ms * MS),
    )


def kept(records: Sequence[Item], *doings: ProcessEvent | Iteration) -> tuple[int | None, int | None]:
    """Return the pauses kept for the only request of ``records``, in ms at P and D."""
    stitcher, activity = Stitcher(), Activity()
    for offset, each in enumerate(records):
        stitcher.add(each, offset, EPOCH)
    for doing in doings:
        activity.take(doing)
    groups = {id(d.group): d.group for s in range(0, 1000, 50) for d in stitcher.sweep(EPOCH + s * SECOND)}
    (group,) = groups.values()
    row = replace(usual(0, random.Random(1)), prefill_instance=None, decode_instance=None)
    path = path_of(group)
    row = replace(row, decode_instance=path.decode.instance if path.decode else None)
    row = replace(row, prefill_instance=path.prefill.instance if path.prefill else None)
    assert has_pause_data(row, activity) is bool(doings)
    row = with_pauses(row, path, activity)
    return tuple(None if ns is None else round(ns / MS) for ns in (row.prefill_paused_ns, row.decode_paused_ns))  # type: ignore[return-value]


def split() -> list[Record]:
    """Return a split request.

    P has it from 10 to 110 ms, D from 120 ms on, with a first token after 200 ms.
    """
    edge = exchange(Role.EDGE, 0, 1000, ttft_ms=330)
    p = exchange(Role.PREFILL, 10, 100, parent=edge, ttft_ms=None)
    return [edge, p, exchange(Role.DECODE, 120, 800, parent=edge, ttft_ms=200)]


@pytest.mark.parametrize(
    ("doings", "ms"),
    [
        pytest.param([], (None, None), id="none known"),
        pytest.param([pause(Role.DECODE, 150, 80)], (None, 80), id="D's"),
        pytest.param([pause(Role.PREFILL, 50, 30)], (30, None), id="P's"),
        pytest.param([pause(Role.DECODE, 100, 80)], (None, 60), id="only while it was there"),
        pytest.param([pause(Role.DECODE, 300, 80)], (None, 20), id="only before its first token"),
        pytest.param([pause(Role.DECODE, 400, 80)], (None, None), id="not while it streamed"),
        pytest.param([pause(Role.DECODE, 150, 50), pause(Role.DECODE, 180, 50)], (None, 80), id="no time counts twice"),
    ],
)
def test_time_before_the_first_token_counts(doings: list[ProcessEvent], ms: tuple[int | None, int | None]) -> None:
    assert kept(split(), *doings) == ms


def test_engines_without_a_proxy_are_looked_at_by_their_own_times() -> None:
    edge = exchange(Role.EDGE, 0, 1000, ttft_ms=330)
    spans: list[Item] = [edge, engine(Role.DECODE, 120, 800, parent=edge, ttft_ms=200)]
    plugin: list[Item] = [edge, times(Role.DECODE, 120, 100, 200, 800, parent=edge)]
    for records in (spans, plugin):
        assert kept(records, pause(Role.DECODE, 150, 80)) == (None, 80)


def test_a_pause_without_a_reason_in_a_step_that_computed_is_the_steps() -> None:
    """A step that computes explains a pause without a reason.

    A long step may keep the interpreter's lock; then the watching thread is late.
    """
    step = Iteration(
        process=process(Role.PREFILL),
        source=Source.PLUGIN,
        started_unix_ns=EPOCH + 20 * MS,
        duration_ns=80 * MS,
        steps=1,
        full=True,
        prefill_tokens=4000,
        usual_ns=1 * MS,
    )
    assert kept(split(), step, pause(Role.PREFILL, 25, 70, "held"))[0] in (None, *range(25))
    assert kept(split(), step, pause(Role.PREFILL, 25, 70, "throttled"))[0] == 70
