"""Stalls with few streams and little history.

The engine is as small as that of tests/vllm and computes bursts of long prompts.
"""

from __future__ import annotations

from bisect import bisect
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from random import Random
from typing import Any

import pytest

from builders.records import EPOCH, MS
from builders.stalls import seconds, step, stream
from handrail.records import Exchange, Role
from handrail_collector.batch import rows_of
from handrail_collector.explain.stalls import stall_rows as desk
from handrail_collector.explain.stalls.cause import Base, base_of
from handrail_collector.explain.stalls.stall_rows import BASE_KEPT_NS
from handrail_collector.rows import StallRow
from handrail_collector.stitch.engine_activity import EngineTimeline

LASTS_MS, STEP_MS, PROMPT_MS, PROMPT = 20_000, 7.0, 131.0, 1900
BURSTS_MS = range(2500, LASTS_MS, 3100)


def steps(random: Random, noise: float, later_ms: int = 0, slow: float = 1) -> Iterator[tuple[float, float, int]]:
    """Yield steps: begin, length, prompt tokens.

    A share of ``noise`` of them took longer without a known reason.
    Half of the prompts took ``slow`` times as long, as happens where something else wants the processors. On tests/vllm's
    engine a token took 55 microseconds, or 200 to 700: two states and little between.
    """
    waiting = [float(burst + later_ms) for burst in BURSTS_MS for _ in range(4)]
    at = 0.0
    while at < LASTS_MS:
        tokens, took = 0, STEP_MS
        if waiting and waiting[0] <= at:
            tokens, took, _ = PROMPT, PROMPT_MS * (slow if random.random() < 0.5 else 1), waiting.pop(0)
        took += random.uniform(15, 60) if random.random() < noise else random.uniform(-0.5, 0.5)
        yield at, took, tokens
        at += took


def received(
    noise: float = 0.0, at_once: int = 3, tokens_each: int = 500, moved_ms: int = 0, slow: float = 1
) -> list[tuple[int, Any]]:
    """Return streams and the engine's steps in the order in which they become known.

    ``moved_ms``: the steps are those of another engine, whose bursts came that much later.
    """
    random = Random(1)
    ran = list(steps(random, noise, slow=slow))
    ends = [begin + took for begin, took, _ in ran]
    if moved_ms:
        ran = list(steps(Random(moved_ms), noise, moved_ms))
    made: list[Any] = [step(at, took, usual_ms=STEP_MS, prefill_tokens=tokens) for at, took, tokens in ran if took > 17.5]
    for second in range(0, LASTS_MS, 1000):
        prompts = sum(tokens for at, _, tokens in ran if second <= at < second + 1000)
        made += [replace(each, prefill_tokens=prompts) for each in seconds(second, second + 1)]
    for lane in range(at_once):
        at, number = 100.0 + 3 * lane, 0
        while (first := bisect(ends, at + 20)) + tokens_each < len(ends):
            times = [end + random.uniform(1, 3) for end in ends[first : first + tokens_each]]
            gaps = [later - earlier for earlier, later in pairwise(times)]
            made.append(stream(Role.DECODE, at, times[0] - at, gaps, rid=f"req-{lane}-{number}", trace=f"{lane}{number}"))
            at, number = times[-1] + 20, number + 1
    return sorted(((known(each), each) for each in made), key=lambda pair: pair[0])


def known(record: Any) -> int:
    if isinstance(record, Exchange):
        return record.arrival_unix_ns + (record.duration_ns or 0) + 2000 * MS
    return int(record.started_unix_ns + record.duration_ns)


def explained_stalls(records: list[tuple[int, Any]]) -> list[StallRow]:
    stalls: list[StallRow] = []
    for _ in rows_of(records, stalls=stalls):
        pass
    return list({(row.request_id, row.number): row for row in stalls}.values())


def in_burst(unix_ns: int) -> bool:
    return any(0 <= unix_ns - EPOCH - at * MS <= 640 * MS for at in BURSTS_MS)


@pytest.mark.parametrize(("noise", "least"), [(0.0, 1.0), (0.01, 0.75)])
def test_bursts_of_long_prompts_are_named_from_the_first_streams_on(noise: float, least: float) -> None:
    """Bursts are named from the first streams on.

    Where other stalls have no known reason, the first ones may stay unknown. Those other stalls are not named.
    """
    rows = explained_stalls(received(noise))
    during = [row for row in rows if in_burst(row.started_unix_ns + row.gap_ns // 2)]
    others = [row for row in rows if row not in during]
    assert len(during) >= 30
    assert Counter(row.cause for row in during)["prefill_coscheduled"] >= least * len(during)
    assert not [row for row in others if row.cause != "unknown"]
    assert len(others) >= (20 if noise else 0)


def test_bursts_are_named_where_half_of_the_steps_take_five_times_as_long() -> None:
    """The answer also says how long so many tokens took in the other half.

    About the first streams little is known yet.
    """
    rows = explained_stalls(received(slow=5, tokens_each=300))
    slow = [row for row in rows if row.gap_ns > 3 * PROMPT_MS * MS]
    assert len(slow) >= 15
    assert sum(row.cause == "prefill_coscheduled" for row in slow) >= 0.9 * len(slow)
    assert {row.cause for row in rows} <= {"prefill_coscheduled", "unknown"}
    stall_rows = [row for row in slow if row.evidence[0].endswith(" for as many)")]
    assert len(stall_rows) >= 0.8 * len(slow)  # the first stalls come before the quicker steps are known


@pytest.mark.parametrize("noise", [0.0, 0.01])
def test_the_same_bursts_at_other_times_are_not_named(noise: float) -> None:
    """20 s of history teach little.

    None of these stalls coincides with a burst. Such a stall would get the burst as its cause, and nothing would show the
    mistake.
    """
    rows = [row for moved_ms in range(650, 2450, 90) for row in explained_stalls(received(noise, moved_ms=moved_ms))]
    assert len(rows) >= 600
    assert sum(row.cause != "unknown" for row in rows) <= 0.02 * len(rows)


def test_what_stalls_are_compared_with_is_made_once_in_some_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison windows are made once in some seconds.

    Making them takes a while, and an engine may have fifty stalled streams a second.
    """
    made: list[int] = []

    def counted(doings: EngineTimeline, at_unix_ns: int) -> Base:
        made.append(at_unix_ns)
        return base_of(doings, at_unix_ns)

    monkeypatch.setattr(desk, "base_of", counted)
    rows = explained_stalls(received(at_once=12, tokens_each=2000))
    slots = {row.started_unix_ns // BASE_KEPT_NS for row in rows}
    assert len({row.request_id for row in rows}) == 12
    assert len(slots) >= 3
    assert len(made) <= 2 * len(slots)
