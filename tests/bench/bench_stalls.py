"""Measure what stall detection costs.

The costs: each gap of a stream at the proxy, each wake-up of the thread that detects pauses, and each stall at the collector.
``make bench-stalls`` judges whether the reported causes are right.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from statistics import median
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).parents[1]))  # as pytest does, so that ``bench`` is one package for both

from bench.stalls.referee import fly, received_records
from bench.stalls.scenes import SCENES
from handrail.plugin.pauses import PauseWatch
from handrail.records import Exchange
from handrail.stalls import BLOCK, StallWatch
from handrail_collector.batch import rows_of
from handrail_collector.rows import StallRow

_REPEATS: Final = 7
_GAPS: Final = 512  # gaps in one fold of the proxy (handrail_sidecar/proxy/token_timing.py)
_ROUNDS: Final = 50
_WAKE_UPS: Final = 2_000
_REQUESTS: Final = 150
_SEED: Final = 7


def run() -> list[dict[str, Any]]:
    """Return the figures, each the median of repeats."""
    random = Random(_SEED)
    quick = [random.randrange(8_000_000, 12_000_000) for _ in range(_GAPS)]
    slow = [random.randrange(25_000_000, 35_000_000) for _ in range(_GAPS)]  # above 20 ms, so every block is sorted
    stalling = [400_000_000 if place % (BLOCK // 8) == 0 else gap for place, gap in enumerate(quick)]
    return [
        _figure("stalls_of_a_stream_per_gap", _watch_ns(quick), "ns", 300.0),
        _figure("stalls_of_a_slow_stream_per_gap", _watch_ns(slow), "ns", 300.0),
        _figure("stalls_of_a_stream_with_one_in_8_per_gap", _watch_ns(stalling), "ns", 1000.0),
        _figure("guest_pause_wake_up", _wake_up_us(), "us", None),
        _figure("stall_explained", _explained_us(), "us", None),
    ]


def _watch_ns(gaps: list[int]) -> float:
    """Measure the two numbers that the proxy keeps for each gap, and their fold.

    The fold runs when many have been collected.
    """
    ends: list[int] = []
    for gap in gaps:
        ends.append((ends[-1] if ends else 0) + gap)

    def loop() -> None:
        for _ in range(_ROUNDS):
            watch, kept = StallWatch(), []
            for end in ends:
                kept.append(end)  # noqa: PERF402 (one by one, as they come)
            watch.extend(gaps, kept)
            watch.stalls()

    return _cpu_us(loop) / (_ROUNDS * len(gaps)) * 1000


def _wake_up_us() -> float:
    """Measure one wake-up without its sleep. There are ten a second."""
    watch = PauseWatch(lambda event: None)
    watch.begin()
    try:
        due_ns = time.monotonic_ns() + 10**15  # the deadline is never late

        def loop() -> None:
            for _ in range(_WAKE_UPS):
                watch.woke(due_ns)

        return _cpu_us(loop) / _WAKE_UPS
    finally:
        watch.end()


def _explained_us() -> float:
    """Measure the cost of explaining one stall.

    It is the difference between a run whose stalls are explained and the same run without stall events, divided by the number
    of stalls.
    """
    setting = next(scene.setting for scene in SCENES if scene.name == "kv_landing")
    records = received_records(setting, fly(setting, _REQUESTS, _SEED), _SEED)
    silent = [(at, replace(one, stalls=None) if isinstance(one, Exchange) else one) for at, one in records]
    stalls: list[StallRow] = []

    def report(given: list[tuple[int, Any]]) -> Callable[[], None]:
        def loop() -> None:
            stalls.clear()
            for _ in rows_of(given, stalls=stalls):
                pass

        return loop

    bare = _cpu_us(report(silent), 3)
    return (_cpu_us(report(records), 3) - bare) / len(stalls)


def _cpu_us(loop: Callable[[], None], repeats: int = _REPEATS) -> float:
    spent = []
    for _ in range(repeats):
        begin = time.process_time_ns()
        loop()
        spent.append((time.process_time_ns() - begin) / 1000)
    return median(spent)


def _figure(name: str, value: float, unit: str, budget: float | None) -> dict[str, Any]:
    return {
        "name": name,
        "value": round(value, 3),
        "unit": unit,
        "budget": budget,
        "ratio": None if budget is None else round(value / budget, 3),
        "met": None if budget is None else value <= budget,
    }
