"""Streams with stalls and what their engine did meanwhile, for tests.

Times are in ms after ``EPOCH``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

from builders.records import EPOCH, MS, exchange, process
from handrail.metrics.exponential_histogram import GapSketch
from handrail.records import Exchange, Gaps, Iteration, KvFetch, ProcessEvent, ProcessEventKind, Role, Source, SpanIds
from handrail.records.devices import Device, DeviceKind, DeviceRun, Series
from handrail.stalls import StallWatch, marked
from handrail_collector.batch import rows_of
from handrail_collector.rows import StallRow
from handrail_collector.stitch.engine_activity import Activities
from handrail_collector.stitch.evidence import Item
from handrail_collector.stitch.stitcher import SECOND, StitchSettings

DATA = Path(__file__).parents[1] / "data"


def stream(
    role: Role,
    at_ms: float,
    ttft_ms: float,
    gaps_ms: Iterable[float],
    *,
    held_ms: Iterable[tuple[float, float]] = (),
    turns: Iterable[tuple[float, str]] = (),
    **more: Any,
) -> Exchange:
    """Build an exchange with these gaps after its first token.

    Includes the stalls that a proxy finds in them.
    """
    gaps = [round(gap * MS) for gap in gaps_ms]
    ends = list(accumulate(gaps, initial=round(ttft_ms * MS)))[1:]
    sketch, watch = GapSketch(), StallWatch()
    sketch.extend(gaps)
    watch.extend(gaps, ends)
    stalls = watch.stalls()
    if stalls is not None:
        held = [(round(begin * MS), round(end * MS)) for begin, end in held_ms]
        stalls = marked(stalls, held, [(round(at * MS), turn) for at, turn in turns])
    reported_gaps = Gaps(unit="chunk", count=len(gaps), sum_ns=sum(gaps), max_ns=max(gaps), max_at_ns=0, sketch=sketch.encode())
    last_ms = (ends[-1] if ends else 0) / MS
    return exchange(
        role, at_ms, last_ms + 1, ttft_ms=ttft_ms, gaps=reported_gaps, stalls=stalls, ttft_text_ns=round(ttft_ms * MS), **more
    )


def step(at_ms: float, took_ms: float, *, usual_ms: float = 10, landed: bool = False, **more: Any) -> Iteration:
    """Build a long step of D with all its fields."""
    return Iteration(
        process=process(Role.DECODE),
        source=Source.PLUGIN,
        started_unix_ns=EPOCH + round(at_ms * MS),
        duration_ns=round(took_ms * MS),
        steps=1,
        full=True,
        usual_ns=round(usual_ms * MS),
        kv_landing_steps=int(landed),
        **more,
    )


def seconds(first_ms: float, last_ms: float, **more: Any) -> list[Iteration]:
    """Build per-second rollups of a time span."""
    return [
        Iteration(
            process=process(Role.DECODE),
            source=Source.PLUGIN,
            started_unix_ns=EPOCH + round(at * MS),
            duration_ns=1000 * MS,
            steps=90,
            decode_tokens=90,
            **more,
        )
        for at in range(round(first_ms), round(last_ms), 1000)
    ]


def pause(
    at_ms: float, for_ms: float, why: str = "throttled", kind: str = "core", role: Role = Role.DECODE, instance: str | None = None
) -> ProcessEvent:
    return ProcessEvent(
        process=process(role, instance),
        source=Source.PLUGIN,
        at_unix_ns=EPOCH + round(at_ms * MS),
        kind=ProcessEventKind.PAUSED,
        pid=7,
        process_kind=kind,
        detail=why,
        duration_ns=round(for_ms * MS),
    )


def landing(at_ms: float, rid: str = "other", tokens: int = 2000) -> KvFetch:
    return KvFetch(
        process=process(Role.DECODE),
        source=Source.PLUGIN,
        ids=SpanIds(trace_id="9" * 32, span_id=f"{round(at_ms * 1000) + 1:016x}"),
        engine="vllm",
        request_id=rid,
        known_unix_ns=EPOCH + round(at_ms * MS),
        posted_ns=0,
        noticed_ns=5 * MS,
        ended_ns=5 * MS,
        tokens_wanted=tokens,
    )


def clock(at_ms: float, hertz: float, *reasons: str) -> DeviceRun:
    at = EPOCH + round(at_ms * MS)
    return DeviceRun(
        process=process(Role.DECODE),
        source=Source.NVML,
        device=Device(kind=DeviceKind.GPU, key="GPU-1", engine=process(Role.DECODE).instance),
        at=[at],
        took_ns=[0],
        series=[Series("clock_hertz", "sm", 0, [hertz]), *(Series("throttled", reason, 0, [1.0]) for reason in reasons)],
    )


def gc_of_case_B12() -> tuple[dict[str, int], list[Any]]:
    """Return the expected result of case B12, and its records.

    The records are the streams, the pauses, and what the engine did, in the order in which they become known.
    """
    case = json.loads((DATA / "replay/join/B12_gc_stalls.json").read_text())
    itl, gap_ms = case["itl_ms"], case["gap_ms"]
    ends = [second * 1000 for second in case["stalls_at"]]
    made: list[Any] = [*seconds(0, 8000), *(clock(at, 2e9) for at in range(0, 8000, 100))]
    made += [pause(end, gap_ms - itl, "gc", "api") for end in ends]
    for number in range(case["streams"]):
        gaps: list[float] = []
        at = first = 100.0 + number
        while at < 6000:
            gaps.append(gap_ms if any(at < end <= at + itl for end in ends) else itl)
            at += gaps[-1]
        made.append(stream(Role.DECODE, 0, first, gaps, rid=f"req-{number}", trace=f"t{number}"))
    return case["expected"], made


def stalls_of(records: Iterable[Item | Activities]) -> list[StallRow]:
    """Return the final stall rows of these records.

    All records are received at once, the engines' activities first.
    """
    at = EPOCH + 3600 * SECOND
    ordered = sorted(records, key=lambda record: isinstance(record, Exchange))
    stalls: list[StallRow] = []
    for _ in rows_of(((at, record) for record in ordered), StitchSettings(), stalls=stalls):
        pass
    last = {(row.request_id, row.number): row for row in stalls}
    return sorted(last.values(), key=lambda row: (row.started_unix_ns, row.request_id, row.number))


def by_cause(stalls: Iterable[StallRow]) -> Mapping[str, int]:
    found: dict[str, int] = {}
    for stall in stalls:
        found[stall.cause] = found.get(stall.cause, 0) + 1
    return found
