"""Measure how fast ``handrail`` answers questions about ten million requests.

The questions are the first and the exact answer of ``handrail explain``, ``requests --sort ttft`` and ``trace ID``.
Each runs in a cold process, as when a person types it. ``HANDRAIL_BENCH_REQUESTS`` sets another number of requests.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # as pytest does: the synthetic store is a module of the tests

from builders.large_store import Made, fill
from handrail_collector.store.layout import HOUR_NS
from handrail_collector.store.maintenance import Upkeep, UpkeepSettings
from handrail_collector.store.publish import StorePublisher

_REQUESTS = int(os.environ.get("HANDRAIL_BENCH_REQUESTS", 10_000_000))
_TIMES = 3
_COMMAND = """
import re, sys, time
from handrail_cli.main import main
assert main(sys.argv[1:]) == 0
# the peak since exec: a child's ru_maxrss counts its parent's memory too
peak = re.search(r"VmHWM:\\s*(\\d+) kB", open("/proc/self/status").read())
print(time.process_time(), peak[1], file=sys.stderr)
"""
_FLAGS = ("--since", "2020-01-01T00:00:00Z", "--until", "2040-01-01T00:00:00Z")


@dataclass(frozen=True, slots=True)
class Ran:
    """One finished command: wall and processor seconds, peak memory, output."""

    seconds: float
    cpu_seconds: float
    peak_bytes: int
    output: str


def run() -> list[dict[str, Any]]:
    """Return the figures with their budgets (DESIGN section 13)."""
    made = Made(requests=_REQUESTS)
    with tempfile.TemporaryDirectory() as folder:
        client_id, _ = fill(Path(folder), made)
        rollups = _rolled(Path(folder), made)
        data = ("--data", folder)
        commands = {
            "explain_first": (["explain", *data, *_FLAGS, "--fast", "--json"], 2.0),
            "explain_exact": (["explain", *data, *_FLAGS, "--exact", "--json"], 10.0),
            "requests_sort_ttft": (["requests", *data, "--sort", "ttft", "--json"], 1.0),
            "trace_by_client_id": (["trace", client_id, *data, "--json"], 1.0),
        }
        figures = [figure for name, (command, budget) in commands.items() for figure in _figures(name, command, budget, made)]
    return [*figures, *rollups]


def _figures(name: str, command: list[str], budget: float, made: Made) -> list[dict[str, Any]]:
    runs = [_ran(command) for _ in range(_TIMES)]
    if command[0] == "explain":
        _judged(json.loads(runs[0].output), made)
    assert runs[0].output, name
    best = min(runs, key=lambda each: each.seconds)
    return [
        _figure(f"{name}_over_{made.requests / 1e6:g}m", best.seconds, "s", budget),
        _figure(f"{name}_cpu", min(each.cpu_seconds for each in runs), "s", None),
        _figure(f"{name}_peak_memory", max(each.peak_bytes for each in runs) / 2**20, "MiB", None),
    ]


def _judged(answer: dict[str, Any], made: Made) -> None:
    """Check that the answer is right: a fast wrong answer does not count."""
    (scope,) = answer["scopes"]
    assert scope["requests"] == made.requests // made.hours * made.hours, scope["requests"]
    assert ("prefill_host", made.bad_host) in [
        (c["dimension"], c["value"]) for c in scope["ttft"]["concentrations"] if c["stands_out"]
    ]
    if answer["exact"]:
        assert ("prefill_queue", made.bad_host) in [(n["phase"], n["place"]) for n in scope["ttft"]["causes"]["named"]]


def _ran(command: list[str]) -> Ran:
    began = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", _COMMAND, *command], capture_output=True, text=True, check=True)
    seconds = time.perf_counter() - began
    cpu_seconds, peak_kib = done.stderr.split()[-2:]
    return Ran(seconds, float(cpu_seconds), int(peak_kib) * 1024, done.stdout)


def _rolled(folder: Path, made: Made) -> list[dict[str, Any]]:
    publisher = StorePublisher(folder)
    publisher.open()
    upkeep = Upkeep(publisher, UpkeepSettings(rollups=True), lambda: made.end_unix_ns + 2 * HOUR_NS)
    upkeep.run_pass()
    files = [file for publish in publisher.publishes() for file in publish.files]
    publisher.close()
    assert upkeep.stats.rollups.made == made.hours, upkeep.stats
    size = sum(file.bytes for file in files if file.table.value == "rollups")
    return [
        _figure("rollup_seconds_an_hour", upkeep.stats.rollups.made_ns / 1e9 / made.hours, "s", None),
        _figure("rollup_bytes_share", size / sum(file.bytes for file in files), "ratio", None),
    ]


def _figure(name: str, value: float, unit: str, budget: float | None) -> dict[str, Any]:
    ratio = None if budget is None else value / budget
    return {
        "name": name,
        "value": value,
        "unit": unit,
        "budget": budget,
        "ratio": ratio,
        "met": None if ratio is None else ratio <= 1,
    }
