"""Measure what GPU sampling costs and how punctual it is.

Eight fake H100s answer, and their calls take realistic times (``tests/nvml/measured.py``).
Two figures for comparison: a loop that only makes the calls of a tick, and a loop that only sleeps as often through ctypes.
Every sampler pays at least that much.
The processor time covers the whole process, the double included.
The double sleeps where a driver may spin. The total time of the calls is given too: it bounds what a spinning driver would add.
``tests/gpu/run.sh`` takes the figures on a real GPU.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # as pytest does: the double is a module of the tests

from nvml.build import CannotBuild, build
from nvml.child import Double
from nvml.measured import realistic

_SECONDS = 20.0
_RUNS = 7  # on a shared machine the cost of a wake-up changes by the minute
_HUNG = "GPU-fake-3 clock_hertz sm"
_BUDGET_PERCENT = 2.0
_MOST_MISSED = 1


def run() -> list[dict[str, Any]]:
    """Return the figures: percent of a core, microseconds a sample, periods missed."""
    with tempfile.TemporaryDirectory(prefix="handrail-bench-") as name:
        try:
            double = Double(build(Path(name)), Path(name))
        except CannotBuild as reason:
            print(f"gpu: not measured: {reason}", file=sys.stderr)
            return []
        runs = [double.call("nvml.measured:cost", realistic(), 100.0, _SECONDS / 2) for _ in range(_RUNS)]
        bare = double.call("nvml.measured:bare", realistic(), _SECONDS / 2)
        sleeping = double.call("nvml.measured:sleeping", realistic(), _SECONDS / 2)
        hundred = double.call("nvml.measured:cost", realistic(), 10.0, _SECONDS)
        quiet = _worst(double.call("nvml.measured:gaps", realistic(), 15.0))
        hung = _worst(double.call("nvml.measured:gaps", realistic().add("at 5 gpu 3 hang ClockInfo 5"), 15.0))
    runs.sort(key=lambda run: run["core"])
    ten = runs[_RUNS // 2]
    return [
        _figure(f"gpu: 8 at 10 Hz, of a core, median of {_RUNS}", ten["core"] * 100, "%", _BUDGET_PERCENT),
        _figure(f"gpu: lowest of the {_RUNS}", runs[0]["core"] * 100, "%", None),
        _figure(f"gpu: highest of the {_RUNS}", runs[-1]["core"] * 100, "%", None),
        _figure("gpu: of that, the calls of ticks alone", bare * 100, "%", None),
        _figure("gpu: of that, sleeping as often and nothing else", sleeping * 100, "%", None),
        _figure("gpu: 8 at 10 Hz, inside calls", ten["inside"] * 100, "%", None),
        _figure("gpu: 8 at 10 Hz, a sample", ten["core"] / ten["samples"] * 1e6, "us", None),
        _figure("gpu: 8 at 100 Hz, of a core", hundred["core"] * 100, "%", None),
        _figure("gpu: 8 at 100 Hz, a sample", hundred["core"] / hundred["samples"] * 1e6, "us", None),
        _figure("gpu: 8 at 100 Hz, samples", hundred["samples"], "1/s", None),
        _figure("gpu: longest gap, nothing hangs", quiet, "periods", None),
        _figure("gpu: longest gap of others, one hangs 5 s", hung, "periods", None),
        _figure("gpu: periods missed by others, one hangs 5 s", max(0, round(hung) - 1), "", _MOST_MISSED),
    ]


def _worst(found: dict[str, Any]) -> float:
    gaps: dict[str, float] = found["longest"]
    return max(gap for key, gap in gaps.items() if key != _HUNG)


def _figure(name: str, value: float, unit: str, budget: float | None) -> dict[str, Any]:
    return {
        "name": name,
        "value": round(value, 3),
        "unit": unit,
        "budget": budget,
        "ratio": None if budget is None else round(value / budget, 3),
        "met": None if budget is None else value <= budget,
    }
