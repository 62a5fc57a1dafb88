"""Measure how narrow clock bounds are, and what it costs to learn them.

The fleets have hosts whose clocks are two seconds apart and drift by 50 ppm.
A width is that of a pair of hosts, taken every five seconds for every pair. The pair's rate is known by then from two and a
half minutes with about one request a second.
``both``: the width over the sum of the quickest messages of both directions. No bound below 1 always holds the truth.
``twice``: the width over twice the quickest message of the slower direction.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from random import Random
from statistics import median
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).parents[1]))  # as pytest does: the fleet is a module of the tests

from builders.clock_fleet import Width, fly, widths
from handrail_collector.stitch.clocks import HostClocks
from handrail_sim.emulator import scenario as scenarios

SEEDS: Final = range(6)
REQUESTS: Final = 900
US, MS, SECOND = 1_000, 1_000_000, 1_000_000_000

MIXES: Final[Mapping[str, Mapping[str, Any]]] = {
    "steady": {},  # every hop takes exactly 200 us
    "far": {"hop_ns": 20 * MS, "hop_spread_ns": 500 * US},
    "spread_50us": {"hop_spread_ns": 50 * US},
    "spread_300us": {"hop_spread_ns": 300 * US},
    "spread_2ms": {"hop_ns": 100 * US, "hop_spread_ns": 2 * MS},
}


def _widths(changed: Mapping[str, Any], *, plugin: bool) -> list[Width]:
    scenario = replace(scenarios.load("split"), **changed)
    return [each for seed in SEEDS for each in widths(fly(scenario, seed, REQUESTS, plugin=plugin), from_ns=150 * SECOND)]


def _us_a_message() -> float:
    """Measure the process time of one message, in us.

    Two hosts exchange twenty messages a second; each takes 300 us and up to 3 ms more.
    """
    random, known = Random(1), HostClocks()
    messages = []
    for number in range(10_000):
        at, took = number * 50 * MS, 300 * US + round(random.random() * 3 * MS)
        messages.append(((("p", at), ("d", at + took)), (("d", at + 20 * MS), ("p", at + 20 * MS + took)))[number % 2])
    begin = time.process_time_ns()
    for cause, effect in messages:
        known.before(cause, effect)
    return (time.process_time_ns() - begin) / len(messages) / 1000


def _row(name: str, value: float, unit: str, budget: float | None = None) -> dict[str, Any]:
    ratio = None if budget is None else value / budget
    met = None if ratio is None else ratio <= 1
    return {"name": name, "value": value, "unit": unit, "budget": budget, "ratio": ratio, "met": met}


def run() -> list[dict[str, Any]]:
    """Return every figure of this benchmark. Takes about a minute."""
    rows = [_row("clocks_us_per_message", _us_a_message(), "us")]
    for name, changed in MIXES.items():
        for plugin in (True, False):
            found = _widths(changed, plugin=plugin)
            what = f"clocks_{name}_{'plugin' if plugin else 'proxies'}"
            steady = name in ("steady", "far")
            rows += [
                _row(f"{what}_both_p50", median(each.of_both for each in found), "ratio"),
                _row(f"{what}_both_max", max(each.of_both for each in found), "ratio"),
                _row(f"{what}_twice_max", max(each.of_twice for each in found), "ratio", 1 if steady else None),
                _row(f"{what}_twice_met", sum(each.of_twice <= 1 for each in found) / len(found), "share"),
            ]
    return rows
