"""docs/gpu.md holds the code's table of counters.

``pytest --update`` rewrites it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from handrail.device_counters.gpu import ALL, BY_NAME, GpuCounter, NvmlCall, NvmlField

PAGE = Path(__file__).parents[3] / "docs" / "gpu.md"
BEGIN, END = "<!-- counters -->\n", "<!-- /counters -->"


def test_the_page_has_the_table(request: pytest.FixtureRequest) -> None:
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    kept, _, after = rest.partition(END)
    if request.config.getoption("--update"):
        PAGE.write_text(before + BEGIN + table() + END + after, encoding="utf-8")
        return
    assert kept == table(), "docs/gpu.md differs from device_counters/gpu.py: run this test with --update"


def table() -> str:
    lines = ["| counter | unit | what it is | every | read by | absent |", "|---|---|---|---|---|---|"]
    for counter in ALL:
        row = BY_NAME.get(counter.name)
        label = f" by {counter.label}" if counter.label else ""
        every, how = (row.pace.value, _how(row)) if row is not None else ("–", "–")
        lines.append(f"| `{counter.name}`{label} | {counter.unit} | {counter.help} | {every} | {how} | {counter.absent} |")
    return "\n".join(lines) + "\n"


def _how(row: GpuCounter) -> str:
    found: dict[str, None] = {}
    for value in row.values:
        for way in value.reads:
            if isinstance(way, NvmlCall):
                found[way.function.removeprefix("nvmlDeviceGet")] = None
            else:
                found[f"field {way.id}" if isinstance(way, NvmlField) else f"GPM {way.id}"] = None
    return ", ".join(found)
