"""docs/fleet.md has a row for every fault, generated from the table.

``pytest --update`` rewrites it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from handrail_sim.emulator.faults import FAULTS
from handrail_sim.emulator.scenario import bundled

PAGE = Path(__file__).parents[2] / "docs" / "fleet.md"
MARK = "<!-- faults -->"


def table() -> str:
    rows = [f"| `{name}` | {kind.place.value} | {kind.size} | {kind.effect} |" for name, kind in FAULTS.items()]
    return "\n".join(["| name | place | size | effect |", "|---|---|---|---|", *rows])


def test_the_page_has_every_fault_and_scenario(request: pytest.FixtureRequest) -> None:
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(MARK + "\n")
    after = rest[rest.index("\nClock faults") :]
    page = f"{before}{MARK}\n\n{table()}\n{after}"
    if request.config.getoption("--update"):
        PAGE.write_text(page, encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == page
    assert all(f"`{name}`" in page for name in bundled())
